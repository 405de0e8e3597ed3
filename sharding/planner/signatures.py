"""SBP layouts that an einsum takes and gives, and the cheapest choice.

Used by claims only; training annotates einsums with sharding/annotate.py.

On one mesh axis a two-operand einsum runs on local blocks, without moving
anything, in these signatures (OneFlow's table 1 for matrix products,
arXiv:2110.15032, is the case 'ab,bc->ac'):

    x          w          y
    S(l)       S(l)       S(l), or P if y lacks l      both have the letter l
    S(l)       B          S(l), or P if y lacks l      only x has it
    B          S(l)       S(l), or P if y lacks l      only w has it
    P          B          P                            linear in x
    B          P          P                            linear in w
    B          B          B

On several axes each axis takes one of them; axes that split one letter must
split it in the same order in x and in w. Anything else would be silently wrong:
P with S multiplies one rank's term with another rank's block.
"""

import itertools
import math
from typing import NamedTuple

from paraxis.sharding.planner import conversions as layout_lib


class Signature(NamedTuple):
  """Placements of x, w and y on one mesh axis, or their `SbpLayout`s on all."""

  x: object
  w: object
  y: object


class EinsumChoice(NamedTuple):
  """One way to run an einsum.

  bytes: received per device to bring operands, and y if its layout is given,
    to where they are needed. work: multiply-adds per device.
  layouts: `Signature` of SbpLayouts that the local einsum runs in.
  """

  bytes: float
  work: int
  layouts: Signature


def letters(equation):
  """'ab,bc->ac' -> ('ab', 'bc', 'ac'); ValueError if it is not that simple."""
  ins, arrow, y = equation.partition('->')
  x, comma, w = ins.partition(',')
  plain = all(s.isalpha() and len({*s}) == len(s) for s in (x, w) if s)
  if not (
    arrow and comma and plain and {*y} <= {*x, *w} and len({*y}) == len(y)
  ):
    raise ValueError(
      f'einsum {equation!r}: two operands, explicit output, no letter twice.'
    )
  return x, w, y


def signatures(equation):
  """All `Signature`s of an einsum on one mesh axis, as a list."""
  x, w, y = letters(equation)
  at = lambda held, l, absent: f'S({held.index(l)})' if l in held else absent
  split = [
    Signature(at(x, l, 'B'), at(w, l, 'B'), at(y, l, 'P'))
    for l in dict.fromkeys(x + w)
  ]
  return [
    *split,
    Signature('P', 'B', 'P'),
    Signature('B', 'P', 'P'),
    Signature('B', 'B', 'B'),
  ]


def choices(equation, shapes, layouts, dtype, sizes):
  """All ways to run an einsum whose operands are where they are.

  Args:
    equation: as jnp.einsum, two operands.
    shapes: global shapes of x and w.
    layouts: `Signature` of the SbpLayouts that x and w have and y is to have; y
      None: any.
    dtype: of operands and result. sizes: mesh axis -> size.

  Returns:
    A list of `EinsumChoice`, fewest bytes first, then least work; ways that do
    not divide are left out.
  """
  names = letters(equation)
  size = {
    l: n
    for held, shape in zip(names, shapes, strict=False)
    for l, n in zip(held, shape, strict=True)
  }
  shapes = [[size[l] for l in held] for held in names]
  axes = [a for a, n in sizes.items() if n > 1]
  found = {}
  for ways in itertools.product(signatures(equation), repeat=len(axes)):
    way = dict(zip(axes, ways, strict=True))
    for order in itertools.permutations(axes):
      each = [{a: way[a][i] for a in order} for i in range(3)]
      found[Signature(*map(layout_lib.of, each))] = None
  out = []
  for to in found:
    if _divides(to, shapes, sizes):
      moved = _bytes(layouts, to, shapes, dtype, sizes)
      out.append(EinsumChoice(moved, _work(names, size, to, sizes), to))
  return sorted(out, key=lambda choice: choice[:2])


def _divides(layouts, shapes, sizes):
  return all(
    shape[d] % math.prod(sizes[a] for a in split) == 0
    for layout, shape in zip(layouts, shapes, strict=True)
    for d, split in layout.splits
  )


def _bytes(have, to, shapes, dtype, sizes):
  """Both operands to where the einsum wants them, its result to `have.y`."""
  ways = [(have.x, to.x), (have.w, to.w)]
  if have.y is not None:
    ways.append((to.y, have.y))
  return sum(
    sum(layout_lib.cost(shape, dtype, *way, sizes).values())
    for shape, way in zip(shapes, ways, strict=False)
  )


def _work(names, size, layouts, sizes):
  blocks = {}
  for held, layout in zip(names, layouts, strict=True):
    for d, split in layout.splits:
      blocks[held[d]] = math.prod(sizes[a] for a in split)
  return math.prod(n // blocks.get(l, 1) for l, n in size.items())


def cheapest(equation, shapes, layouts, dtype, sizes):
  """The first of `choices`."""
  return choices(equation, shapes, layouts, dtype, sizes)[0]
