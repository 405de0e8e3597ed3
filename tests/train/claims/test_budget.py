"""What fits a budget is run, the cheapest first; what does not is named."""

import itertools
import time

import pytest

from paraxis.configs.base import errors
from paraxis.train.claims import budget
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers

COSTS = {'dear': 1900, 'cheap': 5, 'middle': 60, 'also': 60}


@pytest.fixture
def ran(monkeypatch):
  """[(config, fresh)] in the order of running; a config takes 10 seconds."""
  index = [
    papers.Paper(name, 'T', {'cost': f'{cost:,} CPU-seconds'})
    for name, cost in COSTS.items()
  ]
  seen, clock = [], itertools.count(0, 10)
  monkeypatch.setattr(papers, 'index', lambda: index)
  monkeypatch.setattr(knockouts, 'forget', lambda: None)
  monkeypatch.setattr(time, 'process_time', lambda: next(clock))
  monkeypatch.setattr(
    harness, 'reproduce',
    lambda name, fresh: seen.append((name, fresh)) or 0,
  )  # fmt: skip
  return seen


def test_a_time_is_a_number_and_a_unit():
  assert [budget.seconds(t) for t in ('90s', '30m', '1.5h')] == [90, 1800, 5400]
  for wrong in ('30', 'm', '-3m', '3d', '3 m', '1e3s'):
    with pytest.raises(errors.UserError, match='number with s, m or h'):
      budget.seconds(wrong)


def test_all_are_run_without_a_budget(ran):
  said = []
  assert budget.reproduce(fresh=True, say=said.append) == errors.EXIT_OK
  assert ran == [(n, True) for n in ('cheap', 'also', 'middle', 'dear')]
  # 2,025 seconds by their headers; the clock says 10 for each, and one more.
  assert said[0] == '=== 4 configs take 0.6 CPU-hours by their headers'
  assert said[-1] == '=== 4 configs were run in 0.01 CPU-hours'


def test_what_does_not_fit_is_left_out(ran):
  said = []
  assert budget.reproduce('85s', say=said.append) == errors.EXIT_OK
  # 10 seconds are spent before each: 75 are left, then 65, then 55.
  assert [name for name, _ in ran] == ['cheap', 'also']
  assert said[-2:] == [
    'left out: middle: 60 CPU-seconds, 55 of 85 are left',
    'left out: dear: 1,900 CPU-seconds, 45 of 85 are left',
  ]


def test_a_budget_below_the_cheapest(ran):
  with pytest.raises(errors.UserError, match='^[^\n]*$') as caught:
    budget.reproduce('4s')
  text = str(caught.value)
  assert '4 CPU-seconds' in text and 'cheap) takes 5' in text and not ran
  assert '--budget=5s or more' in text


@pytest.mark.parametrize(
  'kind', (errors.UserError, errors.IntegrityError, errors.CrashError)
)
def test_a_config_that_fails_or_cannot_run_is_told(ran, monkeypatch, kind):
  def reproduce(name, fresh):
    if name == 'also':
      raise kind('too few devices')
    return {'cheap': errors.EXIT_SKIPPED, 'middle': code}.get(name, 0)

  monkeypatch.setattr(harness, 'reproduce', reproduce)
  code, said = errors.EXIT_DIFFERENT, []
  assert budget.reproduce(say=said.append) == errors.EXIT_DIFFERENT
  assert 'paraxis: too few devices' in said
  assert said[-3:] == [
    'claims FAILED in middle',
    'could not be run: also',
    'no claim could be checked here: cheap',
  ]
  code = 0
  assert budget.reproduce(say=said.append) == errors.EXIT_USER
