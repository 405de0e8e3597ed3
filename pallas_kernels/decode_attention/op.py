"""Attention of a few new queries over a cache of slots -> (o, lse).

  s = softcap(scale q.k) on visible slots;  lse = log sum_s e^s
  o = sum_s e^(s - lse) v

Decoding reads every slot once and does little else, so the cache must not be
copied. A dot batched over (B, K) makes XLA transpose the cache first (k is in
the middle of (B, S, K, H)); with few queries it is cheaper to read the cache as
a matrix (S, K H) and to spread each query over the columns of its kv head, zero
elsewhere: K times the flops, one pass, no copy. With many queries, or heads
sharded over a mesh, the batched dot is used. Cost: B S K H (k and v) read once;
memory B T N S scores. No gradient: training uses attention/op.py.

The kernels (tpu.py, gpu.py) take one query a row and rows whose valid slots are
contiguous (`ragged`). They divide the valid slots evenly over workers, however
unequal the rows are (schedule.py), and read the cache (B, S, K, H) in place
too. A window is a range that begins later.

Legend: B batch, T queries (few), S slots, N query heads, K kv heads, G = N / K,
H head size, E = K H, R = T N.
"""

import dataclasses

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

# Above this many rows T N the K-fold flops cost more than the copy.
MAX_ROWS = 128


@dataclasses.dataclass(frozen=True)
class DecodeAttentionSpec(attention.AttentionSpec):
  """Properties of a call that decide whether an implementation can run."""

  cache: tuple[str, ...] = ()  # dtypes of k and v


def decode_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: attention.Mask,
  segments: attention.Pair | None = None,
  order: attention.Pair | None = None,
  impl: str = 'auto',
  sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of q over the slots of a cache -> (o_BTNH, lse_BTN).

  Args:
    q_BTNH: queries; head n reads kv head n // (N // K).
    k_BSKH: cached keys; K divides N.
    v_BSKH: cached values.
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
  arrays = q_BTNH, k_BSKH, v_BSKH
  attention.check(OP, *arrays, mask, segments, order, sinks_N)
  o, lse = _run(*arrays, mask, impl, segments, order)
  return attention.with_sinks(o, lse, sinks_N)


def ragged(
  q_BTNH: attention.Array,
  k_BSKH: attention.Array,
  v_BSKH: attention.Array,
  mask: attention.Mask,
  lengths_B: attention.Array,
  impl: str = 'auto',
  sinks_N: attention.Array | None = None,
  begins_B: attention.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of a row's last tokens over a range of its slots -> (o, lse).

  Slot begin + s of a row holds its token s, and the queries are the last T of
  them: the causal mask and the window are those of a sequence of length_b
  tokens. The content of other slots does not matter (for the XLA form it must
  be finite).

  Args:
    lengths_B: int32 tokens in each row, its queries included: T (or 0, then a
      row sees nothing) .. S. They are data: the caller must ensure the range.
    begins_B: None (0), or int32 slot of each row's token 0; 0 .. S - length
      where the length is not 0.
    others: as for `decode_attention`, as are results and errors.
  """
  b, t, s = *q_BTNH.shape[:2], k_BSKH.shape[1]
  if begins_B is None:
    begins_B = jnp.zeros_like(lengths_B)
  for name, x in (('lengths', lengths_B), ('begins', begins_B)):
    if x.shape != (b,):
      raise errors.UserError(
        f'{OP}: {name} have shape {x.shape}, expected one for each of the {b} '
        'rows'
      )
  arrays, ends_B = (q_BTNH, k_BSKH, v_BSKH), begins_B + lengths_B
  attention.check(OP, *arrays, mask, None, _orders(ends_B, t, s), sinks_N)
  if t == 1 and mask.causal:  # the range is all that there is to the mask
    if mask.window:
      begins_B = jnp.maximum(begins_B, ends_B - mask.window)
    mask = dataclasses.replace(mask, causal=False, window=0)
  o, lse = _run(*arrays, mask, impl, ranges=(begins_B, ends_B))
  return attention.with_sinks(o, lse, sinks_N)


def _run(q, k, v, mask, impl, segments=None, order=None, ranges=None):
  """(o, lse) of a checked call, without sinks."""
  spec = attention.spec_of(q, k, mask, segments, order, v)
  spec = DecodeAttentionSpec(**vars(spec), cache=(str(k.dtype), str(v.dtype)))
  chosen = registry.resolve(OP, impl, spec)
  return chosen.forward(q, k, v, segments, order, mask, ranges)


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
    own: (k_BSKH, v_BSKH) of each row after the prefix, another S.
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


def _whole_heads(x):
  """True if no mesh axis can split the heads of x_BSKH."""
  sharding = jax.typeof(x).sharding
  kinds = zip(sharding.mesh.axis_sizes, sharding.mesh.axis_types, strict=True)
  auto = any(n > 1 and t == jax.sharding.AxisType.Auto for n, t in kinds)
  return not auto and all(axis is None for axis in sharding.spec[2:3])


def _spread(q_BTNH, kv):
  """Rows over all kv heads, zero outside their own: (B, R, E)."""
  b, t, n, h = q_BTNH.shape
  own = jnp.eye(kv, dtype=q_BTNH.dtype)[:, None, :, None]
  q = q_BTNH.reshape(b, t, kv, n // kv, 1, h) * own
  # One merge at a time: the type of a sharded reshape allows no more.
  q = q.reshape(b, t, n, kv, h).reshape(b, t * n, kv, h)
  return q.reshape(b, t * n, kv * h)


def _own(o_BRE, t, kv):
  """Of each row, the columns of its own kv head: (B, T, N, H)."""
  b, r, e = o_BRE.shape
  o = o_BRE.reshape(b, r, kv, e // kv).reshape(b, t, r // t, kv, e // kv)
  o = o.reshape(b, t, kv, r // t // kv, kv, e // kv)
  own = jnp.eye(kv, dtype=o.dtype)[:, None, :, None]
  return (o * own).sum(4).reshape(b, t, r // t, e // kv)


def forward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask, ranges=None):
  """The XLA implementation; ranges: None, or (begins_B, ends_B) of slots."""
  b, t, n, h = q_BTNH.shape
  s, kv = k_BSKH.shape[1:3]
  if ranges is not None:
    order = _orders(ranges[1], t, s)
  wide = jnp.result_type(q_BTNH, k_BSKH, v_BSKH, jnp.float32)
  dot = lambda eq, x, y: jnp.einsum(eq, x, y, preferred_element_type=wide)
  merge = t * n <= MAX_ROWS and _whole_heads(k_BSKH)
  if merge:
    z = dot('bre,bse->brs', _spread(q_BTNH, kv), k_BSKH.reshape(b, s, -1))
    z = z.reshape(b, t, n, s)
  else:
    q = q_BTNH.reshape(b, t, kv, n // kv, h)
    z = dot('btkgh,bskh->btkgs', q, k_BSKH).reshape(b, t, n, s)
  z = z * mask.scale
  if mask.softcap:
    z = mask.softcap * jnp.tanh(z / mask.softcap)
  order = order or (jnp.arange(t)[None], jnp.arange(s)[None])
  filled = None
  if ranges is not None:
    begin, end = (x[:, None] for x in ranges)
    filled = (order[1] >= begin) & (order[1] < end)
  ok = attention_xla.visible(mask, segments, order, filled)
  z = z if ok is None else jnp.where(ok[:, :, None], z, varying.NEG)
  top = z.max(-1)
  p = jnp.exp(z - jnp.maximum(top, varying.FLOOR)[..., None])
  total = p.sum(-1)
  total = jnp.where(total == 0, 1, total)  # rows that see nothing: o = 0
  p = (p / total[..., None]).astype(v_BSKH.dtype)
  if merge:
    o = dot('brs,bse->bre', p.reshape(b, t * n, s), v_BSKH.reshape(b, s, -1))
    o = _own(o, t, kv)
  else:
    p = p.reshape(b, t, kv, n // kv, s)
    o = dot('btkgs,bskh->btkgh', p, v_BSKH).reshape(b, t, n, -1)
  return o.astype(v_BSKH.dtype), top + jnp.log(total)


def _kernel(platform, module):
  """The implementation of the op by a kernel for one query a row."""
  kernel = registry.kernel(platform, module)

  def run(q_BTNH, k_BSKH, v_BSKH, segments, order, mask, ranges=None):
    del segments, order  # see supports
    if ranges is None:
      b, s = k_BSKH.shape[:2]
      ranges = jnp.zeros(b, jnp.int32), jnp.full(b, s, jnp.int32)
    arrays = q_BTNH[:, 0], k_BSKH, v_BSKH, *ranges
    o, lse = kernel.forward(*varying.same(arrays), mask)
    return o[:, None].astype(v_BSKH.dtype), lse[:, None]

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
    if set(spec.cache) != {spec.dtype}:
      return f'takes one dtype, q is {spec.dtype}, k and v are {spec.cache}'
    return kernel.supports(spec, target)

  return registry.Implementation(kernel.name, run, None, supports)


registry.register(
  OP,
  _kernel('tpu', decode_attention_tpu),
  _kernel('gpu', decode_attention_gpu),
  registry.Implementation('xla', forward),
)
