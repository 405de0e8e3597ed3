"""What the pipeline bench counts; never its times."""

import dataclasses

import pytest

from paraxis.sharding.pipeline import schedules
from paraxis.train.bench import pipeline as bench_pipeline


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


def test_both_sides_multiply_as_often_as_the_simulator_says():
  """Without remat=full the plain step would recompute nothing."""
  counted = lambda c, mesh: bench_pipeline.Gradient(c, mesh).operations()
  plain = bench_pipeline.config(True, 8)
  staged = counted(
    bench_pipeline.config(True, 8, 'one_f_one_b'), 'stage=4,data=2'
  )
  expected = 11 / 8  # ticks with F, of microbatches
  ratio = staged / counted(plain, 'data=8') / expected
  assert 0.95 < ratio < 1.1
  less = dataclasses.replace(plain.train, remat='none')
  less = dataclasses.replace(plain, train=less)
  assert staged / counted(less, 'data=8') / expected > 1.15
