"""metrics.jsonl, other loggers, and the progress line."""

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import types

import pytest
import support

from paraxis.configs import schema
from paraxis.train.run import metrics

VALUES = {
  'train/loss': 2.5,
  'train/grad_norm': 1.0,
  'train/learning_rate': 0.001,
  'perf/step_seconds': 0.0164,
  'perf/tokens_per_second': 12345.6,
  'perf/memory_bytes': 2**30,
  'perf/eta_seconds': 3725.4,
}


def _write(folder, rows, config=None):
  config = config or schema.Config()
  with metrics.Writers(folder, config.train, config) as writers:
    for step, values in rows:
      writers.write(step, values)


def test_rows_are_appended_and_the_last_value_of_a_step_counts(tmp_path):
  _write(tmp_path, [(1, {'a': 1.0, 'b': 1}), (2, {'a': 2.0})])
  _write(tmp_path, [(2, {'a': 2.5}), (2, {'c': 7.0}), (1, {'b': 3})])
  assert metrics.read(tmp_path) == {
    1: {'a': 1.0, 'b': 3},
    2: {'a': 2.5, 'c': 7},
  }
  lines = (tmp_path / metrics.FILE).read_text().splitlines()
  assert len(lines) == 5 and json.loads(lines[0]) == {'step': 1, 'a': 1, 'b': 1}


def test_rows_of_a_path_that_was_left_do_not_count(tmp_path):
  """Nor is a line written where there are none."""
  _write(tmp_path, [(s, {'a': 1.0 * s}) for s in range(1, 6)])
  whole = (tmp_path / metrics.FILE).read_bytes()
  config = schema.Config()
  with metrics.Writers(tmp_path, config.train, config) as writers:
    writers.back(5)
    assert (tmp_path / metrics.FILE).read_bytes() == whole
    writers.back(2)
    writers.back(2)
    writers.write(3, {'a': 7.0})
    assert metrics.read(tmp_path) == {1: {'a': 1}, 2: {'a': 2}, 3: {'a': 7}}
    writers.back(0)
  assert metrics.read(tmp_path) == {}
  lines = (tmp_path / metrics.FILE).read_text().splitlines()
  backs = [json.loads(line) for line in lines if metrics.BACK in line]
  assert backs == [{'step': s, metrics.BACK: s} for s in (2, 0)]


def test_numbers_survive_bit_for_bit(tmp_path):
  values = [0.1 + 0.2, math.pi * 1e-30, 5.569748878479004]
  _write(tmp_path, [(i, {'x': v}) for i, v in enumerate(values)])
  rows = metrics.read(tmp_path)
  assert [rows[i]['x'].hex() for i in rows] == [v.hex() for v in values]


@pytest.mark.parametrize('left', ['{"step": 2, "a": 2.', '{', '{"step'])
def test_a_line_that_was_cut_short(tmp_path, left):
  _write(tmp_path, [(1, {'a': 1.0})])
  file = tmp_path / metrics.FILE
  file.write_text(file.read_text() + left)
  assert metrics.read(tmp_path) == {1: {'a': 1.0}}
  _write(tmp_path, [(2, {'a': 3.0})])
  assert metrics.read(tmp_path) == {1: {'a': 1.0}, 2: {'a': 3.0}}


@pytest.mark.parametrize(
  'damaged',
  [
    b'[1, 2]', b'{"a": 2.0}', b'{"step": "1", "a": 2.0}', b'\xff\xfe\xff',
    b'\0\0\0\0', b'{"step": 1, "a": "2"}', b'{"step": 1.5}', b'"step"', b'3',
    b'{"step": 1, "train/loss": [1]}', b'{"step": 1, "perf/mfu": []}',
  ],
)  # fmt: skip
def test_a_damaged_line_is_left_out_and_counted(tmp_path, damaged):
  _write(tmp_path, [(1, {'a': 1.0})])
  with (tmp_path / metrics.FILE).open('ab') as file:
    file.write(damaged + b'\n\n' + damaged + b'\n')
  _write(tmp_path, [(2, {'a': 3.0, 'b': [1, None]})])
  said = []
  found = metrics.read(tmp_path, said.append)
  assert found == {1: {'a': 1.0}, 2: {'a': 3.0, 'b': [1, None]}}
  assert said == [f'{tmp_path / metrics.FILE}: 2 damaged lines are left out']


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_null(tmp_path, value):
  _write(tmp_path, [(1, {'a': value, 'b': 2})])
  text = (tmp_path / metrics.FILE).read_text()
  assert text == '{"step": 1, "a": null, "b": 2}\n'


# A file may have so many bytes, while the disk is full: also bytecode, which
# Python would leave cut short.
FULL = """
  import resource, sys
  sys.dont_write_bytecode = True
  from paraxis.configs import schema
  from paraxis.train.run import metrics
  config, said = schema.Config(), []
  room = lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, -1))
  writers = metrics.Writers(sys.argv[1], config.train, config, say=said.append)
  with writers:
    writers.write(1, {'a': 1.5})
    room(30)  # the middle of row 2
    writers.write(2, {'a': 2.5})
    writers.write(3, {'a': 3.5})
    wait = 'metrics.jsonl is not written (File too large): its rows wait'
    assert said == [wait]
    if sys.argv[2] == 'room':
      room(-1)
      writers.write(4, {'a': 4.5})
  assert said[1:] == ([] if sys.argv[2] == 'room' else [sys.argv[3]]), said
"""


@pytest.mark.fault(15)
@pytest.mark.parametrize('later, rows', [('room', 4), ('none', 1)])
def test_a_full_disk_ends_nothing(tmp_path, later, rows):
  """Rows wait for room, also the rest of one; what is lost is counted."""
  code, lost = textwrap.dedent(FULL), 'metrics.jsonl lacks its last 2 rows'
  subprocess.run(
    [sys.executable, '-c', code, str(tmp_path), later, lost], check=True
  )
  found = {step: step + 0.5 for step in range(1, rows + 1)}
  assert metrics.read(tmp_path) == {s: {'a': x} for s, x in found.items()}


BOARD = """
  import resource, sys
  sys.dont_write_bytecode = True
  from paraxis.configs import schema
  from paraxis.train.run import metrics
  config, said = schema.Config(train=schema.Train(tensorboard=True)), []
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, -1))  # less than the config
  writers = metrics.Writers(sys.argv[1], config.train, config, say=said.append)
  with writers:
    for step in range(1, 41):  # more than its queue holds
      writers.write(step, {'a': step + 0.5})
  (line,) = said
  assert line == (
    'TensorBoard gets no more rows (File too large): metrics.jsonl has all'
  )
"""


@pytest.mark.fault(15)
def test_a_full_disk_of_tensorboard_ends_nothing(tmp_path):
  """Nor does it hold the run up."""
  command = [sys.executable, '-c', textwrap.dedent(BOARD), str(tmp_path)]
  subprocess.run(command, check=True, timeout=100)
  assert list(metrics.read(tmp_path)) == list(range(1, 41))


def _board(folder):
  """[(step, name of a number, or 'purge')] in the order of the events."""
  event_pb2, found = pytest.importorskip('tensorboardX.proto.event_pb2'), []
  for path in sorted(folder.glob('events.*')):
    content = path.read_bytes()
    while content:
      (size,) = struct.unpack('Q', content[:8])  # and its checksum, 4 bytes
      event = event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[16 + size :]
      if event.session_log.status == event_pb2.SessionLog.START:
        found.append((event.step, 'purge'))
      found += [(event.step, v.tag) for v in event.summary.value]
  return [(step, name) for step, name in found if '/' not in name]


def test_tensorboard_counts_no_step_twice(tmp_path, monkeypatch):
  """As its readers see it: what a purge follows is left out from there on."""
  monkeypatch.setattr(metrics, 'FLUSH_SECONDS', 0)
  config = schema.Config(train=schema.Train(tensorboard=True))
  with metrics.Writers(tmp_path, config.train, config) as writers:
    writers.back(4)  # a resumed run
    for step in (5, 6, 7):
      writers.write(step, {'a': 1.0})
    writers.back(5)  # a loss spike
    writers.write(6, {'a': 2.0})
    rows = [(5, 'purge'), (5, 'a'), (6, 'a'), (7, 'a'), (6, 'purge'), (6, 'a')]
    support.until(lambda: _board(tmp_path) == rows)  # a kill loses little


def test_a_checkpoint_does_not_wait_for_room(tmp_path, monkeypatch):
  def full(handle):
    raise OSError(28, 'No space left on device')

  config = schema.Config()
  with metrics.Writers(tmp_path, config.train, config) as writers:
    monkeypatch.setattr(os, 'fsync', full)
    writers.sync()


def test_another_process_writes_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(metrics.jax, 'process_index', lambda: 1)
  _write(tmp_path, [(1, {'a': 1.0})])
  assert not list(tmp_path.iterdir())


def test_wandb_gets_the_config_and_every_row(tmp_path, monkeypatch):
  seen = []

  class Run:
    log = staticmethod(lambda values, step: seen.append((step, values)))
    finish = staticmethod(lambda: seen.append('finished'))

  def init(**given):
    seen.append(given)
    return Run

  monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
  config = schema.Config(train=schema.Train(wandb='sea'))
  _write(tmp_path, [(3, {'a': 1.0})], config)
  _write(tmp_path, [], config)
  given, *rest, resumed, _ = seen
  assert given['id'] == resumed['id'] and resumed['resume'] == 'allow'
  assert set(given['config']) >= {'about', 'source'}
  assert given['project'] == 'sea' and given['dir'] == tmp_path
  assert given['config']['model']['d_model'] == config.model.d_model
  assert rest == [(3, {'a': 1.0}), 'finished']


def test_a_name_in_wandb_that_a_full_disk_left_empty(tmp_path):
  (tmp_path / metrics.WANDB_ID).write_text('')
  name = metrics._wandb_id(tmp_path)
  assert len(name) == 12 and metrics._wandb_id(tmp_path) == name
  assert [p.name for p in tmp_path.iterdir()] == [metrics.WANDB_ID]


@pytest.mark.smoke
def test_wandb_without_a_network_keeps_one_run(tmp_path, monkeypatch):
  pytest.importorskip('wandb', reason='the package wandb is not installed')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  # A busy machine takes its time to start what writes.
  for patience in ('WANDB__SERVICE_WAIT', 'WANDB_INIT_TIMEOUT'):
    monkeypatch.setenv(patience, '300')
  config = schema.Config(train=schema.Train(wandb='sea'))
  for step in (1, 2):
    _write(tmp_path, [(step, {'drift': 1.5})], config)
  name = (tmp_path / metrics.WANDB_ID).read_text()
  kept = sorted(tmp_path.glob('wandb/offline-run-*/*.wandb'))
  assert [path.name for path in kept] == [f'run-{name}.wandb'] * 2
  words = b'drift', b'changed files', b'd_model'
  for path in kept:  # another process writes it
    support.until(lambda path=path: all(w in path.read_bytes() for w in words))


def test_the_source_is_the_checkout(tmp_path, monkeypatch):
  git = lambda *words: subprocess.run(
    ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *words],
    cwd=tmp_path, check=True, capture_output=True, text=True,
  ).stdout  # fmt: skip
  file = tmp_path / 'train' / 'run' / 'metrics.py'
  file.parent.mkdir(parents=True)
  monkeypatch.setattr(metrics, '__file__', str(file))
  monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
  assert metrics.source() == {}
  git('init', '-q')
  git('commit', '-q', '--allow-empty', '-m', 'one')
  commit = git('rev-parse', 'HEAD').strip()
  assert metrics.source() == {'commit': commit, 'changed files': 0}
  file.write_text('new')
  assert metrics.source() == {'commit': commit, 'changed files': 1}


@pytest.mark.parametrize(
  'field, package', [('tensorboard', 'tensorboardX'), ('wandb', 'wandb')]
)
def test_a_logger_that_is_not_installed(tiny, monkeypatch, field, package):
  found = importlib.util.find_spec
  missing = lambda name, *of: None if name == package else found(name, *of)
  monkeypatch.setattr(importlib.util, 'find_spec', missing)
  metrics.check_loggers(schema.Train())
  value = dict(tensorboard=True, wandb='sea')[field]
  with support.refused(f'package {package}, which'):
    tiny.job({f'train.{field}': value})


def test_plain_lines_off_a_terminal(capsys):
  with metrics.Progress(10, 4) as progress:
    for step in range(1, 11):
      progress.step(step, VALUES)
    progress.say('[a line] that stays')
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[1] for line in lines[:-1]] == ['4/10', '8/10', '10/10']
  assert lines[0] == (
    'step 4/10  loss 2.5000  grad 1.00  lr 1.00e-03  16 ms/step'
    '  12,346 tokens/s  1.00 GiB  1:02:05 left'
  )
  assert lines[2].endswith('GiB')  # nothing is left
  known = metrics.Progress(10, 4).text(1, VALUES | {'perf/mfu': 0.4321})
  assert 'tokens/s  MFU 43.2%  1.00 GiB' in known
  apart = {'perf/checkpoint_seconds': 1.26, 'perf/evaluation_seconds': 0.0}
  known = metrics.Progress(10, 4).text(1, VALUES | apart)
  assert 'GiB  checkpoint 1.3 s  evaluation 0.0 s  1:02:05 left' in known
  assert lines[-1] == '[a line] that stays'


def test_one_live_line_on_a_terminal(capsys, monkeypatch):
  monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
  with metrics.Progress(2, 1) as progress:
    assert progress._live is not None
    progress.step(1, VALUES)
    progress.say('[a line] that stays')
  shown = capsys.readouterr().out
  assert 'step 1/2' in shown and '[a line] that stays' in shown


def test_other_processes_are_silent(monkeypatch):
  said = []
  monkeypatch.setattr(metrics.jax, 'process_index', lambda: 1)
  with metrics.Progress(2, 1, said.append) as progress:
    progress.step(1, VALUES)
  assert not said


def test_memory_is_measured():
  held = bytearray(8 << 20)
  assert metrics.memory_bytes() > len(held)
