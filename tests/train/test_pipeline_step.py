"""The decoder on pipeline stages: its options, its evaluation, whole runs.

That every schedule gives the gradients of one device is in test_invariance.py.
"""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.sharding.pipeline import schedules
from paraxis.train import loop
from paraxis.train import pipeline_step
from paraxis.train import program as job_lib
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import trial

pytestmark = pytest.mark.usefixtures('quick_to_compile')


def on_devices(config):
  """(trial.Runner, its state, trial.Reference)."""
  sizes = dataclasses.astuple(config.mesh)[:6]
  side = trial.Runner(config, jax.devices()[: int(np.prod(sizes))])
  reference = trial.reference(config, True, jax.devices()[0])
  return side, side.start(reference.params), reference


@pytest.fixture
def double():
  with jax.enable_x64(True):
    yield


def in_order(side, gradients):
  model = side.job.model
  with side.job.context():
    # As checkpoints hold them; `params/` is how a state names parameters.
    flat = {f'params/{p}': g for p, g in gradients.items()}
    return jax.device_get(state_lib.in_order(flat, model))


# ------------------------------------------------------------ stored, or not


@pytest.mark.parametrize(
  'pipeline, remat',
  [
    (dict(), 'none'),
    (dict(schedule='interleaved', chunks=2), 'full'),
    (dict(schedule='zero_bubble'), 'none'),
    (dict(schedule='zero_bubble', chunks=2), 'none'),
    (dict(schedule='v_half', chunks=2), 'full'),
  ],
  ids=lambda x: (
    f'{x.get("schedule", "")}{x.get("chunks", "")}'
    if isinstance(x, dict)
    else x
  ),
)
def test_stored_activations_equal_those_computed_again(double, pipeline, remat):
  found = []
  for activations in ('recompute', 'store'):
    config = support.piped(
      dict(stage=2, tensor=2), pipeline | dict(activations=activations), 5,
      remat=remat,
    )  # fmt: skip
    side, state, reference = on_devices(config)
    loss, gradients = side.gradients(state, reference.batches[0])
    found.append((float(loss), jax.device_get(gradients)))
  (loss, one), (stored_loss, other) = found
  assert abs(stored_loss / loss - 1) < 1e-13 and one.keys() == other.keys()
  for path, g in one.items():
    gap = np.abs(g - other[path]).max()
    assert gap <= 1e-12 * np.abs(g).max(), path


@pytest.mark.parametrize('unroll', [1, 8], ids=['scanned', 'unrolled'])
@pytest.mark.parametrize('schedule', ['one_f_one_b', 'zero_bubble'])
def test_what_is_stored_holds_no_parameter(double, schedule, unroll):
  """They are read where they lie: kept rows grow with tokens alone."""
  kept = []

  class Spy(pipeline_step.Pipeline):
    def forward(self, values, x, context, mask):
      y, rows = super().forward(values, x, context, mask)
      whole = {v.shape for v in values.values()}
      kept.append((rows.arrays, whole | {shape[1:] for shape in whole}))
      return y, rows

  config = support.piped(
    dict(stage=2), dict(activations='store', schedule=schedule)
  )
  model = dataclasses.replace(config.model, unroll=unroll)
  config = dataclasses.replace(config, model=model)
  side, state, reference = on_devices(config)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pipeline_step, 'Pipeline', Spy)
    with side.job.context():
      batch = side.put(reference.batches[0])
      jax.eval_shape(side._grads, state.params, batch)
  rows, parameters = kept[0]
  assert len(rows) > 10 and len(parameters) > 5
  for row in rows:
    assert row.shape not in parameters, row.shape


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
  'pipeline, layers',
  [
    (dict(), 3),
    (dict(schedule='interleaved', chunks=2), 5),
    (dict(schedule='v_half', chunks=2), 4),
    (dict(schedule='zero_bubble'), 2),
  ],
  ids=lambda x: x.get('schedule', '') if isinstance(x, dict) else '',
)
def test_evaluation_equals_one_device(double, pipeline, layers):
  side, state, reference = on_devices(
    support.piped(dict(stage=2, data=2), pipeline, layers)
  )
  # An evaluation takes the rows of one microbatch.
  rows = side.job.config.microbatch_rows
  cut = lambda x: x[:rows] if np.ndim(x) else x
  batch = batch_lib.Batch(*map(cut, reference.batches[0]))
  batch = batch._replace(denominator=batch.weights.sum())
  plain = dataclasses.replace(
    side.job.config, mesh=schema.Mesh(), pipeline=schema.Pipeline(),
    train=dataclasses.replace(side.job.config.train, batch_size=rows),
  )  # fmt: skip
  one = trial.Runner(plain, jax.devices()[:1])
  wanted = one.evaluate(one.start(reference.params), batch)
  assert abs(side.evaluate(state, batch) / wanted - 1) < 1e-12
  other = batch._replace(tokens=(batch.tokens + 1) % 32)
  assert abs(side.evaluate(state, other) / wanted - 1) > 1e-6


def test_one_microbatch_on_stages_equals_one_device(double):
  """Its batch has no axis of microbatches."""
  config = support.piped(dict(stage=2), dict(microbatches=1), 2)
  side, state, reference = on_devices(config)
  loss, gradients = side.gradients(state, reference.batches[0])
  assert float(loss) == pytest.approx(reference.loss, rel=1e-12)
  found = {
    p.removeprefix('params/'): g for p, g in in_order(side, gradients).items()
  }
  assert trial.worst(found, reference.gradients)[0] < 1e-9


@pytest.mark.parametrize('name', [n for n in schedules.NAMES if n != 'skip'])
def test_the_schedule_of_an_evaluation_visits_every_stage_once(name):
  chunks = max(schedules.CHUNKS[name][0], 1)
  found = pipeline_step.evaluation(schedules.make(name, 4, 4, chunks))
  assert found.microbatches == 1 and not found.faults()
  assert found.paths == (tuple(range(4 * chunks)),)
  assert sorted(found.when['F']) == [(0, s) for s in range(4 * chunks)]


def test_an_evaluation_leaves_no_stage_out():
  skip = schedules.make('skip', 4, 8, fraction=0.25)
  found = pipeline_step.evaluation(skip)
  assert found.paths == ((0, 1, 2, 3),) and found.microbatches == 1


# ----------------------------------------------------- one sum at the very end

CUBE = dict(stage=2, data=2, tensor=2)


def without_sum(path):
  """step._PerShard.final that leaves one parameter's gradient as it is."""
  right = step_lib._PerShard.final

  def final(self, p, total):
    return total if p == path else right(self, p, total)

  return final


def differing(side, state, reference):
  """Paths of gradients that are not those of one device."""
  found = side.gradients(state, reference.batches[0])[1]
  found = in_order(side, found)
  return {
    path
    for path, g in reference.gradients.items()
    if np.abs(found[f'params/{path}'] - g).max() > 1e-9 * np.abs(g).max()
  }


@pytest.mark.parametrize(
  'path',
  [
    'layers/attention_norm/scale',
    'norm/scale',
    'embedding',
    'layers/mlp/up',
    '',
  ],
)
def test_a_sum_that_is_left_out_shows_in_its_leaf_alone(
  double, monkeypatch, path
):
  monkeypatch.setattr(step_lib._PerShard, 'final', without_sum(path))
  found = differing(*on_devices(support.piped(CUBE, layers=2)))
  assert found == ({path} if path else set())


# ---------------------------------------------------------------- whole runs


STAGES, DATA, ONE = dict(stage=2, data=2), dict(data=4), dict(data=1)


def run_config(tiny, mesh):
  sizes = dict(stage=1, data=1, fsdp=1, tensor=1) | mesh
  return tiny.config({
    'train.steps': 3, 'train.batch_size': 8, 'checkpoint.every': 1,
    'checkpoint.keep': 5, 'model.num_layers': 3,
    **{f'mesh.{axis}': n for axis, n in sizes.items()},
  })  # fmt: skip


def devices_of(mesh):
  return jax.devices()[: int(np.prod(list(mesh.values())))]


def train(tiny, workdir, mesh, said):
  """Steps up to the third on some devices -> {step: loss}."""
  loop.run(
    run_config(tiny, mesh), workdir, say=said.append,
    devices=devices_of(mesh),
  )  # fmt: skip
  return support.losses(workdir)


@pytest.fixture(scope='module')
def on_stages(tiny, tmp_path_factory):
  """(workdir, losses) of a run of 3 steps on two stages."""
  workdir = tmp_path_factory.mktemp('stages') / 'run'
  return workdir, train(tiny, workdir, STAGES, [])


def forget(workdir, after):
  for folder in (workdir / 'checkpoints').iterdir():
    if folder.name.isdigit() and int(folder.name) > after:
      shutil.rmtree(folder)


def test_a_run_equals_one_device(tiny, on_stages, tmp_path):
  _, losses = on_stages
  plain = train(tiny, tmp_path / 'run', ONE, [])
  assert list(plain) == list(losses) == [1, 2, 3]
  for step, loss in plain.items():
    assert abs(losses[step] / loss - 1) < 1e-5
  assert plain[3] < plain[1]  # it learns


def test_a_run_goes_on_elsewhere_and_comes_back(tiny, on_stages, tmp_path):
  workdir, losses = on_stages
  here = tmp_path / 'run'
  shutil.copytree(workdir, here)
  forget(here, after=1)
  said = []
  there = train(tiny, here, DATA, said)
  forget(here, after=2)
  back = train(tiny, here, STAGES, said)
  resumed = [line for line in said if 'resumed from step' in line]
  assert [line.split()[3] for line in resumed] == ['1,', '2,']
  for found in (there, back):
    for step in (2, 3):
      assert abs(found[step] / losses[step] - 1) < 1e-5


def fingerprints(store, step):
  leaves = store.read_manifest(step)['leaves']
  return {path: leaf['fingerprint'] for path, leaf in leaves.items()}


def read_and_save(tiny, source, mesh, target):
  """A checkpoint read on a mesh and saved from there: its fingerprints."""
  job = job_lib.of_shapes(run_config(tiny, mesh), '', devices_of(mesh))
  open_ = lambda run: store_lib.Store(run / 'checkpoints', asynchronous=False)
  with job.context(), open_(source) as store:
    shapes = state_lib.flatten(job.state)
    like = state_lib.in_order(shapes, job.model)
    step, tree, meta = store.restore_latest_good(like)
    flat = state_lib.on_stages(tree, shapes, job.model)
    state = state_lib.unflatten(job.state, flat)
    assert all(flat[p].shape == shapes[p].shape for p in shapes)
    with open_(target) as other:
      tree = state_lib.in_order(state_lib.flatten(state), job.model)
      other.save(step, tree, state_lib.axes(state, job.model), meta)
  return support.fingerprints(target, step)


def test_the_state_is_bitwise_the_same_on_any_mesh(tiny, on_stages, tmp_path):
  wanted = support.fingerprints(on_stages[0], 3)
  there, back = tmp_path / 'there', tmp_path / 'back'
  assert read_and_save(tiny, on_stages[0], DATA, there) == wanted
  assert read_and_save(tiny, there, STAGES, back) == wanted
  assert len(set(wanted.values())) > 20  # leaves differ, so orders would show
