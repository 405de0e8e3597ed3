"""Rates are means over steps, without what is no step."""

import math

import pytest

from paraxis.train.run import rates as rates_lib


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still: clock(seconds) moves it."""
  now = [100.0]
  monkeypatch.setattr(rates_lib.time, 'perf_counter', lambda: now[0])

  def wait(seconds):
    now[0] += seconds

  return wait


def test_means_since_the_last_line(clock):
  rates = rates_lib.Rates()
  for seconds, tokens in ((1.0, 10), (3.0, 30)):
    clock(seconds)
    rates.step(tokens)
  assert rates.values(left=5) == {
    'perf/step_seconds': 2.0,
    'perf/tokens_per_second': 10.0,
    'perf/eta_seconds': 10.0,
  }
  rates.begin()
  clock(0.5)
  rates.step(10)
  assert rates.values(1)['perf/tokens_per_second'] == 20.0


def test_what_is_no_step_is_apart(clock):
  rates = rates_lib.Rates()
  with rates.apart():  # compiling
    clock(50.0)
  clock(1.0)
  with rates.apart('checkpoint'):
    clock(7.0)
  with pytest.raises(OSError), rates.apart('checkpoint'):
    clock(1.0)
    raise OSError
  clock(1.0)
  rates.step(4)
  found = rates.values(0)
  assert found['perf/step_seconds'] == 2.0
  assert found['perf/checkpoint_seconds'] == 8.0
  assert len(found) == 4
  rates.begin()
  clock(1.0)
  rates.step(4)
  assert 'perf/checkpoint_seconds' not in rates.values(0)


def test_own_time_is_without_what_was_waited(clock):
  rates = rates_lib.Rates()
  for own, waited in ((1.0, 3.0), (2.0, 0.0)):
    clock(own)
    with rates.waits():
      clock(waited)
    with rates.apart('checkpoint'):
      clock(9.0)
    rates.step(1)
  assert rates.values(0)['perf/step_seconds'] == 3.0
  assert rates.own(3) == []
  assert rates.own(2) == [1.0, 2.0] and rates.own(1) == []


def test_a_step_that_is_counted_within_a_block(clock):
  """As a save does, which writes the row of the step before it."""
  rates = rates_lib.Rates()
  clock(1.0)
  with rates.apart('checkpoint'):
    with rates.waits():
      clock(3.0)
    rates.step(1)
    with rates.waits():
      clock(5.0)
    clock(7.0)
  clock(2.0)
  rates.step(1)
  assert rates.own(2) == [1.0, 2.0]
  assert rates.values(0)['perf/step_seconds'] == 3.0  # 4 and 2
  assert rates.values(0)['perf/checkpoint_seconds'] == 15.0


@pytest.mark.parametrize(
  'flops, peak, wanted',
  [(6e9, 1e12, 0.06), (6e9, None, None), (math.nan, 1e12, None)],
)
def test_mfu_needs_both_figures(clock, flops, peak, wanted):
  rates = rates_lib.Rates(flops, peak)
  clock(2.0)
  rates.step(20)
  assert rates.values(0).get('perf/mfu') == (
    None if wanted is None else pytest.approx(wanted)
  )


def test_prompts_are_work_but_carry_no_loss(clock):
  rates = rates_lib.Rates(6e9, 1e12)
  for tokens, read in ((4, 20), (8, 30)):
    clock(1.0)
    rates.step(tokens, read)
  found = rates.values(0)
  assert found['perf/tokens_per_second'] == 6.0
  assert found['perf/mfu'] == pytest.approx(6e9 * 25 / 1e12)
  rates.begin()
  clock(2.0)
  rates.step(2, 20)
  assert rates.values(0)['perf/mfu'] == pytest.approx(6e9 * 10 / 1e12)
