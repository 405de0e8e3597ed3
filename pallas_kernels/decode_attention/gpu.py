"""Decode attention on GPU (Triton): one query a row, ragged rows, many workers.

The grid is (workers, kv heads). A program walks the pieces of its worker
(schedule.py) and in each the tiles: whole tiles first, without a mask; then the
first and the last tile of the row if they have slots outside of its range,
which are not loaded. The N / K queries of a kv head are the rows of its
products, filled up to 16, the fewest that the matrix unit takes. The cache is
read in the models' layout, (B, S, K, H), without copies; no atomics, so a run
repeats bit for bit.

float32 inside. Cost: every valid slot of k and v read once; 4 N S H operations
a row; partial results (B + W) N (H + 1) in float32.

Legend: B rows, S slots, N query heads, K kv heads, G = N / K filled up, H head
size, P = B + W pieces, W workers.
"""

import functools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule

LOG2E = math.log2(math.e)
TILE = 64  # slots
WARPS, STAGES = 4, 3
# Programs that a processor runs at once, times processors (132 on Hopper).
PROGRAMS = 2 * 132


DTYPES = 'bfloat16', 'float16', 'float32'
MOST_ELEMENTS = 2**31  # of a cache: an address is counted in 32 bits


def supports(spec, target):
  """None, or the reason in one line why the kernel cannot run."""
  reason = registry.unfit(spec, target, 'gpu', DTYPES)
  if reason or spec is None:
    return reason
  for h in (spec.k[-1], spec.v[-1]):
    if h < 16 or h & (h - 1):
      return f'head size {h}: takes powers of two from 16 on'
  size = max(math.prod(spec.k), math.prod(spec.v))
  if size >= MOST_ELEMENTS:
    return f'a cache of {size} elements, addresses fewer than {MOST_ELEMENTS}'
  return None


def workers(kv_heads):
  """W that fills the device: a program is one worker and one kv head."""
  return max(1, PROGRAMS // kv_heads)


def _dot(x, y):
  """In whole float32 if that is what they are in."""
  high = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.dot(x, y, precision=high, preferred_element_type=jnp.float32)


def _rows(group):
  return max(16, pl.next_power_of_2(group))


def _fold(refs, row, q, j, carry, *, mask, tile, valid=None):
  """Tile j of a row; valid: (begin, end) of slots, None if all are."""
  acc, m, total = carry
  ok = None
  if valid is not None:
    slot = j * tile + jnp.arange(tile)
    ok = (slot >= valid[0]) & (slot < valid[1])

  def load(ref):
    here = ref.at[row, pl.ds(j * tile, tile), :]
    if ok is None:
      return plgpu.load(here)
    return plgpu.load(here, mask=ok[:, None], other=0.0)

  k_ref, v_ref = refs
  s = _dot(q, load(k_ref).T)
  if mask.softcap:
    cap = mask.softcap
    s = (cap * LOG2E) * jnp.tanh(s * (mask.scale / cap))
  else:
    s = s * (mask.scale * LOG2E)
  if ok is not None:
    s = jnp.where(ok[None], s, varying.NEG)
  new = jnp.maximum(m, s.max(1))
  p, scale = jnp.exp2(s - new[:, None]), jnp.exp2(m - new)
  v = load(v_ref)
  acc = acc * scale[:, None] + _dot(p.astype(v.dtype), v)
  return acc, new, total * scale + p.sum(1)


def _kernel(*refs, mask, tile):
  piece, first, end, row, origin, begins, ends, *refs = refs
  q_ref, k_ref, v_ref, o_ref, lse_ref = refs
  w = pl.program_id(0)
  fold = functools.partial(_fold, (k_ref, v_ref), mask=mask, tile=tile)

  def one(p, token):
    r = row[p]
    valid, q = (begins[r], ends[r]), q_ref[r]
    begin, stop = first[p] - origin[p], end[p] - origin[p]
    # Is the first tile not whole, and the last if it is another?
    count = lambda x: x.astype(jnp.int32)
    head = count((begin < stop) & (begin * tile < valid[0]))
    tail = count((begin + head < stop) & (stop * tile > valid[1]))
    rows = q.shape[0]
    carry = (
      jnp.zeros((rows, v_ref.shape[-1]), jnp.float32),
      jnp.full((rows,), varying.FLOOR, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
    )
    carry = jax.lax.fori_loop(
      begin + head, stop - tail, lambda j, c: fold(r, q, j, c), carry
    )
    edge = lambda i: jnp.where(i == 0, begin, stop - 1)
    acc, m, total = jax.lax.fori_loop(
      1 - head,
      1 + tail,
      lambda i, c: fold(r, q, edge(i), c, valid=valid),
      carry,
    )

    @pl.when(stop > begin)
    def _():
      o_ref[p] = acc / total[:, None]
      lse_ref[p] = m / LOG2E + jnp.log(total)

    return token  # a literal would be no value of Triton's loop

  jax.lax.fori_loop(piece[w], piece[w + 1], one, 0)


def forward(q_BNH, k_BSKH, v_BSKH, begins_B, ends_B, mask, **options):
  """-> (o_BNH, lse_BN), float32; see op.py.

  options: tile: slots of a tile; workers: W; interpret: as of pallas_call, for
  tests.
  """
  b, n, h = q_BNH.shape
  s, kv, hv = v_BSKH.shape[1:]
  tile = options.get('tile') or TILE
  w = options.get('workers') or workers(kv)
  plan = decode_schedule.make(ends_B, s, tile, w, begins_B)
  pieces, group = b + w, n // kv
  rows = _rows(group)
  q = q_BNH.reshape(b, kv, group, h)
  q = jnp.pad(q, [(0, 0), (0, 0), (0, rows - group), (0, 0)])
  whole = lambda n: pl.BlockSpec((n,), lambda w, k: (0,))
  cache = lambda h: pl.BlockSpec((b, s, None, h), lambda w, k: (0, 0, k, 0))
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
      bytes_accessed=k_BSKH.nbytes + v_BSKH.nbytes,
    ),
    interpret=options.get('interpret', False),
  )(
    plan.worker_piece, plan.first, plan.end, plan.row, plan.origin, begins_B,
    ends_B, q, k_BSKH, v_BSKH,
  )  # fmt: skip
  o = o[:, :, :group].reshape(pieces, n, hv)
  lse = lse[:, :, :group].reshape(pieces, n)
  return decode_schedule.merge_pieces(o, lse, plan, b)
