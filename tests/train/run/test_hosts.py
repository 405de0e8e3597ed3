"""Several processes on one run: one writes, all stop at the same step.

Two processes with four virtual devices each, through the real command line.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding import meeting
from paraxis.train import loop
from paraxis.train.run import hosts
from paraxis.train.run import metrics
from paraxis.train.run import workdir as workdir_lib

EXIT_ABORT = -signal.SIGABRT


@pytest.mark.parametrize(
  'address, processes, process, words',
  [
    ('', 2, 0, 'not HOST:PORT'),
    ('host', 2, 0, 'not HOST:PORT'),
    ('host:http', 2, 0, 'not HOST:PORT'),
    ('host:70000', 2, 0, 'not HOST:PORT'),
    ('host:1234', 2, 2, '--process_id=2 is not in 0 .. 1'),
    ('host:1234', 0, 0, 'of --num_processes=0'),
    ('host:1234', 2, -1, '--process_id=-1'),
  ],
)
def test_wrong_hosts(address, processes, process, words):
  with support.refused(words):
    hosts.check(address, processes, process)


def test_right_hosts():
  assert hosts.check('host:1234', 2, 1) and hosts.check('[::1]:1', 1, 0)
  assert not hosts.check('', 0, -1)


@pytest.mark.fault(9)
def test_nobody_listens():
  """A worker without process 0 says so, before jax could abort."""
  before = signal.getsignal(signal.SIGTERM)
  with support.refused('was not to be reached for 0 s'):
    hosts.connect('127.0.0.1:9', 2, 1, patience=0)
  assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
  'processes, words', [(2, '1 of 2 processes'), (4, 'up to 3 of 4 processes')]
)
def test_an_absent_peer_is_said(capsys, monkeypatch, processes, words):
  address = support.address()
  line = f'process 1: waiting for {words} at {address}\n'
  for seconds, said in ((1e-3, line), (999, '')):
    monkeypatch.setattr(hosts, 'SILENT_SECONDS', seconds)
    with support.refused('was not to be reached'):
      hosts.connect(address, processes, 1, patience=0.4)
    assert capsys.readouterr().err == said


def test_process_0_names_who_does_not_come(capsys, monkeypatch):
  """Before jax, which waits in silence, for minutes, and aborts."""
  address = support.address()
  monkeypatch.setattr(hosts, 'SILENT_SECONDS', 1e-3)
  monkeypatch.setenv('PARAXIS_JOIN_SECONDS', '1')
  with support.refused('processes 1, 2 of 3 did not come', f'{address} within'):
    hosts.connect(address, 3, 0)
  assert capsys.readouterr().err == (
    f'process 0: waiting for up to 2 of 3 processes at {address}\n'
  )
  monkeypatch.setenv('PARAXIS_JOIN_SECONDS', 'long')
  with support.refused('PARAXIS_JOIN_SECONDS=long is not a whole number'):
    hosts.connect(address, 3, 0)


@pytest.mark.fault(6)
def test_two_processes_and_one_fails():
  """An uncaught exception on one process ends the other within seconds."""
  code = """
    import sys
    from paraxis.train.run import hosts
    from paraxis.configs.base import command_line
    command_line.prepare_devices(1)
    address, process = sys.argv[1:]
    hosts.connect(address, 2, int(process))
    import jax
    assert jax.process_count() == 2 and len(jax.devices()) == 2
    if process == '1':
      raise RuntimeError('one of two')
    from jax.experimental import multihost_utils
    for _ in range(10**6):
      multihost_utils.process_allgather(jax.numpy.ones(()))
  """
  arguments = [sys.executable, '-c', textwrap.dedent(code), support.address()]
  both = [
    subprocess.Popen([*arguments, p], stderr=subprocess.PIPE, text=True)
    for p in '01'
  ]
  said = [process.communicate(timeout=100)[1] for process in both]
  assert both[1].returncode == errors.EXIT_CRASH and 'one of two' in said[1]
  assert both[0].returncode != 0


@pytest.mark.parametrize(
  'nodes, local, visible', [(2, '00', ['all', 'all']), (1, '01', ['0', '1'])]
)
def test_the_only_task_of_a_machine_has_all_its_gpus(nodes, local, visible):
  """Of itself jax leaves a process of a Slurm step one of them."""
  code = """
    import sys
    from paraxis.train.run import hosts
    from paraxis.configs.base import command_line
    command_line.prepare_devices(2)
    hosts.connect(sys.argv[1], 2, int(sys.argv[2]))
    import jax
    assert len(jax.local_devices()) == 2 and len(jax.devices()) == 4
    from jax._src import xla_bridge
    print(xla_bridge.CUDA_VISIBLE_DEVICES.value)
  """
  step = dict(
    SLURM_JOB_ID='4097', SLURM_STEP_NODELIST='a,b', SLURM_NTASKS='2',
    SLURM_STEP_NUM_NODES=str(nodes),
  )  # fmt: skip
  command = [sys.executable, '-c', textwrap.dedent(code), support.address()]
  both = [
    subprocess.Popen(
      [*command, str(i)],
      env=os.environ | step | dict(SLURM_PROCID=str(i), SLURM_LOCALID=at),
      stdout=subprocess.PIPE,
      text=True,
    )
    for i, at in enumerate(local)
  ]
  said = support.ended(both, seconds=100)
  assert [text.strip() for text in said] == visible


def _start_two(tiny, workdir, *flags, other=(), devices=4):
  """Two processes of one run; `other`: flags that only process 1 gets."""
  several = (f'--coordinator_address={support.address()}', '--num_processes=2')
  return [
    tiny.start(
      workdir,
      f'--devices={devices}',
      *several,
      f'--process_id={process}',
      *flags,
      *(other if process else ()),
    )
    for process in range(2)
  ]


def _finish(processes, seconds=240):
  """[(exit code, what it said)]; nothing is left behind."""
  out = []
  try:
    for process in processes:
      said, _ = process.communicate(timeout=seconds)
      out.append((process.returncode, said))
  finally:
    for process in processes:
      process.kill()
  return out


def _losses(workdir):
  return np.array(list(support.losses(workdir).values()))


def _run_until(tiny, workdir, step, changes=None):
  """One process; a signal to itself after `step`. -> what it said."""
  stop = lambda at, values, job: (
    at == step and signal.raise_signal(signal.SIGTERM)
  )
  return tiny.run(workdir, changes, callbacks=[stop])[1]


@pytest.mark.parametrize('stopped', ['', 'SIGTERM'])
def test_the_others_wait_for_the_last_work_of_process_0(
  tiny, tmp_path, stopped
):
  """As of a logger that uploads; jax's exit barrier aborts it after 2 s."""
  code = f"""
    import sys, time, types
    from paraxis.train import cli, loop
    from paraxis.train.claims import held_out
    slow = '--process_id=0' in sys.argv and 6

    def run(*_, **__):
      time.sleep(slow if {stopped!r} else 0)
      shown = types.SimpleNamespace(line=lambda: 'evaluated')
      return dict(stopped={stopped!r}, evaluation=shown)

    loop.run = run
    held_out.against_gzip = lambda *_: time.sleep(slow) or 'compared'
    sys.exit(cli.main(sys.argv[1:]))
  """
  command = [sys.executable, '-c', textwrap.dedent(code), 'train']
  command += [f'--config={tiny.file}', f'--workdir={tmp_path}', '--devices=1']
  command += [f'--coordinator_address={support.address()}']
  environ = dict(
    PARAXIS_HEARTBEAT_SECONDS='2', PARAXIS_CACHE=str(tiny.folder / 'cache')
  )
  both = [
    subprocess.Popen(
      [*command, '--num_processes=2', f'--process_id={i}'],
      env=os.environ | environ,
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  code, said = (75, '') if stopped else (0, 'evaluated\ncompared\n')
  assert _finish(both) == [(code, said), (code, '')]


LONG = {'train.steps': 2000, 'checkpoint.every': 500}
FLAGS = [f'--config.{name}={value}' for name, value in LONG.items()]


@pytest.fixture(scope='module')
def stopped(tiny, tmp_path_factory):
  """A run of two, process 1 was sent a signal: (workdir, `_finish`)."""
  workdir = tmp_path_factory.mktemp('stopped')
  both = _start_two(tiny, workdir, *FLAGS)
  tiny.wait(both, workdir, 3)
  both[1].send_signal(signal.SIGTERM)
  return workdir, _finish(both)


@pytest.mark.xdist_group('stopped')
@pytest.mark.invariant(5)
def test_two_processes_equal_one(tiny, stopped, tmp_path):
  two, ended = stopped
  last = max(metrics.read(two))
  _run_until(tiny, tmp_path, 3, LONG)
  one = _losses(tmp_path)
  assert len(one) >= 3 and len(_losses(two)) == last >= 3
  same = min(last, len(one))
  assert np.abs(_losses(two)[:same] / one[:same] - 1).max() < 1e-6
  # Process 0 alone prints and writes.
  assert 'step 1/2000  loss' in ended[0][1] and 'loss' not in ended[1][1]
  lines = (two / 'metrics.jsonl').read_text().splitlines()
  assert sum('train/loss' in line for line in lines) == last
  # One process resumes from a checkpoint of two.
  workdir = shutil.copytree(two, tmp_path / 'two')
  said = _run_until(tiny, workdir, last + 1, LONG)
  assert f'resumed from step {last}, every leaf verified' in said
  assert len(_losses(workdir)) > last


@pytest.mark.fault(12)
@pytest.mark.xdist_group('stopped')
def test_a_signal_to_one_stops_both_at_one_step(stopped):
  workdir, ended = stopped
  assert [c for c, _ in ended] == [errors.EXIT_PREEMPTED] * 2, ended
  steps = [p.name for p in (workdir / 'checkpoints').iterdir()]
  assert len(steps) == 1 and 3 <= int(steps[0]) < 2000
  text = f'stopped by a signal to another process after step {steps[0]}'
  assert text in ended[0][1]
  assert max(metrics.read(workdir)) == int(steps[0])


@pytest.mark.fault(12)
def test_a_signal_before_the_first_step_stops_both(tiny, tmp_path):
  """Between joining and the loop: jax's own handler would swallow it."""
  both = _start_two(tiny, tmp_path, '--mesh=data=8', *FLAGS)
  held = tmp_path / workdir_lib.LOCK  # joined, and not restored yet
  support.until(held.exists, 'process 0 does not start', seconds=120)
  both[1].send_signal(signal.SIGTERM)
  ended = _finish(both)
  assert [c for c, _ in ended] == [errors.EXIT_PREEMPTED] * 2, ended
  assert 'SIGTERM: saving after the start and one step; again' in ended[1][1]
  (step,) = (p.name for p in (tmp_path / 'checkpoints').iterdir())
  assert 1 <= int(step) <= 3
  text = f'stopped by a signal to another process after step {step}, saved'
  assert text in ended[0][1]


def test_two_resume_from_a_checkpoint_of_one(tiny, tmp_path):
  """And make up for its evaluation of that step, which process 0 misses."""
  changes = {'train.eval_every': 4}
  tiny.run(tmp_path / 'once', changes)
  _run_until(tiny, tmp_path, 3, changes)
  ended = _finish(_start_two(tiny, tmp_path, '--config.train.eval_every=4'))
  assert [code for code, _ in ended] == [0, 0], ended
  assert 'resumed from step 4, every leaf verified' in ended[0][1]
  points = [
    [
      row['eval/loss']
      for row in metrics.read(run).values()
      if 'eval/loss' in row
    ]
    for run in (tmp_path, tmp_path / 'once')
  ]
  assert len(points[0]) == 2 and points[0] == pytest.approx(points[1], 1e-6)
  assert 'step 6/6  loss' in ended[0][1] and 'loss' not in ended[1][1]
  one, two = _losses(tmp_path / 'once'), _losses(tmp_path)
  assert len(two) == 6 and np.abs(two / one - 1).max() < 1e-6


@pytest.mark.fault(2)
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.invariant(9)
def test_when_one_is_killed_the_other_ends(tiny, tmp_path, victim):
  both = _start_two(tiny, tmp_path, *FLAGS)
  tiny.wait(both, tmp_path, 3)
  both[victim].kill()
  ended = _finish(both, 60)  # not the minutes of jax's exit barrier
  assert ended[victim][0] == -signal.SIGKILL
  assert ended[1 - victim][0] in (errors.EXIT_CRASH, EXIT_ABORT), ended


APART = {
  'mesh.replica': 2, 'mesh.data': 1, 'mesh.fsdp': 2, 'mesh.tensor': 2,
  'outer.exchange': 'mean', 'outer.period': 3, 'outer.delay': 1,
  'outer.mixing': 0.5, 'train.steps': 60, 'checkpoint.every': 4,
}  # fmt: skip


@pytest.mark.invariant(5)
def test_replicas_of_two_processes_killed_twice_resume_bitwise(tiny, tmp_path):
  """Each process is a replica: only exchanges and small sums meet."""
  flags = [f'--config.{name}={value}' for name, value in APART.items()]
  start = lambda folder: _start_two(tiny, tmp_path / folder, *flags)
  for victim, step in ((0, 6), (1, 14)):
    both = start('cut')
    tiny.wait(both, tmp_path / 'cut', step)
    both[victim].kill()
    assert all(code for code, _ in _finish(both, 60))
  ended = {name: _finish(start(name)) for name in ('whole', 'cut')}
  for both in ended.values():
    assert [code for code, _ in both] == [0, 0], both
  assert 'resumed from step' in ended['cut'][0][1]
  whole, cut = (support.fingerprints(tmp_path / n, 60) for n in ended)
  assert whole == cut and 'outer/flight/embedding' in whole
  assert support.losses(tmp_path / 'whole') == support.losses(tmp_path / 'cut')


STAGED = {
  'mesh.stage': 2, 'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': 1,
  'model.experts.count': 4, 'train.steps': 3, 'train.microbatches': 2,
}  # fmt: skip


@pytest.mark.invariant(5)
def test_experts_on_stages_of_two_processes_equal_one(tiny, tmp_path):
  """What experts count is of a stage, and process 0 reports of both."""
  flags = [f'--config.{name}={value}' for name, value in STAGED.items()]
  ended = _finish(_start_two(tiny, tmp_path / 'two', *flags, devices=1))
  assert [code for code, _ in ended] == [0, 0], ended
  tiny.run(tmp_path / 'one', STAGED, 'stage=2')
  two, one = (metrics.read(tmp_path / name) for name in ('two', 'one'))
  (path,) = (name for name in one[3] if name.startswith('experts/load/'))
  for step in (1, 2, 3):
    assert np.shape(two[step][path]) == (2, 4)
    for name in ('train/loss', path):
      np.testing.assert_allclose(two[step][name], one[step][name], rtol=1e-5)


@pytest.mark.fault(11)
@pytest.mark.invariant(11)
def test_processes_of_different_runs_are_refused(tiny, tmp_path):
  """By value, in both, before anything is written."""
  different = ['--config.train.seed=1', '--mesh=data=2,fsdp=2,tensor=2']
  different += ['--init_from=nowhere', '--init_ema']  # its peer would wait
  ended = _finish(_start_two(tiny, tmp_path / 'run', other=different))
  assert [code for code, _ in ended] == [errors.EXIT_USER] * 2, ended
  for _, said in ended:
    assert "process 1 has --mesh='data=2,fsdp=2,tensor=2', process 0" in said
    assert 'process 1 has train.seed=1, process 0 has 0' in said
    for flag in ('--init_from', '--init_ema'):
      assert f'process 1 has {flag}=True, process 0 has False' in said
    assert 'Traceback' not in said
  assert not (tmp_path / 'run').exists()


@pytest.mark.fault(11)
def test_processes_that_begin_with_other_weights_are_refused(tiny, tmp_path):
  """Each reads its own shards, from where it has them: two steps of a run."""
  tiny.run(tmp_path / 'a', {'train.steps': 2, 'checkpoint.every': 1})
  both = _start_two(
    tiny,
    tmp_path / 'run',
    f'--init_from={tmp_path / "a" / "1"}',
    other=[f'--init_from={tmp_path / "a" / "2"}'],
  )
  ended = _finish(both)
  seals = [
    json.loads(
      (tmp_path / f'a/checkpoints/{step}/manifest/metadata').read_text()
    )['sha256'][:12]
    for step in (1, 2)
  ]
  for code, said in ended:
    assert code == errors.EXIT_USER, ended
    assert (
      f'process 1 has sha256(--init_from)={seals[1]}, process 0 has {seals[0]}'
    ) in said
    assert 'Traceback' not in said
  assert not (tmp_path / 'run' / 'checkpoints').exists()


def test_what_processes_compare(tiny, tmp_path, monkeypatch):
  flags = dict(profile='3:4')
  found = hosts.fields_of(tiny.config(), tmp_path / 'a' / '..', '', flags)
  assert found['--profile'] == "'3:4'" and '--from_scratch' not in found
  assert found['--workdir'] == str(tmp_path)
  assert found['optimizer.clip_norm'] == '1.0'
  assert found['jax version'] == loop.jax.__version__
  for name in ('numpy', 'grain', 'tokenizers'):  # of which batches are
    assert found[f'{name} version'] == importlib.metadata.version(name)
  assert not set(hosts.LOCAL) & set(found)
  # Code: a file that differs is named, by a hash of its bytes.
  file = pathlib.Path(hosts.__file__)
  digest = hashlib.sha256(file.read_bytes()).hexdigest()
  assert found['sha256(train/run/hosts.py)'] == digest[:12]
  read = pathlib.Path.read_bytes
  other = lambda path: read(path) + b' ' * (path.name == 'pipeline_step.py')
  monkeypatch.setattr(pathlib.Path, 'read_bytes', other)
  again = hosts.fields_of(tiny.config(), tmp_path, '', flags)
  assert [n for n in found if found[n] != again[n]] == [
    'sha256(train/steps/pipeline_step.py)'
  ]


@pytest.fixture
def job(tiny):
  return tiny.job()


def _as_process(monkeypatch, number, gathered):
  """This process believes to be `number` of 2; gathered(text) -> all texts."""
  monkeypatch.setattr(loop.jax, 'process_index', lambda: number)
  monkeypatch.setattr(loop.jax, 'process_count', lambda: 2)
  monkeypatch.setattr(meeting, 'gather', lambda name, text, *_: gathered(text))
  monkeypatch.setattr(hosts, 'SHARED_SECONDS', 0.2)


def test_only_process_0_touches_the_folder(job, tmp_path, monkeypatch):
  _as_process(monkeypatch, 1, lambda text: [text, text])
  path, lock = loop._claim(job, tmp_path / 'run', False, None)
  with lock:
    assert path == tmp_path / 'run' and not path.exists()
  _as_process(monkeypatch, 0, lambda text: [text, text])
  path, lock = loop._claim(job, tmp_path / 'run', False, None)
  with lock:
    assert (path / '.lock').exists()
    with pytest.raises(errors.UserError, match='in use by another run'):
      workdir_lib.Lock(path)
  workdir_lib.Lock(path).close()


def test_all_processes_end_when_process_0_cannot_start(
  job, tmp_path, monkeypatch
):
  holder = workdir_lib.Lock(workdir_lib.prepare(tmp_path))
  seen = []

  def gathered(text):
    seen.append(text)
    return [text, text]

  _as_process(monkeypatch, 0, gathered)
  with pytest.raises(errors.UserError, match='in use by another run') as first:
    loop._claim(job, tmp_path, False, None)
  # It did not leave the others waiting, and they say why.
  _as_process(monkeypatch, 1, lambda text: [seen[0], text])
  with support.refused(f'process 0 cannot start: {first.value}'):
    loop._claim(job, tmp_path, False, None)
  holder.close()


def test_no_process_writes_where_process_0_may_not(tmp_path, monkeypatch):
  """Before the text is read; the others do not look for its lock."""
  holder, seen = workdir_lib.Lock(workdir_lib.prepare(tmp_path)), []
  _as_process(monkeypatch, 0, lambda text: seen.append(text) or [text, ''])
  with pytest.raises(errors.UserError, match='in use by another run') as first:
    hosts.prepare(tmp_path)
  _as_process(monkeypatch, 1, lambda text: [seen[0], text])
  with support.refused(f'process 0 cannot start: {first.value}'):
    hosts.prepare(tmp_path)
  _as_process(monkeypatch, 1, lambda text: ['', text])
  hosts.prepare(tmp_path)
  holder.close()


@pytest.mark.fault(11)
def test_other_text_is_named(job, tmp_path, monkeypatch):
  """What is known after reading it; the lock is given back."""
  other = lambda text: text.replace(job.corpus.fingerprint[:12], '0123')
  _as_process(monkeypatch, 0, lambda text: [text, other(text)])
  with support.refused(
    f'process 1 has text=0123, process 0 has {job.corpus.fingerprint[:12]}'
  ):
    loop._claim(job, tmp_path, False, None)
  workdir_lib.Lock(tmp_path).close()


def test_a_folder_that_is_not_shared_is_found(job, tmp_path, monkeypatch):
  """The same path on disks of their own: the second one finds no lock."""
  rows = lambda text: [text, '' if text[:1] != '[' else text]
  _as_process(monkeypatch, 0, rows)
  with support.refused('processes 1 do not see what process 0 wrote into'):
    loop._claim(job, tmp_path, False, None)
