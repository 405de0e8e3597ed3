"""Products of activations and parameters, with the collectives they need.

    y_i = einsum(x, w_i),  dx = sum_i einsum(g_i, w_i),  dw_i = einsum(x, g_i)

Layouts decide what moves, letter by letter of the equation. A letter that
  x splits and y does not    x is gathered (sequence to tensor parallel)
  w splits, x or y do not    w is gathered (fsdp, ZeRO stage 3)
  x splits, contracted       y is a partial sum: scattered over the letter of y
                             that carries the same axis, else reduced
and the backward pass mirrors each. Several weights share one x: it is gathered
once, and the partial dx are added before they are reduced, which makes two
reductions per layer and direction (Megatron-LM, arXiv:2104.04473, section 2.3;
the scattered form: arXiv:2205.05198). x is kept as it came, gathered again in
the backward pass, and so are weights (ZeRO stage 3's 3 Psi; in layers that are
unrolled, not scanned, XLA merges the two gathers and keeps what they make).

On Explicit axes partial sums are jax's `unreduced` values and XLA chooses the
collectives; in a manual region they are ours, and a sum that no letter of y
takes is an error: an activation may not be summed there under differentiation.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paraxis.sharding import annotate
from paraxis.sharding import tensor
from paraxis.sharding import vocabulary


class _Names(NamedTuple):
  """Static: equations and logical names of one group of products."""

  equations: tuple
  x: tuple
  weights: tuple
  outs: tuple
  dtype: object
  ring: bool


class _Layout(NamedTuple):
  """Mesh axes of every dimension of one product.

  x, x_whole: as it comes, and gathered for the product. w, w_whole: likewise.
  y, y_partial: as it is wanted, and with the scatter undone.
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
  return _Layout(
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


def _extra(split, whole):
  """[(dimension, axes)] that `split` has beyond `whole`."""
  pairs = enumerate(zip(split, whole, strict=True))
  return [(i, a[len(b) :]) for i, (a, b) in pairs if len(a) > len(b)]


def _spec(axes, unreduced=()):
  parts = (a[0] if len(a) == 1 else a or None for a in axes)
  if unreduced:
    return PartitionSpec(*parts, unreduced=frozenset(unreduced))
  return PartitionSpec(*parts)


def _gather(x, split, whole):
  extra = _extra(split, whole)
  if annotate.mode() == 'manual':
    for i, axes in extra:
      x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
  elif extra:
    x = jax.reshard(x, _spec(whole))
  return x


def _multiply(equation, a, b, axes, summed, dtype):
  """einsum whose result is laid out over `axes` and partial over `summed`."""
  layout = {}
  if annotate.mode() == 'explicit' and annotate.sizes():
    layout = dict(out_sharding=_spec(axes, summed))
  return jnp.einsum(equation, a, b, preferred_element_type=dtype, **layout)


def _reduce(y, partial, axes, summed, what):
  """Partial sums over `summed` -> sums, scattered to the layout `axes`."""
  if annotate.mode() != 'manual':
    return jax.reshard(y, _spec(axes)) if summed else y
  left = list(summed)
  for i, extra in _extra(axes, partial):
    y = jax.lax.psum_scatter(y, extra, scatter_dimension=i, tiled=True)
    left = [a for a in left if a not in extra]
  if left:
    raise ValueError(
      f'einsum {what}: a sum over {left} that no dimension of the result takes '
      '(in a manual region residuals are sharded over tensor: mesh.sequence).'
    )
  return y


def project(x, x_names, weights, dtype=None, ring=False):
  """Products of one activation with several parameters.

  Args:
    x: activation, laid out by the logical names `x_names`.
    weights: (equation, w, w_names, out_names) of each product; equation as for
      jnp.einsum. w is multiplied in x's dtype; its gradient is summed in w's
      own, over devices too.
    dtype: of accumulation and outputs; default that of x.
    ring: gather x, or scatter y, as a ring that overlaps with the products
      (sharding/tensor.py), where the layouts have such a step.

  Returns:
    A list of outputs, laid out by their names.

  Raises:
    ValueError: layouts that no movement above joins.
  """
  names = _Names(
    tuple(e for e, *_ in weights), x_names, tuple(n for _, _, n, _ in weights),
    tuple(out for *_, out in weights), dtype, ring,
  )  # fmt: skip
  arrays = tuple(w for _, w, _, _ in weights)
  if not ring:
    return list(_project(names, x, *arrays))
  run = functools.partial(_project, names)
  run = annotate.region(run, (x_names, *names.weights), names.outs)
  return list(run(x, *arrays))


def einsum(equation, x, x_names, w, w_names, out, dtype=None):
  """One product, as `project`."""
  return project(x, x_names, [(equation, w, w_names, out)], dtype)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(names, x, *weights):
  return _forward(names, x, *weights)[0]


def _layouts(names):
  groups = zip(names.equations, names.weights, names.outs, strict=True)
  layouts = [_layout(e, names.x, w, out) for e, w, out in groups]
  if len({way.x_whole for way in layouts}) > 1:
    raise ValueError(
      f'products {names.equations} share {names.x}, but need it laid out '
      f'differently: {[way.x_whole for way in layouts]}.'
    )
  return layouts


def _moves(names, layouts):
  """((dimension of x, axis) that a ring gathers, (.. of y) that one scatters).

  None where there is no such step, or where it is not one axis of a region.
  """
  if not names.ring or annotate.mode() != 'manual':
    return None, None
  found = (
    {move for way in layouts for move in _extra(way.x, way.x_whole)},
    {move for way in layouts for move in _extra(way.y, way.y_partial)},
  )
  one = lambda moves: next(iter(moves)) if len(moves) == 1 else None
  gather, scatter = map(one, found)
  name = lambda move: (move[0], *move[1]) if move else None
  return name(gather), name(scatter)


def _forward(names, x, *weights):
  layouts = _layouts(names)
  wide = names.dtype or x.dtype
  whole = [
    _gather(w.astype(x.dtype), way.w, way.w_whole)
    for w, way in zip(weights, layouts, strict=True)
  ]
  gather, scatter = _moves(names, layouts)
  if gather:
    dim, axis = gather
    products = list(zip(names.equations, whole, strict=True))
    outs = tensor.gather_matmul(x, products, axis, dim, wide)
    return tuple(outs), (x, *weights)
  if scatter:
    dim, axis = scatter
    outs = [
      tensor.matmul_scatter(e, x, w, axis, dim, wide)
      for e, w in zip(names.equations, whole, strict=True)
    ]
    return tuple(outs), (x, *weights)
  x_whole = _gather(x, layouts[0].x, layouts[0].x_whole)
  outs = []
  for e, w, way in zip(names.equations, whole, layouts, strict=True):
    # At once where XLA reduces: a remat policy may keep what a product makes,
    # and a scan over layers cannot stack partial sums.
    y = _multiply(e, x_whole, w, way.y, (), wide)
    if annotate.mode() == 'manual':
      y = _reduce(y, way.y_partial, way.y, way.summed, e)
    outs.append(y)
  return tuple(outs), (x, *weights)


def _backward(names, residuals, cotangents):
  """dx and dw in the layouts of x and w; dw is summed in w's dtype.

  dw has x first: with g first XLA on CPU transposes g, the larger of the two,
  and takes twice the time. g takes x's dtype: products of bfloat16 are
  bfloat16, their sums are not.
  """
  x, *weights = residuals
  layouts = _layouts(names)
  if any(_moves(names, layouts)):
    return _ring_backward(names, layouts, x, weights, cotangents)
  x_whole = _gather(x, layouts[0].x, layouts[0].x_whole)
  whole, partial, dws = [], [], []
  for equation, w, g, way in zip(
    names.equations, weights, cotangents, layouts, strict=True
  ):
    ins, out = equation.split('->')
    a, b = ins.split(',')
    g = _gather(g.astype(x.dtype), way.y, way.y_partial)
    w_whole = _gather(w.astype(x.dtype), way.w, way.w_whole)
    dx = _multiply(
      f'{out},{b}->{a}', g, w_whole, way.x_whole, way.summed_back, x.dtype
    )
    (partial if way.summed_back else whole).append(dx)
    dws.append(_weight_gradient(f'{a},{out}->{b}', x_whole, g, w.dtype, way))
  return (_input_gradient(names, layouts, partial, whole), *dws)


def _ring_backward(names, layouts, x, weights, cotangents):
  """The same by rings: what was gathered is scattered, and the other way."""
  gather, scatter = _moves(names, layouts)
  whole = [
    _gather(w.astype(x.dtype), way.w, way.w_whole)
    for w, way in zip(weights, layouts, strict=True)
  ]
  dtype = weights[0].dtype
  if gather:
    dim, axis = gather
    products = list(zip(names.equations, whole, strict=True))
    dx, dws = tensor.gather_matmul_gradients(
      x, products, cotangents, axis, dim, dtype
    )
  else:
    dim, axis = scatter
    terms = [
      tensor.matmul_scatter_gradients(e, x, w, g, axis, dim, dtype)
      for e, w, g in zip(names.equations, whole, cotangents, strict=True)
    ]
    dx, dws = sum(dx for dx, _ in terms), [dw for _, dw in terms]
  dws = [_scatter_weight(dw, way) for dw, way in zip(dws, layouts, strict=True)]
  return (dx, *dws)


def _input_gradient(names, layouts, partial, whole):
  """dx in x's layout from its terms, partial over the same axes or whole."""
  way = max(layouts, key=lambda way: len(way.summed_back))
  what = f'{names.equations[0]} (backward)'
  add = lambda terms: functools.reduce(jnp.add, terms)
  if annotate.mode() == 'manual':
    # A result that every shard computes whole (few kv heads) is read by each in
    # part, so its term of dx is partial too.
    summed = {
      *way.summed_back,
      *(a for _, e in _extra(way.x, way.x_whole) for a in e),
    }
    return _reduce(add(partial + whole), way.x_whole, way.x, summed, what)
  terms = []
  if partial:
    terms.append(
      _reduce(add(partial), way.x_whole, way.x, way.summed_back, what)
    )
  if whole:
    dx = add(whole)
    gathered = annotate.mode() == 'explicit' and _extra(way.x, way.x_whole)
    terms.append(jax.reshard(dx, _spec(way.x)) if gathered else dx)
  return add(terms)


def _weight_gradient(equation, x, g, dtype, way):
  """Over this shard's tokens; scattered over the axes that w was gathered."""
  if annotate.mode() != 'manual':
    return _multiply(equation, x, g, way.w, (), dtype)
  dw = jnp.einsum(equation, x, g, preferred_element_type=dtype)
  return _scatter_weight(dw, way)


def _scatter_weight(dw, way):
  for i, axes in _extra(way.w, way.w_whole):
    dw = jax.lax.psum_scatter(dw, axes, scatter_dimension=i, tiled=True)
  return dw


_project.defvjp(_forward, _backward)


def lookup(table, table_names, ids, out, dtype):
  """Rows table[ids] in `dtype`, laid out by `out`; ids must be in range.

  Args:
    table: (rows, width), laid out by `table_names`; its gradient is summed in
      its own dtype.
    ids: int, laid out by ('batch', 'length').
    out: names of the result.

  Raises:
    ValueError: (manual) the table's rows are sharded, and the length of `out`
      is not over the same axis: its sum has nowhere to go.
  """
  rows = annotate.carriers(table_names[0])
  scattered = annotate.carriers(out[1])[len(annotate.carriers('length')) :]
  if rows and rows == scattered or annotate.mode() == 'manual':
    run = functools.partial(_lookup, table_names, out, dtype)
    names = table_names, ('batch', 'length')
    return annotate.region(run, names, (out,), single=True)(table, ids)
  # Rows stay where they are: only the width is gathered.
  table = annotate.put(table, (table_names[0], out[-1]))
  if annotate.mode() == 'explicit' and annotate.sizes():
    found = table.at[ids].get(out_sharding=annotate.spec(out))
  else:
    found = table[ids]
  return found.astype(dtype)  # after: sums of the gradient are the table's


def _lookup(table_names, out, dtype, table, ids):
  """`lookup` in a manual region: own rows, summed into shards of the length."""
  rows, width = map(annotate.carriers, table_names)
  scattered = annotate.carriers(out[1])[len(annotate.carriers('length')) :]
  table = _gather(table, (rows, width), (rows, ()))
  if rows and rows == scattered:
    return vocabulary.embedding(table, ids, rows, 1, dtype)
  if rows:
    raise ValueError(
      f'lookup: the rows of the table are laid out over {rows}, {out[1]!r} '
      f'over {scattered} beyond ids; in a manual region they must be the same.'
    )
  if scattered:  # a shard looks up its own part of the ids
    size = ids.shape[1] // math.prod(map(jax.lax.axis_size, scattered))
    first = jax.lax.axis_index(scattered) * size
    ids = jax.lax.dynamic_slice_in_dim(ids, first, size, 1)
  return table[ids].astype(dtype)
