"""Runs with a side network: they begin on a base, resume, and are evaluated."""

import shutil

import jax
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.decode.evaluate import command as evaluate
from paraxis.models import decoder
from paraxis.models import trained
from paraxis.train import cli
from paraxis.train import exchange
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train.claims import experiment
from paraxis.train.run import origin as origin_lib

MESH = 'data=2,fsdp=2,tensor=2'
FAST = {
  'train.eval_batches': 0, 'checkpoint.every': 2, 'train.steps': 2,
  'optimizer.name': 'adamw', 'optimizer.learning_rate': 0.05,
  'optimizer.schedule': 'constant',
}  # fmt: skip
RUN = FAST | {'train.side': 4}


@pytest.fixture(scope='module')
def base(tiny, tmp_path_factory):
  """A run of 2 steps without a side network."""
  path = tmp_path_factory.mktemp('side') / 'base'
  tiny.run(path, FAST, MESH)
  return path


@pytest.fixture(scope='module')
def run(tiny, tmp_path_factory):
  """One of 2 steps with it, from new parameters."""
  path = tmp_path_factory.mktemp('side') / 'run'
  tiny.run(path, RUN, MESH)
  return path


def begun(tiny, source, changes):
  """({path: array} that a new run begins with, what is said)."""
  job, said = tiny.job(RUN | changes, MESH), []
  like = state_lib.in_order(state_lib.flatten(job.state), job.leaves)
  made = start.begin(job, origin_lib.open_(str(source)), like, said.append)
  return jax.device_get(made.params), said


def saved(path, step=2):
  source = origin_lib.Run(f'{path}/{step}')
  names = [p.removeprefix('params/') for p in source.saved()[0]]
  return source.arrays(names)


def test_a_run_resumes_on_another_mesh(tiny, run, tmp_path):
  """And its base is as at the start, bit for bit."""
  params = saved(run)
  shutil.copytree(run, tmp_path / 'run')
  result, said = tiny.run(
    tmp_path / 'run', RUN | {'train.steps': 3}, 'data=4,context=2'
  )
  assert result['step'] == 3 and 'resumed from step 2' in '\n'.join(said)
  later = saved(tmp_path / 'run', 3)
  job = tiny.job(RUN)
  with job.context():
    first = jax.device_get(job.initial_state().params)
  assert set(first) == set(params) == set(later)
  added = [p for p in later if trained.is_added(p)]
  assert len(added) == 8
  for path, x in later.items():
    same = path not in added
    assert np.array_equal(x, params[path]) == same, path
    assert np.array_equal(x, first[path]) == same, path


def test_the_optimizer_holds_the_side_network_alone(tiny):
  job = tiny.job(RUN)
  state = state_lib.flatten(job.state)
  held = [p for p in state if p.startswith('optimizer/') and '/side/' in p]
  arrays = [
    p for p, x in state.items() if p.startswith('optimizer/') and x.shape
  ]
  assert held and set(arrays) == set(held)


def test_a_base_gets_one(tiny, base):
  found, said = begun(tiny, base, {})
  assert '--init_from: the side network is new' in said
  for path, x in saved(base).items():
    assert np.array_equal(found[path], x), path
  assert not np.any(found['side/up']) and np.any(found['side/levels/down'])


def test_a_run_begins_with_the_same_one(tiny, run):
  found, said = begun(tiny, run, {})
  assert not any('side network' in line for line in said)
  for path, x in saved(run).items():
    assert np.array_equal(found[path], x), path
  assert np.any(found['side/up'])


@pytest.mark.parametrize('width', [0, 8])
def test_another_width_is_refused(tiny, run, width):
  with pytest.raises(errors.UserError, match='params/side/up') as caught:
    begun(tiny, run, {'train.side': width})
  assert 'give --config.train.side=4' in str(caught.value)


def test_evaluation_reads_it(tiny, run):
  """Probabilities of a text are those of the training's own model."""
  rows = [[*range(40, 60)], [*range(50, 65)]]
  with load.Checkpoint(run) as opened:
    made = evaluate.scorer(opened, {}, batch_size=2, say=lambda line: None)
    found, _ = made._batch(rows)
  config, params = tiny.job(RUN).config, saved(run)
  model = decoder.Decoder(config.model, trained=trained.of(config.train))
  for zero in (False, True):
    used = params | {'side/up': params['side/up'] * (not zero)}
    for row, nats in zip(rows, found[: len(rows)], strict=True):
      n = len(row) - 1
      ids = np.asarray([row[:-1]])
      batch = experiment.rows_of(ids, 0 * ids + 1, np.arange(n)[None])
      x_BTD, _ = model.features(used, batch)
      z_TV = jax.nn.log_softmax(model.logits(used, x_BTD)[0])
      wanted = np.take_along_axis(z_TV, np.asarray(row[1:])[:, None], 1)[:, 0]
      gap = np.abs(np.asarray(nats)[:n] - wanted).max()
      assert (gap < 1e-4) != zero, gap


def test_no_cache_and_no_format_have_it(run, tmp_path, capsys):
  with support.refused('train.side=4', 'Hugging Face'):
    exchange.send(run, tmp_path / 'out', say=lambda line: None)
  assert not (tmp_path / 'out').exists()
  code = cli.main(['decode', f'--checkpoint={run}', '--prompt=a'])
  said = capsys.readouterr().err
  assert code == 2 and 'train.side=4' in said, said
