"""Decode attention on TPU: one query a row, ragged rows, any number of workers.

A worker walks its tiles (schedule.py) in the grid's second dimension,
whose bound is data: the longest share of a worker. Prefetched scalars give each
tile's piece, row and column, so the next tile is fetched before this one is
done, across the border of two rows too.

The cache is read in place, (B, K, S, H): a tile has some slots of all kv heads,
and products are batched over the heads. The N / K queries of a head are filled
up to whole registers. Whole tiles need no mask. In the first and the last tile
of a row, slots outside its range are masked and their values zeroed: they may
hold anything.

float32 inside. Cost: every valid slot of k and v read once, rounded up to whole
tiles; 4 K G S H operations a row; partial results (B + W) K G (H + 1) in
float32.

Legend: B rows, S slots, N query heads, K kv heads, G = N / K (filled up), H
head size, P = B + W pieces, W workers.
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
SCORES = 2**16  # of all heads with some slots, made at once: 256 KiB
DTYPES = 'bfloat16', 'float32'
MOST_HEADS = 4096  # filled up; their scores with 16 slots must fit
MOST_TILES = 2**17  # their table is held in scalar memory


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  b, s, kv, _ = spec.k
  heads = kv * filled(spec.q[2] // kv, spec.dtype)
  if heads > MOST_HEADS:
    return f'{heads} query heads in whole registers, at most {MOST_HEADS} fit'
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


def filled(group, dtype):
  """G: query heads of a kv head, filled up to whole registers."""
  register = 8 if jnp.dtype(dtype) == jnp.float32 else 16
  return -(-group // register) * register


def workers(device_kind):
  """Cores that share the memory of one device: 2 on v4 and v5p."""
  return 2 if device_kind in ('TPU v4', 'TPU v5') else 1


class _Refs(NamedTuple):
  """References of a step: inputs, running softmax (K, G, 1 or H)."""

  q: Any
  k: Any
  v: Any
  m: Any
  total: Any
  acc: Any

  def fold(self, mask, slots, at, valid=None):
    """One step of online softmax over `slots` slots of the tile from `at` on.

    valid: (first, end) of the slots of the tile that are; None: all.
    """
    here = pl.ds(at, slots)
    v = self.v[0, :, here, :]
    s = blocks.dot(self.q[0], self.k[0, :, here, :], ((2,), (2,)), (0,))
    s = blocks.logits(mask, s)[0]
    if valid is not None:

      def ok(shape, axis):
        slot = at + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return (slot >= valid[0]) & (slot < valid[1])

      s = jnp.where(ok(s.shape, 2), s, blocks.NEG)
      v = jnp.where(ok(v.shape, 1), v, jnp.zeros_like(v))
    m = self.m[...]
    new = jnp.maximum(m, s.max(-1, keepdims=True))
    p, scale = jnp.exp2(s - new), jnp.exp2(m - new)
    self.m[...] = new
    self.total[...] = self.total[...] * scale + p.sum(-1, keepdims=True)
    acc = self.acc[...] * scale
    acc += blocks.dot(p.astype(v.dtype), v, ((2,), (1,)), (0,))
    self.acc[...] = acc


def _kernel(*refs, mask, tile, step):
  worker, piece, first, end, row, origin, begins, ends, *refs = refs
  *inputs, o_ref, lse_ref = refs[:5]
  tile_refs = _Refs(*inputs, *refs[5:])
  w = pl.program_id(0)
  t = worker[w] + pl.program_id(1)

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
      for at in range(0, tile, step):
        tile_refs.fold(mask, min(step, tile - at), at)

    @pl.when(~whole)
    def _():
      for at in range(0, tile, step):

        @pl.when((at + step > skip) & (at < left))
        def _(at=at):
          tile_refs.fold(mask, min(step, tile - at), at, (skip, left))

    @pl.when(t + 1 == end[p])
    def _():
      own = pl.ds(0, o_ref.shape[2])  # without those that fill up registers
      m, total, acc = (ref[:, own, :] for ref in tile_refs[3:])
      o_ref[0] = acc / total
      lse_ref[0] = m / blocks.LOG2E + jnp.log(total)


def forward(q_BNH, k_BKSH, v_BKSH, begins_B, ends_B, mask, **options):
  """-> (o_BNH, lse_BN), float32; see op.py.

  options: tile: slots of a tile; workers: W; interpret: as of pallas_call, for
  tests.
  """
  b, n, h = q_BNH.shape
  kv, s, hv = v_BKSH.shape[1:]
  itemsize = k_BKSH.dtype.itemsize
  tile = options.get('tile') or tile_of(s, kv, max(h, hv), itemsize)
  w = options.get('workers')
  w = w or workers(registry.current_target().device_kind)
  plan = decode_schedule.make(ends_B, s, tile, w, begins_B)
  group = n // kv
  rows = filled(group, q_BNH.dtype)
  q = q_BNH.reshape(b, kv, group, h)
  q = jnp.pad(q, [(0, 0), (0, 0), (0, rows - group), (0, 0)])
  most = max(1, SCORES // (kv * rows))
  step = min(tile, 2 ** int(math.log2(most)))
  pieces = b + w
  tables = plan.worker, plan.piece, plan.first, plan.end, plan.row, plan.origin
  o, lse = pl.pallas_call(
    functools.partial(_kernel, mask=mask, tile=tile, step=step),
    name='decode_attention_tpu',
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=8,
      grid=(w, jnp.max(plan.worker[1:] - plan.worker[:-1])),
      scratch_shapes=[
        pltpu.VMEM((kv, rows, width), jnp.float32) for width in (1, 1, hv)
      ],
      **_blocks((kv, rows, group, h, hv), tile, lambda w: pieces + w),
    ),
    out_shape=[
      varying.result(q, (pieces + w, kv, group, width), jnp.float32)
      for width in (hv, 1)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * b * s * kv * rows * (h + hv),
      transcendentals=b * s * kv * rows,
      bytes_accessed=k_BKSH.nbytes + v_BKSH.nbytes,
    ),
    interpret=options.get('interpret', False),
  )(*tables, begins_B, ends_B, q, k_BKSH, v_BKSH)
  o, lse = (x[:pieces].reshape(pieces, n, -1) for x in (o, lse))
  return decode_schedule.merge_pieces(o, lse[..., 0], plan, b)


def _blocks(sizes, tile, trash):
  """Which block of every array a step (w, i) sees."""
  kv, rows, group, h, hv = sizes

  def at(w, i, worker):
    """The tile; a worker that is done stays at its last one."""
    return jnp.minimum(worker[w] + i, jnp.maximum(worker[w + 1] - 1, 0))

  def query(w, i, worker, piece, first, end, row, *_):
    return row[piece[at(w, i, worker)]], 0, 0, 0

  def cache(w, i, *tables):
    worker, piece, _, _, row, origin, _, _ = tables
    t = at(w, i, worker)
    return row[piece[t]], 0, t - origin[piece[t]], 0

  def partial(w, i, worker, piece, *_):
    # What leaves a buffer is written even if nothing was put there: a worker
    # without tiles writes to a slot of its own, which nobody reads.
    idle = worker[w + 1] == worker[w]
    return jnp.where(idle, trash(w), piece[at(w, i, worker)]), 0, 0, 0

  return dict(
    in_specs=[
      pl.BlockSpec((1, kv, rows, h), query),
      pl.BlockSpec((1, kv, tile, h), cache),
      pl.BlockSpec((1, kv, tile, hv), cache),
    ],
    out_specs=[
      pl.BlockSpec((1, kv, group, hv), partial),
      pl.BlockSpec((1, kv, group, 1), partial),
    ],
  )
