"""Which tokens a context shard holds, and which block pairs can be visible.

All of it is static: NumPy on the host, before anything is traced.

    contiguous   rank r holds tokens r T .. (r + 1) T - 1
    zigzag       the length is cut into 2 n runs; rank r holds r and 2 n - 1 - r
    striped      rank r holds r, r + n, r + 2 n, ...

Causal attention over contiguous shards leaves the first rank idle most of the
time: the busiest rank has 1.8 times the mean at n = 8. Zigzag and striped give
all ranks the same; but every striped block touches the diagonal, so it computes
1.5 times the visible entries at length 4096, zigzag 1.06. With a window on all
layers contiguous is best: a ring then ends after ceil((window - 1) / T) hops.
(Zigzag: Megatron-LM's context parallelism. Striped: arXiv:2311.09431.)
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from paraxis.configs.base import errors

LAYOUTS = ('zigzag', 'contiguous', 'striped')


def runs(layout: str) -> int:
  """Runs of consecutive tokens in a shard."""
  return 2 if layout == 'zigzag' else 1


def divisor(layout: str, n: int) -> int:
  """What must divide the length."""
  return n * runs(layout)


def order(layout: str, n: int, length: int) -> np.ndarray:
  """(n, T) int: the global index of each local token of each rank.

  Raises:
    errors.UserError: an unknown layout, or a length that does not divide.
  """
  if layout not in LAYOUTS:
    raise errors.UserError(
      f'mesh.context_order={layout} is not one of {", ".join(LAYOUTS)}.'
    )
  parts = divisor(layout, n)
  if length % parts:
    below = length // parts * parts
    near = f'{below} and {below + parts}' if below else f'{parts}'
    raise errors.UserError(
      f'data.sequence_length={length} does not divide into {parts} equal runs '
      f'(mesh.context={n}, order {layout}); the nearest that do: {near}.'
    )
  ids = np.arange(length)
  if layout == 'zigzag':
    cut = ids.reshape(2 * n, -1)
    return np.concatenate([cut[:n], cut[::-1][:n]], 1)
  return ids.reshape(-1, n).T if layout == 'striped' else ids.reshape(n, -1)


def permutation(layout: str, n: int, length: int) -> np.ndarray:
  """(length,) int: row[:, permutation] is what the host puts on the mesh."""
  return order(layout, n, length).reshape(-1)


def resolve_order(layout, masks):
  """'auto' -> 'contiguous' if every layer's mask has a window, else 'zigzag'.

  Args:
    layout: 'auto' or a layout, which is returned as it is.
    masks: the attention masks of all layers (pallas_kernels.attention.op.Mask).
  """
  if layout != 'auto':
    return layout
  windows = [bool(mask.window) for mask in masks]
  return 'contiguous' if windows and all(windows) else 'zigzag'


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
  """The block pairs of every (q shard, k shard), for `shards` equal shards.

  run: tokens of one run once it is padded to whole blocks. block: tokens of a
  block, a divisor of run. count: blocks of a shard. table: (X, P, 2) int32, the
  different lists of pairs, -1 padded. which: (shards, shards) int32, the list
  of each (q shard, k shard). hops: steps of a ring, its own shard included; no
  q shard sees a k shard further behind.
  """

  run: int
  block: int
  count: int
  table: Any
  which: Any
  hops: int


@functools.lru_cache(maxsize=64)
def blocks(layout: str, n: int, length: int, mask, shards: int) -> Blocks:
  """-> Blocks. The n ranks, in order, make up `shards` equal shards.

  A pair is listed if one of its tokens may see one of the other by order and
  mask alone; documents are data and are compared at run time.
  """
  tokens = length // divisor(layout, n)  # of a run
  count = math.ceil(tokens / mask.block)
  block = math.ceil(tokens / count)
  run = count * block
  ids = order(layout, n, length).reshape(n, runs(layout), -1)
  tail = ((0, 0), (0, 0), (0, run - ids.shape[2]))
  # A run's padding repeats its last token, which changes no bound.
  ids = np.pad(ids, tail, 'edge').reshape(shards, -1, block)
  low, high = ids.min(-1), ids.max(-1)
  lists, which = {}, np.zeros((shards, shards), np.int32)
  far = 0
  for q, k in np.ndindex(shards, shards):
    ok = np.ones((ids.shape[1],) * 2, bool)
    if mask.causal:
      ok &= np.subtract.outer(high[q], low[k]) >= -mask.ahead
    if mask.window:
      ok &= np.subtract.outer(low[q], high[k]) < mask.window
    found = np.argwhere(ok).astype(np.int32)
    index, _ = lists.setdefault(ok.tobytes(), (len(lists), found))
    which[q, k] = index
    if len(found):
      far = max(far, (q - k) % shards)
  most = max(1, *(len(found) for _, found in lists.values()))
  table = np.full((len(lists), most, 2), -1, np.int32)
  for index, found in lists.values():
    table[index, : len(found)] = found
  return Blocks(run, block, ids.shape[1], table, which, far + 1)
