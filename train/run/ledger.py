"""events.jsonl: what a run did when, for an account of its time.

A line is {"time": unix seconds, "event": name, ...}. Every start of a run
appends; train/run/goodput.py reads them.

    start    pid, attempt: how many starts there were, with this one
    phase    name, step: from now on, until another line says otherwise, the
             run is in a phase (`PHASES`), after so many steps
    commit   step: a checkpoint is on disk, which is not when it was asked for
    end      why, step: the process ends by itself; a killed one says nothing
    launch, exit, restart: of a supervisor, in any words (`note`)

Steps have a line every hundredth of the time since the start, at most every
`LEAST` and at least every `EVERY` seconds: what a kill loses is no more. A line
is one write, handed to the operating system at once: a process that dies loses
none, a power cut the last. Whatever is wrong with the file is said once, and
the run continues without an account.
"""

import contextlib
import json
import os
import pathlib
import threading
import time

from paraxis.configs.base import plain_files

FILE = 'events.jsonl'
STEPS = 'steps'
OTHER = 'other'  # before the first phase: imports, building the model
PHASES = (STEPS, 'compile', 'restore', 'save', 'evaluate', 'stall', OTHER)
LEAST, EVERY = 0.1, 5.0  # seconds between lines of steps
LONGEST = 2**16  # bytes of a line, for readers
LARGEST = 2**28  # bytes of a file: lines of months


def lines(file):
  """Lines of a binary file, the longest in pieces of `LONGEST` bytes."""
  return iter(lambda: file.readline(LONGEST), b'')


def open_plain(path, flags):
  """File descriptor of a regular file; OSError: it is a link, none, or large.

  Not blocking: to open a FIFO would wait for its other end.
  """
  file = plain_files.open_descriptor(path, flags, follow=False)
  size = os.fstat(file).st_size
  if size > LARGEST:
    os.close(file)
    raise OSError(None, f'it has {size:,} bytes, more than {LARGEST:,}')
  return file


def note(path, event, say=print, at=None, **fields) -> bool:
  """Appends one line, of a supervisor's event; whether it is written.

  at: unix seconds of the event; default now.
  """
  file = _File(path, say)
  row = dict(time=_rounded(at or time.time()), event=event, **fields)
  written = file.write(row)
  file.close()
  return written


def process_began():
  """Unix seconds at which this process began; where /proc does not say: now."""
  now = time.time()
  try:
    text = pathlib.Path('/proc/self/stat').read_text(encoding='utf-8')
    ticks = int(text.rpartition(')')[2].split()[19])  # starttime, of proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME)
    age -= ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, ValueError, IndexError, AttributeError):
    return now
  return now - max(age, 0.0)


def _rounded(seconds):
  return round(seconds, 6)


class _File:
  """Appends whole lines; what goes wrong is said once."""

  def __init__(self, path, say):
    self._path, self._say, self._told = path, say, False
    self._file = self._torn = None
    self.starts = 0
    if path is None:
      return
    try:
      self._file = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
      with open(self._file, 'rb', closefd=False) as file:
        for line in lines(file):
          self.starts += b'"event": "start"' in line
          self._torn = not line.endswith(b'\n')  # a kill cut it short
    except OSError as e:
      self._tell(e)

  def _tell(self, error):
    if not self._told:
      self._say(f'{self._path}: not written ({error.strerror}): no goodput')
    self._told = True

  def write(self, row) -> bool:
    """One line, on a line of its own whatever was cut short before."""
    if self._file is None:
      return False
    data = ('\n' if self._torn else '') + json.dumps(row) + '\n'
    data = data.encode()
    try:
      written = os.write(self._file, data)
    except OSError as e:  # nothing was written
      self._tell(e)
      return False
    self._torn = written < len(data)  # a disk that is full
    return not self._torn

  def close(self):
    if self._file is not None:
      os.close(self._file)
    self._file = None


class Ledger(contextlib.AbstractContextManager):
  """Writes the events of one start of a run. Any thread may call it."""

  def __init__(self, path, say=print, began=None):
    """Writes "start".

    Args:
      path: of events.jsonl; None: nothing is written, as on all processes but
        the first.
      say: prints one line.
      began: unix seconds at which this start began, such as `process_began()`;
        default now.
    """
    self._now, self._clock = time.time(), time.monotonic()
    self._lock, self._file = threading.Lock(), _File(path, say)
    self._phase, self._step, self._ended = OTHER, None, False
    self._due = 0.0
    self._write(
      began or self._now,
      'start',
      pid=os.getpid(),
      attempt=self._file.starts + 1,
    )

  def _time(self):
    """Unix seconds that a change of the system's clock does not move."""
    return self._now + time.monotonic() - self._clock

  def _write(self, seconds, event, **fields):
    with self._lock:
      self._file.write(dict(time=_rounded(seconds), event=event, **fields))

  @contextlib.contextmanager
  def phase(self, name, step=None):
    """The run is in a phase, of `PHASES`; afterwards in the one before.

    step: steps that are done, if that is not what was told last.
    """
    outer = self._phase
    self._enter(name, step)
    try:
      yield
    finally:
      self._enter(outer, None)

  def _enter(self, name, step):
    self._step = self._step if step is None else int(step)
    now = time.monotonic()
    self._phase = name
    self._due = now + min(EVERY, max(LEAST, (now - self._clock) / 100))
    self._write(self._time(), 'phase', name=name, step=self._step)

  def step(self, step):
    """So many steps are done; now and then a line is written."""
    self._step = step
    if time.monotonic() >= self._due:
      self._enter(self._phase, step)

  def commit(self, step):
    """The checkpoint of a step is on disk."""
    self._write(self._time(), 'commit', step=int(step))

  def stalled(self, waited):
    """There was no progress for so many seconds, and the process ends."""
    phase = self._phase
    self._write(self._time() - waited, 'phase', name='stall', step=self._step)
    self.end(f'stalled in {phase}')

  def end(self, why):
    """The process ends, and why, in a few words; once."""
    if not self._ended:
      self._ended = True
      self._write(self._time(), 'end', why=str(why)[:200], step=self._step)

  def __exit__(self, kind, error, _):
    """Ends, with what is raised, and closes the file."""
    self.end('done' if kind is None else f'{kind.__name__}: {error}')
    with self._lock:
      self._file.close()
