"""Synthetic rows are what loops over their tokens say."""

import types

import numpy as np
import pytest

from paraxis.train.claims import tasks

PARITY = tasks.make('parity', length=16, mix=(4, 8))
HOPS = tasks.make('hops', length=24, symbols=3, hops=2, mix=(8, 24))


def documents(batch):
  """Yields (tokens, targets, weights) of every document, as lists."""
  for row in range(len(batch.tokens)):
    for document in sorted(set(batch.segments[row].tolist())):
      here = batch.segments[row] == document
      assert batch.positions[row][here].tolist() == list(range(here.sum()))
      yield [
        x[row][here].tolist()
        for x in (batch.tokens, batch.targets, batch.weights)
      ]


def odd(tokens):
  """The answers of parity: a sum of the bits so far."""
  return [2 + sum(tokens[: t + 1]) % 2 for t in range(len(tokens))]


def hop(tokens, t, hops):
  """The token that so many hops from token t lead to; None: nowhere."""
  for _ in range(hops):
    after = {tokens[i]: i + 1 for i in range(t)}  # the last occurrence of each
    if tokens[t] not in after:
      return None
    t = after[tokens[t]]
  return tokens[t]


@pytest.mark.parametrize('task', [PARITY, HOPS])
def test_rows_are_a_function_of_the_seed(task):
  rows = lambda *given: tasks.draw(task, 6, *given)
  assert all(map(np.array_equal, rows(0), rows(0)))
  for other in (rows(1), rows(0, True)):
    assert (rows(0).tokens != other.tokens).any()
  for batch in (rows(0), rows(0, True)):
    assert batch.tokens.shape == (6, task.length)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    assert batch.denominator == batch.weights.sum()
    assert max(batch.tokens.max(), batch.targets.max()) < task.vocabulary


def test_parity_counts_ones():
  mixed, held = (tasks.draw(PARITY, 6, 0, held) for held in (False, True))
  sizes = [len(t) for t, _, _ in documents(mixed)]
  assert sizes == [4] * 3 * 4 + [8] * 3 * 2
  assert [len(t) for t, _, _ in documents(held)] == [16] * 6
  for batch in (mixed, held):
    for tokens, targets, weights in documents(batch):
      assert targets == odd(tokens) and set(weights) == {1}
  # Where documents are not kept apart, answers are others.
  assert held.targets[0].tolist() != odd([1, *held.tokens[0].tolist()])[1:]


def test_hops_follow_a_dictionary():
  mixed, held = (tasks.draw(HOPS, 6, 0, held) for held in (False, True))
  assert [len(t) for t, _, _ in documents(mixed)] == [8] * 9 + [24] * 3
  wrong = 0
  for tokens, targets, weights in [*documents(mixed), *documents(held)]:
    for t, target in enumerate(targets):
      want = hop(tokens, t, 2)
      assert weights[t] == (want is not None)
      if weights[t]:
        assert target == 3 + want
        wrong += target != 3 + hop(tokens, t, 1)
  assert wrong > 20  # one hop is another question
  one = tasks.make('hops', length=8, symbols=2, hops=1)
  tokens = np.array([[0, 1, 0, 0, 1, 1, 0, 1]])
  fixed = types.SimpleNamespace(integers=lambda *given: tokens)
  _, targets, weights = one.document(8, 1, fixed, False)
  assert weights.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]]
  assert targets[0, 2:].tolist() == [3, 2, 2, 3, 3, 2]


def test_shares_of_right_answers():
  batch = tasks.draw(PARITY, 3, 0, held_out=True)
  hit = batch.positions < 12  # all of the 8 in training, 4 of 8 beyond
  assert PARITY.right(hit, batch).tolist() == [0.5, 1.0]
  assert PARITY.right(~hit, batch).tolist() == [0.5, 0.0]
  batch = tasks.draw(HOPS, 3, 0, held_out=True)
  asked = batch.weights > 0
  assert HOPS.right(asked, batch).tolist() == [1.0]
  assert HOPS.right(~asked, batch).tolist() == [0.0]


def test_a_mutated_task_is_seen(monkeypatch):
  real = tasks.Parity.document

  def even(self, *given):
    tokens, targets, weights = real(self, *given)
    return tokens, 5 - targets, weights

  monkeypatch.setattr(tasks.Parity, 'document', even)
  with pytest.raises(AssertionError):
    test_parity_counts_ones()
