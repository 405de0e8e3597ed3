"""Claims about late workers fail where chunks have no coefficients, late ones
are read, a worker reads more than it is to, more are late than a scheme bears,
or all are waited for."""

import claim_cases
import numpy as np
import pytest

from paraxis.sharding.planner import sequential_coding
from paraxis.train.claims.outer import coding
from paraxis.train.steps import coded

NAME = 'sequential_gradient_coding'


def test_chunks_without_coefficients_are_seen():
  claim_cases.falls(NAME, 'coefficients', codes=[[5, 2]])


@pytest.mark.parametrize(
  'knockout, given',
  [
    ('late_are_read', {'codes': [[5, 2]]}),
    ('late_are_read_in_a_step', {'meshes': [{'mesh': 'data=4'}]}),
  ],
)
def test_late_workers_that_are_read_are_seen(knockout, given):
  right, wrong = claim_cases.falls(NAME, knockout, **given)
  assert wrong.expected == right.expected
  assert wrong.measured.endswith('the rest does NOT hold')  # the sum is right


def test_workers_that_read_all_chunks_are_seen():
  claim_cases.holds_until(
    coded, 'cyclic', lambda n, s: np.ones((n, n)) / n, coding.decodes,
    codes=[[5, 2]], within=1e-10,
  )  # fmt: skip


IN_TIME = dict(n=4, bursts=[[1, 2, 1]], rounds=4)


@pytest.mark.parametrize('kind', ['Multiplexed', 'Repeated'])
def test_a_scheme_that_takes_its_jobs_for_whole_is_seen(monkeypatch, kind):
  given = IN_TIME | dict(beyond=3)
  for one in ('Multiplexed', 'Repeated'):
    monkeypatch.setattr(
      getattr(sequential_coding, one), 'round', lambda self, ok: True
    )
  monkeypatch.setattr(coding, 'IN_TIME', {
    name: found for name, found in coding.IN_TIME.items()
    if (name == 'M-SGC') == (kind == 'Multiplexed')
  })  # fmt: skip
  found = coding.in_time(None, **given)
  assert not found.passed and not found.measured.startswith('0 ')


def test_a_worker_that_reads_more_than_the_load_is_seen(monkeypatch):
  right = coding.in_time(None, beyond=0, **IN_TIME)
  assert right.passed and right.measured == '0 late, 0% above it'
  for name, make in coding.KINDS.items():

    def less(*given, make=make):
      scheme = make(*given)
      scheme.load /= 2
      return scheme

    monkeypatch.setitem(coding.KINDS, name, less)
  found = coding.in_time(None, beyond=0, **IN_TIME)
  assert not found.passed and found.measured == '0 late, 100% above it'


def test_one_more_late_worker_is_seen():
  check = lambda beyond: coding.in_time(
    None, n=4, bursts=[[1, 2, 1]], rounds=3, beyond=beyond
  )
  assert check(0).passed
  found = check(1)
  assert not found.passed and not found.measured.startswith('0 ')


def test_every_conforming_pattern_is_tried():
  """By hand: of 3 workers at most one is late in 2 rounds, never twice."""
  found = coding._patterns(3, coding.lib.Bursts(1, 2, 1), 2)
  assert len(found) == 1 + 3 + 3  # nobody; one in either round


def test_a_master_that_waits_for_all_is_seen():
  given = dict(
    n=64, rounds=60, seeds=[1], at_most=0.9,
    fixed={'claimed': [1.0], 'told': []},
    grids={'GC': [[4], [6]], 'M-SGC': [[4, 5, 12]]},
  )  # fmt: skip
  assert coding.makespan(None, patience=1.0, **given).passed
  assert not coding.makespan(None, patience=1e9, **given).passed


def test_as_many_jobs_are_whole_of_every_scheme(monkeypatch):
  """A scheme that ends jobs late has more rounds, of one and the same trace."""
  seen = []

  def makespan(scheme, times, fixed, patience):
    seen.append((type(scheme).__name__, scheme.delay, times))
    return len(times) * (1 + fixed * (scheme.delay > 0))

  monkeypatch.setattr(coding.lib, 'makespan', makespan)
  given = dict(
    n=8, rounds=20, seeds=[1], patience=1.0,
    fixed={'claimed': [0.0, 0.5], 'told': [1.0]},
    grids={'GC': [[2]], 'M-SGC': [[2, 3, 4]]},
  )  # fmt: skip
  found = coding.makespan(None, at_most=1.8, **given)
  assert len(seen) == 12  # of either scheme the trace to tune by, and one more
  for i in (0, 1):
    plain, late = seen[i], seen[i + 2]
    assert plain[:2] == ('Coded', 0) and late[:2] == ('Multiplexed', 3)
    assert len(plain[2]) == 20 and len(late[2]) == 23
    np.testing.assert_array_equal(late[2][:20], plain[2])
  assert found.measured == '1.150 1.725' and found.passed
  assert '1: 2.300' in found.caveat
  assert not coding.makespan(None, at_most=1.7, **given).passed
