"""One pass of the model with a cache: a whole prompt, or one token a row.

Rows have prompts of different lengths. They are right-padded to one length T,
so that all rows write the same slots; the empty ones have segment 0, and what a
token sees goes by segment and position, never by slot. A row that has ended
goes on writing empty slots. So a row's numbers are those it has alone.

Legend: B rows, T prompt tokens (padded), S cache slots, D model, V vocabulary.
"""

import jax.numpy as jnp

from paraxis.models import batch as batch_lib
from paraxis.sharding import annotate


def _batch(tokens, segments, positions):
  return batch_lib.Batch(tokens, None, segments, positions, None, None)


def prefill(model, params, tokens_BT, lengths_B, slots):
  """Features of the prompts, and a cache with room for slots - T more tokens.

  Args:
    model: models.decoder.Decoder.
    params: as `model.unstack` gives them.
    tokens_BT: int32, valid ids everywhere.
    lengths_B: int32, tokens of each row; 0: an empty row.
    slots: S >= T.

  Returns:
    (x_BTD, decoder.Cache of S slots).
  """
  rows, length = tokens_BT.shape
  order = jnp.arange(length, dtype=jnp.int32)
  segments = (order < lengths_B[:, None]).astype(jnp.int32)
  positions = jnp.where(segments > 0, order, 0)
  # The prompt attends to T slots only; the others are added afterwards.
  cache = model.init_cache(rows, length)
  batch = _batch(tokens_BT, segments, positions)
  x_BTD, cache = model(params, batch, cache)
  return x_BTD, model.grow_cache(cache, slots)


def last(x_BTD, lengths_B):
  """Features of the last token of every row: (B, 1, D); empty rows: 0."""
  order = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)
  here = (order == lengths_B[:, None] - 1)[:, :, None]
  return jnp.sum(jnp.where(here, x_BTD, 0), 1, keepdims=True)


def advance(model, params, cache, token_B, position_B, live_B):
  """Feeds one token a row -> (logits_BV, cache).

  Args:
    model, params: as for `prefill`.
    cache: decoder.Cache with a free slot.
    token_B, position_B: int32. live_B: bool, False: an ended or empty row.
  """
  one = lambda x: annotate.put(x.astype(jnp.int32)[:, None], ('batch', None))
  batch = _batch(one(token_B), one(live_B), one(position_B))
  x_B1D, cache = model(params, batch, cache)
  return model.logits(params, x_B1D)[:, 0], cache
