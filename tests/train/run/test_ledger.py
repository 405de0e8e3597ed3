"""Lines of events.jsonl: whole ones, few, and never a run that fails for it."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from paraxis.train.run import ledger


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def clock(monkeypatch):
  """Clocks that stand still: clock(seconds) moves them."""
  now = [1000.0]
  monkeypatch.setattr(ledger.time, 'time', lambda: 5000.0)
  monkeypatch.setattr(ledger.time, 'monotonic', lambda: now[0])

  def wait(seconds):
    now[0] += seconds

  return wait


def test_every_event(tmp_path, clock):
  path = tmp_path / ledger.FILE
  with ledger.Ledger(path, pytest.fail, began=4990.5) as book:
    clock(1)
    with book.phase('steps', 10):
      clock(2)
      book.step(11)
      with book.phase('save'):
        clock(3)
      book.commit(11)
    clock(4)
    book.end('stopped by SIGTERM')
    book.end('twice')
  own = dict(pid=os.getpid(), attempt=1)
  assert rows(path) == [
    dict(time=4990.5, event='start', **own),
    dict(time=5001.0, event='phase', name='steps', step=10),
    dict(time=5003.0, event='phase', name='steps', step=11),
    dict(time=5003.0, event='phase', name='save', step=11),
    dict(time=5006.0, event='phase', name='steps', step=11),
    dict(time=5006.0, event='commit', step=11),
    dict(time=5006.0, event='phase', name='other', step=11),
    dict(time=5010.0, event='end', why='stopped by SIGTERM', step=11),
  ]
  with ledger.Ledger(path) as book:
    pass
  assert [r.get('attempt') for r in rows(path)[-2:]] == [2, None]
  assert rows(path)[-1]['why'] == 'done'
  with pytest.raises(OSError), ledger.Ledger(path) as book:
    raise OSError('no disk')
  assert rows(path)[-1]['why'] == 'OSError: no disk'


def test_steps_write_a_line_now_and_then(tmp_path, clock):
  """So that most write nothing, and a kill loses a hundredth or 5 seconds."""
  path, each = tmp_path / ledger.FILE, 2**-7
  with ledger.Ledger(path) as book, book.phase('steps', 0):
    for step in range(1, 200_001):
      clock(each)
      book.step(step)
    found = [r['step'] * each for r in rows(path)[1:]]
  assert len(found) < 200_001 / 200
  gaps = [(b, b - a) for a, b in zip(found[:-1], found[1:], strict=True)]
  assert all(gap <= min(5, max(0.1, b / 100)) + each for b, gap in gaps)
  assert min(gap for _, gap in gaps) > 0.1 and gaps[-1][1] >= 5.0


def test_a_slow_step_has_a_line_of_its_own(tmp_path, clock):
  path = tmp_path / ledger.FILE
  with ledger.Ledger(path) as book, book.phase('steps', 0):
    for step in range(1, 5):
      clock(6)
      book.step(step)
    assert [r['step'] for r in rows(path)[1:]] == [0, 1, 2, 3, 4]


def test_a_stall_begins_with_the_last_progress(tmp_path, clock):
  path = tmp_path / ledger.FILE
  with ledger.Ledger(path) as book, book.phase('steps', 7):
    clock(100)
    book.stalled(90.0)
    assert rows(path)[2:] == [
      dict(time=5010.0, event='phase', name='stall', step=7),
      dict(time=5100.0, event='end', why='stalled in steps', step=7),
    ]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with ledger.Ledger(None, pytest.fail) as book, book.phase('steps', 0):
    book.step(1)
    book.commit(1)
  ledger.note(None, 'exit', pytest.fail)
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('cut', [1, 9, 30])
def test_a_line_that_a_kill_cut_short_stands_alone(tmp_path, cut):
  path = tmp_path / ledger.FILE
  ledger.note(path, 'launch', pytest.fail, ranks=2)
  whole = path.read_bytes()
  path.write_bytes(whole + b'{"time": 1.5, "event": "phase", "na'[:cut])
  ledger.note(path, 'exit', pytest.fail, code=-9)
  lines = path.read_text().splitlines()
  assert len(lines) == 3 and json.loads(lines[0])['ranks'] == 2
  assert json.loads(lines[2])['code'] == -9
  # Another line follows without an empty one.
  with ledger.Ledger(path, pytest.fail):
    pass
  assert len(path.read_text().splitlines()) == 5


def test_a_line_that_a_full_disk_cut_short_stands_alone(tmp_path, monkeypatch):
  path, right = tmp_path / ledger.FILE, os.write
  said = []
  with ledger.Ledger(path, said.append) as book:
    monkeypatch.setattr(os, 'write', lambda f, data: right(f, data[:9]))
    book.commit(1)

    def full(file, data):
      raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'write', full)
    book.commit(2)
    book.commit(3)
    monkeypatch.setattr(os, 'write', right)
    book.commit(4)
  assert len(said) == 1 and 'No space left' in said[0]
  lines = path.read_text().splitlines()
  assert len(lines) == 4 and lines[1] == '{"time": '
  assert json.loads(lines[2])['step'] == 4


def _fifo(path, _):
  os.mkfifo(path)


def _folder(path, _):
  path.mkdir()


def _link(path, other):
  path.symlink_to(other)


def _missing_folder(path, _):
  path.parent.rmdir()


def _large(path, _):
  with open(path, 'wb') as file:
    file.truncate(2**40)  # a hole: no disk is used, but all would be read


@pytest.mark.parametrize(
  'make', [_fifo, _folder, _link, _missing_folder, _large]
)
def test_no_file_stops_or_blocks_a_run(tmp_path, make):
  folder, other = tmp_path / 'run', tmp_path / 'other'
  folder.mkdir()
  other.write_bytes(b'kept')
  path, said = folder / ledger.FILE, []
  make(path, other)
  with ledger.Ledger(path, said.append) as book, book.phase('steps', 0):
    book.commit(1)
  ledger.note(path, 'exit', said.append)
  assert len(said) == 2  # once for each who writes
  assert all(str(path) in line and 'no goodput' in line for line in said)
  assert other.read_bytes() == b'kept'


def test_a_file_that_may_not_be_written(tmp_path):
  """By another user than root, who may write all."""
  code = """
    import os, sys
    from paraxis.train.run import ledger
    if os.geteuid() == 0:
      os.seteuid(65534)
    with ledger.Ledger(sys.argv[1]) as book, book.phase('steps', 0):
      book.step(1)
  """
  path = tmp_path / ledger.FILE
  path.write_bytes(b'')
  path.chmod(0o444)
  # That user may not note what it executes, either (tests/executed/).
  env = {k: v for k, v in os.environ.items() if k != 'PARAXIS_EXECUTED'}
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), str(path)],
    capture_output=True, text=True, env=env,
  )  # fmt: skip
  assert done.returncode == 0 and done.stderr == ''
  assert 'Permission denied' in done.stdout and path.read_bytes() == b''


def test_threads_do_not_mix_lines(tmp_path):
  """A checkpoint is committed by another thread than that of the steps."""
  path = tmp_path / ledger.FILE
  with ledger.Ledger(path, pytest.fail) as book, book.phase('steps', 0):
    commits = [
      threading.Thread(target=lambda: [book.commit(n) for n in range(300)])
      for _ in range(3)
    ]
    for thread in commits:
      thread.start()
    for _ in range(300):
      with book.phase('save'):
        pass
    for thread in commits:
      thread.join()
  assert len(rows(path)) == 1 + 2 + 900 + 600 + 1


def test_when_this_process_began():
  """After its parent started it, before it says so."""
  before = ledger.time.time()
  code = 'from paraxis.train.run import ledger as l; print(l.process_began())'
  code = f'import time; time.sleep(0.3); print(time.time()); {code}'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  later, began = map(float, done.stdout.split())
  tick = 0.05  # the kernel counts in hundredths of a second
  assert before - tick <= began <= later - 0.3 + tick
