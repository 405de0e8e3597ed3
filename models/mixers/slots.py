"""Attention of the tokens in flight over slots and over each other.

A token's slot is its position, so the committed keys of a request are a range
of its row, and of every row of another that it reads (packed.Reads): those are
copied out. Tokens in flight see those of their lane; the parts are joined by
lse (pallas_kernels/decode_attention/schedule.py).

A cache is (B, K, S, H): the slots of a head lie one after the other, so the
products of a step read it in place (pallas_kernels/decode_attention/op.py).

Mesh axes may share the slots of a row: each shard attends over its own, and the
parts are joined by lse, too; tokens in flight are whole on every shard.

Up to packed.FEW tokens of every row, a step's temporaries are less than one
layer's cache. Of more, attention runs blockwise: it copies keys and values, and
the keys once more, to transpose them: 1.9 of one layer's cache at 9 to 32
tokens, whatever the number of layers. Lanes that copy their rows out add those
rows: .97 at one lane of 64 beside two rows (tests/decode/test_packed.py).

All functions take local arrays. Legend: R rows of a cache, n lanes, C tokens of
a lane, S slots, N heads, K kv heads, H head width (V of values).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.models.mixers import packed
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.sharding import annotate


class Part(NamedTuple):
  """Slots of a row that are here: `first` .. first + size - 1 of `whole`."""

  first: Any
  size: int
  whole: int


def part_of(size):
  """Part of a row of which `size` slots are local."""
  axes = annotate.carriers('slots') if annotate.mode() == 'manual' else ()
  if not axes:
    return Part(0, size, size)
  n = math.prod(map(jax.lax.axis_size, axes))
  return Part(jax.lax.axis_index(axes) * size, size, size * n)


class How(NamedTuple):
  """mask: attention_op.Mask. impl: of blockwise attention. chunk: positions of
  which a token sees its own; 0: all. block: likewise, also those behind it."""

  mask: Any
  impl: str
  chunk: int = 0
  block: int = 0

  def order(self, positions):
    return positions // (self.block or 1)


def chunks(segments, positions, chunk, length, option='model.attention_chunk'):
  """Ids as of segments: of the chunks of every document; 0: padding.

  Args:
    segments, positions: (B, T) int32. chunk: 0: segments stay as they are.
    length: tokens of a whole row, or slots. A row has no more segments.
    option: that gives `chunk`, for the error.
  """
  if not chunk:
    return segments
  every = np.iinfo(np.int32).max // (length + 1)  # ids of a document
  if length > every * chunk:
    raise errors.UserError(
      f'{option}={chunk}: a row of {length} tokens may have {length} documents '
      f'of {-(-length // chunk)} chunks, more than int32 counts; take longer '
      'chunks or shorter rows.'
    )
  return jnp.where(segments > 0, segments * every + positions // chunk, 0)


def attend(form, how, q, k, v, old_k, old_v, ids):
  """(o, lse) of tokens in flight.

  Args:
    form: packed.Form. how: `How`.
    q, k, v: of the tokens, laid out as packed.Packed: (.., N, H), (.., K, H),
      (.., K, V).
    old_k, old_v: (R, K, S, H) slots.
    ids: packed.Ids.

  Returns:
    (o (.., N, V) in v's dtype, lse (.., N)).
  """
  outs: list = []
  arrays = q, k, v, ids
  for group, q_g, k_g, v_g, mine in packed.lanes(form, *arrays):
    length = part_of(old_k.shape[2]).whole
    part = within(group, how, q_g, k_g, v_g, mine, length)
    old = of_lanes(group, (old_k, old_v), mine, q_g)
    outs.append(joined(group, how, q_g, old, mine, part))
  o, lse = (packed.join(form, x) for x in zip(*outs, strict=True))
  return o.astype(v.dtype), lse


def ranges(group, ids):
  """[packed.Ids of each range that the lanes read]: begin, length are its ends.

  The first is of their own rows, the others of rows that they share.
  """
  if group.fresh:
    return []
  out = [ids._replace(reads=None)]
  if ids.reads is not None:
    for p in range(ids.reads.rows.shape[-1]):
      row, begin, end = (x[..., p] for x in ids.reads[:3])
      one = dict(row=row, begin=begin, length=end, hole=None)
      out.append(out[0]._replace(**one))
  return out


def of_lanes(group, slots, ids, x):
  """[slots (n, K, S, H) of each of `ranges`].

  Those of an own group's rows are not copied. Whatever another request has
  outside of a range is 0, so that not even NaN there reaches its readers.

  x: (n, C, .., ..) of the lanes' tokens in this layer. A copy of rows waits for
    it: XLA makes those of all layers first, and keeps them, if no number
    depends on x. So rows are the maximum with -1 or 0, which x says.
  """
  if group.fresh:
    return []
  own, *shared = ranges(group, ids)
  late = lambda one: jnp.maximum(one.row[:, 0], -_lost(x)[:, 0, 0, 0])
  out = [slots if group.own else [y[late(own)] for y in slots]]
  for one in shared:
    row = late(one)
    size = slots[0].shape[2]
    at = part_of(size).first + jnp.arange(size)
    ok = (at >= one.begin[:, :1]) & (at < one.length[:, :1])
    out.append([jnp.where(ok[:, None, :, None], y[row], 0) for y in slots])
  return out


def _lost(x):
  """(n, 1, 1, 1) int32: 1 where a lane's first token is NaN, else 0."""
  return jnp.isnan(x[:, :1, :1, :1]).astype(jnp.int32)


def joined(group, how, q, old, ids, part):
  """(o, lse) of `part` and of the committed tokens together.

  old: [(k, v), or one array that is both, of each of `ranges`]. part: (o, lse),
    or decode_attention.Own; then there is a range.
  """
  apart = None if ids.reads is None else ids.reads.apart
  other = None  # of the ranges that are apart
  for i, (held, one) in enumerate(zip(old, ranges(group, ids), strict=True)):
    if apart is None or not i:
      part = committed(how, q, held[0], held[-1], one, part)
      continue
    which = apart.which[..., i - 1, None]
    cooled = jnp.where(which, 1 / apart.temperature[..., None], 1)[..., None]
    far = (q * cooled).astype(q.dtype)
    o, lse = committed(how, far, held[0], held[-1], one)
    none = jnp.full_like(lse, varying.NEG)
    part = decode_schedule.merge((o, jnp.where(which, none, lse)), part)
    far = o, jnp.where(which, lse, none)
    other = far if other is None else decode_schedule.merge(far, other)
  if apart is None or other is None:
    return part
  o, lse = other
  factor = (apart.weight * apart.temperature)[..., None]
  lse = jnp.where(lse > varying.FLOOR, factor * lse, lse)
  return decode_schedule.merge((o, lse), part)


def within(group, how, q, k, v, ids, length):
  """(o, lse) over the keys in flight of the own lane, or Own if it has one.

  Args:
    q, k, v: (n, C, N, H), (n, C, K, H), (n, C, K, V). ids: packed.Ids of them.
    length: no position is beyond it.
  """
  if group.width == 1 and not (group.tree or group.fresh):
    return decode_attention.Own(k, v, ids.valid)
  v = finite(v)  # a draft may be of any token, and a weight of 0 keeps NaN
  if group.tree or group.width <= packed.FEW:
    ok = visible(group, how, ids)
    return _dense(how.mask, q, k, v, ok)
  # The order of a lane is that of its positions, so blocks that a causal mask
  # or a window hides are not computed.
  valid = ids.valid.astype(jnp.int32)
  segments = (chunks(valid, ids.position, how.chunk, length),) * 2
  order = (how.order(ids.position),) * 2 if how.block else None
  return attention_op.attention(q, k, v, how.mask, segments, order, how.impl)


def committed(how, q, k, v, ids, beside=None):
  """(o, lse) over a range of slots for each lane.

  Args:
    q: (n, C, N, H). k, v: (n, K, S, H), (n, K, S, V). ids: of `ranges`.
    beside: None, or as `joined` takes it, of other keys, which are joined.
  """
  part = part_of(k.shape[2])
  if part.size == part.whole:
    return _committed(how, q, k, v, ids, part, beside)
  far = _committed(how, q, k, v, ids, part)
  far = decode_schedule.merge_shards(*far, annotate.carriers('slots'))
  return _beside(how.mask, q, far, beside)


def _beside(mask, q, far, part):
  """`far` joined with a part as `joined` takes it, or with nothing: None."""
  if isinstance(part, decode_attention.Own):
    part = decode_attention.alone(mask, q, part)
  return far if part is None else decode_schedule.merge(far, part)


def _committed(how, q, k, v, ids, part, beside=None):
  """`committed` over the slots that are here."""
  size, (mask, impl, chunk, _) = part.size, how
  if q.shape[1] == 1 and not ids.hole:  # a kernel divides it into equal work
    shared = size < part.whole
    begin = ids.position - ids.position % chunk if chunk else 0 * ids.position
    if shared or ids.begin is not None:
      # The range may end before the window does.
      first = ids.position - mask.window + 1 if mask.window else 0
      old = 0 if ids.begin is None else ids.begin
      begin = jnp.maximum(jnp.maximum(begin, old), first)
    # Drafts behind a full row are fed, too, though no slot keeps them.
    end = jnp.minimum(ids.length, part.whole)
    if shared:
      begin, end = (jnp.clip(x - part.first, 0, size) for x in (begin, end))
    lengths = jnp.where(ids.valid, jnp.maximum(end - begin, 0), 0)
    if mask.window == 1:
      lengths = 0 * lengths
    # The query itself, which is not among them, is one of its window.
    window = 0 if shared else max(mask.window - 1, 0)
    mask = dataclasses.replace(mask, window=window)
    own = beside if isinstance(beside, decode_attention.Own) else None
    far = decode_attention.ragged(
      q, k, v, mask, lengths[:, 0], begins_B=begin[:, 0], own=own
    )
    return _beside(mask, q, far, None if own else beside)
  slots = part.first + jnp.arange(size, dtype=jnp.int32)
  slots = jnp.broadcast_to(slots, (len(q), size))
  here = packed.in_range(jax.tree.map(lambda x: x[:, :1], ids), slots[0])[:, 0]
  both = (ids.valid, ids.position), (here, slots)
  segments = [
    chunks(ok.astype(jnp.int32), position, chunk, part.whole)
    for ok, position in both
  ]
  order = ids.position, slots
  if ids.hole:  # behind it are slots of the own block
    order = tuple(map(how.order, order))
  if q.shape[1] <= packed.FEW:
    far = decode_attention.decode_attention(q, k, v, mask, segments, order)
  else:
    # Blockwise attention copies the slots, in this layer alone (`of_lanes`).
    wait = lambda x: jnp.where(_lost(q) > 0, jnp.nan, x)
    k, v = wait(k).swapaxes(1, 2), wait(v).swapaxes(1, 2)
    far = attention_op.attention(q, k, v, mask, segments, order, impl=impl)
  return _beside(mask, q, far, beside)


def finite(x):
  """x with 0 for what is not finite."""
  return jnp.where(jnp.isfinite(x), x, 0)


def visible(group, how, ids):
  """(n, C, C) bool: does token i see token j of its lane?"""
  pair = lambda x: (x[:, :, None], x[:, None])
  near = pair(ids.position)
  if group.tree:
    (order, order_k), (own, other) = pair(ids.order), pair(ids.group)
    ok = (order_k <= order) & ((other == 0) | (other == own))
    ok &= packed.on_path(ids)
  else:
    order, order_k = pair(how.order(ids.position))
    ok = (order_k <= order) | (not how.mask.causal)
  ok &= ids.valid[:, :, None] & ids.valid[:, None]
  if how.mask.window:
    ok &= near[0] - near[1] < how.mask.window
  if how.chunk:
    ok &= near[0] // how.chunk == near[1] // how.chunk
  return ok


def _dense(mask, q, k, v, ok):
  """(o, lse), all scores of a lane at once; ok: (n, C, C)."""
  n, c, heads, h = q.shape
  kv, wide = k.shape[2], jnp.result_type(q, k, v, jnp.float32)
  q = q.reshape(n, c, kv, heads // kv, h)
  dot = lambda *x: jnp.einsum(*x, preferred_element_type=wide)
  z = dot('nqkgh,nskh->nkgqs', q, k) * mask.scale
  if mask.softcap:
    z = mask.softcap * jnp.tanh(z / mask.softcap)
  z = jnp.where(ok[:, None, None], z, varying.NEG)
  top = z.max(-1)
  p = jnp.exp(z - jnp.maximum(top, varying.FLOOR)[..., None])
  o = dot('nkgqs,nskv->nkgqv', p.astype(v.dtype), v)
  o, lse = attention_xla.finish(o, top, p.sum(-1))
  back = lambda x: jnp.moveaxis(x, 3, 1).reshape(n, c, heads, *x.shape[4:])
  return back(o), back(lse)
