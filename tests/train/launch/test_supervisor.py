"""Gangs of small programs: who is to blame, what starts again, what ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import support

from paraxis.configs.base import errors
from paraxis.train.launch import supervisor
from paraxis.train.run import ledger

# What every program begins with: its rank, how often the gang was started, and
# ways to end.
BEGIN = """
import os, pathlib, signal, subprocess, sys, time
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
starts = len((folder / f'starts{rank}').read_text())
say = lambda text: print(text, flush=True)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
wait = lambda: time.sleep(1000)
"""


class Gang:
  """A workdir, and programs that count how often they are started."""

  def __init__(self, folder):
    self.folder = folder
    self.workdir = folder / 'run'
    self.workdir.mkdir()

  def ranks(self, *programs):
    """[supervisor.Rank]: one for each program."""
    for rank in range(len(programs)):
      with open(self.folder / f'starts{rank}', 'a') as file:
        file.write('x')
    return [
      supervisor.Rank(
        rank,
        [sys.executable, '-c', BEGIN + text, str(rank), str(self.folder)],
        dict(os.environ),
      )
      for rank, text in enumerate(map(textwrap.dedent, programs))
    ]

  def run(self, *programs, restarts=5):
    """Exit code of the supervisor."""
    budget = supervisor.Budget(restarts, 0.01)
    ranks = lambda: self.ranks(*programs)
    return supervisor.Supervisor(ranks, str(self.workdir), budget).run()

  def starts(self):
    return len((self.folder / 'starts0').read_text())

  def commit(self, step):
    """A folder as a checkpoint leaves it."""
    made = self.workdir / 'checkpoints' / str(step) / 'manifest'
    made.mkdir(parents=True)
    (made / 'metadata').write_text('{}')

  def events(self):
    lines = (self.workdir / ledger.FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]

  def once(self, name):
    """Waits until a program has written this file."""
    support.until((self.folder / name).exists, name)


@pytest.fixture
def gang(tmp_path, monkeypatch):
  monkeypatch.setattr(supervisor, 'GRACE_SECONDS', 0.5)
  return Gang(tmp_path)


def test_lines_of_rank_0_are_plain_and_all_end_well(gang, capfd):
  text = "say('loss 1'); print('warned', file=sys.stderr)"
  assert gang.run(text, text) == errors.EXIT_OK
  out, err = capfd.readouterr()
  assert sorted(out.splitlines()) == ['[1] loss 1', 'loss 1']
  assert sorted(err.splitlines()) == ['[1] warned', 'warned']
  assert gang.starts() == 1
  names = [row['event'] for row in gang.events()]
  assert names == ['launch', 'exit', 'exit', 'end']


def _runs(pid):
  """Whether a process is there, and no zombie that nobody reaps."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


@pytest.mark.fault(1)
def test_a_killed_rank_is_named_and_all_start_again(gang, capfd):
  gang.commit(25)
  waits = """
    child = subprocess.Popen([sys.executable, '-c', 'input()'],
                             stdin=subprocess.PIPE)
    (folder / f'child{starts}').write_text(str(child.pid))
    if starts == 1:
      wait()
    child.kill()
  """
  dies = """
    with open(folder / 'run' / 'metrics.jsonl', 'a') as file:
      file.write('{"step": 26}\\n{"step": 27}\\n{"step": 2')
    while not (folder / 'child1').exists():
      time.sleep(0.01)
    if starts == 1:
      die()
  """
  assert gang.run(waits, dies) == errors.EXIT_OK
  err = capfd.readouterr().err.splitlines()
  assert err == [
    'launch: rank 1 died (signal 9) after step 27; resuming from committed '
    'step 25 (2 replayed), restart 1 of 5 in 0.01 s'
  ]
  # The peer was ended, and what it had started.
  child = (gang.folder / 'child1').read_text()
  support.until(lambda: not _runs(gang.events()[0]['pids']['0']))
  support.until(lambda: not _runs(child))
  row = next(row for row in gang.events() if row['event'] == 'restart')
  del row['time']
  assert row == dict(
    event='restart', step=27, committed=25, rank=1, exit=-9, seconds=0.01
  )


@pytest.mark.parametrize('code', [2, 14, 1, 77])
def test_what_is_for_a_human_is_not_started_again(gang, capfd, code):
  """Also if a peer crashed of it first."""
  crashes = """
    print('paraxis: crashed: no peer', file=sys.stderr)
    (folder / 'first').write_text('')
    sys.exit(13)
  """
  refuses = f"""
    while not (folder / 'first').exists():
      time.sleep(0.01)
    print('paraxis: no such file.', file=sys.stderr)
    sys.exit({code})
  """
  assert gang.run(crashes, refuses) == code
  assert gang.starts() == 1
  assert capfd.readouterr().err.splitlines() == [
    'paraxis: crashed: no peer',
    f'launch: rank 1 ended (exit code {code}): no such file',
  ]


def test_what_all_say_is_said_once(gang, capfd):
  refuses = "sys.exit(print('paraxis: no file.', file=sys.stderr) or 2)"
  assert gang.run(refuses, refuses) == errors.EXIT_USER
  (said,) = capfd.readouterr().err.splitlines()
  assert said.endswith('ended (exit code 2): no file')


def test_a_gang_that_commits_nothing_is_given_up(gang, capfd):
  assert gang.run('sys.exit(13)', 'wait()', restarts=2) == errors.EXIT_CRASH
  assert gang.starts() == 3
  said = capfd.readouterr().err.splitlines()
  begin = 'launch: rank 0 died (exit code 13) before its first step; '
  restart = begin + 'starting from the beginning, restart {} of 2 in {} s'
  assert said == [
    restart.format(1, 0.01),
    restart.format(2, 0.02),
    begin + 'not started again: 2 restarts committed no new step',
  ]


def test_the_budget_begins_anew_with_a_commit():
  budget = supervisor.Budget(2, 40.0)
  for found in ({(5, 1)}, {(5, 1), (6, 2)}):
    assert [budget.next(found) for _ in range(3)] == [40.0, 60.0, None]
  assert budget.next({(6, 2)}) is None  # 5 is pruned: no new one
  # After a loss spike the run went back, and commits smaller steps.
  assert [budget.next({(5, 3)}) for _ in range(3)] == [40.0, 60.0, None]
  assert supervisor.Budget(0, 1.0).next(set()) is None


def test_waits_are_bounded_after_any_number_of_restarts():
  budget = supervisor.Budget(2000, 2.0)
  assert {budget.next(set()) for _ in range(2000)} == {2, 4, 8, 16, 32, 60}
  assert budget.next(set()) is None


_SAVES = """
  def save(number, frame):
    say(f'saved by {number}')
    os._exit(75)
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
  (folder / f'ready{rank}').write_text('')
  wait()
"""


@pytest.fixture(autouse=True)
def hangup_counts():
  """Also where these tests run under nohup, which has it ignored."""
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
  'number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
def test_signals_are_passed_on_and_all_save(gang, capfd, number):
  def send():
    for rank in range(2):
      gang.once(f'ready{rank}')
    os.kill(os.getpid(), number)

  before = signal.getsignal(number)
  threading.Thread(target=send).start()
  assert gang.run(_SAVES, _SAVES) == errors.EXIT_PREEMPTED
  assert signal.getsignal(number) is before
  out = capfd.readouterr().out.splitlines()
  said = f'saved by {int(number)}'
  assert sorted(out) == [f'[1] {said}', said]
  assert gang.starts() == 1


def test_a_rank_that_dies_of_the_signal_is_not_started_again(gang, capfd):
  def send():
    gang.once('ready0')
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=send).start()
  dies = "(folder / 'ready0').write_text(''); wait()"
  assert gang.run(dies) == errors.EXIT_CRASH and gang.starts() == 1
  assert 'stopped by SIGTERM, the last committed' in capfd.readouterr().err


@pytest.mark.fault(7)
def test_one_that_hangs_is_to_blame_for_a_peer_that_aborts(gang, capfd):
  hangs = 'wait() if starts == 1 else sys.exit(0)'
  aborts = 'os.abort() if starts == 1 else sys.exit(0)'
  assert gang.run(hangs, aborts) == errors.EXIT_OK
  said = capfd.readouterr().err
  assert 'launch: rank 0 died (signal 9) before its first step: it hung' in said


def _ends(*codes):
  return [supervisor.End(rank, code, '') for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
  'codes, rank',
  [
    ((13, 13), 0), ((-6, 13), 1), ((13, -9), 1), ((-6, -11), 1), ((-9, 2), 1),
    ((2, 14), 1), ((0, 75, 13), 2), ((0, 75), None), ((13, 1), 1),
  ],
)  # fmt: skip
def test_blame(codes, rank):
  found = supervisor.blame(_ends(*codes))
  assert (found.rank if found else None) == rank


def test_the_ranks_save_when_the_supervisor_is_killed(gang):
  code = """
    import sys
    from paraxis.train.launch import supervisor
    rank = supervisor.Rank(0, sys.argv[1:], None)
    supervisor.Supervisor(lambda: [rank], '', None).run()
  """
  saves = _SAVES.replace("say(f'saved by {number}')", "(folder / 's').touch()")
  (rank,) = gang.ranks(saves)
  command = [sys.executable, '-c', textwrap.dedent(code), *rank.argv]
  with subprocess.Popen(command) as process:
    gang.once('ready0')
    process.kill()
  gang.once('s')


def test_nobody_reads_and_the_run_goes_on(gang):
  """As in `paraxis launch ... | head -1`."""
  code = """
    import sys
    from paraxis.train.launch import supervisor
    rank = supervisor.Rank(0, sys.argv[1:], None)
    sys.exit(supervisor.Supervisor(lambda: [rank], '', None).run())
  """
  (rank,) = gang.ranks("for _ in range(9999): say('a line of the run')")
  command = [sys.executable, '-c', textwrap.dedent(code), *rank.argv]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == errors.EXIT_OK


def test_events_wait_for_the_folder_and_follow_no_link(tmp_path):
  one = supervisor.Supervisor(list, str(tmp_path / 'run'), None)
  one._event('launch', processes=2)
  assert not (tmp_path / 'run').exists()
  (tmp_path / 'run').mkdir()
  outside, file = tmp_path / 'outside', tmp_path / 'run' / ledger.FILE
  outside.write_text('mine')
  file.symlink_to(outside)
  one._event('exit', rank=0, exit=-9)
  assert outside.read_text() == 'mine'
  file.unlink()
  file.write_text('{"event": "pha')  # what a kill cut short spoils no line
  one._event('end', code=0)
  _, *lines = file.read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert [row['event'] for row in rows] == ['launch', 'exit', 'end']
  assert rows[0]['time'] <= rows[1]['time'] and rows[1]['exit'] == -9


def test_steps_of_a_workdir(gang):
  assert supervisor.committed(gang.workdir) == -1
  assert supervisor.last_step(gang.workdir, 0) == -1
  gang.commit(8)
  gang.commit(10)
  for name in ('12', '12.orbax-checkpoint-tmp', 'damaged-14-x'):
    (gang.workdir / 'checkpoints' / name).mkdir()
  assert supervisor.committed(gang.workdir) == 10
  file = gang.workdir / 'metrics.jsonl'
  file.write_text('{"step": 9}\n{"step": 10}\nnull\n{"st')
  assert supervisor.last_step(gang.workdir, 0) == 10
  # What an earlier start wrote is not the last step of this one.
  size = file.stat().st_size
  assert supervisor.last_step(gang.workdir, size) == -1
  file.write_text('{"step": 1}\n')  # of a run that set the old file aside
  assert supervisor.last_step(gang.workdir, size) == 1
  file.write_text('{"step": 1}\n{"step": 0, "run/back": 0}\n')  # no step
  assert supervisor.last_step(gang.workdir, 0) == 1
