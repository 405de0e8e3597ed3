"""How a field of the configuration is declared, and its values checked."""

import dataclasses
import difflib
import math

from paraxis.configs.base.errors import UserError

# What a traced program can hold: int32 and float32.
MOST = {int: 2**31 - 1, float: 3.4e38}
MOST_BYTES = 2**63 - 1  # of memory or of a file
MOST_WIDTH = 2**20  # of an array's rows or columns; 50 times the widest known
MOST_LENGTH = 2**24  # tokens of a row
_FLOAT_BITS = 1023  # of a whole number that is a float, whatever it rounds to


def field(default, doc, choices=None, low=None, high=None):
  """A dataclass field with its documentation and its valid values.

  high: None: what a traced program can hold.
  """
  high = MOST.get(type(default)) if high is None else high
  return dataclasses.field(
    default=default,
    metadata=dict(doc=doc, choices=choices, low=low, high=high),
  )


def suggest(name, valid, close=0.5):
  """' Did you mean X?' when something close to `name` is in `valid`."""
  found = difflib.get_close_matches(name, list(valid), 1, close)
  return f' Did you mean {found[0]!r}?' if found else ''


def check(name, f, value):
  """`value` as the field's type; UserError if it is none of its valid values.

  name: what a message calls it. f: dataclasses.Field that `field` made.
  """
  kind = type(f.default)
  if kind is float and type(value) is int:
    if value.bit_length() > _FLOAT_BITS:
      raise UserError(
        f'{name} is a whole number of {value.bit_length()} bits, which is no '
        'finite number.'
      )
    value = float(value)
  if type(value) is not kind:
    raise UserError(
      f'{name} must be {kind.__name__}, got {type(value).__name__} {value!r}.'
    )
  meta = f.metadata
  if meta['choices'] and value not in meta['choices']:
    raise UserError(
      f'{name}={value!r} is not one of {", ".join(meta["choices"])}.'
      + suggest(value, meta['choices'])
    )
  if kind is float and not math.isfinite(value):
    raise UserError(f'{name}={value} is not a finite number.')
  low, high = meta['low'], meta['high']
  if low is not None and not value >= low:
    raise UserError(f'{name}={value} is below its lowest valid value {low}.')
  if high is not None and not value <= high:
    raise UserError(f'{name}={value} is above its highest valid value {high}.')
  return value
