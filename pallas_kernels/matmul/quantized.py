"""Products with weights of 4 bits: symmetric integers in groups of 128.

    s_gf = max |w| / 7 over a group      q = round(w / s) in -7 .. 7
    y_tf = sum_g s_gf sum_(d in g) x_td q_df          |w - s q| <= s / 2

A group is 128 rows along the contraction with one scale a column (MARLIN,
arXiv:2408.11743, section 3; the scheme of GPTQ, arXiv:2210.17323, with plain
rounding). Two forms of the same integers:

  int4 (D, F): what a TPU multiplies from memory.
  uint8 (D / 2, F), the interchange form: byte r of a group holds row r in its
    low and row r + 64 in its high half, so that unpacking makes two whole
    pieces and shuffles nothing.

Cost: D F / 2 bytes and 4 D F / 128 of scales, where bfloat16 reads 2 D F: what
decoding waits for. XLA on TPU unpacks to memory first (16 rows, 4096 x 14336:
hundreds of MiB); the kernel (quantized_tpu.py) unpacks on the chip. No
gradient: weights of 4 bits are read, not trained.

Legend: T tokens, D inputs, F outputs, G = D / 128 groups.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import quantized_tpu as quantized_matmul_tpu

Array = jax.Array | np.ndarray  # on a device or on the host
OP = 'quantized_matmul'
GROUP = quantized_matmul_tpu.GROUP
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


def quantize(w_DF, dtype=jnp.float32):
  """Rounds to nearest -> (int4 q_DF, scale_GF in `dtype`).

  Raises:
    errors.UserError: D is not a multiple of 128.
  """
  d, f = w_DF.shape
  if d % GROUP:
    raise errors.UserError(
      f'{OP}: {d} inputs are not a multiple of the group, {GROUP}; such a '
      'matrix stays as it is'
    )
  wide = jnp.promote_types(w_DF.dtype, jnp.float32)
  w = w_DF.astype(wide).reshape(d // GROUP, GROUP, f)
  scale = (jnp.abs(w).max(1) / MOST).astype(dtype)
  scale = jnp.where(scale == 0, 1, scale)  # a group of zeros, or of nothing
  # The scale as it is kept: its own rounding is inside the bound too.
  q = jnp.round(w / scale.astype(wide)[:, None])
  return jnp.clip(q, -MOST, MOST).astype(jnp.int4).reshape(d, f), scale


def pack(q_DF):
  """int4 (D, F) -> uint8 (D / 2, F)."""
  d, f = q_DF.shape
  q = q_DF.astype(jnp.int32).reshape(d // GROUP, 2, GROUP // 2, f) & 15
  return (q[:, 0] | q[:, 1] << 4).astype(jnp.uint8).reshape(d // 2, f)


def unpack(packed):
  """uint8 (D / 2, F) -> int4 (D, F); the inverse of `pack`."""
  half, f = packed.shape
  rows = packed.reshape(-1, GROUP // 2, f)
  parts = quantized_matmul_tpu.halves(rows)
  return jnp.concatenate(parts, 1).astype(jnp.int4).reshape(2 * half, f)


def dequantize(q, scale_GF, dtype=None):
  """w_DF of either form, in `dtype` (default promote_types(scale, float32))."""
  wide = jnp.promote_types(scale_GF.dtype, jnp.float32)
  q = unpack(q) if q.dtype == jnp.uint8 else q
  w = q.astype(wide).reshape(len(scale_GF), GROUP, -1) * scale_GF[:, None]
  return w.reshape(q.shape).astype(dtype or wide)


def quantized_matmul(
  x: Array, q: Array, scale_GF: Array, impl: str = 'auto'
) -> jax.Array:
  """y = x w -> (..., F) in x's dtype.

  Args:
    x: (..., D) float.
    q: int4 (D, F) or uint8 (D / 2, F).
    scale_GF: float, one for 128 rows of a column.
    impl: 'auto' or the name of a registered implementation.

  Raises:
    errors.UserError: shapes or types that do not fit, or an implementation
      that cannot run here.
  """
  form, d = q.dtype.name, x.shape[-1]
  if form not in ROWS:
    raise errors.UserError(f'{OP}: q is {form}, must be int4 or (packed) uint8')
  scales = d // GROUP, q.shape[1]
  if q.shape[0] * ROWS[form] != d or scale_GF.shape != scales or d % GROUP:
    raise errors.UserError(
      f'{OP}: x {x.shape}, q {form} {q.shape}, scales {scale_GF.shape} do not '
      f'fit (..., D), (D, F) or packed (D / 2, F), (D / {GROUP}, F)'
    )
  rows = x.reshape(-1, d)
  sharded = registry.spread(x)
  spec = QuantizedSpec(rows.shape, q.shape[1], x.dtype.name, form, sharded)
  y = registry.resolve(OP, impl, spec).forward(rows, q, scale_GF)
  return y.reshape(*x.shape[:-1], -1)


def forward(x_TD, q, scale_GF):
  """The XLA implementation: weights as floats, then a product."""
  wide = jnp.promote_types(x_TD.dtype, jnp.float32)
  w = dequantize(q, scale_GF, x_TD.dtype)
  y = jnp.dot(x_TD, w, preferred_element_type=wide)
  return y.astype(x_TD.dtype)


registry.register(
  OP,
  registry.kernel('tpu', quantized_matmul_tpu),
  registry.Implementation('xla', forward),
)
