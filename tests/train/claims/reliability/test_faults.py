"""The claims of c4 hold, on fewer draws, and each falls by its knock-out."""

import functools
import re

import claim_cases
import pytest
import support

from paraxis.configs import c4
from paraxis.train.claims.reliability import faults

DRAWN = dict(fault='link', ranks=16, slower=3, weaker=1.3, noise=0.05, draws=10)


@pytest.mark.parametrize('knockout', ['cells', 'rows', 'columns', 'lateness'])
def test_a_fault_is_found_by_its_test_alone(knockout):
  right, wrong = claim_cases.falls('c4', knockout, draws=10)
  assert right.measured == '100.0%' and wrong.measured == '0.0%'
  assert 'at 1.3 times, no claim: ' in right.caveat


def test_more_than_the_fault_is_wrong():
  """An alarm beside the right finding is no right answer."""
  with faults.three_deviations():
    assert not faults.found(None, **DRAWN).passed
  assert faults.found(None, **DRAWN).passed


def test_a_fault_in_the_noise_is_missed():
  assert not faults.found(None, **DRAWN | dict(slower=1.1)).passed
  with support.refused("fault='node' is not one of link, sender"):
    faults.found(None, **DRAWN | dict(fault='node'))


def test_clean_delays_raise_no_alarm():
  right, wrong = claim_cases.falls('c4', 'many_tests', draws=100)
  assert right.measured == '0 of 100' and wrong.measured != '0 of 100'


def test_goodput_is_the_formula():
  given = dict(hours=[18, 6], lost=200, seeds=4, within=0.02)
  right, _ = claim_cases.falls('c4', 'lost_work', **given)
  assert 'every 18 h, known after 30 s: 0.9' in right.caveat


def test_goodput_must_fall_with_failures_and_detection(monkeypatch):
  """Equal to a formula that is wrong in the same way is not enough."""
  given = dict(
    costs=c4.COSTS, hours=[18, 6], intervals=[120], detect=[1800, 30],
    lost=20, seeds=2, within=0.1,
  )  # fmt: skip
  assert faults.goodput_formula(None, **given).passed
  monkeypatch.setattr(faults, '_goodput', lambda *given: 0.9)
  monkeypatch.setattr(faults.failures, 'expected', lambda *a, **k: 0.9)
  assert not faults.goodput_formula(None, **given).passed


def test_the_best_interval():
  right, wrong = claim_cases.falls('c4', 'intervals', lost=200, seeds=4)
  assert right.measured == '1' and wrong.measured == '4'


def test_the_cost_of_failures():
  right, wrong = claim_cases.falls('c4', 'soon', lost=100, seeds=4)
  assert right.verdict == 'direction only'
  assert wrong.measured == '1.00/1.00/1.00'


def test_a_ledgers_costs(monkeypatch):
  """A training that fails once and is started again states all of them."""
  of_both = functools.cache(
    lambda run: ledger(run, steps=16, every=4, fails=13)
  )
  ledger = faults._ledger
  monkeypatch.setattr(faults, '_ledger', lambda run, **trained: of_both(run))
  given = dict(lost=200, seeds=4, within=0.02, apart=[10], intervals=[480])
  right, _ = claim_cases.falls('c4', 'lost_steps', **given)
  told = re.search(r'in 2 starts: (.*?); what', right.caveat)[1]
  costs = {name: float(s) for name, s in (x.split() for x in told.split(', '))}
  assert list(costs) == ['step', 'save', 'restore', 'compile', 'replace']
  assert 0 < costs['step'] < costs['compile'] and 0 < costs['restore']
