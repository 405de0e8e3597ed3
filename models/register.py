"""Mixers of a user's own config file: one call makes one of the table.

    # mine.py, anywhere; paraxis train --config=mine.py --workdir=RUN
    register.mixer('Q', Ema, section=EmaFields, shrink=small)

The class follows the protocol of models/mixers/protocol.py. Its fields stand in
config.extra under its name (configs/base/extra.py): config.extra.ema.width to
the mixer, --config.extra.ema.width=8 on the command line. After the call the
letter may stand in model.pattern, and every command knows it.

No checkpoint is ever a source of code. Its manifest keeps the name of the file
and a sha256 of its bytes; whoever resumes, decodes or evaluates the run names
the file with --config=, and executes it by that. A class of a notebook's cell
has no file: there the sha256 is of what its code was compiled to.
"""

import dis
import functools
import hashlib
import inspect
import keyword
import re
import sys
import types
from typing import Any

from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.configs.base import field
from paraxis.configs.base import mixers
from paraxis.configs.base import user_file
from paraxis.models import layer
from paraxis.models.mixers import protocol

_REQUIRED = ('__call__', 'init_state', 'mixing_flops')
_CODE = types.FunctionType, type
_LOADS = 'LOAD_GLOBAL', 'LOAD_NAME'
_PLAIN = bool, int, float, complex, str, bytes, type(None), type(...)
_PLACE = '__firstlineno__', '__static_attributes__'  # where a class stands
_PARTS = ('mlp', 'moe', 'wide_moe')  # what a layer holds beside its mixer


def mixer(letter, cls, section=None, shrink=None, word='', like=''):
  """Adds a mixer to those that model.pattern names.

  Args:
    letter: one capital that no other mixer has. A file that is executed again
      replaces its own.
    cls: subclass of protocol.Mixer; `name` is that of its parameters.
    section: a frozen dataclass of fields (configs/base/field.py), or None.
    shrink: (model, few) -> {field of the section: value in a small model}, for
      `paraxis verify`; few(n, target) is about target, a multiple of the
      devices. None: the section stays as it is.
    word: for messages; '': the name of the class.
    like: letter of a mixer of paraxis: the rotary positions, the window or
      chunk and the sections of the config of this one are as of that. '': that
      whose class this one extends, if there is one. A subclass of
      attention.Attention, which is of several kinds, is to name it.

  Raises:
    UserError: in one line, with the file.
  """
  file = user_file.executing() or user_file.caller()
  _check(letter, cls, section, shrink, file)
  like = _like(letter, cls, like)
  if section is not None:
    extra.section(cls.name, section)
  own = file or getattr(sys.modules.get(cls.__module__), '__file__', '') or ''
  layer.MIXERS[letter] = cls
  row = mixers.TABLE[like] if like else mixers.MixerKind('')
  mixers.TABLE[letter] = row._replace(
    word=word or cls.__name__,
    section=f'{extra.NAME}.{cls.name}' if section is not None else '',
    shrink=shrink and _checked(shrink, cls.name),
    like=like,
  )
  mixers.OWN[letter] = mixers.Origin(own, _sha256(own, cls, like))
  for path in _files(own, cls):
    user_file.watch(path)


def _like(letter, cls, like):
  """The letter of the mixer of ours whose row one takes over, or ''."""
  says = f'register.mixer({letter!r}, {cls.__name__})'
  ours = {k: m for k, m in layer.MIXERS.items() if k not in mixers.OWN}
  if like:
    if like not in ours:
      raise errors.UserError(
        f'{says}: like={like!r}: one of {", ".join(ours)} is needed.'
      )
    return like
  base = next((c for c in cls.__mro__ if c in ours.values()), None)
  found = [k for k, m in ours.items() if m is base]
  if base and len(found) > 1:
    rows = ', '.join(f'{k} ({mixers.TABLE[k].word})' for k in found)
    raise errors.UserError(
      f'{says}: {base.__name__} is the class of {rows}: say which positions '
      f'and window it has, like={found[0]!r}.'
    )
  return ''.join(found)


def _checked(rule, name):
  """A shrink rule whose answer is a part of the section, or a UserError."""

  def shrink(model, few):
    found, fields = rule(model, few), extra.declared()[name]
    says = f'the shrink rule of {extra.NAME}.{name}'
    if not isinstance(found, dict) or set(found) - set(fields):
      raise errors.UserError(
        f'{says} gives {found!r}: a dict of {", ".join(fields)} is needed.'
      )
    return {
      key: field.check(f'{says}: {key}', fields[key], value)
      for key, value in found.items()
    }

  return shrink


def _files(file, cls):
  """The file that registers a class, and that which defines it."""
  defined = getattr(sys.modules.get(cls.__module__), '__file__', None)
  return [path for path in dict.fromkeys([file, defined]) if path]


def _sha256(file, cls, like):
  if found := _files(file, cls):
    return user_file.sha256(*found)
  return hashlib.sha256((_text(cls, set()) + like).encode()).hexdigest()


def _text(x, seen, names: Any = None):
  """What an object does, in text that is the same in every process.

  Of functions and classes without a file all that they consist of and refer to;
  other objects count by their name, or that of their type.

  Args:
    seen: ids of the functions and classes whose text was made.
    names: {name: object} of the globals of code.
  """
  every = lambda *xs: f'({", ".join(_text(y, seen, names) for y in xs)})'
  if isinstance(x, _PLAIN):
    return repr(x)
  if isinstance(x, (tuple, list)):
    return every(*x)
  if isinstance(x, dict):
    return every(*x.items())
  if isinstance(x, (set, frozenset)):
    return str(sorted(map(every, x)))
  if isinstance(x, property):
    return every(x.fget, x.fset, x.fdel)
  if isinstance(x, functools.cached_property):
    return every(x.func)
  if isinstance(x, functools.partial):
    return every(x.func, x.args, x.keywords)
  if isinstance(x, types.CodeType):
    code = x.co_code, x.co_exceptiontable, x.co_names, x.co_varnames
    used = {i.argval for i in dis.get_instructions(x) if i.opname in _LOADS}
    used = {name: names[name] for name in sorted(used & names.keys())}
    return every(*code, x.co_freevars, x.co_consts, used)
  while not isinstance(x, _CODE) and hasattr(x, '__wrapped__'):
    x = x.__wrapped__  # of a static method, a jitted function
  if not isinstance(x, _CODE):
    return str(getattr(x, '__name__', type(x).__qualname__))
  if _has_file(x) or id(x) in seen:
    return f'{x.__module__}.{x.__qualname__}'
  seen.add(id(x))
  if isinstance(x, type):
    parts = [item for item in vars(x).items() if item[0] not in _PLACE]
    return every(x.__bases__, parts)
  names = x.__globals__
  inner = [cell.cell_contents for cell in x.__closure__ or ()]
  return every(x.__code__, x.__defaults__, x.__kwdefaults__, inner)


def _has_file(x):
  """Whether the module of a function or class is not that of a notebook."""
  module = x.__module__
  found = getattr(sys.modules.get(module), '__file__', None)
  return bool(found) or module in sys.builtin_module_names


def _check(letter, cls, section, shrink, file):
  """UserError unless the arguments of `mixer` can be taken."""
  says = f'register.mixer({letter!r}, {getattr(cls, "__name__", cls)})'

  def need(condition, text):
    if not condition:
      raise errors.UserError(f'{says}: {text}.')

  need(
    isinstance(letter, str) and re.fullmatch('[A-Z]', letter),
    'a letter of model.pattern is one capital, A to Z',
  )
  before = mixers.OWN.get(letter)
  free = [c for c in map(chr, range(65, 91)) if c not in mixers.TABLE]
  need(
    letter not in mixers.TABLE or (before and before.file == file),
    f'{letter} is {mixers.TABLE.get(letter, [""])[0]} already'
    + (f', of {before.file}' if before else '')
    + f'; free are {", ".join(free)}',
  )
  need(
    isinstance(cls, type) and issubclass(cls, protocol.Mixer),
    'it is no subclass of paraxis.models.mixers.protocol.Mixer',
  )
  missing = [
    name
    for name in _REQUIRED
    if inspect.getattr_static(cls, name)
    is inspect.getattr_static(protocol.Mixer, name)
  ]
  missing += [n for n in ('name', 'capabilities') if not hasattr(cls, n)]
  need(not missing, f'the class lacks {", ".join(missing)}')
  need(
    not cls.capabilities.slots
    or (
      cls.decode is not protocol.Mixer.decode
      and cls.commit is not protocol.Mixer.commit
    ),
    'capabilities say that its state has slots, so it needs its own decode and '
    'commit',
  )
  need(
    isinstance(cls.name, str)
    and re.fullmatch('[a-z][a-z0-9_]*', cls.name)
    and not keyword.iskeyword(cls.name),
    f'name={cls.name!r}: parameters stand under it, so it is lower-case '
    'letters, digits and _, and no keyword of Python',
  )
  taken = {m.name for k, m in layer.MIXERS.items() if k != letter}
  need(
    cls.name not in taken | set(_PARTS),
    f'name={cls.name!r} is taken by another part of a layer',
  )
  need(
    section is None or hasattr(section, '__dataclass_fields__'),
    f'section={section!r}: it is to be a frozen dataclass',
  )
  need(
    shrink is None or (callable(shrink) and section is not None),
    f'shrink={shrink!r}: a function that shrinks fields of the section',
  )


def described(pattern):
  """{letter: {file, sha256}} of the own mixers in a pattern, for manifests."""
  letters = mixers.of_pattern(pattern)[0]
  return {
    letter: dict(file=own.file.rsplit('/', 1)[-1], sha256=own.sha256)
    for letter, own in mixers.OWN.items()
    if letter in letters
  }


def require(saved, where, say=None):
  """UserError unless this process has the own mixers that a checkpoint has.

  Args:
    saved: what `described` gave, from the manifest, or None.
    where: what the message calls the checkpoint.
    say: prints one line if a file is another than then; None: that is refused,
      as steps that continue would not be those of the run.
  """
  for letter, was in (saved or {}).items():
    file, then = (str(was.get(key, '')) for key in ('file', 'sha256'))
    now = mixers.OWN.get(letter)
    if now is None:
      raise errors.UserError(
        f'{where}: its mixer {letter} is from {file or "no file"} (sha256 '
        f'{then[:12]}), and no checkpoint brings code: name the file, '
        f'--config={file or "FILE"}.'
      )
    if now.sha256 == then:
      continue
    text = (
      f'{where}: its mixer {letter} is from {file or "no file"} of sha256 '
      f'{then[:12]}, and {now.file or "the one here"} has {now.sha256[:12]}'
    )
    if say is None:
      raise errors.UserError(
        f'{text}: the steps would not be those of the run. Give the file as it '
        'was (fields change by --config.train.steps=, too), or begin a new run '
        f'in another --workdir with these weights: --init_from={where}.'
      )
    say(f'{text}: the numbers may be others')
