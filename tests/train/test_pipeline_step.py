"""The decoder on pipeline stages: its options, its evaluation, whole runs.

That every schedule gives the gradients of one device is in test_invariance.py.
"""

import collections
import dataclasses
import shutil

import jax
from jax.extend import core
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import batch as batch_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.sharding.pipeline import schedules
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.steps import gradients
from paraxis.train.steps import pipeline_step


def on_devices(config):
  """(trial.Runner, its state, trial.Reference)."""
  side = trial.Runner(config, experiment.devices_of(config))
  reference = trial.reference(config, True, jax.devices()[0])
  return side, side.start(reference.params), reference


# ------------------------------------------------------------ stored, or not


@pytest.mark.parametrize('unroll', [1, 8], ids=['scanned', 'unrolled'])
@pytest.mark.parametrize('schedule', ['one_f_one_b', 'zero_bubble'])
def test_what_is_stored_holds_no_parameter(double, schedule, unroll):
  """Phases read parameters in place: kept rows grow with tokens alone."""
  kept = []

  class Spy(pipeline_step.Pipeline):
    def forward(self, values, x, context, mask):
      y, found, rows = super().forward(values, x, context, mask)
      whole = {v.shape for v in values.values()}
      kept.append((rows.arrays, whole | {shape[1:] for shape in whole}))
      return y, found, rows

  config = support.piped(
    dict(stage=2), dict(activations='store', schedule=schedule)
  )
  config = experiment.fields(config, {'model.unroll': unroll})
  side, state, reference = on_devices(config)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pipeline_step, 'Pipeline', Spy)
    with side.job.context():
      batch = side.put(reference.batches[0])
      jax.eval_shape(side._grads, state.variables, batch)
  rows, parameters = kept[0]
  assert len(rows) > 10 and len(parameters) > 5
  for row in rows:
    assert row.shape not in parameters, row.shape


def test_a_row_that_holds_no_layer_counts_nothing(double):
  """Three layers on two stages: one of four rows is empty."""
  config = support.piped(dict(stage=2), dict(microbatches=2), 3)
  recurrent = {'model.pattern': 'R', 'model.recurrent.heads': 2}
  side, state, reference = on_devices(experiment.fields(config, recurrent))
  with side.job.context():
    *_, aux = side._grads(state.variables, side.put(reference.batches[0]))
  assert aux.tallies['newton'][0] == 3 * 2  # layers x microbatches


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


def test_one_microbatch_on_stages_equals_one_device():
  """Its batch has no axis of microbatches."""
  config = support.piped(dict(stage=2, data=4), dict(microbatches=1), 2)
  rows = support.certify(config)
  assert len(rows) == 3 and all(row.passed for row in rows), rows


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
  """gradients.PerShard.final that leaves one parameter's gradient as it is."""
  right = gradients.PerShard.final

  def final(self, p, total):
    return total if p == path else right(self, p, total)

  return final


def differing(side, state, reference):
  """Paths of gradients that are not those of one device."""
  found = side.gradients(state, reference.batches[0])[1]
  found = side.job.in_order(found)
  return {
    path
    for path, g in reference.gradients.items()
    if np.abs(found[path] - g).max() > 1e-9 * np.abs(g).max()
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
  monkeypatch.setattr(gradients.PerShard, 'final', without_sum(path))
  found = differing(*on_devices(support.piped(CUBE, layers=2)))
  assert found == ({path} if path else set())


# ------------------------------------ gathers in the dtype of the products
#
# A cast commutes with a gather: loss and every gradient are, bit for bit, those
# of a pipeline that gathers parameters in their own dtype.

# Parameters in float32, products in bfloat16.
NARROW = schema.Config(
  model=schema.Model(
    vocab_size=32, d_model=16, num_heads=4, head_dim=4, d_ff=24, num_layers=4,
    attention_block=16, dtype='bfloat16', param_dtype='float32',
    gated_linear=mixer_schema.GatedLinear(heads=4, gate_rank=2, conv_width=3),
    mamba=mixer_schema.Mamba(head_dim=4, state=4, dt_rank=2, groups=2),
    recurrent=mixer_schema.Recurrent(heads=4),
    tcn=mixer_schema.Tcn(kernel=3, depth=2, chunk=4),
    latent=mixer_schema.Latent(
      rank=8, query_rank=8, nope_dim=2, rope_dim=2, value_dim=2
    ),
  ),
  data=schema.Data(sequence_length=16),
  train=schema.Train(batch_size=8),
)  # fmt: skip
STORE = {'pipeline.activations': 'store'}
APART = {'pipeline.schedule': 'zero_bubble'}
EXPERTS = {
  'model.experts.count': 4, 'model.experts.top_k': 2, 'model.experts.d_ff': 16,
  'model.experts.region': 'data',
}  # fmt: skip


def gathers(jaxpr):
  """{(name of the dtype, shape): times} of every all_gather in it."""
  found = collections.Counter()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'all_gather':
      x = eqn.invars[0].aval
      found[x.dtype.name, x.shape] += 1
    for inner in core.jaxprs_in_params(eqn.params):
      found += gathers(inner)
  return found


def measured(config):
  """((loss, {path: gradient}), `gathers` of the step)."""
  side, state, reference = on_devices(config)
  with side.job.context():
    batch = side.put(reference.batches[0])
    traced = side._grads.trace(state.variables, batch)
    results = traced.lower().compile()(state.variables, batch)
  return jax.device_get(results), gathers(traced.jaxpr.jaxpr)


def wide(config):
  """`measured` with every parameter gathered in its own dtype."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      pipeline_step.Pipeline, '_gathered_dtype', lambda self, path, own: own
    )
    return measured(config)


@pytest.mark.parametrize(
  'mesh, changes',
  [
    ('stage=2,fsdp=2', {'model.num_layers': 5}),
    ('stage=2,fsdp=2', STORE | {'model.num_layers': 5}),
    (
      'stage=2,fsdp=2',
      {'pipeline.schedule': 'interleaved', 'pipeline.chunks': 2}
      | {'train.remat': 'full'},
    ),
    ('stage=2,fsdp=2,tensor=2', APART),
    ('stage=2,fsdp=2', APART | {'model.pattern': 'GM'}),
    ('stage=2,fsdp=2', APART | {'model.pattern': 'SR'}),
    (
      'stage=2,fsdp=2',
      {'pipeline.schedule': 'v_half', 'pipeline.chunks': 2}
      | {'model.pattern': 'R'},
    ),
    ('stage=2,fsdp=2', STORE | {'model.pattern': 'LC'}),
    ('stage=2,fsdp=2', {'model.pattern': 'A-M'}),
    ('stage=2,data=2,fsdp=2', EXPERTS),
    ('stage=2,data=2,fsdp=2', EXPERTS | APART),
  ],
  ids=lambda x: x if isinstance(x, str) else '.'.join(map(str, x.values())),
)
def test_parameters_travel_in_the_dtype_of_products(mesh, changes):
  config, _ = experiment.on(NARROW, mesh, changes)
  (loss, gradients, _), narrow_ = measured(config)
  (same_loss, same, _), wide_ = wide(config)
  # The table of the vocabulary travels once a step, in float32.
  tables = {(d, shape) for d, shape in narrow_ if d == 'float32'}
  assert len(tables) <= 1, tables
  count = lambda found: collections.Counter(
    {s: sum(n for (_, t), n in found.items() if t == s) for _, s in found}
  )
  assert count(narrow_) == count(wide_)  # no more and no fewer
  assert sum(n for (d, _), n in wide_.items() if d == 'float32') > 10
  assert loss == same_loss
  for path, g in gradients.items():
    assert g.dtype == np.float32
    np.testing.assert_array_equal(g, same[path], err_msg=path)


# ---------------------------------------------------------------- whole runs

STAGES, DATA = 'stage=2,data=2', 'data=4'
CHANGES = {
  'train.steps': 3, 'train.batch_size': 8, 'checkpoint.every': 1,
  'checkpoint.keep': 5, 'model.num_layers': 5,
  'pipeline.schedule': 'interleaved', 'pipeline.chunks': 2,
}  # fmt: skip


@pytest.fixture(scope='module')
def on_stages(tiny, tmp_path_factory):
  """The workdir of a run of 3 steps: 5 layers in 2 chunks on each of 2 stages.

  That a run on stages equals one on one device: data/test_batch_ramp.py.
  """
  workdir = tmp_path_factory.mktemp('stages') / 'run'
  tiny.run(workdir, CHANGES, STAGES)
  return workdir


def forget(workdir, after):
  """Removes the checkpoints of later steps."""
  for folder in (workdir / 'checkpoints').iterdir():
    if folder.name.isdigit() and int(folder.name) > after:
      shutil.rmtree(folder)


@pytest.mark.fault(26)
def test_a_run_resumes_on_other_meshes(tiny, on_stages, tmp_path):
  losses = support.losses(on_stages)
  assert losses[3] < losses[1]
  here = shutil.copytree(on_stages, tmp_path / 'run')
  for last, mesh in ((1, DATA), (2, STAGES)):
    forget(here, after=last)
    _, said = tiny.run(here, CHANGES, mesh)
    assert f'resumed from step {last}, every leaf verified' in said
    found = support.losses(here)
    for step in (2, 3):
      assert abs(found[step] / losses[step] - 1) < 1e-5


def read_and_save(tiny, source, mesh, target):
  """A checkpoint read on a mesh and saved from there: its fingerprints."""
  job = tiny.job(CHANGES, mesh)
  open_ = lambda run: store_lib.Store(
    run / 'checkpoints', store_lib.Options(asynchronous=False)
  )
  with job.context(), open_(source) as store, open_(target) as other:
    state, step, _ = start.state(job, store, None, lambda line: None)
    tree = state_lib.in_order(state_lib.flatten(state), job.leaves)
    axes = state_lib.axes(job.leaves)
    other.save(step, tree, axes, start.meta(job, step))
  return support.fingerprints(target, step)


def test_the_state_is_bitwise_the_same_on_any_mesh(
  tiny, on_stages, tmp_path, monkeypatch
):
  wanted = support.fingerprints(on_stages, 3)
  there, back = tmp_path / 'there', tmp_path / 'back'
  assert read_and_save(tiny, on_stages, DATA, there) == wanted
  assert read_and_save(tiny, there, STAGES, back) == wanted
  # Layers in another order are seen.
  right = state_lib._staged_again
  reverse = lambda x, *layout: right(x[::-1], *layout)
  monkeypatch.setattr(state_lib, '_staged_again', reverse)
  assert read_and_save(tiny, there, STAGES, tmp_path / 'wrong') != wanted
