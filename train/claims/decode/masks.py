"""Claims about what a masked model learns: the loss is a bound of likelihood.

The loss of train/data/objectives.py is, in expectation over masks, the mean
over all orders of the tokens of the nats of a row that is written in that order
(arXiv:2502.09992, appendix; Uria et al., arXiv:1310.1757), and so an upper
bound of the nats of the mixture of all orders, - ln mean exp(- nats).

Legend: T tokens of a row.
"""

import dataclasses
import itertools
import math

import jax
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.models.mixers import attention
from paraxis.train import loss as loss_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks
from paraxis.train.data import objectives


def any_order(run, *, changes, length, steps, at_most):
  """EQ: distance of the masked loss to the mean over orders, standard errors.

  Every order is walked token by token, without the objective's code.

  Args:
    changes: {'section.field': value}; the model has random parameters. length:
      T of the row. steps: of 64 rows, over which the loss is averaged. at_most:
      standard errors.
  """
  with jax.enable_x64(True):
    made = on_tasks.random(run, changes)
    model, config = made.built.model, run.config
    config = experiment.fields(config, changes)
    mask = config.model.mask_id
    row = np.random.default_rng(3).integers(0, mask, length).astype(np.int32)
    order = np.arange(length, dtype=np.int32)
    shown = np.array(list(itertools.product((False, True), repeat=length)))
    ids = np.where(shown, row, mask).astype(np.int32)
    ones = np.ones_like(ids)
    every = experiment.rows_of(ids, ones, ones.cumsum(1) - 1)
    params = experiment.random_parameters(model)
    z = model.logits(params, model.features(params, every)[0])
    nats = -np.asarray(jax.nn.log_softmax(z, -1))[:, order, row]
    of = {tuple(s): n for s, n in zip(shown.tolist(), nats, strict=True)}
    exact = np.array(
      [_walked(of, o) for o in itertools.permutations(range(length))]
    )
    found, direct = _drawn(config, row, of, steps)
    # One batch through the loss itself, which sums what the table says.
    total = float(
      jax.jit(loss_lib.total, static_argnums=0)(model, params, direct[0])
    )
  means = found.reshape(steps, -1).mean(1)  # rows of a step share their noise
  error = means.std(ddof=1) / steps**0.5
  gap = abs(found.mean() - exact.mean()) / error
  mixture = -math.log(np.exp(-exact).mean())
  same = abs(total - direct[1]) <= 1e-9 * abs(direct[1])
  return claims.Outcome(
    f'at most {at_most:g} standard errors',
    f'{gap:.1f}',
    f'{found.mean():.4f} nats a row by the loss of {64 * steps:,} rows, '
    f'{exact.mean():.4f} over all {len(exact)} orders of {length} tokens; the '
    f'mixture of orders has {mixture:.4f}, which it bounds; one batch through '
    f'the loss is {"the same" if same else "NOT the same"} sum',
    gap <= at_most and same and exact.mean() >= mixture,
  )


def _walked(nats, order):
  """Nats of the row, its tokens shown one by one in an order."""
  shown, total = [False] * len(order), 0.0
  for i in order:
    total += nats[tuple(shown)][i]
    shown[i] = True
  return total


def _drawn(config, row, nats, steps):
  """(nats of each drawn row, (the first batch, the sum of its nats))."""
  count, length = 64, len(row)
  ids = np.tile(row, (count, 1))
  ones = np.ones_like(ids)
  places = (ones.cumsum(1) - 1).astype(np.int32)
  clean = batch_lib.Batch(
    ids, ids, ones, places, ones.astype(np.float32), np.float32(count * length)
  )
  found, first = [], None
  for t in range(steps):
    batch = objectives.batch(config, clean, t, range(count), count)
    shown = batch.tokens != config.model.mask_id
    table = np.array([nats[tuple(s)] for s in shown.tolist()])
    sums = (np.asarray(batch.weights, float) * table).sum(1)
    found.extend(sums)
    first = first or (batch, float(sums.sum()))
  return np.array(found), first


def unweighted():
  """Knock-out: a mask counts once, however rare masks were."""
  made = objectives.batch

  def batch(*given):
    out = made(*given)
    return out._replace(weights=np.where(out.weights > 0, 1.0, 0.0))

  return knockouts.patched(objectives, 'batch', batch)


def nothing_ahead():
  """Knock-out: a shard of a row passes over keys of its last block that the
  next shard holds."""
  made = attention.mask_of
  near = lambda *given: dataclasses.replace(made(*given), ahead=0)
  return knockouts.patched(attention, 'mask_of', near)
