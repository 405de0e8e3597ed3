"""Ends a process whose run makes no progress: exit code 13, with every stack.

A host that hangs in a collective, a file system or a driver raises nothing,
and the heartbeats of the distributed runtime go on. A daemon thread looks at
what the main thread last reported:

    steps      max(FLOOR, TIMES x the median of the last RECENT steps), and
               never more than train.stall_seconds; without FEWEST steps, that
    all else   train.stall_seconds without a `beat`, a step or another phase

Waiting is counted in ticks of that thread, not read from a clock: a process
that SIGSTOP, a debugger of the whole process or a suspended machine holds for
an hour does not tick, so it has waited for one tick at most; one that starves
for CPU ticks slower and is given longer. Where a debugger written in Python
traces the main thread, the deadline begins anew. What a watchdog in Python
cannot see is a thread that hangs without giving up the interpreter's lock.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time

from paraxis.configs.base import errors

STEPS = 'steps'  # the phase whose deadline follows the steps
FLOOR = 120.0  # seconds; shorter pauses are the file system's or the network's
TIMES = 20
RECENT, FEWEST = 32, 5  # steps that the median is of, at most and at least
DEBUGGERS = 'pdb', 'bdb'  # modules of a prompt; others set a trace function
TELLING = 10.0  # seconds that the last words may take: a pipe may be full


class Watchdog(contextlib.AbstractContextManager):
  """Watches over the thread that enters it."""

  def __init__(self, stall_seconds, expired=None, floor=FLOOR, times=TIMES):
    """Begins with __enter__.

    Args:
      stall_seconds: train.stall_seconds; 0: there is no watchdog.
      expired: (seconds waited) -> None, called before the process ends, in a
        thread of its own; it may take `TELLING` seconds.
      floor, times: of the deadline of a step.
    """
    self._step: int | None = None
    self._most, self._expired = float(stall_seconds), expired
    self._floor, self._times = floor, times
    self._interval = min(1.0, min(floor, self._most) / 20)
    self._phase, self._count, self._debugger = 'start', 0, False
    self._ticks = self._mark = 0
    self._before, self._seconds = time.monotonic(), [0.0] * RECENT
    self._done, self._thread = threading.Event(), None
    self._watched = threading.get_ident()

  def __enter__(self):
    if self._most > 0:
      self._watched = threading.get_ident()
      self._thread = threading.Thread(
        target=self._watch, name='watchdog', daemon=True
      )
      self._thread.start()
    return self

  def __exit__(self, *error):
    self._done.set()
    if self._thread:
      self._thread.join()

  @contextlib.contextmanager
  def phase(self, name):
    """What the run does in a block; then again what it did before."""
    outer = self._phase
    self._enter(name)
    try:
      yield
    finally:
      self._enter(outer)

  def _enter(self, name):
    """The mark moves first: no phase is measured from the one before."""
    self.beat()
    self._phase, self._before = name, time.monotonic()

  def beat(self):
    """There is progress within a phase, such as one batch of an evaluation."""
    self._mark = self._ticks

  def step(self, step):
    """So many steps are done now: about half a microsecond."""
    now = time.monotonic()
    self._seconds[self._count % RECENT] = now - self._before
    self._count, self._before, self._step = self._count + 1, now, step
    self._mark = self._ticks

  def deadline(self):
    """(seconds that the phase may go without progress, why so many)."""
    limit = f'train.stall_seconds={self._most:g}'
    if self._phase != STEPS or self._count < FEWEST:
      return self._most, limit
    median = statistics.median(self._seconds[: self._count])
    wanted = max(self._floor, self._times * median)
    if wanted >= self._most:
      return self._most, limit
    return wanted, f'{self._times:g} x the median step of {median:.3g} s' + (
      f', at least {self._floor:g} s' if wanted == self._floor else ''
    )

  def tick(self):
    """One interval went by -> (seconds waited, what to say) if too many did."""
    self._ticks += 1
    waited = (self._ticks - self._mark) * self._interval
    seconds, why = self.deadline()
    if waited < seconds:
      return None
    if self._traced():
      if not self._debugger:
        _write('watchdog: a debugger holds this process: the deadline waits\n')
      self._debugger = True
      self.beat()
      return None
    where = 'before the first step'
    if self._step is not None:
      where = f'after step {self._step}'
    return waited, (
      f'watchdog: no progress for {waited:.3g} s in phase {self._phase}, '
      f'{where}; the deadline is {seconds:.3g} s ({why}): this process '
      f'({os.getpid()}) ends with code {errors.EXIT_CRASH}, the last '
      'checkpoint stands. What every thread did:\n'
    )

  def _traced(self):
    """Whether a debugger traces the watched thread."""
    frame = sys._current_frames().get(self._watched)
    while frame is not None:
      if frame.f_trace or frame.f_globals.get('__name__') in DEBUGGERS:
        return True
      frame = frame.f_back
    return False

  def _watch(self):
    while not self._done.wait(self._interval):
      if found := self.tick():
        self._end(*found)

  def _end(self, waited, text):
    """Says so and ends the process, also where nobody takes what is said."""
    try:
      last = [threading.Thread(target=_tell, args=(text,), daemon=True)]
      if self._expired:
        last.append(
          threading.Thread(target=self._expired, args=(waited,), daemon=True)
        )
      for thread in last:
        thread.start()
      for thread in last:
        thread.join(TELLING / len(last))
    finally:
      os._exit(errors.EXIT_CRASH)


def _tell(text):
  """A line and the stack of every thread, to stderr.

  By way of a file: faulthandler keeps the interpreter's lock while it writes,
  and a reader that is stuck too would keep the process from ending.
  """
  _write(text)
  with tempfile.TemporaryFile() as file:
    faulthandler.dump_traceback(file)
    file.seek(0)
    _write(file.read().decode(errors='replace'))


def _write(text):
  """To stderr, without the locks that a stuck thread may hold."""
  left = text.encode()
  with contextlib.suppress(OSError):
    while left:
      left = left[os.write(2, left) :]
