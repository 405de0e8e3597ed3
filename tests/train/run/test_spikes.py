"""Loss spikes: found as by the formula, rolled back, and replayed the same."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.configs.base import spike as spike_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import recorder as recorder_lib
from paraxis.train import start
from paraxis.train import step as step_lib
from paraxis.train.run import early
from paraxis.train.run import metrics
from paraxis.train.run import rates as rates_lib
from paraxis.train.run import spikes

CHANGES = {
  'train.steps': 12,
  'train.spike.deviations': 8.0,
  'train.spike.window': 3,
  'train.spike.in_a_row': 2,
  'checkpoint.every': 2,
  'train.print_every': 1,
}


def found(losses, deviations, window, steps):
  """Indices at which the detector fires, by NumPy and lists alone."""
  kept, row, fired = [], 0, []
  for i, x in enumerate(losses):
    if not np.isfinite(x):
      continue
    last = kept[-window:]
    if len(last) == window and x > np.mean(last) + deviations * np.std(last):
      row += 1
      if row >= steps:
        fired.append(i)
    else:
      row = 0
      kept.append(x)
  return fired


def test_batches_of_all_spikes_are_left_out():
  assert spikes.left_out([]) == 0
  assert spikes.left_out([[4, 3], [10, 2]]) == 5


def test_the_detector_against_the_formula():
  rng = np.random.default_rng(0)
  for window, steps, deviations in ((5, 1, 3.0), (8, 2, 2.0), (2, 3, 1.0)):
    losses = list(rng.standard_normal(200))
    losses[50:54] = [9.0, np.nan, 9.0, 8.0]
    losses[120] = 30.0
    spike = spike_lib.Spike(deviations, window, steps)
    detector, fired = spikes.Detector(spike), []
    for i, x in enumerate(losses):
      if detector.seen(i, x):
        fired.append(i)
      if i % 7 == 0:  # resumed from what a checkpoint carries
        detector = spikes.Detector(spike, **detector.state())
    assert fired == found(losses, deviations, window, steps)
    assert fired
  off = spikes.Detector(spike_lib.Spike())
  assert not any(off.seen(i, x) for i, x in enumerate(losses))
  assert off.state() == {}


@pytest.mark.parametrize('known', [True, False])
def test_a_spike_begins_with_its_row(tiny, known):
  """Whatever lies within the row; an older cursor does not say where."""
  job, said = tiny.job(CHANGES), []
  progress = types.SimpleNamespace(say=said.append)
  writers = types.SimpleNamespace(back=lambda step: None)
  recorder = recorder_lib.Recorder(job, writers, progress, (), None)
  detector = spikes.Detector(job.config.train.spike)
  for step, loss in enumerate([2.0, 2.1, 2.2, 9.0, np.nan, np.inf, 9.0], 1):
    assert detector.seen(step, loss) == (step == 7)
  state = detector.state()
  assert state == dict(losses=[2.0, 2.1, 2.2], row=2, first=4)
  if not known:
    del state['first']
  recorder.resume(dict(step=7, spike=state))
  first = 4 if known else 6
  assert recorder.spiked == 7 and recorder.spike()[0] == first
  recorder.forget_spike()
  assert said[0].startswith(f'the loss spiked in steps {first} to 7')
  assert not recorder.spiked and not recorder.astray
  assert recorder.cursor() == {'spike': dict(losses=[], row=0, first=0)}


@pytest.mark.parametrize('window, steps, fits', [(3, 3, True), (3, 4, False)])
def test_a_spike_that_could_never_be_found(tiny, window, steps, fits):
  changes = {'train.spike.window': window, 'train.spike.in_a_row': steps}
  config = tiny.config(changes | {'train.spike.deviations': 4.0})
  if fits:
    return early.check(config)
  with pytest.raises(errors.UserError, match='=3 .*=4 are more than .*=6'):
    early.check(config)


@pytest.mark.parametrize(
  'cycle, fits', [('2:3,1', False), ('2:6,1', True), ('2:2', True), ('', True)]
)
def test_losses_of_rows_of_two_lengths_are_no_series(tiny, cycle, fits):
  changes = CHANGES | {'train.shape_cycle': cycle, 'train.steps': 6}
  if fits:
    return early.check(tiny.config(changes))
  early.check(tiny.config(changes | {'train.spike.deviations': 0.0}))
  with support.refused(
    'train.spike.deviations=8', '64, 32 tokens', "train.shape_cycle='2:3,1'"
  ):
    early.check(tiny.config(changes))


def _sums(job, indices):
  """What tells a batch from others: its tokens, added."""
  return [int(job.batches.batch_at(i).tokens.sum()) for i in indices]


def with_bad_batches(sums):
  """step.make whose loss is 90 more on these batches, and the state wild."""
  bad = jnp.array(sums, jnp.int32)

  def make(built, optimizer, clip_norm):
    made = step_lib.make(built, optimizer, clip_norm)

    def grads(variables, batch, cotangent=1.0):
      loss, found, aux = made.grads(variables, batch, cotangent)
      wild = jnp.isin(batch.tokens.astype(jnp.int32).sum(), bad)
      aux = aux._replace(
        terms={n: x + 90.0 * wild for n, x in aux.terms.items()}
      )
      return (
        loss + 90.0 * wild,
        jax.tree.map(lambda g: g + 5.0 * wild, found),
        aux,
      )

    return made._replace(grads=grads)

  return make


@pytest.fixture(scope='module')
def bad(tiny):
  return with_bad_batches(_sums(tiny.job(CHANGES), [6, 7]))


@pytest.fixture(scope='module')
def rolled(tiny, bad, tmp_path_factory):
  """(workdir, said) of a run whose batches 6 and 7 are bad."""
  workdir = tmp_path_factory.mktemp('rolled') / 'run'
  return workdir, tiny.run(workdir, CHANGES, make_step=bad)[1]


def _cursor(workdir, step):
  with store_lib.Store(workdir / 'checkpoints', read_only=True) as store:
    return store.read_manifest(step)['meta']['cursor']


@pytest.mark.fault(28)
@pytest.mark.invariant(5)
def test_the_run_goes_back_and_leaves_the_batches_out(tiny, rolled, tmp_path):
  workdir, said = rolled
  lines = [line for line in said if 'spiked' in line]
  assert lines == [
    'the loss spiked in steps 7 to 8: back to step 6, leaving out the 2 '
    'batches up to step 8'
  ]
  assert _cursor(workdir, 12)['skips'] == [[6, 2]]
  lines = (workdir / metrics.FILE).read_text().splitlines()
  assert lines.count('{"step": 6, "run/back": 6}') == 1
  rows = metrics.read(workdir)
  assert max(row['train/loss'] for row in rows.values()) < 7
  # The reference: the same steps, given the batches by hand.
  job = tiny.job(CHANGES)
  made = step_lib.make(job.built, job.optimizer, job.config.optimizer.clip_norm)
  with job.context():
    state, losses = job.initial_state(), {}
    grads, update = jax.jit(made.grads), jax.jit(made.update)
    for step, index in enumerate([*range(6), *range(8, 14)], 1):
      batch = job.put(job.batches.batch_at(index), 0, 8)
      state, numbers = update(state, *grads(state.variables, batch))
      losses[step] = float(numbers['loss'])
  assert losses == support.losses(workdir)


def test_a_spike_whose_every_step_is_saved(tiny, bad, rolled, tmp_path):
  """What is saved within a spike does not push out the step before it."""
  changes = CHANGES | {'checkpoint.every': 1, 'checkpoint.keep': 1}
  _, said = tiny.run(tmp_path / 'run', changes, make_step=bad)
  assert any('back to step 6, leaving out' in line for line in said)
  assert support.losses(tmp_path / 'run') == support.losses(rolled[0])


def test_going_back_is_no_step(tiny, bad, tmp_path, monkeypatch):
  """What it takes is in no step's time, by a clock that it puts forward."""
  forward = []
  now = lambda real=time.perf_counter: real() + 1000 * len(forward)
  clock = types.SimpleNamespace(perf_counter=now)
  monkeypatch.setattr(rates_lib, 'time', clock)

  def slow(owner, name):
    made = getattr(owner, name)

    def run(*given):
      forward.append(name)
      return made(*given)

    monkeypatch.setattr(owner, name, run)

  slow(store_lib.Store, 'before')
  slow(start, 'back')
  slow(store_lib.Store, 'drop')
  tiny.run(tmp_path, CHANGES, make_step=bad)
  assert forward == ['before', 'back', 'drop']
  rows = metrics.read(tmp_path)
  assert list(rows) == list(range(1, 13))
  assert all(row['perf/step_seconds'] < 1000 for row in rows.values())


TWO = """
import sys
import test_spikes
from paraxis.train import cli, loop

def run(*given, **named):  # once the devices are chosen
  bad = test_spikes.with_bad_batches(list(map(int, sys.argv[1].split(','))))
  return made(*given, **named, make_step=bad)

made, loop.run = loop.run, run
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.fault(28)
def test_two_processes_go_back_together(tiny, rolled, tmp_path):
  """To the same step, leaving out the same batches: its later steps go."""
  address = support.address()
  sums = ','.join(map(str, _sums(tiny.job(CHANGES), [6, 7])))
  here = pathlib.Path(__file__).parent
  path = [str(here), str(here.parents[1]), os.environ.get('PYTHONPATH', '')]
  processes = [
    subprocess.Popen(
      [
        *(sys.executable, '-c', TWO, sums, 'train', f'--config={tiny.file}'),
        *(f'--workdir={tmp_path}', '--devices=4', f'--process_id={rank}'),
        *(f'--coordinator_address={address}', '--num_processes=2'),
        *(f'--config.{name}={value}' for name, value in CHANGES.items()),
      ],
      env=os.environ
      | dict(
        PARAXIS_CACHE=str(tiny.folder / 'cache'),
        PYTHONPATH=os.pathsep.join(path),
      ),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(2)
  ]
  said = support.ended(processes, seconds=240)
  assert said[0].count('back to step 6, leaving out the 2 batches') == 1
  assert _cursor(tmp_path, 12)['skips'] == [[6, 2]]
  two, one = support.losses(tmp_path), support.losses(rolled[0])
  assert two.keys() == one.keys()
  gaps = np.array(list(two.values())) / np.array(list(one.values())) - 1
  assert np.abs(gaps).max() < 1e-6


@pytest.mark.parametrize('last', [7, 9])
@pytest.mark.invariant(5)
def test_a_replay_takes_the_same_skips(tiny, bad, rolled, tmp_path, last):
  """Stopped within the spike or after it, and resumed, bit for bit."""

  def stop(step, values, job):
    if step == last:
      os.kill(os.getpid(), signal.SIGTERM)

  result, said = tiny.run(tmp_path, CHANGES, make_step=bad, callbacks=[stop])
  assert result['stopped'] == 'SIGTERM' and result['step'] < 12
  said += tiny.run(tmp_path, CHANGES, make_step=bad)[1]
  assert sum('spiked' in line for line in said) == 1
  assert _cursor(tmp_path, 12) == _cursor(rolled[0], 12)
  one, other = (support.fingerprints(w, 12) for w in (tmp_path, rolled[0]))
  assert one == other


def test_without_it_the_bad_batches_are_taken(tiny, bad, tmp_path):
  """The knock-out."""
  changes = CHANGES | {'train.spike.deviations': 0.0}
  said = tiny.run(tmp_path, changes, make_step=bad)[1]
  assert not any('spiked' in line for line in said)
  losses = support.losses(tmp_path)
  assert losses[7] > 90 < losses[8] and 'skips' not in _cursor(tmp_path, 12)


def test_a_second_spike_before_the_next_checkpoint(tiny, tmp_path):
  """Its batches are left out beside those of the first, not in their place."""
  four = with_bad_batches(_sums(tiny.job(CHANGES), [6, 7, 8, 9]))
  said = tiny.run(tmp_path, CHANGES, make_step=four)[1]
  lines = [line for line in said if 'spiked' in line]
  assert [x.partition('leaving out ')[2] for x in lines] == [
    'the 2 batches up to step 8', 'the 4 batches up to step 8'
  ]  # fmt: skip
  assert _cursor(tmp_path, 12)['skips'] == [[6, 4]]
  losses = support.losses(tmp_path)
  assert max(losses.values()) < 7 and list(losses) == list(range(1, 13))


def test_a_spike_at_the_end_without_a_checkpoint(tiny, bad, tmp_path):
  """The step after it is the last one, and is saved."""
  changes = CHANGES | {'train.steps': 9, 'checkpoint.every': 100}
  result, said = tiny.run(tmp_path, changes, make_step=bad)
  assert result['step'] == 9 and result['evaluation'] is not None
  assert any('no checkpoint is older' in line for line in said)
  assert _cursor(tmp_path, 9)['step'] == 9


def test_no_checkpoint_is_older(tiny, bad, tmp_path):
  changes = CHANGES | {'checkpoint.every': 100}
  said = tiny.run(tmp_path, changes, make_step=bad)[1]
  assert sum('no checkpoint is older: training continues' in x for x in said)


def test_a_new_level_is_said_once_and_then_compared_with(tiny, tmp_path):
  all_ = with_bad_batches(_sums(tiny.job(CHANGES), range(6, 12)))
  changes = CHANGES | {'checkpoint.every': 100}
  said = tiny.run(tmp_path, changes, make_step=all_)[1]
  assert [x for x in said if 'spiked' in x] == [
    'the loss spiked in steps 7 to 8, and no checkpoint is older: training '
    'continues'
  ]
  assert min(_cursor(tmp_path, 12)['spike']['losses']) > 50


@pytest.mark.fault(28)
def test_a_run_does_not_go_back_for_ever(tiny, tmp_path):
  all_ = with_bad_batches(_sums(tiny.job(CHANGES), range(6, 40)))
  said = []
  with pytest.raises(errors.IntegrityError) as caught:
    tiny.run(tmp_path, CHANGES, make_step=all_, say=said.append)
  text = str(caught.value)
  assert 'go back to step 6 for the 6th time, and 5 are the most' in text
  assert '--init_from=RUN/6' in text and 'train.spike.deviations=0' in text
  assert sum('back to step 6, leaving out' in x for x in said) == spikes.MOST
