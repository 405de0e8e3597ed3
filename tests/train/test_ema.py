"""optimizer.ema_decay: an average of the parameters, in state and checkpoint.

That every layout gives the numbers and the layout of one device, and reads its
checkpoint bitwise: certify/test_invariance.py, whose cases all have one.
"""

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.train import state as state_lib
from paraxis.train.certify import trial

DECAY = 0.7
LAYOUTS = {
  'one device': {},
  'annotated': dict(mesh=dict(data=2, fsdp=2, tensor=2, zero=1)),
  'explicit': dict(
    mesh=dict(data=2, fsdp=2, context=2, collectives='explicit', zero=2)
  ),
  'one_f_one_b': dict(mesh=dict(stage=2, data=2, tensor=2, zero=1)),
  'zero_bubble': dict(
    mesh=dict(stage=2, fsdp=2, tensor=2), pipeline=dict(schedule='zero_bubble')
  ),
}
FROZEN = 'embedding,layers/attention/*'


def _steps(layout, freeze, bad):
  """([{path: parameter}], [{path: average}]) after each of 4 steps, in order,
  the gradient of step `bad` not finite; the Runner and its last state."""
  config = support.piped(**LAYOUTS[layout], freeze=freeze)
  optimizer = {'optimizer.ema_decay': DECAY, 'optimizer.warmup_steps': 1}
  config = schema.with_values(config, optimizer)
  reference = trial.reference(
    schema.with_value(config, 'train.freeze', ''), True, jax.devices()[0]
  )
  count = 8 if LAYOUTS[layout] else 1
  runner = trial.Runner(config, jax.devices()[:count])
  state, params, averages = runner.start(reference.params), [], []
  for t in range(4):
    loss, grads, aux = runner.gradients(state, reference.batches[t % 2])
    loss = loss * np.nan if t == bad else loss
    state = runner.update(state, loss, grads, aux)
    with runner.job.context():
      flat = state_lib.flatten(state)
      flat = jax.device_get(state_lib.in_order(flat, runner.job.leaves))
    for folder, out in (('params/', params), ('ema/', averages)):
      found = {p: x for p, x in flat.items() if p.startswith(folder)}
      out.append({p.removeprefix(folder): x for p, x in found.items()})
  return params, averages, runner, state


def _average(points):
  """sum_i d^(t-i) p_i / sum_i d^(t-i), by its definition."""
  weights = [DECAY**i for i in reversed(range(len(points)))]
  return sum(w * x for w, x in zip(weights, points, strict=True)) / sum(weights)


@pytest.mark.parametrize(
  'layout, freeze',
  [*((name, '') for name in LAYOUTS), ('zero_bubble', FROZEN)],
)
def test_the_average_of_a_numpy_loop(double, layout, freeze):
  """On each layout, of its own parameters; a skipped step changes no bit."""
  bad = 1
  params, averages, runner, state = _steps(layout, freeze, bad)
  frozen = runner.job.model.frozen
  assert bool(frozen) == bool(freeze)
  assert set(averages[0]) == set(params[0]) - frozen
  for path in averages[0]:
    assert np.array_equal(averages[0][path], averages[1][path])
    counted = [params[t][path] for t in range(4) if t != bad]
    wanted = _average(counted)
    gap = lambda x, wanted=wanted: np.abs(x - wanted).max()
    top = np.abs(wanted).max()
    assert gap(averages[3][path]) < 1e-12 * top
    # What the skipped step counts, or the start, is seen.
    every = _average([x[path] for x in params])
    assert gap(every) > 1e-6 * top
    assert gap(_average(counted[1:])) > 1e-6 * top
  flat = state_lib.flatten(state)
  for path in averages[0]:
    moment = flat[f'optimizer/adamw/mu/{path}']
    assert flat[f'ema/{path}'].sharding == moment.sharding


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_with_adapters_theirs_alone(tiny, name):
  changes = {'train.lora.rank': 2, 'optimizer.name': name}
  job = tiny.job(changes | {'optimizer.ema_decay': DECAY})
  held = {p for p in state_lib.flatten(job.state) if p.startswith('ema/')}
  assert held == {f'ema/{p}' for p in job.model.axes if '_lora_' in p}
  without = tiny.job(changes)
  assert 'ema' not in {p.split('/')[0] for p in without.leaves}


def test_it_begins_as_a_copy(tiny):
  """Of the parameters: an update donates both."""
  job = tiny.job({'optimizer.ema_decay': DECAY}, 'tensor=2')
  with job.context():
    state = job.initial_state()
  for path, x in state.optimizer['ema'].items():
    assert np.array_equal(x, state.params[path])
    pairs = zip(
      x.addressable_shards, state.params[path].addressable_shards, strict=True
    )
    for a, b in pairs:
      a, b = (s.data.unsafe_buffer_pointer() for s in (a, b))
      assert a != b, path


RUN = {
  'optimizer.ema_decay': 0.9, 'train.steps': 4, 'checkpoint.every': 1,
  'checkpoint.keep': 9, 'train.eval_batches': 0, 'mesh.zero': 1,
}  # fmt: skip
MESH = 'data=2,fsdp=2,tensor=2'


@pytest.fixture(scope='module')
def whole(tiny, tmp_path_factory):
  """A run of 4 steps that nothing interrupts."""
  path = tmp_path_factory.mktemp('ema') / 'run'
  tiny.run(path, RUN, MESH)
  return path


def test_a_resumed_run_is_bitwise_the_same(tiny, whole, tmp_path):
  with pytest.raises(support.KilledError):
    tiny.run(tmp_path, RUN, MESH, callbacks=[support.crash_at(2)])
  _, said = tiny.run(tmp_path, RUN, MESH)
  assert any('resumed from step' in line for line in said)
  wanted, found = (support.fingerprints(p, 4) for p in (whole, tmp_path))
  averages = [p for p in wanted if p.startswith('ema/')]
  assert len(averages) == 11 and found == wanted
  assert all(wanted[p] != wanted[f'params/{p[4:]}'] for p in averages)


def test_it_changes_nothing_else(tiny, whole, tmp_path):
  tiny.run(tmp_path, RUN | {'optimizer.ema_decay': 0.0}, MESH)
  wanted, found = (support.fingerprints(p, 4) for p in (whole, tmp_path))
  assert found == {p: x for p, x in wanted.items() if p[:4] != 'ema/'}


@pytest.mark.parametrize('decay', [0.0, 0.99])
def test_a_run_keeps_its_decay(tiny, whole, decay):
  """Off, or another one: refused, and how to go on is said."""
  with support.refused('optimizer.ema_decay was 0.9', '--init_from='):
    tiny.run(whole, RUN | {'optimizer.ema_decay': decay}, MESH)
