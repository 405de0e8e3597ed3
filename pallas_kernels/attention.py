"""Softmax attention as one op: (o, lse), both differentiable, any backend.

  s = softcap(scale q.k) on visible pairs;  lse = log sum_s e^s
  o = sum_s e^(s - lse) v

An implementation is two pure functions, without autodiff:
  forward(q, k, v, segments, order, mask) -> (o, lse)
  backward(q, k, v, segments, order, mask, (lse, delta, do)) -> (dq, dk, dv)
    with p = e^(s - lse), ds = p (do.v - delta)
The op owns the one rule that joins them, delta = sum_h o do - dlse, so that no
kernel needs code for the gradient of lse (FlashAttention-2, arXiv:2307.08691,
section 3.1; the dlse term follows from d lse / d s = p). Residuals: q, k, v, o,
lse, so memory grows linearly with length.

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size.
"""

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from paraxis.configs import errors
from paraxis.pallas_kernels import attention_xla
from paraxis.pallas_kernels import registry

NEG = attention_xla.NEG  # the lse of a row that sees nothing; finite


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
  block: int = 256  # tokens per block, a bound on the scores held at once

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
class Spec:
  """What an implementation may look at when it says if it can run."""

  q: tuple[int, ...]  # B, T, N, H
  k: tuple[int, ...]  # B, S, K, H
  dtype: str
  mask: Mask
  segments: bool
  order: bool


def check(op, q_BTNH, k_BSKH, v_BSKH, mask, segments, order):
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


def spec_of(q, k, mask, segments, order):
  """The Spec of one call."""
  return Spec(
    q.shape, k.shape, str(q.dtype), mask, segments is not None,
    order is not None,
  )  # fmt: skip


def attention(
  q_BTNH, k_BSKH, v_BSKH, mask, segments=None, order=None, impl='auto'
):
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
    impl: 'auto' or the name of a registered implementation.

  Returns:
    o in v's dtype, and lse in promote_types(dtype, float32). A row that sees
    nothing has o = 0, lse = NEG and zero gradients.

  Raises:
    errors.UserError: shapes that do not fit, or an implementation that cannot
      run here.
  """
  check('attention', q_BTNH, k_BSKH, v_BSKH, mask, segments, order)
  spec = spec_of(q_BTNH, k_BSKH, mask, segments, order)
  chosen = registry.resolve('attention', impl, spec)
  arrays = attention_xla.same_varying((q_BTNH, k_BSKH, v_BSKH, segments, order))
  return _attention(chosen, mask, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(chosen, mask, q, k, v, segments, order):
  return chosen.forward(q, k, v, segments, order, mask)


def _forward(chosen, mask, q, k, v, segments, order):
  o, lse = chosen.forward(q, k, v, segments, order, mask)
  # Named here, where they are residuals: a policy that keeps them never runs
  # the forward kernel again.
  o, lse = (checkpoint_name(x, 'attention') for x in (o, lse))
  return (o, lse), (q, k, v, segments, order, o, lse)


def _backward(chosen, mask, residuals, cotangents):
  q, k, v, segments, order, o, lse = residuals
  do, dlse = cotangents
  wide = lse.dtype
  delta = (o.astype(wide) * do.astype(wide)).sum(-1) - dlse
  rows = lse, delta, do
  grads = chosen.backward(q, k, v, segments, order, mask, rows)
  return *grads, None, None


_attention.defvjp(_forward, _backward)

registry.register(
  'attention',
  registry.Implementation(
    'xla',
    attention_xla.forward,
    attention_xla.backward,
    lambda spec, target: None,
  ),
)
