"""Attention of a few new queries over a cache of slots -> (o, lse).

  s = softcap(scale q.k) on visible slots;  lse = log sum_s e^s
  o = sum_s e^(s - lse) v

Decoding reads every slot once and does little else, so the cache must not be
copied. A dot batched over (B, K) makes XLA transpose the cache first (k is in
the middle of (B, S, K, H)); with few queries it is cheaper to read the cache as
a matrix (S, K H) and to spread each query over the columns of its kv head, zero
elsewhere: K times the flops, one pass, no copy. With many queries, or heads
sharded over a mesh, the batched dot is used. Cost: B S K H (k and v) read once;
memory B T N S scores. No gradient: training uses attention.py.

Legend: B batch, T queries (few), S slots, N query heads, K kv heads, G = N / K,
H head size, E = K H, R = T N.
"""

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import attention
from paraxis.pallas_kernels import attention_xla
from paraxis.pallas_kernels import registry

# Above this many rows T N the K-fold flops cost more than the copy.
MAX_ROWS = 128


def decode_attention(
  q_BTNH, k_BSKH, v_BSKH, mask, segments=None, order=None, impl='auto'
):
  """Attention of q over the slots of a cache -> (o_BTNH, lse_BTN).

  Args:
    q_BTNH: queries; head n reads kv head n // (N // K).
    k_BSKH: cached keys; K divides N.
    v_BSKH: cached values.
    mask: attention.Mask; `block` is not used.
    segments: None or int arrays (q_BT, k_BS); an empty slot has segment 0.
    order: None (both are 0, 1, 2, ...) or int arrays (q_BT, k_BS).
    impl: 'auto' or the name of a registered implementation.

  Returns:
    o in v's dtype, lse in promote_types(dtype, float32); a row that sees
    nothing has o = 0 and lse = attention.NEG.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  op = 'decode_attention'
  attention.check(op, q_BTNH, k_BSKH, v_BSKH, mask, segments, order)
  spec = attention.spec_of(q_BTNH, k_BSKH, mask, segments, order)
  chosen = registry.resolve(op, impl, spec)
  return chosen.forward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask)


def _whole_heads(x):
  """True if no mesh axis can split the heads of x_BSKH."""
  sharding = jax.typeof(x).sharding
  kinds = zip(sharding.mesh.axis_sizes, sharding.mesh.axis_types, strict=True)
  auto = any(n > 1 and t == jax.sharding.AxisType.Auto for n, t in kinds)
  return not auto and all(axis is None for axis in sharding.spec[2:3])


def _visible(mask, segments, order, t, s):
  """(B or 1, T, 1, S) bool, or None if every slot is visible."""
  rules = []
  if segments is not None:
    rules += [segments[0][:, :, None] == segments[1][:, None, :]]
    rules += [segments[0][:, :, None] > 0]
  row, col = jnp.arange(t)[None, :, None], jnp.arange(s)[None, None, :]
  if order is not None:
    row, col = order[0][:, :, None], order[1][:, None, :]
  if mask.causal:
    rules.append(col <= row)
  if mask.window:
    rules.append(row - col < mask.window)
  ok = None
  for rule in rules:
    ok = rule if ok is None else ok & rule
  return None if ok is None else ok[:, :, None, :]


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


def forward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
  """The XLA implementation of decode_attention."""
  b, t, n, h = q_BTNH.shape
  s, kv = k_BSKH.shape[1:3]
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
  ok = _visible(mask, segments, order, t, s)
  z = z if ok is None else jnp.where(ok, z, attention_xla.NEG)
  top = z.max(-1)
  p = jnp.exp(z - jnp.maximum(top, attention_xla.FLOOR)[..., None])
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


registry.register(
  'decode_attention',
  registry.Implementation('xla', forward, None, lambda spec, target: None),
)
