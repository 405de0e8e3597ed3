"""Layouts of a product of an activation and a parameter, letter by letter.

Logical names of the operands and of the result give the mesh axes over which
each letter of the equation is sharded; the collectives follow from them. Rules
and terms: sharding/tensor/project.py.
"""

from typing import NamedTuple

from jax.sharding import PartitionSpec

from paraxis.sharding import annotate


class ProductLayout(NamedTuple):
  """Mesh axes of every dimension of one product.

  x, x_whole: as given, and gathered for the product. w, w_whole: likewise.
  y, y_partial: of the result, and before it is scattered.
  summed, summed_back: axes over which y, and dx, are partial sums.
  """

  x: tuple
  x_whole: tuple
  w: tuple
  w_whole: tuple
  y: tuple
  y_partial: tuple
  summed: tuple
  summed_back: tuple


def _layout(equation, x_names, w_names, out):
  for names in (x_names, w_names, out):
    annotate.spec(names)  # one mesh axis on two dimensions is an error
  ins, result = equation.split('->')
  letters_x, letters_w = ins.split(',')
  axes = lambda letters, names: dict(
    zip(letters, map(annotate.carriers, names), strict=True)
  )
  x, w, y = (
    axes(letters_x, x_names),
    axes(letters_w, w_names),
    axes(result, out),
  )
  x_whole, w_whole, y_partial = dict(x), dict(w), dict(y)
  summed = sum((x[a] for a in letters_x if a not in result), ())
  for a in letters_x:
    if a in result:
      shared = y[a] if x[a][: len(y[a])] == y[a] else x[a]
      x_whole[a] = y_partial[a] = shared
      _check(equation, a, y[a], shared, summed, out)
  for a in letters_w:
    target = x[a] if a in x else y[a]
    if w[a][: len(target)] != target:
      raise ValueError(
        f'einsum {equation}: {a!r} is laid out over {w[a]} in the parameter '
        f'and over {target} elsewhere; {out}.'
      )
    w_whole[a] = target
  back = sum((w_whole[a] for a in letters_w if a not in x), ())
  row = lambda table, letters: tuple(table[a] for a in letters)
  return ProductLayout(
    row(x, letters_x), row(x_whole, letters_x), row(w, letters_w),
    row(w_whole, letters_w), row(y, result), row(y_partial, result),
    summed, back,
  )  # fmt: skip


def _check(equation, letter, want, have, summed, out):
  """y may split a letter more than x only by scattering a sum over it."""
  if want[: len(have)] != have or set(want[len(have) :]) - set(summed):
    raise ValueError(
      f'einsum {equation}: {letter!r} is laid out over {have}, and {out} says '
      f'{want}; move the operand first.'
    )


def transposes(equation):
  """Equations (of dx from g and w, of dw from x and g) of a product y = x w.

  x comes first in dw: with g first XLA on CPU transposes g, the larger of the
  two, and takes twice the time.
  """
  ins, out = equation.split('->')
  a, b = ins.split(',')
  return f'{out},{b}->{a}', f'{a},{out}->{b}'


def extra(split, whole):
  """[(dimension, axes)] that `split` has beyond `whole`."""
  pairs = enumerate(zip(split, whole, strict=True))
  return [(i, a[len(b) :]) for i, (a, b) in pairs if len(a) > len(b)]


def spec(axes, unreduced=()):
  parts = (a[0] if len(a) == 1 else a or None for a in axes)
  if unreduced:
    return PartitionSpec(*parts, unreduced=frozenset(unreduced))
  return PartitionSpec(*parts)


def of(equations, x, weights, outs):
  """Layouts of products that share x, by the logical names of each array.

  Raises:
    ValueError: they need x in different layouts.
  """
  groups = zip(equations, weights, outs, strict=True)
  ways = tuple(_layout(e, x, w, out) for e, w, out in groups)
  if len({way.x_whole for way in ways}) > 1:
    raise ValueError(
      f'products {equations} share {x}, but need it laid out '
      f'differently: {[way.x_whole for way in ways]}.'
    )
  return ways
