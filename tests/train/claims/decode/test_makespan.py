"""Simulated time of drafting beside judging."""

import claim_cases
import numpy as np
import pytest

from paraxis.train.claims.decode import makespan


def test_pearl_is_faster_and_waiting_is_not():
  right, _ = claim_cases.falls('pearl', 'in_turn', tokens=3000)
  low, high = map(float, right.measured.removesuffix(' x').split(' to '))
  assert 1.3 <= low <= high < 1.52


def test_spans_are_closed_forms():
  for calls, width, c in ((1, 3, 4), (5, 4, 4), (3, 6, 4), (4, 2, 7)):
    assert makespan.span(calls, width, c, False) == calls * (width + c)
    assert makespan.span(calls, width, c, True) == calls * max(width, c)


@pytest.mark.parametrize('p', (0.5, 0.9))
def test_tokens_a_call_are_those_of_the_formulas(p):
  """Plain: arXiv:2211.17192, equation 1. PEARL: a chain of two states."""
  tokens, width = 200_000, 4
  plain = tokens / makespan.plain_calls(tokens, width, p, 0)
  assert plain == pytest.approx((1 - p ** (width + 1)) / (1 - p), rel=0.02)
  ours = tokens / makespan.pearl_calls(tokens, width, p, 0)
  stay, enter = p**width, p
  share = enter / (enter + 1 - stay)  # of calls that judge drafts of before
  made = sum(p**k for k in range(width))
  assert ours == pytest.approx(share * made + (1 - share), rel=0.02)


def test_a_run_ends_at_the_first_that_is_rejected():
  assert makespan._run(iter([True, True, False, True]), 3) == 2
  assert makespan._run(iter([True] * 5), 3) == 3
  assert np.mean([next(makespan._coins(0.0, s)) for s in range(9)]) == 0
