"""Products with 4-bit weights on GPU (Triton): unpacked on the processor.

A program is a tile of outputs and a share of the groups; it adds up

    y += (x_low q_low + x_high q_high) s        of a group, in float32

where low and high are the halves of a group that share bytes (quantized.py).
An integer of 4 bits is exact in every dtype that is taken, and scales multiply
sums, not weights, so the only rounding is that of x. Few tokens have few tiles:
groups are shared out until there are four programs for each processor of an
H200, and XLA adds up what they found, in a fixed order, with what comes next.

bfloat16 is made by PTX, four bytes at a time: the bits 0x4300 | n are 128 + n,
so that one instruction writes two of them. A loop of products on an H200, one
token, 2048 x 5632: 9.5 us each, 11.3 with a conversion of integers, 14 of
bfloat16. Tried and left out, 8192 x 8192: bytes of the next group loaded ahead,
32 us for 27; transposed products, 37; of one token, sums without tensor cores,
26, which is no more than noise.

Beyond 64 tokens XLA's form runs, which unpacks to memory and multiplies: of 16
tokens, 8192 x 8192, that takes .103 ms, this kernel .034, bfloat16 .056; of 64
this one .046, bfloat16 .043; of 128, as two tiles, .117.

Cost: 2 T D F operations; D F / 2 bytes of weights and their scales, 8 T F of
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
LEAST, MOST_TOKENS = 16, 64  # of a tile
LANES = 64  # outputs of the smallest tile
PROGRAMS = 512
MOST_ELEMENTS = 2**31  # an address is counted in 32 bits

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
  if not target.device_kind.startswith('NVIDIA'):
    return f'is PTX of Ampere and later, target is {target.device_kind}'
  if spec.form != 'uint8':
    return f'{spec.form}: takes the packed form, uint8'
  if spec.x[0] > MOST_TOKENS:
    return f'{spec.x[0]} tokens: takes {MOST_TOKENS}, for more XLA is faster'
  if spec.features % LANES:
    return f'{spec.features} outputs: takes multiples of {LANES}'
  if (most := spec.x[1] // 2 * spec.features) >= MOST_ELEMENTS:
    return f'{most} bytes of weights, addresses fewer than {MOST_ELEMENTS}'
  return None


def _fit(launch, tokens, inputs, groups, outputs):
  """(`launch` with sizes for none, rows of a tile)."""
  rows = max(LEAST, pl.next_power_of_2(tokens))
  wide = 2 * LANES if tokens <= 8 and outputs % (2 * LANES) == 0 else LANES
  tile = launch.outputs or wide
  shares = pl.next_power_of_2(pl.cdiv(PROGRAMS, outputs // tile))
  fitted = dict(
    outputs=tile,
    # Partial sums have no more bytes than the weights.
    shares=launch.shares or min(shares, groups, max(inputs // (8 * tokens), 1)),
    stages=launch.stages or (4 if rows < MOST_TOKENS else 2),
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
  j, share = pl.program_id(0), pl.program_id(1)
  columns = pl.ds(j * launch.outputs, launch.outputs)
  every, there = pl.ds(0, rows), (jnp.arange(rows) < t)[:, None]
  # No processor interprets PTX.
  ptx = x.dtype == jnp.bfloat16 and not launch.interpret

  def left(g, high):
    inputs = pl.ds((2 * g + high) * half, half)
    return plgpu.load(x.at[every, inputs], mask=there, other=0.0)

  def body(g, total):
    packed = plgpu.load(q.at[pl.ds(g * half, half), columns])
    low, high = _halves(packed, x.dtype, ptx)
    own = blocks.dot(left(g, 0), low, blocks.NN)
    own += blocks.dot(left(g, 1), high, blocks.NN)
    return total + own * plgpu.load(scale.at[g, columns]).astype(jnp.float32)

  end = jnp.minimum((share + 1) * each, groups)
  total = jnp.zeros((rows, launch.outputs), jnp.float32)
  total = jax.lax.fori_loop(share * each, end, body, total)
  plgpu.store(y.at[share, every, columns], total, mask=there)


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
    grid=(f // launch.outputs, shares),
    out_shape=y,
    compiler_params=plgpu.CompilerParams(
      num_warps=launch.warps, num_stages=launch.stages
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * t * d * f,
      transcendentals=0,
      bytes_accessed=q.nbytes + scale_GF.nbytes + x_TD.nbytes + 4 * y.size,
    ),
    interpret=launch.interpret,
  )(*given)
  return parts.sum(0).astype(x_TD.dtype)
