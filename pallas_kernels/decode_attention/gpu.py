"""Decode attention on GPU (Triton): one query a row, ragged rows, many workers.

Two kernels. The first has a grid of (workers, kv heads): a program walks the
pieces of its worker (schedule.py) and in each the tiles; slots outside of the
row's range are not loaded. The N / K queries of a kv head are the rows of its
products, filled up to 16, the fewest that the matrix unit takes. The cache is
read in place, (B, K, S, H): the tile of a head is one piece of memory. The
second, of a grid of (rows, query heads), joins the partial results of a row by
their lse, and what the query's own key gives (`own`). No atomics, so a run
repeats bit for bit.

A step of one row is many small kernels, each of some microseconds: what a
program must know lies in one table, no load waits for another but the table's
for the pieces of the worker, and what is joined is joined in one launch.

float32 inside. Cost: every valid slot of k and v read once; 4 N S H operations
a row; partial results (B + W) K G (V + 1) in float32.

Legend: B rows, S slots, N query heads, K kv heads, G = N / K filled up, H head
size, V that of values, P = B + W pieces, W workers.
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

# Slots of a tile; of caches that do not give all programs a tile.
TILE, SMALL, LEAST = 64, 32, 16
WARPS, STAGES = 4, 3
# Programs that a processor runs at once, times processors (132 on Hopper).
PROGRAMS = 2 * 132
JOINED = 32  # partial results that are joined at once
SHARED = 232448  # bytes that a program of Hopper has for its tiles

DTYPES = 'bfloat16', 'float16', 'float32'
TAKES = ('own',)  # a query's own key and value
MOST_ELEMENTS = 2**31  # of a cache: an address is counted in 32 bits


def limits(spec, target):
  """None, or what else the kernel cannot take (registry.kernel)."""
  del target
  for h in spec.heads:
    if h < 16 or h & (h - 1):
      return f'head size {h}: takes powers of two from 16 on'
  least = _bytes(LEAST, spec.heads, spec.q[2] // spec.k[2], spec.dtype)
  if least > SHARED:
    return f'a tile of {LEAST} slots takes {least} bytes, there are {SHARED}'
  size = max(math.prod(spec.k), math.prod(spec.v))
  if size >= MOST_ELEMENTS:
    return f'a cache of {size} elements, addresses fewer than {MOST_ELEMENTS}'
  return None


def workers(kv_heads):
  """W that fills the device: a program is one worker and one kv head."""
  return max(1, PROGRAMS // kv_heads)


def _rows(group):
  """G: the queries of a kv head, filled up."""
  return max(16, pl.next_power_of_2(group))


def _bytes(tile, heads, group, dtype):
  """At most what a program keeps: tiles that are being loaded, its queries."""
  slots = (STAGES - 1) * tile + _rows(group)
  return slots * sum(heads) * jnp.dtype(dtype).itemsize


def sizes(q_BNH, v_BKSH):
  """(slots of a tile, W) of a cache: no worker more than there are tiles."""
  (b, n, h), (_, kv, s, hv) = q_BNH.shape, v_BKSH.shape
  most = workers(kv)
  tile = TILE if b * pl.cdiv(s, TILE) >= most else SMALL
  while _bytes(tile, (h, hv), n // kv, v_BKSH.dtype) > SHARED and tile > LEAST:
    tile //= 2
  return tile, min(most, b * pl.cdiv(s, tile))


class _Row(NamedTuple):
  """One row of the cache: references to k and v, its number and its queries.

  begin, end: the slots that it sees.
  """

  k: Any
  v: Any
  number: Any
  q: Any
  begin: Any
  end: Any
  mask: Any
  tile: int

  def fold(self, j, carry):
    """(o, maximum, sum) with tile j."""
    acc, m, total = carry
    slot = j * self.tile + jnp.arange(self.tile)
    ok = (slot >= self.begin) & (slot < self.end)

    def load(ref):
      here = ref.at[self.number, pl.ds(j * self.tile, self.tile), :]
      return plgpu.load(here, mask=ok[:, None], other=0.0)

    s = blocks.dot(self.q, load(self.k).T, blocks.NN)
    s, _ = blocks.logits(self.mask, s)
    s = jnp.where(ok[None], s, blocks.NEG)
    new = jnp.maximum(m, s.max(1))
    p, scale = jnp.exp2(s - new[:, None]), jnp.exp2(m - new)
    v = load(self.v)
    acc = acc * scale[:, None]
    acc += blocks.dot(p.astype(v.dtype), v, blocks.NN)
    return acc, new, total * scale + p.sum(1)


def _kernel(*refs, mask, tile, group):
  """The pieces of a worker; table: rows of `_table`."""
  piece, table, q_ref, k_ref, v_ref, o_ref, lse_ref = refs
  w, rows = pl.program_id(0), lse_ref.shape[1]
  head = jnp.arange(rows)
  heads = (pl.program_id(1) * group + head)[:, None]
  every = jnp.arange(q_ref.shape[-1])[None]

  def one(p, token):
    first, stop, r, begin, end = (table[i, p] for i in range(5))
    at, mine = q_ref.at[r, heads, every], head[:, None] < group
    q = plgpu.load(at, mask=mine, other=0.0)
    row = _Row(k_ref, v_ref, r, q, begin, end, mask, tile)
    carry = (
      jnp.zeros((rows, v_ref.shape[-1]), jnp.float32),
      jnp.full((rows,), blocks.FLOOR, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
    )
    acc, m, total = jax.lax.fori_loop(first, stop, row.fold, carry)

    @pl.when(stop > first)
    def _():
      o_ref[p] = acc / total[:, None]
      lse_ref[p] = m / blocks.LOG2E + jnp.log(total)

    return token  # a literal would be no value of Triton's loop

  jax.lax.fori_loop(piece[w], piece[w + 1], one, 0)


def _join_kernel(*refs, pieces, group, mask):
  """One query head of one row: its pieces, `JOINED` at once, and its own."""
  table, o_ref, lse_ref, *own, out_ref, out_lse_ref = refs
  b, n = pl.program_id(0), pl.program_id(1)
  kv, g = n // group, n % group
  every = jnp.arange(pl.next_power_of_2(pieces))
  row = plgpu.load(table.at[2, every], mask=every < pieces, other=2**30)
  low, high = (row < b).sum(), (row <= b).sum()

  def fold(i, carry):
    acc, m, total = carry
    p = low + i * JOINED + jnp.arange(JOINED)
    inside = p < high
    first, stop = (
      plgpu.load(table.at[i, p], mask=inside, other=0) for i in range(2)
    )
    ok = stop > first
    lse = plgpu.load(lse_ref.at[p, kv, g], mask=ok, other=blocks.NEG)
    at = o_ref.at[p[:, None], kv, g, jnp.arange(o_ref.shape[-1])[None]]
    o = plgpu.load(at, mask=ok[:, None], other=0.0)
    new = jnp.maximum(m, lse.max())
    weight = jnp.exp2((lse - new) * blocks.LOG2E)
    scale = jnp.exp2((m - new) * blocks.LOG2E)
    acc = acc * scale + (o * weight[:, None]).sum(0)
    return acc, new, total * scale + weight.sum()

  carry = jnp.zeros(o_ref.shape[-1:], jnp.float32), blocks.FLOOR, 0.0
  if own:
    q, k, v, seen = own
    product = q[b, n].astype(jnp.float32) * k[b, kv].astype(jnp.float32)
    z = product.sum() * mask.scale
    if mask.softcap:
      z = mask.softcap * jnp.tanh(z / mask.softcap)
    seen = seen[b] > 0
    m = jnp.where(seen, jnp.maximum(z, blocks.FLOOR), blocks.FLOOR)
    # 1, or NaN where z is, which stays in o; of z = -inf 0.
    total = jnp.where(seen, jnp.exp2((z - m) * blocks.LOG2E), 0.0)
    v = v[b, kv].astype(jnp.float32)
    carry = jnp.where(jnp.abs(v) < jnp.inf, v, 0.0) * total, m, total
  steps = (high - low + JOINED - 1) // JOINED
  acc, m, total = jax.lax.fori_loop(0, steps, fold, carry)
  some = jnp.where(total == 0, 1.0, total)
  out_ref[b, n] = (acc / some).astype(out_ref.dtype)
  found = m + jnp.log(some)
  out_lse_ref[b, n] = jnp.where(total == 0, blocks.NEG, found)


def _table(plan, begins_B, ends_B):
  """(5, P) int32 of the pieces: first tile and end, row, its slots' range."""
  row, tiles = plan.row, (plan.first - plan.origin, plan.end - plan.origin)
  return jnp.stack([*tiles, row, begins_B[row], ends_B[row]])


def _whole(x):
  return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _partial(q_BNH, k_BKSH, v_BKSH, plan, table, mask, options):
  """(o_PKGV, lse_PKG) of the pieces; those without a tile hold anything."""
  b, n, h = q_BNH.shape
  kv, s, hv = v_BKSH.shape[1:]
  pieces, group = table.shape[1], n // kv
  rows = _rows(group)
  cache = lambda h: pl.BlockSpec((b, None, s, h), lambda w, k: (0, k, 0, 0))
  mine = lambda *shape: pl.BlockSpec(
    (shape[0], None, *shape[1:]), lambda w, k: (0, k, *(0,) * len(shape[1:]))
  )
  arrays = plan.worker_piece, table, q_BNH, k_BKSH, v_BKSH
  return pl.pallas_call(
    functools.partial(_kernel, mask=mask, tile=options['tile'], group=group),
    name='decode_attention_gpu',
    grid=(options['workers'], kv),
    in_specs=[
      *map(_whole, arrays[:3]),
      cache(h),
      cache(hv),
    ],
    out_specs=[mine(pieces, rows, hv), mine(pieces, rows)],
    out_shape=[
      varying.result(q_BNH, shape, jnp.float32)
      for shape in ((pieces, kv, rows, hv), (pieces, kv, rows))
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=options.get('warps', WARPS),
      num_stages=options.get('stages', STAGES),
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * b * s * kv * rows * (h + hv),
      transcendentals=b * s * kv * rows,
      bytes_accessed=k_BKSH.nbytes + v_BKSH.nbytes,
    ),
    interpret=options.get('interpret', False),
  )(*arrays)


def _join(table, partial, own, mask, like, interpret):
  """(o_BNV, lse_BN) of rows from their pieces.

  partial: of `_partial`. own: () or q, and k, v, seen of `forward`. like: o.
  """
  b, n, hv = like.shape
  pieces, kv = partial[1].shape[:2]
  arrays = table, *partial, *own
  return pl.pallas_call(
    functools.partial(_join_kernel, pieces=pieces, group=n // kv, mask=mask),
    name='decode_attention_gpu_join',
    grid=(b, n),
    in_specs=[*map(_whole, arrays)],
    out_specs=[
      pl.BlockSpec((b, n, hv), lambda *_: (0, 0, 0)),
      pl.BlockSpec((b, n), lambda *_: (0, 0)),
    ],
    out_shape=[
      varying.result(partial[0], like.shape, like.dtype),
      varying.result(partial[0], (b, n), jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    cost_estimate=pl.CostEstimate(
      flops=3 * pieces * n * hv,
      transcendentals=pieces * n,
      bytes_accessed=partial[0].nbytes + b * n * hv * 4,
    ),
    interpret=interpret,
  )(*arrays)


def forward(q_BNH, k_BKSH, v_BKSH, begins_B, ends_B, mask, own=(), **options):
  """-> (o_BNV in v's dtype, lse_BN in float32); see op.py.

  own: () or (k_BKH, v_BKV, seen_B) of the queries themselves. options: tile:
  slots of a tile; workers: W; interpret: as of pallas_call, for tests.
  """
  b, n, h = q_BNH.shape
  kv, s, hv = v_BKSH.shape[1:]
  tile, w = sizes(q_BNH, v_BKSH)
  tile, w = options.get('tile') or tile, options.get('workers') or w
  plan = decode_schedule.make(ends_B, s, tile, w, begins_B)
  table = _table(plan, begins_B, ends_B)
  options |= dict(tile=tile, workers=w)
  found = _partial(q_BNH, k_BKSH, v_BKSH, plan, table, mask, options)
  if own:
    own = q_BNH, *own[:2], own[2].astype(jnp.int32)
  like = jax.ShapeDtypeStruct((b, n, hv), v_BKSH.dtype)
  interpret = options.get('interpret', False)
  return _join(table, found, own, mask, like, interpret)
