"""Names with shares, as command lines give them: 'RUN' or 'RUN:2'.

Standard library only.
"""

import math

from paraxis.configs.base.errors import UserError


def parse(texts, what) -> list[tuple[str, float]]:
  """['a:3', 'b'] -> [('a', 0.75), ('b', 0.25)]: shares that sum to 1.

  A name without a number has the weight 1.

  Args:
    what: they are, for messages.

  Raises:
    UserError: nothing is named, or a weight is no number of at least 0, or
      their sum is 0 or none, or a name is there twice.
  """
  found = {}
  for text in texts:
    name, weight = text, 1.0
    head, colon, tail = text.rpartition(':')
    if colon and head:
      try:
        name, weight = head, float(tail)
      except ValueError:
        pass  # a colon of the name's own
    if not name or not 0 <= weight < math.inf:
      raise UserError(
        f'{what}: {text!r} is not NAME or NAME:WEIGHT with a weight of at '
        'least 0.'
      )
    if name in found:
      raise UserError(f'{what}: {name!r} is named twice; give it one weight.')
    found[name] = weight
  total = sum(found.values())
  if not 0 < total < math.inf:
    raise UserError(
      f'{what}: {len(found)} names, of total weight {total:g}: name at least '
      'one, with a weight above 0, and a sum that is a number.'
    )
  return [(name, weight / total) for name, weight in found.items()]
