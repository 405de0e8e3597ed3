"""What the pipeline bench counts; never its times."""

import pytest

from paraxis.sharding import schedules
from paraxis.train import bench_pipeline


@pytest.mark.parametrize(
  'arguments',
  [('one_f_one_b', 4, 3), ('v_half', 2, 3, 2), ('skip', 3, 4, 1, 1 / 3)],
)
def test_phases_executed_are_those_simulated(arguments):
  schedule = schedules.make(*arguments)
  found = bench_pipeline.executed(schedule)
  assert found == bench_pipeline.simulated(schedule)
  assert found['F'] == (schedule.forward[..., 0] >= 0).any(1).sum()
  assert ('W' in found) == (schedule.weight is not None)


def test_the_count_can_differ():
  one = bench_pipeline.simulated(schedules.make('one_f_one_b', 4, 3))
  other = bench_pipeline.simulated(schedules.make('one_f_one_b', 4, 4))
  assert one == {'F': 6, 'B': 6} and other == {'F': 7, 'B': 7}


def test_configs_are_valid_and_do_equal_work():
  plain = bench_pipeline.config(False, 16)
  for name in schedules.NAMES:
    c = bench_pipeline.config(False, 16, name)
    assert c.model == plain.model and c.data == plain.data
    assert c.train.batch_size == plain.train.batch_size
    assert c.microbatches == 16 and c.pipeline.schedule == name
  devices = bench_pipeline.STAGES * bench_pipeline.DATA
  rows = plain.train.batch_size // plain.microbatches
  assert rows % devices == 0 and set(bench_pipeline.CHUNKS) == set(
    schedules.NAMES
  )
