"""Blockwise attention in plain XLA: any device, memory linear in length.

The scores are cut into blocks. One lax.scan walks a static list of the block
pairs that can hold a visible entry and carries the softmax accumulator of all
rows (o, m, l), updated in place:
  m' = max(m, max s);  p = e^(s - m');  a = e^(m - m')
  l' = a l + sum p;    o' = a o + p v
(online softmax: Milakov and Gimelshein, arXiv:1805.02867; the backward pass
from lse: FlashAttention-2, arXiv:2307.08691, algorithm 2.) Trip counts are
static, so floating-point work can be counted from the program. Cost: 4 T S H
flops per head times the visible fraction of blocks, backward 10 T S H; memory
O(T + S) and one block of scores per head and sequence.

Legend: B batch, T query length, S key length, N query heads, K kv heads,
G = N / K, H head size; lower case q, s: one block of T, S.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

NEG = -1e30  # score of an invisible pair: finite, so no merge makes a NaN
# Least maximum that is subtracted: e^(NEG - FLOOR) is exactly 0, so a row that
# sees nothing gets p = 0 without a second `where`.
FLOOR = NEG / 2


def same_varying(tree):
  """Makes all arrays vary over the same manual mesh axes (in shard_map)."""
  leaves = jax.tree.leaves(tree)
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in leaves))
  return jax.tree.map(lambda x: _vary(x, axes), tree)


def _vary(x, axes):
  axes = tuple(sorted(axes - jax.typeof(x).mat.varying))
  return jax.lax.pcast(x, axes, to='varying') if axes else x


def _like(x, fill, dtype):
  """A constant with x's shape, sharding and varying axes (a scan carry)."""
  return _vary(jnp.full_like(x, fill, dtype=dtype), jax.typeof(x).mat.varying)


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


def _pad(x, length):
  """Appends zeros on axis 1 up to `length`."""
  n = length - x.shape[1]
  if n == 0:
    return x
  return jnp.pad(x, [(0, 0), (0, n)] + [(0, 0)] * (x.ndim - 2))


def _cut(x, i, n, axis):
  return jax.lax.dynamic_slice_in_dim(x, i * n, n, axis)


def _paste(x, y, i, n, axis):
  return jax.lax.dynamic_update_slice_in_dim(x, y, i * n, axis)


def _walk(step, carry, pairs):
  """Runs step over the pairs; one pair needs no loop."""
  if len(pairs) == 1:
    return step(carry, (0, 0))
  return jax.lax.scan(lambda c, ij: (step(c, ij), None), carry, pairs)[0]


class _Blocks:
  """One call cut into blocks: what forward and backward share."""

  def __init__(self, q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
    self.mask = mask
    self.t, self.s = q_BTNH.shape[1], k_BSKH.shape[1]
    self.groups = q_BTNH.shape[2] // k_BSKH.shape[2]
    self.dtype = jnp.result_type(q_BTNH, k_BSKH, v_BSKH, jnp.float32)
    self.bq, nq = block_size(self.t, mask.block)
    self.bk, nk = block_size(self.s, mask.block)
    self.tp, self.sp = self.bq * nq, self.bk * nk
    self.pairs = visible_pairs(mask, nq, nk, self.bq, order is None)
    pad = lambda x: x and (_pad(x[0], self.tp), _pad(x[1], self.sp))
    self.segments, self.order = pad(segments), pad(order)
    self.q = self.to_rows(q_BTNH)
    self.k, self.v = self.to_cols(k_BSKH), self.to_cols(v_BSKH)

  def to_rows(self, x):
    """(B, T, N, ...) -> (B, K, G, padded T, ...)."""
    b, t, n, *rest = x.shape
    x = x.reshape(b, t, n // self.groups, self.groups, *rest)
    return _pad(x, self.tp).transpose(0, 2, 3, 1, *range(4, x.ndim))

  def from_rows(self, x):
    """(B, K, G, padded T, ...) -> (B, T, N, ...)."""
    x = x.transpose(0, 3, 1, 2, *range(4, x.ndim))[:, : self.t]
    b, t, k, g, *rest = x.shape
    return x.reshape(b, t, k * g, *rest)

  def to_cols(self, x_BSKH):
    """(B, S, K, H) -> (B, K, padded S, H)."""
    return _pad(x_BSKH, self.sp).transpose(0, 2, 1, 3)

  def from_cols(self, x):
    return x.transpose(0, 2, 1, 3)[:, : self.s]

  def row(self, x, i):
    return _cut(x, i, self.bq, 3)

  def col(self, x, j):
    return _cut(x, j, self.bk, 2)

  def put_row(self, x, y, i):
    return _paste(x, y, i, self.bq, 3)

  def put_col(self, x, y, j):
    return _paste(x, y, j, self.bk, 2)

  def dot(self, equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=self.dtype)

  def _both(self, pair, i, j):
    """Block (i, j) of (x_BT, x_BS), shaped to broadcast to (B, q, s)."""
    x, y = _cut(pair[0], i, self.bq, 1), _cut(pair[1], j, self.bk, 1)
    return x[:, :, None], y[:, None, :]

  def visible(self, i, j):
    """Bool, broadcasts to (B, K, G, q, s); None if everything is visible."""
    mask, rules = self.mask, []
    iota = lambda n: jnp.arange(n, dtype=jnp.int32)
    row = (i * self.bq + iota(self.bq))[None, :, None]
    col = (j * self.bk + iota(self.bk))[None, None, :]
    if self.segments is not None:  # padded with 0, which nothing sees
      x, y = self._both(self.segments, i, j)
      rules += [x == y, x > 0]
    elif self.sp != self.s:
      rules.append(col < self.s)
    if self.order is not None:
      row, col = self._both(self.order, i, j)
    if mask.causal:
      rules.append(col <= row)
    if mask.window:
      rules.append(row - col < mask.window)
    if not rules:
      return None
    return functools.reduce(jnp.logical_and, rules)[:, None, None]

  def scores(self, i, j):
    """Scores (B, K, G, q, s), NEG where invisible, and the softcap's slope."""
    s = self.dot('bkgqh,bksh->bkgqs', self.row(self.q, i), self.col(self.k, j))
    s, slope = s * self.mask.scale, None
    if self.mask.softcap:
      tanh = jnp.tanh(s / self.mask.softcap)
      s, slope = self.mask.softcap * tanh, 1 - tanh * tanh
    ok = self.visible(i, j)
    return (s if ok is None else jnp.where(ok, s, NEG)), slope


def forward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask):
  """-> (o_BTNH in v's dtype, lse_BTN); see attention.py for the contract."""
  p = _Blocks(q_BTNH, k_BSKH, v_BSKH, segments, order, mask)

  def step(carry, ij):
    i, j = ij
    o, m, total = (p.row(x, i) for x in carry)
    s, _ = p.scores(i, j)
    new = jnp.maximum(m, s.max(-1))
    e = jnp.exp(s - jnp.maximum(new, FLOOR)[..., None])
    a = jnp.exp(m - new)
    ev = p.dot('bkgqs,bksh->bkgqh', e.astype(p.v.dtype), p.col(p.v, j))
    block = o * a[..., None] + ev, new, total * a + e.sum(-1)
    return tuple(p.put_row(x, y, i) for x, y in zip(carry, block, strict=True))

  # Only the types of these two are used.
  out, row = p.q[..., :1] + jnp.zeros(p.v.shape[-1], p.dtype), p.q.max(-1)
  start = (out, 0), (row, NEG), (row, 0)
  start = tuple(_like(x, fill, p.dtype) for x, fill in start)
  o, m, total = _walk(step, start, p.pairs)
  total = jnp.where(total == 0, 1, total)  # rows that see nothing: o = 0
  o = (o / total[..., None]).astype(v_BSKH.dtype)
  return p.from_rows(o), p.from_rows(m + jnp.log(total))


def backward(q_BTNH, k_BSKH, v_BSKH, segments, order, mask, rows):
  """-> (dq, dk, dv) from rows = (lse_BTN, delta_BTN, do_BTNH)."""
  p = _Blocks(q_BTNH, k_BSKH, v_BSKH, segments, order, mask)
  lse, delta, do = (p.to_rows(x) for x in rows)
  lse = jnp.maximum(lse, FLOOR)

  def step(carry, ij):
    i, j = ij
    dq, dk, dv = carry
    doi = p.row(do, i)
    s, slope = p.scores(i, j)
    e = jnp.exp(s - p.row(lse, i)[..., None])
    de = p.dot('bkgqh,bksh->bkgqs', doi, p.col(p.v, j))
    ds = e * (de - p.row(delta, i)[..., None])
    if slope is not None:
      ds = ds * slope
    ds = ds.astype(p.q.dtype)
    dqi = p.dot('bkgqs,bksh->bkgqh', ds, p.col(p.k, j))
    dkj = p.dot('bkgqs,bkgqh->bksh', ds, p.row(p.q, i))
    dvj = p.dot('bkgqs,bkgqh->bksh', e.astype(doi.dtype), doi)
    return (
      p.put_row(dq, p.row(dq, i) + dqi, i),
      p.put_col(dk, p.col(dk, j) + dkj, j),
      p.put_col(dv, p.col(dv, j) + dvj, j),
    )

  start = tuple(_like(x, 0, p.dtype) for x in (p.q, p.k, p.v))
  dq, dk, dv = _walk(step, start, p.pairs)
  dq, dk = p.from_rows(dq * mask.scale), p.from_cols(dk * mask.scale)
  dv = p.from_cols(dv)
  return tuple(
    g.astype(x.dtype)
    for g, x in zip((dq, dk, dv), (q_BTNH, k_BSKH, v_BSKH), strict=True)
  )
