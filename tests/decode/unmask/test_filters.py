"""Filters of canvases against loops, and the decoding that knows the end.

Legend: N rows, T tokens, C places of a canvas, V vocabulary.
"""

import numpy as np
import pytest
import unmask_cases

from paraxis.configs.base import errors
from paraxis.decode.unmask import filters

MASK = 9
RNG = np.random.default_rng(0)


def test_scores_are_a_loop_over_places():
  own, masks = filters.initial(6, 2), RNG.random((3, 6)) < 0.6
  own = {n: x + RNG.normal(0, 0.3, x.shape) for n, x in own.items()}
  c = RNG.random((3, 6))
  found = filters.score(own, c, masks)
  want = [unmask_cases.filtered(own, x) for x in np.where(masks, c, 1)]
  np.testing.assert_allclose(found, want, rtol=1e-5)
  assert not np.allclose(found, [unmask_cases.filtered(own, x) for x in c])


def _knows(rows, order):
  """A model that is right at a place once those before it in `order` are text;
  likeliest tokens and their probabilities."""

  def read(row):
    tokens, p = np.zeros_like(row), np.full(row.shape, 0.5)
    for i, j in np.ndindex(*row.shape):
      before = order[: order.index(j)] if j in order else []
      known = all(row[i, k] != MASK for k in before)
      tokens[i, j] = rows[i, j] if known else (rows[i, j] + 1) % MASK
      p[i, j] = 0.9 - 0.1 * (j in order and order.index(j))
    return tokens, p

  return read


def test_guided_calls_are_as_many_as_tokens_wait_for_each_other():
  rows = RNG.integers(0, MASK, (2, 7))
  calls, records = filters.guided(_knows(rows, [3, 5]), rows, 2, 5, MASK)
  assert calls.tolist() == [2, 2] and records.open.shape == (4, 5)
  # Two calls of each row: all but place 5, then it.
  assert records.open.sum(1).tolist() == [5, 5, 1, 1]
  assert records.right.sum(1).tolist() == [4, 4, 1, 1]
  at_once, _ = filters.guided(_knows(rows, []), rows, 2, 5, MASK)
  assert at_once.tolist() == [1, 1]
  two, found = filters.guided(_knows(rows, [3, 5]), rows, 2, 3, MASK)
  assert two.tolist() == [2, 2]  # 3 and 5 are in canvases of their own
  assert found.open.shape[1] == 3 and not found.open[-1, 2:].any()


def test_where_nothing_is_right_the_most_confident_place_is_told():
  rows = np.array([[1, 2, 3, 4]])
  wrong = lambda row: (row * 0, np.array([[0.1, 0.4, 0.9, 0.2]]))
  calls, records = filters.guided(wrong, rows, 0, 4, MASK)
  assert calls.tolist() == [4] and not records.right.any()
  assert [np.flatnonzero(~x).tolist() for x in records.open] == [
    [], [2], [1, 2], [1, 2, 3],
  ]  # fmt: skip


def _records(count=400):
  """A place is right if its neighbour is sure."""
  c = RNG.random((count, 4)).astype(np.float32)
  masks = RNG.random((count, 4)) < 0.9
  c = np.where(masks, c, 1)
  return filters.Records(c, masks, masks & (np.roll(c, 1, 1) > 0.5))


def test_a_filter_learns_what_a_threshold_cannot():
  learned, asked = _records(), _records()
  own = filters.fit(learned, 1500)
  right = lambda p: ((p > 0.5) == asked.right)[asked.open].mean()
  assert right(np.asarray(filters.score(own, *asked[:2]))) > 0.9
  assert right(asked.confidence) < 0.6
  none = filters.fit(learned, 0)
  assert right(np.asarray(filters.score(none, *asked[:2]))) < 0.7


def test_training_that_diverges_is_an_error():
  bad = _records(20)
  bad.confidence[0, 0] = np.nan
  with pytest.raises(errors.IntegrityError, match='the filter diverged'):
    filters.fit(bad._replace(open=np.ones_like(bad.open)), 40)
