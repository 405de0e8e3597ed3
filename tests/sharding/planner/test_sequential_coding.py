"""Jobs from workers that are late: by hand, and loads by the formulas."""

import numpy as np
import pytest
import support

from paraxis.sharding.planner import sequential_coding as lib


def late(*rows):
  return np.array([[c == 'x' for c in row] for row in rows])


def test_bursts_are_few_and_short():
  model = lib.Bursts(2, 3, 2)
  assert model.holds(late('x...', 'x...'))
  assert not model.holds(late('x...', '....', 'x...'))  # over 3 rounds
  assert model.holds(late('x...', '....', '....', 'x...'))  # another window
  assert model.holds(late('x...', '.x..', '.x..'))
  assert not model.holds(late('x...', '.x..', '..x.'))  # 3 workers
  assert not model.holds(late('xxx.'))


def test_loads_are_those_of_the_paper():
  assert lib.Coded(6, 2).load == 3 / 6
  assert lib.Repeated(6, lib.Bursts(2, 3, 2)).tolerates == 1
  assert lib.Repeated(8, lib.Bursts(1, 3, 4)).load == 3 / 8  # ceil(4 / 3) + 1
  found = lib.Multiplexed(6, lib.Bursts(2, 3, 2))
  assert found.load == 3 * 4 / (6 * (2 + 2 * 3)) and found.delay == 3
  # Without redundancy every worker has its share alone.
  assert lib.Multiplexed(6, lib.Bursts(1, 2, 0)).load == pytest.approx(1 / 6)


def test_what_failed_is_tried_again():
  """2 workers, burst 1, window 2, most 1: one part of one's own, one coded."""
  scheme = lib.Multiplexed(2, lib.Bursts(1, 2, 1))
  assert scheme.round(
    np.array([False, True])
  )  # job 0: worker 0 failed its part
  assert scheme.round(np.array([True, True]))  # which it delivers now
  scheme = lib.Multiplexed(2, lib.Bursts(1, 2, 1))
  scheme.round(np.array([False, True]))
  assert not scheme.round(np.array([False, True]))
  scheme = lib.Multiplexed(2, lib.Bursts(1, 2, 1))
  scheme.round(np.array([True, True]))
  assert scheme.round(np.array([False, True]))  # one coded part is enough
  scheme = lib.Repeated(3, lib.Bursts(1, 2, 2))  # s = 1, the same with 2 late
  assert scheme.tolerates == 1
  assert scheme.round(np.array([False, False, True]))  # nothing is due yet
  assert scheme.round(np.array([True, False, True]))  # worker 0 does job 0
  # Of job 1 one worker delivered; worker 0 is to try it again.
  assert scheme.accepts(late('xx.', '.x.', '.x.'))
  assert not scheme.accepts(late('xx.', '.x.', 'x..'))


def test_a_job_that_too_few_deliver_is_not_whole():
  scheme = lib.Coded(4, 1)
  assert scheme.round(np.array([True, True, True, False]))
  assert not scheme.round(np.array([True, True, False, False]))


def test_the_makespan_by_hand():
  """4 workers, s = 1: half a load of work more, the third of 4 decides."""
  times = np.array([[1.0, 2.0, 3.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
  assert lib.makespan(lib.Coded(4, 1), times, 1.0) == 3.0 * 3 + 3.0
  # M-SGC waits for twice the fastest, and for more only where it must.
  bursts = lib.Bursts(1, 2, 1)
  load = lib.Multiplexed(4, bursts).load
  found = lib.makespan(lib.Multiplexed(4, bursts), times, 1.0)
  assert found == pytest.approx((1 + 4 * load) * (3.0 + 1.0))
  times = np.array([[1.0, 1.0, 1.0, 9.0]] * 2)  # late twice: waited for
  found = lib.makespan(lib.Multiplexed(4, bursts), times, 1.0)
  assert found == pytest.approx((1 + 4 * load) * (1.0 + 9.0))


def test_slow_workers_stay_slow_for_a_while():
  times = lib.delays(np.random.default_rng(0), 400, 50)
  slow = times > 3
  assert 0.03 < slow.mean() < 0.07  # start / (start + end) = 1 / 21
  again = slow[1:][slow[:-1]].mean()
  assert 0.5 < again < 0.7  # 1 - end


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: lib.Coded(4, 4), ('4 workers', '4 stragglers', '0 to 3')),
    (
      lambda: lib.Repeated(4, lib.Bursts(2, 4, 1)),
      ('bursts of 2', 'must divide 3'),
    ),
    (
      lambda: lib.Multiplexed(4, lib.Bursts(3, 3, 1)),
      ('bursts of 3', '1 to 2'),
    ),
    (lambda: lib.Multiplexed(4, lib.Bursts(1, 2, 4)), ('4 stragglers',)),
  ],
)
def test_what_no_scheme_can_be_is_refused(make, words):
  with support.refused(*words):
    make()
