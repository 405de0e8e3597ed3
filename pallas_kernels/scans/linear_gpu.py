"""The diagonal scan on GPU (Triton): channels over threads, tokens in order.

  forward   h_t = a_t h_{t-1} + b_t          backward  l_t = g_t + m_{t+1}
                                                       m_t = a_t l_t

A program has one row of the batch and `LANES` neighbouring channels, one each
thread, and walks the tokens, in reverse in the backward pass. Memory latency
limits it, so the rows of `UNROLL` tokens are all requested before the first is
used. B D / 32 programs: a small batch leaves processors idle, and then
XLA's associative scan may win; impl='xla' chooses it.

float32 inside. Cost: a and b (or g) read once, h (or l) written once; 2 flops
per element.

Legend: B batch, T length, D channels.
"""

import functools
import math
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

LANES, UNROLL, WARPS, STAGES = 32, 16, 1, 1
DTYPES = 'bfloat16', 'float16', 'float32'
MOST_ELEMENTS = 2**31  # an address is counted in 32 bits


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  size = math.prod(spec.shape)
  if size >= MOST_ELEMENTS:
    return f'{size} elements, addresses fewer than {MOST_ELEMENTS}'
  return None


class _RowWalk(NamedTuple):
  """Tokens and channels of a row without padding, and how it is walked."""

  tokens: int
  channels: int
  unroll: int
  reverse: bool


def _kernel(a_ref, b_ref, start_ref, out_ref, *end_ref, walk):
  tokens, unroll, reverse = walk.tokens, walk.unroll, walk.reverse
  lane = pl.program_id(1) * LANES + jnp.arange(LANES)
  live = lane < walk.channels
  row = pl.program_id(0)

  def load(ref, t):
    x = plgpu.load(ref.at[row, t, lane], mask=live, other=0.0)
    return x.astype(jnp.float32)

  def some(first, count, c):
    """Tokens first, first + 1, ... (backwards: first, first - 1, ...)."""
    at = [first - i if reverse else first + i for i in range(count)]
    loaded = [(load(a_ref, t), load(b_ref, t)) for t in at]
    for t, (a, b) in zip(at, loaded, strict=True):
      out = b + c if reverse else a * c + b
      c = a * out if reverse else out
      value = out.astype(out_ref.dtype)
      plgpu.store(out_ref.at[row, t, lane], value, mask=live)
    return c

  whole = tokens // unroll

  def block(i, c):
    first = tokens - 1 - i * unroll if reverse else i * unroll
    return some(first, unroll, c)

  def single(i, c):
    return some(tokens - 1 - i if reverse else i, 1, c)

  c = plgpu.load(start_ref.at[row, lane], mask=live, other=0.0)
  c = lax.fori_loop(0, whole, block, c)
  c = lax.fori_loop(whole * unroll, tokens, single, c)
  if end_ref:
    plgpu.store(end_ref[0].at[row, lane], c, mask=live)


def _call(a, b, start, reverse, unroll, interpret):
  """(out_BTD, end_BD or None)."""
  n, t, d = b.shape
  dtype = jnp.float32 if reverse else b.dtype
  shapes = [
    varying.result(b, b.shape, dtype),
    varying.result(b, start.shape, jnp.float32),
  ]
  shapes = shapes[: 1 if reverse else 2]
  whole = lambda s: pl.BlockSpec(s, lambda *_: (0,) * len(s))
  moved = a.nbytes + b.nbytes + b.size * jnp.dtype(dtype).itemsize
  out, *end = pl.pallas_call(
    functools.partial(_kernel, walk=_RowWalk(t, d, min(unroll, t), reverse)),
    name=f'linear_scan_gpu_{"backward" if reverse else "forward"}',
    grid=(n, pl.cdiv(d, LANES)),
    in_specs=[whole(a.shape), whole(b.shape), whole(start.shape)],
    out_specs=[whole(s.shape) for s in shapes],
    out_shape=shapes,
    compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    cost_estimate=pl.CostEstimate(
      flops=2 * b.size, bytes_accessed=moved, transcendentals=0
    ),
    interpret=interpret,
  )(a, b, start)
  return out, end[0] if end else None


def forward(a_BTD, b_BTD, state_BD, unroll=UNROLL, interpret=False):
  """-> (h_BTD in b's dtype, state after it); see linear.py."""
  return _call(a_BTD, b_BTD, state_BD, False, unroll, interpret)


def backward(a_BTD, g_BTD, dstate_BD, unroll=UNROLL, interpret=False):
  """-> l_BTD float32."""
  return _call(a_BTD, g_BTD, dstate_BD, True, unroll, interpret)[0]
