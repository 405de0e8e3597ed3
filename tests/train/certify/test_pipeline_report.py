"""Lines on pipeline stages, before anything is compiled."""

import jax
import pytest

from paraxis.configs import schema
from paraxis.sharding.pipeline import tables as schedule_tables
from paraxis.train import program as job_lib
from paraxis.train.certify import pipeline_report


def report(
  mesh='stage=2,data=2,tensor=2', remat='full', changes=(), **pipeline
):
  config = schema.view(
    dict(
      model=dict(num_layers=8, d_model=1024, num_heads=8, vocab_size=64),
      data=dict(sequence_length=4096),
      train=dict(batch_size=16, remat=remat),
      pipeline=dict(microbatches=4) | pipeline,
    )
  )
  config = schema.with_values(config, dict(changes))
  job = job_lib.of_shapes(config, mesh, jax.devices())
  with job.context():
    return pipeline_report.lines(job.built, job.config), job


def test_layers_run_twice():
  lines, job = report()
  assert lines[0] == (
    'pipeline: one_f_one_b, 2 stages, 4 microbatches: idle stages add 25.0% '
    'to the layers'
  )
  slots = schedule_tables.tables(job.built.schedule).inputs + 1
  # 4 layers; 2 rows of 4096 tokens, half of them on a tensor shard; float32.
  size = slots * 4 * 2 * 4096 // 2 * 1024 * 4
  assert len(lines) == 3 and 'activations=store' in lines[1]
  assert f' {size / 2**30:.3f} GiB' in lines[2] and size >= 2**28


@pytest.mark.parametrize(
  'changes, copies',
  [
    ({'model.wiring': 'streams', 'model.streams': 8}, 8),
    ({'model.wiring': 'ladder'}, 2),
    ({'train.objective': 'block', 'model.visibility': 'block',
      'model.block': 4, 'model.mask_id': 63}, 2),
  ],
  ids=['streams', 'ladder', 'pairs'],
)  # fmt: skip
def test_inputs_are_all_that_layers_carry(changes, copies):
  lines, job = report(changes=changes)
  slots = schedule_tables.tables(job.built.schedule).inputs + 1
  size = copies * slots * 4 * 2 * 4096 // 2 * 1024 * 4
  assert f' {size / 2**30:.3f} GiB' in lines[2]


@pytest.mark.parametrize(
  'how',
  [
    dict(remat='none'),
    dict(activations='store'),
    dict(schedule='zero_bubble', remat='none'),
    dict(schedule='interleaved', chunks=4),  # of one layer
  ],
)
def test_layers_run_once(how):
  lines, _ = report(**how)
  assert len(lines) == 1 and 'idle stages add' in lines[0]


@pytest.mark.parametrize('activations', ['recompute', 'store'])
def test_recomputing_layers_has_no_effect_on_tapes(activations):
  lines, _ = report(schedule='zero_bubble', activations=activations)
  assert len(lines) == 2
  assert 'train.remat=full has no effect: zero_bubble keeps all' in lines[1]


@pytest.mark.parametrize('chunks', [1, 2])
def test_idle_stages_of_equal_phases_add_what_the_paper_says(chunks):
  """Zero bubble (arXiv:2401.10241): 2/3 (p - 1) / (m v) where F = B = W."""
  how = dict(schedule='zero_bubble', chunks=chunks, remat='none')
  (line,) = report(**how, activations='store')[0]
  assert f'idle stages add {2 / 3 / (4 * chunks):.1%} to' in line
  (longer,) = report(**how)[0]  # B runs its layers forward: one phase of three
  assert f'idle stages add {3 / 4 / (4 * chunks):.1%} to' in longer


def test_without_stages_there_is_nothing_to_say():
  assert report('data=8', microbatches=0)[0] == []
