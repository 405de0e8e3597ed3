"""A run that hangs is ended, with its stacks; one that is slow is not."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.run import watchdog
from paraxis.train.run import workdir

HANGS = """
  import sys, threading
  from paraxis.train.run import watchdog

  def stuck_here():
    threading.Event().wait()

  with watchdog.Watchdog(float(sys.argv[2]), floor=1.0) as dog:
    with dog.phase('steps'):
      for step in range(1, 9):
        dog.step(step)
      with dog.phase(sys.argv[1]):
        stuck_here()
"""
# 8 steps of 50 ms, then of 5 times as long; argv: times the median allowed.
SLOW = """
  import sys, time
  from paraxis.train.run import watchdog

  dog = watchdog.Watchdog(60.0, floor=0.2, times=float(sys.argv[1]))
  with dog, dog.phase('steps'):
    for step in range(20):
      time.sleep(0.05 if step < 8 else 0.25)
      dog.step(step)
      print(step, flush=True)
"""


def start(code, *arguments):
  """A process of the code: subprocess.Popen."""
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(code), *arguments],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  """(exit code, stdout, stderr)."""
  try:
    out, said = process.communicate(timeout=100)
  finally:
    process.kill()
  return process.returncode, out, said


@pytest.mark.fault(7)
@pytest.mark.parametrize('phase', ['compile', 'restore', 'evaluate', 'save'])
def test_a_phase_that_hangs(phase):
  code, _, said = finish(start(HANGS, phase, '1.5'))
  line, *stacks = said.splitlines()
  assert code == errors.EXIT_CRASH
  assert f's in phase {phase}, after step 8; the deadline is 1.5 s' in line
  assert '(train.stall_seconds=1.5)' in line and 'no progress for 1.5' in line
  # The stack of the thread that hangs, and those of others.
  assert sum(' in stuck_here' in stack for stack in stacks) == 1
  assert sum(stack.startswith(('Thread', 'Current')) for stack in stacks) > 1


def test_a_step_that_hangs_has_a_deadline_of_its_own():
  code, _, said = finish(start(HANGS, 'steps', '600'))
  assert code == errors.EXIT_CRASH
  assert 'in phase steps, after step 8; the deadline is 1 s (20 x the' in said
  assert 'at least 1 s)' in said and ' in stuck_here' in said


def test_a_run_that_is_slowed_down_goes_on():
  code, out, said = finish(start(SLOW, '20'))
  assert (code, said) == (0, '') and out.split()[-1] == '19'


def test_one_with_too_short_a_deadline_does_not():
  """The test before can fail: with 2 medians the same run is ended."""
  code, out, said = finish(start(SLOW, '2'))
  assert code == errors.EXIT_CRASH and out.split()[-1] != '19'
  assert '(2 x the median step of 0.0' in said


BY_A_CLOCK = """
      began = time.monotonic()
      def tick():
        waited = time.monotonic() - began
        return (waited, 'by a clock') if waited > 2 else None
      dog.tick = tick
"""


@pytest.mark.parametrize(
  'counted, code, said',
  [('', 0, ''), (BY_A_CLOCK, errors.EXIT_CRASH, 'by a clock')],
)
def test_a_process_that_was_stopped_goes_on(counted, code, said):
  """Held for longer than its deadline, which a clock counts at once."""
  process = start(f"""
    import sys, time
    from paraxis.train.run import watchdog
    with watchdog.Watchdog(2.0) as dog:
      {counted}
      print('here', flush=True)
      sys.stdin.readline()
  """)
  assert process.stdout.readline() == 'here\n'
  process.send_signal(signal.SIGSTOP)
  time.sleep(2.5)
  process.send_signal(signal.SIGCONT)
  time.sleep(0.5)  # a tenth of a second would do
  process.stdin.write('go on\n')
  found = finish(process)
  assert found[0] == code and found[2].startswith(said)
  assert bool(found[2]) == bool(said)


def test_a_debugger_holds_the_deadline():
  code = """
    from paraxis.train.run import watchdog
    with watchdog.Watchdog(0.5):
      breakpoint()
  """
  process = start(code)
  assert 'a debugger holds this process' in process.stderr.readline()
  process.stdin.write('continue\n')
  assert finish(process)[0] == 0


@pytest.mark.parametrize('late', ['threading.Event().wait()', '1 / 0'])
def test_what_is_called_at_the_end_cannot_keep_the_process(late, monkeypatch):
  """Nor one that fails: the exit code is the same."""
  code = f"""
    import threading
    from paraxis.train.run import watchdog
    watchdog.TELLING = 1.0
    def late(waited):
      assert waited >= 0.5
      print('called', flush=True)
      {late}
    with watchdog.Watchdog(0.5, late):
      threading.Event().wait()
  """
  code, out, said = finish(start(code))
  assert (code, out) == (errors.EXIT_CRASH, 'called\n')
  assert 'before the first step' in said


def test_a_full_pipe_cannot_keep_the_process():
  """Nobody reads stderr, which is full: the process ends nevertheless."""
  code = """
    import os, threading
    from paraxis.train.run import watchdog
    watchdog.TELLING = 0.5
    os.set_blocking(2, False)
    try:
      while True:
        os.write(2, b'x' * 4096)
    except BlockingIOError:
      os.set_blocking(2, True)
    with watchdog.Watchdog(0.5):
      threading.Event().wait()
  """
  process = start(code)
  assert process.wait(timeout=100) == errors.EXIT_CRASH
  finish(process)


@pytest.fixture
def dog(monkeypatch):
  """One whose clock is moved by hand, of 1 s a tick, in the phase of steps."""
  now = [0.0]
  monkeypatch.setattr(watchdog.time, 'monotonic', lambda: now[0])
  dog = watchdog.Watchdog(1800)
  assert dog._interval == 1.0

  def step(step, seconds=1.0):
    now[0] += seconds
    dog.step(step)

  with dog.phase('steps'):
    yield dog, step


def ticks(dog, most=4000):
  """Seconds until it would end the process."""
  for count in range(1, most):
    if dog.tick():
      return count
  return None


@pytest.mark.parametrize(
  'seconds, deadline', [(0.01, 120), (8.0, 160), (50.0, 1000), (500.0, 1800)]
)
def test_the_deadline_of_a_step(dog, seconds, deadline):
  dog, step = dog
  for n in range(4):
    step(n, seconds)
  assert dog.deadline() == (1800, 'train.stall_seconds=1800')  # too few
  for n in range(4, 100):
    step(n, seconds)
  step(100, 1e6)  # one that was held up changes nothing
  assert dog.deadline()[0] == deadline and ticks(dog) == deadline
  with dog.phase('evaluate'):
    assert ticks(dog) == 1800
  assert ticks(dog) == deadline


def test_the_median_is_of_the_last_steps(dog):
  """Slower by and by, a hundredfold, without an end."""
  dog, step = dog
  seconds = 1.0
  for n in range(200):
    seconds *= 100 ** (1 / 200)
    for _ in range(round(seconds)):
      assert dog.tick() is None
    step(n, seconds)
  assert 1000 < dog.deadline()[0] < 1800


def test_a_beat_is_progress_and_a_phase_is_no_part_of_a_step(dog):
  dog, step = dog
  with dog.phase('evaluate'):
    for _ in range(3):
      for _ in range(1799):
        assert dog.tick() is None
      dog.beat()
  for n in range(5):
    with dog.phase('save'):
      watchdog.time.monotonic.__closure__[0].cell_contents[0] += 900
    step(n)
  assert dog._seconds[:5] == [1.0] * 5


def test_neither_threads_nor_memory_grow():
  before = threading.active_count()
  for _ in range(30):
    with watchdog.Watchdog(100) as dog:
      assert threading.active_count() == before + 1
  assert threading.active_count() == before
  with watchdog.Watchdog(100) as dog, dog.phase('steps'):
    tracemalloc.start()
    try:
      for count in (1_000, 20_000):
        for step in range(count):
          dog.step(step)
          with dog.phase('save'):
            dog.beat()
        used = tracemalloc.get_traced_memory()[0]
        if count == 1_000:
          first = used
    finally:
      tracemalloc.stop()
    assert used - first < 4096


def test_off_it_has_no_thread():
  before = threading.active_count()
  with watchdog.Watchdog(0) as dog, dog.phase('steps'):
    dog.step(1)
    assert threading.active_count() == before


def test_the_field():
  assert schema.Config().train.stall_seconds == 1800
  config = schema.default()
  config.train.stall_seconds = -1
  with support.refused('train.stall_seconds=-1 is below its lowest valid'):
    schema.view(config)
  assert workdir.is_free('train.stall_seconds')
