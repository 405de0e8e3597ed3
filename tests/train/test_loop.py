"""The loop: trains, stops, resumes bit for bit, and never saves a NaN."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import types

import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import load
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train import loop
from paraxis.train import recorder as recorder_lib
from paraxis.train import step as step_lib
from paraxis.train.claims import experiment
from paraxis.train.run import evaluate
from paraxis.train.run import metrics
from paraxis.train.run import stop as stop_lib
from paraxis.train.run import workdir as workdir_lib


@pytest.fixture(scope='module')
def whole(tiny, tmp_path_factory):
  """(workdir, result, said, values by step) of an unbroken run of 6 steps."""
  workdir, seen = tmp_path_factory.mktemp('whole') / 'run', {}
  see = lambda step, values, job: seen.update({step: values})
  return workdir, *tiny.run(workdir, callbacks=[see]), seen


def _values(workdir, name='train/loss'):
  rows = metrics.read(workdir)
  return np.array([rows[s][name] for s in rows if name in rows[s]])


def _assert_same_run(resumed, straight, steps):
  """Every loss, of a step that ran twice too, and the last checkpoint."""
  once, often = support.all_losses(straight), support.all_losses(resumed)
  assert list(once) == list(often) == list(range(1, steps + 1))
  assert all(set(often[s]) == set(once[s]) for s in once)
  found, wanted = (support.fingerprints(w, steps) for w in (resumed, straight))
  assert found == wanted


def _steps(workdir):
  folders = (workdir / 'checkpoints').iterdir()
  return sorted(int(p.name) for p in folders if p.name.isdigit())


@pytest.mark.smoke
def test_a_run(whole, tiny):
  workdir, result, said, seen = whole
  assert result['step'] == 6 and result['stopped'] == ''
  rows = metrics.read(workdir)
  assert list(rows) == [1, 2, 3, 4, 5, 6]
  assert {step: v['train/loss'] for step, v in seen.items()} == support.losses(
    workdir
  )
  assert rows[6]['train/loss'] == result['loss'] < rows[1]['train/loss']
  assert abs(rows[1]['train/loss'] - np.log(264)) < 0.2
  assert rows[6]['eval/bits_per_byte'] == result['evaluation'].bits_per_byte
  assert {'train/grad_norm', 'train/learning_rate', 'train/skipped'} < set(
    rows[1]
  )
  assert rows[1]['perf/tokens_per_second'] > 0
  assert rows[1]['perf/memory_bytes'] > 2**20
  assert workdir_lib.read_config(workdir) == tiny.config()
  assert _steps(workdir) == [2, 4, 6]
  text = '\n'.join(said)
  for part in ('gradient: trace', 'update: trace', 'first step after'):
    assert text.count(part) == 1
  assert 'step 3/6  loss ' in text


def test_what_experts_add_to_the_loss_is_logged(tiny, tmp_path):
  """Of two layers; at the start p is nearly 1 / E, and every target valid."""
  experts = dict(count=4, d_ff=8, balance=1.0, router_z=0.01)
  fields = experiment.under('model.experts', experts) | {'model.init_std': 1e-3}
  tiny.run(tmp_path, fields | {'train.steps': 1, 'train.eval_batches': 0})
  (row,) = metrics.read(tmp_path).values()
  assert row['train/balance_loss'] == pytest.approx(2 * 1.0, rel=0.1)
  assert row['train/z_loss'] == pytest.approx(2 * 0.01 * np.log(4) ** 2, 0.1)
  assert abs(row['train/loss'] - np.log(264)) < 0.2  # nats alone


@pytest.mark.smoke
@pytest.mark.invariant(1)
def test_resume_is_bitwise(whole, tiny, tmp_path):
  """Killed after the checkpoint of step 4 and again later: as if it was not."""
  straight, *_ = whole
  for last in (3, 5):
    with pytest.raises(support.KilledError):
      tiny.run(tmp_path, callbacks=[support.crash_at(last)])
  result, said = tiny.run(tmp_path)
  assert 'resumed from step 4, every leaf verified' in said
  assert result['step'] == 6
  _assert_same_run(tmp_path, straight, 6)
  often = support.all_losses(tmp_path)
  assert any(len(values) > 1 for values in often.values())  # replayed


def test_rarer_rows_miss_no_token(whole, tiny, tmp_path):
  """Due at 5, at the checkpoint of 3 and at the end; killed at 4."""
  rare = {'train.log_every': 5, 'train.print_every': 20}
  rare |= {'checkpoint.every': 3}
  with pytest.raises(support.KilledError):
    tiny.run(tmp_path, rare, callbacks=[support.crash_at(4)])
  assert list(metrics.read(tmp_path)) == [3]
  tiny.run(tmp_path, rare)
  every, rows = metrics.read(whole[0]), metrics.read(tmp_path)
  assert list(rows) == [3, 5, 6]
  for name in ('train/tokens', 'train/flops'):
    counts = [row[name] for row in every.values()]
    wanted = [sum(counts[:3]), sum(counts[3:5]), counts[5]]
    assert [row[name] for row in rows.values()] == wanted
  assert all(rows[s]['train/loss'] == every[s]['train/loss'] for s in rows)


def test_prompts_are_counted_as_work(tiny, tmp_path):
  """Of a step that learns answers alone: their tokens, the FLOPs of all."""
  says = zip(('user', 'assistant'), ('a question', 'yes'), strict=True)
  talk = {'messages': [dict(role=who, content=text) for who, text in says]}
  lines = [json.dumps(talk)] * 99 + [json.dumps(talk | {'split': 'held'})]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  (tmp_path / 'chat.jinja').write_text(
    '{% for m in messages %}[{{ m.role }} '
    '{% generation %}{{ m.content }}]{% endgeneration %}{% endfor %}'
  )
  data = dict(path=str(tmp_path / 'a.jsonl'), loss_on='assistant')
  data |= dict(chat_template=str(tmp_path / 'chat.jinja'))
  changes = experiment.under('data', data) | {'train.steps': 1}
  tiny.run(tmp_path / 'run', changes)
  job, row = tiny.job(changes), metrics.read(tmp_path / 'run')[1]
  batch = job.batches.batch_at(0)
  read = (batch.segments > 0).sum()
  assert row['train/tokens'] == batch.weights.sum() < read / 2
  assert row['train/flops'] == loop.cost(job.config).flops * read


def test_a_batch_that_grows_is_resumed_bitwise(tiny, tmp_path):
  """8, 8, 16, 16, 24, 24 rows; stopped within the second size."""
  changes = {'train.batch_size': 24, 'train.batch_ramp': '8:8:2'}
  straight, stopped = tmp_path / 'straight', tmp_path / 'stopped'
  tiny.run(straight, changes)
  with pytest.raises(support.KilledError):
    tiny.run(stopped, changes, callbacks=[support.crash_at(3)])
  tiny.run(stopped, changes)
  _assert_same_run(stopped, straight, 6)


def test_another_seed_is_another_run(whole, tiny, tmp_path):
  """The comparison of two runs can fail."""
  tiny.run(tmp_path, {'train.seed': 1})
  assert support.all_losses(tmp_path)[1] != support.all_losses(whole[0])[1]


def test_a_finished_run(whole, tiny):
  """Starting it again evaluates, and writes no step."""
  workdir, result, *_ = whole
  before = support.all_losses(workdir)
  again, said = tiny.run(workdir)
  assert 'all 6 steps are done' in said
  assert again['evaluation'] == result['evaluation']
  assert support.all_losses(workdir) == before and _steps(workdir) == [2, 4, 6]


def test_more_steps(tiny, tmp_path):
  # A run of once: its config.json holds the defaults of then, unused or not.
  scope = 'model.experts.balance_scope'
  old = {scope: workdir_lib.FORMER[scope]}
  tiny.run(tmp_path, {'train.steps': 2} | old)
  result, said = tiny.run(tmp_path, {'train.steps': 3})
  assert result['step'] == 3
  kept = workdir_lib.read_config(tmp_path).model.experts.balance_scope
  assert kept == old[scope] != schema.Config().model.experts.balance_scope
  assert (
    'config: train.steps was 2, is now 3; the schedule is stretched' in said
  )
  assert 'resumed from step 2, every leaf verified' in said
  assert list(metrics.read(tmp_path)) == [1, 2, 3]
  assert workdir_lib.read_config(tmp_path).train.steps == 3


def test_evaluation_on_the_way(tiny, tmp_path):
  result, said = tiny.run(tmp_path, {'train.eval_every': 3})
  lines = [line for line in said if line.startswith('held-out')]
  assert len(lines) == 1 and lines != [result['evaluation'].line()]
  found = _values(tmp_path, 'eval/bits_per_byte')
  assert len(found) == 2 and found[1] < found[0]
  assert found[1] == result['evaluation'].bits_per_byte


def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(tiny, tmp_path):
  changes, whole = {'train.eval_every': 2}, tmp_path / 'whole'
  tiny.run(whole, changes)

  def stop(step, values, job):
    if step == 3:  # its numbers are read in step 4
      os.kill(os.getpid(), signal.SIGTERM)

  cut, train = tmp_path / 'cut', tiny.config(changes).train
  result, _ = tiny.run(cut, changes, callbacks=[stop])
  assert result['step'] == 4
  with open(cut / metrics.FILE, 'a') as file:  # as a kill leaves it
    file.write('{"step": 4, "eval/lo')
  missed = lambda: [s for s in range(7) if evaluate.missed(cut, s, train)]
  assert missed() == [4]
  said = tiny.run(cut, changes)[1]
  assert sum(line.startswith('held-out') for line in said) == 1
  points = [_values(w, 'eval/bits_per_byte').tolist() for w in (cut, whole)]
  assert points[0] == points[1] and len(points[0]) == 3
  assert missed() == []


def test_rows_that_no_checkpoint_has_do_not_count(whole, tiny, tmp_path):
  """Of steps that a kill took back, and that do not come again."""
  run = shutil.copytree(whole[0], tmp_path / 'run')
  with open(run / metrics.FILE, 'a') as file:
    file.write('{"step": 7, "train/loss": 9.0}\n')
  tiny.run(run)
  assert list(metrics.read(run)) == [1, 2, 3, 4, 5, 6]


def _poisoned(leaf, steps):
  """step.make whose gradient of `leaf` is NaN at `steps` (from 0)."""

  def make(built, optimizer, clip_norm):
    made = step_lib.make(built, optimizer, clip_norm)

    def update(state, loss, grads, aux):
      bad = jnp.isin(state.step, jnp.array(steps))
      poisoned = grads[leaf] * jnp.where(bad, jnp.nan, 1)
      return made.update(state, loss, {**grads, leaf: poisoned}, aux)

    return made._replace(update=update)

  return make


@pytest.mark.fault(27)
@pytest.mark.parametrize('leaf', ['norm/scale', 'layers/mlp/up'])
@pytest.mark.invariant(13)
def test_a_nan_is_skipped_counted_and_named(tiny, tmp_path, leaf):
  result, said = tiny.run(tmp_path, make_step=_poisoned(leaf, [2]))
  assert 'FLOP a token of the standard loss' in '\n'.join(said)
  lines = [line for line in said if 'is skipped' in line]
  assert len(lines) == 1
  names = tiny.job().batches.documents_at(2)
  assert lines[0].startswith('step 3 is skipped (1 in a row, 1 in all): loss ')
  assert f'1 gradients not finite: {leaf}; batch 2: row ' in lines[0]
  assert names[0][0] in lines[0]
  assert result['step'] == 6 and np.isfinite(result['loss'])
  assert list(_values(tmp_path, 'train/skipped')) == [0, 0, 1, 1, 1, 1]
  # The gradient's norm of that step is no number: null in the file.
  assert metrics.read(tmp_path)[3]['train/grad_norm'] is None


@pytest.mark.fault(27)
def test_too_many_nan_end_the_run(tiny, tmp_path, capsys):
  changes = {'train.max_nonfinite_steps': 2, 'checkpoint.every': 1}
  make_step = _poisoned('embedding', [2, 4, 5])
  for _ in range(2):  # to start again does not help, and does no harm
    code = command_line.run(
      lambda argv: tiny.run(tmp_path, changes, make_step=make_step), []
    )
    assert code == errors.EXIT_INTEGRITY
    shown = capsys.readouterr().err
    assert shown.startswith('paraxis: 2 steps in a row are not finite')
    assert 'embedding' in shown and shown.count('\n') == 1
    assert max(_steps(tmp_path)) <= 6
  # The last checkpoint is finite: without the fault the run ends well.
  assert np.isfinite(tiny.run(tmp_path, changes)[0]['loss'])


@pytest.mark.fault(22)
def test_damaged_checkpoints_are_never_overwritten(tiny, tmp_path, capsys):
  tiny.run(tmp_path)
  folder = tmp_path / 'checkpoints'
  for file in folder.rglob('d/*'):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
  held = lambda: {
    p.relative_to(folder): p.read_bytes()
    for p in sorted(folder.rglob('*'))
    if p.is_file()
  }
  before, rows = held(), metrics.read(tmp_path)
  code = command_line.run(lambda argv: tiny.run(tmp_path), [])
  assert code == errors.EXIT_INTEGRITY
  shown = capsys.readouterr().err
  assert 'all 3 checkpoints' in shown and shown.count('\n') == 1
  assert held() == before and metrics.read(tmp_path) == rows


@pytest.mark.fault(37)
@pytest.mark.invariant(11)
def test_a_changed_text_is_refused(tiny, tmp_path):
  text = tmp_path / 'song.txt'
  text.write_text(tiny.text.read_text())
  changes = {'data.path': str(text)}
  tiny.run(tmp_path / 'run', changes)
  text.write_text(tiny.text.read_text() + 'another line\n')
  with pytest.raises(errors.IntegrityError, match='the corpus changed'):
    tiny.run(tmp_path / 'run', changes)


EXPLICIT = {'mesh.collectives': 'explicit'}
MESHES = [
  ('data=4', EXPLICIT | {'mesh.zero': 2, 'train.microbatches': 2}),
  ('fsdp=8', {'train.remat': 'full'}),
  ('data=2,tensor=4', {'mesh.zero': 1, 'mesh.collective_matmul': 'all'}),
  ('data=2,context=4', EXPLICIT | {'mesh.zero': 3}),
  ('data=1', {}),
]


@pytest.fixture(scope='module')
def ten(tiny, tmp_path_factory):
  """Losses of ten steps on data=2,fsdp=2,tensor=2."""
  workdir = tmp_path_factory.mktemp('ten')
  tiny.run(workdir, {'train.steps': 10})
  return _values(workdir)


@pytest.mark.parametrize('mesh, changes', MESHES)
def test_any_mesh_gives_the_same_losses(tiny, ten, tmp_path, mesh, changes):
  """Nor do other microbatches or remat change them."""
  tiny.run(tmp_path, {'train.steps': 10, **changes}, mesh)
  assert np.abs(_values(tmp_path) - ten).max() < 1e-5
  # The workdir says what was used, not what the config file says.
  used = workdir_lib.read_config(tmp_path).mesh
  for part in mesh.split(','):
    axis, size = part.split('=')
    assert getattr(used, axis) == int(size)
  assert used.zero == changes.get('mesh.zero', 0)


@pytest.mark.fault(25)
@pytest.mark.invariant(12)
def test_a_run_moves_to_another_layout(tiny, ten, tmp_path):
  """Another mesh, ZeRO stage and microbatches; then text from what it saved."""
  steps = {'train.steps': 10}
  with pytest.raises(support.KilledError):
    tiny.run(tmp_path, steps, callbacks=[support.crash_at(6)])
  changes = steps | EXPLICIT | {'mesh.zero': 3, 'train.microbatches': 2}
  _, said = tiny.run(tmp_path, changes, 'data=2,context=2,tensor=2')
  for line in (
    'config: mesh.fsdp was 2, is now 1',
    'config: mesh.context was 1, is now 2',
    'config: mesh.zero was 0, is now 3',
    'config: train.microbatches was 1, is now 2',
  ):
    assert line in said
  assert any(line.startswith('resumed from step ') for line in said)
  assert np.abs(_values(tmp_path) - ten).max() < 1e-5
  said.clear()
  with load.Checkpoint(tmp_path, say=said.append) as checkpoint:
    made = checkpoint.generator(schema.view(checkpoint.config()), rows=1)
  assert said[0].startswith(
    'the run used mesh data=2,context=2,tensor=2, here are 8 devices: decoding '
    'with data=1 on 1 of them'
  )
  (found,) = made.generate(['sea'], temperature=0.0, max_new_tokens=4)
  assert len(found['tokens']) == 4


def test_bfloat16(whole, tiny, tmp_path):
  """Compute in bfloat16; the state stays float32."""
  tiny.run(tmp_path, {'model.dtype': 'bfloat16'})
  off = np.abs(_values(tmp_path) - _values(whole[0]))
  assert 1e-6 < off.max() < 0.05
  from paraxis.sharding.checkpoint import store as store_lib

  with store_lib.Store(tmp_path / 'checkpoints', read_only=True) as store:
    leaves = store.read_manifest(6)['leaves'].values()
  assert {leaf['dtype'] for leaf in leaves} == {'float32', 'int32'}


def test_tensorboard(tiny, tmp_path):
  tiny.run(tmp_path, {'train.tensorboard': True})
  events = list(tmp_path.glob('events.out.tfevents.*'))
  assert len(events) == 1
  shown = events[0].read_bytes()
  assert b'train/loss' in shown
  # The header, the configuration and the state of git, each as a text.
  for name in ('run', 'config', 'source'):
    assert f'{name}/text_summary'.encode() in shown
  assert b'parameters, ' in shown and b'kernels' in shown
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['train']['tensorboard'] and b'"tensorboard": true' in shown
  assert all(f'"{key}"'.encode() in shown for key in config['optimizer'])
  found = metrics.source()
  assert json.dumps(found).encode() in shown
  assert not found or len(found['commit']) == 40


@pytest.mark.invariant(10)
def test_a_failed_save_is_reported_at_the_next_step(
  tiny, tmp_path, monkeypatch
):
  calls = []

  def check(self):
    calls.append(1)
    if len(calls) == 3:
      raise errors.UserError('the disk is full')

  monkeypatch.setattr(store_lib.Store, 'check', check)
  with pytest.raises(errors.UserError, match='the disk is full'):
    tiny.run(tmp_path)
  assert len(calls) == 3


@pytest.mark.fault(27)
@pytest.mark.parametrize('skipped', [[2, 3], []])
def test_states_of_a_streak_push_out_no_good_one(tiny, tmp_path, skipped):
  """Step 2 is the last before the streak; without one it would be deleted."""
  changes = {'checkpoint.every': 1, 'checkpoint.keep': 1}
  changes |= {'train.max_nonfinite_steps': 4, 'train.steps': 4}
  tiny.run(tmp_path, changes, make_step=_poisoned('embedding', skipped))
  assert _steps(tmp_path) == ([2, 3, 4] if skipped else [4])
  with store_lib.Store(tmp_path / 'checkpoints', read_only=True) as store:
    suspect = [s for s in store.steps() if 'suspect' in _meta(store, s)]
  assert suspect == ([3, 4] if skipped else [])


def _meta(store, step):
  return store.read_manifest(step)['meta']


@pytest.mark.fault(15)
def test_a_full_disk_does_not_end_a_run(whole, tiny, tmp_path, monkeypatch):
  """Saves of steps 2 to 4 fail: they are reported, and change no number."""
  usage, said = shutil.disk_usage(tmp_path), []

  def free(path):
    full = any(f'step {n}/6' in line for line in said for n in (2, 3, 4))
    full = full and not any('step 5/6' in line for line in said)
    return usage._replace(free=9) if full else usage

  monkeypatch.setattr(shutil, 'disk_usage', free)
  changes = {'checkpoint.every': 1, 'train.print_every': 1}
  changes |= {'checkpoint.failures': 9}
  tiny.run(tmp_path, changes, say=said.append)
  failed = [line for line in said if 'Training continues' in line]
  assert failed and all('has 9' in line for line in failed)
  assert max(_steps(tmp_path)) == 6
  assert support.losses(tmp_path) == support.losses(whole[0])


@pytest.mark.fault(14)
def test_stop_keeps_the_second_signal_for_an_exit_at_once(monkeypatch, capfd):
  ended, said = [], []
  monkeypatch.setattr(os, '_exit', ended.append)

  def heard():
    said.append(capfd.readouterr().err)
    return ''.join(said)

  before = signal.getsignal(signal.SIGTERM)
  with stop_lib.Stop(None) as stop:
    assert stop.agreed() == ''
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed() == 'SIGTERM'
    support.until(lambda: 'SIGTERM' in heard(), 'nothing is said at once')
    assert not ended
    os.kill(os.getpid(), signal.SIGINT)
    support.until(lambda: ended == [errors.EXIT_CRASH])
  assert signal.getsignal(signal.SIGTERM) is before
  assert 'SIGTERM: saving after this step' in heard()


def test_a_signal_while_compiling_is_answered_at_once():
  """The main thread is inside of one call that runs no Python handler."""
  code = """
    import hashlib
    from paraxis.train.run import stop
    with stop.Stop(None) as stop:
      stop.compiling = True
      print('ready', flush=True)
      hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # minutes
  """
  command = [sys.executable, '-c', textwrap.dedent(code)]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  with subprocess.Popen(command, **pipes) as process:
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == errors.EXIT_CRASH
  assert said == (
    'SIGINT: saving after compiling and one step; again to exit at once\n'
  )


def test_a_run_that_skipped_most_steps_fails(tiny):
  of = lambda steps: types.SimpleNamespace(
    last={'train/skipped': 3}, _train=types.SimpleNamespace(steps=steps)
  )
  check = recorder_lib.Recorder.check_skipped
  with pytest.raises(errors.IntegrityError, match='3 of 5 steps were skipped'):
    check(of(5), '')
  check(of(6), '')
  check(of(5), 'SIGTERM')


def test_records_are_on_the_disk_before_a_checkpoint(
  tiny, tmp_path, monkeypatch
):
  """A loss of power would take rows that never come again."""
  forced, fsync = {}, os.fsync

  def synced(handle):
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{handle}'))
    if path.is_file() and path.parent == tmp_path:
      saved = (tmp_path / 'checkpoints' / '2').exists()
      forced[path.name] = path.read_text(), saved
    return fsync(handle)

  monkeypatch.setattr(os, 'fsync', synced)
  tiny.run(tmp_path, {'train.steps': 2}, 'data=1')
  rows, saved = forced[metrics.FILE]
  assert rows.count('train/loss') == 2 and not saved
  config = (tmp_path / 'config.json').read_text()
  assert forced['config.json.tmp'] == (config, False)


@pytest.mark.fault(13)
def test_a_signal_saves_and_the_run_resumes(whole, tiny, tmp_path):
  stop = lambda step, values, job: (
    step == 2 and os.kill(os.getpid(), signal.SIGINT)
  )
  result, said = tiny.run(tmp_path, callbacks=[stop])
  assert result['stopped'] == 'SIGINT' and result['evaluation'] is None
  assert result['step'] == _steps(tmp_path)[-1] == 3
  assert said[-1] == 'stopped by SIGINT after step 3, saved 3'
  tiny.run(tmp_path)
  assert support.all_losses(tmp_path) == support.all_losses(whole[0])


@pytest.mark.fault(3, 13)
@pytest.mark.invariant(1)
def test_sigterm_and_sigkill(tiny, tmp_path):
  """Both at any moment; the curve is that of the uninterrupted run."""
  flags = ['--config.train.steps=120', '--config.checkpoint.every=5']
  workdir = tmp_path / 'often'
  process = tiny.start(workdir, *flags)
  tiny.wait([process], workdir, 5)
  process.send_signal(signal.SIGTERM)
  said, _ = process.communicate(timeout=100)
  assert process.returncode == errors.EXIT_PREEMPTED, said
  saved = _steps(workdir)[-1]
  assert f'stopped by SIGTERM after step {saved}, saved {saved}' in said
  process = tiny.start(workdir, *flags)
  tiny.wait([process], workdir, saved + 12)
  process.kill()
  said, _ = process.communicate(timeout=100)
  assert process.returncode == -signal.SIGKILL, said
  assert 5 < max(support.all_losses(workdir)) < 120
  process = tiny.start(workdir, *flags)
  said, _ = process.communicate(timeout=300)
  assert process.returncode == 0 and 'resumed from step ' in said, said
  tiny.run(tmp_path / 'once', {'train.steps': 120, 'checkpoint.every': 5})
  _assert_same_run(workdir, tmp_path / 'once', 120)


def test_the_checkpoint_itself_knows_its_run(tiny, tmp_path):
  """Without config.json the checkpoint still refuses another seed."""
  tiny.run(tmp_path, {'train.steps': 2})
  (tmp_path / 'config.json').unlink()
  with support.refused('train.seed was 0, is now 5'):
    tiny.run(tmp_path, {'train.steps': 3, 'train.seed': 5})
  with support.refused('at step 2, beyond train.steps=1'):
    tiny.run(tmp_path, {'train.steps': 1})
