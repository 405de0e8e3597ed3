"""The diagonal scan on TPU: rows times lanes, the carry stays on the chip.

  forward   h_t = a_t h_{t-1} + b_t          backward  l_t = g_t + m_{t+1}
                                                       m_t = a_t l_t

The grid walks (row of the batch, channels, blocks of tokens), the last in
order, reversed in the backward pass. There the carry is m, so that a needs no
shift. A block is processed in tiles of 8 tokens (16 of bfloat16), scanned
in registers by log2 of that many rotations along sublanes; only the last token
of a tile waits for the tile before.

float32 inside. Cost: a and b (or g) read once, h (or l) written once; 2 flops
per element, 13 as they are done. Tokens are padded with the identity to whole
blocks, channels to 128.

Legend: B batch, T length, D channels.
"""

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying

LANES, MOST_LANES, MOST_ROWS = 128, 512, 256
DTYPES = 'bfloat16', 'float32'


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  if {*spec.others} - {*DTYPES}:  # together they may be float32
    return f'takes {" and ".join(DTYPES)}, not {" with ".join(spec.others)}'
  return None


def _tile_scan(a, b, reverse):
  """Inclusive scan of the maps of a tile along its rows; (T, D) float32."""
  rows = a.shape[0]
  at = lax.broadcasted_iota(jnp.int32, a.shape, 0)
  by = 1
  while by < rows:
    turn = rows - by if reverse else by
    a_by, b_by = pltpu.roll(a, turn, 0), pltpu.roll(b, turn, 0)
    there = at < rows - by if reverse else at >= by
    there &= a != 0  # what it forgets may be NaN
    b = jnp.where(there, a * b_by + b, b)
    a = jnp.where(there, a * a_by, a)
    by *= 2
  return a, b


def _kernel(a_ref, b_ref, start_ref, out_ref, *rest, tile, reverse):
  *end_ref, carry = rest
  step, rows = pl.program_id(2), out_ref.shape[0]

  @pl.when(step == 0)
  def _():
    carry[...] = start_ref[...]

  def one(i, c):
    i = rows // tile - 1 - i if reverse else i
    at = pl.ds(pl.multiple_of(i * tile, tile), tile)
    a, b = (r[at, :].astype(jnp.float32) for r in (a_ref, b_ref))
    if not reverse:
      total, h = _tile_scan(a, b, False)
      h = jnp.where(total == 0, 0, total * c) + h
      out_ref[at, :] = h.astype(out_ref.dtype)
      return h[tile - 1 :]
    total, m = _tile_scan(a, a * b, True)
    m = total * c + m
    row = lax.broadcasted_iota(jnp.int32, m.shape, 0)
    later = jnp.where(row == tile - 1, c, pltpu.roll(m, tile - 1, 0))
    out_ref[at, :] = (b + later).astype(out_ref.dtype)
    return m[:1]

  carry[...] = lax.fori_loop(0, rows // tile, one, carry[...])

  if end_ref:

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
      end_ref[0][...] = carry[...]


def _pad(x, rows, lanes, fill):
  t, d = x.shape[1:]
  size = [(0, 0), (0, -t % rows), (0, -d % lanes)]
  return jnp.pad(x, size, constant_values=fill) if any(map(sum, size)) else x


def _call(a, b, start, reverse, interpret):
  """(out_BTD, end_BD or None)."""
  n, t, d = b.shape
  tile = 32 // min(a.dtype.itemsize, b.dtype.itemsize)
  rows = min(MOST_ROWS, -(-t // tile) * tile)
  lanes = LANES
  while lanes < MOST_LANES and d % (2 * lanes) == 0:
    lanes *= 2
  a, b = _pad(a, rows, lanes, 1), _pad(b, rows, lanes, 0)
  start = _pad(start[:, None], 1, lanes, 0)
  _, tp, dp = b.shape
  last = tp // rows - 1
  at = (lambda i: last - i) if reverse else (lambda i: i)
  block = pl.BlockSpec((None, rows, lanes), lambda n, d, i: (n, at(i), d))
  state = pl.BlockSpec((None, 1, lanes), lambda n, d, i: (n, 0, d))
  dtype = jnp.float32 if reverse else b.dtype
  shapes = [
    varying.result(b, b.shape, dtype),
    varying.result(b, start.shape, jnp.float32),
  ]
  count = 1 if reverse else 2
  moved = a.nbytes + b.nbytes + b.size * jnp.dtype(dtype).itemsize
  out, *end = pl.pallas_call(
    functools.partial(_kernel, tile=tile, reverse=reverse),
    name=f'linear_scan_tpu_{"backward" if reverse else "forward"}',
    grid=(n, dp // lanes, tp // rows),
    in_specs=[block, block, state],
    out_specs=[block, state][:count],
    out_shape=shapes[:count],
    scratch_shapes=[pltpu.VMEM((1, lanes), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * b.size, bytes_accessed=moved, transcendentals=0
    ),
    interpret=interpret,
  )(a, b, start)
  return out[:, :t, :d], end[0][:, 0, :d] if end else None


def forward(a_BTD, b_BTD, state_BD, interpret=False):
  """-> (h_BTD in b's dtype, state after it); see linear.py."""
  return _call(a_BTD, b_BTD, state_BD, False, interpret)


def backward(a_BTD, g_BTD, dstate_BD, interpret=False):
  """-> l_BTD float32."""
  return _call(a_BTD, g_BTD, dstate_BD, True, interpret)[0]
