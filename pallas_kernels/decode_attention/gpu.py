"""Decode attention on GPU (Triton): one query a row, ragged rows, many workers.

The grid is (workers, kv heads). A program walks the pieces of its worker
(schedule.py) and in each the tiles: whole tiles first, without a mask; then the
first and the last tile of the row if they have slots outside of its range,
which are not loaded. The N / K queries of a kv head are the rows of its
products, filled up to 16, the fewest that the matrix unit takes. The cache is
read in place, (B, K, S, H): the tile of a head is one piece of memory. No
atomics, so a run repeats bit for bit.

float32 inside. Cost: every valid slot of k and v read once; 4 N S H operations
a row; partial results (B + W) N (H + 1) in float32.

Legend: B rows, S slots, N query heads, K kv heads, G = N / K filled up, H head
size, P = B + W pieces, W workers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule

TILE = 64  # slots
WARPS, STAGES = 4, 3
# Programs that a processor runs at once, times processors (132 on Hopper).
PROGRAMS = 2 * 132


DTYPES = 'bfloat16', 'float16', 'float32'
MOST_ELEMENTS = 2**31  # of a cache: an address is counted in 32 bits


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  for h in spec.heads:
    if h < 16 or h & (h - 1):
      return f'head size {h}: takes powers of two from 16 on'
  size = max(math.prod(spec.k), math.prod(spec.v))
  if size >= MOST_ELEMENTS:
    return f'a cache of {size} elements, addresses fewer than {MOST_ELEMENTS}'
  return None


def workers(kv_heads):
  """W that fills the device: a program is one worker and one kv head."""
  return max(1, PROGRAMS // kv_heads)


class _Row(NamedTuple):
  """One row of the cache: references to k and v, its number and its queries."""

  k: Any
  v: Any
  number: Any
  q: Any
  mask: Any
  tile: int

  def fold(self, j, carry, valid=None):
    """(o, maximum, sum) with tile j; valid: None or (begin, end) of slots."""
    acc, m, total = carry
    ok = None
    if valid is not None:
      slot = j * self.tile + jnp.arange(self.tile)
      ok = (slot >= valid[0]) & (slot < valid[1])

    def load(ref):
      here = ref.at[self.number, pl.ds(j * self.tile, self.tile), :]
      if ok is None:
        return plgpu.load(here)
      return plgpu.load(here, mask=ok[:, None], other=0.0)

    s = blocks.dot(self.q, load(self.k).T, blocks.NN)
    s, _ = blocks.logits(self.mask, s)
    if ok is not None:
      s = jnp.where(ok[None], s, blocks.NEG)
    new = jnp.maximum(m, s.max(1))
    p, scale = jnp.exp2(s - new[:, None]), jnp.exp2(m - new)
    v = load(self.v)
    acc = acc * scale[:, None]
    acc += blocks.dot(p.astype(v.dtype), v, blocks.NN)
    return acc, new, total * scale + p.sum(1)


def _kernel(*refs, mask, tile):
  piece, first, end, row, origin, begins, ends, *refs = refs
  q_ref, k_ref, v_ref, o_ref, lse_ref = refs
  w = pl.program_id(0)

  def one(p, token):
    r = row[p]
    valid = begins[r], ends[r]
    one_row = _Row(k_ref, v_ref, r, q_ref[r], mask, tile)
    begin, stop = first[p] - origin[p], end[p] - origin[p]
    # Is the first tile not whole, and the last if it is another?
    count = lambda x: x.astype(jnp.int32)
    head = count((begin < stop) & (begin * tile < valid[0]))
    tail = count((begin + head < stop) & (stop * tile > valid[1]))
    rows = one_row.q.shape[0]
    carry = (
      jnp.zeros((rows, v_ref.shape[-1]), jnp.float32),
      jnp.full((rows,), blocks.FLOOR, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
    )
    carry = jax.lax.fori_loop(begin + head, stop - tail, one_row.fold, carry)
    edge = lambda i: jnp.where(i == 0, begin, stop - 1)
    acc, m, total = jax.lax.fori_loop(
      1 - head,
      1 + tail,
      lambda i, c: one_row.fold(edge(i), c, valid),
      carry,
    )

    @pl.when(stop > begin)
    def _():
      o_ref[p] = acc / total[:, None]
      lse_ref[p] = m / blocks.LOG2E + jnp.log(total)

    return token  # a literal would be no value of Triton's loop

  jax.lax.fori_loop(piece[w], piece[w + 1], one, 0)


def forward(q_BNH, k_BKSH, v_BKSH, begins_B, ends_B, mask, **options):
  """-> (o_BNH, lse_BN), float32; see op.py.

  options: tile: slots of a tile; workers: W; interpret: as of pallas_call, for
  tests.
  """
  b, n, h = q_BNH.shape
  kv, s, hv = v_BKSH.shape[1:]
  tile = options.get('tile') or TILE
  w = options.get('workers') or workers(kv)
  plan = decode_schedule.make(ends_B, s, tile, w, begins_B)
  pieces, group = b + w, n // kv
  rows = max(16, pl.next_power_of_2(group))
  q = q_BNH.reshape(b, kv, group, h)
  q = jnp.pad(q, [(0, 0), (0, 0), (0, rows - group), (0, 0)])
  whole = lambda n: pl.BlockSpec((n,), lambda w, k: (0,))
  cache = lambda h: pl.BlockSpec((b, None, s, h), lambda w, k: (0, k, 0, 0))
  o, lse = pl.pallas_call(
    functools.partial(_kernel, mask=mask, tile=tile),
    name='decode_attention_gpu',
    grid=(w, kv),
    in_specs=[
      whole(w + 1),
      *[whole(pieces)] * 4,
      *[whole(b)] * 2,
      pl.BlockSpec((b, None, rows, h), lambda w, k: (0, k, 0, 0)),
      cache(h),
      cache(hv),
    ],
    out_specs=[
      pl.BlockSpec((pieces, None, rows, hv), lambda w, k: (0, k, 0, 0)),
      pl.BlockSpec((pieces, None, rows), lambda w, k: (0, k, 0)),
    ],
    out_shape=[
      varying.result(q, shape, jnp.float32)
      for shape in ((pieces, kv, rows, hv), (pieces, kv, rows))
    ],
    compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    cost_estimate=pl.CostEstimate(
      flops=2 * b * s * n * (h + hv),
      transcendentals=b * s * n,
      bytes_accessed=k_BKSH.nbytes + v_BKSH.nbytes,
    ),
    interpret=options.get('interpret', False),
  )(
    plan.worker_piece, plan.first, plan.end, plan.row, plan.origin, begins_B,
    ends_B, q, k_BKSH, v_BKSH,
  )  # fmt: skip
  o = o[:, :, :group].reshape(pieces, n, hv)
  lse = lse[:, :, :group].reshape(pieces, n)
  return decode_schedule.merge_pieces(o, lse, plan, b)
