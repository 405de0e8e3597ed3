"""The simulator against the formulas of papers, in exact fractions."""

import dataclasses
import fractions
import itertools

import numpy as np
import pytest
import support

from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate

ONE = fractions.Fraction(1)
EQUAL = dict(forward=ONE, backward=ONE, weight=ONE)
GRID = [(4, 8, 1), (4, 8, 2), (4, 32, 4), (2, 6, 3), (8, 16, 2), (1, 4, 1)]


def _make(name, p, m, v):
  if name == 'interleaved' and v == 1:
    name = 'one_f_one_b'
  return schedules.make(name, p, m, v)


@pytest.mark.parametrize('model', simulate.MODELS)
@pytest.mark.parametrize('name', ['gpipe', 'interleaved'])
@pytest.mark.parametrize('p, m, v', GRID)
def test_bubble_is_the_formula(name, p, m, v, model):
  schedule = _make(name, p, m, v)
  for costs in (EQUAL, dict(forward=3 * ONE, backward=ONE, weight=5 * ONE)):
    result = simulate.run(schedule, model, **costs)
    assert result.bubble == ONE * (p - 1) / (v * m)
    assert result.ideal == m * sum(costs.values())
    assert result.busy == (result.ideal,) * p
  assert result.peak == schedule.in_flight()


@pytest.mark.parametrize('p, m, v', GRID)
def test_zero_bubble_is_the_formula(p, m, v):
  schedule = schedules.make('zero_bubble', p, m, v)
  bubble = lambda model, **c: simulate.run(schedule, model, **EQUAL | c).bubble
  assert bubble('lock_step') == 2 * ONE * (p - 1) / (3 * v * m)
  assert bubble('asynchronous') == ONE * (p - 1) / (3 * v * m)
  if v == 1:  # ZB-H1: (p - 1) (F + B - W), here with F = 1, B = 3, W = 2
    dearer = bubble('asynchronous', backward=3 * ONE, weight=2 * ONE)
    assert dearer == ONE * (p - 1) * (1 + 3 - 2) / (6 * m)


def test_v_half():
  """Half the inputs of 1F1B, at the bubble of a zero_bubble of one chunk."""
  for p, m in [(2, 8), (4, 8), (5, 15)]:
    result = simulate.run(
      schedules.make('v_half', p, m, 2), 'lock_step', **EQUAL
    )
    assert result.bubble == 2 * ONE * (p - 1) / (3 * m)
    assert set(result.peak) == {2 * p}


def test_one_operation_a_tick_would_lose():
  """Why ticks have phases: F and B by turns suit no lock-step machine."""
  p, m = 4, 32
  schedule = schedules.make('one_f_one_b', p, m)
  ticks = 2 * (m + p - 1)
  forward, backward = np.full((2, ticks, p, 2), -1, np.int32)
  for i, d in itertools.product(range(m), range(p)):
    forward[2 * i + d, d] = backward[2 * i + 2 * p - 1 - d, d] = i, 0
  turns = dataclasses.replace(schedule, forward=forward, backward=backward)
  assert not turns.faults() and turns.in_flight() == (4, 3, 2, 1)
  time = lambda s, model: simulate.run(s, model, **EQUAL).time
  assert time(turns, 'asynchronous') == time(schedule, 'asynchronous')
  assert time(turns, 'lock_step') > 1.8 * time(schedule, 'lock_step')


def test_uneven_stages():
  """The dearest stage never waits: the way to it, its work, the way back."""
  schedule = schedules.make('one_f_one_b', 3, 10)
  result = simulate.run(
    schedule, forward=[1, 4, 2], backward=[1, 4, 2], weight=[0, 0, 0]
  )
  assert result.time == 1 + 10 * (4 + 4) + 1
  assert result.busy == (20, 80, 40)
  assert result.ideal == 140 / 3


def test_head_on_the_last_stage_or_on_all():
  p, m, head = 4, 16, ONE / 2
  schedule = schedules.make('one_f_one_b', p, m)
  for model in simulate.MODELS:
    last = simulate.run(schedule, model, head=head, **EQUAL)
    spread = simulate.run(
      schedule, model, head=head, vocabulary='spread', **EQUAL
    )
    assert last.ideal == spread.ideal == m * (3 + 3 * head / p)
    # All stages wait for the last, which does 3 (1 + head) for each.
    assert last.time == 3 * (m + p - 1) + 3 * head * m
    assert last.busy == (3 * m,) * (p - 1) + (3 * m * (1 + head),)
    assert spread.time == 3 * (m + p - 1) + 3 * head * m / p
    assert spread.busy == (spread.ideal,) * p


def test_messages_take_time():
  """The way there and back is longer by every message on it, and only that."""
  p, send = 4, ONE / 4
  schedule = schedules.make('one_f_one_b', p, 1)
  for model in simulate.MODELS:
    free = simulate.run(schedule, model, **EQUAL)
    slow = simulate.run(schedule, model, send=send, **EQUAL)
    assert slow.time == free.time + 2 * (p - 1) * send
    assert slow.ideal == free.ideal


def test_the_table_is_what_runs():
  """Empty ticks cost nothing; a B before its F can never run."""
  schedule = schedules.make('one_f_one_b', 2, 2)
  forward, backward = (
    t.repeat(2, 0) for t in (schedule.forward, schedule.backward)
  )
  forward[1::2] = backward[::2] = -1
  apart = dataclasses.replace(schedule, forward=forward, backward=backward)
  assert not apart.faults()
  for model in simulate.MODELS:
    found, base = (simulate.run(s, model, **EQUAL) for s in (apart, schedule))
    assert found[:4] == base[:4]
  late = schedule.backward[[2, 3, 0, 1]]
  with pytest.raises(AssertionError, match='in a circle'):
    simulate.run(dataclasses.replace(schedule, backward=late))


@pytest.mark.parametrize(
  'model, costs, message',
  [
    ('lockstep', {}, "Did you mean 'lock_step'"),
    ('lock_step', dict(forward=[1, 2]), 'forward: 2 costs for 4 virtual'),
    ('lock_step', dict(vocabulary='all'), 'is not one of last, spread'),
  ],
)
def test_what_does_not_fit_is_refused(model, costs, message):
  with support.refused(message):
    simulate.run(schedules.make('gpipe', 4, 4), model, **costs)
