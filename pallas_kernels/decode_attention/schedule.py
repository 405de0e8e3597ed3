"""An even division of rows of unequal length over workers, and its merge.

Row b reads slots begin_b .. end_b - 1 of its cache, in tiles
floor(begin_b / tile) .. ceil(end_b / tile) - 1. The tiles of all rows form one
line of n; worker w of W takes tiles

    floor(w n / W) .. floor((w + 1) n / W) - 1

whatever rows they belong to, so that no worker has more than one tile over
another (LeanAttention, arXiv:2405.10480, section 4; stream-K,
arXiv:2301.03598). The starts of rows and of workers cut the line into at most
B + W pieces: consecutive tiles of one row on one worker. A piece gives a
partial (o, lse) in a slot of its own, nothing is added up by two workers, and
`merge_pieces` joins the slots of a row:

    lse = log sum_p e^lse_p       o = sum_p e^(lse_p - lse) o_p

Cost of the tables: B ceil(S / tile) + 5 (B + W) integers. All functions take
NumPy arrays (and answer in NumPy) or jax arrays.

Legend: B rows, P = B + W pieces, W workers, N heads, H head size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.attention import xla as attention_xla


class TileSchedule(NamedTuple):
  """Which worker takes which tile; all int32, tiles counted along the line.

  worker: (W + 1,) first tile of each worker, and n.
  worker_piece: (W + 1,) first piece of each worker, and of nobody.
  first, end: (P,) tiles of a piece: first .. end - 1. Some are empty.
  row: (P,) of a piece. origin: (P,) where slot 0 of its row would be on the
    line: tile t of the line is tile t - origin of the row.
  piece: (B ceil(S / tile),) of a tile; from n on, without meaning.
  """

  worker: Any
  worker_piece: Any
  first: Any
  end: Any
  row: Any
  origin: Any
  piece: Any


def make(ends_B, slots, tile, workers, begins_B=None):
  """`TileSchedule` of rows whose slots from begins_B up to ends_B are read.

  Args:
    ends_B: int32, 0 .. slots each; not checked.
    begins_B: int32, 0 .. end; None: 0. A row that ends there is not read.
    slots: S, the most that a row can hold. tile: slots of a tile.
    workers: W, at most 2**15; B * ceil(S / tile) must stay below 2**31.
  """
  xp = np if isinstance(ends_B, np.ndarray) else jnp
  rows = ends_B.shape[0]
  int32 = lambda x: x.astype(xp.int32)
  begins_B = xp.zeros_like(ends_B) if begins_B is None else begins_B
  skipped = int32(begins_B) // tile
  tiles = (int32(ends_B) + tile - 1) // tile - skipped
  tiles = xp.where(ends_B > begins_B, tiles, 0)
  zero = xp.zeros(1, xp.int32)
  start = int32(xp.concatenate([zero, xp.cumsum(tiles)]))
  total, start = start[-1], start[:-1]
  w = xp.arange(workers + 1, dtype=xp.int32)
  # floor(w n / W) without the product w n, which may not fit in 32 bits.
  worker = int32(w * (total // workers) + w * (total % workers) // workers)
  first = xp.sort(xp.concatenate([start, worker[:-1]]))
  end = xp.concatenate([first[1:], total[None]])
  # All at once: a binary search is a loop of launches on a GPU.
  way = {} if xp is np else dict(method='compare_all')
  find = lambda *given, **how: int32(xp.searchsorted(*given, **how))
  # Of equal starts the last one is not empty.
  row = xp.clip(find(start, first, 'right', **way) - 1, 0, rows - 1)
  line = xp.arange(rows * (-(-slots // tile)), dtype=xp.int32)
  piece = xp.clip(find(first, line, 'right') - 1, 0, len(first) - 1)
  pieces = find(first, worker, 'left', **way)
  origin = start - skipped
  return TileSchedule(worker, pieces, first, end, row, origin[row], piece)


def merge_pieces(o_PNH, lse_PN, schedule, rows):
  """Partial results of pieces -> (o_BNH, lse_BN), float32.

  The slot of an empty piece may hold any value, even NaN. A row without tiles
  gets o = 0, lse = attention.NEG. Cost: B P N weights, 2 B P N H operations.
  """
  full = (schedule.end > schedule.first)[:, None]
  lse_PN = jnp.where(full, lse_PN, varying.NEG)
  o_PNH = jnp.where(full[..., None], o_PNH, 0)
  # Every row looks at every piece, for P is small: sums by scatters, and the
  # search of `make`, took a GPU .2 ms for 64 rows.
  mine = schedule.row == jnp.arange(rows, dtype=jnp.int32)[:, None]  # (B, P)
  lse_BPN = jnp.where(mine[..., None], lse_PN, varying.NEG)
  top = lse_BPN.max(1)
  weight = jnp.where(full & mine[..., None], jnp.exp(lse_BPN - top[:, None]), 0)
  o = jnp.einsum('bpn,pnh->bnh', weight, o_PNH, precision='highest')
  return attention_xla.finish(o, top, weight.sum(1))


def merge(a, b):
  """Joins (o, lse) of two disjoint sets of keys for the same queries.

  o: (..., H), lse: (...). Where neither sees a key: o = 0, lse = NEG.
  """
  top = jnp.maximum(a[1], b[1])
  parts = []
  for o, lse in (a, b):
    seen = lse > varying.FLOOR
    weight = jnp.where(seen, jnp.exp(lse - top), 0)
    parts.append((o * weight[..., None], weight))
  (x, wx), (y, wy) = parts
  return attention_xla.finish(x + y, top, wx + wy)


def merge_shards(o, lse, axes):
  """`merge` of the (o, lse) of every shard, over manual mesh axes."""
  wide = jnp.promote_types(o.dtype, lse.dtype)
  top = jnp.maximum(jax.lax.pmax(lse, axes), varying.FLOOR)
  weight = jnp.where(lse > varying.FLOOR, jnp.exp(lse - top), 0)
  total = jax.lax.psum(weight, axes)
  some = jnp.where(total > 0, total, 1)
  sums = jax.lax.psum(o.astype(wide) * weight[..., None], axes)
  lse = jnp.where(total > 0, top + jnp.log(some), varying.NEG)
  return (sums / some[..., None]).astype(o.dtype), lse
