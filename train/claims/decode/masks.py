"""Claims about what a masked model learns, and about blocks in a cache.

The loss of train/data/objectives.py is, in expectation over masks, the mean
over all orders of the tokens of the nats of a row that is written in that order
(arXiv:2502.09992, appendix; Uria et al., arXiv:1310.1757), and so an upper
bound of the nats of the mixture of all orders, - ln mean exp(- nats).

Legend: T tokens of a row.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode.unmask import canvas
from paraxis.decode.unmask import sub_blocks
from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import pairs
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
  found: list = []
  first: Any = None
  for t in range(steps):
    batch = objectives.batch(config, clean, t, range(count), count)
    shown = batch.tokens != config.model.mask_id
    table = np.array([nats[tuple(s)] for s in shown.tolist()])
    sums = (np.asarray(batch.weights, float) * table).sum(1)
    found.extend(sums)
    first = first or (batch, float(sums.sum()))
  return np.array(found), first


def behind_clean(run, *, changes, length, within):
  """EQ: features of block diffusion's pairs of rows, and of plain rows of the
  clean blocks before a block and this one with its masks, block by block; and
  the gradients of a weighted sum of them.

  Args:
    changes: {'section.field': value}. length: of two rows.
  """
  with jax.enable_x64(True):
    config = experiment.fields(
      run.config, {'model.dtype': 'float64', 'model.param_dtype': 'float64'},
      changes,
    ).model  # fmt: skip
    plain, paired = decoder.Decoder(config), decoder.Decoder(config, pairs=True)
    params = experiment.random_parameters(plain)
    rng = np.random.default_rng(2)
    ids = rng.integers(0, config.mask_id, (2, length))
    hidden = rng.random(ids.shape) < 0.5
    noisy, size = np.where(hidden, config.mask_id, ids), config.block
    weights = rng.normal(size=(*ids.shape, config.d_model))

    def one(params):
      x = _features(paired, params, np.where(hidden, -1 - ids, ids))
      return (x * weights).sum(), x

    def by_blocks(params):
      parts = []
      for first in range(0, length, size):
        row = [ids[:, :first], noisy[:, first : first + size]]
        x = _features(plain, params, np.concatenate(row, 1))[:, first:]
        if config.mask_shift and x.shape[1] == size:
          clean = _features(plain, params, ids[:, : first + size])
          x = jnp.concatenate([x[:, :-1], clean[:, -1:]], 1)
        parts.append(x)
      x = jnp.concatenate(parts, 1)
      return (x * weights).sum(), x

    grads, found = jax.jit(jax.grad(one, has_aux=True))(params)
    wanted, want = jax.jit(jax.grad(by_blocks, has_aux=True))(params)
  gaps = {f'gradient of {p}': experiment.gap(grads[p], wanted[p])
          for p in params}  # fmt: skip
  for first in range(0, length, size):
    here = slice(first, first + size)
    gaps[f'block {first // size}'] = experiment.gap(
      found[:, here], want[:, here]
    )
  return experiment.equal(
    gaps, within,
    f'2 rows of {length} tokens in blocks of {size}, half of them masked, '
    'float64, random parameters; features and gradients of one pass against '
    'those of one for each block',
  )  # fmt: skip


def _features(model, params, ids):
  ones = np.ones_like(ids)
  rows = experiment.rows_of(ids, ones, ones.cumsum(1) - 1)
  return model.features(params, rows)[0]


def _gaps(read, config, prompt, result, width):
  """Largest differences of log probabilities of a text, along its trace:
  [those of first calls of a canvas, those of its further calls].

  Args:
    read: (row, how many of its tokens are there) -> logits of `row`.
    width: of a canvas, a block or a sub-block.
  """
  trace = result['trace']
  size, gaps = config.block, [0.0, 0.0]
  row = list(prompt) + [config.mask_id] * len(result['tokens'])
  at, last = len(prompt) // size * size, -1
  for call in np.flatnonzero(trace.final.any(1)):
    end = min(at + size, len(row))
    z = np.array(read(np.array(row), end), float)
    z[:, config.mask_id] = -np.inf
    lp = np.asarray(jax.nn.log_softmax(z, -1))
    begin = at + row[at:end].index(config.mask_id) // width * width
    for c in np.flatnonzero(trace.final[call]):
      token = row[begin + c] = int(trace.tokens[call, c])
      place = begin + c - config.mask_shift
      gap = abs(lp[place, token] - trace.logprobs[call, c])
      gaps[begin == last] = max(gaps[begin == last], gap)
    last = begin
    at += size if config.mask_id not in row[at:end] else 0
  return gaps if row[len(prompt) :] == result['tokens'] else [np.inf, np.inf]


def _decoded(run, changes, prompts, new, policy):
  """([gap of first calls, of further calls], what was decoded in words)."""
  with jax.enable_x64(True):
    made = on_tasks.random(run, changes)
    model = made.built.model
    config, params = model.config, experiment.random_parameters(model)
    rng = np.random.default_rng(4)
    ids = [
      rng.integers(0, config.mask_id, 3 + i % 6).tolist()
      for i in range(prompts)
    ]
    results = made.generate(
      ids, trace=True, method='unmask', unmask=policy, max_new_tokens=new,
      temperature=0.7,
    )  # fmt: skip
    width = policy.get('sub_block') or config.block

    @jax.jit
    def read(row, end):
      there = (jnp.arange(len(row)) < end).astype(jnp.int32)[None]
      rows = experiment.rows_of(row[None], there, jnp.cumsum(there, 1) - 1)
      return model.logits(params, model.features(params, rows)[0])[0]

    gaps = [
      _gaps(read, config, *row, width) for row in zip(ids, results, strict=True)
    ]
    tokens = sum(int(r['trace'].final.sum()) for r in results)
    calls = sum(int(r['trace'].calls) for r in results)
  if tokens != prompts * new:
    gaps.append([np.inf, np.inf])
  return np.max(gaps, 0), (
    f'{tokens} tokens of {prompts} texts in {calls} calls, temperature 0.7, '
    'float64; the largest difference of a log probability in nats, as float32'
  )


def exact_cache(run, *, changes, prompts, new, policy, within):
  """EQ: log probabilities of all tokens that calls make final, over cached
  blocks, and of a pass over the row as it was before the call.

  Args:
    changes: {'section.field': value}. prompts: how many. new: tokens. policy:
      fields of decode.unmask.
  """
  gaps, words = _decoded(run, changes, prompts, new, policy)
  gap = max(gaps)
  return claims.Outcome(f'<= {within:.0e}', f'{gap:.1e}', words, gap <= within)


def near_cache(run, *, changes, prompts, new, policy, within, at_least):
  """EQ: as `exact_cache`, of first calls of a sub-block; later ones must
  differ, as they read what others saw of masks that are text by now.

  Args:
    changes, prompts, new, policy: as of `exact_cache`. at_least: nats by which
      the worst of the later calls is wrong.
  """
  (first, later), words = _decoded(run, changes, prompts, new, policy)
  return claims.Outcome(
    f'<= {within:.0e} at first, >= {at_least:g} later',
    f'{first:.1e}, {later:.2g}',
    f'{words}: at the first call of a sub-block, and at later ones',
    first <= within and later >= at_least,
  )


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


def masks_before():
  """Knock-out: a block sees those before it as they were masked."""
  attend = pairs.attend

  def blind(how, q, k, v, *more):
    k, v = (pairs.together(*[pairs.apart(x)[0]] * 2) for x in (k, v))
    return attend(how, q, k, v, *more)

  return knockouts.patched(pairs, 'attend', blind)


def nothing_read_first():
  """Knock-out: a sub-block is read alone at its first call too, once its block
  was read."""
  passed = sub_blocks.SubBlocks._passed

  def alone(self, params, state, at, masks, live):
    own = state.own
    known = (own.read >= own.at) & (own.read < at) & masks.any(1)
    own = own._replace(read=jnp.where(known, at, own.read))
    return passed(self, params, state._replace(own=own), at, masks, live)

  return knockouts.patched(sub_blocks.SubBlocks, '_passed', alone)


def old_keys_too():
  """Knock-out: tokens that are read alone see the keys that they had before."""
  made = packed_lib.in_range

  def every(ids, slots):
    return made(ids._replace(hole=None), slots)

  return knockouts.patched(packed_lib, 'in_range', every)


def no_clean_pass():
  """Knock-out: a block is committed by the call that fills it, so the cache has
  keys of its masks."""
  call = canvas.Unmask.call

  def early(self, params, state, draws, live, ends):
    after = call(self, params, state, draws, live, ends)
    own, old = after.own, state.own
    there = old.at[:, None] + jnp.arange(self.block) < old.end[:, None]
    there &= live[:, None]
    left = canvas.window(own.row, old.at, self.block) == self._mask
    full = live & (own.at == old.at) & ~(left & there).any(1)
    _, flight = self._block(params.model, state, there)
    keep = full[:, None] & there
    cache = self._model.commit(after.cache, flight, self._form(old), keep)
    at = own.at + jnp.where(full, self.block, 0)
    calls = jnp.where(full, 0, own.calls)
    return after._replace(cache=cache, own=own._replace(at=at, calls=calls))

  return knockouts.patched(canvas.Unmask, 'call', early)
