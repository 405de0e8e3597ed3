"""Softmax attention as one op: (o, lse), both differentiable, any backend.

  s = softcap(scale q.k) on visible pairs;  lse = log sum_s e^s
  o = sum_s e^(s - lse) v

An implementation is two pure functions, without autodiff:
  forward(q, k, v, segments, order, mask) -> (o, lse)
  backward(q, k, v, segments, order, mask, QueryRows(lse, delta, do)) ->
    (dq, dk, dv), with p = e^(s - lse), ds = p (do.v - delta)
The op owns the one rule that joins them, delta = sum_h o do - dlse, so that no
kernel needs code for the gradient of lse (FlashAttention-2, arXiv:2307.08691,
section 3.1; the dlse term follows from d lse / d s = p). Residuals: q, k, v, o,
lse, so memory grows linearly with length. As lse is a natural logarithm in all
of them, the forward of one goes with the backward of another.

A sink is one more logit a head that takes weight and gives no value (attention
sinks, arXiv:2309.17453; learned ones as in gpt-oss, arXiv:2508.10925). It too
lives here and in no kernel:
  lse' = log(e^lse + e^sink);  o' = o e^(lse - lse')
  delta = sum_h o' do - dlse';  dsink = - sum_rows e^(sink - lse') delta
The kernels' p = e^(s - lse') is then the weight that includes the sink.

Implementations, in order of preference (registry.py; `paraxis doctor` prints
which one runs and why the others do not):
  pallas_tpu  tpu.py; pallas_hopper  hopper.py; pallas_gpu  gpu.py: our kernels
  xla         xla.py: every device, every dtype
  splash, cudnn, tokamax  adapters.py: third-party forward passes, never chosen
              by 'auto'

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import adapters as attention_adapters
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import hopper as attention_hopper
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.pallas_kernels.attention import xla as attention_xla

Array = jax.Array | np.ndarray  # on a device or on the host
Pair = Sequence[Array]  # of the queries (B, T), of the keys (B, S)
NEG = varying.NEG  # the lse of a row that sees nothing; finite


@dataclasses.dataclass(frozen=True)
class Mask:
  """What a query may see, and how a score is made from q.k.

  A key is visible if both have the same segment > 0, and if causal:
  order_k <= order_q, and if window > 0: order_q - order_k < window.
  """

  causal: bool = True
  window: int = 0  # the last `window` tokens, itself included; 0 = unlimited
  softcap: float = 0.0  # s -> softcap tanh(s / softcap); 0 = off
  scale: float = 1.0  # multiplies q.k
  # With order given: it is at most so many tokens ahead of a token's place in
  # the row, so that shards of a row are not passed over (sharding/sequence).
  ahead: int = 0
  # Tokens per block of the XLA form, a bound on the scores held at once. The
  # kernels' blocks are fitted to the chip (blocks.choose).
  block: int = 256

  def __post_init__(self):
    for name in ('window', 'softcap'):
      if getattr(self, name) < 0:
        raise errors.UserError(
          f'attention mask: {name} is {getattr(self, name)}, must be >= 0 '
          f'(0 turns it off)'
        )
    if self.block < 1:
      raise errors.UserError(
        f'attention mask: block is {self.block}, must be at least 1'
      )


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """Properties of a call that decide whether an implementation can run.

  sharded: the compiler may spread the arrays over devices. A kernel cannot be
  spread: it runs in a manual region (annotate.region) on local arrays.
  """

  q: tuple[int, ...]  # B, T, N, H
  k: tuple[int, ...]  # B, S, K, H
  dtype: str
  mask: Mask
  segments: bool
  order: bool
  v: tuple[int, ...] = ()  # B, S, K, head size of values; () = as k
  others: tuple[str, ...] = ()  # dtypes of k and v; () = dtype, that of q
  sharded: bool = False

  @property
  def heads(self):
    """Head sizes (of q and k, of v)."""
    return self.k[-1], (self.v or self.k)[-1]


def check(op, q_BTNH, k_BSKH, v_BSKH, mask, segments, order, sinks_N=None):
  """Raises errors.UserError, with both numbers, if the shapes do not fit."""
  b, t, n, h = q_BTNH.shape
  s, kv = k_BSKH.shape[1:3]
  if k_BSKH.shape != (b, s, kv, h) or v_BSKH.shape[:3] != (b, s, kv):
    raise errors.UserError(
      f'{op}: q {q_BTNH.shape}, k {k_BSKH.shape}, v {v_BSKH.shape} do not fit '
      f'(B, T, N, H), (B, S, K, H), (B, S, K, H)'
    )
  if n % kv:
    raise errors.UserError(
      f'{op}: {n} query heads are not a multiple of {kv} kv heads; '
      f'change one of them'
    )
  if order is None and t != s and (mask.causal or mask.window):
    raise errors.UserError(
      f'{op}: {t} queries and {s} keys need order=(q_BT, k_BS) for a causal or '
      f'windowed mask'
    )
  for name, pair in (('segments', segments), ('order', order)):
    if pair is not None and (pair[0].shape, pair[1].shape) != ((b, t), (b, s)):
      raise errors.UserError(
        f'{op}: {name} have shapes {pair[0].shape} and {pair[1].shape}, '
        f'expected {(b, t)} and {(b, s)}'
      )
  if sinks_N is not None and sinks_N.shape != (n,):
    raise errors.UserError(
      f'{op}: sinks have shape {sinks_N.shape}, expected one for each of the '
      f'{n} query heads'
    )


def spec_of(q, k, mask, segments, order, v=None):
  """The AttentionSpec of one call; v: None if its head size is that of k."""
  return AttentionSpec(
    q.shape,
    k.shape,
    str(q.dtype),
    mask,
    segments is not None,
    order is not None,
    (k if v is None else v).shape,
    (str(k.dtype), str((k if v is None else v).dtype)),
    registry.spread(q),
  )


def choose(impl='auto', spec=None, target=None):
  """(implementation of the forward pass, of the backward pass).

  Args:
    impl: 'auto', a name, or 'FORWARD/BACKWARD', each 'auto' or a name. A single
      name selects both passes; if it has no backward pass (the adapters), the
      backward pass is chosen as by 'auto'.
    spec: AttentionSpec, or None to ask about the target alone.
    target: registry.Target; default the current one.

  Raises:
    errors.UserError: one that is unknown or cannot run, with its reason.
  """
  first, _, second = impl.partition('/')
  forward = registry.resolve('attention', first, spec, target)
  if not second:
    second = forward.name if forward.backward else 'auto'
  backward = registry.resolve('attention', second, spec, target)
  if backward.backward is None:
    raise errors.UserError(
      f'attention: {backward.name} has no backward pass; write '
      f"'{forward.name}/auto' or name another one after the '/'"
    )
  return forward, backward


def attention(
  q_BTNH: Array,
  k_BSKH: Array,
  v_BSKH: Array,
  mask: Mask,
  segments: Pair | None = None,
  order: Pair | None = None,
  impl: str = 'auto',
  sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Attention of q over k and v -> (o_BTNH, lse_BTN).

  Args:
    q_BTNH: queries, any float dtype. Head n reads kv head n // (N // K).
    k_BSKH: keys, same dtype and H as q; K divides N.
    v_BSKH: values; their head size may differ from H.
    mask: Mask.
    segments: None (all one document) or int arrays (q_BT, k_BS). 0 is padding:
      it sees nothing and nothing sees it.
    order: None (both are 0, 1, 2, ..., T == S; invisible blocks cost nothing)
      or int arrays (q_BT, k_BS).
    impl: 'auto', the name of a registered implementation, or two of them,
      'FORWARD/BACKWARD' (see `choose`).
    sinks_N: None, or one logit per query head that every row of the head sees
      beside its keys; differentiable.

  Returns:
    o in v's dtype, and lse in promote_types(dtype, float32), the sink
    included. A row that sees nothing has o = 0 and zero gradients of q, k, v,
    and lse = NEG, or its sink.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  check('attention', q_BTNH, k_BSKH, v_BSKH, mask, segments, order, sinks_N)
  spec = spec_of(q_BTNH, k_BSKH, mask, segments, order, v_BSKH)
  chosen = choose(impl, spec)
  arrays = varying.same((q_BTNH, k_BSKH, v_BSKH, segments, order, sinks_N))
  return _attention(chosen, mask, *arrays)


def with_sinks(o_BTNH, lse_BTN, sinks_N):
  """(o, lse) of rows that also see their head's sink; None: as they are."""
  if sinks_N is None:
    return o_BTNH, lse_BTN
  sinks = sinks_N.astype(lse_BTN.dtype)
  # A row that sees nothing: o is 0, whatever e^(NEG - lse') is.
  lse = jnp.logaddexp(lse_BTN, sinks)
  o = o_BTNH * jnp.exp(lse_BTN - lse)[..., None]
  return o.astype(o_BTNH.dtype), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(chosen, mask, q, k, v, segments, order, sinks) -> Any:
  return _forward(chosen, mask, q, k, v, segments, order, sinks)[0]


def _forward(chosen, mask, q, k, v, segments, order, sinks):
  out = chosen[0].forward(q, k, v, segments, order, mask)
  out = with_sinks(*out, sinks)
  # Named here, where they are residuals: a policy that keeps them never runs
  # the forward kernel again.
  o, lse = (checkpoint_name(x, 'attention') for x in out)
  return (o, lse), ((q, k, v, segments, order), sinks, o, lse)


def _backward(chosen, mask, residuals, cotangents):
  given, sinks, o, lse = residuals
  do, dlse = cotangents
  wide = lse.dtype
  # Heads first: XLA on CPU takes 40 times as long for the sum as it lies, of
  # one row.
  terms = o.astype(wide).swapaxes(1, 2) * do.astype(wide).swapaxes(1, 2)
  delta = terms.sum(-1).swapaxes(1, 2) - dlse
  rows = attention_blocks.QueryRows(lse, delta, do)
  grads = chosen[1].backward(*given, mask, rows)
  dsinks = None
  if sinks is not None:
    p = jnp.exp(sinks.astype(wide) - lse)  # the sink's weight in each row
    dsinks = -(p * delta).sum((0, 1)).astype(sinks.dtype)
  return *grads, None, None, dsinks


_attention.defvjp(_forward, _backward)

registry.register(
  'attention',
  registry.kernel('tpu', attention_tpu),
  registry.kernel('gpu', attention_hopper),
  registry.kernel('gpu', attention_gpu),
  registry.Implementation('xla', attention_xla.forward, attention_xla.backward),
  *attention_adapters.IMPLEMENTATIONS,
)
