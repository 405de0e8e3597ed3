"""Runs that begin with a part of another: some layers, its averages.

What becomes of every leaf is printed.
"""

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import cli
from paraxis.train import start
from paraxis.train.run import origin as origin_lib
from paraxis.train.run import taken

RUN = {
  'train.steps': 2, 'train.eval_batches': 0, 'model.num_layers': 4,
  'optimizer.ema_decay': 0.9, 'train.freeze': 'norm/scale',
}  # fmt: skip
MESH = 'data=2,fsdp=2,tensor=2'
STAGES = 'data=2,stage=2,tensor=2'
UP, SCALE = 'layers/mlp/up', 'norm/scale'


@pytest.fixture(scope='module')
def first(tiny, tmp_path_factory):
  """A run of 2 steps: 4 layers, averages, one parameter frozen."""
  path = tmp_path_factory.mktemp('first') / 'run'
  tiny.run(path, RUN, MESH)
  return path


@pytest.fixture(scope='module')
def saved(first):
  """{path: array} of it."""
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with store_lib.Store(first / 'checkpoints', read_only=True) as store:
    like = {
      p: jax.ShapeDtypeStruct(tuple(x['shape']), x['dtype'], sharding=here)
      for p, x in store.read_manifest()['leaves'].items()
    }
    return jax.device_get(store.restore(2, like)[0])


def _begun(tiny, first, changes=(), mesh=MESH, **options):
  """({path: array} of parameters, and 'ema/...', in order; lines; the Job)."""
  said, job = [], tiny.job(RUN | dict(changes), mesh)
  source = origin_lib.open_(str(first), say=said.append, **options)
  with job.context():
    state = start.begin(job, source, start.wanted(job), said.append)
  found = job.in_order(state.params)
  averages = job.in_order(state.optimizer.get('ema', {}))
  return found | {f'ema/{p}': x for p, x in averages.items()}, said, job


@pytest.mark.parametrize('mesh, depth', [(MESH, 4), (STAGES, 4), (MESH, 6)])
def test_some_layers(tiny, first, saved, mesh, depth):
  """Layers 1 and 2, and the ends; the others are those of a new run."""
  changes = {'model.num_layers': depth, 'train.microbatches': 2}
  found, said, job = _begun(tiny, first, changes, mesh, layers='1:3')
  with job.context():
    new = job.in_order(job.initial_state().params)
  for path, x in new.items():
    old = saved[f'params/{path}']
    if not path.startswith('layers/'):
      np.testing.assert_array_equal(found[path], old)
      continue
    assert len(found[path]) == depth
    np.testing.assert_array_equal(found[path][1:3], old[1:3])
    for i in {*range(depth)} - {1, 2}:
      np.testing.assert_array_equal(found[path][i], x[i])
  assert np.abs(found[UP][1:3] - new[UP][1:3]).max() > 1e-3
  line = f'layers 1:3, 2 of {depth}, others new: params/layers/ (9 leaves)'
  assert f'--init_from: taken, {line}' in said


def test_a_shallow_run_takes_the_first(tiny, first, saved):
  found, said, _ = _begun(tiny, first, {'model.num_layers': 2}, layers='0:2')
  np.testing.assert_array_equal(found[UP], saved[f'params/{UP}'][:2])
  assert not any('num_layers=' in line for line in said)


def test_averages_as_parameters(tiny, first, saved):
  """What is frozen has none; the new averages begin as these parameters."""
  found, said, _ = _begun(tiny, first, ema=True)
  for path in saved:
    if not path.startswith('params/'):
      continue
    path = path.removeprefix('params/')
    other = 'params/' if path == SCALE else 'ema/'
    np.testing.assert_array_equal(found[path], saved[other + path])
    if path != SCALE:
      np.testing.assert_array_equal(found[f'ema/{path}'], found[path])
  assert np.abs(found[UP] - saved[f'params/{UP}']).max() > 1e-5
  text = '\n'.join(said)
  assert '--init_from: taken: params/norm/scale' in text
  assert '--init_from: taken from ema/: params/embedding' in text
  assert '--init_from: begins as the parameters: ema/ (10 leaves)' in text


def test_another_optimizer_is_new_and_said(tiny, first):
  """Also that an average is left out, and begins where none was."""
  muon = {'optimizer.name': 'muon', 'optimizer.ema_decay': 0.0}
  _, said, _ = _begun(tiny, first, muon)
  lines = {x.split(': ', 2)[1]: x.split(': ', 2)[2] for x in said if ': ' in x}
  assert lines['taken'] == 'params/ (11 leaves)'
  assert 'optimizer/muon/ (' in lines['new']
  assert 'optimizer/adamw/mu/embedding' in lines['new, its own left out']
  assert 'ema/ (10 leaves)' in lines['left out']
  with support.refused("'adamw'", "'muon'", 'leave out --init_optimizer'):
    _begun(tiny, first, muon, optimizer=True)


@pytest.mark.parametrize(
  'changes, options, words',
  [
    ({'model.num_layers': 2}, {'layers': '0:3'}, ['new run has 2 layers']),
    ({'model.pattern': 'FFGF'}, {'layers': '1:3'}, ['layer 2 is', 'pattern']),
  ],
)
def test_layers_that_do_not_fit(tiny, first, changes, options, words):
  with support.refused(*words):
    _begun(tiny, first, changes, **options)


def test_another_width_is_still_refused(tiny, first):
  with pytest.raises(errors.UserError, match='(?s)d_ff is 32.*layers/mlp/up'):
    _begun(tiny, first, {'model.d_ff': 32}, layers='0:2')


def test_a_run_and_its_flags(tiny, first, tmp_path, capsys):
  """Said by a dry run; kept by the manifest; resumed with the same alone."""
  argv = [
    'train', f'--config={tiny.file}', f'--init_from={first}', '--dry_run',
    '--init_layers=0:2', '--init_ema', '--config.model.num_layers=4',
  ]  # fmt: skip
  assert cli.main(argv) == 0
  shown = capsys.readouterr().out
  assert 'taken from ema/, layers 0:2, 2 of 4, others new' in shown
  opened = lambda **options: origin_lib.open_(str(first), **options)
  both = dict(layers='0:2', ema=True)
  tiny.run(tmp_path, RUN, MESH, source=opened(**both))
  tiny.run(tmp_path, RUN, MESH, source=opened(**both))
  for options in ({}, dict(ema=True), dict(layers='0:2')):
    with support.refused('its averages, layers 0:2', '--workdir'):
      tiny.run(tmp_path, RUN, MESH, source=opened(**options))


def test_decoding_reads_averages(first, saved):
  said = []
  for ema in (False, True):
    with load.Checkpoint(first, say=said.append, ema=ema) as opened:
      config = schema.view(opened.config())
      _, params, *_ = opened.parts(config, MESH)
    for path, x in params.items():
      own = 'ema/' if ema and path != SCALE else 'params/'
      np.testing.assert_array_equal(x, saved[own + path])
  assert 'averages of step 2' in said[-1] and 'averages' not in said[0]


def test_decoding_without_averages(tiny, tmp_path, capsys):
  tiny.run(tmp_path, RUN | {'optimizer.ema_decay': 0.0}, MESH)
  with load.Checkpoint(tmp_path, ema=True) as opened:
    with support.refused('--ema', 'holds no average', 'leave out --ema'):
      opened.parts(schema.view(opened.config()), MESH)
  argv = ['decode', '--weights=smollm2', '--ema', '--prompt=a']
  assert cli.main(argv) == 2
  assert '--ema: --weights=smollm2' in capsys.readouterr().err


def test_an_export_of_averages(first, saved):
  found = origin_lib.Run(str(first), flag='--checkpoint', ema=True)
  arrays = found.arrays([UP, SCALE])
  np.testing.assert_array_equal(arrays[UP], saved[f'ema/{UP}'])
  np.testing.assert_array_equal(arrays[SCALE], saved[f'params/{SCALE}'])


def test_every_leaf_is_in_one_line():
  wanted = ['params/a', 'params/b/c', 'params/b/d', 'ema/a', 'step', 'x/y']
  there = ['params/a', 'params/b/c', 'params/e', 'params/f', 'step']
  read = ['params/a', 'params/b/c', 'params/f']
  found = taken.fates(wanted, there, read, {'params/a': '3 rows'})
  assert set(found) == {*wanted, *there}
  assert taken.lines(found) == [
    'begins as the parameters: ema/a',
    'left out: params/e',
    'merged into its matrix: params/f',
    'new: params/b/d, x/y',
    'new, its own left out: step',
    'taken: params/b/c',
    'taken, 3 rows: params/a',
  ]
