"""Chunks: their shape, and boxes of them in which no chunk is read twice."""

import itertools
import math

import jax
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import chunks


@pytest.mark.parametrize(
  'whole, written, most, wanted',
  [
    # Every axis in as many pieces: rows of a writer become squares.
    ((1024, 1024), (128, 1024), 2**16, (128, 128)),
    ((1024, 1024), (1024, 128), 2**16, (128, 128)),
    ((1024, 1024), (128, 1024), 2**18, (128, 512)),
    ((1024, 1024), (128, 1024), 0, (128, 1024)),
    ((1024, 1024), (128, 1024), 2**30, (128, 1024)),
    ((12, 768, 12, 64), (12, 768, 12, 64), 2**19, (6, 192, 6, 16)),
    ((1031, 64), (1031, 64), 2**14, (1031, 2)),  # a prime is cut last
    ((1031,), (1031,), 4096, (1,)),
    ((), (), 4096, ()),
  ],
)
def test_shapes(whole, written, most, wanted):
  assert chunks.shape(whole, written, 4, most) == wanted


def test_chunks_divide_what_is_written_and_are_within_the_bound():
  rng = np.random.default_rng(0)
  for _ in range(300):
    pieces = rng.integers(1, 5, rng.integers(1, 4))
    written = tuple(map(int, rng.integers(1, 200, len(pieces))))
    whole = [int(a * b) for a, b in zip(pieces, written, strict=True)]
    most = int(rng.integers(4, 2**16))
    found = chunks.shape(whole, written, 4, most)
    assert all(a % b == 0 for a, b in zip(written, found, strict=True))
    assert 4 * math.prod(found) <= most
    # Of the rows of a block, too, as a step that is written again has them.
    rows = found[0], *written[1:]
    if tuple(whole) == written:
      assert chunks.shape(whole, rows, 4, most) == found


def boxes_of(whole, cuts):
  """The shards of an array whose axes are cut in so many pieces."""
  edges = [
    [(i * n // c, (i + 1) * n // c) for i in range(c)]
    for n, c in zip(whole, cuts, strict=True)
  ]
  return list(itertools.product(*edges))


def touched(box, chunk):
  """The places of the chunks that a box touches."""
  return set(
    itertools.product(
      *(range(a // c, -(-b // c)) for (a, b), c in zip(box, chunk, strict=True))
    )
  )


def test_each_chunk_is_in_one_cell_with_the_shards_that_touch_it():
  rng = np.random.default_rng(0)
  for _ in range(200):
    ndim = rng.integers(1, 4)
    whole = tuple(map(int, rng.integers(1, 30, ndim)))
    chunk = tuple(int(rng.integers(1, n + 1)) for n in whole)
    cuts = [int(rng.integers(1, min(n, 4) + 1)) for n in whole]
    shards = boxes_of(whole, cuts)
    mine = [shards[i] for i in rng.permutation(len(shards))[:4]]
    seen = []
    for box, meets in chunks.cells(whole, chunk, mine):
      inside = touched(box, chunk)
      seen += inside
      for i, shard in enumerate(mine):
        both = inside & touched(shard, chunk)
        assert both == (inside if i in meets else set())
    assert len(seen) == len(set(seen))
    assert set(seen) == set().union(*(touched(s, chunk) for s in mine))


def test_cells_are_few():
  """However many chunks there are."""
  whole, chunk = (2**20, 2**10), (8, 16)
  assert len(list(chunks.cells(whole, chunk, boxes_of(whole, (4, 2))))) == 8
  assert list(chunks.cells((), (), [()])) == [((), [0])]


def test_too_many_chunks():
  tree = {'x': jax.ShapeDtypeStruct((2**20, 2**12), np.float32)}
  chunks.check(0, tree)
  chunks.check(chunks.enough(tree), tree)
  with pytest.raises(
    errors.UserError, match=r'4194304 chunks.*least 34360, or'
  ):
    chunks.check(4096, tree)
