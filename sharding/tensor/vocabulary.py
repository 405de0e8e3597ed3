"""Embedding and loss of a vocabulary that is sharded over mesh axes.

    nll = log sum_v e^z_v - z_target      x = sum over ranks of own rows

No table and no logits are gathered (Megatron-LM, arXiv:1909.08053, section 3):
of the logits a maximum, a sum and the target's value are reduced for each
token; the embedding's rows are summed by one reduce-scatter along the length.
`nll` and `embedding` take names of mesh axes, for a manual region with
check_vma=False. `linear_nll`, which also makes the logits, a chunk at a time,
takes logical names and runs in any world (annotate.py), as products do
(project.py). Each has its backward pass written out.

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def nll(z_BTV, targets_BT, axis):
  """Nats of each target under logits whose vocabulary is sharded over `axis`.

  Args:
    z_BTV: local columns, rank r holding r * V .. (r + 1) * V - 1 of the whole
      vocabulary. Columns that only pad it must hold -inf.
    targets_BT: global ids, the same on every rank. The host must have checked
      them: an id outside the vocabulary finds no logit and gives log sum exp z.
    axis: mesh axis or tuple of axes.

  Returns:
    nll_BT in promote_types(z's dtype, float32), the same on every rank. The
    gradient must be taken inside the region, where every rank seeds the same
    cotangent, which counts once.
  """
  return _nll_forward(z_BTV, targets_BT, axis)[0]


def _hit(z_BTV, targets_BT, axis):
  """Whether a column is the target of its token."""
  columns = jnp.arange(z_BTV.shape[-1])
  local = targets_BT - jax.lax.axis_index(axis) * columns.size
  return columns == local[..., None]


def _nll_forward(z_BTV, targets_BT, axis):
  z = z_BTV.astype(jnp.promote_types(z_BTV.dtype, jnp.float32))
  highest = jax.lax.pmax(z.max(-1), axis)
  mass = jnp.exp(z - highest[..., None]).sum(-1)
  picked = jnp.where(_hit(z, targets_BT, axis), z, 0).sum(-1)
  mass, picked = jax.lax.psum((mass, picked), axis)
  total = highest + jnp.log(mass)
  return total - picked, (z_BTV, targets_BT, total)


def _nll_backward(axis, kept, g):
  """dz = g (softmax z - onehot target): local, nothing to sum over ranks."""
  z_BTV, targets_BT, total = kept
  p = jnp.exp(z_BTV.astype(total.dtype) - total[..., None])
  dz = g[..., None] * (p - _hit(z_BTV, targets_BT, axis))
  return dz.astype(z_BTV.dtype), None


nll.defvjp(_nll_forward, _nll_backward)


class _Head(NamedTuple):
  """What is static of `linear_nll`.

  x, w: logical names. softcap, chunk: as there. chosen: the implementation.
  """

  x: tuple
  w: tuple
  softcap: float
  chunk: int
  chosen: Any


def linear_nll(x_BTD, x_names, w_VD, w_names, targets_BT, softcap=0.0, chunk=0):
  """Nats of each target under softcap(x w^T), whose logits are never whole.

  Each shard of the vocabulary makes its logits chunk by chunk, in the forward
  and again in the backward pass (pallas_kernels/matmul/cross_entropy.py); three
  numbers per token are reduced over the shards. x and w are gathered, and their
  gradients summed, as for a product that makes all logits (project.py).

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
  outside = annotate.mode() == 'manual'  # the caller sums dw over tokens
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
  """(x_TD, w_VD, targets_T less this shard's first id), axes of the ids."""
  x_whole, w_whole = _whole(head)
  x = annotate.move(x, head.x, x_whole)
  w = annotate.move(w.astype(x.dtype), head.w, w_whole)
  axes = annotate.carriers(head.w[0])
  first = jax.lax.axis_index(axes) * len(w) if axes else 0
  return (x.reshape(-1, x.shape[-1]), w, targets.reshape(-1) - first), axes


def _forward_part(head, x, w, targets):
  """(nll, log sum exp of all logits) of a shard's tokens."""
  rows, axes = _operands(head, x, w, targets)
  options = cross_entropy.LossOptions(head.softcap, head.chunk)
  total, picked = head.chosen.forward(*rows, options)
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
  options = cross_entropy.LossOptions(head.softcap, head.chunk)
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
  """(y in the layout `names`, mesh axes over which it still is a partial sum).

  y comes in the layout `whole`, a partial sum over the mesh axes `summed`.
  """
  left = list(summed)
  for i, (a, b) in enumerate(zip(whole, names, strict=True)):
    for axis in annotate.carriers(b)[len(annotate.carriers(a)) :]:
      if axis in left:
        y = jax.lax.psum_scatter(y, axis, scatter_dimension=i, tiled=True)
        left.remove(axis)
      else:  # y is the same on all ranks of the axis
        y = annotate.own(y, (axis,), i)
  return y, tuple(left)


class _Table(NamedTuple):
  """What is static of `embedding`.

  axes: over which rows are sharded; shared, scattered: those over which the
  result is whole, and split along the length. shape, dtype: of the table.
  result: dtype of the result.
  """

  axes: tuple
  shared: tuple
  scattered: tuple
  shape: tuple
  dtype: Any
  result: Any


def embedding(table_VD, ids_BT, axis, dtype=None, shared=()):
  """Rows of a table whose rows are sharded over `axis`; tokens are scattered.

  Every rank looks up the ids whose rows it holds, and one reduce-scatter along
  the length sums them. Its transpose is an all-gather, so the gradient of the
  table is local; it is summed in the table's dtype.

  Args:
    table_VD: local rows, rank r holding r * V .. (r + 1) * V - 1.
    ids_BT: global ids, the same on every rank. The host must have checked them:
      an id outside the table gives a row of zeros.
    axis: mesh axis or tuple of axes.
    dtype: of the result; default the table's.
    shared: the first mesh axes of `axis`, over which the result is not split:
      all their ranks get the sum, and their cotangents are added up.

  Returns:
    (B, T / ranks that split it, D).
  """
  dtype = jnp.dtype(dtype or table_VD.dtype)
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  scattered = axes[len(shared) :]
  how = _Table(
    axes, tuple(shared), scattered, table_VD.shape, table_VD.dtype, dtype
  )
  return _embedding(how, table_VD, ids_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embedding(how, table_VD, ids_BT):
  local, mine = _own_rows(how, ids_BT)
  found = table_VD.at[local].get(mode='promise_in_bounds')
  found = jnp.where(mine, found, 0).astype(how.result)
  if how.scattered:
    found = jax.lax.psum_scatter(
      found, how.scattered, scatter_dimension=1, tiled=True
    )
  return jax.lax.psum(found, how.shared) if how.shared else found


def _own_rows(how, ids_BT):
  """(local ids, which of them this rank holds); the others point to row 0."""
  rows = how.shape[0]
  local = ids_BT - jax.lax.axis_index(how.axes) * rows
  mine = (local >= 0) & (local < rows)
  return jnp.where(mine, local, 0), mine[..., None]


def _embedding_forward(how, table_VD, ids_BT):
  return _embedding(how, table_VD, ids_BT), ids_BT


def _embedding_backward(how, ids_BT, g):
  g = jax.lax.psum(g, how.shared) if how.shared else g
  if how.scattered:
    g = jax.lax.all_gather(g, how.scattered, axis=1, tiled=True)
  g = g.astype(how.dtype)
  local, mine = _own_rows(how, ids_BT)
  zeros = jnp.zeros(how.shape, how.dtype)
  return zeros.at[local].add(jnp.where(mine, g, 0)), None


_embedding.defvjp(_embedding_forward, _embedding_backward)
