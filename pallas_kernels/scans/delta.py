"""Gated delta rule: a matrix state that decays, and corrects what it answers.

    S_t = e^g_t S_(t-1) + k_t (b_t (v_t - e^g_t S_(t-1)^T k_t))^T
    o_t = S_t^T q_t

with S_(t-1) := 0 where a document starts: what the decayed state answers to k_t
is moved towards v_t, by the share b_t (DeltaNet, arXiv:2406.06484, section 2;
with decays: Gated DeltaNet, arXiv:2412.06464, section 3). With |k| = 1 and b
within 0 and 2 no state grows by itself. Linear in length; in chunks of C tokens
(delta_xla.py) nearly all work is matrix products: per token 6 K V + 4 C V for
each head, 4 C^2 log2 C for the inverse of its system, and 4 C K for each group.

An implementation is two functions without autodiff:
  forward(tokens, state, chunk, save) -> (o, state, starts)
  backward(tokens, starts, (do, d_state), chunk) ->
    (dq, dk, dv, dg, db, d_state)
`starts` are the states at the starts of chunks, kept for the gradient; the op
pads the length to whole chunks with tokens that change nothing (k, g, b 0).

The state is linear in its value columns, apart from each other. So K columns
more, with values 0 and the initial state I, give what a piece does with any
state that enters it: `extended` adds them, sharding/sequence/scan.py uses them.

Legend: B batch, T tokens, H heads, G groups of heads that share q and k, K key
size, V value size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import delta_batched
from paraxis.pallas_kernels.scans import delta_xla
from paraxis.pallas_kernels.scans import gated

OP = 'delta_scan'


@dataclasses.dataclass(frozen=True)
class DeltaScanSpec:
  """Properties of a call that decide whether an implementation can run."""

  q: tuple[int, ...]  # B, T, G, K
  values: int  # V
  dtype: str
  chunk: int  # 0: the implementation's own


def delta_scan(
  q_BTGK: jax.Array,
  k_BTGK: jax.Array,
  v_BTHV: jax.Array,
  log_decay_BTH: jax.Array,
  beta_BTH: jax.Array,
  reset_BT: jax.Array | None = None,
  state_BHKV: jax.Array | None = None,
  **options,
) -> tuple[jax.Array, jax.Array]:
  """A scan by the gated delta rule -> (o_BTHV, state_BHKV after the last).

  Args:
    q_BTGK, k_BTGK: any float dtype; head h reads group h // (H // G), without
      a copy for each. Neither scale nor norm is applied.
    v_BTHV: values; G divides H.
    log_decay_BTH: <= 0; float32 is advised whatever the dtype of q. -inf
      forgets all of the head, as a reset does, and has no gradient.
    beta_BTH: shares b, 0 (write nothing) to 1 (replace), or to 2 (reflect).
    reset_BT: bool, true at the first token of a document: it forgets the state
      that reaches it, and its own decay is not used. None: nowhere. What is not
      finite passes it in chunks, whose products mix all tokens; not in 'loop'.
    state_BHKV: before the first token. None: zeros.
    chunk: tokens of a chunk, a power of two >= 8; 0: the default of the
      implementation. Does not change the result beyond rounding.
    impl: 'auto' or the name of a registered implementation. 'loop' goes token
      by token: for one token, or a few.

  Returns:
    o in v's dtype; the state in promote_types(q's dtype, float32), in which
    all is summed. All float inputs have gradients. A token with b = 0 and
    log_decay = 0 leaves the state as it is.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  tokens = delta_xla.DeltaTokens(
    q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH, reset_BT
  )
  return _scan(tokens, state_BHKV, **options)


def check(x, state, chunk):
  """Raises errors.UserError, with both numbers, if something does not fit."""
  gated.check(OP, x.q, x.k, x.v, x.g, x.segment, state, chunk)
  for name, y in (('log_decay', x.g), ('beta', x.beta)):
    if y.shape != x.v.shape[:3]:
      raise errors.UserError(
        f'{OP}: {name} {y.shape} must be {x.v.shape[:3]}, one per head'
      )
  if not jnp.issubdtype(x.beta.dtype, jnp.floating):
    raise errors.UserError(f'{OP}: beta is {x.beta.dtype}, must be a float')


def _scan(x, state, *, chunk=0, impl='auto'):
  """delta_scan of DeltaTokens that have resets, or None, for segments."""
  check(x, state, chunk)
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  spec = DeltaScanSpec(x.q.shape, V, str(x.q.dtype), chunk)
  chosen = registry.resolve(OP, impl, spec)
  chunk = gated.chunk_of(chunk or delta_xla.CHUNKS[chosen.name], T)
  reset = jnp.zeros((B, T), bool) if x.segment is None else x.segment
  state = jnp.zeros((B, H, K, V)) if state is None else state
  # 0 times what a failed request left behind may be NaN.
  state = jnp.where(reset[:, :1, None, None], 0, state)
  x = x._replace(
    g=jnp.where(reset[..., None], 0, gated.finite(x.g)), segment=reset
  )
  *arrays, reset = (varying.pad(y, T + -T % chunk) for y in x)
  count = jnp.cumsum(reset.reshape(B, -1, chunk).astype(jnp.int32), -1)
  tokens = delta_xla.DeltaTokens(*arrays, segment=count.reshape(B, -1))
  state = state.astype(jnp.promote_types(x.q.dtype, jnp.float32))
  scanned: Any = gated.scanned(chosen, chunk, *varying.same((tokens, state)))
  o, state = scanned
  return o[:, :T], state


# ------------------------------------------------------- length over devices --


def extended(
  v_BTHV: jax.Array, keys: int, dtype
) -> tuple[jax.Array, jax.Array]:
  """(values, initial state) of a scan that also shows what passes through it.

  Of what the scan then gives, o_BTH(V+K) and state_BHK(V+K), the first V
  columns are those of a scan from a zero state. The others, R_BTHK and P_BHKK,
  are what a state S_in that enters adds: R S_in to o, P S_in to the state.

  Args:
    keys: K. dtype: of both results, that of the sums.
  """
  b, t, h, v = v_BTHV.shape
  values = jnp.concatenate(
    [v_BTHV.astype(dtype), jnp.zeros((b, t, h, keys), dtype)], -1
  )
  state = jnp.concatenate([jnp.zeros((keys, v)), jnp.eye(keys)], -1)
  return values, jnp.broadcast_to(state.astype(dtype), (b, h, keys, v + keys))


def correction(reach_BTHK: jax.Array, state_BHKV: jax.Array) -> jax.Array:
  """What an initial state adds to the outputs of a scan from a zero state."""
  return _dot('bthk,bhkv->bthv', reach_BTHK, state_BHKV)


_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def after(first, second):
  """The map `second` after `first`; a map (P, S) is X -> P X + S."""
  dot = functools.partial(_dot, '...ij,...jk->...ik')
  return dot(second[0], first[0]), dot(second[0], first[1]) + second[1]


def _on_gpu(spec, target):
  del spec
  if target.platform == 'gpu':
    return None
  return f'for a gpu: on {target.platform} a loop over chunks takes less memory'


registry.register(
  OP,
  registry.Implementation(
    'batched', delta_batched.forward, delta_batched.backward, _on_gpu
  ),
  registry.Implementation('xla', delta_xla.forward, delta_xla.backward),
  registry.Implementation(
    'loop', delta_xla.loop_forward, delta_xla.loop_backward, gated.no_chunk
  ),
)
