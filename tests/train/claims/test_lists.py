"""Lists: what is right, and how often a model that knows all is right.

Legend: n items, k tokens that a call draws.
"""

import collections
import itertools
import math

import numpy as np
import pytest

from paraxis.train.claims import lists
from paraxis.train.claims import on_lists
from paraxis.train.claims import tasks

TASK = tasks.make('lists', least=4, most=8, items=12)


def test_documents_are_prompt_answer_and_padding():
  batch = tasks.draw(TASK, 64, 0)
  assert batch.tokens.shape == (64, 18)
  seen = set()
  for row in range(64):
    ids, part = batch.targets[row], batch.weights[row] > 0
    operation = lists.OPERATIONS[ids[0] - TASK.items]
    n = int(part.sum())
    seen.add((operation, n))
    begin = ids[: n + 2].tolist()
    assert begin == TASK.prompt(operation, begin[1:-1])
    assert len(set(begin[1:-1])) == n
    assert lists.is_right(TASK, operation, begin[1:-1], ids[part])
    assert (batch.segments[row] == (np.arange(18) < 2 * n + 2)).all()
    assert part.tolist() == [n + 2 <= i < 2 * n + 2 for i in range(18)]
    assert (batch.tokens[row, 1:] == ids[:-1]).all()
  assert {o for o, _ in seen} == set(lists.OPERATIONS)
  assert {n for _, n in seen} == {4, 5, 6, 7, 8}
  other = tasks.draw(TASK, 64, 1)
  assert (other.targets != batch.targets).any()


def test_the_last_token_of_an_answer_is_in_whole_rows():
  task = tasks.make('lists', least=4, most=8, items=12, whole_rows=True)
  batch = tasks.draw(task, 64, 0)
  assert batch.tokens.shape == (64, 19)
  few = tasks.draw(TASK, 64, 0)
  for row in range(64):
    n = int(batch.weights[row].sum())
    own = batch.segments[row] > 0
    assert own.tolist() == [i < 2 * n + 3 for i in range(19)]
    last = batch.targets[row, 2 * n + 1]
    assert batch.tokens[row, own][-1] == last
    assert (few.segments[row] > 0).sum() == 2 * n + 2


@pytest.mark.parametrize('operation, right, wrong', [
  ('copy', [[3, 1, 2]], [[1, 3, 2], [3, 1, 1]]),
  ('reverse', [[2, 1, 3]], [[3, 1, 2]]),
  ('sort', [[1, 2, 3]], [[3, 2, 1]]),
  ('shuffle', [[1, 2, 3], [2, 3, 1]], [[1, 1, 3], [1, 2, 4]]),
  ('replace', [[18, 1, 2], [3, 1, 18]],
   [[3, 1, 2], [18, 18, 2], [3, 2, 18], [3, 1, 4]]),
])  # fmt: skip
def test_what_is_right(operation, right, wrong):
  assert TASK.replacement == 18
  judge = lambda answer: lists.is_right(TASK, operation, [3, 1, 2], answer)
  assert all(map(judge, right)) and not any(map(judge, wrong))


def _open(operation, items, answer):
  """{place: {token: probability}} of open places, given those that are not."""
  n = len(items)
  places = [i for i in range(n) if i not in answer]
  every = set(itertools.permutations(items))
  if operation == 'replace':
    every = {
      tuple(-1 if i == j else x for i, x in enumerate(items)) for j in range(n)
    }
  left = [x for x in every if all(x[i] == t for i, t in answer.items())]
  if not left:
    return None
  share = lambda i, t: sum(x[i] == t for x in left) / len(left)
  return {i: {x[i]: share(i, x[i]) for x in left} for i in places}


@pytest.mark.parametrize('counts', [[4], [1, 1, 1, 1], [2, 2], [1, 3], [3, 1]])
@pytest.mark.parametrize('operation', ['shuffle', 'replace'])
def test_ceilings_are_those_of_a_model_that_knows_all(operation, counts):
  """Summed over all draws from the true probabilities, in a random order."""
  items, rng = (0, 1, 2, 3), np.random.default_rng(len(counts))
  order = rng.permutation(4).tolist()

  def chance(answer, left, counts):
    if not counts:
      return float(_open(operation, items, answer) is not None)
    each = _open(operation, items, answer)
    if each is None:
      return 0.0
    now, total = left[: counts[0]], 0.0
    for drawn in itertools.product(*(each[i].items() for i in now)):
      p = math.prod(q for _, q in drawn)
      more = answer | {i: t for i, (t, _) in zip(now, drawn, strict=True)}
      total += p * chance(more, left[counts[0] :], counts[1:])
    return total

  want = chance({}, order, counts)
  assert abs(lists.ceiling(operation, counts) - want) < 1e-12
  assert (want == 1) == (counts == [1, 1, 1, 1])


@pytest.mark.parametrize('counts', [[4], [1, 1, 1, 1], [2, 0, 2], [1, 3]])
@pytest.mark.parametrize('operation', ['copy', 'shuffle', 'replace'])
def test_correlations_are_sums_over_right_answers(operation, counts):
  """Entropies of tokens alone less that of a call's tokens, given those of
  calls before, weighted by how many right answers have these."""
  items = (0, 1, 2, 3)
  every = [items] if operation == 'copy' else [
    *itertools.permutations(items)
  ] if operation == 'shuffle' else [
    tuple(-1 if i == j else x for i, x in enumerate(items)) for j in range(4)
  ]  # fmt: skip

  def entropy(rows):
    share = np.unique(rows, axis=0, return_counts=True)[1] / len(rows)
    return -(share * np.log(share)).sum()

  want, done = 0.0, 0
  for k in counts:
    groups = collections.defaultdict(list)
    for answer in every:
      groups[answer[:done]].append(answer[done : done + k])
    for rows in map(np.array, groups.values()):
      alone = sum(entropy(rows[:, [i]]) for i in range(k))
      together = entropy(rows) if k else 0.0
      want += len(rows) / len(every) * (alone - together)
    done += k
  found = on_lists.correlation(operation, counts)
  assert abs(found - want) < 1e-12
  likely = lists.ceiling(operation, counts)
  gap = likely - math.exp(-found)
  assert abs(gap) < 1e-12 if operation == 'shuffle' else gap >= -1e-12


def test_ceilings_in_closed_form():
  for n in (4, 6, 8):
    at_once = lists.ceiling('shuffle', [n])
    assert abs(at_once - math.factorial(n) / n**n) < 1e-15
    assert abs(lists.ceiling('replace', [n]) - (1 - 1 / n) ** (n - 1)) < 1e-15
    # A call that makes nothing, as one that commits a block, changes nothing.
    assert lists.ceiling('shuffle', [2, 0, n - 2]) == lists.ceiling(
      'shuffle', [2, n - 2]
    )
    assert lists.ceiling('copy', [n]) == lists.ceiling('sort', [n]) == 1
