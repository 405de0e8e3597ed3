"""Collective matmul: tensor parallelism as rings, inside a manual region.

    gather_matmul    y = einsum(all_gather(x), w)       column parallel
    matmul_scatter   y = reduce_scatter(einsum(x, w))   row parallel

They are the pair of collectives of sequence-sharded tensor parallelism
(Megatron-LM, arXiv:2205.05198, section 4.2.2) taken apart into one product and
one send per shard: the software form of T3 (arXiv:2401.16677, section 4). In a
gather, a chunk is sent on before it is multiplied; in a scatter, each rank
first makes the chunk that has the longest way to go. Either way no send waits
for the product next to it, so the compiler can overlap the two. With n ranks:

    forward   n - 1 permutes of a chunk (1 / n of the gathered side), n products
    backward  gather_matmul 2 (n - 1), matmul_scatter n - 1 (one ring, two uses)

All functions take names of mesh axes and run in a fully manual shard_map with
check_vma=False. What they keep for the backward pass is local.
Legend: B rows, T tokens, D model, F mlp; x_BTD and the like name
logical dimensions, of which a rank holds its share.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def _send(x, axis, step):
  """x of the rank `step` places before this one."""
  n = jax.lax.axis_size(axis)
  return jax.lax.ppermute(x, axis, [(i, (i + step) % n) for i in range(n)])


def _hops(axis, ways):
  """(direction, farthest distance) of each ring; distances add up to n - 1."""
  n = jax.lax.axis_size(axis)
  return ((1, n // 2), (-1, (n - 1) // 2)) if ways == 2 else ((1, n - 1),)


def _arrivals(x, axis, ways):
  """Yields (rank, its chunk) for every rank: x itself, then what arrives."""
  n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  rings = {direction: x for direction, _ in _hops(axis, ways)}
  yield me, x
  for k in range(1, n):
    for direction, farthest in _hops(axis, ways):
      if k <= farthest:
        rings[direction] = _send(rings[direction], axis, direction)
        yield (me - direction * k) % n, rings[direction]


def _reduced(part, axis, dtype, ways):
  """Sum over ranks of part(rank of the owner); messages have `dtype`.

  `part` gives the local share of an owner's chunk. It is made from the farthest
  owner to the nearest, so that each running sum is sent as soon as it can be.
  """
  n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  # An addition fused into the product would make it wait for the message.
  apart = lambda rank: jax.lax.optimization_barrier(part(rank))
  arrived = []
  for direction, farthest in _hops(axis, ways):
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
  """`whole` (None: nothing yet) with the chunk of `rank` in its place."""
  if whole is None:
    shape = list(chunk.shape)
    shape[dim] *= n
    whole = jnp.zeros(shape, chunk.dtype)
  start = rank * chunk.shape[dim]
  return jax.lax.dynamic_update_slice_in_dim(whole, chunk, start, dim)


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _product(equation, x, w, dtype):
  return jnp.einsum(
    equation, x, w.astype(x.dtype), preferred_element_type=dtype
  )


def _transposes(equation):
  """(of dx from g and w, of dw from x and g).

  x comes first in dw: with g first, XLA on CPU transposes g (project.py).
  """
  ins, out = equation.split('->')
  a, b = ins.split(',')
  return f'{out},{b}->{a}', f'{a},{out}->{b}'


def _place(equation, letter):
  """Dimensions of a letter in the first operand and in the output."""
  ins, out = equation.split('->')
  a, b = ins.split(',')
  if letter in b or letter not in a or letter not in out:
    raise ValueError(
      f'einsum {equation}: {letter!r} must be in the first operand and in the '
      f'output, and not in the second.'
    )
  return a.index(letter), out.index(letter)


def _check(what, size, axis):
  n = jax.lax.axis_size(axis)
  if size % n:
    raise ValueError(
      f'{what} has size {size}, which {n} ranks of {axis!r} do not divide.'
    )


def gather_matmul(
  x, products, axis, dim, dtype=None, ways=2
) -> tuple[jax.Array, ...]:
  """Products of several weights with x gathered once, in one ring.

  Args:
    x: local chunk of an array sharded over `axis` along dimension `dim`.
    products: (equation, w) pairs, as [('BTD,DF->BTF', w_DF)]; x is the first
      operand of each, the letter of `dim` is in the output and not in w. w is
      local (any share of its other letters) and is used in x's dtype.
    axis: name of a mesh axis.
    dim: dimension of x to gather.
    dtype: of the outputs; default x's.
    ways: 2: two rings, half of the chunks each way, for links that carry both
      directions at once; 1: one ring.

  Returns:
    A tuple of arrays einsum(equation, all_gather(x), w), whole along `dim`.
    Gradients: dx in x's dtype, as a reduce-scatter (each message is rounded to
    it), dw summed over the chunks in promote_types(w.dtype, float32).
  """
  equations = tuple(equation for equation, _ in products)
  for equation in equations:
    _place(equation, equation[dim])
  how = axis, dim, ways
  weights = tuple(w for _, w in products)
  return _differentiable_gather(equations, how, dtype, x, weights)


def _gather_matmul(equations, how, dtype, x, weights):
  axis, dim, ways = how
  n = jax.lax.axis_size(axis)
  out: list[Any] = [None] * len(weights)
  for rank, chunk in _arrivals(x, axis, ways):
    for i, (equation, w) in enumerate(zip(equations, weights, strict=True)):
      y = _product(equation, chunk, w, dtype)
      out[i] = _put(out[i], y, rank, n, _place(equation, equation[dim])[1])
  return tuple(out)


def _gather_matmul_forward(equations, how, dtype, x, weights):
  return _gather_matmul(equations, how, dtype, x, weights), (x, weights)


def _gather_matmul_backward(equations, how, dtype, kept, cotangents):
  del dtype
  axis, dim, ways = how
  x, weights = kept
  products = tuple(zip(equations, weights, strict=True))
  return gather_matmul_gradients(x, products, cotangents, axis, dim, ways=ways)


_differentiable_gather: Any = jax.custom_vjp(
  _gather_matmul, nondiff_argnums=(0, 1, 2)
)
_differentiable_gather.defvjp(_gather_matmul_forward, _gather_matmul_backward)


def gather_matmul_gradients(
  x, products, cotangents, axis, dim, dtype=None, ways=2
):
  """(dx, tuple of dw) of `gather_matmul`, for a backward pass of one's own.

  dx: partial sums travel to their owners. dw: x travels once more.

  Args:
    x, products, axis, dim, ways: as in `gather_matmul`.
    cotangents: of its outputs; multiplied in x's dtype.
    dtype: of every dw; default that of its weight.
  """
  n, wide = jax.lax.axis_size(axis), _wide(x.dtype)
  terms = [
    (g.astype(x.dtype), w, _place(e, e[dim])[1], *_transposes(e))
    for g, (e, w) in zip(cotangents, products, strict=True)
  ]

  def share(rank):
    return sum(
      _product(to_dx, _take(g, rank, n, place), w, wide)
      for g, w, place, to_dx, _ in terms
    )

  dws: list[Any] = [0] * len(terms)
  for rank, chunk in _arrivals(x, axis, ways):
    for i, (g, w, place, _, to_dw) in enumerate(terms):
      g = _take(g, rank, n, place)
      dws[i] += _product(to_dw, chunk, g, _wide(dtype or w.dtype))
  return _reduced(share, axis, x.dtype, ways), tuple(
    dw.astype(dtype or w.dtype)
    for dw, (_, w) in zip(dws, products, strict=True)
  )


def matmul_scatter(equation, x, w, axis, dim, dtype=None, ways=2):
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
    ways: as in `gather_matmul`.

  Returns:
    The chunk of this rank.

  Raises:
    ValueError: the size of axis does not divide that dimension.
  """
  letter = equation.split('->')[1][dim]
  size = x.shape[_place(equation, letter)[0]]
  _check(f'matmul_scatter {equation}: {letter!r}', size, axis)
  return _matmul_scatter(equation, (axis, dim, ways), dtype or x.dtype, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul_scatter(equation, how, dtype, x, w):
  axis, dim, ways = how
  n = jax.lax.axis_size(axis)
  place = _place(equation, equation.split('->')[1][dim])[0]

  def share(rank):
    return _product(equation, _take(x, rank, n, place), w, _wide(dtype))

  return _reduced(share, axis, dtype, ways)


def _matmul_scatter_forward(equation, how, dtype, x, w):
  return _matmul_scatter(equation, how, dtype, x, w), (x, w)


def _matmul_scatter_backward(equation, how, dtype, kept, g):
  del dtype
  axis, dim, ways = how
  x, w = kept
  return matmul_scatter_gradients(equation, x, w, g, axis, dim, ways=ways)


_matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def matmul_scatter_gradients(equation, x, w, g, axis, dim, dtype=None, ways=2):
  """(dx, dw) of `matmul_scatter`, for a backward pass of one's own.

  One ring of g serves both: dx puts its chunks together, dw adds them up.

  Args:
    equation, x, w, axis, dim, ways: as in `matmul_scatter`.
    g: cotangent of its output; sent and multiplied in x's dtype.
    dtype: of dw; default w's.
  """
  n, dtype = jax.lax.axis_size(axis), dtype or w.dtype
  place = _place(equation, equation.split('->')[1][dim])[0]
  to_dx, to_dw = _transposes(equation)
  dx: Any = None
  dw: Any = 0
  for rank, chunk in _arrivals(g.astype(x.dtype), axis, ways):
    dx = _put(dx, _product(to_dx, chunk, w, x.dtype), rank, n, place)
    dw += _product(to_dw, _take(x, rank, n, place), chunk, _wide(dtype))
  return dx, dw.astype(dtype)
