"""`paraxis checkpoint inspect | verify | diff | reshard`, as users type it."""

import json
import logging
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorstore as ts

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import store
from paraxis.train import cli

pytestmark = pytest.mark.usefixtures('settings_stay')


def tree_of(step, change=0.0):
  up = np.arange(48, dtype=np.float32).reshape(2, 4, 6) + step
  up[1, 3, 5] += change
  return {'params/layers/up': up, 'step': np.asarray(step, np.int32)}


def run_of(path, steps, change=lambda step: 0.0, origin=None):
  """A run with these steps, some of which differ."""
  config = schema.view({'model': dict(d_model=48), 'train': dict(seed=7)})
  meta = dict(config=schema.to_json(config), versions=dict(jax='0.10.2'))
  meta |= dict(origin=origin) if origin else {}
  with store.Store(path / 'checkpoints') as opened:
    for step in steps:
      tree = jax.device_put(tree_of(step, change(step)), jax.devices()[0])
      axes = {'params/layers/up': ('layers', 'embed', 'mlp'), 'step': ()}
      opened.save(step, tree, axes, meta | dict(cursor=dict(step=step)))
  return path


@pytest.fixture
def run(tmp_path):
  return run_of(tmp_path / 'run', (2, 4, 6), origin=dict(source='before'))


def call(capsys, *words):
  """(exit code, standard output, standard error) of a checkpoint command."""
  code = cli.main(['checkpoint', *map(str, words)])
  out, err = capsys.readouterr()
  return code, out, err


def flip(folder):
  """One bit of the largest file of data."""
  path = max(folder.rglob('d/*'), key=lambda p: p.stat().st_size)
  raw = bytearray(path.read_bytes())
  raw[len(raw) // 2] ^= 8
  path.write_bytes(raw)


@pytest.mark.parametrize('at, step', [
  ('', 6), ('/4', 4), ('/checkpoints', 6), ('/checkpoints/4', 4),
])  # fmt: skip
def test_inspect_finds_the_step(run, capsys, at, step):
  code, out, _ = call(capsys, 'inspect', f'--checkpoint={run}{at}', '--json')
  found = json.loads(out)
  assert code == 0 and found['step'] == step and found['format'] == 1
  leaf = found['leaves']['params/layers/up']
  assert leaf['shape'] == [2, 4, 6] and leaf['bytes'] == 192
  assert found['bytes'] == 196 and found['config']['train']['seed'] == 7


def test_inspect_prints_a_table(run, capsys):
  code, out, _ = call(capsys, 'inspect', f'--checkpoint={run}')
  lines = out.splitlines()
  assert code == 0 and lines[0] == f'step 6 of {run}/checkpoints/6'
  assert 'model.d_model=48' in out and 'train.seed=7' in out
  assert 'd_ff' not in out  # a default
  assert '"source": "before"' in out and '"jax": "0.10.2"' in out
  assert lines[-1].startswith('2 leaves, 196 bytes; on disk ')
  cells = next(x for x in lines if x.startswith('params/layers/up')).split('  ')
  cells = [c.strip() for c in cells if c]
  assert cells[1:5] == [
    'float32', '[2, 4, 6]', '["layers", "embed", "mlp"]', '192'
  ]  # fmt: skip
  assert len(cells[5]) == 16


def test_inspect_passes_over_a_damaged_step_and_says_so(run, capsys):
  (run / 'checkpoints/6/manifest/metadata').write_text('{}')
  code, out, err = call(capsys, 'inspect', f'--checkpoint={run}')
  assert code == 0 and out.startswith('step 4 of')
  assert '6 is damaged' in err and 'Looking at an older one' in err
  for step in (2, 4):
    (run / f'checkpoints/{step}/manifest/metadata').write_text('{}')
  code, _, err = call(capsys, 'inspect', f'--checkpoint={run}')
  assert code == errors.EXIT_INTEGRITY and 'all 3 checkpoints' in err


def test_verify_reads_all_steps(run, capsys):
  code, out, _ = call(capsys, 'verify', f'--checkpoint={run}')
  assert code == 0 and out.count(': good\n') == 3
  flip(run / 'checkpoints/4')
  code, out, err = call(capsys, 'verify', f'--checkpoint={run}')
  assert code == errors.EXIT_INTEGRITY and err.count('\n') == 1
  assert '1 of 3 checkpoints' in err and 'step 4, leaf params/layers/up' in err
  assert out.count(': good\n') == 2 and 'step 4: 2 leaves' in out
  assert 'DAMAGED: leaf params/layers/up ' in out
  code, out, err = call(capsys, 'verify', f'--checkpoint={run}', '--json')
  assert code == errors.EXIT_INTEGRITY and err
  faults = {s['step']: s['faults'] for s in json.loads(out)['steps']}
  assert not faults[2] and not faults[6]
  assert faults[4][0].startswith('leaf params/layers/up ')
  for good in (f'{run}/2', f'{run}/checkpoints/6'):
    assert call(capsys, 'verify', f'--checkpoint={good}')[0] == 0
  assert call(capsys, 'verify', f'--checkpoint={run}/4')[0] == 14


def test_verify_reads_every_byte(run, capsys):
  """The bytes that it says are those of all files of the step."""
  folder = run / 'checkpoints' / '2'
  files = [p for p in folder.rglob('*') if p.is_file()]
  size = sum(p.stat().st_size for p in files)
  _, out, _ = call(capsys, 'verify', f'--checkpoint={run}/2')
  assert f'{len(files)} files, {size:,} bytes read: good' in out


@pytest.mark.parametrize('command', ['verify', 'inspect'])
def test_a_pipe_and_a_link_do_not_block(run, capsys, command):
  file = run / 'checkpoints/6/manifest/metadata'
  file.unlink()
  os.mkfifo(file)
  code, _, err = call(capsys, command, f'--checkpoint={run}/6')
  assert code == errors.EXIT_INTEGRITY and 'metadata is a pipe' in err
  shutil.rmtree(run / 'checkpoints/6')
  outside = run.parent / 'outside'
  (run / 'checkpoints/4').rename(outside)
  (run / 'checkpoints/4').symlink_to(outside)
  code, _, err = call(capsys, command, f'--checkpoint={run}/4')
  assert code == errors.EXIT_INTEGRITY and 'symbolic link' in err


def test_diff_of_steps(run, tmp_path, capsys):
  other = run_of(tmp_path / 'other', (4,), lambda step: 0.25)
  code, out, _ = call(capsys, 'diff', f'{run}/4', f'{run}/checkpoints/4')
  assert code == 0 and out.endswith('0 of 2 leaves differ\n')
  # A run beside a step: its step of that number.
  for pair in ((f'{run}/4', other), (run, f'{other}/4')):
    code, out, _ = call(capsys, 'diff', *pair)
    assert code == errors.EXIT_DIFFERENT
    row = next(x for x in out.splitlines() if x.startswith('params'))
    largest, relative = 0.25, 0.25 / (47 + 4 + 0.25)
    assert row.split() == [
      'params/layers/up', '1', '48', f'{largest:.3g}', f'{relative:.3g}',
      'values',
    ]  # fmt: skip
    assert out.endswith('1 of 2 leaves differ\n')
  code, out, _ = call(capsys, 'diff', f'{run}/2', f'{run}/4', '--json')
  found = json.loads(out)
  assert code == 1 and len(found['differences']) == 2 and 'first' not in found
  assert found['differences'][0]['largest'] == 2.0


def test_diff_of_runs_says_from_which_step_on(run, tmp_path, capsys):
  same = run_of(tmp_path / 'same', (4, 6, 8))
  code, out, _ = call(capsys, 'diff', run, same)
  assert code == 0 and 'the runs are alike at 4, 6\n' in out
  other = run_of(tmp_path / 'other', (2, 4, 6), lambda s: float(s > 2))
  code, out, _ = call(capsys, 'diff', run, other)
  assert code == 1 and 'the runs are alike at 2, not from 4 on' in out
  assert f'B: step 4 of {other}/checkpoints/4' in out
  code, out, _ = call(capsys, 'diff', run, other, '--json')
  found = json.loads(out)
  assert (found['alike'], found['first']) == ([2], 4)
  apart = run_of(tmp_path / 'apart', (3,))
  code, _, err = call(capsys, 'diff', run, apart)
  assert code == 2 and 'no step in common' in err
  assert f'{run} has 2, 4, 6, {apart} has 3' in err
  flip(other / 'checkpoints/4')
  code, _, err = call(capsys, 'diff', run, other)
  assert (
    code == errors.EXIT_INTEGRITY and 'other/checkpoints/4 is damaged' in err
  )


def chunks(at):
  """Keys of the arrays of step 4."""
  base = f'file://{at}/checkpoints/4/state/'
  held = ts.KvStore.open(dict(driver='ocdbt', base=base)).result()
  return len(held.list().result())


def test_reshard(run, tmp_path, capsys):
  out = tmp_path / 'new' / 'run'
  before = {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
  argv = 'reshard', f'--checkpoint={run}/4', f'--out={out}', '--chunk_bytes=16'
  code, said, _ = call(capsys, *argv)
  assert code == 0 and 'written and verified' in said
  assert call(capsys, 'verify', f'--checkpoint={out}')[0] == 0
  assert call(capsys, 'diff', f'{run}/4', f'{out}/4')[0] == 0
  names = [p.name for p in out.parent.iterdir()]
  assert names == ['run']  # nothing beside it
  kept = json.loads((run / 'checkpoints/4/manifest/metadata').read_text())
  made = json.loads((out / 'checkpoints/4/manifest/metadata').read_text())
  assert kept == made
  config = schema.from_json((out / 'config.json').read_text())
  assert config.model.d_model == 48
  assert chunks(out) > chunks(run)  # how many files hold them is by chance
  assert before == {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}
  code, _, err = call(capsys, *argv)
  assert code == 2 and 'is there, and not empty' in err


def test_reshard_logs_nothing(run, tmp_path, capsys, caplog, monkeypatch):
  """In a process that has opened no store, as that of the command."""
  monkeypatch.setattr(logging.getLogger('absl'), 'filters', [])
  argv = 'reshard', f'--checkpoint={run}/4', f'--out={tmp_path}/o'
  assert call(capsys, *argv, '--chunk_bytes=16')[0] == 0
  assert not [r for r in caplog.records if 'orbax' in r.pathname]


def test_reshard_of_damage_writes_nothing(run, tmp_path, capsys):
  flip(run / 'checkpoints/4')
  out = tmp_path / 'new' / 'run'
  argv = 'reshard', f'--checkpoint={run}/4', f'--out={out}', '--chunk_bytes=16'
  code, _, err = call(capsys, *argv)
  assert code == errors.EXIT_INTEGRITY and 'leaf params/layers/up' in err
  assert not list(out.parent.iterdir())


def test_bad_input(run, tmp_path, capsys):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'file').touch()
  (tmp_path / 'norun' / 'checkpoints').mkdir(parents=True)
  rewrite = ['reshard', f'--checkpoint={run}']
  for words, said in [
    (['inspect'], '--checkpoint= is missing'),
    (['verify'], '--checkpoint= is missing'),
    (['verify', f'--checkpoint={run}/5'], 'no checkpoint of step 5'),
    (['inspect', f'--checkpoint={run}/5'], 'there are 2, 4, 6.'),
    (['inspect', f'--checkpoint={tmp_path}/nowhere'], 'there is no folder'),
    (['verify', f'--checkpoint={tmp_path}/file'], 'there is no folder'),
    (['verify', f'--checkpoint={tmp_path}/empty'], 'is no run'),
    (['verify', f'--checkpoint={tmp_path}/norun'], 'no checkpoint in'),
    (['diff', run], 'diff A B'),
    (['diff', f'{run}/2', f'{run}/9'], 'no checkpoint of step 9'),
    (rewrite, 'name all three'),
    ([*rewrite, f'--out={tmp_path}/o', '--chunk_bytes=0'], 'N above 0'),
    ([*rewrite, f'--out={tmp_path}', '--chunk_bytes=9'], 'not empty'),
    ([*rewrite, f'--out={tmp_path}/o', '--chunk_bytes=1'], 'at least 8'),
    ([*rewrite, f'--out={tmp_path}/file/o', '--chunk_bytes=9'], 'cannot write'),
    ([*rewrite, '--out=/proc/o', '--chunk_bytes=9'], '--out=/proc/o: cannot'),
  ]:
    code, _, err = call(capsys, *words)
    assert code == errors.EXIT_USER and said in err, (words, err)
    assert err.count('\n') == 1
  file = run / 'checkpoints/6/manifest/metadata'
  manifest = json.loads(file.read_text())
  newer = manifest | dict(version=manifest_lib.VERSION + 1)
  file.write_text(json.dumps(newer | dict(sha256=manifest_lib._sha256(newer))))
  for command in ('inspect', 'verify'):
    code, _, err = call(capsys, command, f'--checkpoint={run}')
    assert code == errors.EXIT_USER and 'upgrade it' in err


def test_one_device_and_no_code(run, tmp_path):
  """In a process of its own: it never asks for the mesh of the run."""
  code = (
    'import sys\n'
    'from paraxis.train import cli\n'
    f'assert cli.main(["checkpoint", "verify", "--checkpoint={run}"]) == 0\n'
    'import jax\n'
    'assert jax.device_count() == 1, jax.devices()\n'
    'assert not {"paraxis.models.build", "paraxis.train.loop",\n'
    '            "paraxis.models.register"} & set(sys.modules)\n'
  )
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  done = subprocess.run(
    [sys.executable, '-c', code], env=env, capture_output=True, text=True
  )
  assert not done.returncode, done.stderr
