"""Gradient coding: a step's gradient from workers of which some do not deliver.

Worker i, a place along the mesh axis `data`, reads the rows of s + 1 of n
workers and takes one gradient, of a weighted loss; any n - s of them suffice:

    l_i = sum_j B_ij g_j,   j = i .. i + s (mod n)
    g = sum_i a_i l_i,      a_i = 0 where nothing arrived, a B = 1

(Tandon et al., ICML 2017; the cyclic code of their algorithm 2). B is drawn
once; a depends on who delivered, and is solved on the host. Cost: s + 1 times
the operations, and the tokens of all workers, gathered as integers.

In one program no worker can fail to deliver: who is late is said by `shares`,
and what it computed is then not read. When workers are late is simulated
(sharding/planner/sequential_coding.py).

Legend: A microbatches, B rows, T tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.train import expert_counts
from paraxis.train.steps import gradients as gradients_lib

AXIS = 'data'

DRAWS = 16


def cyclic(n, tolerates, seed=0):
  """(n, n) float64: a code of n workers of which so many may be missing.

  Rows of the null space of a random matrix whose columns sum to 0, so that any
  n - s of them span the ones: of DRAWS such codes the one whose numbers are
  smallest, as large ones cancel when they are decoded.
  """
  rng, s = np.random.default_rng(seed), tolerates
  codes = [_drawn(rng, n, s) for _ in range(DRAWS)]
  return min(codes, key=lambda code: np.abs(code).max())


def _drawn(rng, n, s):
  code = np.eye(n)
  if s:
    check = rng.normal(size=(s, n))
    check[:, -1] = -check[:, :-1].sum(1)
    for i in range(n):
      own = (i + 1 + np.arange(s)) % n
      code[i, own] = -np.linalg.solve(check[:, own], check[:, i])
  return code


def decoding(code, arrived):
  """(n,) weights of what arrived, 0 elsewhere: their sum is that of all chunks.

  Args:
    code: of `cyclic`. arrived: (n,) bool.

  Raises:
    UserError: fewer arrived than the code needs.
  """
  arrived = np.asarray(arrived, bool)
  n, tolerates = len(code), int((code[0] != 0).sum()) - 1
  if arrived.sum() < n - tolerates:
    raise errors.UserError(
      f'{arrived.sum()} of {n} workers delivered, and the code tolerates '
      f'{tolerates} stragglers: it needs {n - tolerates}. Wait for more, or '
      'take a code that tolerates more.'
    )
  shares = np.zeros(n)
  rows = code[arrived].T
  shares[arrived] = np.linalg.lstsq(rows, np.ones(n), rcond=None)[0]
  return shares


class _Decoded(gradients_lib.PerShard):
  """Layouts of a region in which what a worker found counts by its share."""

  share: jax.Array  # (), set within the region

  def _counted(self, x):  # a straggler's numbers are not there: no 0 x NaN
    return jnp.where(self.share == 0, 0, self.share.astype(x.dtype) * x)

  def whole(self, nats, aux):
    return super().whole(*jax.tree.map(self._counted, (nats, aux)))

  def sums(self, path, gradient):  # ZeRO may add up workers from here on
    return super().sums(path, self._counted(gradient))


def _own_rows(batch, code):
  """The rows of a worker's chunks, their weights times the code's."""
  i = jax.lax.axis_index(AXIS)
  reads = int((code[0] != 0).sum())
  row = jnp.roll(jnp.asarray(code)[i], -i)[:reads]

  def chunks(x):
    every = jax.lax.all_gather(x, AXIS)  # (n, .., B, T)
    mine = jnp.roll(every, -i, 0)[:reads]
    if x is batch.weights:
      mine = mine * row.reshape(-1, *[1] * x.ndim)
    mine = jnp.moveaxis(mine, 0, -3)
    return mine.reshape(*x.shape[:-2], reads * x.shape[-2], x.shape[-1])

  return batch._replace(
    **{
      name: chunks(getattr(batch, name))
      for name in ('tokens', 'targets', 'segments', 'positions', 'weights')
    }
  )


def gradients(built, code, shares, params, batch, cotangent=1.0):
  """Step.grads of the workers along `data`, by who delivered.

  Args:
    built: models.build.Built. code: of `cyclic`, of as many workers.
    shares: (n,), of `decoding`.
    params, batch, cotangent: as of Step.grads.

  Raises:
    UserError: another number of workers; a model with experts.
  """
  n = built.mesh.shape[AXIS]
  if n != len(code):
    raise errors.UserError(
      f'a code of {len(code)} workers on mesh.{AXIS}={n}: give as many places.'
    )
  if expert_counts.paths(built.model):
    raise errors.UserError(
      'a coded gradient of a model with experts: their counts are no sum over '
      'chunks; take model.experts.count=0.'
    )

  def of_shard(built, layouts, params, batch, cotangent, shares):
    layouts.share = shares[jax.lax.axis_index(AXIS)]
    rows = _own_rows(batch, code)
    return gradients_lib.of_batch(built, layouts, params, rows, cotangent)

  given = params, batch, cotangent, _Decoded, [jnp.asarray(shares)]
  return gradients_lib.in_region(built, of_shard, *given)
