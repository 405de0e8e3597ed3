"""Attention of the tokens in flight over slots and over each other.

A token's slot is its position, so the committed keys of a request are a range
of its row, and of every row of another that it reads (packed.Reads): those are
copied out. Tokens in flight see those of their lane; the parts are joined by
lse (pallas_kernels/decode_attention/schedule.py).

A cache is (B, K, S, H): the slots of a head lie one after the other, so the
products of a step read it in place (pallas_kernels/decode_attention/op.py).

Mesh axes may share the slots of a row: each shard attends over its own, and the
parts are joined by lse, too; tokens in flight are whole on every shard.

All functions take local arrays. Legend: R rows of a cache, n lanes, C tokens of
a lane, S slots, N heads, K kv heads, H head width (V of values).
"""

import dataclasses
import functools
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

  x: (n, C, .., ..) of the lanes' tokens in this layer. A copy of shared rows
    waits for it: XLA makes those of all layers first, and keeps them, if no
    number depends on x. So a lane that is lost, as x is NaN, reads row 0.
  """
  if group.fresh:
    return []
  own, *shared = ranges(group, ids)
  out = [slots if group.own else [y[own.row[:, 0]] for y in slots]]
  for one in shared:
    row = jnp.where(jnp.isnan(x[:, 0, 0, 0]), 0, one.row[:, 0])
    size = slots[0].shape[2]
    at = part_of(size).first + jnp.arange(size)
    ok = (at >= one.begin[:, :1]) & (at < one.length[:, :1])
    out.append([jnp.where(ok[:, None, :, None], y[row], 0) for y in slots])
  return out


def joined(group, how, q, old, ids, part):
  """(o, lse) of `part` and of the committed tokens together.

  old: [(k, v), or one array that is both, of each of `ranges`].
  """
  apart = None if ids.reads is None else ids.reads.apart
  other = None  # of the ranges that are apart
  for i, (held, one) in enumerate(zip(old, ranges(group, ids), strict=True)):
    if apart is None or not i:
      far = committed(how, q, held[0], held[-1], one)
      part = decode_schedule.merge(far, part)
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
  """(o, lse) over the keys in flight of the own lane.

  Args:
    q, k, v: (n, C, N, H), (n, C, K, H), (n, C, K, V). ids: packed.Ids of them.
    length: no position is beyond it.
  """
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


def committed(how, q, k, v, ids):
  """(o, lse) over a range of slots for each lane.

  Args:
    q: (n, C, N, H). k, v: (n, K, S, H), (n, K, S, V). ids: of `ranges`.
  """
  part = part_of(k.shape[2])
  if part.size == part.whole:
    return _committed(how, q, k, v, ids, part)
  o, lse = _committed(how, q, k, v, ids, part)
  axes, wide = annotate.carriers('slots'), jnp.promote_types(o.dtype, lse.dtype)
  top = jnp.maximum(jax.lax.pmax(lse, axes), varying.FLOOR)
  weight = jnp.where(lse > varying.FLOOR, jnp.exp(lse - top), 0)
  total = jax.lax.psum(weight, axes)
  some = jnp.where(total > 0, total, 1)
  sums = jax.lax.psum(o.astype(wide) * weight[..., None], axes)
  lse = jnp.where(total > 0, top + jnp.log(some), varying.NEG)
  return (sums / some[..., None]).astype(o.dtype), lse


def _committed(how, q, k, v, ids, part):
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
    end = ids.length
    if shared:
      begin, end = (jnp.clip(x - part.first, 0, size) for x in (begin, end))
    lengths = jnp.where(ids.valid, jnp.maximum(end - begin, 0), 0)
    if mask.window == 1:
      lengths = 0 * lengths
    # The query itself, which is not among them, is one of its window.
    window = 0 if shared else max(mask.window - 1, 0)
    mask = dataclasses.replace(mask, window=window)
    return decode_attention.ragged(
      q, k, v, mask, lengths[:, 0], begins_B=begin[:, 0]
    )
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
    return decode_attention.decode_attention(q, k, v, mask, segments, order)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  return attention_op.attention(q, k, v, mask, segments, order, impl=impl)


def finite(x):
  """x with 0 for what is not finite."""
  return jnp.where(jnp.isfinite(x), x, 0)


def filled(mask, ids, size):
  """(n, C, S) bool: does a token see a range's slot? Without chunks."""
  slots, position = jnp.arange(size), ids.position[..., None]
  ok = ids.valid[..., None] & packed.in_range(ids, slots)
  return ok & (position - slots < mask.window) if mask.window else ok


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


def write(form, count, *arrays):
  """Slots with the tokens in flight that are kept, each at its position.

  A kept token whose position is no slot is not written: who calls this makes
  room. Numbers that are not finite are written as 0: no range reaches them but
  of a request that has failed, and 0 x NaN would reach whoever is next.

  Args:
    form: packed.Form. count: of caches.
    arrays: `count` caches (R, K, S, H); as many arrays (.., K, H) laid out as
      packed.Packed; keep, laid out so; packed.Ids.

  Returns:
    tuple of the caches.
  """
  slots, new = arrays[:count], arrays[count : 2 * count]
  keep, ids = arrays[2 * count :]
  part = part_of(slots[0].shape[2])
  shared = part.size < part.whole
  for group, kept, mine, *xs in packed.lanes(form, keep, ids, *new):
    kept &= mine.valid & (mine.position < part.whole)
    rows = jnp.arange(len(kept), dtype=jnp.int32)[:, None]
    row = jnp.broadcast_to(rows, kept.shape) if group.own else mine.row
    alone = group.tree or (shared and group.width <= packed.FEW)
    place = mine.position - part.first
    if alone:  # each token has its own place
      kept &= (place >= 0) & (place < part.size)
      place = jnp.clip(place, 0, part.size - 1)
    given = row, place, kept, *xs
    if alone:
      given = [x.reshape(-1, 1, *x.shape[2:]) for x in given]
    if shared and not alone:
      slots = _write_shared(slots, *given)
    else:
      slots = _write_lanes(group.fresh, slots, *given)
  return tuple(slots)


def _write_shared(slots, row, place, keep, *new):
  """Of lanes (n, C) of consecutive tokens those that have a slot here; place:
  that of the first one from the first slot here, or before it."""
  size, (n, c) = slots[0].shape[2], keep.shape
  edges = ((size, size), (0, 0))
  new = [
    finite(x).astype(old.dtype).swapaxes(1, 2)
    for x, old in zip(new, slots, strict=True)
  ]

  def put(i, slots):
    # Behind `size` empty places, the lane; the tokens of the slots here.
    first = jnp.clip(size - place[i, 0], 0, c + size)
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size)
    kept = cut(jnp.pad(keep[i], edges[0]), first)
    out = []
    for old, x in zip(slots, new, strict=True):
      at = (row[i, 0], *[row[i, 0] * 0] * 3)
      was = jax.lax.dynamic_slice(old, at, (1, *old.shape[1:]))
      wide = jnp.pad(x[i], ((0, 0), *edges))
      x = jnp.where(kept[:, None], cut(wide, first, axis=1), was[0])
      out.append(jax.lax.dynamic_update_slice(old, x[None], at))
    return tuple(out)

  return jax.lax.fori_loop(0, n, put, tuple(slots))


def _write_lanes(fresh, slots, row, position, keep, *new):
  """Lanes (n, C) of consecutive positions, one after the other, in place.

  A loop, even of one lane: XLA on CPU fuses a bare update into the cache's
  readers, which costs copies of it in every layer.
  """
  size, (n, c) = slots[0].shape[2], keep.shape
  if c > size:
    raise errors.UserError(f'a lane of {c} tokens, and a row has {size} slots.')
  new = [
    finite(x).astype(old.dtype).swapaxes(1, 2)
    for x, old in zip(new, slots, strict=True)
  ]

  def put(i, slots):
    first, kept, xs = position[i, 0], keep[i], [x[i] for x in new]
    at = jnp.minimum(first, size - c)
    if c > 1 and not fresh:  # a block at the end begins before its tokens
      kept = jnp.roll(kept, first - at)
      xs = [jnp.roll(x, first - at, 1) for x in xs]
    out = []
    for old, x in zip(slots, xs, strict=True):
      place = (row[i, 0], at * 0, at, at * 0)
      was = jax.lax.dynamic_slice(old, place, (1, *x.shape))
      x = jnp.where(kept[:, None], x, was[0])[None]
      out.append(jax.lax.dynamic_update_slice(old, x, place))
    return tuple(out)

  return jax.lax.fori_loop(0, n, put, tuple(slots))
