"""Goodput under failures: by hand, by the closed form, by a plain loop."""

import fractions
import math

import numpy as np
import pytest
import support

from paraxis.sharding.planner import failures

COSTS = dict(step=2, save=3, restore=20, compile=30, detect=60)
HOUR = 3600


def _run(costs=COSTS, *, interval=50, rate=0.0, steps=1000, **given):
  return failures.run(costs, interval=interval, rate=rate, steps=steps, **given)


def _at(monkeypatch, *times):
  """Failures come after these times, and then never."""
  left = [*map(float, times), 1e15]

  class Generator:
    def exponential(self, scale):
      return left.pop(0)

  monkeypatch.setattr(np.random, 'default_rng', lambda seed: Generator())


def test_without_failures():
  found = _run(steps=120)
  # 240 s of steps, two saves of 3 s (none at the end), one compile.
  assert found.parts == dict(
    productive=240, save=6, compile=30, lost=0, restore=0, detect=0, replace=0
  )
  assert found.failures == 0 and found.wall == 276
  assert found.goodput == 240 / 276


def test_a_failure_by_hand(monkeypatch):
  """In the second work: 100 s are kept, the 7 s behind the save are lost."""
  _at(monkeypatch, 30 + 100 + 3 + 7)
  found = _run(COSTS | dict(replace=500), steps=120, rate=1e-3)
  assert found.failures == 1
  assert found.parts == dict(
    productive=240, lost=7, save=6, compile=60, restore=20, detect=60,
    replace=500,
  )  # fmt: skip
  assert found.of_errors == float((7 + 60 + 20 + 60 + 500) / found.wall)


@pytest.mark.parametrize(
  'uptime, lost, save, compiled, restored',
  [
    (12, 0, 6, 42, 20),  # while it compiles
    (30 + 100 + 1, 100, 7, 60, 20),  # within the first save
    (30 + 103, 0, 6, 60, 20),  # as it ends
    (30 + 103 + 100, 100, 6, 60, 20),  # before the second save
  ],
)
def test_when_it_fails(uptime, lost, save, compiled, restored, monkeypatch):
  _at(monkeypatch, uptime)
  parts = _run(steps=120, rate=1e-3).parts
  assert (parts['lost'], parts['save']) == (lost, save)
  assert (parts['compile'], parts['restore']) == (compiled, restored)
  assert parts['productive'] == 240


def test_a_failure_while_it_restores(monkeypatch):
  _at(monkeypatch, 35, 41)
  parts = _run(steps=120, rate=1e-3).parts
  assert parts['compile'] == 90 and parts['restore'] == 11 + 20
  assert parts['lost'] == 5 and parts['detect'] == 120


def test_a_write_commits_late_and_holds_up_the_next_save(monkeypatch):
  costs = COSTS | dict(write=40)
  _at(monkeypatch, 30 + 103 + 39)
  assert _run(costs, steps=120, rate=1e-3).parts['lost'] == 139
  _at(monkeypatch, 30 + 103 + 40)
  assert _run(costs, steps=120, rate=1e-3).parts['lost'] == 40
  # A write of 150 s, behind 100 s of work: 50 s of waiting, once.
  parts = _run(COSTS | dict(write=150), steps=120).parts
  assert parts['save'] == 3 + 50 + 3


def _plain(costs, interval, rate, steps, seed):
  """Wall seconds, in floats, second by second of an own loop over segments."""
  rng, wall, done, first = np.random.default_rng(seed), 0.0, 0, True
  up = rng.exponential(1 / rate)
  while True:
    now = costs['compile'] + (0 if first else costs['restore'])
    alive = up >= now
    while alive:
      n = min(interval, steps - done)
      if now + n * costs['step'] > up:
        alive = False
      elif n == steps - done:
        return wall + now + n * costs['step']
      else:
        now += n * costs['step'] + costs['save']
        alive = now <= up
        done += n if alive else 0
    wall += up + costs['detect']
    first, up = False, rng.exponential(1 / rate)


@pytest.mark.parametrize('seed', range(5))
def test_it_is_a_plain_loop(seed):
  count = 0
  for interval, rate in ((50, 1e-3), (7, 4e-3), (400, 1e-3)):
    found = _run(interval=interval, rate=rate, seed=seed)
    wall = _plain(COSTS, interval, rate, 1000, seed)
    assert float(found.wall) == pytest.approx(wall, rel=1e-12)
    assert found.parts['productive'] == 2000
    count += found.failures
  assert count > 3


@pytest.mark.parametrize('write', [0, 50, 130])
def test_in_the_long_run_it_is_the_closed_form(write):
  """Daly's formula without `write`; with it, held up or not."""
  costs, rate = COSTS | dict(write=write, replace=15), 1 / 900
  found = [
    _run(costs, rate=rate, steps=100_000, seed=seed) for seed in range(12)
  ]
  goodput = [f.goodput for f in found]
  error = np.std(goodput, ddof=1) / math.sqrt(len(goodput))
  wanted = failures.expected(costs, interval=50, rate=rate)
  assert error < 0.01 * wanted
  assert abs(np.mean(goodput) - wanted) < 4 * error
  # A form that forgets the lost half of an interval is told from it.
  assert abs(np.mean(goodput) - wanted * math.exp(50 * rate)) > 4 * error


def test_the_closed_form_is_dalys():
  rate, work, save, down, restart = 1e-3, 100, 3, 60, 50
  wall = (1 / rate + down) * math.exp(rate * restart)
  wall *= math.expm1(rate * (work + save))
  found = failures.expected(COSTS, interval=50, rate=rate)
  assert found == pytest.approx(work / wall, rel=1e-12)
  assert failures.expected(COSTS, interval=50, rate=0.0) == 100 / 103


def test_to_first_order_it_is_youngs():
  """What is left out falls with the square of the rate."""
  rest = {}
  for rate in (1e-5, 1e-6):
    # The interval of the optimum, so that both terms shrink together.
    interval = failures.young(COSTS, rate)
    work = interval * 2
    first = 3 / work + (work / 2 + 50 + 60) * rate
    found = failures.expected(COSTS, interval=interval, rate=rate)
    rest[rate] = abs(1 / found - 1 - first)
    assert rest[rate] < 0.1 * first
  assert rest[1e-6] < 0.12 * rest[1e-5]


def test_youngs_interval_is_the_best():
  rate = 1 / (10 * HOUR)
  best = failures.young(COSTS, rate)
  assert best == round(math.sqrt(2 * 3 * 10 * HOUR) / 2)
  at = lambda n: failures.expected(COSTS, interval=n, rate=rate)
  found = max(range(50, 1000), key=at)
  assert found == pytest.approx(best, rel=0.02)
  simulated = [
    _run(interval=n, rate=rate, steps=10**6, seed=1).goodput
    for n in (best // 4, best, best * 4)
  ]
  assert simulated[1] == max(simulated)
  assert failures.young(COSTS | dict(step=1e6), rate) == 1


def test_it_is_exact_and_the_same_again():
  costs = COSTS | dict(step=0.1, save='1/3')
  found = _run(costs, rate=1e-2)
  assert found == _run(costs, rate=1e-2)
  assert found != _run(costs, rate=1e-2, seed=1)
  assert all(isinstance(x, fractions.Fraction) for x in found.parts.values())
  assert found.parts['productive'] == 1000 * fractions.Fraction(0.1)
  assert sum(found.parts.values()) == found.wall


@pytest.mark.parametrize(
  'costs, given, message',
  [
    (dict(steps=2), {}, "'steps' is not one of step, save"),
    (dict(step=2, save=1), {}, 'without restore (seconds to read a checkp'),
    (COSTS | dict(save=-1), {}, 'costs: save: a duration of -1 is below 0'),
    (COSTS | dict(save=None), {}, 'costs: save: None is no duration'),
    (COSTS | dict(step=0), {}, 'step=0'),
    (COSTS, dict(interval=0), 'interval=0'),
    (COSTS, dict(steps=0), 'steps=0'),
    (COSTS, dict(rate=-1), 'rate=-1'),
    (COSTS, dict(rate=math.nan), 'rate=nan'),
  ],
)
def test_wrong_input_is_refused(costs, given, message):
  with support.refused(message):
    _run(costs, **given)


def test_a_run_that_never_ends_is_refused(monkeypatch):
  monkeypatch.setattr(failures, 'MOST', 100)
  with support.refused('100 failures, and 0 of 1,000 steps are done'):
    _run(rate=1.0)
  with support.refused('a run need not save'):
    failures.young(COSTS, 0.0)
