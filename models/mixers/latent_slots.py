"""Attention of a few tokens to the latents in slots, and to each other.

The absorbed form of models/mixers/latent.py, on local arrays. Its legend, and
n lanes, C tokens of a lane.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.models.mixers import packed
from paraxis.models.mixers import protocol as mixer
from paraxis.models.mixers import slots as slots_lib
from paraxis.pallas_kernels import varying
from paraxis.sharding import annotate


def _filled(mask, ids, part):
  """(n, C, S) bool: does a token see a range's slot? Without chunks."""
  slots = part.first + jnp.arange(part.size)
  position = ids.position[..., None]
  ok = ids.valid[..., None] & packed.in_range(ids, slots)
  return ok & (position - slots < mask.window) if mask.window else ok


def attend(summed, group, how, q_BTGNE, new_BTGE, old, ids):
  """o_BTGNE of a few tokens a lane, over their latents and those in the slots.

  old: [slots_BGSE of each of slots.ranges].
  Latent shards attend as independent kv heads; that is exact if there is one.
  summed: or scores are summed over latent shards before the softmax.
  """
  b, t, g, n, e = q_BTGNE.shape
  mask, here = how.mask, slots_lib.part_of(old[0].shape[2])
  size = here.size
  if not summed:
    q = q_BTGNE.reshape(b, t, g * n, e)
    part = slots_lib.within(group, how, q, new_BTGE, new_BTGE, ids, here.whole)
    old = [(x,) for x in old]
    o = slots_lib.joined(group, how, q, old, ids, part)[0].astype(q.dtype)
    return o.reshape(q_BTGNE.shape)
  wide = jnp.result_type(q_BTGNE, old[0], jnp.float32)
  dot = functools.partial(jnp.einsum, preferred_element_type=wide)
  near = slots_lib.visible(group, how, ids)
  over = annotate.carriers('slots') if size < here.whole else ()
  if over:  # tokens in flight, which every shard has, are counted once
    near &= here.first == 0
  far = [_filled(mask, one, here) for one in slots_lib.ranges(group, ids)]
  new_BGTE = new_BTGE.swapaxes(1, 2)
  s = [dot('btgne,bgse->btns', q_BTGNE, x) for x in (*old, new_BGTE)]
  s = jnp.concatenate(s, -1)
  if annotate.mode() == 'manual' and annotate.carriers(mixer.READERS[2]):
    s = jax.lax.psum(s, annotate.carriers(mixer.READERS[2]))
  s = s * mask.scale
  if mask.softcap:
    s = mask.softcap * jnp.tanh(s / mask.softcap)
  ok = jnp.concatenate([*far, near], -1)[:, :, None]
  s = jnp.where(ok, s, varying.NEG)
  top = s.max(-1, keepdims=True)
  top = jax.lax.pmax(top, over) if over else top
  p = jnp.exp(s - jnp.maximum(top, varying.FLOOR))
  total = p.sum(-1, keepdims=True)
  total = jax.lax.psum(total, over) if over else total
  p = (p / jnp.where(total == 0, 1, total)).astype(old[0].dtype)
  weighted = functools.partial(dot, 'btns,bgse->btgne')
  outs = [
    weighted(p[..., i * size : (i + 1) * size], x) for i, x in enumerate(old)
  ]
  new_BGTE = slots_lib.finite(new_BGTE)
  outs.append(weighted(p[..., len(old) * size :], new_BGTE))
  o = sum(outs[1:], outs[0])
  return (jax.lax.psum(o, over) if over else o).astype(q_BTGNE.dtype)
