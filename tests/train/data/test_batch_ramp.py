"""Batches that grow: their rows, their microbatches, and whole runs on stages.

That the rows are read one after the other is in test_batches.py; that a run
without stages is resumed bit for bit, in test_loop.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.models import batch as batch_lib
from paraxis.sharding.pipeline import schedules
from paraxis.train import program as job_lib
from paraxis.train.certify import trial
from paraxis.train.data import batch_ramp


@pytest.mark.parametrize('every', [1, 3])
@pytest.mark.parametrize('start, increment, final', [(2, 2, 8), (3, 4, 8)])
def test_rows_before_a_step_are_their_sum(start, increment, final, every):
  ramp = batch_ramp.Ramp(start, increment, every, final)
  sizes = [ramp.rows(t) for t in range(30)]
  assert [ramp.before(t) for t in range(30)] == [
    sum(sizes[:t]) for t in range(30)
  ]
  assert ramp.sizes(30) == sorted(set(sizes))
  assert ramp.sizes(every) == [start]


@pytest.mark.parametrize(
  'text, microbatches, words',
  [
    ('2:2', 4, "not three numbers, 'start:increment:steps'"),
    ('0:2:2', 4, 'at least 1'),
    ('9:1:1', 4, 'train.batch_size=8'),
    ('2:1:1', 4, 'its increment of 1 rows is not divisible by the 2 rows'),
    ('2:2:1', 2, 'its start of 2 rows is not divisible by the 4 rows'),
  ],
)
def test_a_ramp_that_cannot_be(text, microbatches, words):
  config = support.piped(batch_ramp=text, microbatches=microbatches)
  with pytest.raises(errors.UserError, match=words):
    batch_ramp.of(config)


def test_microbatches_keep_their_rows_and_a_single_one_grows():
  split = lambda **train: [
    batch_ramp.of(support.piped(batch_ramp='2:2:1', **train)).split(rows)
    for rows in (2, 4, 6, 8)
  ]
  assert split(microbatches=4) == [(1, 2), (2, 2), (3, 2), (4, 2)]
  assert split() == [(1, 2), (1, 4), (1, 6), (1, 8)]


def test_a_size_that_the_schedule_does_not_take():
  pipeline = dict(schedule='interleaved', chunks=2, microbatches=4)
  of_ramp = lambda ramp: job_lib.of_shapes(
    support.piped(dict(stage=2), pipeline, batch_ramp=ramp),
    devices=jax.devices()[:2],
  )
  with jax.enable_x64(True):
    with support.refused('2 rows a step: interleaved'):
      of_ramp('2:2:1')
    assert of_ramp('4:4:1')


@pytest.mark.parametrize('name', schedules.NAMES)
def test_the_schedule_of_fewer_microbatches(name):
  skip = dict(fraction=0.25) if name == 'skip' else {}
  full = schedules.make(name, 4, 12, schedules.CHUNKS[name][0], **skip)
  few = schedules.of_size(full, 4)
  assert few.name == name and few.microbatches == 4 and not few.faults()
  np.testing.assert_array_equal(few.placement, full.placement)
  assert few.paths == full.paths[:4] and few.ticks < full.ticks
  assert schedules.of_size(full, 12) is full


@pytest.mark.parametrize(
  'pipeline, parts',
  [
    (dict(), 3),
    (dict(), 1),
    (dict(schedule='zero_bubble', chunks=2), 2),
  ],
  ids=['three', 'one', 'zero_bubble'],
)
def test_fewer_microbatches_equal_one_device(pipeline, parts):
  """Loss and every gradient; four microbatches are what the config says."""
  with jax.enable_x64(True):
    config = support.piped(dict(stage=2), pipeline | dict(microbatches=4))
    rows = 2 * parts
    small = dataclasses.replace(config.train, batch_size=rows)
    one = dataclasses.replace(config, train=small)
    reference = trial.reference(one, True, jax.devices()[0])
    side = trial.Runner(config, jax.devices()[:2])
    state = side.start(reference.params)

    def run(batch):
      fold = lambda x: x.reshape(parts, 2, -1) if np.ndim(x) else x
      with side.job.context():
        return side._grads(
          state.variables, side.job.put(batch_lib.Batch(*map(fold, batch)))
        )

    batch = reference.batches[0]
    loss, gradients, _ = run(batch)
    assert abs(float(loss) / reference.loss - 1) < 1e-12
    found = side.job.in_order(gradients)
    assert trial.worst(found, reference.gradients)[0] < 1e-9
    other = batch._replace(denominator=batch.denominator + 1)
    assert abs(float(run(other)[0]) / reference.loss - 1) > 1e-4


# ---------------------------------------------------------------- whole runs


CHANGES = {
  'train.steps': 3, 'train.batch_size': 8, 'train.batch_ramp': '4:4:2',
  'checkpoint.every': 1, 'checkpoint.keep': 5,
}  # fmt: skip


def test_a_run_on_stages_equals_one_device_and_is_resumed(tiny, tmp_path):
  """4, 4, 8 rows: on stages 1, 1, 2 microbatches."""
  run = functools.partial(tiny.run, changes=CHANGES, mesh='stage=2,data=2')
  paths = [tmp_path / name for name in ('one', 'straight', 'stopped')]
  one, straight, stopped = paths
  run(one, mesh='data=1')
  run(straight)
  wanted, found = support.losses(one), support.losses(straight)
  assert list(wanted) == list(found) == [1, 2, 3]
  for step, loss in wanted.items():
    assert abs(found[step] / loss - 1) < 1e-5
  with pytest.raises(support.KilledError):
    run(stopped, callbacks=[support.crash_at(2)])
  run(stopped)
  assert support.fingerprints(straight, 3) == support.fingerprints(stopped, 3)
  assert support.losses(stopped)[3] == found[3] != found[2]
