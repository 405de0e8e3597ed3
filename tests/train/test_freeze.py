"""train.freeze: no gradient, no state of the optimizer, not one bit changed."""

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.train import state as state_lib
from paraxis.train.certify import trial
from paraxis.train.run import origin

SOME = 'embedding,layers/attention/*,*norm*'
LAYOUTS = {
  'annotated': dict(mesh=dict(data=2, fsdp=2, tensor=2, zero=1)),
  'explicit': dict(mesh=dict(data=2, fsdp=2, context=2,
                             collectives='explicit', zero=2)),
  'one_f_one_b': dict(mesh=dict(stage=2, fsdp=2, tensor=2)),
  'zero_bubble': dict(
    mesh=dict(stage=2, fsdp=2, tensor=2), pipeline=dict(schedule='zero_bubble')
  ),
}  # fmt: skip


def _one_step(freeze, **layout):
  """(Reference of all, gradients, parameters after a step, Runner)."""
  config = support.piped(**layout, freeze=freeze)
  plain = schema.with_value(config, 'train.freeze', '')
  reference = trial.reference(plain, True, jax.devices()[0])
  runner = trial.Runner(config, jax.devices())
  state = runner.start(reference.params)
  found = runner.gradients(state, reference.batches[0])
  moved = runner.update(state, *found)
  order = runner.job.in_order
  return reference, order(found[1]), order(moved.params), runner


@pytest.mark.parametrize('layout', LAYOUTS)
def test_the_others_learn_as_without(double, layout):
  reference, gradients, moved, runner = _one_step(SOME, **LAYOUTS[layout])
  frozen = runner.job.model.frozen
  assert {'embedding', 'layers/attention/key', 'norm/scale'} < frozen
  assert set(gradients) == set(reference.gradients) - frozen
  wanted = {p: reference.gradients[p] for p in gradients}
  support.close(gradients, wanted, 1e-9)
  for path, x in reference.params.items():
    assert np.array_equal(moved[path], x) == (path in frozen), path


def test_everything_in_products_is_frozen(double):
  """W of a pipeline has nothing to do."""
  frozen = 'layers/mlp/*,layers/attention/*'
  reference, gradients, _, _ = _one_step(frozen, **LAYOUTS['zero_bubble'])
  wanted = {p: reference.gradients[p] for p in gradients}
  support.close(gradients, wanted, 1e-9)
  assert not any('/mlp/' in path for path in gradients)


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_no_state_of_the_optimizer(tiny, name):
  changes = {'optimizer.name': name, 'train.freeze': SOME}
  job = tiny.job(changes)
  flat = state_lib.flatten(job.state)
  held = {p: x for p, x in flat.items() if p.startswith('optimizer/')}
  learned = set(job.model.axes) - job.model.frozen
  for path in job.model.axes:
    assert any(p.endswith(f'/{path}') for p in held) == (path in learned)
  mirrors = {p: x for p, x in held.items() if p.endswith((*job.model.axes,))}
  numbers = sum(x.size for x in mirrors.values())
  sizes = job.model.sizes(job.state.params)
  matrices = {p for p in learned if job.model.kinds[p] == 'matrix'}
  each = {p: 1 if name == 'muon' and p in matrices else 2 for p in learned}
  assert numbers == sum(each[p] * sizes[p] for p in learned)


def test_a_run_keeps_every_bit(tiny, tmp_path):
  changes = {'train.freeze': SOME, 'train.steps': 2, 'checkpoint.every': 1}
  _, said = tiny.run(tmp_path, changes, 'data=2,fsdp=2')
  said = '\n'.join(said)
  assert ' learned, ' in said and ' frozen' in said
  assert 'the frozen parameters are random: no --init_from' in said
  first, last = (support.fingerprints(tmp_path, step) for step in (1, 2))
  frozen = tiny.job(changes).model.frozen
  for path in first:
    if path.startswith('params/'):
      same = first[path] == last[path]
      assert same == (path.removeprefix('params/') in frozen), path
  source = origin.Run(str(tmp_path))
  _, said = tiny.run(tmp_path / 'new', changes, 'data=2', source=source)
  assert not any('are random' in line for line in said)
  with support.refused('train.freeze was', '--init_from'):
    tiny.run(tmp_path, changes | {'train.freeze': ''}, 'data=2,fsdp=2')


def test_a_frozen_bias_of_a_router_stays(double):
  """And counts of experts, which no pattern freezes, go on."""
  experts = model_schema.Experts(count=4, bias_rate=0.1, region='', balance=0.0)
  config = schema.with_values(
    support.piped(freeze='layers/moe/bias'), {'model.experts': experts}
  )
  for freeze, same in (('layers/moe/*', True), ('layers/moe/up', False)):
    config = schema.with_value(config, 'train.freeze', freeze)
    runner = trial.Runner(config, jax.devices()[:1])
    reference = trial.reference(config, True, jax.devices()[0])
    moved = runner.steps(reference.params, reference.batches[:1]).variables
    before = reference.params
    equal = lambda p: np.array_equal(moved[p], before[p])  # noqa: B023
    assert equal('layers/moe/bias') == same
    assert not equal('layers/moe/load')
