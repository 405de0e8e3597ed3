"""Paths that leave stages out: which, how many, and their ticks."""

import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.pipeline import paths as schedule_paths
from paraxis.sharding.pipeline import schedules


def test_skip_without_skipping_is_one_f_one_b():
  for p, m in [(1, 3), (2, 2), (4, 3), (4, 9), (6, 12)]:
    skip = schedules.make('skip', p, m)
    base = schedules.make('one_f_one_b', p, m)
    assert skip.paths == base.paths
    np.testing.assert_array_equal(skip.forward, base.forward)
    np.testing.assert_array_equal(skip.backward, base.backward)


def test_skip_paths_are_admissible_and_balanced():
  for seed in range(20):
    p, m = 3 + seed % 6, 1 + 3 * seed % 17
    left_out = seed % (p - 1)
    given = dict(fraction=left_out / p, seed=seed)
    schedule = schedules.make('skip', p, m, **given)
    assert not schedule.faults(), given
    assert {len(path) for path in schedule.paths} == {p - left_out}
    assert {path[0] for path in schedule.paths} == {0}
    visits = [sum(s in path for path in schedule.paths) for s in range(1, p)]
    assert max(visits) - min(visits) <= 1
    assert all(list(path) == sorted(path) for path in schedule.paths)
    again = schedules.make('skip', p, m, **given)
    assert again.paths == schedule.paths
  paths, others = (schedule_paths.skip_paths(6, 9, 0.5, n) for n in (1, 2))
  assert paths != others


def test_paths_of_ones_own():
  """Any start, any order; fewer stages take fewer ticks."""
  paths = [(2, 0), (0, 1, 2), (1,), (0, 2, 1), (2, 1, 0)] * 3
  schedule = schedules.from_paths(3, paths)
  assert not schedule.faults()
  assert schedule.paths == tuple(paths)
  assert schedule.ticks < schedules.make('one_f_one_b', 3, 30).ticks
  assert not schedules.from_paths(1, [(0,)]).faults()


@pytest.mark.parametrize('paths', [[], [()], [(0, 0)], [(0, 3)], [(-1,)]])
def test_paths_that_are_none_are_refused(paths):
  with pytest.raises(errors.UserError, match='path'):
    schedules.from_paths(3, paths)
