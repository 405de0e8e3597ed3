"""Blockwise attention in plain XLA: any device, memory linear in length.

The scores are cut into blocks. One lax.scan walks a list of block pairs that
can hold a visible entry and carries the softmax accumulator of all rows
(o, m, l), updated in place:
  m' = max(m, max s);  p = e^(s - m');  a = e^(m - m')
  l' = a l + sum p;    o' = a o + p v
(online softmax: Milakov and Gimelshein, arXiv:1805.02867; the backward pass
from lse: FlashAttention-2, arXiv:2307.08691, algorithm 2.) Trip counts are
static, so floating-point work can be counted from the program. Cost: 4 T S H
flops per head times the visible fraction of blocks, backward 10 T S H; memory
O(T + S) and one block of scores per head and sequence.

Two levels. `forward` and `backward` are the op on one device. `accumulate` and
`gradients` are one part of it, queries here against keys from anywhere: parts
of the same rows join by `merge`, their gradients by addition, if lse and delta
are those of the whole row (sharding/sequence/attention.py).

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size; lower case q, s: one block of T, S. Inside, arrays are
head-major: rows x_BKGT.., columns x_BKS..
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying


def block_size(length, bound):
  """(tokens per block, number of blocks) for one side.

  At least four blocks where that leaves 64 tokens in each: skipping what causal
  masking hides is then worth more than the shorter loop (B8 N6 L256: 2x).
  """
  bound = min(bound, max(64, math.ceil(length / 4)))
  if length <= bound:
    return length, 1
  block = math.ceil(length / math.ceil(length / bound))
  block = math.ceil(block / 8) * 8  # whole vector registers
  return block, math.ceil(length / block)


def visible_pairs(mask, count_q, count_k, block, aligned):
  """Static (pairs, 2) int32 of blocks (i, j) that can hold a visible entry.

  If not `aligned` the order is data, and every pair can. j is innermost.
  """
  out = []
  for i in range(count_q):
    for j in range(count_k):
      nearest = (i - j - 1) * block + 1  # least order_q - order_k
      hidden = mask.causal and j > i
      hidden |= bool(mask.window) and nearest >= mask.window
      if not (aligned and hidden):
        out.append((i, j))
  return np.array(out, np.int32)


def cut(x, i, n, axis):
  """Block i of n numbers along an axis."""
  return jax.lax.dynamic_slice_in_dim(x, i * n, n, axis)


def paste(x, y, i, n, axis):
  """x with y in place of its block i of n numbers along an axis."""
  return jax.lax.dynamic_update_slice_in_dim(x, y, i * n, axis)


@dataclasses.dataclass(frozen=True)
class Walk:
  """Which block pairs are computed, and which entries of them are visible.

  pairs: (P, 2) int32 of (row block, column block), NumPy or traced; (-1, -1) is
    no pair.
  block_q, block_k: tokens per block; they divide T and S.
  segments, order: None or int pairs (x_BT, x_BS), as in op.py. Without order a
    token's index in its array counts.
  length: number of keys that exist, at most S; only read without segments.
  skips: how a pair is passed over whose blocks share no document in any row of
    the batch, which needs `segments`: 'branch', as one of (-1, -1) is, with a
    trip count that a scheduler knows; 'loop', over the other pairs, which costs
    nothing where rows pack no documents. '': all are computed.
  """

  pairs: Any
  block_q: int
  block_k: int
  segments: Any = None
  order: Any = None
  length: int | None = None
  skips: str = 'branch'

  def tied(self, x):
    """The same walk, its arrays made to depend on the array x.

    Masks are the same in every layer. Differentiating a scan over layers would
    move them out of it, and keep those of all pairs: T x S booleans a head.
    """
    arrays = jnp.asarray(self.pairs), self.segments, self.order
    (pairs, segments, order), _ = jax.lax.optimization_barrier((arrays, x))
    return dataclasses.replace(
      self, pairs=pairs, segments=segments, order=order
    )

  def row(self, x_BKGT, i):
    return cut(x_BKGT, i, self.block_q, 3)

  def col(self, x_BKS, j):
    return cut(x_BKS, j, self.block_k, 2)

  def both(self, pair, i, j):
    """Blocks (x_Bq, x_Bs) of (x_BT, x_BS)."""
    return cut(pair[0], i, self.block_q, 1), cut(pair[1], j, self.block_k, 1)

  def visible(self, mask, i, j):
    """(B or 1, q, s) bool; None if everything is visible."""
    iota = lambda n, at: at * n + jnp.arange(n, dtype=jnp.int32)[None]
    order = iota(self.block_q, i), iota(self.block_k, j)
    length, segments = None, None
    if self.segments is not None:  # padded with 0, which nothing sees
      segments = self.both(self.segments, i, j)
    elif self.length is not None:
      length = order[1] < self.length
    if self.order is not None:
      order = self.both(self.order, i, j)
    return visible(mask, segments, order, length)

  def meeting(self):
    """(P,) bool: may the blocks of a pair share a document? By bounds: true if
    they do."""

    def bounds(x_BT, block):
      x = x_BT.reshape(len(x_BT), -1, block)
      far = jnp.iinfo(x.dtype).max
      return jnp.where(x > 0, x, far).min(2), x.max(2)

    (low, high), (first, last) = map(
      bounds, self.segments, (self.block_q, self.block_k)
    )
    wide = lambda row, col: (row[:, :, None], col[:, None, :])
    (low, last), (high, first) = wide(low, last), wide(high, first)
    table = ((low <= last) & (first <= high)).any(0)
    i, j = self.pairs[:, 0], self.pairs[:, 1]
    return (i >= 0) & table[i, j]

  def run(self, work, carry, sides):
    """Folds work(i, j, blocks of carry) -> new blocks over the pairs.

    sides: for each array of the carry, 'q' if its blocks are rows i, 'k' if
    they are columns j.
    """

    def step(carry, pair, on=None):
      i, j = pair[0], pair[1]
      rows, cols = (i, self.block_q, 3), (j, self.block_k, 2)
      at = [rows if side == 'q' else cols for side in sides]
      old = tuple(cut(x, *a) for x, a in zip(carry, at, strict=True))
      if on is None:
        new = work(i, j, old)
      else:
        new = jax.lax.cond(on, lambda: work(i, j, old), lambda: old)
      blocks = zip(carry, new, at, strict=True)
      return tuple(paste(x, y, *a) for x, y, a in blocks)

    pairs = self.pairs
    if self.skips == 'loop':
      meeting = self.meeting()
      first = jnp.argsort(~meeting, stable=True)
      some = jnp.asarray(pairs)[first]
      with jax.named_scope(f'about_{len(pairs)}_trips'):  # sharding/turns.py
        return jax.lax.fori_loop(
          0, meeting.sum(), lambda n, carry: step(carry, some[n]), carry
        )
    meeting = self.meeting() if self.skips else None
    if len(pairs) == 1:  # one pair needs no loop
      return step(carry, pairs[0], meeting if meeting is None else meeting[0])
    one = lambda carry, at: (step(carry, *at), None)
    return jax.lax.scan(one, carry, (pairs, meeting))[0]


def visible(mask, segments, order, exists=None):
  """(B or 1, q, s) bool; None if everything is visible.

  segments: None or (x_Bq, x_Bs); order: (x_Bq, x_Bs); exists: None or bool_Bs.
  """
  rules = [] if exists is None else [exists[:, None, :]]
  wide = lambda pair: (pair[0][:, :, None], pair[1][:, None, :])
  if segments is not None:
    x, y = wide(segments)
    rules += [x == y, x > 0]
  row, col = wide(order)
  if mask.causal:
    rules.append(col <= row)
  if mask.window:
    rules.append(row - col < mask.window)
  if not rules:
    return None
  return functools.reduce(jnp.logical_and, rules)


def scores(q_BKGqH, k_BKsH, ok_Bqs, mask):
  """Scores (B, K, G, q, s), NEG where not ok, and the softcap's slope."""
  s = varying.dot('bkgqh,bksh->bkgqs', q_BKGqH, k_BKsH)
  return _seen(s, None if ok_Bqs is None else ok_Bqs[:, None, None], mask)


def _seen(s, ok, mask):
  """Scores of products, NEG where not ok, and the softcap's slope."""
  s, slope = s * mask.scale, None
  if mask.softcap:
    tanh = jnp.tanh(s / mask.softcap)
    s, slope = mask.softcap * tanh, 1 - tanh * tanh
  return s if ok is None else jnp.where(ok, s, varying.NEG), slope


def accumulate(q_BKGTH, k_BKSH, v_BKSH, walk, mask):
  """-> the raw accumulator (o_BKGTH, m_BKGT, l_BKGT) of the pairs of `walk`.

  In promote_types(dtype, float32). A row that saw nothing is (0, NEG, 0).
  """
  walk, k_BKHS = walk.tied(q_BKGTH), k_BKSH.swapaxes(2, 3)

  def work(i, j, old):
    o, m, total = old
    ok = walk.visible(mask, i, j)
    kj = cut(k_BKHS, j, walk.block_k, 3)
    s = varying.dot('bkgqh,bkhs->bkgqs', walk.row(q_BKGTH, i), kj)
    s, _ = _seen(s, None if ok is None else ok[:, None, None], mask)
    new = jnp.maximum(m, s.max(-1))
    e = jnp.exp(s - jnp.maximum(new, varying.FLOOR)[..., None])
    a = jnp.exp(m - new)
    vj = walk.col(v_BKSH, j)
    ev = varying.dot('bkgqs,bksh->bkgqh', e.astype(vj.dtype), vj)
    return o * a[..., None] + ev, new, total * a + e.sum(-1)

  wide = jnp.result_type(q_BKGTH, k_BKSH, v_BKSH, jnp.float32)
  # Only the types of these two are used.
  row = q_BKGTH.max(-1)
  out = q_BKGTH[..., :1] + jnp.zeros(v_BKSH.shape[-1], wide)
  start = (out, 0), (row, varying.NEG), (row, 0)
  return walk.run(work, tuple(varying.like(*x, wide) for x in start), 'qqq')


def gradients(q_BKGTH, k_BKSH, v_BKSH, rows, walk, mask):
  """-> (dq, dk, dv) of the pairs of `walk`, in promote_types(dtype, float32).

  rows = (lse_BKGT, delta_BKGT, do_BKGTH), lse and delta of the whole row. dq
  and dk still lack the factor mask.scale: nothing follows the loop, so a caller
  can have its sends end where the loop ends.

  Scores have the key first: with the query first XLA on CPU copies two blocks
  of scores, those of dk's and dv's product, to transpose them.
  """
  lse, delta, do = rows
  lse = jnp.maximum(lse, varying.FLOOR)
  walk, k_BKHS = walk.tied(q_BKGTH), k_BKSH.swapaxes(2, 3)

  def work(i, j, old):
    dq, dk, dv = old
    qi, doi = walk.row(q_BKGTH, i), walk.row(do, i)
    kj, vj = walk.col(k_BKSH, j), walk.col(v_BKSH, j)
    ok = walk.visible(mask, i, j)
    ok = None if ok is None else ok.swapaxes(1, 2)[:, None, :, None]
    s = varying.dot('bksh,bkgqh->bksgq', kj, qi)
    s, slope = _seen(s, ok, mask)
    e = jnp.exp(s - walk.row(lse, i)[:, :, None])
    de = varying.dot('bksh,bkgqh->bksgq', vj, doi)
    ds = e * (de - walk.row(delta, i)[:, :, None])
    if slope is not None:
      ds = ds * slope
    ds = ds.astype(qi.dtype)
    kj = cut(k_BKHS, j, walk.block_k, 3)
    dqi = varying.dot('bkhs,bksgq->bkhgq', kj, ds).transpose(0, 1, 3, 4, 2)
    dkj = varying.dot('bksgq,bkgqh->bksh', ds, qi)
    dvj = varying.dot('bksgq,bkgqh->bksh', e.astype(doi.dtype), doi)
    return dq + dqi, dk + dkj, dv + dvj

  wide = jnp.result_type(q_BKGTH, k_BKSH, v_BKSH, jnp.float32)
  start = tuple(varying.like(x, 0, wide) for x in (q_BKGTH, k_BKSH, v_BKSH))
  return walk.run(work, start, 'qkk')


def merge(a, b):
  """Joins the accumulators (o, m, l) of two parts of the same rows."""
  m = jnp.maximum(a[1], b[1])
  x, y = jnp.exp(a[1] - m), jnp.exp(b[1] - m)
  return a[0] * x[..., None] + b[0] * y[..., None], m, a[2] * x + b[2] * y


def finish(o, m, total):
  """(o, m, l) -> (o, lse). A row that saw nothing: o = 0, lse = NEG."""
  total = jnp.where(total == 0, 1, total)
  return o / total[..., None], m + jnp.log(total)


def to_rows(x, kv_heads, length=None):
  """(B, T, N, ...) -> (B, K, G, T, ...), zeros appended up to `length`."""
  b, t, n, *rest = x.shape
  x = x.reshape(b, t, kv_heads, n // kv_heads, *rest)
  return varying.pad(x, length or t).transpose(0, 2, 3, 1, *range(4, x.ndim))


def from_rows(x, length=None):
  """(B, K, G, T, ...) -> (B, T, N, ...), cut to `length`."""
  x = x.transpose(0, 3, 1, 2, *range(4, x.ndim))[:, :length]
  b, t, k, g, *rest = x.shape
  return x.reshape(b, t, k * g, *rest)


def to_cols(x_BSKH, length=None):
  """(B, S, K, H) -> (B, K, S, H), zeros appended up to `length`."""
  return varying.pad(x_BSKH, length or x_BSKH.shape[1]).transpose(0, 2, 1, 3)


def from_cols(x_BKSH, length=None):
  """(B, K, S, H) -> (B, S, K, H), cut to `length`."""
  return x_BKSH.transpose(0, 2, 1, 3)[:, :length]


def _plan(t, s, segments, order, mask):
  """-> (padded T, padded S, Walk) of a call on one device."""
  (bq, nq), (bk, nk) = (block_size(n, mask.block) for n in (t, s))
  tp, sp = bq * nq, bk * nk
  pad = lambda x: x and (varying.pad(x[0], tp), varying.pad(x[1], sp))
  pairs = visible_pairs(mask, nq, nk, bq, order is None)
  length = None if s == sp else s
  # An accelerator works on all rows of a batch side by side; rows that several
  # devices hold, outside a region, would have to be gathered.
  on_cpu = registry.current_target().platform == 'cpu'
  here = segments and not any(jax.typeof(segments[0]).sharding.spec[:1])
  skips = 'loop' if on_cpu and here and len(pairs) > 1 else ''
  walk = Walk(pairs, bq, bk, pad(segments), pad(order), length, skips)
  return tp, sp, walk


def _row_by_row(run):
  """run(arrays (B, ..)) of one row after another where pairs are skipped: each
  has documents of its own."""

  @functools.wraps(run)
  def rows(q_BTNH, k_BSKH, v_BSKH, segments, order, mask, *more):
    t, s = q_BTNH.shape[1], k_BSKH.shape[1]
    arrays = (q_BTNH, k_BSKH, v_BSKH, segments, order), more
    if len(q_BTNH) == 1 or not _plan(t, s, segments, order, mask)[2].skips:
      return run(*arrays[0], mask, *more)

    def one(arrays):
      given, more = jax.tree.map(lambda x: x[None], arrays)
      return jax.tree.map(lambda x: x[0], run(*given, mask, *more))

    return jax.lax.map(one, arrays)

  return rows


@_row_by_row
def forward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
  """-> (o_BTNH in v's dtype, lse_BTN); see op.py for the contract."""
  t, (s, kv) = q_BTNH.shape[1], k_BSKH.shape[1:3]
  tp, sp, walk = _plan(t, s, segments, order, mask)
  q = to_rows(q_BTNH, kv, tp)
  k, v = to_cols(k_BSKH, sp), to_cols(v_BSKH, sp)
  o, lse = finish(*accumulate(q, k, v, walk, mask))
  return from_rows(o.astype(v.dtype), t), from_rows(lse, t)


@_row_by_row
def backward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask, rows):
  """-> (dq, dk, dv) from rows = (lse_BTN, delta_BTN, do_BTNH)."""
  t, (s, kv) = q_BTNH.shape[1], k_BSKH.shape[1:3]
  tp, sp, walk = _plan(t, s, segments, order, mask)
  q, *rows = (to_rows(x, kv, tp) for x in (q_BTNH, *rows))
  k, v = to_cols(k_BSKH, sp), to_cols(v_BSKH, sp)
  dq, dk, dv = gradients(q, k, v, rows, walk, mask)
  return (
    from_rows(dq * mask.scale, t).astype(q.dtype),
    from_cols(dk * mask.scale, s).astype(k.dtype),
    from_cols(dv, s).astype(v.dtype),
  )
