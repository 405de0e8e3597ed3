"""Products with 4-bit weights on GPU (Triton): unpacked on the processor.

A program is a tile of outputs and a share of the groups; it adds up

    y += (x_low q_low + x_high q_high) s        of a group, in float32

where low and high are the halves of a group that share bytes (quantized.py).
An integer of 4 bits is exact in every dtype that is taken, and scales multiply
sums, not weights, so the only rounding is that of x. Few tokens have few tiles:
groups are shared out until there are four programs for each processor of an
H200, and XLA adds up what they found, in a fixed order, with what comes next.

bfloat16 is made by PTX, four bytes at a time: the bits 0x4300 | n are 128 + n,
so that one instruction writes two of them. To convert integers instead takes
longer than to read them (2048 x 5632, one token, H200: 11.3 us against 9.5, of
which the loop around it takes about 5).

Tried without gain (one token, 8192 x 8192, H200, 27 us): to load the bytes of
the next group into registers, 32 us; transposed products, 37; sums of one token
without tensor cores, 26. Beyond 128 tokens XLA is faster: it unpacks once, to
memory, and multiplies.

Cost: 2 T D F operations; D F / 2 bytes of weights for each 64 tokens, 8 T F of
partial sums for each share.

Legend: T tokens, D inputs, F outputs, G groups, C inputs of a group.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.matmul import quantized_tpu

DTYPES = 'bfloat16', 'float16', 'float32'
LEAST, MOST_ROWS = 16, 64  # tokens of a tile
MOST_TOKENS = 128
LANES = 64  # outputs of the smallest tile
PROGRAMS = 512

# bfloat16 of the low (high) halves of four bytes: n = q + 8 in 0 .. 15, as
# 0x4300 | n = 128 + n, less 136. One instruction puts 0x43 beside two n.
_PTX = """{{
.reg .b32 n, c, one, m;
{first}
and.b32 n, n, 0x0F0F0F0F;
mov.b32 c, 0x43434343;
mov.b32 one, 0x3F803F80;
mov.b32 m, 0xC308C308;
prmt.b32 $0, n, c, 0x4140;
prmt.b32 $1, n, c, 0x4342;
fma.rn.bf16x2 $0, $0, one, m;
fma.rn.bf16x2 $1, $1, one, m;
}}"""
_LOW = _PTX.format(first='xor.b32 n, $2, 0x08080808;')
_HIGH = _PTX.format(first='shr.u32 n, $2, 4; xor.b32 n, n, 0x08080808;')


class Int4Launch(NamedTuple):
  """How the kernel is called; for tests and measurements.

  outputs: of a tile, shares: of the groups; 0: as the shapes need. warps,
  stages: as Triton knows them. interpret: as in pl.pallas_call.
  """

  outputs: int = 0
  shares: int = 0
  warps: int = 4
  stages: int = 0
  interpret: Any = False


DEFAULT = Int4Launch()


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  if spec.form != 'uint8':
    return f'{spec.form}: takes the packed form, uint8'
  if spec.x[0] > MOST_TOKENS:
    return f'{spec.x[0]} tokens: takes {MOST_TOKENS}, for more XLA is faster'
  if spec.features % LANES:
    return f'{spec.features} outputs: takes multiples of {LANES}'
  return None


def _fit(launch, tokens, inputs, groups, outputs):
  """(`launch` with sizes for none, rows of a tile)."""
  rows = min(max(LEAST, pl.next_power_of_2(tokens)), MOST_ROWS)
  wide = 2 * LANES if tokens <= 8 and outputs % (2 * LANES) == 0 else LANES
  tile = launch.outputs or wide
  others = pl.cdiv(tokens, rows) * (outputs // tile)
  shares = pl.next_power_of_2(pl.cdiv(PROGRAMS, others))
  fitted = dict(
    outputs=tile,
    # Partial sums have no more bytes than the weights.
    shares=launch.shares or min(shares, groups, max(inputs // (8 * tokens), 1)),
    stages=launch.stages or (4 if rows < MOST_ROWS else 2),
  )
  return launch._replace(**fitted), rows


def _halves(packed, dtype, ptx):
  """uint8 -> its low and its high halves in `dtype`."""
  if not ptx:
    return [half.astype(dtype) for half in quantized_tpu.halves(packed)]
  shape = jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)
  return [
    plgpu.elementwise_inline_asm(
      text, args=[packed], constraints='=r,=r,r', pack=4,
      result_shape_dtypes=[shape],
    )[0]
    for text in (_LOW, _HIGH)
  ]  # fmt: skip


def _kernel(x, q, scale, y, *, rows, each, launch):
  (t, d), groups = x.shape, scale.shape[0]
  half = d // groups // 2
  j, share, i = (pl.program_id(axis) for axis in range(3))
  columns = pl.ds(j * launch.outputs, launch.outputs)
  at = pl.ds(i * rows, rows)
  there = (i * rows + jnp.arange(rows) < t)[:, None]
  # No processor interprets PTX.
  ptx = x.dtype == jnp.bfloat16 and not launch.interpret

  def left(g, high):
    inputs = pl.ds((2 * g + high) * half, half)
    return plgpu.load(x.at[at, inputs], mask=there, other=0.0)

  def body(g, total):
    packed = plgpu.load(q.at[pl.ds(g * half, half), columns])
    low, high = _halves(packed, x.dtype, ptx)
    own = blocks.dot(left(g, 0), low, blocks.NN)
    own += blocks.dot(left(g, 1), high, blocks.NN)
    return total + own * plgpu.load(scale.at[g, columns]).astype(jnp.float32)

  end = jnp.minimum((share + 1) * each, groups)
  total = jnp.zeros((rows, launch.outputs), jnp.float32)
  total = jax.lax.fori_loop(share * each, end, body, total)
  plgpu.store(y.at[share, at, columns], total, mask=there)


def forward(x_TD, q, scale_GF, launch=DEFAULT):
  """-> y_TF in x's dtype; q: uint8 (D / 2, F)."""
  (t, d), f, groups = x_TD.shape, q.shape[1], len(scale_GF)
  launch, rows = _fit(launch, t, d, groups, f)
  each = pl.cdiv(groups, launch.shares)
  shares = pl.cdiv(groups, each)
  given = varying.same((x_TD, q, scale_GF))
  y = varying.result(given[0], (shares, t, f), jnp.float32)
  parts = pl.pallas_call(
    functools.partial(_kernel, rows=rows, each=each, launch=launch),
    name='quantized_matmul_gpu',
    grid=(f // launch.outputs, shares, pl.cdiv(t, rows)),
    out_shape=y,
    compiler_params=plgpu.CompilerParams(
      num_warps=launch.warps, num_stages=launch.stages
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * t * d * f,
      transcendentals=0,
      bytes_accessed=pl.cdiv(t, rows) * q.nbytes + 4 * y.size,
    ),
    interpret=launch.interpret,
  )(*given)
  return parts.sum(0).astype(x_TD.dtype)
