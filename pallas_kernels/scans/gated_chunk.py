"""One chunk of a gated scan: the body that XLA, TPU and Triton share.

    S_t = diag(e^g_t) S_(t-1) + k_t v_t^T        o_t = S_t^T q_t

unrolled over the C tokens of a chunk that starts in state S (gated linear
attention, arXiv:2312.06635, section 4; one decay per head: Mamba-2,
arXiv:2405.21060, section 6):

    A_ij = sum_K q_i k_j e^(g_(j+1) + ... + g_i)   for j <= i, else 0
    o    = A v + (q e^(g_1 + ... + g_i)) S
    S'   = e^(g_1 + ... + g_C) S + (k e^(g_(j+1) + ... + g_C))^T v

The usual factors q e^b, k e^-b with b a running sum overflow when a decay is
strong. Here no exponent is positive and none is a difference of sums. One decay
per head: the C x C matrix of exponents itself, by one product with 0s and 1s.
One per key: pairs (i, j) are grouped by the level n = 1, 2, .., C/2 at which i
and j lie in the upper and lower half of a block of 2n tokens; both factors then
end at the border between the halves, so both exponents are sums of g. Costs
log2(C) products more and no C x C x K array.

Only iota, where, exp, sums and products of 2-D arrays, so the same lines trace
into an XLA loop and into both kernels. `segment` counts the resets so far in
the chunk: tokens of different segments do not meet, S reaches segment 0 only.

Legend: C tokens of a chunk, K key size, V value size, G groups of heads that
share q and k.
"""

import functools
import math
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

_NN, _NT, _TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


class GatedTokens(NamedTuple):
  """Inputs of a scan, of a whole one (B, T, H, ..) or of one chunk (C, ..).

  q, k: (B, T, G, K), (C, K); head h reads group h // (H / G). v: (B, T, H, V),
  (C, V). g, the log decay: (B, T, H, K), (C, K), or one per head (B, T, H),
  (1, C). segment: resets since the start of the token's chunk, (B, T) int32,
  (1, C) of q's dtype.
  """

  q: Any
  k: Any
  v: Any
  g: Any
  segment: Any


class Precision(NamedTuple):
  """Of products of q, k, v and states, and of sums of decays (float32)."""

  products: Any
  sums: Any


def _of_groups(d_BTHK, like):
  """Gradients of what heads read, summed over those of a group of `like`."""
  *_, g, _ = like.shape
  b, t, h, k = d_BTHK.shape
  if g == h:
    return d_BTHK
  wide = d_BTHK.astype(jnp.promote_types(d_BTHK.dtype, jnp.float32))
  return wide.reshape(b, t, g, -1, k).sum(3)


def gradients_of(x, gradients, time):
  """(dq, dk, dv, dg) of every head -> as x has them, in x's dtypes.

  time: their axis of tokens, which becomes the second one.
  """
  dq, dk, dv, dg = (jnp.moveaxis(d, time, 1) for d in gradients)
  out = _of_groups(dq, x.q), _of_groups(dk, x.k), dv, dg
  return [d.astype(y.dtype) for d, y in zip(out, x[:4], strict=True)]


def _dot(a, b, dims=_NN, precision=None):
  return lax.dot_general(
    a, b, (dims, ((), ())), precision, preferred_element_type=a.dtype
  )


def _pick(mask, x, precision):
  """Sums of rows of x chosen by a mask."""
  chosen = jnp.where(mask, 1, 0).astype(x.dtype)
  return _dot(chosen, x, precision=precision.sums)


def _grid(n):
  row = lax.broadcasted_iota(jnp.int32, (n, n), 0)
  return row, lax.broadcasted_iota(jnp.int32, (n, n), 1)


def _column(x):
  """(1, n) -> (n, 1), without the reshape that kernels lack."""
  row, col = _grid(x.shape[1])
  return jnp.sum(jnp.where(row == col, x, 0), 1, keepdims=True)


def _row(x):
  """(n, 1) -> (1, n)."""
  row, col = _grid(x.shape[0])
  return jnp.sum(jnp.where(row == col, x, 0), 0, keepdims=True)


class _Borders(NamedTuple):
  """Decays between the tokens of a chunk and its two ends, all <= 1.

  A state that a reset cuts is left out by a `where`: 0 times it may be NaN. Not
  in `backward`, where it took 18% more of a CPU: there it stays in the chunk.
  """

  enter: Any  # (C, K | 1): from the start through i; 0 after a reset
  leave: Any  # (C, K | 1): after j to the end; 0 before the last reset
  total: Any  # (K | 1, 1): of the whole chunk; 0 if it has a reset
  same: Any  # (C, C) bool: both in one segment
  first: Any  # (C, 1) bool: in the segment that the state reaches


def _borders(g, segment, precision):
  row, col = _grid(segment.shape[1])
  if g.shape[0] == 1:
    enter = jnp.sum(jnp.where(col <= row, g, 0), 1, keepdims=True)
    leave = jnp.sum(jnp.where(col > row, g, 0), 1, keepdims=True)
    total = jnp.sum(g, 1, keepdims=True)
  else:
    enter = _pick(col <= row, g, precision)
    leave = _pick(col > row, g, precision)
    total = _column(jnp.sum(g, 0, keepdims=True))
  mine = _column(segment)
  last = jnp.max(segment, 1, keepdims=True)
  return _Borders(
    jnp.where(mine == 0, jnp.exp(enter), 0),
    jnp.where(mine == last, jnp.exp(leave), 0),
    jnp.where(last == 0, jnp.exp(total), 0),
    mine == segment,
    mine == 0,
  )


def _levels(g, precision):
  """Yields (factors (C, K), pairs (C, C) bool) of each level.

  The factor of an upper row is the decay from the border through it, that of a
  lower row the decay after it to the border: of j, g_j itself is not in.
  """
  row, col = _grid(g.shape[0])
  for level in range(g.shape[0].bit_length() - 1):
    n = 1 << level
    border = (row & ~(2 * n - 1)) + n
    upper, lower = (row & n) != 0, (row & n) == 0
    after = upper & (border <= col) & (col <= row)
    before = lower & (row < col) & (col < border)
    pairs = upper & (border - n <= col) & (col < border)
    yield jnp.exp(_pick(after | before, g, precision)), pairs


def _decay_matrix(g, precision):
  """(1, C) -> (C, C): e^(g_(j+1) + ... + g_i) for j <= i, 1 above."""
  row, col = _grid(g.shape[1])
  each = jnp.where(row > col, _column(g), 0)
  return jnp.exp(_pick(col <= row, each, precision))


def _scores(x, same, precision):
  """A (C, C)."""
  dot = functools.partial(_dot, precision=precision.products)
  row, col = _grid(x.q.shape[0])
  if x.g.shape[0] == 1:
    inside = dot(x.q, x.k, _NT) * _decay_matrix(x.g, precision)
    return jnp.where(same & (col <= row), inside, 0)
  scores = jnp.where(row == col, jnp.sum(x.q * x.k, 1, keepdims=True), 0)
  for factor, pairs in _levels(x.g, precision):
    pair = dot(x.q * factor, x.k * factor, _NT)
    scores += jnp.where(pairs, pair, 0)
  return jnp.where(same, scores, 0)


def _scores_gradient(x, same, d_scores, precision):
  """A, and dq, dk from d_scores, both without the diagonal's part."""
  dot = functools.partial(_dot, precision=precision.products)
  row, col = _grid(x.q.shape[0])
  below = jnp.where(same & (col < row), d_scores, 0)
  if x.g.shape[0] == 1:
    decay = _decay_matrix(x.g, precision)
    below *= decay
    scores = jnp.where(same & (col <= row), dot(x.q, x.k, _NT) * decay, 0)
    return scores, dot(below, x.k), dot(below, x.q, _TN)
  scores = jnp.where(row == col, jnp.sum(x.q * x.k, 1, keepdims=True), 0)
  dq, dk = jnp.zeros_like(x.q), jnp.zeros_like(x.k)
  for factor, pairs in _levels(x.g, precision):
    part = jnp.where(pairs, below, 0)
    qf, kf = x.q * factor, x.k * factor
    scores += jnp.where(pairs, dot(qf, kf, _NT), 0)
    dq += factor * dot(part, kf)
    dk += factor * dot(part, qf, _TN)
  return jnp.where(same, scores, 0), dq, dk


def forward(x, state, precision):
  """One chunk: (o_CV, state_KV at its end).

  Args:
    x: GatedTokens of one chunk, in one float dtype; C a power of two.
    state: (K, V) at the start.
    precision: Precision.
  """
  dot = functools.partial(_dot, precision=precision.products)
  enter, leave, total, same, first = _borders(x.g, x.segment, precision)
  o = dot(_scores(x, same, precision), x.v)
  o += jnp.where(first, dot(x.q * enter, state), 0)
  kept = jnp.where(total == 0, 0, total * state)
  return o, kept + dot(x.k * leave, x.v, _TN)


def backward(x, state, do, d_state, precision):
  """Cotangents of one chunk: (dq, dk, dv, dg, d_state at its start).

  state: at the chunk's start. d_state: of the state at its end. The decay's
  gradient needs no product of its own: dg_t sums p_ij over the pairs on both
  sides of g_t, i >= t > j, where p_ij is pair (i, j)'s part of q dq and of k dk
  alike; so dg is a sum of q dq - k dk over i >= t within the chunk, of k dk
  over j < t to the chunk's end, and of what passes through the whole chunk.
  """
  dot = functools.partial(_dot, precision=precision.products)
  enter, leave, total, same, _ = _borders(x.g, x.segment, precision)
  d_scores = dot(do, x.v, _NT)
  scores, dq, dk = _scores_gradient(x, same, d_scores, precision)
  dq += enter * dot(do, state, _NT)
  dk_out = leave * dot(x.v, d_state, _NT)
  through = jnp.sum(d_state * total * state, 1, keepdims=True)
  sums = x.q * dq - x.k * dk, x.k * dk_out, through
  dg = _decay_gradient(x, same, sums, precision)
  dv = dot(scores, do, _TN) + dot(x.k * leave, d_state)
  own = jnp.sum(do * x.v, 1, keepdims=True)  # a token's own pair: no decay
  before = total * d_state + dot(x.q * enter, do, _TN)
  return dq + own * x.k, dk + dk_out + own * x.q, dv, dg, before


def _decay_gradient(x, same, sums, precision):
  """dg like g; sums: what to sum over i >= t, over j < t, and of all t."""
  from_here, before, through = sums
  row, col = _grid(x.q.shape[0])
  if x.g.shape[0] > 1:
    inside = _pick(same & (col >= row), from_here, precision)
    across = _pick(same & (col < row), before, precision)
    return inside + across + _row(through)
  from_here = jnp.sum(from_here, 1, keepdims=True)
  before = jnp.sum(before, 1, keepdims=True)
  picked = jnp.where(row >= col, from_here, before)
  sums = jnp.sum(jnp.where(same, picked, 0), 0, keepdims=True)
  return sums + jnp.sum(through, 0, keepdims=True)


def precision_of(dtype, full: Any = lax.Precision.HIGHEST) -> Precision:
  """`Precision` for inputs of a dtype; of float32 it is full on a TPU too.

  full: what the target calls float32.
  """
  wide = jnp.promote_types(dtype, jnp.float32) == dtype
  return Precision(full if wide else lax.Precision.DEFAULT, full)


def cost(x, chunk, gradient=False):
  """pl.CostEstimate of one pass in chunks over GatedTokens (or their shapes).

  FLOPs: 2 per multiplication in a matrix product, sums of decays included.
  Bytes: each input and output once, the states between chunks too.
  """
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  C, scalar = chunk, len(x.g.shape) == 3
  levels = 1 if scalar else C.bit_length() - 1
  # products of (C, C, K), (C, C, V), (C, K, V)
  if gradient:
    wide = C * C * K * 3 * levels + 2 * C * C * V + 4 * C * K * V
  else:
    wide = C * C * K * levels + C * C * V + 2 * C * K * V
  if scalar:
    sums, powers = C**3, C * C + 2 * C
  else:
    sums = C * C * K * (levels + 2 + 2 * gradient)
    powers = C * K * (levels + 2) + K
  chunks = B * H * -(-T // C)
  size = lambda y: math.prod(y.shape) * jnp.dtype(y.dtype).itemsize
  # o and do are like v, gradients like their inputs
  tokens = sum(map(size, x[:4])) + size(x.v)
  states = 4 * K * V * (2 * B * H + chunks)
  return pl.CostEstimate(
    flops=2 * chunks * (wide + sums),
    transcendentals=chunks * powers,
    bytes_accessed=(1 + gradient) * tokens + states + 4 * B * T,
  )
