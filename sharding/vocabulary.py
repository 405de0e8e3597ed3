"""A vocabulary sharded over mesh axes: its embedding and its loss.

    nll = log sum_v e^z_v - z_target      x = sum over ranks of own rows

Neither gathers a table or logits (Megatron-LM, arXiv:1909.08053, section 3): of
the logits a maximum, a sum and one value per token are reduced, the embedding's
rows are summed by one reduce-scatter along the length. `linear_nll` does not
even make its own logits whole. Functions of axis names, for a manual region
(check_vma=False), each with its backward pass written out.

Legend: B rows, T tokens, D model, V vocabulary (of one shard).
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import cross_entropy


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


def linear_nll(x_BTD, w_VD, targets_BT, axis, scatter=None, options=(0.0, 0)):
  """`nll` of softcap(x w^T): of the logits a chunk at a time is made, and
  made again in the backward pass (pallas_kernels/cross_entropy.py).

  Args:
    x_BTD: the same on every rank. Its cotangent is that of the local columns:
      what made x the same must add them up, as the transpose of an all-gather
      does.
    w_VD: local rows, rank r holding r * V .. (r + 1) * V - 1.
    targets_BT, axis, scatter: as for `nll`, which says what comes back.
    options: (softcap, rows of w at a time (0: chosen)), or these and the size
      of the vocabulary, when the last rows of the last ranks only pad it.
  """
  _check_scatter(targets_BT, axis, scatter)
  return _linear_nll(axis, scatter, options, x_BTD, w_VD, targets_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _linear_nll(axis, scatter, options, x_BTD, w_VD, targets_BT):
  return _linear_forward(axis, scatter, options, x_BTD, w_VD, targets_BT)[0]


def _local(axis, options, x_BTD, w_VD, targets_BT):
  """(x_TD, w_VD, targets_T counted from this rank's first row), options."""
  softcap, chunk, *size = options
  first = jax.lax.axis_index(axis) * len(w_VD)
  rows = x_BTD.reshape(-1, x_BTD.shape[-1]), w_VD, targets_BT.ravel() - first
  return rows, (softcap, chunk, size[0] - first if size else None)


def _linear_forward(axis, scatter, options, x_BTD, w_VD, targets_BT):
  rows, local = _local(axis, options, x_BTD, w_VD, targets_BT)
  lse, picked = cross_entropy.forward(*rows, *local)
  highest = jax.lax.pmax(lse, axis)
  mass, picked = jax.lax.psum((jnp.exp(lse - highest), picked), axis)
  total = highest + jnp.log(mass)
  nll = (total - picked).reshape(targets_BT.shape)
  return _chunk_of(nll, axis, scatter), (x_BTD, w_VD, targets_BT, total)


def _linear_backward(axis, scatter, options, kept, g):
  *arrays, total = kept
  if scatter is not None:
    g = jax.lax.all_gather(g, axis, axis=scatter, tiled=True)
  rows, local = _local(axis, options, *arrays)
  dx, dw = cross_entropy.backward(*rows, total, g.ravel(), -g.ravel(), local)
  return dx.reshape(arrays[0].shape), dw, None


_linear_nll.defvjp(_linear_forward, _linear_backward)


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
