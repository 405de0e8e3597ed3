"""A vocabulary sharded over mesh axes: its embedding and its loss.

    nll = log sum_v e^z_v - z_target      x = sum over ranks of own rows

Neither gathers a table or logits (Megatron-LM, arXiv:1909.08053, section 3): of
the logits a maximum, a sum and one value per token are reduced, the embedding's
rows are summed by one reduce-scatter along the length. Functions of axis names,
for a manual region (check_vma=False), each with its backward pass written out;
but `linear_nll`, which makes the logits too, a chunk of them at a time, takes
logical names, in any world (annotate.py), as products do (project.py).

Legend: B rows, T tokens, D model, V vocabulary (of one shard).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.sharding import annotate

ROWS = ('batch', 'length')


def nll(z_BTV, targets_BT, axis, scatter=None):
  """Nats of each target under logits whose vocabulary is sharded over `axis`.

  Per token a maximum, a sum and the target's logit are reduced; logits are not.

  Args:
    z_BTV: local columns, rank r holding r * V .. (r + 1) * V - 1 of the whole
      vocabulary. Columns that only pad it must hold -inf.
    targets_BT: global ids, the same on every rank. The host must have checked
      them: an id outside the vocabulary finds no logit and gives log sum exp z.
    axis: mesh axis or tuple of axes.
    scatter: None: every rank gets all of nll. Then the gradient must be taken
      inside the region, every rank seeding the same cotangent, which counts
      once. (A shard_map that is differentiated from outside divides the
      cotangent of a replicated output by the size of `axis`.) Dimension 0 or 1:
      every rank gets its chunk of it, and both ways of differentiating agree.

  Returns:
    nll_BT in promote_types(z's dtype, float32), whole or a chunk.

  Raises:
    ValueError: the ranks do not divide the dimension to scatter.
  """
  _check_scatter(targets_BT, axis, scatter)
  return _nll(axis, scatter, z_BTV, targets_BT)


def _check_scatter(targets_BT, axis, scatter):
  n = jax.lax.axis_size(axis)
  if scatter is not None and targets_BT.shape[scatter] % n:
    raise ValueError(
      f'nll: dimension {scatter} has size {targets_BT.shape[scatter]}, which '
      f'{n} ranks of {axis!r} do not divide.'
    )


def _chunk_of(nll, axis, scatter):
  """This rank's part of dimension `scatter`; None: all."""
  if scatter is None:
    return nll
  n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  size = nll.shape[scatter] // n
  return jax.lax.dynamic_slice_in_dim(nll, me * size, size, scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _nll(axis, scatter, z_BTV, targets_BT):
  return _nll_forward(axis, scatter, z_BTV, targets_BT)[0]


def _hit(z_BTV, targets_BT, axis):
  """Whether a column is the target of its token."""
  columns = jnp.arange(z_BTV.shape[-1])
  local = targets_BT - jax.lax.axis_index(axis) * columns.size
  return columns == local[..., None]


def _nll_forward(axis, scatter, z_BTV, targets_BT):
  z = z_BTV.astype(jnp.promote_types(z_BTV.dtype, jnp.float32))
  highest = jax.lax.pmax(z.max(-1), axis)
  mass = jnp.exp(z - highest[..., None]).sum(-1)
  picked = jnp.where(_hit(z, targets_BT, axis), z, 0).sum(-1)
  mass, picked = jax.lax.psum((mass, picked), axis)
  total = highest + jnp.log(mass)
  nll = _chunk_of(total - picked, axis, scatter)
  return nll, (z_BTV, targets_BT, total)


def _nll_backward(axis, scatter, kept, g):
  """dz = g (softmax z - onehot target): local, nothing to sum over ranks."""
  z_BTV, targets_BT, total = kept
  if scatter is not None:
    g = jax.lax.all_gather(g, axis, axis=scatter, tiled=True)
  p = jnp.exp(z_BTV.astype(total.dtype) - total[..., None])
  dz = g[..., None] * (p - _hit(z_BTV, targets_BT, axis))
  return dz.astype(z_BTV.dtype), None


_nll.defvjp(_nll_forward, _nll_backward)


class _Head(NamedTuple):
  """Static: names of x and w, softcap, rows of w at a time, implementation."""

  x: tuple
  w: tuple
  softcap: float
  chunk: int
  chosen: Any


def linear_nll(x_BTD, x_names, w_VD, w_names, targets_BT, softcap=0.0, chunk=0):
  """Nats of each target under softcap(x w^T), whose logits are never whole.

  A chunk of the logits is made, and made again in the backward pass
  (pallas_kernels/matmul/cross_entropy.py), by each shard of the vocabulary on
  its own; of them three numbers per token are reduced. x and w are gathered as
  they are for logits, in both passes, and their gradients are summed alike.

  Args:
    x_BTD: laid out by `x_names`, whose width is whole.
    w_VD: laid out by `w_names`; multiplied in x's dtype, its gradient is summed
      in its own.
    targets_BT: laid out by ('batch', 'length'), checked by the host.
    softcap: z -> softcap tanh(z / softcap); 0: off.
    chunk: rows of w at a time; 0: chosen by the number of tokens.

  Returns:
    nll_BT in promote_types(x's dtype, float32), laid out as targets are. In a
    manual region every rank of the vocabulary has all of it, and all seed the
    same cotangent, which counts once.

  Raises:
    ValueError: (manual) the backward pass has a sum that x's layout does not
      scatter.
  """
  chosen = registry.resolve(cross_entropy.OP)
  head = _Head(tuple(x_names), tuple(w_names), softcap, chunk, chosen)
  return _linear(head, x_BTD, w_VD, targets_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(head, x_BTD, w_VD, targets_BT):
  return _linear_forward(head, x_BTD, w_VD, targets_BT)[0]


def _linear_forward(head, x_BTD, w_VD, targets_BT):
  run = functools.partial(_forward_part, head)
  run = annotate.region(run, (head.x, head.w, ROWS), (ROWS, ROWS))
  nll, total = run(x_BTD, w_VD, targets_BT)
  return nll, (x_BTD, w_VD, targets_BT, total)


def _linear_backward(head, kept, g):
  outside = annotate.mode() == 'manual'  # who sums over tokens is outside too
  run = functools.partial(_backward_part, head, outside)
  names = head.x, head.w, ROWS, ROWS, ROWS
  run = annotate.region(run, names, (head.x, head.w))
  x, w, targets, total = kept
  dx, dw = run(x, w, targets, total, annotate.put(g, ROWS))
  return dx, dw, None


_linear.defvjp(_linear_forward, _linear_backward)


def _whole(head):
  """Names of x and w as the products need them."""
  return (*ROWS, head.x[2]), (head.w[0], head.x[2])


def _operands(head, x, w, targets):
  """(x_TD, w_VD, targets_T counted from this shard's first row), its axes."""
  x_whole, w_whole = _whole(head)
  x = annotate.move(x, head.x, x_whole)
  w = annotate.move(w.astype(x.dtype), head.w, w_whole)
  axes = annotate.carriers(head.w[0])
  first = jax.lax.axis_index(axes) * len(w) if axes else 0
  return (x.reshape(-1, x.shape[-1]), w, targets.reshape(-1) - first), axes


def _forward_part(head, x, w, targets):
  """(nll, lse) of the tokens of a shard, of the whole vocabulary."""
  rows, axes = _operands(head, x, w, targets)
  total, picked = head.chosen.forward(*rows, head.softcap, head.chunk)
  if axes:
    highest = jax.lax.pmax(total, axes)
    mass = jnp.exp(total - highest)
    mass, picked = jax.lax.psum((mass, picked), axes)
    total = highest + jnp.log(mass)
  return tuple(a.reshape(targets.shape) for a in (total - picked, total))


def _backward_part(head, outside, x, w, targets, total, g):
  """(dx, dw) in the layouts of x and w."""
  rows, axes = _operands(head, x, w, targets)
  flat = total.ravel(), g.ravel(), -g.ravel()
  options = head.softcap, head.chunk, None
  dx, dw = head.chosen.backward(*rows, *flat, options)
  dx = dx.reshape(*targets.shape, -1)
  tokens = sum(map(annotate.carriers, ROWS), ())
  x_whole, w_whole = _whole(head)
  dx, left = _scattered(dx, x_whole, head.x, axes)
  dw, more = _scattered(dw.astype(w.dtype), w_whole, head.w, tokens)
  if outside:
    left = [a for a in left if a not in annotate.deferred()]
    if left:
      raise ValueError(
        f'linear_nll: a sum over {left} that {head.x} does not take (in a '
        'manual region residuals are sharded over tensor: mesh.sequence).'
      )
    return dx, dw
  dx = jax.lax.psum(dx, left) if left else dx
  return dx, (jax.lax.psum(dw, more) if more else dw)


def _scattered(y, whole, names, summed):
  """y from the layout `whole` to `names`, and of the axes over which it is a
  partial sum those that this leaves."""
  left = list(summed)
  for i, (a, b) in enumerate(zip(whole, names, strict=True)):
    for axis in annotate.carriers(b)[len(annotate.carriers(a)) :]:
      if axis in left:
        y = jax.lax.psum_scatter(y, axis, scatter_dimension=i, tiled=True)
        left.remove(axis)
      else:  # the same on all of its ranks
        size = y.shape[i] // jax.lax.axis_size(axis)
        first = jax.lax.axis_index(axis) * size
        y = jax.lax.dynamic_slice_in_dim(y, first, size, i)
  return y, tuple(left)


def embedding(table_VD, ids_BT, axis, dim=1, dtype=None, shared=()):
  """Rows of a table whose rows are sharded over `axis`; tokens are scattered.

  Every rank looks up the ids that it holds, and one reduce-scatter along `dim`
  hands out the sums. Its transpose is an all-gather, so the gradient of the
  table is local; it is summed in the table's dtype.

  Args:
    table_VD: local rows, rank r holding r * V .. (r + 1) * V - 1.
    ids_BT: global ids, the same on every rank. The host must have checked them:
      an id outside the table gives a row of zeros.
    axis: mesh axis or tuple of axes.
    dim: dimension of the result (B, T, D) to scatter, divisible by the ranks.
    dtype: of the result; default the table's.
    shared: the first mesh axes of `axis` that do not scatter: all their ranks
      get the sum. The cotangents that they come back with are added up.
  """
  dtype = jnp.dtype(dtype or table_VD.dtype)
  axis = (axis,) if isinstance(axis, str) else tuple(axis)
  axes = axis, tuple(shared), axis[len(shared) :]
  table = table_VD.shape, table_VD.dtype
  return _embedding(axes, dim, dtype, table, table_VD, ids_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _embedding(axes, dim, dtype, table, table_VD, ids_BT):
  """axes: of the rows, those that share the result, those that scatter it.
  table: (shape, dtype) of table_VD; the backward pass needs nothing else."""
  axis, shared, scatter = axes
  local, mine = _own_rows(axis, table, ids_BT)
  found = table_VD.at[local].get(mode='promise_in_bounds')
  found = jnp.where(mine, found, 0).astype(dtype)
  if scatter:
    found = jax.lax.psum_scatter(
      found, scatter, scatter_dimension=dim, tiled=True
    )
  return jax.lax.psum(found, shared) if shared else found


def _own_rows(axis, table, ids_BT):
  """(local ids, which of them this rank holds); the others point to row 0."""
  (rows, _), _ = table
  local = ids_BT - jax.lax.axis_index(axis) * rows
  mine = (local >= 0) & (local < rows)
  return jnp.where(mine, local, 0), mine[..., None]


def _embedding_forward(axes, dim, dtype, table, table_VD, ids_BT):
  return _embedding(axes, dim, dtype, table, table_VD, ids_BT), ids_BT


def _embedding_backward(axes, dim, dtype, table, ids_BT, g):
  del dtype
  axis, shared, scatter = axes
  shape, wide = table
  g = jax.lax.psum(g, shared) if shared else g
  if scatter:
    g = jax.lax.all_gather(g, scatter, axis=dim, tiled=True)
  g = g.astype(wide)
  local, mine = _own_rows(axis, table, ids_BT)
  zeros = jnp.zeros(shape, wide)
  return zeros.at[local].add(jnp.where(mine, g, 0)), None


_embedding.defvjp(_embedding_forward, _embedding_backward)
