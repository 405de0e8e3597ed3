"""Attention kernels for TPU: forward, dq, dkv, over a list of visible blocks.

    s = k q'  (keys x queries);  m' = max(m, max s);  p = 2^(s - m')
    l' = 2^(m - m') l + sum p;   o' = 2^(m - m') o + v' p        (V x queries)
    backward: p = 2^(s - lse);   ds = p (v do' - delta)
    dq = sum ds' k;  dv = sum p do;  dk = sum ds q

(FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2; blocks skipped by a
table as in jax's splash attention.) The grid walks (batch, head, visible
blocks): one packed, prefetched integer per step encodes the block's row and
column, whether it is the first or last of its row, and whether it needs a mask
(blocks.flat). If the mask is data the number of steps is too. A step
runs one of two branches, full or partial; a branch that cannot occur is not
compiled. Scores are transposed, keys along sublanes: a row's maximum and sum
are reductions over sublanes, and m, l, lse, delta are rows (1, queries), not
(queries, 128) copies. dkv adds the query heads of a kv head in its accumulator.

Products take their inputs' dtype and add in float32; everything else is
float32. Cost: 4 T S H flops per head times the visible fraction, dq 6, dkv 8;
no temporary beyond head-major copies of the arguments.

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size of q and k, V of v, P list entries per batch entry.
"""

import functools
import math
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import blocks

DTYPES = ('bfloat16', 'float32')
LANES = 128
MOST_HEAD_SIZE = 256
# Entries of the list, 4 bytes each: three quarters of 1 MiB of scalar memory.
MOST_ENTRIES = 3 * 2**16


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  head = max(spec.heads)
  if head > MOST_HEAD_SIZE or any(h % 8 for h in spec.heads):
    return f'head size {head}: takes multiples of 8 up to {MOST_HEAD_SIZE}'
  mask = spec.mask
  masked = bool(mask.causal or mask.window > 0 or spec.segments)
  call = blocks.Call(head, spec.dtype, masked, target.device_kind)
  for which in ('forward', 'dq', 'dkv'):
    entries, side = _entries(spec, blocks.choose('tpu', which, call).block)
    if side >= blocks.MOST_COLUMNS or entries > MOST_ENTRIES:
      return f'{entries} blocks to list, at most {MOST_ENTRIES} fit'
  return None


def _entries(spec, bound):
  """(entries of a list of blocks, blocks along the longer side)."""
  rows, columns = (
    math.ceil(n / m) for n, m in zip((spec.q[1], spec.k[1]), bound, strict=True)
  )
  data = spec.segments or spec.order
  entries = rows * columns * (spec.q[0] if data else 1)
  if data and spec.mask.causal and not spec.order:
    entries = entries * (rows + 1) // (2 * rows)
  return entries, max(rows, columns)


class _Grid:
  """The steps of one kernel, and the blocks that a step reads and writes.

  which: 'forward', 'dq' (the list goes by query blocks) or 'dkv' (by key
  blocks; a last grid axis counts the query heads of a kv head).
  """

  def __init__(self, which, plan, q_BTNH, v_BSKV):
    (b, _, n, h), (_, _, k, width) = q_BTNH.shape, v_BSKV.shape
    self.which, self.plan, self.groups = which, plan, n // k
    self.by_key = which == 'dkv'
    self.cost = blocks.cost(which, plan, q_BTNH, v_BSKV)
    kinds = plan.kinds.swapaxes(1, 2) if self.by_key else plan.kinds
    bound = plan.most_blocks[self.by_key]
    self.table, steps, entries = blocks.flat(kinds, bound)
    self.entries = 0 if plan.static else entries  # 0: one list for all of B
    self.size = (b, k, steps, n // k) if self.by_key else (b, n, steps)
    self.sizes = h, width

  def entry(self, table):
    """The entry of the list for this step, in a kernel."""
    return table[pl.program_id(0) * self.entries + pl.program_id(2)]

  def branches(self, entry, step):
    """Runs step(partial) for the kind of this entry, in a kernel."""
    for kind in self.plan.present():
      pl.when(blocks.KIND(entry) == kind)(functools.partial(step, kind == 1))

  def _places(self, b, n, t, *rest):
    """(b, query head, row block), (b, kv head, column block) of a step."""
    *head, table = rest
    e = table[b * self.entries + t]
    if self.by_key:
      query_head = n * self.groups + head[0]
      return (b, query_head, blocks.COLUMN(e)), (b, n, blocks.ROW(e))
    return (b, n, blocks.ROW(e)), (b, n // self.groups, blocks.COLUMN(e))

  def rows(self, size):
    """Of (B, N, T, size)."""
    shape = (1, 1, self.plan.block_q, size)
    return pl.BlockSpec(shape, lambda *step: (*self._places(*step)[0], 0))

  def columns(self, size):
    """Of (B, K, S, size)."""
    shape = (1, 1, self.plan.block_k, size)
    return pl.BlockSpec(shape, lambda *step: (*self._places(*step)[1], 0))

  def line(self):
    """Of (B, N, 1, T)."""

    def at(*step):
      b, n, i = self._places(*step)[0]
      return b, n, 0, i

    return pl.BlockSpec((1, 1, 1, self.plan.block_q), at)

  def infos(self):
    """Of (B or 1, 2, T) and (B or 1, 2, S)."""

    def spec(side, block, batches):
      def at(*step):
        b, _, i = self._places(*step)[side]
        return (b if batches > 1 else 0), 0, i

      return pl.BlockSpec((1, 2, block), at)

    plan = self.plan
    return [
      spec(0, plan.block_q, plan.q_info.shape[0]),
      spec(1, plan.block_k, plan.k_info.shape[0]),
    ]

  def run(self, kernel, arrays, results, scratch, launch):
    """Calls kernel(self, table, *inputs, *results, *scratch).

    arrays: q, k, v head-major and padded, then do, lse, delta if backward.
    results: (shape, dtype, BlockSpec) each. scratch: shapes, float32.
    """
    h, width = self.sizes
    specs = [self.rows(h), self.columns(h), self.columns(width)]
    specs += self.infos()
    if self.which != 'forward':
      specs += [self.rows(width), self.line(), self.line()]
    q, k, v, *rest = arrays
    infos = jnp.asarray(self.plan.q_info), jnp.asarray(self.plan.k_info)
    arbitrary = ('arbitrary',) * (len(self.size) - 2)
    return pl.pallas_call(
      functools.partial(kernel, self),
      name=f'attention_tpu_{self.which}',
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=self.size,
        in_specs=specs,
        out_specs=[spec for *_, spec in results],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=[varying.result(q, s, dtype) for s, dtype, _ in results],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', *arbitrary)
      ),
      cost_estimate=self.cost,
      interpret=launch.interpret,
    )(jnp.asarray(self.table), q, k, v, *infos, *rest)


def _scores(grid, q, k, q_info, k_info, partial):
  """Base-2 logits (keys, queries) of a block, and their slope."""
  s, slope = blocks.logits(grid.plan.mask, blocks.dot(k, q, blocks.NT))
  if partial:
    # Keys are columns here; a row becomes one by a transpose on the chip.
    column = lambda i: jnp.broadcast_to(
      k_info[0, i : i + 1, :], (LANES, s.shape[0])
    ).T[:, :1]
    row = lambda i: q_info[0, i : i + 1, :]
    pair = (row(0), row(1)), (column(0), column(1))
    ok = blocks.visible(grid.plan, *pair)
    s = s if ok is None else jnp.where(ok, s, blocks.NEG)
  return s, slope


def _forward_kernel(grid, table, *refs):
  q, k, v, q_info, k_info, o, lse, m_s, l_s, o_s = refs
  entry = grid.entry(table)

  @pl.when(blocks.FIRST(entry))
  def _():
    m_s[...] = jnp.full_like(m_s, blocks.FLOOR)
    l_s[...] = jnp.zeros_like(l_s)
    o_s[...] = jnp.zeros_like(o_s)

  def step(partial):
    s, _ = _scores(grid, q[0, 0], k[0, 0], q_info, k_info, partial)
    old, vj = m_s[...], v[0, 0]
    new = jnp.maximum(old, s.max(0, keepdims=True))
    p, shrink = jnp.exp2(s - new), jnp.exp2(old - new)
    m_s[...] = new
    l_s[...] = shrink * l_s[...] + p.sum(0, keepdims=True)
    pv = blocks.dot(vj, p.astype(vj.dtype), blocks.TN)
    o_s[...] = o_s[...] * shrink + pv

  grid.branches(entry, step)

  @pl.when(blocks.LAST(entry))
  def _():
    total, lse[0, 0] = blocks.softmax_end(m_s[...], l_s[...])
    o[0, 0] = (o_s[...] / total).T.astype(o.dtype)


class _Inputs(NamedTuple):
  """References to the blocks that a backward kernel reads in one step."""

  q: Any
  k: Any
  v: Any
  q_info: Any
  k_info: Any
  do: Any
  lse: Any
  delta: Any

  def slopes(self, grid, partial):
    """(p, ds), each (keys, queries), of the blocks (q, k, do), which follow.

    partial: may some pairs of the block be hidden?
    """
    q, k, v, do = (ref[0, 0] for ref in (self.q, self.k, self.v, self.do))
    s, slope = _scores(grid, q, k, self.q_info, self.k_info, partial)
    p = jnp.exp2(s - self.lse[0, 0])
    ds = p * (blocks.dot(v, do, blocks.NT) - self.delta[0, 0])
    return p, ds if slope is None else ds * slope, (q, k, do)


def _dq_kernel(grid, table, *refs):
  *inputs, dq, dq_s = refs
  entry = grid.entry(table)

  @pl.when(blocks.FIRST(entry))
  def _():
    dq_s[...] = jnp.zeros_like(dq_s)

  def step(partial):
    _, ds, (_, kj, _) = _Inputs(*inputs).slopes(grid, partial)
    dq_s[...] += blocks.dot(ds.astype(kj.dtype), kj, blocks.TN)

  grid.branches(entry, step)

  @pl.when(blocks.LAST(entry))
  def _():
    dq[0, 0] = (dq_s[...] * grid.plan.mask.scale).astype(dq.dtype)


def _dkv_kernel(grid, table, *refs):
  *inputs, dk, dv, dk_s, dv_s = refs
  entry, head = grid.entry(table), pl.program_id(3)

  @pl.when(blocks.FIRST(entry) & (head == 0))
  def _():
    dk_s[...] = jnp.zeros_like(dk_s)
    dv_s[...] = jnp.zeros_like(dv_s)

  def step(partial):
    p, ds, (qi, _, do) = _Inputs(*inputs).slopes(grid, partial)
    dv_s[...] += blocks.dot(p.astype(do.dtype), do, blocks.NN)
    dk_s[...] += blocks.dot(ds.astype(qi.dtype), qi, blocks.NN)

  grid.branches(entry, step)

  @pl.when(blocks.LAST(entry) & (head == grid.groups - 1))
  def _():
    dk[0, 0] = (dk_s[...] * grid.plan.mask.scale).astype(dk.dtype)
    dv[0, 0] = dv_s[...].astype(dv.dtype)


def _plan(which, arrays, segments, order, mask, launch):
  q, k, v = arrays
  lengths, bound = (q.shape[1], k.shape[1]), launch.block
  if bound is None:
    call = blocks.call_of(q, v, segments, mask)
    most = blocks.choose('tpu', which, call).block
    pairs = zip(lengths, most, strict=True)
    bound = tuple(blocks.split(n, most, LANES) for n, most in pairs)
  return blocks.plan(lengths, segments, order, mask, bound)


def _heads_first(x_BTNH, length):
  return varying.pad(x_BTNH.transpose(0, 2, 1, 3), length, 2)


def _tokens_first(x_BNTH, length):
  return x_BNTH[:, :, :length].transpose(0, 2, 1, 3)


def forward(
  q_BTNH, k_BSKH, v_BSKV, segments, order, mask, launch=blocks.DEFAULT
):
  """-> (o_BTNV in v's dtype, lse_BTN float32); see op.py."""
  t, arrays = q_BTNH.shape[1], (q_BTNH, k_BSKH, v_BSKV)
  plan = _plan('forward', arrays, segments, order, mask, launch)
  grid = _Grid('forward', plan, q_BTNH, v_BSKV)
  tp, sp = plan.padded
  q = _heads_first(q_BTNH, tp)
  k, v = _heads_first(k_BSKH, sp), _heads_first(v_BSKV, sp)
  (b, n, _, _), width, line = q.shape, v.shape[-1], (1, plan.block_q)
  results = [
    ((b, n, tp, width), v.dtype, grid.rows(width)),
    ((b, n, 1, tp), jnp.float32, grid.line()),
  ]
  scratch = [line, line, (width, plan.block_q)]
  o, lse = grid.run(_forward_kernel, (q, k, v), results, scratch, launch)
  return _tokens_first(o, t), lse[:, :, 0, :t].transpose(0, 2, 1)


def backward(
  q_BTNH, k_BSKH, v_BSKV, segments, order, mask, rows, launch=blocks.DEFAULT
):
  """-> (dq, dk, dv); rows: blocks.QueryRows."""
  t, s = q_BTNH.shape[1], k_BSKH.shape[1]

  def gradients(which, kernel):
    arrays = q_BTNH, k_BSKH, v_BSKV
    plan = _plan(which, arrays, segments, order, mask, launch)
    grid = _Grid(which, plan, q_BTNH, v_BSKV)
    tp, sp = plan.padded
    q, do_first = _heads_first(q_BTNH, tp), _heads_first(rows.do, tp)
    k, v = _heads_first(k_BSKH, sp), _heads_first(v_BSKV, sp)
    # Rows past the end contribute nothing.
    lse = blocks.line(blocks.base2(rows.lse), tp, -blocks.NEG)
    delta = blocks.line(rows.delta, tp)
    h, width = q.shape[-1], v.shape[-1]
    if which == 'dq':
      results = [(q.shape, q.dtype, grid.rows(h))]
      scratch = [(plan.block_q, h)]
    else:
      results = [
        (k.shape, k.dtype, grid.columns(h)),
        (v.shape, v.dtype, grid.columns(width)),
      ]
      scratch = [(plan.block_k, h), (plan.block_k, width)]
    arrays = (q, k, v, do_first, lse[:, :, None], delta[:, :, None])
    return grid.run(kernel, arrays, results, scratch, launch)

  (dq,) = gradients('dq', _dq_kernel)
  dk, dv = gradients('dkv', _dkv_kernel)
  return _tokens_first(dq, t), _tokens_first(dk, s), _tokens_first(dv, s)
