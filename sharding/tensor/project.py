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
the scattered form: arXiv:2205.05198). x and the weights are kept sharded and
gathered again in the backward pass (ZeRO stage 3's 3 Psi; in layers that are
unrolled, not scanned, XLA merges the two gathers and keeps their result).

An object per world (sharding/tensor/worlds.py) writes both passes. On Explicit
axes XLA chooses the collectives; in a manual region they are ours, and a sum
that no letter of y takes is an error: an activation may not be summed there
under differentiation.
"""

import contextvars
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding.tensor import int4
from paraxis.sharding.tensor import narrow
from paraxis.sharding.tensor import product_layouts as layouts
from paraxis.sharding.tensor import rings
from paraxis.sharding.tensor import worlds

# What transposing a number of a product's result costs, over copying one of an
# operand to transpose it.
RESULT = 2
# Set while products are recorded (sharding/tensor/tape.py).
_tape: contextvars.ContextVar = contextvars.ContextVar('tape', default=None)


def tape():
  """The tape.Tape that records products, or None."""
  return _tape.get()


def taped(tape):
  """Within this context products are recorded by a tape.Tape."""
  return annotate.within(_tape, tape)


class Owned(NamedTuple):
  """A weight of a product and its owner, for a tape.

  value: array, Narrow or Int4. owner: hashable, such as (path, row of it).
  """

  value: Any
  owner: Any


class Group(NamedTuple):
  """What is static of products that share x.

  dtype: in which products are accumulated. dtypes: of the gradient of each
  weight. ring: as in `project`. ways: product_layouts.ProductLayout of each
  product. world: worlds.current().
  """

  equations: tuple
  dtype: Any
  dtypes: tuple
  ring: bool
  ways: tuple
  world: worlds.Plain


def gathered_input(group, x):
  """x as the products need it, which all need alike."""
  way = group.ways[0]
  return group.world.gather(x, way.x, way.x_whole)


def gathered_weights(group, weights, dtype):
  """Weights as their products need them, in the dtype of x."""
  return [
    int4.gathered(group.world.gather, w, dtype, way.w, way.w_whole)
    for w, way in zip(weights, group.ways, strict=True)
  ]


def project(x, x_names, weights, dtype=None, ring=False):
  """Products of one activation with several parameters.

  Args:
    x: activation, laid out by the logical names `x_names`.
    weights: (equation, w, w_names, out_names) of each product; equation as for
      jnp.einsum. w, an array, Narrow, Int4 or `Owned`, is multiplied in x's
      dtype; its gradient is summed in w's own, over devices too.
    dtype: of accumulation and outputs; default that of x.
    ring: gather x, or scatter y, as a ring that overlaps with the products
      (sharding/tensor/rings.py), where the layouts have such a step.

  Returns:
    A list of outputs, laid out by their names.

  Raises:
    ValueError: layouts that no movement above joins; under a tape, a weight
      without an owner.
  """
  equations, held, names, outs = map(tuple, zip(*weights, strict=True))
  held = [w if isinstance(w, Owned) else Owned(w, None) for w in held]
  arrays, owners = zip(*held, strict=True)
  ring = ring and tape() is None and not int4.among(arrays)
  dtypes = tuple(map(narrow.own_dtype, arrays))
  ways = layouts.of(equations, x_names, names, outs)
  world = worlds.current(region=ring)
  group = Group(equations, dtype or x.dtype, dtypes, ring, ways, world)
  if tape() is not None and tape().records(owners):
    return list(tape().product(group, x, arrays, owners))
  run = functools.partial(_differentiable, group)
  if ring:
    run = annotate.region(run, (x_names, *names), outs)
  return list(run(x, *arrays))


def einsum(equation, x, x_names, w, w_names, out, dtype=None):
  """One product, as `project`."""
  return project(x, x_names, [(equation, w, w_names, out)], dtype)[0]


def _products(group, x, *weights) -> tuple:
  """Outputs; weights may be narrow.Narrow."""
  whole = gathered_weights(group, map(narrow.read, weights), x.dtype)
  gather, scatter = _moves(group)
  if gather:
    dim, axis = gather
    products = list(zip(group.equations, whole, strict=True))
    return tuple(rings.gather_matmul(x, products, axis, dim, group.dtype))
  if scatter:
    dim, axis = scatter
    return tuple(
      rings.matmul_scatter(e, x, w, axis, dim, group.dtype)
      for e, w in zip(group.equations, whole, strict=True)
    )
  x_whole, world, outs = gathered_input(group, x), group.world, []
  for e, w, way in zip(group.equations, whole, group.ways, strict=True):
    y = world.multiply(e, x_whole, w, group.dtype, way.y)
    outs.append(world.reduce(y, way.y_partial, way.y, way.summed, e))
  return tuple(outs)


def forward(group, x, *weights):
  """(outputs, residuals of `_backward`): x and weights, sharded."""
  return _products(group, x, *weights), (x, *map(narrow.read, weights))


def _moves(group):
  """((dimension of x, axis) that a ring gathers, (.. of y) that one scatters).

  None where there is no such step, or where it is not one over one axis.
  """
  if not group.ring:
    return None, None
  gathered, scattered = set(), set()
  for way in group.ways:
    gathered.update(layouts.extra(way.x, way.x_whole))
    scattered.update(layouts.extra(way.y, way.y_partial))
  return _single(gathered), _single(scattered)


def _single(moves):
  """(dimension, axis) of the only move, if it is over one axis, or None."""
  found = [(dim, *axes) for dim, axes in moves]
  return found[0] if len(found) == 1 and len(found[0]) == 2 else None


def _backward(group, residuals, cotangents):
  """dx and dw in the layouts of x and w; dw is summed in w's dtype.

  g takes x's dtype: products of bfloat16 are bfloat16, their sums are not.
  """
  x, *weights = residuals
  if any(_moves(group)):
    dx, dws = _ring_gradients(group, x, weights, cotangents)
  else:
    x_whole = gathered_input(group, x)
    dx, gs = input_gradient(group, x.dtype, weights, cotangents)
    dws = weight_gradients(group, x_whole, gs)
  return dx, *map(narrow.gradient, weights, dws)


def input_gradient(group, dtype, weights, cotangents):
  """(dx, cotangents gathered as the products of weights need them)."""
  partial, whole, gathered, world = [], [], [], group.world
  for equation, w, g, way in zip(
    group.equations, weights, cotangents, group.ways, strict=True
  ):
    g = world.gather(g.astype(dtype), way.y, way.y_partial)
    w = world.gather(w.astype(dtype), way.w, way.w_whole)
    back, _ = layouts.transposes(equation)
    dx = world.multiply(back, g, w, dtype, way.x_whole, way.summed_back)
    (partial if way.summed_back else whole).append(dx)
    gathered.append(g)
  what = f'{group.equations[0]} (backward)'
  return world.add_terms(group.ways, partial, whole, what), gathered


def weight_gradients(group, x, cotangents):
  """[dw] over this shard's tokens; scattered over the axes w was gathered on.

  x, cotangents: gathered as the products need them.
  """
  dws = []
  for equation, g, dtype, way in zip(
    group.equations, cotangents, group.dtypes, group.ways, strict=True
  ):
    _, back = layouts.transposes(equation)
    dw = _weight_gradient(group.world, back, x, g, dtype, way.w)
    dws.append(group.world.reduce(dw, way.w_whole, way.w))
  return dws


def _weight_gradient(world, equation, x, g, dtype, axes):
  """einsum(x, g), the gradient of a weight laid out over `axes`.

  XLA on CPU copies, to transpose it, the operand that has the result's first
  dimension. Where the other operand and RESULT times the result are smaller,
  the product is written with the other one first and the result is transposed,
  behind a barrier, without which XLA would write the product as it was.
  """
  ins, out = equation.split('->')
  first, other = zip(ins.split(','), (x, g), strict=True)
  if out[0] not in first[0]:
    first, other = other, first
  sizes = {}
  for letters, array in (first, other):
    sizes |= dict(zip(letters, array.shape, strict=True))
  result = math.prod(sizes[letter] for letter in out)
  little = other[1].size + RESULT * result < first[1].size
  if not little or registry.current_target().platform != 'cpu':
    return world.multiply(equation, x, g, dtype, axes)
  turned = sorted(out, key=lambda letter: letter not in other[0])
  order = [out.index(letter) for letter in turned]
  dw = world.multiply(
    f'{other[0]},{first[0]}->{"".join(turned)}',
    other[1], first[1], dtype, [axes[i] for i in order],
  )  # fmt: skip
  return jax.lax.optimization_barrier(dw).transpose(np.argsort(order))


def _ring_gradients(group, x, weights, cotangents):
  """(dx, [dw]) by rings: what was gathered is scattered, and the reverse."""
  whole = gathered_weights(group, weights, x.dtype)
  gather, scatter = _moves(group)
  dtype = group.dtypes[0]
  if gather:
    dim, axis = gather
    products = list(zip(group.equations, whole, strict=True))
    dx, dws = rings.gather_matmul_gradients(
      x, products, cotangents, axis, dim, dtype
    )
  else:
    assert scatter  # `_backward` calls this where one of the two is given
    dim, axis = scatter
    terms = [
      rings.matmul_scatter_gradients(e, x, w, g, axis, dim, dtype)
      for e, w, g in zip(group.equations, whole, cotangents, strict=True)
    ]
    dx, dws = sum((dx for dx, _ in terms), 0), [dw for _, dw in terms]
  return dx, [
    group.world.reduce(dw, way.w_whole, way.w)
    for dw, way in zip(dws, group.ways, strict=True)
  ]


_differentiable: Any = jax.custom_vjp(_products, nondiff_argnums=(0,))
_differentiable.defvjp(forward, _backward)
