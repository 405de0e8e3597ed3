"""Collective matmul: tensor parallelism as rings, inside a manual region.

    gather_matmul    y = einsum(all_gather(x), w)       column parallel
    matmul_scatter   y = reduce_scatter(einsum(x, w))   row parallel

These are the two collectives of sequence-sharded tensor parallelism
(Megatron-LM, arXiv:2205.05198, section 4.2.2), each decomposed into one product
and one send per shard: the software form of T3 (arXiv:2401.16677, section 4). A
gather forwards a chunk before it multiplies the chunk; a scatter makes the
chunk of the farthest rank first. Either way no send waits for the product next
to it, so the compiler can overlap the two. Chunks travel in both directions at
once, half of them each way. With n ranks:

    forward   n - 1 permutes of a chunk (1 / n of the gathered side), n products
    backward  gather_matmul 2 (n - 1), matmul_scatter n - 1 (dx and dw read the
              same ring)

A function and its `_gradients` are the two passes of one derivative, which
sharding/tensor/project.py declares. All take names of mesh axes and run in a
fully manual shard_map with check_vma=False.
Legend: B rows, T tokens, D model, F mlp; x_BTD and the like name
logical dimensions, of which a rank holds its share.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paraxis.sharding.tensor import product_layouts as layouts
from paraxis.sharding.tensor import worlds


def _send(x, axis, step):
  """x of the rank `step` places before this one."""
  n = jax.lax.axis_size(axis)
  return jax.lax.ppermute(x, axis, [(i, (i + step) % n) for i in range(n)])


def _hops(axis):
  """(direction, farthest distance) of both rings; distances sum to n - 1."""
  n = jax.lax.axis_size(axis)
  return (1, n // 2), (-1, (n - 1) // 2)


def _arrivals(x, axis):
  """Yields (rank, its chunk) for every rank: x itself, then what arrives."""
  n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  rings = {direction: x for direction, _ in _hops(axis)}
  yield me, x
  for k in range(1, n):
    for direction, farthest in _hops(axis):
      if k <= farthest:
        rings[direction] = _send(rings[direction], axis, direction)
        yield (me - direction * k) % n, rings[direction]


def _reduced(part, axis, dtype):
  """Sum over ranks of part(rank of the owner); messages have `dtype`.

  `part` gives the local share of an owner's chunk. It is made from the farthest
  owner to the nearest, so that each running sum is sent as soon as it can be.
  """
  n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  # An addition fused into the product would make it wait for the message.
  apart = lambda rank: jax.lax.optimization_barrier(part(rank))
  arrived = []
  for direction, farthest in _hops(axis):
    carry = None
    for k in range(farthest, 0, -1):
      share = apart((me + direction * k) % n)
      carry = share if carry is None else share + carry
      carry = _send(carry.astype(dtype), axis, direction)
    arrived += [] if carry is None else [carry]
  return sum(arrived, apart(me)).astype(dtype)


def _take(x, rank, n, dim):
  """The chunk of `rank`, out of n along `dim`."""
  size = x.shape[dim] // n
  return jax.lax.dynamic_slice_in_dim(x, rank * size, size, dim)


def _put(whole, chunk, rank, n, dim):
  """`whole` (None: all zeros) with the chunk of `rank` in its place."""
  if whole is None:
    shape = list(chunk.shape)
    shape[dim] *= n
    whole = jnp.zeros(shape, chunk.dtype)
  start = rank * chunk.shape[dim]
  return jax.lax.dynamic_update_slice_in_dim(whole, chunk, start, dim)


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _product(equation, x, w, dtype):
  return worlds.local(equation, x, w.astype(x.dtype), dtype or x.dtype)


def _place(equation, letter):
  """Dimensions of a letter in the first operand and in the output.

  Raises:
    ValueError: it is not in both, or it is in the second operand too.
  """
  ins, out = equation.split('->')
  a, b = ins.split(',')
  if letter in b or letter not in a or letter not in out:
    raise ValueError(
      f'einsum {equation}: {letter!r} must be in the first operand and in the '
      f'output, and not in the second.'
    )
  return a.index(letter), out.index(letter)


def gather_matmul(x, products, axis, dim, dtype=None) -> tuple[jax.Array, ...]:
  """Products of several weights with x gathered once, in one ring.

  Args:
    x: local chunk of an array sharded over `axis` along dimension `dim`.
    products: (equation, w) pairs, as [('BTD,DF->BTF', w_DF)]; x is the first
      operand of each, the letter of `dim` is in the output and not in w. w is
      local (any share of its other letters) and is used in x's dtype.
    axis: name of a mesh axis.
    dim: dimension of x to gather.
    dtype: of the outputs; default x's.

  Returns:
    A tuple of arrays einsum(equation, all_gather(x), w), whole along `dim`.
  """
  n = jax.lax.axis_size(axis)
  places = [_place(equation, equation[dim])[1] for equation, _ in products]
  outs: list[Any] = [None] * len(products)
  for rank, chunk in _arrivals(x, axis):
    for i, (equation, w) in enumerate(products):
      y = _product(equation, chunk, w, dtype)
      outs[i] = _put(outs[i], y, rank, n, places[i])
  return tuple(outs)


def gather_matmul_gradients(x, products, cotangents, axis, dim, dtype=None):
  """(dx, tuple of dw) of `gather_matmul`.

  dx: partial sums travel to their owners, in x's dtype. dw: x travels once
  more; the sum over its chunks is made in promote_types(dtype, float32).

  Args:
    x, products, axis, dim: as in `gather_matmul`.
    cotangents: of its outputs; multiplied in x's dtype.
    dtype: of every dw; default that of its weight.
  """
  n, wide = jax.lax.axis_size(axis), _wide(x.dtype)
  terms = [
    (g.astype(x.dtype), w, _place(e, e[dim])[1], *layouts.transposes(e))
    for g, (e, w) in zip(cotangents, products, strict=True)
  ]

  def share(rank):
    return sum(
      _product(to_dx, _take(g, rank, n, place), w, wide)
      for g, w, place, to_dx, _ in terms
    )

  dws: list[Any] = [0] * len(terms)
  for rank, chunk in _arrivals(x, axis):
    for i, (g, w, place, _, to_dw) in enumerate(terms):
      g = _take(g, rank, n, place)
      dws[i] += _product(to_dw, chunk, g, _wide(dtype or w.dtype))
  return _reduced(share, axis, x.dtype), tuple(
    dw.astype(dtype or w.dtype)
    for dw, (_, w) in zip(dws, products, strict=True)
  )


def matmul_scatter(equation, x, w, axis, dim, dtype=None):
  """einsum(equation, x, w) summed over `axis`, scattered along `dim`.

  Args:
    equation: as 'BTF,FD->BTD'; a letter that both operands have and the output
      lacks is sharded over `axis`. The letter of `dim` is in x and not in w.
    x, w: local shares; x is whole along the letter of `dim`, w is used in x's
      dtype.
    axis: name of a mesh axis.
    dim: dimension of the output to scatter.
    dtype: of the output and of the messages; default x's. Between messages the
      sum is made in promote_types(dtype, float32).

  Returns:
    The chunk of this rank.

  Raises:
    ValueError: the size of axis does not divide that dimension.
  """
  n, dtype = jax.lax.axis_size(axis), dtype or x.dtype
  letter = equation.split('->')[1][dim]
  place = _place(equation, letter)[0]
  if x.shape[place] % n:
    raise ValueError(
      f'matmul_scatter {equation}: {letter!r} has size {x.shape[place]}, which '
      f'{n} ranks of {axis!r} do not divide.'
    )

  def share(rank):
    return _product(equation, _take(x, rank, n, place), w, _wide(dtype))

  return _reduced(share, axis, dtype)


def matmul_scatter_gradients(equation, x, w, g, axis, dim, dtype=None):
  """(dx, dw) of `matmul_scatter`.

  One ring of g gives both: its chunks are parts of dx and terms of dw.

  Args:
    equation, x, w, axis, dim: as in `matmul_scatter`.
    g: cotangent of its output; sent and multiplied in x's dtype.
    dtype: of dw; default w's.
  """
  n, dtype = jax.lax.axis_size(axis), dtype or w.dtype
  place = _place(equation, equation.split('->')[1][dim])[0]
  to_dx, to_dw = layouts.transposes(equation)
  dx: Any = None
  dw: Any = 0
  for rank, chunk in _arrivals(g.astype(x.dtype), axis):
    dx = _put(dx, _product(to_dx, chunk, w, x.dtype), rank, n, place)
    dw += _product(to_dw, _take(x, rank, n, place), chunk, _wide(dtype))
  return dx, dw.astype(dtype)
