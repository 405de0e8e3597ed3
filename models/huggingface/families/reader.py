"""config.json as a family reads it: every value typed, every field accounted.

A field is read by the type of its default, so that a file which says 'x' or
true where a number belongs is refused by the name of its field, before the
value reaches anything that would be built of it. What no row has read is
refused too, unless its value says that it is off (`is_off`).
"""

import functools
import math
from typing import Any

from paraxis.configs.base import errors
from paraxis.configs.base import field
from paraxis.configs.base import model as model_schema

MISSING: Any = object()
MOST = 2**31 - 1  # of a whole number
DEPTHS = (
  'num_hidden_layers',
  'num_layers',
  'n_layer',
  'n_layers',
)  # lists are made of them
_WORDS = {
  bool: 'true or false', int: 'a whole number', float: 'a finite number',
  str: 'a text', list: 'a list', dict: 'an object',
}  # fmt: skip
_MOST_FLOAT = 10**300
_LONGEST = 80  # characters of a value that a message shows


def is_off(value) -> bool:
  """Whether a value says that what its field names is not there.

  True is not 1 and 1.0 is no sign of anything: only null, false, zero and what
  is empty are.
  """
  if isinstance(value, bool | None):
    return not value
  return value in (0, '') or value in ([], {})


def same(a, b) -> bool:
  """Equality of JSON, where true is not 1."""
  return isinstance(a, bool) == isinstance(b, bool) and a == b


def shown(value) -> str:
  """A value in a message."""
  text = repr(value)
  return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'


@functools.cache
def _field_of(name):
  """dataclasses.Field of a dotted field of a schema.Model."""
  section: Any = model_schema.Model()
  *path, last = name.split('.')
  for part in path:
    section = getattr(section, part)
  return type(section).__dataclass_fields__[last]


class Reader:
  """One object of config.json.

  Attributes:
    config: the object. path: what messages call it.
    used: fields that were asked for.
    partial: whether the family rotates a part of a head.
  """

  def __init__(self, config, path='config.json'):
    self.config, self.path, self.used = config, path, set()
    self.partial = False
    self._inside = {}

  def given(self, name) -> Any:
    """The value of a field as it stands; None: null, or not there."""
    self.used.add(name)
    return self.config.get(name)

  def __call__(self, name, default: Any = MISSING, low=None) -> Any:
    """The value of a field, of the type of its default; null is the default.

    Args:
      default: of a file that has none; MISSING: it must be there, and is a
        size. None: any value is returned as it stands.
      low: the least valid number; None: 1 for sizes, whose default is not 0; 0.

    Raises:
      UserError: it is missing, of another type, or out of range.
    """
    value = self.given(name)
    if value is None:
      if default is MISSING:
        raise errors.UserError(
          f'{self.path} has no {name!r}, which its model_type needs.'
        )
      return default
    if default is None:
      return value
    if name in DEPTHS:
      return self.checked(name, value, 'num_layers')
    like = 1 if default is MISSING else default
    if low is None:
      low = 1 if type(like) is int and like else 0
    kind = list if isinstance(like, tuple) else type(like)
    return self.typed(name, value, kind, low)

  def typed(self, name, value, kind, low: float = 0) -> Any:
    """`value`, which `name` has, as `kind`; UserError: it is none."""
    if kind is float and type(value) is int:
      value = float(max(min(value, _MOST_FLOAT), -_MOST_FLOAT))
    valid = type(value) is kind
    if valid and kind in (int, float):
      valid = low <= value <= (MOST if kind is int else math.inf)
      valid = valid and math.isfinite(value)
    if valid:
      return value
    more = f', {low} or more' if kind in (int, float) else ''
    more += f', {MOST} at most' if kind is int else ''
    self.refuse(name, f'is not {_WORDS[kind]}{more}', value)

  def checked(self, name, value, ours) -> Any:
    """`value`, which `name` has, as the field `ours` of a schema.Model."""
    return field.check(f'{self.path}: {name}', _field_of(ours), value)

  def numbers(self, name, default, kind: type = int) -> Any:
    """A list of numbers, whole or finite, 0 or more."""
    found = self(name, default)
    plain = (int,) if kind is int else (int, float)
    for x in found:
      if type(x) not in plain or not 0 <= x <= MOST:
        self.refuse(name, f'has {shown(x)}, and is to be a list of numbers')
    return found

  def each(self, name, words, default=None) -> str:
    """A letter for each layer, of a list with a word for each.

    words: {their word: letter}. default: () -> the letters, where it is null.
    """
    depth, found = self('num_hidden_layers'), self.given(name)
    if found is None and default is not None:
      return default()
    found = self(name, [])
    if len(found) != depth:
      self.refuse(name, f'has {len(found)} entries, not one a layer ({depth})')
    for word in found:
      if not any(same(word, known) for known in words):
        known = ', '.join(map(repr, words))
        self.refuse(name, f'has {shown(word)}, and layers here are {known}')
    return ''.join(words[word] for word in found)

  def inside(self, name) -> 'Reader | None':
    """The reader of an object within; None: it is null."""
    if name not in self._inside:
      found = self(name, {}) if self.given(name) is not None else None
      path = f'{self.path}: {name}'
      self._inside[name] = None if found is None else Reader(found, path)
      if found is not None:
        self._inside[name].partial = self.partial
    return self._inside[name]

  def pass_over(self, name):
    """An object within says what another does, which is read."""
    self._inside[name] = None

  def refuse(self, name, why, *value) -> Any:
    """UserError that names a field and its value; value: a part of it."""
    found = value[0] if value else self.config.get(name)
    name = name if name.isprintable() else shown(name)
    raise errors.UserError(f'{self.path}: {name}={shown(found)} {why}.')

  def refuse_unread(self, silent, why):
    """UserError: a field that nothing read and that is not off."""
    for name, value in self.config.items():
      if name not in self.used and name not in silent and not is_off(value):
        self.refuse(name, why)
    for inner in self._inside.values():
      if inner is not None:
        inner.refuse_unread((), why)
