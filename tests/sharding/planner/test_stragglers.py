"""Slow links, senders, receivers and ranks: found, named, nothing else is."""

import math

import numpy as np
import pytest
import support

from paraxis.sharding.planner import stragglers

NOISE = 0.05


def _delays(rng, ranks, noise=NOISE):
  return 1e-3 * np.exp(noise * rng.standard_normal((ranks, ranks)))


def _late(rng, ranks, barriers=8, noise=NOISE):
  """Arrivals after 1 second of work, counted from the first."""
  arrival = 1 + noise * rng.standard_normal((barriers, ranks))
  return arrival - arrival.min(1, keepdims=True)


def _said(found):
  return {(f.kind, f.ranks) for f in found}


@pytest.mark.parametrize('ranks', [8, 12, 32])
def test_each_fault_is_found_and_nothing_else(ranks):
  rng = np.random.default_rng(ranks)
  for _ in range(20):
    i, j = map(int, rng.choice(ranks, 2, replace=False))
    for kind, cells, who in (
      ('link', (i, j), (i, j)),
      ('sender', (i, slice(None)), (i,)),
      ('receiver', (slice(None), j), (j,)),
    ):
      delays = _delays(rng, ranks)
      delays[cells] *= 3
      (found,) = stragglers.find(delays, _late(rng, ranks))
      assert (found.kind, found.ranks) == (kind, who)
      assert found.excess == pytest.approx(3, rel=0.25) and found.margin > 1
    late = _late(rng, ranks)
    late[:, i] += 2
    (found,) = stragglers.find(_delays(rng, ranks), late)
    assert (found.kind, found.ranks) == ('rank', (i,))
    assert found.excess == pytest.approx(2, rel=0.1)


def test_several_faults_at_once():
  rng = np.random.default_rng(0)
  delays = _delays(rng, 16)
  delays[3] *= 4
  delays[:, 5] *= 3
  delays[8, 9] *= 6
  late = _late(rng, 16)
  late[:, [1, 2]] += 2
  faults = {
    ('sender', (3,)), ('receiver', (5,)), ('link', (8, 9)), ('rank', (1,)),
    ('rank', (2,)),
  }  # fmt: skip
  found = stragglers.find(delays, late)
  assert _said(found) == faults
  assert [f.margin for f in found] == sorted([f.margin for f in found])[::-1]


@pytest.mark.parametrize('name', ['senders', 'receivers', 'links'])
def test_without_its_test_a_fault_is_missed(name, monkeypatch):
  rng = np.random.default_rng(1)
  delays = _delays(rng, 16)
  cells = dict(senders=3, receivers=(slice(None), 3), links=(2, 3))[name]
  delays[cells] *= 3
  assert len(stragglers.find(delays)) == 1
  monkeypatch.setattr(stragglers, name, lambda *given: [])
  found = stragglers.find(delays)
  assert len(found) != 1
  # What a row has too much is then said of its links.
  assert all(f.kind == 'link' for f in found)


@pytest.mark.parametrize('alpha', [0.1, 0.01])
@pytest.mark.parametrize('ranks', [4, 8, 16])
def test_false_alarms_are_as_rare_as_asked_for(ranks, alpha):
  """The derivation: at most alpha, for normal noise, whatever the ranks."""
  rng = np.random.default_rng(7)
  for barriers in (0, 1, 5):
    calls, alarms = 300, 0
    for _ in range(calls):
      given = (
        dict(lateness=_late(rng, ranks, barriers))
        if barriers
        else dict(delays=_delays(rng, ranks))
      )
      alarms += bool(stragglers.find(**given, alpha=alpha))
    error = math.sqrt(alpha / calls)
    assert alarms / calls <= alpha + 3 * error, (barriers, alarms)


def test_that_test_finds_a_threshold_for_one_test(monkeypatch):
  """The quantile of a single test is passed by one of 240 cells."""
  monkeypatch.setattr(stragglers, 'threshold', lambda alpha, numbers: 2.33)
  rng = np.random.default_rng(7)
  alarms = sum(bool(stragglers.find(_delays(rng, 16))) for _ in range(50))
  assert alarms > 40


def test_the_threshold_is_the_quantile_of_student():
  stats = pytest.importorskip('scipy.stats')
  for alpha in (1e-2, 1e-4, 1e-8):
    for numbers in (12, 30, 100, 1000):
      ratio = stragglers.threshold(alpha, numbers) / stats.t.isf(
        alpha, 0.3675 * numbers
      )
      assert 0.999 < ratio < (1.25 if numbers < 30 else 1.02)
  assert stragglers.threshold(1e-9, 1) < math.inf


@pytest.mark.parametrize('noise', ['uniform', 'coarse'])
def test_other_noise(noise):
  """Bounded noise, and clocks that tick: no alarms, and faults are found."""
  rng = np.random.default_rng(2)
  for _ in range(50):
    delays = 1e-3 * (1 + NOISE * rng.uniform(-1, 1, (12, 12)))
    if noise == 'coarse':
      delays = np.round(delays, 4)
    given = dict(resolution=1e-4 if noise == 'coarse' else 0.0)
    assert not stragglers.find(delays, **given)
    delays[4] *= 3
    assert _said(stragglers.find(delays, **given)) == {('sender', (4,))}


def test_what_is_usual_among_ranks_is_no_fault():
  """Cards that differ by 10% each: only what stands out of that is found."""
  rng = np.random.default_rng(3)
  for _ in range(50):
    cards = np.exp(0.1 * rng.standard_normal(32))
    delays = _delays(rng, 32) * cards[:, None]
    assert not stragglers.find(delays)
    delays[7] *= 8 / cards[7]
    assert _said(stragglers.find(delays)) == {('sender', (7,))}


def test_no_noise_at_all():
  delays = np.full((6, 6), 0.5)
  assert stragglers.find(delays, np.zeros(6)) == ()
  delays[1, 2] = 0.7
  (found,) = stragglers.find(delays, np.zeros(6))
  assert str(found) == 'bad link 1 -> 2: 1.4 times the usual delay'
  (found,) = stragglers.find(lateness=[0, 0, 0, 0.25])
  assert str(found) == 'slow rank 3: 0.25 s late at barriers'
  assert stragglers.find(lateness=[0, 0, 0, 0.25], resolution=1.0) == ()


def test_the_diagonal_and_the_start_of_the_clock_are_no_matter():
  rng = np.random.default_rng(4)
  delays, late = _delays(rng, 8), _late(rng, 8)
  delays[2, 3] *= 3
  late[:, 6] += 2
  base = stragglers.find(delays, late)
  np.fill_diagonal(delays, np.nan)
  late += rng.uniform(0, 100, (len(late), 1))
  other = stragglers.find(delays, late)
  assert _said(base) == _said(other) == {('link', (2, 3)), ('rank', (6,))}


@pytest.mark.parametrize(
  'given, message',
  [
    (dict(delays=np.ones((4, 5))), 'delays of shape (4, 5): give'),
    (dict(delays=np.ones((3, 3))), '4 ranks or more'),
    (dict(delays=np.eye(4)), 'from rank 0 to 1: 0.0 is no time above 0'),
    (dict(lateness=[0, 1, 2]), 'lateness of shape (3,)'),
    (dict(lateness=[0, 1, 2, math.nan]), 'of rank 3 at barrier 0: nan'),
    (
      dict(delays=np.ones((4, 4)), lateness=np.zeros(5)),
      'delays of 4 ranks, but lateness of 5',
    ),
    (dict(alpha=0), 'alpha=0 is no probability'),
  ],
)
def test_what_cannot_be_judged_is_refused(given, message):
  with support.refused(message):
    stragglers.find(**given)
  assert stragglers.find() == ()
