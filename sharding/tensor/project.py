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

import contextlib
import contextvars
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding.tensor import narrow
from paraxis.sharding.tensor import product_layouts as layouts
from paraxis.sharding.tensor import rings as tensor

# Set while the weight gradients are taken apart (sharding/tensor/tape.py).
_tape = contextvars.ContextVar('tape', default=None)


def tape():
  """The tape.Tape that takes weight gradients apart, or None."""
  return _tape.get()


@contextlib.contextmanager
def taped(tape):
  """Within this context products are recorded by a tape.Tape."""
  token = _tape.set(tape)
  try:
    yield
  finally:
    _tape.reset(token)


class _Names(NamedTuple):
  """Static: equations and logical names of one group of products.

  dtype: of the products. dtypes: of the gradient of each weight.
  """

  equations: tuple
  x: tuple
  weights: tuple
  outs: tuple
  dtype: object
  ring: bool
  dtypes: tuple


def _gather(x, split, whole):
  extra = layouts.extra(split, whole)
  if annotate.mode() == 'manual':
    for i, axes in extra:
      x = jax.lax.all_gather(x, axes, axis=i, tiled=True)
  elif extra:
    x = jax.reshard(x, layouts.spec(whole))
  return x


def gathered_input(ways, x):
  """x as the products need it, which all need alike."""
  return _gather(x, ways[0].x, ways[0].x_whole)


def gathered_weight(w, dtype, way):
  """A weight as its product needs it, in the dtype of x."""
  return _gather(w.astype(dtype), way.w, way.w_whole)


def _multiply(equation, a, b, axes, summed, dtype):
  """einsum whose result is laid out over `axes` and partial over `summed`."""
  layout = {}
  if annotate.mode() == 'explicit' and annotate.sizes():
    layout = dict(out_sharding=layouts.spec(axes, summed))
  return _einsum(equation, a, b, dtype, **layout)


def _einsum(equation, a, b, dtype, **layout):
  """jnp.einsum accumulated in `dtype`."""
  ins, out = equation.split('->')
  batched = set.intersection(*map(set, (*ins.split(','), out)))
  wider = jnp.dtype(dtype).itemsize > a.dtype.itemsize
  if batched and wider and registry.current_target().platform == 'cpu':
    # XLA has no such product of narrow numbers with a wide result on CPU.
    a, b = a.astype(dtype), b.astype(dtype)
  return jnp.einsum(equation, a, b, preferred_element_type=dtype, **layout)


def _reduce(y, partial, axes, summed, what):
  """Partial sums over `summed` -> sums, scattered to the layout `axes`."""
  if annotate.mode() != 'manual':
    return jax.reshard(y, layouts.spec(axes)) if summed else y
  left = list(summed)
  for i, extra in layouts.extra(axes, partial):
    y = jax.lax.psum_scatter(y, extra, scatter_dimension=i, tiled=True)
    left = [a for a in left if a not in extra]
  left = [a for a in left if a not in annotate.deferred()]
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
      jnp.einsum. w, an array or narrow.Narrow, is multiplied in x's dtype; its
      gradient is summed in w's own, over devices too.
    dtype: of accumulation and outputs; default that of x.
    ring: gather x, or scatter y, as a ring that overlaps with the products
      (sharding/tensor/rings.py), where the layouts have such a step.

  Returns:
    A list of outputs, laid out by their names.

  Raises:
    ValueError: layouts that no movement above joins.
  """
  arrays = tuple(w for _, w, _, _ in weights)
  names = _Names(
    tuple(e for e, *_ in weights), x_names, tuple(n for _, _, n, _ in weights),
    tuple(out for *_, out in weights), dtype, ring,
    tuple(map(narrow.own_dtype, arrays)),
  )  # fmt: skip
  if tape() is not None:
    return list(tape().product(names, x, arrays))
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


def _forward(names, x, *weights):
  return forward(names, x, *map(narrow.read, weights))


def _moves(names, ways):
  """((dimension of x, axis) that a ring gathers, (.. of y) that one scatters).

  None where there is no such step, or where it is not one axis of a region.
  """
  if not names.ring or annotate.mode() != 'manual':
    return None, None
  found = (
    {move for way in ways for move in layouts.extra(way.x, way.x_whole)},
    {move for way in ways for move in layouts.extra(way.y, way.y_partial)},
  )
  one = lambda moves: next(iter(moves)) if len(moves) == 1 else None
  gather, scatter = map(one, found)
  name = lambda move: (move[0], *move[1]) if move else None
  return name(gather), name(scatter)


def forward(names, x, *weights):
  """(outputs, what `_backward` keeps): x and weights as they came."""
  ways = layouts.of(names)
  wide = names.dtype or x.dtype
  whole = [
    gathered_weight(w, x.dtype, way)
    for w, way in zip(weights, ways, strict=True)
  ]
  gather, scatter = _moves(names, ways)
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
  x_whole = gathered_input(ways, x)
  outs = []
  for e, w, way in zip(names.equations, whole, ways, strict=True):
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
  ways = layouts.of(names)
  if any(_moves(names, ways)):
    dx, *dws = _ring_backward(names, ways, x, weights, cotangents)
  else:
    x_whole = gathered_input(ways, x)
    dx, whole = back(names, ways, x.dtype, weights, cotangents)
    dws = [
      weight_gradient(e, x_whole, g, dtype, way)
      for e, dtype, g, way in zip(
        names.equations, names.dtypes, whole, ways, strict=True
      )
    ]
  return dx, *map(narrow.gradient, weights, dws)


def back(names, ways, dtype, weights, cotangents):
  """(dx, cotangents gathered as the products of weights need them)."""
  whole, partial, gathered = [], [], []
  for equation, w, g, way in zip(
    names.equations, weights, cotangents, ways, strict=True
  ):
    ins, out = equation.split('->')
    a, b = ins.split(',')
    g = _gather(g.astype(dtype), way.y, way.y_partial)
    w_whole = gathered_weight(w, dtype, way)
    dx = _multiply(
      f'{out},{b}->{a}', g, w_whole, way.x_whole, way.summed_back, dtype
    )
    (partial if way.summed_back else whole).append(dx)
    gathered.append(g)
  return _input_gradient(names, ways, partial, whole), gathered


def _ring_backward(names, ways, x, weights, cotangents):
  """The same by rings: what was gathered is scattered, and the other way."""
  gather, scatter = _moves(names, ways)
  whole = [
    gathered_weight(w, x.dtype, way)
    for w, way in zip(weights, ways, strict=True)
  ]
  dtype = names.dtypes[0]
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
  dws = [_scatter_weight(dw, way) for dw, way in zip(dws, ways, strict=True)]
  return (dx, *dws)


def _input_gradient(names, ways, partial, whole):
  """dx in x's layout from its terms, partial over the same axes or whole."""
  way = max(ways, key=lambda way: len(way.summed_back))
  what = f'{names.equations[0]} (backward)'
  add = lambda terms: functools.reduce(jnp.add, terms)
  if annotate.mode() == 'manual':
    # A result that every shard computes whole (few kv heads) is read by each in
    # part, so its term of dx is partial too.
    summed = {
      *way.summed_back,
      *(a for _, e in layouts.extra(way.x, way.x_whole) for a in e),
    }
    return _reduce(add(partial + whole), way.x_whole, way.x, summed, what)
  terms = []
  if partial:
    terms.append(
      _reduce(add(partial), way.x_whole, way.x, way.summed_back, what)
    )
  if whole:
    dx = add(whole)
    gathered = annotate.mode() == 'explicit' and layouts.extra(
      way.x, way.x_whole
    )
    terms.append(jax.reshard(dx, layouts.spec(way.x)) if gathered else dx)
  return add(terms)


def weight_gradient(forward, x, g, dtype, way):
  """Over this shard's tokens; scattered over the axes that w was gathered."""
  ins, out = forward.split('->')
  a, b = ins.split(',')
  equation = f'{a},{out}->{b}'
  if annotate.mode() != 'manual':
    return _multiply(equation, x, g, way.w, (), dtype)
  dw = _einsum(equation, x, g, dtype)
  return _scatter_weight(dw, way)


def _scatter_weight(dw, way):
  for i, axes in layouts.extra(way.w, way.w_whole):
    dw = jax.lax.psum_scatter(dw, axes, scatter_dimension=i, tiled=True)
  return dw


_project.defvjp(_forward, _backward)
