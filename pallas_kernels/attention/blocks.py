"""Blocks of scores: which exist, which need a mask, and the arithmetic in them.

Shared by the attention kernels (tpu.py, gpu.py, hopper.py). The T x S scores
are cut into blocks; from the least and greatest segment and order number on
each side a block is

    0 invisible   never visited
    1 partial     some pairs are hidden: computed with a mask
    2 full        computed without

(bounds only, so a block called partial may be all visible or all hidden; one
called full or invisible is). The kinds are NumPy if the mask is static (no
segments, no order), then lists of blocks are made while tracing; else they are
arrays and the lists are made on the device, R x C integers, never T x S.

Inside a block logits are kept in base 2, s = scale log2(e) q.k, since hardware
has exp2. Masked logits are NEG, the running maximum begins at FLOOR = NEG / 2
and a row that sees nothing has base-2 lse +|NEG| in the backward pass:
exp2(NEG - FLOOR) and exp2(NEG + NEG) are exactly 0, so no second `where`.

Legend: B batch (1 if the mask is static), T query length, S key length,
R row blocks, C column blocks, N query heads, K kv heads, H head size of q and
k, V head size of v.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import block_table

NEG, FLOOR = varying.NEG, varying.FLOOR
LOG2E = math.log2(math.e)
_FAR = 2**30  # above every order number

# Most tokens of a block (queries, keys), by pass, where block_table.json has no
# row. TPU: 512 was taken from static schedules (not from a device) and fits
# 16 MiB of on-chip memory up to head size 256. GPU: of gpu.py, what keeps the
# forward and dq kernels free of spills at head size 128 on Hopper; float32 is
# not for its tensor cores. hopper.py has blocks of its own.
_TPU = {'forward': (512, 512), 'dq': (512, 512), 'dkv': (512, 512)}
_TRITON = {'forward': (128, 64), 'dq': (64, 64), 'dkv': (64, 64)}
_FLOAT32 = {'forward': (16, 16), 'dq': (16, 16), 'dkv': (16, 16)}
BLOCKS = {
  'tpu': _TPU,
  'gpu': _TRITON,
  'gpu float32': _FLOAT32,
}


class Launch(NamedTuple):
  """How a kernel is called; for tests and measurements.

  block: (queries, keys) per block instead of those of `choose`. interpret: as
  in pl.pallas_call.
  """

  block: tuple[int, int] | None = None
  interpret: Any = False


DEFAULT = Launch()


class QueryRows(NamedTuple):
  """Of every query, for the backward pass: lse_BTN, delta_BTN, do_BTNV."""

  lse: Any
  delta: Any
  do: Any


class Call(NamedTuple):
  """The properties of a call that the size of a block depends on.

  head: the larger head size. masked: may a block need a mask? device: kind of
  device; None: the current target's.
  """

  head: int
  dtype: str
  masked: bool
  device: str | None = None


class BlockChoice(NamedTuple):
  """block: most queries and keys. source: 'static', 'measured', 'default'."""

  block: tuple[int, int]
  source: str
  reason: str


def call_of(q_BTNH, v_BSKV, segments, mask):
  """`Call` of an attention with these arrays."""
  masked = mask.causal or mask.window > 0 or segments is not None
  head = max(q_BTNH.shape[-1], v_BSKV.shape[-1])
  return Call(head, str(jnp.dtype(q_BTNH.dtype)), bool(masked))


def choose(platform, which, call):
  """`BlockChoice` for a pass: from the table, else from BLOCKS, and why.

  Args:
    platform: key of BLOCKS. which: pass. call: Call.
  """
  kind = call.device or registry.current_target().device_kind
  mask = block_table.MASKS[call.masked]
  key = block_table.Key('attention', which, kind, call.head, call.dtype, mask)
  row = block_table.find(key)
  if row is not None:
    return BlockChoice(row.block, row.source, row.report())
  reason = f'no row for {kind}, head size {call.head}, {call.dtype}, {mask}'
  return BlockChoice(BLOCKS[platform][which], 'default', reason)


def split(length, bound, unit):
  """Tokens per block: a multiple of `unit`, near `bound`, little padding."""
  count = math.ceil(length / bound)
  return math.ceil(math.ceil(length / count) / unit) * unit


@dataclasses.dataclass(frozen=True)
class BlockPlan:
  """One call cut into blocks.

  q_info, k_info: (B, 2, padded T | S) int32 rows segment, order. A token that
    sees nothing has segment -1 as a query and 0 as a key.
  kinds: (B, R, C) int32. most_blocks: static bound on the visits of a batch
    entry by rows and by columns (`flat`).
  segments: must a partial block compare segments?
  """

  mask: Any
  block_q: int
  block_k: int
  q_info: Any
  k_info: Any
  kinds: Any
  most_blocks: tuple[int, int]
  segments: bool

  @property
  def static(self):
    return isinstance(self.kinds, np.ndarray)

  @property
  def padded(self):
    return self.q_info.shape[2], self.k_info.shape[2]

  def present(self):
    """The kinds that can occur: a kernel has a branch for each, no more."""
    return tuple(
      kind for kind in (2, 1) if not self.static or (self.kinds == kind).any()
    )


def plan(shape, segments, order, mask, blocks):
  """`BlockPlan` of (T, S), cut into blocks of (queries, keys) tokens."""
  (t, s), (bq, bk) = shape, blocks
  if not (mask.causal or mask.window):
    order = None  # nothing reads it
  tp, sp = math.ceil(t / bq) * bq, math.ceil(s / bk) * bk
  infos = _info(t, tp, segments, order, 0), _info(s, sp, segments, order, 1)
  kinds = block_kinds(mask, *infos, bq, bk)
  bound = kinds
  if not isinstance(kinds, np.ndarray):
    bound = np.ones(kinds.shape, np.int32)
    if order is None:
      alone = _info(t, tp, None, None, 0), _info(s, sp, None, None, 1)
      bound = block_kinds(mask, *alone, bq, bk)
  visits = lambda x: int(np.maximum(1, (x[0] > 0).sum(-1)).sum())
  return BlockPlan(
    mask,
    bq,
    bk,
    *infos,
    kinds,
    (visits(bound), visits(bound.swapaxes(1, 2))),
    # A key past the end comes after every query: causality hides it.
    segments is not None or (s != sp and not mask.causal),
  )


def _info(length, padded, segments, order, side):
  """(B, 2, padded) segment and order of the tokens of one side."""
  xp = np
  segment = np.ones((1, length), np.int32)
  place = np.arange(length, dtype=np.int32)[None]
  if segments is not None:
    xp = jnp
    segment = jnp.where(segments[side] > 0, segments[side], 0 if side else -1)
  if order is not None:
    xp, place = jnp, order[side]
  b = max(segment.shape[0], place.shape[0])
  rows = [xp.broadcast_to(x, (b, length)) for x in (segment, place)]
  pad = [(0, 0), (0, padded - length)]
  if side == 0:  # the last query again: what it gets is cut off
    rows = [xp.pad(x, pad, mode='edge') for x in rows]
  else:
    fills = zip(rows, (0, _FAR), strict=True)
    rows = [xp.pad(x, pad, constant_values=fill) for x, fill in fills]
  return xp.stack(rows, 1).astype(np.int32)


def block_kinds(mask, q_info, k_info, block_q, block_k):
  """(B, R, C) int32 kinds from per-block bounds; NumPy if both infos are."""
  static = isinstance(q_info, np.ndarray) and isinstance(k_info, np.ndarray)
  xp = np if static else jnp

  def bounds(info, block) -> Any:
    x = info.reshape(info.shape[0], 2, -1, block)
    live = x[:, 0] > 0
    low = lambda x: xp.where(live, x, _FAR).min(-1)
    high = lambda x: xp.where(live, x, -_FAR).max(-1)
    ends = [f(x[:, i]) for i in (0, 1) for f in (low, high)]
    return *ends, live.all(-1)

  rows = (x[:, :, None] for x in bounds(q_info, block_q))
  cols = (x[:, None, :] for x in bounds(k_info, block_k))
  doc_q0, doc_q1, q0, q1, all_q = rows
  doc_k0, doc_k1, k0, k1, all_k = cols
  some = (doc_q0 <= doc_k1) & (doc_k0 <= doc_q1)
  full = (doc_q0 == doc_q1) & (doc_k0 == doc_k1) & (doc_q0 == doc_k0)
  full = full & all_q & all_k
  if mask.causal:
    some, full = some & (k0 <= q1), full & (k1 <= q0)
  if mask.window:
    some = some & (q0 - k1 < mask.window)
    full = full & (q1 - k0 < mask.window)
  return xp.where(full & some, 2, xp.where(some, 1, 0)).astype(np.int32)


# An entry of `flat` is row << 17 | column << 4 | last << 3 | first << 2 | kind.
MOST_COLUMNS = 2**13
ROW = lambda e: e >> 17
COLUMN = lambda e: (e >> 4) & (MOST_COLUMNS - 1)
KIND = lambda e: e & 3
FIRST = lambda e: (e & 4) != 0
LAST = lambda e: (e & 8) != 0


def flat(kinds, bound):
  """Visible blocks row by row -> (B * P,) packed entries, steps, P.

  Every row has an entry, so that its result is written: one of kind 0 if the
  row sees nothing. `steps` (a number, or an array if the mask is data) is the
  most entries of a batch entry; a shorter list ends with entries that do
  nothing, on the blocks that are loaded already. `bound`: P if it is data.
  """
  xp: Any = np if isinstance(kinds, np.ndarray) else jnp
  b, r, c = kinds.shape
  none = kinds.max(-1, keepdims=True) == 0
  live = (kinds > 0) | (none & (np.arange(c) == 0))
  seen = xp.cumsum(live, -1)
  first, last = live & (seen == 1), live & (seen == seen[..., -1:])
  place = (np.arange(r)[:, None] << 17) + (np.arange(c)[None] << 4)
  entry = place + (last << 3) + (first << 2) + kinds
  entry, live = entry.reshape(b, -1), live.reshape(b, -1)
  front = xp.argsort(~live, -1, stable=True)
  entry, count = xp.take_along_axis(entry, front, -1), live.sum(-1)
  tail = xp.take_along_axis(entry, (count - 1)[:, None], -1) & ~15
  entry = xp.where(np.arange(r * c)[None] < count[:, None], entry, tail)
  steps = count.max()
  p, steps = (int(steps),) * 2 if xp is np else (bound, steps.astype(np.int32))
  return entry[:, :p].astype(np.int32).reshape(-1), steps, p


def lists(kinds):
  """(B, R, C) columns of each row, full blocks first, then partial; and counts.

  counts: (B, R, 2), how many are full and how many are visible.
  """
  xp = np if isinstance(kinds, np.ndarray) else jnp
  columns = xp.argsort(-kinds, -1, stable=True).astype(np.int32)
  counts = xp.stack([(kinds == 2).sum(-1), (kinds > 0).sum(-1)], -1)
  return jnp.asarray(columns), jnp.asarray(counts.astype(np.int32))


# --------------------------------------------------------- in a kernel's block

# Which axes a product sums over: x y, x y', x' y.
NN, NT, TN = (((i,), (j,)) for i, j in ((1, 0), (1, 1), (0, 0)))


def dot(x, y, axes, batch=()):
  """Product in float32; of float32 blocks without rounding them to less."""
  precision = None
  if x.dtype == jnp.float32:
    precision = jax.lax.Precision.HIGHEST
  return jax.lax.dot_general(
    x, y, (axes, (batch, batch)), precision, preferred_element_type=jnp.float32
  )


def logits(mask, s):
  """q.k -> base-2 logits and their slope without the scale (None: 1)."""
  if not mask.softcap:
    return s * (mask.scale * LOG2E), None
  tanh = jnp.tanh(s * (mask.scale / mask.softcap))
  return tanh * (mask.softcap * LOG2E), 1 - tanh * tanh


def visible(plan_, q, k):
  """Bool of a partial block; q, k: (segment, order) that broadcast.

  None: no rule hides anything, so that there is no partial block.
  """
  rules = [q[0] == k[0]] if plan_.segments else []
  if plan_.mask.causal:
    rules.append(k[1] <= q[1])
  if plan_.mask.window:
    rules.append(q[1] - k[1] < plan_.mask.window)
  return functools.reduce(jnp.logical_and, rules) if rules else None


def softmax_end(m, total):
  """Maximum (base 2) and sum of rows -> (what divides o, natural lse)."""
  none = total == 0
  total = jnp.where(none, 1.0, total)
  return total, jnp.where(none, NEG, m / LOG2E + jnp.log(total))


def base2(lse):
  """lse for the backward kernels: base 2, +|NEG| on rows that see nothing."""
  return jnp.where(lse <= FLOOR, -NEG, lse * LOG2E)


# ------------------------------------------------------------------- the call


def line(x_BTN, length, fill=0.0):
  """(B, N, padded T)."""
  return varying.pad(x_BTN.transpose(0, 2, 1), length, 2, fill)


def cost(which, plan_, q_BTNH, v_BSKV):
  """pl.CostEstimate of one pass ('forward', 'dq' or 'dkv').

  Per visible pair of blocks and query head the products s = q k' and, in a
  backward pass, dp = do v'; then o = p v, dq = ds k, or dk = ds' q and
  dv = p' do. Blocks of the inner side are read again for every pair, those of
  the outer side once. If the mask is data, the bound on the pairs is counted.
  """
  (b, _, n, h), (_, _, k, width) = q_BTNH.shape, v_BSKV.shape
  tp, sp = plan_.padded
  pairs = b * n * plan_.most_blocks[which == 'dkv']
  if plan_.static:
    pairs = b * n * int((plan_.kinds > 0).sum())
  area = plan_.block_q * plan_.block_k
  narrow, wide = {'forward': (1, 1), 'dq': (2, 1), 'dkv': (2, 2)}[which]
  row, column = b * n * tp, b * k * sp
  inner = (plan_.block_q if which == 'dkv' else plan_.block_k) * (h + width)
  outer = {
    'forward': row * (h + width),
    'dq': row * (2 * h + width),
    'dkv': 2 * column * (h + width),
  }[which]
  return pl.CostEstimate(
    flops=2 * pairs * area * (narrow * h + wide * width),
    transcendentals=pairs * area * (2 if plan_.mask.softcap else 1),
    bytes_accessed=(pairs * inner + outer) * q_BTNH.dtype.itemsize,
  )
