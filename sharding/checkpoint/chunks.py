"""Chunks of a stored array: which shape they get, and how a process reads them.

A chunk is what a reader fetches whole. Chunks divide a shard of the writer, and
without a bound are one; a process whose shards are cut along another axis then
reads all of every chunk that they touch, up to the whole array. `shape` makes
them smaller: the axis that is in the fewest pieces is cut next, by its smallest
prime factor, so that every axis is in about as many pieces, and shards that
divide those pieces read nothing else.

`cells` cuts an array for a process that holds several shards of it: into boxes
of whole chunks, as few as there are, each of which lies in the same shards.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
from typing import Any

from paraxis.configs.base import errors

MOST_CHUNKS = 10**6  # of a step: a reader holds a reference to each
_FEW = 8  # pieces that one cut makes, at most, while another axis can be cut

Box = tuple[tuple[int, int], ...]  # (first index, end) of each axis


def _factor(size):
  """The smallest prime factor of a size over 1."""
  return next(
    (f for f in range(2, math.isqrt(size) + 1) if size % f == 0), size
  )


def shape(
  whole: Sequence[int], written: Sequence[int], width: int, most: int
) -> tuple[int, ...]:
  """Shape of the chunks of an array.

  Args:
    whole: shape of the array. written: of the blocks that are written at once;
      chunks divide it.
    width: bytes of an element. most: bytes of a chunk; 0: a whole block.
  """
  sizes = [max(1, size) for size in written]

  def last(axis):  # what is smallest is cut first
    pieces = -(-whole[axis] // sizes[axis])
    return _factor(sizes[axis]) > _FEW, pieces, -sizes[axis]

  while most and width * math.prod(sizes) > most:
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if not axes:
      break
    axis = min(axes, key=last)
    sizes[axis] //= _factor(sizes[axis])
  return tuple(sizes)


def count(tree: Mapping[str, Any], most: int) -> int:
  """About how many chunks of at most so many bytes hold {path: array}."""
  return sum(-(-x.size * x.dtype.itemsize // most) for x in tree.values())


def check(most: int, tree: Mapping[str, Any]) -> None:
  """UserError: with that checkpoint.chunk_bytes `tree` is too many chunks."""
  if most and (chunks := count(tree, most)) > MOST_CHUNKS:
    raise errors.UserError(
      f'checkpoint.chunk_bytes={most} would be {chunks} chunks, more than '
      f'{MOST_CHUNKS}: give at least {enough(tree)}, or 0.'
    )


def enough(tree: Mapping[str, Any]) -> int:
  """Bytes of a chunk with which {path: array} is at most MOST_CHUNKS."""
  size = sum(x.size * x.dtype.itemsize for x in tree.values())
  return math.ceil(size / MOST_CHUNKS * 2)


def cells(
  whole: Sequence[int], chunk: Sequence[int], shards: Sequence[Box]
) -> Iterator[tuple[Box, list[int]]]:
  """Yields (a box of whole chunks, places in `shards` of those that meet it).

  A shard that meets a box touches every chunk of it. Chunks that no shard
  touches are in no box, the others in one.
  """
  axes = []
  for axis, (size, step) in enumerate(zip(whole, chunk, strict=True)):
    cuts = {0, size}
    for shard in shards:
      for edge in shard[axis]:
        cuts |= {edge // step * step, min(-(-edge // step) * step, size)}
    axes.append(list(itertools.pairwise(sorted(cuts))))
  for box in itertools.product(*axes):
    if meets := [i for i, s in enumerate(shards) if all(common(box, s))]:
      yield box, meets


def common(a: Box, b: Box) -> list[tuple[int, int] | None]:
  """What two boxes share, axis by axis; None: nothing."""
  out: list[tuple[int, int] | None] = []
  for (first, end), (other, stop) in zip(a, b, strict=True):
    first, end = max(first, other), min(end, stop)
    out.append((first, end) if first < end else None)
  return out
