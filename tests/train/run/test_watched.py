"""What watches over a run: ledger, watchdog, comparisons of replicas."""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.train import program
from paraxis.train import step as step_lib
from paraxis.train.run import goodput
from paraxis.train.run import ledger


def _steps(workdir):
  folders = (workdir / 'checkpoints').iterdir()
  return sorted(int(p.name) for p in folders if p.name.isdigit())


def test_the_ledger_tells_what_the_run_did(tiny, tmp_path):
  workdir, before = tmp_path, time.time()
  tiny.run(workdir)
  lines = (workdir / ledger.FILE).read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  names = [row.get('name') for row in rows if row['event'] == 'phase']
  assert names[:2] == ['restore', 'other'] and names.count('compile') == 1
  assert names.index('steps') < names.index('compile')
  assert names.count('evaluate') == 1 and 'save' in names
  committed = [row['step'] for row in rows if row['event'] == 'commit']
  assert committed == [2, 4, 6]
  assert (rows[0]['event'], rows[-1]['event']) == ('start', 'end')
  assert rows[-1]['why'] == 'done'
  assert rows[0]['time'] >= before  # not when this process began
  found = goodput.account(workdir)
  seconds = [found['seconds'][part] for part in goodput.PARTS]
  assert abs(sum(seconds) - found['wall']) < 1e-5
  assert found['seconds']['productive'] > 0 == found['seconds']['replay']


HANGS = """
import functools, sys, time
from paraxis.configs.base import command_line
command_line.prepare_devices(8)
from paraxis.train import loop
from paraxis.train.run import activity
from paraxis.train.run import watchdog
from paraxis.configs import schema
activity.watchdog.Watchdog = functools.partial(watchdog.Watchdog, floor=2.0)
config = schema.view(command_line.load(sys.argv[1]))

def hang(step, values, job):
  if step == 5:
    time.sleep(600)

config = schema.with_value(config, 'train.steps', 12)
loop.run(config, sys.argv[2], callbacks=[hang])
"""


@pytest.mark.fault(7)
def test_a_stuck_process_ends_with_its_stacks(tiny, tmp_path):
  """Nothing is raised and its heartbeats go on: the watchdog ends it."""
  done = subprocess.run(
    [sys.executable, '-c', HANGS, str(tiny.file), str(tmp_path)],
    env=dict(os.environ, PARAXIS_CACHE=str(tiny.folder / 'cache')),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == errors.EXIT_CRASH, done.stderr[-2000:]
  assert 'watchdog: no progress for ' in done.stderr
  assert 'in phase steps, after step ' in done.stderr
  assert 'in hang' in done.stderr and 'train/loop.py' in done.stderr
  last = (tmp_path / ledger.FILE).read_text().splitlines()[-1]
  assert json.loads(last)['why'] == 'stalled in steps'
  assert 4 in _steps(tmp_path)


@pytest.mark.fault(11)
def test_hosts_of_other_numbers_do_not_begin(tiny, tmp_path, monkeypatch):
  """A device whose parameters are others is named before the first step."""
  made = program.Program.initial_state

  def other(job):
    state = made(job)
    x = state.params['norm/scale']
    parts = [
      jax.device_put(np.asarray(s.data) + (s.device.id == 5), s.device)
      for s in x.addressable_shards
    ]
    bad = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return state._replace(params={**state.params, 'norm/scale': bad})

  monkeypatch.setattr(program.Program, 'initial_state', other)
  with pytest.raises(errors.IntegrityError, match='scale of device 5 '):
    tiny.run(tmp_path, mesh='data=8')
  assert not _steps(tmp_path)


def _drifting(built, optimizer, clip_norm):
  """step.make; device 5 counts otherwise in step 3."""
  made = step_lib.make(built, optimizer, clip_norm)

  def wrong(x, step):
    here = jax.lax.axis_index('data') == 5
    return x + 1e-3 * here * (step == 3)

  def update(state, *found):
    state, numbers = made.update(state, *found)
    changed = jax.shard_map(
      wrong, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), check_vma=False
    )(state.params['norm/scale'], state.step)
    params = {**state.params, 'norm/scale': changed}
    return state._replace(params=params), numbers

  return made._replace(update=update)


@pytest.mark.fault(29)
@pytest.mark.parametrize('every, step', [(1, 3), (2, 4), (0, 6)])
def test_replicas_that_drift_are_named(tiny, tmp_path, every, step):
  """At the next comparison, or in the next checkpoint, which is not saved."""
  changes = {'train.drift_every': every, 'checkpoint.every': 6}
  with pytest.raises(
    errors.IntegrityError,
    match=rf'step {step} differ: .*norm/scale of device 5.* mesh axis data ',
  ):
    tiny.run(tmp_path, changes, mesh='data=8', make_step=_drifting)
  assert not _steps(tmp_path)


SLOW = """
import functools, sys, time
from paraxis.train import cli, loop

def pause(step, values, job):
  time.sleep(float(sys.argv[1]))

loop.run = functools.partial(loop.run, callbacks=[pause])
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.fault(8)
@pytest.mark.parametrize(
  'pauses, slow', [((0.0, 0.4), True), ((0.4, 0.4), False)]
)
def test_a_slow_process_is_named(tiny, tmp_path, pauses, slow):
  """Both take equally long a step: the fast one waits for the slow one."""
  address = support.address()
  processes = [
    subprocess.Popen(
      [
        *(sys.executable, '-c', SLOW, str(seconds), 'train'),
        *(f'--config={tiny.file}', f'--workdir={tmp_path}', '--devices=4'),
        *(f'--coordinator_address={address}', '--num_processes=2'),
        *(f'--process_id={rank}', '--config.train.steps=10'),
        # A pause within a save is no step's: of 5 steps most must have theirs.
        *('--config.train.print_every=1', '--config.checkpoint.every=4'),
      ],
      env=dict(os.environ, PARAXIS_CACHE=str(tiny.folder / 'cache')),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank, seconds in enumerate(pauses)
  ]
  said = support.ended(processes, seconds=240)
  assert ('stragglers at step 10: process 1 above' in said[0]) == slow
  assert 'process 0 above' not in said[0] and slow == ('stragglers' in said[0])
  assert 'stragglers' not in said[1]
