"""Decode attention on TPU: one query a row, ragged rows, any number of workers.

A worker walks its tiles (schedule.py) in the grid's second dimension,
whose bound is data: the longest share of a worker. Prefetched scalars give each
tile's piece, row and column, so the next tile is fetched before this one is
done, across the border of two rows too.

The cache is read in the models' layout, (B, S, K, H), as rows (B, S K, H):
row s K + k is slot s of kv head k. One product gives the scores of all N query
heads with all rows of a tile, and rows of another head are masked. That is K
times the products that are needed, but the matrix unit loads a tile once in any
case and would stream N / K queries, fewer than it is wide; and no head has to
be cut out of a cache whose second-last dimension is the heads. Whole tiles need
no other mask. In the first and the last tile of a row, slots outside its range
are masked and their values zeroed: they may hold anything.

float32 inside. Cost: every valid slot of k and v read once, rounded up to whole
tiles; 4 N K S H operations a row; partial results (B + W) N (H + 1) in float32.

Legend: B rows, S slots, N query heads (rounded up to whole registers), K kv
heads, H head size, R = tile K rows of a tile, P = B + W pieces, W workers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule

TILE_BYTES = 2**20  # of k, and again of v; both are held twice
SCORES = 2**16  # of all heads with some rows, made at once: 256 KiB
DTYPES = 'bfloat16', 'float32'
MOST_HEADS = 1024  # query heads; their scores with 64 rows must fit
MOST_TILES = 2**17  # their table is held in scalar memory


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  b, s, kv, _ = spec.k
  if spec.q[2] > MOST_HEADS:
    return f'{spec.q[2]} query heads, at most {MOST_HEADS} fit'
  itemsize = jnp.dtype(spec.dtype).itemsize
  tiles = b * -(-s // tile_of(s, kv, max(spec.heads), itemsize))
  if tiles > MOST_TILES:
    return f'{tiles} tiles to list, at most {MOST_TILES} fit'
  return None


def tile_of(slots, kv_heads, head_size, itemsize):
  """Slots of a tile: a power of two (at least 16), or the whole row."""
  row = kv_heads * max(head_size, 128) * itemsize
  tile = max(16, 2 ** int(math.log2(max(1, TILE_BYTES // row))))
  return slots if slots <= tile else tile


def workers(device_kind):
  """Cores that share the memory of one device: 2 on v4 and v5p."""
  return 2 if device_kind in ('TPU v4', 'TPU v5') else 1


class _Refs(NamedTuple):
  """References of a step: inputs, mask of other heads, running softmax."""

  q: Any
  k: Any
  v: Any
  other: Any
  m: Any
  total: Any
  acc: Any

  def fold(self, mask, rows, at, valid=None):
    """One step of online softmax over `rows` rows of the tile from `at` on.

    valid: (first, end) of the rows of the tile that are; None: all.
    """
    here = pl.ds(at, rows)
    q, v = self.q[0], self.v[0, here, :]
    s = blocks.dot(q, self.k[0, here, :], blocks.NT)
    s = blocks.logits(mask, s)[0] + self.other[:, :rows]
    if valid is not None:

      def ok(shape, axis):
        row = at + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return (row >= valid[0]) & (row < valid[1])

      s = jnp.where(ok(s.shape, 1), s, blocks.NEG)
      v = jnp.where(ok((rows, 1), 0), v, jnp.zeros_like(v))
    m = self.m[...]
    new = jnp.maximum(m, s.max(-1, keepdims=True))
    p, scale = jnp.exp2(s - new), jnp.exp2(m - new)
    self.m[...] = new
    self.total[...] = self.total[...] * scale + p.sum(-1, keepdims=True)
    acc = self.acc[...] * scale
    self.acc[...] = acc + blocks.dot(p.astype(v.dtype), v, blocks.NN)


def _kernel(*refs, mask, kv, group, tile):
  worker, piece, first, end, row, origin, begins, ends, *refs = refs
  *inputs, o_ref, lse_ref = refs[:5]
  tile_refs = _Refs(*inputs, *refs[5:])
  w = pl.program_id(0)
  t = worker[w] + pl.program_id(1)
  rows = tile_refs.k.shape[1]
  step = tile_refs.other.shape[1]

  @pl.when(pl.program_id(1) == 0)
  def _():
    """Which rows belong to another head: the same in every step."""
    other = tile_refs.other
    iota = lambda axis: jax.lax.broadcasted_iota(jnp.int32, other.shape, axis)
    head = jnp.minimum(iota(0) // group, kv - 1)
    own = jax.lax.rem(iota(1), kv) == head
    other[...] = jnp.where(own, 0.0, blocks.NEG)

  @pl.when(t < worker[w + 1])
  def _():
    p = piece[t]
    r, slot = row[p], (t - origin[p]) * tile
    skip, left = begins[r] - slot, ends[r] - slot
    whole = (skip <= 0) & (left >= tile)

    @pl.when(t == first[p])
    def _():
      tile_refs.m[...] = jnp.full_like(tile_refs.m, blocks.FLOOR)
      for ref in (tile_refs.total, tile_refs.acc):
        ref[...] = jnp.zeros_like(ref)

    @pl.when(whole)
    def _():
      for at in range(0, rows, step):
        tile_refs.fold(mask, min(step, rows - at), at)

    @pl.when(~whole)
    def _():
      valid = skip * kv, left * kv
      for at in range(0, rows, step):

        @pl.when((at + step > valid[0]) & (at < valid[1]))
        def _(at=at):
          tile_refs.fold(mask, min(step, rows - at), at, valid)

    @pl.when(t + 1 == end[p])
    def _():
      m, total, acc = tile_refs[4:]
      o_ref[0] = acc[...] / total[...]
      lse_ref[0] = m[...] / blocks.LOG2E + jnp.log(total[...])


def forward(q_BNH, k_BSKH, v_BSKH, begins_B, ends_B, mask, **options):
  """-> (o_BNH, lse_BN), float32; see op.py.

  options: tile: slots of a tile; workers: W; interpret: as of pallas_call, for
  tests.
  """
  b, n, h = q_BNH.shape
  s, kv, hv = v_BSKH.shape[1:]
  itemsize = k_BSKH.dtype.itemsize
  tile = options.get('tile') or tile_of(s, kv, max(h, hv), itemsize)
  w = options.get('workers')
  w = w or workers(registry.current_target().device_kind)
  plan = decode_schedule.make(ends_B, s, tile, w, begins_B)
  registers = 8 if q_BNH.dtype == jnp.float32 else 16
  padded = -(-n // registers) * registers
  q = jnp.pad(q_BNH, [(0, 0), (0, padded - n), (0, 0)])
  most = max(1, SCORES // (padded * kv))  # slots
  step = kv * min(tile, 2 ** int(math.log2(most)))
  kernel = functools.partial(
    _kernel, mask=mask, kv=kv, group=n // kv, tile=tile
  )
  pieces = b + w
  tables = plan.worker, plan.piece, plan.first, plan.end, plan.row, plan.origin
  rows = lambda x: x.reshape(b, s * kv, x.shape[-1])
  o, lse = pl.pallas_call(
    kernel,
    name='decode_attention_tpu',
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=8,
      grid=(w, jnp.max(plan.worker[1:] - plan.worker[:-1])),
      scratch_shapes=[
        pltpu.VMEM((padded, step), jnp.float32),
        pltpu.VMEM((padded, 1), jnp.float32),
        pltpu.VMEM((padded, 1), jnp.float32),
        pltpu.VMEM((padded, hv), jnp.float32),
      ],
      **_blocks((padded, h, hv), tile * kv, lambda w: pieces + w),
    ),
    out_shape=[
      varying.result(q, (pieces + w, padded, width), jnp.float32)
      for width in (hv, 1)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * b * s * n * kv * (h + hv),
      transcendentals=b * s * n * kv,
      bytes_accessed=k_BSKH.nbytes + v_BSKH.nbytes,
    ),
    interpret=options.get('interpret', False),
  )(*tables, begins_B, ends_B, q, rows(k_BSKH), rows(v_BSKH))
  return decode_schedule.merge_pieces(
    o[:pieces, :n], lse[:pieces, :n, 0], plan, b
  )


def _blocks(sizes, rows, trash):
  """Which block of every array a step (w, i) sees."""
  n, h, hv = sizes

  def at(w, i, worker):
    """The tile; a worker that is done stays at its last one."""
    return jnp.minimum(worker[w] + i, jnp.maximum(worker[w + 1] - 1, 0))

  def query(w, i, worker, piece, first, end, row, *_):
    return row[piece[at(w, i, worker)]], 0, 0

  def cache(w, i, *tables):
    worker, piece, _, _, row, origin, _, _ = tables
    t = at(w, i, worker)
    return row[piece[t]], t - origin[piece[t]], 0

  def partial(w, i, worker, piece, *_):
    # What leaves a buffer is written even if nothing was put there: a worker
    # without tiles writes to a slot of its own, which nobody reads.
    idle = worker[w + 1] == worker[w]
    return jnp.where(idle, trash(w), piece[at(w, i, worker)]), 0, 0

  return dict(
    in_specs=[
      pl.BlockSpec((1, n, h), query),
      pl.BlockSpec((1, rows, h), cache),
      pl.BlockSpec((1, rows, hv), cache),
    ],
    out_specs=[
      pl.BlockSpec((1, n, hv), partial),
      pl.BlockSpec((1, n, 1), partial),
    ],
  )
