"""Writing what was in flight into the slots of a cache, in place.

A loop over lanes of consecutive tokens, each one piece of memory; of more than
one lane on a GPU a scatter of all tokens, and on a TPU, of a token a row, a
kernel. What a shard of the slots does not hold it does not write.

Legend: R rows of the cache, S slots, n lanes, C tokens of a lane, K kv heads, H
head size.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.models.mixers import packed
from paraxis.models.mixers import slots as slots_lib
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.decode_attention import slot_write_tpu


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
  part = slots_lib.part_of(slots[0].shape[2])
  shared = part.size < part.whole
  for group, kept, mine, *xs in packed.lanes(form, keep, ids, *new):
    kept &= mine.valid & (mine.position < part.whole)
    rows = jnp.arange(len(kept), dtype=jnp.int32)[:, None]
    row = jnp.broadcast_to(rows, kept.shape) if group.own else mine.row
    alone = group.tree or (shared and group.width <= packed.FEW)
    place, (c, size) = mine.position - part.first, (kept.shape[1], part.whole)
    if c > size and not alone:
      raise errors.UserError(
        f'a lane of {c} tokens, and a row has {size} slots.'
      )
    if alone:  # each token has its own place
      kept = _here(kept, place, part.size)
      place = jnp.clip(place, 0, part.size - 1)
    given = row, place, kept, *xs
    if alone:
      given = [x.reshape(-1, 1, *x.shape[2:]) for x in given]
    platform = registry.current_target().platform if len(given[0]) > 1 else ''
    one = group.own and group.width == 1 and not slot_write_tpu.supports(slots)
    if platform == 'gpu':
      slots = _scattered(slots, *given)
    elif platform == 'tpu' and one:
      slots = _one_a_row(slots, *given)
    elif shared and not alone:
      slots = _write_shared(slots, *given)
    else:
      slots = _write_lanes(group.fresh, slots, *given)
  return tuple(slots)


def _here(keep, place, size):
  """Which of the kept tokens have a slot here."""
  return keep & (place >= 0) & (place < size)


def _scattered(slots, row, place, keep, *new):
  """Every token at its place, if it has a slot here; in one launch an array.

  A loop over rows is a launch for every row and array, of microseconds: it took
  64 rows five times as long as all else that made their next token.
  """
  size, n = slots[0].shape[2], keep.size
  here = _here(keep, place, size)
  # Places that are no slot are dropped; they differ, for all are to be unique.
  other = size + jnp.arange(n, dtype=place.dtype).reshape(keep.shape)
  at = jnp.where(here, place, other)
  return [
    old.at[row, :, at].set(
      slots_lib.finite(x).astype(old.dtype), mode='drop', unique_indices=True
    )
    for old, x in zip(slots, new, strict=True)
  ]


def _one_a_row(slots, row, place, keep, *new):
  """A token of each row at its place, if it has a slot here."""
  size = slots[0].shape[2]
  here = _here(keep, place, size)
  new = [
    slots_lib.finite(x[:, 0]).astype(old.dtype)
    for x, old in zip(new, slots, strict=True)
  ]
  place = jnp.clip(place[:, 0], 0, size - 1)
  return slot_write_tpu.write(slots, row[:, 0], place, here[:, 0], new)


def _write_shared(slots, row, place, keep, *new):
  """Of lanes (n, C) of consecutive tokens those that have a slot here; place:
  that of the first one from the first slot here, or before it."""
  size, (n, c) = slots[0].shape[2], keep.shape
  edges = ((size, size), (0, 0))
  new = [
    slots_lib.finite(x).astype(old.dtype).swapaxes(1, 2)
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
  new = [
    slots_lib.finite(x).astype(old.dtype).swapaxes(1, 2)
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
