"""config.extra: hyperparameters that a user's own config file declares.

    @dataclasses.dataclass(frozen=True)
    class Own:
      decay: float = field(0.9, 'what a step keeps', low=0.0, high=1.0)

    config = schema.declare_extra(schema.default(), Own())  # or a dict

then config.extra.decay = 0.8, or --config.extra.decay=0.8: locked, typed,
within its bounds. The section of a mixer of one's own (models/register.py)
stands there too, under the mixer's name. Code reads schema.Config.extra, a
mixer the same as `extra` of the schema.Model that it is given.

A value is bool, int, float or str; a dataclass or a dict is a section of them.
Checkpoints hold the values, not the classes: where no file declared anything,
what a checkpoint says is taken as it is.
"""

from collections.abc import Mapping
import dataclasses
import keyword
from typing import Any

from paraxis.configs.base import field as field_lib
from paraxis.configs.base import mixers
from paraxis.configs.base.errors import UserError

NAME = 'extra'
_KINDS = (bool, int, float, str)
# {name: dataclasses.Field, or the same of a section}
_own: dict[str, Any] = {}  # of the config that was loaded last
_sections: dict[str, Any] = {}  # of registered mixers
_classes: dict[tuple, type] = {}  # no cache: nothing may ever empty it


def _class(names):
  """A frozen dataclass; one for the same names: equal values are equal."""
  if names not in _classes:
    _classes[names] = dataclasses.make_dataclass('Extra', names, frozen=True)
  return _classes[names]


def _made(values):
  return _class(tuple(values))(**values)


NOTHING: Any = _made({})


def _table(given, path):
  """The fields that a dataclass, a ConfigDict or a dict declares."""
  if dataclasses.is_dataclass(given):
    declared = {f.name: f for f in dataclasses.fields(given)}
    values = {n: getattr(given, n, f.default) for n, f in declared.items()}
  elif isinstance(given, Mapping) or hasattr(given, 'to_dict'):
    is_config = hasattr(given, 'to_dict')
    declared, values = {}, given.to_dict() if is_config else dict(given)
  else:
    raise UserError(
      f'{path} is declared by {given!r}: a dataclass or a dict of defaults '
      'declares it.'
    )
  out = {}
  for name, value in values.items():
    here = f'{path}.{name}'
    if not (isinstance(name, str) and name.isidentifier()) or name[0] == '_':
      raise UserError(f'{here}: a name of letters, digits and _ is needed.')
    if keyword.iskeyword(name):
      raise UserError(f'{here}: {name} is a keyword of Python; rename it.')
    if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
      out[name] = _table(value, here)
    elif type(value) not in _KINDS:
      kind = 'nothing' if value is dataclasses.MISSING else type(value).__name__
      raise UserError(
        f'the default of {here} is {kind}; it is to be bool, int, float, str, '
        'or a section of those.'
      )
    else:
      meta = dict(doc='', choices=None, low=None, high=None)
      if name in declared:
        meta |= declared[name].metadata
      # With no bounds but their own: who knows what reads them.
      out[name] = dataclasses.field(default=value, metadata=meta)
      field_lib.check(here, out[name], value)
  return out


def forget():
  """Nothing but the sections of registered mixers is declared."""
  _own.clear()


def declare(given, before=None):
  """Declares the user's own; UserError if it cannot be read.

  before: a ConfigDict or dict of what a config has already: it stays declared,
    with its values, but for names that `given` has.

  Returns:
    {name: value} of all.
  """
  table = _table(given, NAME)
  if both := sorted(set(table) & set(_sections)):
    raise UserError(f'{NAME}.{both[0]} is the section of a mixer already.')
  before = before.to_dict() if hasattr(before, 'to_dict') else before or {}
  kept = {n: v for n, v in before.items() if n not in table}
  own = {n: v for n, v in kept.items() if n not in _sections}
  # Of a file before the one that was loaded last: as its values say.
  own = {n: _own.get(n) or _table({n: v}, NAME)[n] for n, v in own.items()}
  forget()
  _own.update(own | table)
  return _over(defaults(), kept)


def _over(usual, values):
  """Defaults, with the values of their names in `values`."""
  return {
    name: _over(old, values.get(name, {}))
    if isinstance(old, dict)
    else values.get(name, old)
    for name, old in usual.items()
  }


def section(name, given):
  """Declares the section of a mixer; given: a dataclass, or an instance."""
  _sections[name] = _table(given, f'{NAME}.{name}')


def declared():
  """{name: dataclasses.Field, or the same of a section} of all."""
  return _sections | _own


def defaults(table=None):
  """{name: value} of all that is declared, sections as dicts."""
  table = declared() if table is None else table
  return {
    name: defaults(f) if isinstance(f, dict) else f.default
    for name, f in table.items()
  }


def usual(loaded):
  """`defaults` of the sections of mixers; loaded: of all that is declared."""
  return defaults(declared() if loaded else _sections)


def fields(prefix=f'{NAME}.', table=None):
  """Yields (dotted name, dataclasses.Field) of all that is declared."""
  for name, f in (declared() if table is None else table).items():
    if isinstance(f, dict):
      yield from fields(f'{prefix}{name}.', f)
    else:
      yield f'{prefix}{name}', f


def flat(values, prefix=f'{NAME}.'):
  """{dotted name: value} of what `make` returned."""
  out = {}
  for f in dataclasses.fields(values):
    value = getattr(values, f.name)
    name = f'{prefix}{f.name}'
    nested = dataclasses.is_dataclass(value)
    out |= flat(value, f'{name}.') if nested else {name: value}
  return out


def make(given, pattern, saved=False):
  """A frozen, hashable object of attributes.

  What another file declared than the one that was loaded last is kept as it is:
  a ConfigDict is locked, so that it has no wrong names.

  Args:
    given: a ConfigDict, or {name: value}, sections as dicts; what it lacks
      takes its default.
    pattern: model.pattern. Of a mixer that it lacks there is no section, unless
      one with other values than the defaults: the run has no need of its file.
    saved: of a file: names that nobody declares are kept, nothing is added.

  Raises:
    UserError: an unknown name, or a value that is not valid.
  """
  locked, free = hasattr(given, 'to_dict'), saved or not declared()
  given = given.to_dict() if locked else given
  if locked and _of_another(given, pattern):
    values = _values({}, _sections, NAME, False)
    for name, value in given.items():
      table = {name: _sections[name]} if name in _sections else {}
      values |= _values({name: value}, table, NAME, not table)
  else:
    values = _values(given, declared(), NAME, free)
  usual = _values({}, _sections, NAME, False)
  for name in _idle(pattern) & values.keys():
    if getattr(values[name], '__dict__', None) == vars(usual[name]):
      del values[name]
  return _made(values)


def _of_another(given, pattern):
  """Whether a config is of another file than the one that was loaded last."""
  names = given.keys() - _sections.keys()
  if not names:  # of a file that declares nothing, or not yet
    return not any(letter in pattern for letter in mixers.OWN)
  return not names <= _own.keys()


def _idle(pattern):
  """Names of the sections of registered mixers that a pattern lacks."""
  rows = [mixers.TABLE[n] for n in mixers.OWN if n not in pattern]
  return {row.section.rpartition('.')[2] for row in rows} & _sections.keys()


def _values(given, table, path, free):
  if not isinstance(given, Mapping):
    raise UserError(f'{path} is a section of fields, got {given!r}.')
  out = {} if free else dict(defaults(table))
  for name, value in given.items():
    here = f'{path}.{name}'
    if name not in table and not free:
      raise UserError(
        f'unknown config key {here}.' + field_lib.suggest(name, table)
      )
    out[name] = value if free else _checked(value, table[name], here)
  return {
    name: _made(_values(value, {}, f'{path}.{name}', True))
    if isinstance(value, Mapping)
    else value
    for name, value in out.items()
  }


def _checked(value, f, path):
  if not isinstance(f, dict):
    return field_lib.check(path, f, value)
  if dataclasses.is_dataclass(value):
    return value
  made = _made(_values(value, f, path, False))
  return dataclasses.asdict(made)
