"""A filter: which of the tokens that were drawn are right already.

    p = sigmoid(W2 silu(W1 c + b1) + b2)

c are the confidences of the C places of a canvas, 1 where no mask is; p is how
likely a place holds what it will hold in the end (Learn2PD, arXiv:2509.25188,
section 4). It is a score as any other (policies.py), for
decode.unmask.score=filter and count=threshold.

It learns from the decoding that knows the end (extremely greedy parallel
decoding, section 3): of every call, all drawn tokens that are those of the text
in the end become final. The text is that of the model itself, one token a call.

Legend: N rows, T tokens, C places of a canvas, K calls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.configs.base import errors
from paraxis.decode.drafts import heads

KIND = 'filter'


def initial(places, seed=0):
  """{name: array} float32 of a filter of a canvas of C places."""
  rng = np.random.default_rng(seed)
  weight = lambda: rng.normal(0, places**-0.5, (places, places))
  made = dict(inner=weight(), outer=weight(), inner_bias=np.zeros(places),
              outer_bias=np.zeros(places))  # fmt: skip
  return {name: np.float32(x) for name, x in made.items()}


def logits(own, confidence_BC, open_BC):
  """(B, C) float32: of the log odds that a place holds its token.

  Args:
    own: {name: array} as of `initial`. open_BC: bool, the masks.
  """
  c = jnp.where(open_BC, confidence_BC.astype(jnp.float32), 1)
  c = jax.nn.silu(c @ own['inner'] + own['inner_bias'])
  return c @ own['outer'] + own['outer_bias']


def score(own, confidence_BC, open_BC):
  """(B, C) float32 in [0, 1]; arguments as of `logits`."""
  return jax.nn.sigmoid(logits(own, confidence_BC, open_BC))


def check(about, places):
  """UserError if a file is no filter of canvases of so many places.

  about: heads.About, or None.
  """
  if about is None:
    raise errors.UserError(
      'decode.unmask.score=filter reads a trained filter: name its file with '
      'decode.draft (`paraxis draft --method=filter` trains one).'
    )
  if len(about.accuracy) != places:
    raise errors.UserError(
      f'decode.draft: a filter of canvases of {len(about.accuracy)} tokens, '
      f'and here they have {places} (decode.unmask.block, model.block).'
    )


class Records(NamedTuple):
  """What filters learn from; a row for each call of each text.

  confidence: (M, C) float32. open: (M, C) bool, the masks. right: (M, C) bool,
  those whose drawn token is the text's.
  """

  confidence: Any
  open: Any
  right: Any


def guided(read, rows_NT, at, width, mask):
  """(calls of each row (N,), Records) of the decoding that knows the end.

  Where no drawn token is right, the text's own becomes final at the place of
  the most confidence.

  Args:
    read: ids (N, T) -> (likeliest tokens (N, T), their probabilities), at the
      place of each mask. rows_NT: texts to their end. at: where the canvases
      begin. width: C. mask: its id.
  """
  rows_NT = np.asarray(rows_NT)
  row, calls, found = rows_NT.copy(), np.zeros(len(rows_NT), int), []
  row[:, at:] = mask
  for first in range(at, rows_NT.shape[1], width):
    here = slice(first, min(first + width, rows_NT.shape[1]))
    while (row[:, here] == mask).any():
      tokens, p = (np.asarray(x)[:, here] for x in read(row))
      masks = row[:, here] == mask
      right = masks & (tokens == rows_NT[:, here])
      best = np.where(masks, p, -1.0).argmax(1)
      none = masks.any(1) & ~right.any(1)
      taken = right.copy()
      taken[none, best[none]] = True
      live = masks.any(1)
      short = width - masks.shape[1]
      fill = lambda x, live=live, short=short: np.pad(
        x[live], ((0, 0), (0, short))
      )
      found.append(Records(fill(p), fill(masks), fill(right)))
      row[:, here] = np.where(taken, rows_NT[:, here], row[:, here])
      calls += live
  return calls, Records(*(np.concatenate(x) for x in zip(*found, strict=True)))


def fit(records, steps=2000, batch=256, rate=1e-2, seed=0):
  """{name: array} of a filter, by cross entropy over the masks of Records."""
  own = jax.tree.map(jnp.asarray, initial(records.open.shape[1], seed))
  tx = optax.adam(optax.cosine_decay_schedule(rate, max(steps, 1)))

  def loss(own, confidence, masks, right):
    z = logits(own, confidence, masks)
    each = optax.sigmoid_binary_cross_entropy(z, right.astype(jnp.float32))
    return jnp.where(masks, each, 0).sum() / jnp.maximum(masks.sum(), 1)

  @jax.jit
  def update(own, state, *given):
    value, grads = jax.value_and_grad(loss)(own, *given)
    change, state = tx.update(grads, state)
    return optax.apply_updates(own, change), state, value

  rng, state, value = np.random.default_rng(seed), tx.init(own), 0.0
  for _ in range(steps):
    at = rng.integers(0, len(records.open), batch)
    own, state, value = update(own, state, *(x[at] for x in records))
  if not np.isfinite(float(value)):
    raise errors.IntegrityError(
      f'training of the filter diverged: its loss is {float(value)} after '
      f'{steps} steps; take a smaller rate than {rate:g}.'
    )
  return jax.tree.map(np.asarray, own)


def about(model, tokenizer, own, records):
  """heads.About of a filter, for `heads.save`.

  Args:
    model: schema.Model. tokenizer: its fingerprint. own: of `fit`. records:
      Records; how often it is right about masks of each place is kept.
  """
  said = np.asarray(logits(own, records.confidence, records.open)) > 0
  hits = ((said == records.right) & records.open).sum(0)
  share = hits / np.maximum(records.open.sum(0), 1)
  shape = model.vocab_size, model.d_model, model.num_layers
  each = tuple((float(x),) for x in share)
  return heads.About(KIND, 0, shape, tokenizer, each)
