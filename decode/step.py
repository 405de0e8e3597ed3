"""One pass of the model with a cache: a whole prompt, or one token a row.

Rows have prompts of different lengths n_b. They are right-padded to one length
T; then the slots of each row are rotated by T - n_b, so that its prompt ends in
slot T - 1 and every step writes the same slot of all rows:

    prompt   a b c . .        cache   . . a b c | d e
             f g h i j                f g h i j | k l

So a row's tokens fill one range of slots, which ends with the newest one, and
a kernel need not read others (pallas_kernels/decode_attention/op.py). A row
that has ended continues to write empty slots. A row's numbers do not depend on
other rows.

Legend: B rows, T prompt tokens (padded), S cache slots, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import batch as batch_lib
from paraxis.models import layer
from paraxis.models.mixers import protocol as mixer
from paraxis.sharding import annotate


def place(ids, length, mesh):
  """Prompts on a mesh whose rules are in force, with as few empty rows behind
  them as make the batch shards divide B.

  Args:
    ids: lists of at most `length` token ids.

  Returns:
    (tokens_BT, 0 behind each prompt; lengths_B), int32.
  """
  shards = annotate.shards('batch')
  rows = -(-len(ids) // shards) * shards
  tokens, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
  for i, row in enumerate(ids):
    tokens[i, : len(row)], lengths[i] = row, len(row)
  return put(tokens, mesh), put(lengths, mesh)


def put(x, mesh):
  """x (B, ...) with its rows sharded by the rules in force."""
  spec = annotate.spec(('batch',) + (None,) * (x.ndim - 1), x.shape)
  return jax.device_put(x, jax.NamedSharding(mesh, spec))


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
    (x_BTD, padded as the tokens; decoder.Cache of S slots, the first T - n_b
    of a row empty).
  """
  rows, length = tokens_BT.shape
  order = jnp.arange(length, dtype=jnp.int32)
  segments = (order < lengths_B[:, None]).astype(jnp.int32)
  positions = jnp.where(segments > 0, order, 0)
  # The prompt attends to T slots only; the others are added afterwards.
  cache = model.init_cache(rows, length)
  batch = _batch(tokens_BT, segments, positions)
  x_BTD, cache = model(params, batch, cache)
  cache = _shift(cache, model.pattern, length - lengths_B)
  return x_BTD, model.grow_cache(cache, slots)


def _shift(cache, pattern, empty_B):
  """The cache with the last empty_B slots of each row in front."""
  shift = lambda x: mixer.shift_slots(x, empty_B, 1)
  states = tuple(
    layer.MIXERS[kind[0]].shift(state, empty_B)
    for kind, state in zip(pattern, cache.states, strict=True)
  )
  return cache._replace(
    states=states,
    segments=shift(cache.segments),
    positions=shift(cache.positions),
  )


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
