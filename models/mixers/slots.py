"""Attention of a step over the slots of a cache; ids of chunks of documents.

A step writes its keys and values into slots and attends to the slots: one query
a row to a range of them (`attend_range`), many queries blockwise.

A cache is (B, K, S, H): the slots of a head lie one after the other, so the
products of a step read it in place (pallas_kernels/decode_attention/op.py).

Legend: B rows, T query tokens, S cache slots, N heads, K kv heads, H head width
(V of values).
"""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models.mixers import protocol as mixer
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.decode_attention import op as decode_attention

SLOTS = ('batch', None)
NAMES = ((), mixer.ROWS, SLOTS, mixer.ROWS, SLOTS)  # of `slot_ids`


class SlotIds(NamedTuple):
  """What decides which slots a query sees; dimensions as in NAMES."""

  slot: Any
  segments: Any
  slot_segments: Any
  positions: Any
  slot_positions: Any


def slot_ids(see):
  """`SlotIds` of a batch."""
  return SlotIds(*(getattr(see, name) for name in SlotIds._fields))


def chunks(segments, positions, chunk, length):
  """Ids as of segments: of the chunks of every document; 0: padding.

  Args:
    segments, positions: (B, T) int32. chunk: 0: segments stay as they are.
    length: tokens of a whole row, or slots. A row has no more segments.
  """
  if not chunk:
    return segments
  every = np.iinfo(np.int32).max // (length + 1)  # ids of a document
  if length > every * chunk:
    raise errors.UserError(
      f'model.attention_chunk={chunk}: a row of {length} tokens may have '
      f'{length} documents of {-(-length // chunk)} chunks, more than int32 '
      'counts; take longer chunks or shorter rows.'
    )
  return jnp.where(segments > 0, segments * every + positions // chunk, 0)


def attend_many(mask, q, k, v, *ids, impl, chunk=0):
  """Many queries a row; arguments as of `attend_range`.

  As many queries as slots are whole rows: the tokens' order is that of the
  slots, as in training, and blocks that a causal mask or a window hides are not
  computed. Order by positions would have to compute them.
  """
  ids = SlotIds(*ids)
  order = ids.positions, ids.slot_positions
  segments = [
    chunks(s, p, chunk, k.shape[2])
    for s, p in zip((ids.segments, ids.slot_segments), order, strict=True)
  ]
  whole = q.shape[1] == k.shape[2]
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  return attention_op.attention(
    q, k, v, mask, segments, None if whole else order, impl=impl
  )


def check_order(see):
  """UserError if a step's slots are not as `attend_range` needs them.

  Only where the arrays have values: while a step is traced they have none, and
  its result is NaN, which decode/loop.py reports.
  """
  ids = slot_ids(see)
  if any(isinstance(x, jax.core.Tracer) for x in ids):
    return
  for row in np.argwhere(~np.asarray(_ordered(ids))[:, 0])[:, 0]:
    position, slot = int(ids.positions[row, 0]), int(ids.slot)
    raise errors.UserError(
      f'row {row}: its token at position {position} is written to cache slot '
      f'{slot}, but slot {slot - position} does not hold the first token of '
      'its document: a document must fill consecutive slots, in order '
      '(decode/step.py prefill lays them out so).'
    )


def _ordered(ids):
  """Whether the slots of each row (B, 1) hold its document, in order."""
  begin_B1 = jnp.maximum(ids.slot - ids.positions, 0)
  at_begin = lambda x: jnp.take_along_axis(x, begin_B1, 1)
  sound = at_begin(ids.slot_segments) == ids.segments
  sound &= (ids.positions <= ids.slot) & (at_begin(ids.slot_positions) == 0)
  return sound | (ids.segments <= 0)


def attend_range(mask, q, k, v, *ids, chunk=0):
  """One query a row over the slots of its document -> (o_B1NH, lse_B1N).

  Token p of a document is p slots after its first one, so the query in `slot`
  at position p sees slots slot - p .. slot. If the document does not begin at
  the first of them, the slots are in another order, and the result is NaN.

  Args:
    mask: attention_op.Mask.
    q, k, v: (B, 1, N, H), (B, K, S, H), (B, K, S, V).
    ids: the fields of `SlotIds`.
    chunk: tokens of a chunk, the range of which is that of a document; 0: the
      document's own.
  """
  ids = SlotIds(*ids)
  before = ids.positions % chunk if chunk else ids.positions
  begin_B1 = jnp.maximum(ids.slot - before, 0)
  lengths_B = jnp.where(ids.segments > 0, ids.slot + 1 - begin_B1, 0)[:, 0]
  o, lse = decode_attention.ragged(
    q, k, v, mask, lengths_B, begins_B=begin_B1[:, 0]
  )
  return jnp.where(_ordered(ids)[..., None, None], o, jnp.nan), lse


def write(state, new, slot):
  """Caches (B, K, S, H) with `new` (B, T, K, H) in the slots from `slot` on.

  A single token is written in a loop of one iteration: XLA on CPU fuses a bare
  update into the cache's readers, which costs three copies of it per layer.
  """

  new = [x.swapaxes(1, 2) for x in new]

  def put(slot, caches):
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), slot, 2)
      for old, x in zip(caches, new, strict=True)
    )

  if new[0].shape[2] > 1:
    return put(slot, state)
  return jax.lax.fori_loop(slot, slot + 1, put, tuple(state))
