"""What claims share: fields by full name, devices, certificates, trainings."""

import math
import types

import claim_cases
import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import extra
from paraxis.train import step as step_lib
from paraxis.train.certify import certification
from paraxis.train.certify import verify
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment


def test_fields_have_full_names():
  old = schema.Config()
  new = experiment.fields(
    old,
    {'pipeline.microbatches': 4, 'model.pattern': 'W', 'mesh.zero': 1},
    {'model.experts.pattern': 'DE', 'mesh.zero': 2, 'optimizer.b1': 0},
  )
  assert (new.pipeline.microbatches, new.train.microbatches) == (4, 1)
  assert (new.model.pattern, new.model.experts.pattern) == ('W', 'DE')
  assert new.mesh.zero == 2 and type(new.optimizer.b1) is float
  assert old == schema.Config() == experiment.fields(old)


def test_the_section_of_a_mixer_comes_with_its_letter(own_file):
  """The config without it is a baseline, and has no such section."""
  mine = command_line.load(str(own_file()))
  mine.model.pattern = 'F'
  plain = schema.view(mine)
  found = ablation.key(plain)['config']
  assert [n for n in found if n.startswith(extra.NAME)] == ['extra.decay']
  changes = {'model.pattern': 'Q', 'extra.ema.taps': 5}
  new = experiment.fields(plain, changes)
  assert new.extra.ema.taps == 5 and new.extra.decay == 0.5
  assert ablation.key(new)['config']['extra.ema.taps'] == 5
  del changes['extra.ema.taps']
  assert experiment.fields(plain, changes).extra.ema.taps == 9


@pytest.mark.parametrize(
  'name, value, words',
  [
    ('microbatches', 4, 'Full names: pipeline.microbatches, train.microb'),
    ('pattern', 'W', 'Full names: model.pattern, model.experts.pattern'),
    ('model.d_modl', 8, "Did you mean 'model.d_model'"),
    ('mesh.zero', 4, 'mesh.zero=4 is above its highest valid value 3'),
    ('pipeline.schedule', 'gpip', "Did you mean 'gpipe'"),
    ('model.d_model', '8', 'model.d_model must be int'),
  ],
)
def test_a_wrong_field_is_refused(name, value, words):
  with pytest.raises(errors.UserError) as caught:
    experiment.fields(schema.Config(), {name: value})
  assert words in str(caught.value)


def test_a_mesh_and_its_devices():
  config = experiment.fields(schema.Config(), {'mesh.data': 8, 'mesh.zero': 1})
  case = {'mesh': 'stage=2,context=2', 'train.batch_size': 4}
  config, devices = experiment.on_case(config, case)
  assert (config.mesh.data, config.mesh.stage, config.mesh.context) == (1, 2, 2)
  assert config.mesh.zero == 1 and config.train.batch_size == 4
  assert devices == tuple(jax.devices()[:4])
  assert experiment.case_text(case) == 'stage=2,context=2 train.batch_size=4'
  for few in (lambda mesh: experiment.on(config, mesh), experiment.mesh_of):
    with pytest.raises(errors.UserError, match='16 devices, but 8'):
      few('data=16')


def test_parameters_of_a_run_without_checkpoints(tmp_path):
  job = types.SimpleNamespace(built=types.SimpleNamespace(params={}))
  with support.refused('holds no checkpoint', f'remove {tmp_path}'):
    experiment.restored(job, tmp_path)


def test_differences():
  gap = experiment.gap(np.array([1.0, -3.0]), np.array([1.0, -4.0]))
  assert gap == 0.25
  within = lambda *found: experiment.equal(found, 1e-9, '').passed
  assert within(1e-9, 0.0) and not within(0.0, 2e-9) and not within(math.inf)
  assert not within(math.nan, 0.0) and not within(0.0, math.nan)
  assert not experiment.equal({'a': 0.0}, 1e-9, '', also=False).passed
  near = lambda found: experiment.near(found, [1.0, 2.0], 0.1, '')
  assert near([1.05, 2.0]).measured == '1.05 2.00'
  assert near([1.05, 2.0]).passed and not near([1.0, 2.2]).passed
  assert not near([1.0, math.nan]).passed


CASE = {'mesh': 'data=2', 'train.batch_size': 4}


def equals(run, cases=(CASE,)):
  return experiment.equals_one_device(run, cases=cases, within=1e-9)


@pytest.fixture
def run(tmp_path):
  return claim_cases.run_of(folder=tmp_path)


def test_certificates_are_judged(run, monkeypatch):
  """Each case in float64, the first in float32 too, by `paraxis verify`."""
  seen, gaps, holds = [], {'float64': 1e-15, 'float32': 1e-6}, True

  def certify(subject, names):
    config = subject.config
    seen.append((config.model.dtype, len(subject.devices), names))
    gap = gaps[config.model.dtype]
    return [certification.Verdict(names[0], 1.0, gap, holds, '')]

  monkeypatch.setattr(verify, 'certify', certify)
  right = equals(run, [CASE, {'mesh': 'fsdp=4'}])
  assert right.passed and right.measured == '1.0e-15'
  assert 'data=2 train.batch_size=4: 1e-15; fsdp=4: 1e-15' in right.caveat
  assert 'the first in float32: 1e-06' in right.caveat
  every = ('loss', 'gradients', 'update', 'layout')
  assert [(*s[:2], s[2] == every) for s in seen] == [
    ('float64', 2, True), ('float64', 4, True), ('float32', 2, False)
  ]  # fmt: skip
  assert not run.results.joinpath('config.json').exists()
  gaps['float64'] = 1e-8  # below verify's bound, above the claim's
  assert not equals(run).passed
  gaps['float64'], holds = 0.0, False
  assert not equals(run).passed
  gaps['float64'], holds = math.inf, True
  assert not equals(run).passed


def test_a_wrong_gradient_on_the_mesh_is_found(run, monkeypatch):
  make = step_lib.make

  def wrong(*given):
    made = make(*given)

    def grads(params, batch):
      loss, gradient, aux = made.grads(params, batch)
      if jax.sharding.get_abstract_mesh().size > 1:
        path = next(p for p in gradient if p.endswith('mlp/up'))
        gradient[path] = gradient[path] * (1 + 1e-6)
      return loss, gradient, aux

    return made._replace(grads=grads)

  monkeypatch.setattr(step_lib, 'make', wrong)
  small = {'model.num_layers': 1, 'model.d_model': 16, 'model.num_heads': 2}
  config, devices = experiment.shrunk(run.config, 'data=2', CASE_SMALL | small)
  subject = verify.Case(config, devices)
  rows = verify.certify(subject, ('gradients',))
  worst = max(rows, key=lambda row: row.measured)
  assert worst.measured == pytest.approx(1e-6, rel=0.01)
  assert worst.worst.endswith('mlp/up') and not worst.passed


CASE_SMALL = {'model.mlp': 'gelu', 'model.d_ff': 32, 'train.batch_size': 4}
