"""Attention of a few new queries over a cache of slots -> (o, lse).

  s = softcap(scale q.k) on visible slots;  lse = log sum_s e^s
  o = sum_s e^(s - lse) v

Decoding reads every slot once and does little else, so the cache must not be
copied. It holds the slots of a head one after the other, (B, K, S, H): products
batched over (B, K) read it in place, where heads between slots would have to be
transposed first. Cost: B K S H (k and v) read once; memory B T N S scores. No
gradient: training uses attention/op.py.

The XLA form reads all slots, used or not: on a CPU whatever reads fewer copies
them first. A walk over blocks of them took 1.9 to 5 times as long where all are
used. A window of at most a `CUT`th of the slots is worth its copy: 256 of 2,048
take .3 of the time at 8 rows; at 64, .2 in a loop (a call alone takes 1.8).

The kernels (tpu.py, gpu.py) take one query a row and rows whose valid slots are
contiguous (`ragged`). They divide the valid slots evenly over workers, however
unequal the rows are (schedule.py). A window is a range that begins later.

Legend: B batch, T queries (few), S slots, N query heads, K kv heads, G = N / K,
H head size.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.pallas_kernels.decode_attention import gpu as decode_attention_gpu
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule
from paraxis.pallas_kernels.decode_attention import tpu as decode_attention_tpu

OP = 'decode_attention'
CUT = 4  # slots for one of the window, from which the XLA form cuts them out


class Ranges(NamedTuple):
  """Slots that each row sees: begins .. ends, both (B,) int32.

  most: static, the most slots that any range has; 0: all.
  """

  begins: jax.Array
  ends: jax.Array
  most: int = 0


class Own(NamedTuple):
  """Key and value of a query itself, which are not among the slots.

  k: (B, 1, K, H). v: (B, 1, K, V); what is not finite counts as 0, for 0 x NaN
  is NaN. seen: (B, 1) bool.
  """

  k: jax.Array
  v: jax.Array
  seen: jax.Array


def alone(mask, q_B1NH, own):
  """(o_B1NV, lse_B1N) of queries that see themselves and nothing else."""
  b, _, n, h = q_B1NH.shape
  kv, wide = own.k.shape[2], jnp.result_type(q_B1NH, *own[:2], jnp.float32)
  q = q_B1NH.reshape(b, 1, kv, n // kv, h)
  z = jnp.einsum('nqkgh,nqkh->nqkg', q, own.k, preferred_element_type=wide)
  z = z.reshape(b, 1, n) * mask.scale
  if mask.softcap:
    z = mask.softcap * jnp.tanh(z / mask.softcap)
  v = jnp.where(jnp.isfinite(own.v), own.v, 0)
  o = jnp.repeat(v.astype(wide), n // kv, 2)
  o = jnp.where(jnp.isnan(z)[..., None], z[..., None], o)  # as p v would be
  seen = own.seen[..., None]
  return jnp.where(seen[..., None], o, 0), jnp.where(seen, z, varying.NEG)


def decode_attention(
  q_BTNH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  mask: attention.Mask,
  segments: attention.Pair | None = None,
  order: attention.Pair | None = None,
  impl: str = 'auto',
  sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of q over the slots of a cache -> (o_BTNH, lse_BTN).

  Args:
    q_BTNH: queries; head n reads kv head n // (N // K).
    k_BKSH: cached keys; K divides N.
    v_BKSH: cached values.
    mask: attention.Mask; `block` is not used.
    segments: None or int arrays (q_BT, k_BS); an empty slot has segment 0.
    order: None (both are 0, 1, 2, ...) or int arrays (q_BT, k_BS).
    impl: 'auto' or the name of a registered implementation.
    sinks_N: None, or one logit per query head that every row of the head sees
      beside the slots (attention/op.py).

  Returns:
    o in v's dtype, lse in promote_types(dtype, float32), the sink included; a
    row that sees nothing has o = 0 and lse = attention.NEG, or its sink.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  arrays = q_BTNH, k_BKSH, v_BKSH
  _check(*arrays, mask, segments, order, sinks_N)
  o, lse = _run(*arrays, mask, impl, segments=segments, order=order)
  return attention.with_sinks(o, lse, sinks_N)


def ragged(
  q_BTNH: attention.Array,
  k_BKSH: attention.Array,
  v_BKSH: attention.Array,
  mask: attention.Mask,
  lengths_B: attention.Array,
  impl: str = 'auto',
  begins_B: attention.Array | None = None,
  own: Own | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of a row's last tokens over a range of its slots -> (o, lse).

  Slot begin + s of a row holds its token s, and the queries are the last T of
  them: the causal mask and the window are those of a sequence of length_b
  tokens. The content of other slots does not matter (for the XLA form it must
  be finite, but where it cuts a window out, `CUT`).

  Args:
    lengths_B: int32 tokens in each row, its queries included: T (or 0, then a
      row sees nothing) .. S. They are data: the caller must ensure the range.
    begins_B: None (0), or int32 slot of each row's token 0; 0 .. S - length
      where the length is not 0.
    own: None, or `Own` of the queries, T = 1, seen beside the slots; the
      lengths do not count it.
    others: as for `decode_attention`, as are results and errors.
  """
  b, t, s = *q_BTNH.shape[:2], k_BKSH.shape[2]
  if begins_B is None:
    begins_B = jnp.zeros_like(lengths_B)
  for name, x in (('lengths', lengths_B), ('begins', begins_B)):
    if x.shape != (b,):
      raise errors.UserError(
        f'{OP}: {name} have shape {x.shape}, expected one for each of the {b} '
        'rows'
      )
  arrays, ends_B = (q_BTNH, k_BKSH, v_BKSH), begins_B + lengths_B
  _check(*arrays, mask, None, _orders(ends_B, t, s), None)
  if own is not None:
    _check_own(own, *arrays)
  most = 0
  if t == 1 and mask.causal:  # the range is all that there is to the mask
    if mask.window:
      begins_B, most = jnp.maximum(begins_B, ends_B - mask.window), mask.window
    mask = dataclasses.replace(mask, causal=False, window=0)
  ranges = Ranges(jnp.asarray(begins_B), jnp.asarray(ends_B), most)
  return _run(*arrays, mask, impl, ranges=ranges, own=own)


def _by_slots(x_BKSH):
  """Shape and dtype of (B, S, K, H), as attention/op.py takes keys."""
  b, kv, s, h = x_BKSH.shape
  return jax.ShapeDtypeStruct((b, s, kv, h), x_BKSH.dtype)


def _check(q, k, v, mask, segments, order, sinks_N):
  """UserError if shapes do not fit."""
  b, kv, s, _ = k.shape
  if b != q.shape[0] or v.shape[:3] != (b, kv, s) or k.shape[3] != q.shape[3]:
    raise errors.UserError(
      f'{OP}: q {q.shape}, k {k.shape}, v {v.shape} do not fit (B, T, N, H), '
      '(B, K, S, H), (B, K, S, H)'
    )
  shapes = _by_slots(k), _by_slots(v)
  attention.check(OP, q, *shapes, mask, segments, order, sinks_N)


def _check_own(own, q, k, v):
  """UserError if `Own` does not fit."""
  kv = k.shape[1]
  want = [(len(q), 1, kv, x.shape[3]) for x in (k, v)] + [(len(q), 1)]
  have = [x.shape for x in own]
  if q.shape[1] != 1 or have != want:
    raise errors.UserError(
      f'{OP}: one query a row has a key of its own; q is {q.shape}, own keys, '
      f'values and who sees them are {have}, expected {want}'
    )


def _run(q, k, v, mask, impl, **where):
  """(o, lse) of a checked call, without sinks.

  where: segments and order, or ranges and own.
  """
  segments, order = where.get('segments'), where.get('order')
  spec = attention.spec_of(q, _by_slots(k), mask, segments, order, _by_slots(v))
  chosen, own = registry.resolve(OP, impl, spec), where.get('own')
  given = q, k, v, segments, order, mask, where.get('ranges')
  if own is None or 'own' in chosen.takes:
    return chosen.forward(*given, *[own] * (own is not None))
  o, lse = decode_schedule.merge(chosen.forward(*given), alone(mask, q, own))
  return o.astype(v.dtype), lse


def shared_prefix(
  q_B1NH: attention.Array,
  prefix: attention.Pair,
  own: attention.Pair,
  mask: attention.Mask,
  lengths_B: attention.Array,
  impl: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """`ragged` of rows with a shared prefix, which is read once for all rows.

  The queries of all rows attend to the prefix as one sequence of queries
  (attention/op.py), each query to its own slots as usual, and both parts are
  merged by lse (cascade inference; FlashInfer, arXiv:2501.01005, section 3).

  Args:
    q_B1NH: one query a row.
    prefix: (k_SKH, v_SKH) that all rows see, all of it.
    own: (k_BKSH, v_BKSH) of each row after the prefix, another S.
    mask: attention.Mask without a window.
    lengths_B: valid slots of `own`, 0 .. S.
    impl: of both parts.

  Returns:
    (o_B1NH, lse_B1N) as `ragged` over prefix and own together.

  Raises:
    errors.UserError: more than one query a row, a window, or as for `ragged`.
  """
  b, t, n, h = q_B1NH.shape
  kv = prefix[0].shape[1]
  if t != 1 or mask.window or n % kv:
    raise errors.UserError(
      f'{OP}: a shared prefix takes one query a row, no window, and heads in '
      f'whole groups; these are {t} queries, window {mask.window}, {n} query '
      f'heads for {kv} kv heads'
    )
  free = dataclasses.replace(mask, causal=False)  # every query comes after
  # The queries of a kv head, of all rows, become the rows of one sequence.
  q = q_B1NH.reshape(b, kv, n // kv, h).swapaxes(1, 2).reshape(1, -1, kv, h)
  k, v = (x[None] for x in prefix)
  o, lse = attention.attention(q, k, v, free, impl=impl)
  back = lambda x: (
    x.reshape(b, n // kv, kv, *x.shape[3:])
    .swapaxes(1, 2)
    .reshape(b, 1, n, *x.shape[3:])
  )
  rest = ragged(q_B1NH, own[0], own[1], mask, lengths_B, impl)
  o, lse = decode_schedule.merge(rest, (back(o), back(lse)))
  return o.astype(own[1].dtype), lse


def _orders(ends_B, t, s):
  """(q_BT, k_BS): slots of the queries of `ragged`, and all slots."""
  slots = jnp.arange(s, dtype=jnp.int32)[None]
  last = ends_B[:, None] - t + jnp.arange(t, dtype=jnp.int32)
  return last, jnp.broadcast_to(slots, (ends_B.shape[0], s))


def _cut(k_BKSH, v_BKSH, ranges):
  """Caches of `ranges.most` slots, which hold each range, and the ranges."""
  size = ranges.most
  first_B = jnp.clip(ranges.ends - size, 0, k_BKSH.shape[2] - size)
  rows = lambda x_KSH, first: jax.lax.dynamic_slice_in_dim(
    x_KSH, first, size, 1
  )
  k, v = (jax.vmap(rows)(x, first_B) for x in (k_BKSH, v_BKSH))
  return k, v, Ranges(ranges.begins - first_B, ranges.ends - first_B)


def forward(q_BTNH, k_BKSH, v_BKSH, segments, order, mask, ranges=None):
  """The XLA implementation; ranges: None, or `Ranges`."""
  if ranges is not None and 0 < CUT * ranges.most <= k_BKSH.shape[2]:
    k_BKSH, v_BKSH, ranges = _cut(k_BKSH, v_BKSH, ranges)
  b, t, n, h = q_BTNH.shape
  kv, s = k_BKSH.shape[1:3]
  if ranges is not None:
    order = _orders(ranges.ends, t, s)
  wide = jnp.result_type(q_BTNH, k_BKSH, v_BKSH, jnp.float32)

  def dot(x, y, axes):
    """Batched over (B, K), the cache left of the queries and right of p.

    So XLA on CPU reads it in place: it transposes an x that is not summed over
    its last axis, and a y that is.
    """
    dims = axes, ((0, 1), (0, 1))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=wide)

  q_BKTGH = q_BTNH.reshape(b, t, kv, n // kv, h).swapaxes(1, 2)
  z = dot(k_BKSH, q_BKTGH, ((3,), (4,)))  # (B, K, S, T, G)
  z = jnp.moveaxis(z, 2, 4) * mask.scale
  if mask.softcap:
    z = mask.softcap * jnp.tanh(z / mask.softcap)
  order = order or (jnp.arange(t)[None], jnp.arange(s)[None])
  filled = None
  if ranges is not None:
    begin, end = (x[:, None] for x in ranges[:2])
    filled = (order[1] >= begin) & (order[1] < end)
  ok = attention_xla.visible(mask, segments, order, filled)
  z = z if ok is None else jnp.where(ok[:, None, :, None], z, varying.NEG)
  top = z.max(-1)
  p = jnp.exp(z - jnp.maximum(top, varying.FLOOR)[..., None])
  total = p.sum(-1)
  total = jnp.where(total == 0, 1, total)  # rows that see nothing: o = 0
  p = (p / total[..., None]).astype(v_BKSH.dtype)
  back = lambda x: x.swapaxes(1, 2).reshape(b, t, n, *x.shape[4:])
  o = back(dot(p, v_BKSH, ((4,), (2,))).astype(v_BKSH.dtype))
  return o, back(top + jnp.log(total))


def _kernel(platform, module):
  """The implementation of the op by a kernel for one query a row."""
  kernel = registry.kernel(platform, module)

  def run(q_BTNH, k_BKSH, v_BKSH, segments, order, mask, ranges=None, own=()):
    del segments, order  # see supports
    if ranges is None:
      b, _, s, _ = k_BKSH.shape
      ranges = Ranges(jnp.zeros(b, jnp.int32), jnp.full(b, s, jnp.int32))
    arrays = q_BTNH[:, 0], k_BKSH, v_BKSH, ranges.begins, ranges.ends
    own = [[x[:, 0] for x in own]] * bool(own)
    arrays, own = varying.same((arrays, own))
    o, lse = kernel.forward(*arrays, mask, *own)
    return o[:, None].astype(v_BKSH.dtype), lse[:, None]

  def supports(spec, target):
    reason = kernel.supports(None, target)
    if reason or spec is None:
      return reason
    if spec.q[1] != 1:
      return f'takes one query a row, these are {spec.q[1]}'
    if spec.segments or spec.order:
      return 'takes rows by their lengths (ragged), not segments and order'
    if spec.mask.window:
      return f'takes no window, this is one of {spec.mask.window}'
    if set(spec.others) != {spec.dtype}:
      return f'takes one dtype, q is {spec.dtype}, k and v are {spec.others}'
    return kernel.supports(spec, target)

  takes = kernel.takes
  return registry.Implementation(kernel.name, run, None, supports, takes)


registry.register(
  OP,
  _kernel('tpu', decode_attention_tpu),
  _kernel('gpu', decode_attention_gpu),
  registry.Implementation('xla', forward),
)
