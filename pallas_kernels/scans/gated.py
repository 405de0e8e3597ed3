"""Gated scan: a matrix state that decays, is written to and is read.

    S_t = diag(e^g_t) S_(t-1) + k_t v_t^T        o_t = S_t^T q_t

with S_(t-1) := 0 where a document starts. Gated linear attention
(arXiv:2312.06635, section 4) has one decay per key, Mamba-2 (arXiv:2405.21060,
section 6) one per head. Linear in length; in chunks of C tokens, so that nearly
all work is matrix products: per token 2 K (C log2 C + 2 V) + 2 C V and the sums
of decays (gated_chunk.cost).

An implementation is two functions without autodiff:
  forward(tokens, state, chunk, save) -> (o, state, starts)
  backward(tokens, starts, (do, d_state), chunk) -> (dq, dk, dv, dg, d_state)
`starts` are the states at the starts of chunks, kept for the gradient; the op
pads the length to whole chunks with tokens that change nothing (k 0, g 0).

A length that is split over devices: each runs the op from a zero state, `decay`
and the final state compose over devices, and `correction` adds what the true
initial state contributes.

Legend: B batch, T tokens, H heads, G groups of heads that share q and k, K key
size, V value size.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import gated_chunk
from paraxis.pallas_kernels.scans import gated_gpu as gated_scan_gpu
from paraxis.pallas_kernels.scans import gated_tpu as gated_scan_tpu
from paraxis.pallas_kernels.scans import gated_xla as gated_scan_xla

OP = 'gated_scan'
# Tokens of a chunk where the caller does not say, by implementation; with a
# decay per key those of BY_KEY, if it has one there.
CHUNKS = dict(
  pallas_tpu=gated_scan_tpu.CHUNK,
  pallas_gpu=gated_scan_gpu.CHUNK,
  xla=gated_scan_xla.CHUNK,
  loop=1,
)
BY_KEY = dict(pallas_gpu=gated_scan_gpu.KEY_CHUNK)
MIN_CHUNK = 8
LEAST = dict(pallas_gpu=16)  # rows of a product on its matrix unit
# A log decay of -inf, as it is summed: e^ it is 0 in every dtype, and 0 times
# it is not NaN.
ALL_LOST = -1e30


@dataclasses.dataclass(frozen=True)
class GatedScanSpec:
  """Properties of a call that decide whether an implementation can run."""

  q: tuple[int, ...]  # B, T, G, K
  values: int  # V
  dtype: str
  chunk: int  # 0: the implementation's own
  sharded: bool = False  # the compiler may spread the arrays: no kernel


def check(op, q_BTGK, k_BTGK, v_BTHV, log_decay, reset_BT, state_BHKV, chunk):
  """Raises errors.UserError, with both numbers, if something does not fit."""
  q, v = q_BTGK.shape, v_BTHV.shape
  if len(q) != 4 or k_BTGK.shape != q or len(v) != 4 or v[:2] != q[:2]:
    raise errors.UserError(
      f'{op}: q {q}, k {k_BTGK.shape}, v {v} do not fit (B, T, G, K), '
      f'(B, T, G, K), (B, T, H, V)'
    )
  if 0 in (*q, v[3]):
    raise errors.UserError(
      f'{op}: q {q}, v {v} are empty; every size must be at least 1'
    )
  if v[2] % q[2]:
    raise errors.UserError(
      f'{op}: {q[2]} groups of q and k do not divide {v[2]} heads of v'
    )
  per_key = *v[:3], q[3]
  if log_decay.shape not in (per_key, v[:3]):
    raise errors.UserError(
      f'{op}: log_decay {log_decay.shape} must be {per_key}, one per key, or '
      f'{v[:3]}, one per head'
    )
  floats = dict(q=q_BTGK, k=k_BTGK, v=v_BTHV, log_decay=log_decay)
  for name, x in floats.items():
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise errors.UserError(f'{op}: {name} is {x.dtype}, must be a float')
  if reset_BT is not None and reset_BT.shape != q[:2]:
    raise errors.UserError(
      f'{op}: reset {reset_BT.shape} must be {q[:2]}, one per token'
    )
  state = q[0], v[2], q[3], v[3]
  if state_BHKV is not None and state_BHKV.shape != state:
    raise errors.UserError(
      f'{op}: the state is {state_BHKV.shape}, these inputs need {state}; '
      f'it belongs to another model or batch'
    )
  if chunk and (chunk < MIN_CHUNK or chunk & (chunk - 1)):
    raise errors.UserError(
      f'{op}: chunk is {chunk}, must be a power of two and at least '
      f'{MIN_CHUNK}, or 0 for the default of the implementation'
    )


def gated_scan(
  q_BTGK: jax.Array,
  k_BTGK: jax.Array,
  v_BTHV: jax.Array,
  log_decay: jax.Array,
  reset_BT: jax.Array | None = None,
  state_BHKV: jax.Array | None = None,
  *,
  chunk: int = 0,
  impl: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """A gated scan -> (o_BTHV, state_BHKV after the last token).

  Args:
    q_BTGK, k_BTGK: any float dtype; head h reads group h // (H // G), without
      a copy for each. No scale is applied.
    v_BTHV: values; G divides H.
    log_decay: <= 0, (B, T, H, K) or (B, T, H); float32 is advised whatever the
      dtype of q. -inf forgets all of the key or head, as a reset does, and has
      no gradient.
    reset_BT: bool, true at the first token of a document: it forgets the state
      that reaches it, and its own decay is not used. None: nowhere. What is not
      finite passes it only within a chunk, whose products mix all its tokens.
    state_BHKV: before the first token. None: zeros.
    chunk: tokens of a chunk, a power of two >= 8; 0: the default of the
      implementation. Does not change the result beyond rounding.
    impl: 'auto' or the name of a registered implementation. 'loop' goes token
      by token: the cheapest on a CPU without gradients, or for one token.

  Returns:
    o in v's dtype; the state in promote_types(q's dtype, float32), in which
    all is summed. All float inputs have gradients. A token with k = 0 and
    log_decay = 0 leaves the state as it is.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  check(OP, q_BTGK, k_BTGK, v_BTHV, log_decay, reset_BT, state_BHKV, chunk)
  (B, T, H, V), K = v_BTHV.shape, q_BTGK.shape[3]
  sharded = registry.spread(q_BTGK) or registry.spread(v_BTHV)
  spec = GatedScanSpec(q_BTGK.shape, V, str(q_BTGK.dtype), chunk, sharded)
  chosen = registry.resolve(OP, impl, spec)
  own = CHUNKS if log_decay.ndim == 3 else CHUNKS | BY_KEY
  chunk = chunk_of(chunk or own[chosen.name], T, LEAST.get(chosen.name, 0))
  if reset_BT is None:
    reset_BT = jnp.zeros((B, T), bool)
  if state_BHKV is None:
    state_BHKV = jnp.zeros((B, H, K, V))
  wide = jnp.promote_types(q_BTGK.dtype, jnp.float32)
  # 0 times what a failed request left behind may be NaN.
  state_BHKV = jnp.where(reset_BT[:, :1, None, None], 0, state_BHKV)
  restart = reset_BT.reshape(B, T, *[1] * (log_decay.ndim - 2))
  g = jnp.where(restart, 0, finite(log_decay))
  arrays = q_BTGK, k_BTGK, v_BTHV, g, reset_BT
  *arrays, reset_BT = (varying.pad(x, T + -T % chunk) for x in arrays)
  count = jnp.cumsum(reset_BT.reshape(B, -1, chunk).astype(jnp.int32), -1)
  tokens = gated_chunk.GatedTokens(*arrays, segment=count.reshape(B, -1))
  tokens, state = varying.same((tokens, state_BHKV.astype(wide)))
  out: Any = scanned(chosen, chunk, tokens, state)
  o, state = out
  return o[:, :T], state


def chunk_of(chunk, length, least=0):
  """The chunk to use: no longer than the length, rounded up, needs.

  least: tokens that an implementation takes at least.
  """
  return min(chunk, max(MIN_CHUNK, least, 1 << (length - 1).bit_length()))


def finite(log_decay):
  """ALL_LOST, or the least of the dtype, instead of what is below."""
  least = max(ALL_LOST, float(jnp.finfo(log_decay.dtype).min))
  return jnp.where(log_decay < least, least, log_decay)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scanned(chosen, chunk, tokens, state):
  """(o, state after the last token) of padded tokens, with gradients.

  tokens: a NamedTuple whose last field is `segment`, which has none.
  """
  return chosen.forward(tokens, state, chunk, False)[:2]


def _forward(chosen, chunk, tokens, state):
  out = chosen.forward(tokens, state, chunk, True)
  # Named here, where they are residuals: a policy that keeps them never runs
  # the forward pass again.
  o, state, starts = (checkpoint_name(x, 'scan') for x in out)
  return (o, state), (tokens, starts)


def _backward(chosen, chunk, residuals, cotangents):
  tokens, starts = residuals
  *gradients, d_state = chosen.backward(tokens, starts, cotangents, chunk)
  return type(tokens)(*gradients, segment=None), d_state


scanned.defvjp(_forward, _backward)


# ------------------------------------------------------- length over devices --


def decay(log_decay, reset_BT=None):
  """Decay of a whole piece: what is left of a state that enters it.

  Returns:
    (B, H, K), or (B, H, 1) of one decay per head: e^(sum of log_decay), 0 if
    the piece has a reset. The state after a piece is this times the state
    before it (over V), plus the piece's own from a zero state.
  """
  total = _wide(log_decay).sum(1)
  total = total if log_decay.ndim == 4 else total[..., None]
  left = jnp.exp(total)
  if reset_BT is None:
    return left
  return jnp.where(reset_BT.any(1)[:, None, None], 0, left)


def correction(q_BTGK, log_decay, reset_BT, state_BHKV):
  """What an initial state adds to the outputs of a scan from a zero state.

      do_t = (q_t e^(g_1 + ... + g_t)) S    before the first reset, 0 from it on

  Returns:
    do_BTHV in promote_types(q's dtype, float32).
  """
  (b, t, g, k), h = q_BTGK.shape, state_BHKV.shape[1]
  total = jnp.cumsum(_wide(log_decay), 1)
  total = total if log_decay.ndim == 4 else total[..., None]
  reach = jnp.exp(total)
  if reset_BT is not None:
    seen = jnp.cumsum(reset_BT.astype(jnp.int32), 1) > 0
    reach = jnp.where(seen[..., None, None], 0, reach)
  q, reach = _wide(q_BTGK), reach.reshape(b, t, g, h // g, -1)
  state = state_BHKV.reshape(b, g, h // g, k, -1)
  precision = gated_chunk.precision_of(q_BTGK.dtype).products
  dot = functools.partial(jnp.einsum, precision=precision)
  if log_decay.ndim == 3:
    do = dot('btgk,bgrkv->btgrv', q, state) * reach
  else:
    do = dot('btgrk,bgrkv->btgrv', q[:, :, :, None] * reach, state)
  return do.reshape(b, t, h, -1)


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def no_chunk(spec, target):
  """What a loop over tokens does not take: chunks."""
  del target
  if spec is None or not spec.chunk:
    return None
  return f'goes token by token, asked for a chunk of {spec.chunk}'


registry.register(
  OP,
  registry.kernel('tpu', gated_scan_tpu),
  registry.kernel('gpu', gated_scan_gpu),
  registry.Implementation(
    'xla', gated_scan_xla.forward, gated_scan_xla.backward
  ),
  registry.Implementation(
    'loop',
    gated_scan_xla.loop_forward,
    gated_scan_xla.loop_backward,
    no_chunk,
  ),
)
