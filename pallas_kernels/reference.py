"""The ops as their definitions: dense, slow, meant to be read and trusted.

Every implementation is compared with these, in float64. Memory grows with
T x S; nothing here is used in training.

Legend: B batch, T query length, S key length, N query heads, K kv heads,
H head size.
"""

import jax.numpy as jnp

NEG = -1e30  # lse of a row that sees nothing


def visible(mask, t, s, segments=None, order=None):
  """(B or 1, T, S) bool: may query t see key s?"""
  order_q, order_k = order or (jnp.arange(t)[None], jnp.arange(s)[None])
  far = order_q[:, :, None] - order_k[:, None, :]
  ok = jnp.ones(far.shape, bool)
  if mask.causal:
    ok &= far >= 0
  if mask.window:
    ok &= far < mask.window
  if segments:
    segment_q, segment_k = segments[0][:, :, None], segments[1][:, None, :]
    ok &= (segment_q == segment_k) & (segment_q > 0)
  return ok


def attention_ref(
  q_BTNH, k_BSKH, v_BSKH, mask, segments=None, order=None, sinks_N=None
):
  """Dense attention -> (o_BTNH, lse_BTN), differentiable by jax itself.

  Arguments and semantics are those of attention/op.py; the result is computed
  and returned in promote_types(dtype, float32).
  """
  wide = jnp.result_type(q_BTNH, k_BSKH, v_BSKH, jnp.float32)
  groups = q_BTNH.shape[2] // k_BSKH.shape[2]
  q = q_BTNH.astype(wide)
  k = jnp.repeat(k_BSKH.astype(wide), groups, axis=2)
  v = jnp.repeat(v_BSKH.astype(wide), groups, axis=2)
  score = mask.scale * jnp.einsum('btnh,bsnh->btns', q, k)
  if mask.softcap:
    score = mask.softcap * jnp.tanh(score / mask.softcap)
  t, s = q.shape[1], k.shape[1]
  ok = visible(mask, t, s, segments, order)[:, :, None, :]
  if sinks_N is not None:  # one more key, seen by every row, of value 0
    sink = jnp.broadcast_to(sinks_N[:, None], (*q.shape[:3], 1)).astype(wide)
    score = jnp.concatenate([score, sink], -1)
    ok = jnp.pad(ok, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
    v = jnp.pad(v, [(0, 0), (0, 1), (0, 0), (0, 0)])
  top = jnp.where(ok, score, NEG).max(-1, keepdims=True)
  weight = jnp.where(ok, jnp.exp(jnp.where(ok, score - top, 0)), 0)
  total = weight.sum(-1, keepdims=True)
  some = total > 0
  total = jnp.where(some, total, 1)
  o = jnp.einsum('btns,bsnh->btnh', weight / total, v)
  lse = jnp.where(some, top + jnp.log(total), NEG)
  return o, lse[..., 0]
