"""Third-party attention kernels behind the same contract: forward passes.

  splash  jax's splash attention for TPU
  cudnn   cuDNN's fused attention, for GPUs

They are baselines and second opinions, never chosen by 'auto'. Each returns
(o, lse) and has no backward pass here: their backward passes take o, not
delta = sum o do - dlse, so they cannot carry the gradient of lse or of sinks;
the backward pass is one of ours (op.choose). `supports` reports their limits.

A third, tokamax, is optional: ../tokamax_adapter.py.

Legend: B batch, T query length, S key length, N query heads, K kv heads, H head
size.
"""

from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import tokamax_adapter
from paraxis.pallas_kernels.attention import blocks

LANES = 128


def _unfit(spec, target):
  """What none of them takes, in one line, or None."""
  if spec.sharded:
    return registry.SPREAD
  if spec.order:
    return 'takes no order: queries and keys are 0, 1, 2, ...'
  if spec.mask.window and not spec.mask.causal:
    return 'takes a window only together with a causal mask'
  if len({*spec.heads}) > 1:
    return f'takes one head size, not {spec.heads[0]} and {spec.heads[1]}'
  if target.platform == 'tpu':
    for length in (spec.q[1], spec.k[1]):
      if length % LANES:
        return f'length {length} is not a multiple of {LANES}'
  return None


def splash_supports(spec, target):
  """None, or one line that says why splash attention cannot run."""
  if target.platform != 'tpu':
    return f'needs a TPU, target is {target.device_kind}'
  if spec is None:
    return None
  if spec.dtype not in ('bfloat16', 'float32'):
    return f'takes bfloat16 and float32, not {spec.dtype}'
  return _unfit(spec, target)


def splash(
  q_BTNH, k_BSKH, v_BSKH, segments, order, mask, launch=blocks.DEFAULT
):
  """Forward pass by jax's splash attention -> (o_BTNH, lse_BTN)."""
  del order  # see supports
  (_, t, n, _), s = q_BTNH.shape, k_BSKH.shape[1]
  fit = lambda x: next(m for m in (512, 256, LANES) if x % m == 0)
  sizes = splash_attention.BlockSizes(*(launch.block or (fit(t), fit(s))))
  one = splash_attention.FullMask((t, s))
  if mask.causal:
    one = splash_attention.CausalMask((t, s))
  if mask.window:
    one = splash_attention.LocalMask((t, s), (mask.window - 1, 0), 0)
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask([one] * n),
    block_sizes=sizes,
    save_residuals=True,
    attn_logits_soft_cap=mask.softcap or None,
    head_shards=1,
    q_seq_shards=1,
    interpret=launch.interpret,
  )
  heads_first = lambda x: x.transpose(0, 2, 1, 3)
  q = (q_BTNH * mask.scale).astype(q_BTNH.dtype)  # it takes no scale
  ids = None
  if segments is not None:
    q_segments, k_segments = segments
    ids = splash_attention.SegmentIds(
      jnp.where(q_segments > 0, q_segments, -1),
      jnp.where(k_segments > 0, k_segments, 0),
    )
  arrays = map(heads_first, (q, k_BSKH, v_BSKH))
  o, (lse,) = jax.vmap(kernel)(*arrays, ids)
  # In a row that sees nothing splash averages the hidden values.
  some = lse > blocks.FLOOR
  o = jnp.where(some[..., None], o, 0).astype(v_BSKH.dtype)
  lse = jnp.where(some, lse, blocks.NEG)
  return heads_first(o), lse.transpose(0, 2, 1)


def cudnn_supports(spec, target):
  """None, or one line that says why cuDNN cannot run."""
  if target.platform != 'gpu' or 'NVIDIA' not in target.device_kind:
    return f'needs an NVIDIA GPU, target is {target.device_kind}'
  if spec is None:
    return None
  if spec.dtype not in ('bfloat16', 'float16'):
    return f'takes bfloat16 and float16, not {spec.dtype}'
  if spec.segments:
    return 'takes no segments as an array'
  if spec.mask.softcap:
    return 'has no softcap'
  if spec.q[-1] % 8 or spec.q[-1] > 128:
    return f'head size {spec.q[-1]}: takes multiples of 8 up to 128'
  return _unfit(spec, target)


def cudnn_attention(q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
  """Forward pass by cuDNN -> (o_BTNH, lse_BTN).

  jax.nn.dot_product_attention rounds lse to o's dtype, which a backward pass
  cannot use; the function beneath it does not.
  """
  del segments, order  # see supports
  kind = cudnn.MaskType.CAUSAL if mask.causal else cudnn.MaskType.NO_MASK
  out: Any = cudnn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    scale=mask.scale,
    mask_type=kind,
    sliding_window_length=mask.window or None,
    return_residual=True,
  )
  o, lse = out
  return o, lse.astype(jnp.float32).transpose(0, 2, 1)


def tokamax_supports(spec, target):
  """None, or one line that says why tokamax's attention cannot run."""
  reason = tokamax_adapter.unfit(spec, target)
  if reason or spec is None:
    return reason
  if spec.segments or spec.order:
    return 'takes neither segments nor an order without a T x S mask'
  if target.platform == 'tpu' and spec.mask.window:
    return 'has no window on TPU'
  return _unfit(spec, target)


IMPLEMENTATIONS = (
  registry.Implementation('splash', splash, None, splash_supports),
  registry.Implementation('cudnn', cudnn_attention, None, cudnn_supports),
  registry.Implementation(
    'tokamax', tokamax_adapter.attention, None, tokamax_supports
  ),
)
