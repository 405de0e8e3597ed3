"""`paraxis launch`: what it refuses, what it starts, a run that it saves."""

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.launch import command as launch_command
from paraxis.train.launch import places
from paraxis.train.launch import supervisor
from paraxis.train.run import ledger


@pytest.fixture
def started(monkeypatch):
  """What `launch ...` would start, by calls: [supervisor.Rank]."""
  ranks = []

  def run(self):
    ranks.extend(self._ranks())
    return 0

  monkeypatch.setattr(supervisor.Supervisor, 'run', run)
  for name in ('SLURM_PROCID', 'JOB_COMPLETION_INDEX', 'TPU_WORKER_HOSTNAMES'):
    monkeypatch.delenv(name, raising=False)
  return ranks


@pytest.mark.parametrize(
  'argv, words',
  [
    ([], ['launch what?', '`--`']),
    (['--processes=2', '--'], ['launch what?']),
    (['train', '--config=quickstart'], ['launch what?', '`--`']),
    (['--', 'trian'], ['-- trian', "Did you mean 'train'"]),
    (['--', 'papers'], ['-- papers', 'starts train']),
    (['--', 'train', '--process_id=0'], ['--process_id is set', '--host']),
    (['--', 'train', '--num_processes', '2'], ['--num_processes is set']),
    (['--', 'train', '-devices=8'], ['--devices is set', '_per_process']),
    (['--processes=0', '--', 'train'], ['--processes=0', 'positive']),
    (['--proceses=2', '--', 'train'], ['proceses', '--processes']),
    (['two', '--', 'train'], ["unexpected argument 'two'"]),
    (['--host=1', '--', 'train'], ['--host=1', '--hosts']),
    (['--hosts=192.0.2.7', '--', 'train'], ['192.0.2.7', 'not to be had']),
    (['--port=70000', '--', 'train'], ['--port=70000 is above 65535']),
    (['--hosts=node..x', '--', 'train'], ['node..x', 'not to be had']),
    (['--hosts=node..x,b', '--', 'train'], ['0 of --hosts=node..x,b are']),
    (['--hosts=a,b,', '--', 'train'], ['--hosts=a,b,: one', 'is empty']),
    (['--backoff=-1', '--', 'train'], ['--backoff=-1.0']),
    (['--backoff=nan', '--', 'train'], ['--backoff=nan']),
  ],
)  # fmt: skip
def test_bad_input(started, capsys, argv, words):
  assert cli.main(['launch', *argv]) == errors.EXIT_USER
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and all(word in said for word in words), said
  assert not started


def test_a_taken_port(started, capsys):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    argv = ['launch', '--processes=2', f'--port={port}', '--', 'train']
    assert cli.main(argv) == errors.EXIT_USER
  assert f'127.0.0.1:{port} is not to be had' in capsys.readouterr().err
  assert cli.main(argv) == 0 and len(started) == 2  # free again


def _devices(monkeypatch, **found):
  """A machine with these files of devices: nvidia=2."""
  monkeypatch.delenv('JAX_PLATFORMS')
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  monkeypatch.setattr(
    launch_command.glob, 'glob', lambda pattern: next(
      (list(range(n)) for name, n in found.items() if name in pattern), []
    ),
  )  # fmt: skip


def test_gpus_are_dealt_out(started, monkeypatch, capsys):
  _devices(monkeypatch, nvidia=6)
  argv = ['launch', '--processes=3', '--', 'train']
  assert cli.main(argv) == 0
  cards = [rank.environ['CUDA_VISIBLE_DEVICES'] for rank in started]
  assert cards == ['0,1', '2,3', '4,5']
  for count, visible in ((4, None), (7, None), (2, '3,5,9')):
    if visible:
      monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    argv[1] = f'--processes={count}'
    assert cli.main(argv) == errors.EXIT_USER
    said = capsys.readouterr().err
    assert f'--processes={count}' in said
    assert f'its {3 if visible else 6} GPUs' in said
  assert cli.main([*argv[:2], '--devices_per_process=1', *argv[2:]]) == 0


def test_no_gpu_is_dealt_out_where_none_is_visible(started, monkeypatch):
  _devices(monkeypatch, nvidia=6)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
  assert cli.main(['launch', '--processes=3', '--', 'train']) == 0
  assert [r.environ['CUDA_VISIBLE_DEVICES'] for r in started] == [''] * 3


def test_one_process_opens_a_tpu(started, monkeypatch, capsys):
  _devices(monkeypatch, accel=4)
  assert cli.main(['launch', '--processes=2', '--', 'train']) == 2
  assert 'one process opens all TPU chips' in capsys.readouterr().err
  assert cli.main(['launch', '--', 'train']) == 0 and len(started) == 1


def test_the_ranks_of_the_second_machine(started, monkeypatch):
  monkeypatch.setenv('TPU_WORKER_HOSTNAMES', 'a,b')
  monkeypatch.setenv('TPU_WORKER_ID', '1')
  argv = ['launch', '--processes=2', '--devices_per_process=4', '--', 'train']
  assert cli.main([*argv, '--config=x', '--workdir=runs/a']) == 0
  assert [rank.number for rank in started] == [2, 3]
  command = [sys.executable, '-m', 'paraxis.train.cli', 'train', '--config=x']
  assert started[1].argv == [
    *command, '--workdir=runs/a', '--devices=4',
    f'--coordinator_address=a:{places.PORT}', '--num_processes=4',
    '--process_id=3',
  ]  # fmt: skip


def test_one_process_joins_nobody(started):
  assert cli.main(['launch', '--', 'train', '--workdir=a']) == 0
  assert started[0].argv[-2:] == ['train', '--workdir=a']


def test_a_restart_resumes_what_began_from_scratch(tmp_path, monkeypatch):
  """Its checkpoints are its own then, and --from_scratch would be refused."""
  starts = []

  def run(self):
    for step in (None, None, 5):  # committed before this start
      if step:
        made = tmp_path / 'checkpoints' / str(step) / 'manifest'
        made.mkdir(parents=True)
        (made / 'metadata').write_text('{}')
      starts.append(self._ranks()[0].argv)
      self._budget.next(set())
    return 0

  monkeypatch.setattr(supervisor.Supervisor, 'run', run)
  flags = ['--from_scratch', f'--workdir={tmp_path}', '-from_scratch=true']
  assert cli.main(['launch', '--', 'train', *flags]) == 0
  assert [argv[4:] for argv in starts] == [flags, flags, [flags[1]]]
  # Checkpoints that do not read, of before, are no commit of this run until
  # they are set aside and one of its own is there, be it of the same step.
  (tmp_path / 'checkpoints' / 'before-a').mkdir()
  old = tmp_path / 'checkpoints' / '5'

  def crashed(self):
    starts.append(self._ranks()[0].argv)
    self._budget.next(set())
    starts.append(self._ranks()[0].argv)
    old.rename(tmp_path / 'checkpoints' / 'before-a' / '5')
    (old / 'manifest').mkdir(parents=True)
    (old / 'manifest' / 'metadata').write_text('{}')
    starts.append(self._ranks()[0].argv)
    return 0

  starts.clear()
  monkeypatch.setattr(supervisor.Supervisor, 'run', crashed)
  assert cli.main(['launch', '--', 'train', *flags]) == 0
  assert [argv[4:] for argv in starts] == [flags, flags, [flags[1]]]
  # Of another run: the first start says so.
  starts.clear()
  monkeypatch.setattr(
    supervisor.Supervisor, 'run', lambda self: starts.extend(self._ranks()) or 0
  )
  assert cli.main(['launch', '--', 'train', *flags]) == 0
  assert starts[0].argv[4:] == flags


def test_the_workdir_of_a_command():
  found = launch_command._workdir
  assert found(['train', '--workdir=a', '--workdir', 'b']) == 'b'
  assert found(['train', '-workdir=a=b']) == 'a=b'
  assert found(['train', '--config.workdir=a']) == ''
  assert found(['train', '--workdir=~/a']) == os.path.expanduser('~/a')


def _launch(tiny, workdir, *flags, steps, **environ):
  command = [sys.executable, '-m', 'paraxis.train.cli', 'launch', *flags]
  command += ['--devices_per_process=1', '--backoff=0.1', '--', 'train']
  changed = {'mesh.fsdp': 1, 'mesh.tensor': 1, 'train.steps': steps}
  return subprocess.Popen(
    [*command, f'--config={tiny.file}', f'--workdir={workdir}']
    + [f'--config.{name}={value}' for name, value in changed.items()],
    env=dict(os.environ, PARAXIS_CACHE=str(tiny.folder / 'cache'),
             PARAXIS_HEARTBEAT_SECONDS='5', **environ),
    text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip


def _until(process, words):
  """What it says up to the line with these words."""
  said = ''
  while words not in said:
    line = process.stdout.readline()
    assert line, said
    said += line
  return said


@pytest.mark.fault(1)
def test_a_killed_gang_goes_on_bitwise_and_stops_by_a_signal(tiny, tmp_path):
  """Through the command line: SIGKILL of rank 1, then SIGTERM to all."""
  process = _launch(tiny, tmp_path, '--processes=2', steps=5000)
  try:
    tiny.wait([process], tmp_path, 5)
    lines = (tmp_path / ledger.FILE).read_text().splitlines()
    first = json.loads(next(line for line in lines if '"launch"' in line))
    os.kill(first['pids']['1'], signal.SIGKILL)
    said = _until(process, 'restart 1 of 5') + _until(process, 'first step')
    process.send_signal(signal.SIGTERM)
    more, _ = process.communicate(timeout=120)
  finally:
    process.kill()
  assert process.returncode == errors.EXIT_PREEMPTED, said + more
  assert 'launch: rank 1 died (signal 9) after step' in said
  assert 'resumed from step' in said
  losses = support.all_losses(tmp_path)
  assert list(losses) == sorted(losses) == list(range(1, len(losses) + 1))
  assert all(len(set(again)) == 1 for again in losses.values())
  lines = (tmp_path / ledger.FILE).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  # The processes' own lines stand between: their ends have a step.
  kinds = [row['event'] for row in rows if 'why' not in row]
  kinds = [kind for kind in kinds if kind not in ('start', 'phase', 'commit')]
  assert kinds == [
    'launch', 'exit', 'exit', 'restart', 'launch', 'exit', 'exit', 'end'
  ]  # fmt: skip


def test_two_tasks_of_slurm_are_one_run(tiny, tmp_path):
  """Two launchers, each with one process, as srun starts them."""
  step = dict(SLURM_NTASKS='2', SLURM_STEP_NODELIST='localhost')
  port = f'--port={support.address().partition(":")[2]}'
  both = [
    _launch(tiny, tmp_path, port, steps=4, SLURM_PROCID=str(task), **step)
    for task in range(2)
  ]
  said = support.ended(both, seconds=300)
  assert 'of 2 processes' in said[0] and 'loss' not in said[1]
  one = tmp_path / 'one'
  tiny.run(one, {'train.steps': 4})
  losses = [list(support.losses(path).values()) for path in (tmp_path, one)]
  np.testing.assert_allclose(*losses, rtol=1e-6)
