"""Kernels of tokamax behind our contracts: optional, never chosen by 'auto'.

tokamax (github.com/openxla/tokamax) is an optional dependency: it is imported
when one of its kernels runs, and `supports` reports that it is not installed.
The kernels are baselines and second opinions. tokamax silently falls back to
its XLA form if a kernel refuses; here the kernel is named (`form`), so a kernel
that cannot run is an error:

  TPU v5 and later  mosaic_tpu       NVIDIA Hopper, Blackwell  mosaic_gpu
  other NVIDIA      triton           CPU                       xla

Its public attention gives no lse, which the op needs, so the ops beneath it are
called (tokamax 0.0.12; a later version may have moved them). There is no
backward pass of attention here, for the reason in attention/adapters.py.

Legend: B batch, T query length, S key length or rows, N query heads, K kv
heads, H head size, E groups, D input width, F output width.
"""

import importlib
import importlib.util
import re

from absl import flags
import jax.numpy as jnp

from paraxis.pallas_kernels import registry

MISSING = 'tokamax is not installed: pip install tokamax'
_DTYPES = {
  'mosaic_tpu': ('bfloat16', 'float32'),
  'mosaic_gpu': ('bfloat16', 'float16'),
  'triton': ('bfloat16', 'float16'),
  'xla': ('bfloat16', 'float32'),
}


def form(target):
  """tokamax's name of the implementation for a target, or None."""
  kind = target.device_kind
  if target.platform == 'tpu':
    return None if re.search(r'v[234]\b', kind) else 'mosaic_tpu'
  if target.platform == 'gpu':
    if 'NVIDIA' not in kind:
      return None
    new = re.search(r'\b(GH|GB|H|B)\d{2,3}\b', kind)
    return 'mosaic_gpu' if new else 'triton'
  return 'xla' if target.platform == 'cpu' else None


def unfit(spec, target):
  """Why no kernel of tokamax runs a call on a target, or None."""
  if importlib.util.find_spec('tokamax') is None:
    return MISSING
  name = form(target)
  if name is None:
    return f'tokamax has no kernel for {target.device_kind}'
  if spec is not None and spec.dtype not in _DTYPES[name]:
    return f'{name} takes {" and ".join(_DTYPES[name])}, not {spec.dtype}'
  return None


def load(name='tokamax'):
  """A module of tokamax, which keeps its options in absl's global flags.

  absl would read the command line of the calling program, and an unknown flag
  ends the process: so the flags are marked as parsed, with their defaults.
  """
  found = importlib.import_module(name)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  return found


def _ops(name):
  return load(f'tokamax._src.ops.{name}')


def attention(q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
  """Forward pass by tokamax -> (o_BTNH, lse_BTN)."""
  del segments, order  # see supports
  base, api = _ops('attention.base'), _ops('attention.api')
  limits = {}
  if mask.window:  # query t sees keys from t - window + 1 on
    first = jnp.arange(q_BTNH.shape[1]) - (mask.window - 1)
    limits = dict(k_start=jnp.maximum(first, 0))
  name = form(registry.current_target())
  o, (m, total) = api.IMPLEMENTATIONS[name](
    *map(jnp.asarray, (q_BTNH, k_BSKH, v_BSKH)),
    logits_scale=mask.scale,
    logits_soft_cap=mask.softcap or None,
    mask=base.Mask(is_causal=mask.causal, **limits),
    return_residuals=True,
  )
  # Row maxima and sums; on TPU the second array is the lse already.
  lse = total if name == 'mosaic_tpu' else m + jnp.log(total)
  return o.astype(v_BSKH.dtype), lse.astype(jnp.float32).swapaxes(1, 2)


def product(a_SD, b, sizes_E, size, dtype, **dimensions):
  """y_SF, or dW_EDF with the numbers of its dimensions; see matmul/grouped.py.

  dimensions: ragged_dot_dimension_numbers of the product over rows, or none.
  """
  del size
  api = _ops('ragged_dot.api')
  call = api.ragged_dot_general if dimensions else api.ragged_dot
  return call(
    jnp.asarray(a_SD), jnp.asarray(b), group_sizes=sizes_E,
    preferred_element_type=dtype,
    implementation=form(registry.current_target()), **dimensions,
  )  # fmt: skip
