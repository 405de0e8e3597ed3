"""Products with weights of 4 bits: symmetric integers in groups of inputs.

    s_gf = max |w| / 7 over a group      q = round(w / s) in -7 .. 7
    y_tf = sum_g s_gf sum_(d in g) x_td q_df          |w - s q| <= s / 2

A group is C rows along the contraction with one scale a column: 128 (MARLIN,
arXiv:2408.11743, section 3; the scheme of GPTQ, arXiv:2210.17323, with plain
rounding), or 64 or 32, where 128 does not divide D. Two forms of the same
integers:

  int4 (D, F): what a TPU multiplies from memory.
  uint8 (D / 2, F), the interchange form: byte r of a group holds row r in its
    low and row r + C / 2 in its high half, so that unpacking makes two whole
    pieces and shuffles nothing.

Cost: D F / 2 bytes and 4 D F / C of scales, where bfloat16 reads 2 D F: what
decoding waits for. XLA unpacks to memory first (16 rows, 4096 x 14336: hundreds
of MiB); the kernels (quantized_tpu.py, quantized_gpu.py) unpack on the chip,
the one for GPUs from the interchange form alone. No gradient: weights of 4 bits
are read, not trained.

Legend: T tokens, D inputs, F outputs, G = D / C groups.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import quantized_gpu as quantized_matmul_gpu
from paraxis.pallas_kernels.matmul import quantized_tpu as quantized_matmul_tpu

Array = jax.Array | np.ndarray  # on a device or on the host
OP = 'quantized_matmul'
GROUP = quantized_matmul_tpu.GROUP
GROUPS = 32, 64, 128
MOST = 7  # -8 is not used: symmetric
ROWS = {'int4': 1, 'uint8': 2}  # of the matrix, to one of q


@dataclasses.dataclass(frozen=True)
class QuantizedSpec:
  """Properties of a call that decide whether an implementation can run."""

  x: tuple[int, ...]  # T, D
  features: int  # F
  dtype: str  # of x
  form: str  # int4 | uint8
  sharded: bool = False
  group: int = GROUP  # C


def quantize(w_DF, dtype=jnp.float32, group=GROUP):
  """Rounds to nearest -> (int4 q_DF, scale_GF in `dtype`).

  Raises:
    errors.UserError: D is not a multiple of the group.
  """
  d, f = w_DF.shape
  if d % group:
    raise errors.UserError(
      f'{OP}: {d} inputs are not a multiple of the group, {group}; such a '
      'matrix stays as it is'
    )
  wide = jnp.promote_types(w_DF.dtype, jnp.float32)
  w = w_DF.astype(wide).reshape(d // group, group, f)
  scale = (jnp.abs(w).max(1) / MOST).astype(dtype)
  scale = jnp.where(scale == 0, 1, scale)  # a group of zeros, or of nothing
  # The scale as it is kept: its own rounding is inside the bound too.
  q = jnp.round(w / scale.astype(wide)[:, None])
  return jnp.clip(q, -MOST, MOST).astype(jnp.int4).reshape(d, f), scale


def pack(q_DF, group=GROUP):
  """int4 (D, F) -> uint8 (D / 2, F)."""
  d, f = q_DF.shape
  q = q_DF.astype(jnp.int32).reshape(d // group, 2, group // 2, f) & 15
  return (q[:, 0] | q[:, 1] << 4).astype(jnp.uint8).reshape(d // 2, f)


def unpack(packed, group=GROUP):
  """uint8 (D / 2, F) -> int4 (D, F); the inverse of `pack`."""
  half, f = packed.shape
  rows = packed.reshape(2 * half // group, group // 2, f)
  parts = quantized_matmul_tpu.halves(rows)
  return jnp.concatenate(parts, 1).astype(jnp.int4).reshape(2 * half, f)


def dequantize(q, scale_GF, dtype=None):
  """w_DF of either form, in `dtype` (default promote_types(scale, float32))."""
  wide = jnp.promote_types(scale_GF.dtype, jnp.float32)
  groups, (rows, f) = len(scale_GF), q.shape
  if q.dtype == jnp.uint8:
    q = unpack(q, 2 * rows // groups)
  w = q.astype(wide).reshape(groups, -1, f) * scale_GF[:, None]
  return w.reshape(q.shape).astype(dtype or wide)


def quantized_matmul(
  x: Array, q: Array, scale_GF: Array, impl: str = 'auto'
) -> jax.Array:
  """y = x w -> (..., F) in x's dtype.

  Args:
    x: (..., D) float.
    q: int4 (D, F) or uint8 (D / 2, F).
    scale_GF: float, one for 128, 64 or 32 rows of a column.
    impl: 'auto' or the name of a registered implementation.

  Raises:
    errors.UserError: shapes or types that do not fit, or an implementation
      that cannot run here.
  """
  form, d = q.dtype.name, x.shape[-1]
  if form not in ROWS:
    raise errors.UserError(f'{OP}: q is {form}, must be int4 or (packed) uint8')
  group = d // max(len(scale_GF), 1)
  scales = d // max(group, 1), q.shape[1]
  fits = q.shape[0] * ROWS[form] == d == group * len(scale_GF)
  if not fits or scale_GF.shape != scales or group not in GROUPS:
    raise errors.UserError(
      f'{OP}: x {x.shape}, q {form} {q.shape}, scales {scale_GF.shape} do not '
      'fit (..., D), (D, F) or packed (D / 2, F), (D / C, F) with groups of C '
      f'in {GROUPS}'
    )
  rows = x.reshape(-1, d)
  sharded = registry.spread(x)
  spec = QuantizedSpec(
    rows.shape, q.shape[1], x.dtype.name, form, sharded, group
  )
  y = registry.resolve(OP, impl, spec).forward(rows, q, scale_GF)
  return y.reshape(*x.shape[:-1], -1)


def tied(q, x):
  """q, which no compiler can read before x is there.

  XLA moves out of a loop what does not change in it: of a loop over tokens it
  would make all weights floats, once, and keep them; a barrier does not keep it
  from that on CPU. So q is combined with a zero that is computed from x.
  """
  first = x[(0,) * x.ndim]
  zero = jnp.where(jnp.isfinite(first), first, 0) * 0
  return q ^ zero.astype(q.dtype)


def forward(x_TD, q, scale_GF):
  """The XLA implementation: weights as floats, then a product."""
  wide = jnp.promote_types(x_TD.dtype, jnp.float32)
  w = dequantize(tied(q, x_TD), scale_GF, x_TD.dtype)
  y = jnp.dot(x_TD, w, preferred_element_type=wide)
  return y.astype(x_TD.dtype)


registry.register(
  OP,
  registry.kernel('tpu', quantized_matmul_tpu),
  registry.kernel('gpu', quantized_matmul_gpu),
  registry.Implementation('xla', forward),
)
