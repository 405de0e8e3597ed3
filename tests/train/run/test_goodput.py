"""The account of a run: the parts are what was done, and add up to the whole.

Runs that kill themselves are simulated, with a plain account of their own, in
whole seconds; and one is real, in processes that SIGKILL ends.
"""

import json
import random
import subprocess
import sys
import textwrap
import time

import pytest
import support

from paraxis.train.run import goodput
from paraxis.train.run import ledger


class Story:
  """Lines of a run, and how many seconds it spent on what."""

  def __init__(self, path):
    self.path, self.now, self.rows = path, 1.7e9, []
    self.truth = dict.fromkeys(goodput.PARTS, 0)

  def add(self, event, **fields):
    self.rows.append(dict(time=self.now, event=event, **fields))

  def wait(self, part, seconds):
    self.truth[part] += seconds
    self.now += seconds

  def account(self):
    self.path.mkdir(exist_ok=True)
    text = '\n'.join(map(json.dumps, self.rows))
    (self.path / ledger.FILE).write_text(text)
    return goodput.account(self.path)


def killed(path, seed):
  """A Story of starts that are killed anywhere, at drawn moments."""
  rng = random.Random(seed)
  story = Story(path)
  done = saved = 0
  for attempt in range(1, rng.randint(2, 6)):
    story.add('start', pid=1, attempt=attempt)
    story.wait('other', rng.randint(0, 3))
    for name in ('restore', 'compile'):
      story.add('phase', name=name, step=None)
      story.wait(name, rng.randint(0, 4))
    step, alive = saved, rng.randint(1, 30)
    story.add('phase', name='steps', step=step)
    for _ in range(alive):
      step += 1
      story.wait('productive' if step > done else 'replay', 3)
      done = max(done, step)
      kind = rng.random()
      if kind < 0.5:
        story.add('phase', name='steps', step=step)
      elif kind < 0.8:
        name, part = rng.choice(
          [('save', 'save'), ('evaluate', 'evaluation'), ('stall', 'stall')]
        )
        story.add('phase', name=name, step=step)
        story.wait(part, rng.randint(0, 5))
        story.add('phase', name='steps', step=step)
        if name == 'save' and rng.random() < 0.8:  # else only asked for
          story.add('commit', step=step)
          saved = step
    if story.rows[-1].get('step') != step:  # a line as old as the kill
      story.add('phase', name='steps', step=step)
    if rng.random() < 0.3:
      story.add('end', why='stopped', step=step)
    story.wait('idle', rng.randint(0, 9))
  story.add('start', pid=1, attempt=attempt + 1)
  return story


@pytest.mark.parametrize('seed', range(60))
@pytest.mark.invariant(15)
def test_every_second_of_a_killed_run(tmp_path, seed):
  story = killed(tmp_path, seed)
  found = story.account()
  assert found['seconds'] == story.truth
  assert found['wall'] == sum(story.truth.values())
  assert found['goodput'] == story.truth['productive'] / found['wall']
  assert found['damaged_lines'] == 0


def test_any_lines_add_up(tmp_path):
  """In whole microseconds, without gaps: also lines in no order."""
  rng = random.Random(1)
  names = (*ledger.PHASES, 'from a newer version')
  events = ('start', 'end', 'commit', 'launch', 'exit', 'restart', 'sneeze')
  for _ in range(300):
    story = Story(tmp_path)
    for _ in range(rng.randint(2, 40)):
      story.now += rng.uniform(-1, 3)  # clocks are set back, too
      step = rng.choice([None, rng.randint(0, 9)])
      if rng.random() < 0.6:
        story.add('phase', name=rng.choice(names), step=step)
      else:
        story.add(rng.choice(events), step=step)
    story.now += 100
    story.add('commit', step=1)
    story.account()
    spans, _, damaged = goodput.read(tmp_path)
    assert not damaged
    times = [round(row['time'] * goodput.SECOND) for row in story.rows]
    assert (spans[0].start, spans[-1].end) == (times[0], max(times))
    for a, b in zip(spans[:-1], spans[1:], strict=True):
      assert a.start < a.end == b.start
    assert {s.part for s in spans} <= set(goodput.PARTS)


@pytest.mark.invariant(8)
def test_lost_work_is_told_by_what_was_committed(tmp_path):
  """Saved at 20 in vain: the last commit, of 10, is what a restart has."""
  story = Story(tmp_path)
  for first, steps, commits in ((0, 25, [10]), (10, 20, [20, 30]), (30, 9, [])):
    story.add('start')
    story.add('phase', name='steps', step=first)
    for step in range(first + 1, first + steps + 1):
      story.now += 2
      if step % 10 == 0:
        story.add('phase', name='save', step=step)
        story.now += 1
        story.add('phase', name='steps', step=step)
      if step in commits:
        story.add('commit', step=step)
    story.add('phase', name='steps', step=step)
    story.now += 5
  found = story.account()
  assert [a['lost'] for a in found['attempts']] == [15, 0, 9]
  assert [a['committed'] for a in found['attempts']] == [10, 30, None]
  assert [(a['first'], a['last']) for a in found['attempts']] == [
    (0, 25), (10, 30), (30, 39),
  ]  # fmt: skip
  assert found['lost_steps'] == 15  # the last may still commit them
  assert found['seconds']['replay'] == 2 * 15
  assert found['seconds']['productive'] == 2 * 39


def test_costs_are_of_one_each(tmp_path):
  """Of a run that fails after 25 of 40 steps, saved every 10."""
  story = Story(tmp_path)
  for first, last in ((0, 25), (20, 40)):
    story.add('start')
    story.now += 5
    story.add('phase', name='compile', step=None)
    story.now += 9 - 2 * bool(first)
    if first:
      story.add('phase', name='restore', step=None)
      story.now += 3
    story.add('phase', name='steps', step=first)
    for step in range(first + 1, last + 1):
      story.now += 2
      if step % 10 == 0:  # begun, and waited for after a step's gradients
        for name, seconds in (('save', 0.5), ('steps', 1), ('save', 0.25)):
          story.add('phase', name=name, step=step)
          story.now += seconds
        story.add('commit', step=step)
        story.add('phase', name='steps', step=step)
    story.add('end', why='failed', step=last)
    story.now += 60
    if not first:
      with support.refused('no cost of restore, replace in 1 starts'):
        story.account()
        goodput.costs(tmp_path)
  story.account()
  found = goodput.costs(tmp_path)
  assert found == pytest.approx(
    dict(step=2.1, save=0.75, restore=3, compile=13, replace=60)
  )


def test_a_stretch_that_is_partly_replay(tmp_path):
  """Without a line where the old steps end: by equal parts."""
  story = Story(tmp_path)
  for last, seconds in ((8, 80), (20, 40)):
    story.add('start')
    story.add('phase', name='steps', step=0)
    story.now += seconds
    story.add('phase', name='steps', step=last)
  found = story.account()['seconds']
  assert (found['replay'], found['productive']) == (16, 80 + 24)


def test_a_supervisor_tells_when_it_began_and_died(tmp_path):
  """Between the last line and the exit it was alive; back-off is idle."""
  story = Story(tmp_path)
  for _ in range(2):
    story.add('launch')
    story.wait('other', 4)
    story.add('start')
    story.wait('other', 1)
    story.add('phase', name='steps', step=0)
    story.wait('productive' if len(story.rows) < 4 else 'replay', 30)
    story.add('phase', name='steps', step=3)
    story.wait('productive', 7)  # of the step that comes
    story.add('exit', code=-9)
    story.wait('idle', 5)
    story.add('restart')
    story.wait('idle', 6)
  story.add('launch')
  found = story.account()
  assert found['seconds'] == story.truth
  assert [a['seconds'] for a in found['attempts']] == [38, 38]


def test_a_launch_that_is_refused_ends_no_start(tmp_path):
  """It begins and ends beside one that runs on."""
  story = Story(tmp_path)
  story.add('start')
  story.add('phase', name='steps', step=0)
  for event in ('launch', 'exit', 'end'):
    story.wait('productive', 3)
    story.add(event, code=2)
  story.wait('productive', 6)
  story.add('phase', name='steps', step=5)
  story.add('launch')
  story.wait('productive', 5)
  story.add('end', why='done', step=7)
  for event in ('exit', 'end'):
    story.wait('idle', 1)
    story.add(event, code=2)
  found = story.account()
  assert found['seconds'] == story.truth
  assert [a['seconds'] for a in found['attempts']] == [22]


def test_a_launch_after_one_that_was_killed(tmp_path):
  """With its supervisor; the first process dies before it says a word."""
  story = Story(tmp_path)
  story.add('start')
  story.add('phase', name='steps', step=0)
  story.wait('productive', 30)
  story.add('phase', name='steps', step=3)
  story.wait('idle', 9)
  for event, part in (
    ('launch', 'other'), ('exit', 'idle'), ('restart', 'idle'),
    ('launch', 'other'), ('start', 'other'),
  ):  # fmt: skip
    story.add(event)
    story.wait(part, 4)
  story.add('phase', name='restore')
  assert story.account()['seconds'] == story.truth


def test_a_stall_is_no_step(tmp_path):
  """The line that says so is written at its end and dated to its beginning."""
  story = Story(tmp_path)
  story.add('start')
  story.add('phase', name='steps', step=0)
  story.wait('productive', 10)
  began = story.now
  story.wait('stall', 120)
  story.rows.append(dict(time=began, event='phase', name='stall', step=5))
  story.add('end', why='stalled in steps', step=5)
  found = story.account()
  assert found['seconds'] == story.truth
  assert found['attempts'][0]['ended'] == 'stalled in steps'


def test_a_supervisor_does_not_say_why_a_process_ended(tmp_path):
  """Its lines come later: the process's own reason stays."""
  story = Story(tmp_path)
  for row in (
    dict(event='launch', pids={'0': 1}),
    dict(event='start', pid=1, attempt=1),
    dict(event='phase', name='steps', step=0),
    dict(event='end', why='SIGTERM', step=4),
    dict(event='exit', rank=0, exit=75),
    dict(event='end', code=75),
  ):
    story.add(**row)
    story.now += 1
  assert [a['ended'] for a in story.account()['attempts']] == ['SIGTERM']


LOOP = """
  import itertools, os, signal, sys, time
  from paraxis.train.run import ledger

  path, truth, first, die = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
  ledger.EVERY = 0.05
  log = os.open(truth, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

  def did(part, seconds):
    global began
    time.sleep(seconds)
    now = time.time()
    os.write(log, f'{part} {began} {now}\\n'.encode())
    began = now

  book = ledger.Ledger(path, began=ledger.process_began())
  began = time.time()
  with book.phase('restore'):
    did('restore', 0.2)
  with book.phase('steps', first):
    for step in itertools.count(first + 1):
      did(f'step{step}', 0.06)
      book.step(step)
      if step % 5 == 0:
        with book.phase('save', step):
          did('save', 0.1)
        book.commit(step)
      if step == die:
        os.kill(os.getpid(), signal.SIGKILL)
      if step == 30:
        break
  os.write(log, f'last {time.time()} 0\\n'.encode())
  book.end('done')
  os._exit(0)
"""


@pytest.mark.invariant(15)
def test_real_processes_that_are_killed(tmp_path):
  """Four starts: within 1% of what their parent and they themselves saw."""
  path, truth = tmp_path / ledger.FILE, tmp_path / 'truth'
  before, codes, begun = time.time(), [], 0.0
  for first, die in ((0, 9), (5, 18), (15, 23), (20, 0)):
    arguments = [str(path), str(truth), str(first), str(die)]
    process = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(LOOP), *arguments]
    )
    begun = begun or time.time()
    codes.append(process.wait(timeout=100))
    time.sleep(0.3)
  after = time.time()
  assert codes == [-9, -9, -9, 0]
  found = goodput.account(tmp_path)

  wanted, done, last = dict.fromkeys(goodput.PARTS, 0.0), set(), 0.0
  for line in truth.read_text().splitlines():
    name, start, end = line.split()
    start, end = float(start), float(end)
    if name == 'last':
      last = start
      continue
    part = name
    if name.startswith('step'):
      part = 'replay' if name in done else 'productive'
      done.add(name)
    wanted[part] += end - start
  wall = found['wall']
  assert last - begun - 0.01 * wall <= wall <= after - before + 0.01 * wall
  assert sum(found['seconds'].values()) == pytest.approx(wall, abs=1e-9)
  for part in ('productive', 'replay', 'save', 'restore'):
    assert found['seconds'][part] == pytest.approx(
      wanted[part], abs=0.02 * wall
    )
    assert wanted[part] > 0.05 * wall  # it could be missed
  assert found['lost_steps'] == 4 + 3 + 3
  assert len(found['attempts']) == 4
  assert [a['ended'] for a in found['attempts']] == ['', '', '', 'done']


HOSTILE = [
  b'', b'{"time": 1, "event": "ph', b'[1, 2]', b'null', b'"event"', b'{}',
  b'{"time": NaN, "event": "start"}', b'{"time": 1e300, "event": "start"}',
  b'{"time": true, "event": "start"}', b'{"time": -1, "event": "start"}',
  b'{"time": "1", "event": "start"}', b'{"time": 5, "event": null}',
  b'{"time": 5, "event": "commit", "step": -1}',
  b'{"time": 5, "event": "commit", "step": 1.5}',
  b'{"time": 5, "event": "commit", "step": 9223372036854775808}',
  b'{"time": 5, "event": "phase", "name": ["steps"]}',
  b'{"time": ' + b'9' * 5000 + b', "event": "start"}',
  b'[' * 60_000, b'\xff\xfe\x00', b'x' * 200_000,
]  # fmt: skip


def test_damaged_lines_are_counted_and_left_out(tmp_path):
  story = killed(tmp_path, 0)
  clean = story.account()
  path = tmp_path / ledger.FILE
  lines = path.read_bytes().split(b'\n')
  for i, bad in enumerate(HOSTILE):
    lines.insert(2 * i, bad)
  path.write_bytes(b'\n'.join(lines))
  found = goodput.account(tmp_path)
  # The longest line is read in pieces, each of them damaged.
  pieces = -(-200_001 // ledger.LONGEST)
  assert found.pop('damaged_lines') == len(HOSTILE) - 2 + pieces
  assert found == {k: v for k, v in clean.items() if k != 'damaged_lines'}


def test_no_account(tmp_path):
  path = tmp_path / ledger.FILE
  with support.refused('does not exist: a workdir without events'):
    goodput.account(tmp_path)
  for content in (b'', b'\n\n', HOSTILE[1], b'{"time": 5, "event": "start"}'):
    path.write_bytes(content)
    with support.refused('no time goes by'):
      goodput.account(tmp_path)
  with open(path, 'wb') as file:
    file.truncate(ledger.LARGEST + 1)
  with support.refused('268,435,457 bytes, more than 268,435,456'):
    goodput.account(tmp_path)
  path.unlink()
  path.symlink_to('/etc/hostname')
  with support.refused('cannot be read'):
    goodput.account(tmp_path)


@pytest.mark.parametrize('make', ['mkfifo', 'mkdir'])
def test_what_is_no_file(tmp_path, make):
  subprocess.run([make, tmp_path / ledger.FILE], check=True)
  with support.refused('cannot be read (it is a ', ', not a file)'):
    goodput.account(tmp_path)
