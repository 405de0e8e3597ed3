"""Devices by the load of tasks, against every way to share them out."""

import itertools

import numpy as np
import pytest

from paraxis.sharding.planner import task_devices


def _least(loads, devices):
  """max load / devices of the best of all ways: what no way is below."""
  best = np.inf
  for way in itertools.product(range(1, devices + 1), repeat=len(loads)):
    if sum(way) == devices:
      best = min(best, np.max(np.array(loads) / way))
  return best


@pytest.mark.parametrize('seed', range(6))
def test_no_way_to_share_is_better(seed):
  rng = np.random.default_rng(seed)
  tasks = int(rng.integers(1, 5))
  loads = rng.integers(0, 50, tasks).tolist()
  for devices in range(tasks, tasks + 7):
    found = task_devices.share(loads, devices)
    assert sum(found) == devices and min(found) >= 1
    assert np.max(np.array(loads) / found) == _least(loads, devices)


def test_as_many_for_each_is_not_the_best():
  """The test above can fail: loads 4 and 1 on four devices."""
  even = np.max(np.array([4, 1]) / [2, 2])
  assert even > _least([4, 1], 4) and task_devices.share([4, 1], 4) == [3, 1]


def test_too_few_devices():
  with pytest.raises(ValueError, match='2 devices for 3 tasks'):
    task_devices.share([1, 2, 3], 2)
