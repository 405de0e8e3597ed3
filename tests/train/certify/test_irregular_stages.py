"""Stages that hold layers of different kinds compute what one device does.

A first layer without experts, attention at the end of a unit: every stage has
rows of all kinds, some of them empty (models/depth.py).
"""

import math

import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.certify import verify
from paraxis.train.steps import pipeline_step


def config_of(mesh, schedule, pattern='F', layers=4, experts='', **pipeline):
  """schema.Config of a small model; experts: model.experts.pattern, or ''."""
  own = model_schema.Experts()
  if experts:
    own = model_schema.Experts(count=4, d_ff=8, balance=0.1, pattern=experts)
  return schema.Config(
    mesh=schema.Mesh(**mesh_lib.parse(mesh)),
    pipeline=schema.Pipeline(schedule=schedule, **pipeline),
    model=schema.Model(
      vocab_size=64, d_model=16, num_heads=4, head_dim=4, d_ff=16,
      num_layers=layers, pattern=pattern, attention_block=16, experts=own,
      dtype='float64', param_dtype='float64',
    ),
    data=schema.Data(sequence_length=16),
    train=schema.Train(batch_size=8),
  )  # fmt: skip


STORE = dict(activations='store')
CASES = {
  'first_dense': ('stage=2,data=2', 'one_f_one_b', dict(experts='DEEE')),
  'stored': ('stage=2,data=2', 'one_f_one_b', dict(experts='DEEE') | STORE),
  'four': (
    'stage=4,fsdp=2', 'zero_bubble', dict(experts='DDEEEE', layers=6) | STORE,
  ),
  'last': ('stage=2,tensor=2', 'gpipe', dict(pattern='GGGF', layers=6)),
  'chunks': (
    'stage=2,data=2', 'interleaved',
    dict(experts='DEEEE', layers=5, chunks=2),
  ),
  'down_and_up': (
    'stage=2,context=2', 'v_half', dict(pattern='FWF', layers=5, chunks=2),
  ),
}  # fmt: skip


def case_of(name):
  mesh, schedule, more = CASES[name]
  config = config_of(mesh, schedule, **more)
  if 'W' in config.model.pattern:
    config = schema.with_value(config, 'model.window', 5)
  count = math.prod(mesh_lib.parse(mesh).values())
  return verify.Case(config, jax.devices()[:count])


@pytest.mark.sampled(24)
@pytest.mark.parametrize('name', CASES)
def test_equals_one_device(name):
  case = case_of(name)
  assert case.runner.job.model.depth.empty
  names = 'loss', 'gradients', 'update', 'layout', 'resume'
  rows = verify.certify(case, names)
  assert len(rows) == 6 and all(row.passed for row in rows), rows


@pytest.mark.sampled(12)
def test_an_empty_row_that_counts_is_seen(monkeypatch):
  monkeypatch.setattr(pipeline_step, 'rows_with_layers', lambda built: None)
  loss, gradients = verify.certify(
    case_of('first_dense'), ('loss', 'gradients')
  )
  assert not gradients.passed and gradients.measured > 1e-6, (loss, gradients)


def test_rows_for_nothing_are_told():
  """In the header of a run."""
  from paraxis.train.run import header

  job = case_of('first_dense').runner.job
  assert header._stages(job) == (
    'one_f_one_b, 2 stages, 3 layers a chunk at most; 2 of 6 layer slots are '
    'padding, computed and discarded'
  )
