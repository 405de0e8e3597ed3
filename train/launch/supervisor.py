"""Starts the processes of a run, and starts them again after a crash.

A gang is the processes of one machine. It ends when one of them does: jax
cannot continue without it. What follows is decided by the exit code of the one
that is to blame (configs/base/errors.py): 0 and 75 are the end, 13 and signals
are a crash, after which all start again from the last checkpoint, everything
else, bad input (2) and damage (14) above all, is for a human. Several machines
have a supervisor each; those whose peers died start again likewise, and meet in
the roll call.

Restarts are counted: after `restarts` of them without a newly committed step
the supervisor gives up. A commit begins the count anew, so a run of weeks
may crash more often, and one that cannot advance does not run for ever. Each
waits twice as long as the one before.

Every process has a process group of its own: Ctrl-C reaches the supervisor
alone, which passes it on, and what ends here is that group and nothing else.
Standard library only.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from paraxis.configs.base import errors
from paraxis.train.run import ledger

SIGNALS = tuple(
  getattr(signal, name)
  for name in ('SIGTERM', 'SIGINT', 'SIGHUP')
  if hasattr(signal, name)
)
MOST_SECONDS = 60.0  # between a crash and a restart
GRACE_SECONDS = 5.0  # that peers of a dead process have for their last lines
_WHY = 'paraxis: '  # begins the line by which a command ends in failure
_WRITING = threading.Lock()
_FINE = errors.EXIT_OK, errors.EXIT_PREEMPTED
_BACK = 'run/back'  # of metrics.BACK; that file imports jax
_TAIL = 1 << 16  # bytes of metrics.jsonl that hold its last row
# Bound before a fork, after which a child may do little.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == 'linux' else None


class Rank(NamedTuple):
  """A process to start: its number in the run, arguments and environment."""

  number: int
  argv: list[str]
  environ: dict[str, str]


class End(NamedTuple):
  """How a process ended: its number, exit code (negative: a signal), and the
  last line in which it said why."""

  rank: int
  code: int
  said: str

  def text(self, when=''):
    """'rank 1 died (signal 9) after step 27'."""
    how = f'signal {-self.code}' if self.code < 0 else f'exit code {self.code}'
    died = self.code < 0 or self.code == errors.EXIT_CRASH
    said = f': {self.said.removesuffix(".")}' if self.said else ''
    return f'rank {self.rank} {"died" if died else "ended"} ({how}){when}{said}'


def blame(ends: list[End]) -> End | None:
  """Of processes in the order in which they ended, the one to blame.

  What a process says of itself counts most: damage, bad input. Then a signal
  from outside, then a crash; one that aborted did so because of a peer.
  """

  def rank(end):
    if end.code in (errors.EXIT_INTEGRITY, errors.EXIT_USER):
      return -end.code
    if end.code == -signal.SIGABRT:
      return 3
    return {errors.EXIT_CRASH: 2}.get(end.code, 1)

  return min((e for e in ends if e.code not in _FINE), key=rank, default=None)


def _tied():
  """In a child: SIGTERM, which saves, when the supervisor is killed."""
  if _PRCTL:
    _PRCTL(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG


def write(rank, text, to=2):
  """Prints a line of rank 0 as it is, of another with its number before it."""
  left = (f'[{rank}] {text}' if rank and text else text).encode()
  with _WRITING:
    while left:
      try:
        left = left[os.write(to, left) :]
      except OSError:  # nobody reads any more; the run continues
        return


class _Child:
  """A running process of a gang, whose lines are passed on."""

  def __init__(self, rank, ended):
    self.number, self.said, self._heard = rank.number, '', 0
    self.process = subprocess.Popen(
      rank.argv,
      env=rank.environ,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      process_group=0,
      # jax has threads, beside which a fork may run no Python.
      preexec_fn=None if 'jax' in sys.modules else _tied,
    )
    pipes = (self.process.stdout, 1), (self.process.stderr, 2)
    self._threads = [self._thread(self._copy, *pipe) for pipe in pipes]
    self._watcher = self._thread(self._watch, ended)

  def _thread(self, run, *arguments):
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    return thread

  def _copy(self, pipe, to):
    """Passes lines on; that by which a process ends is kept for `End`."""
    with pipe:
      for line in pipe:
        text = line.decode(errors='replace')
        if to == 2 and text.startswith(_WHY):
          text, self.said = self.said, text.removeprefix(_WHY).strip()
          text = text and f'{_WHY}{text}\n'
        write(self.number, text, to)

  def _watch(self, ended):
    # It is not reaped before `reap`, not even by Popen.poll: its number is
    # nobody else's while a signal is sent to it.
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here
      os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
    ended.put(self)

  def tell(self, signals):
    """Passes the last of `signals` on, once."""
    if len(signals) > self._heard:
      self._heard = len(signals)
      os.kill(self.process.pid, signals[-1])

  def kill(self):
    """Ends the process, if it runs, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)

  def reap(self) -> End:
    """Ends it, if it runs, and forgets its number."""
    self.kill()
    self._watcher.join()
    code = self.process.wait()
    for thread in self._threads:
      thread.join(GRACE_SECONDS)
    return End(self.number, code, self.said)


class Budget:
  """How often a gang may start again.

  Attributes:
    used, most: restarts since the last commit, and how many there may be.
  """

  def __init__(self, restarts, backoff):
    self.used, self.most, self._backoff = 0, restarts, backoff
    self._seen = set()

  def next(self, found: set) -> float | None:
    """Seconds to wait before a restart; None: no more.

    found: `commits` of the run. Which is the newest does not matter: one that
      went back from a loss spike commits smaller steps.
    """
    if found - self._seen:
      self.used = 0
    self._seen |= found
    if self.used >= self.most:
      return None
    self.used += 1
    doubled = min(self.used - 1, 99)  # a float holds 2^1023
    return min(self._backoff * 2**doubled, MOST_SECONDS)


def commits(workdir) -> set[tuple[int, int]]:
  """(step, inode) of every committed checkpoint, unverified.

  A step that a new run commits again, the old one set aside, is another.
  """
  folder, found = pathlib.Path(workdir) / 'checkpoints', set()
  for path in folder.glob('[0-9]*/manifest/metadata'):
    name = path.parents[1].name
    with contextlib.suppress(OSError):  # removed meanwhile
      if name.isdecimal():
        found.add((int(name), path.stat().st_ino))
  return found


def committed(workdir) -> int:
  """The newest step whose checkpoint is committed, unverified; -1: none."""
  return max((step for step, _ in commits(workdir)), default=-1)


def last_step(workdir, begin: int) -> int:
  """The last step in metrics.jsonl after its byte `begin`; -1: none."""
  try:
    with open(pathlib.Path(workdir) / 'metrics.jsonl', 'rb') as file:
      end = file.seek(0, os.SEEK_END)
      begin = begin if begin <= end else 0  # a new run has set the old aside
      file.seek(max(begin, end - _TAIL))
      lines = file.read().splitlines()
  except OSError:
    return -1
  for line in reversed(lines):
    try:
      row = json.loads(line)
      if _BACK not in row:
        return int(row['step'])
    except (ValueError, TypeError, KeyError, RecursionError):
      continue  # cut short by the kill
  return -1


class Supervisor:
  """Runs the processes of this machine up to the end of the run."""

  def __init__(self, ranks, workdir, budget, writes=True):
    """Prepares; `run` starts.

    Args:
      ranks: () -> [Rank], for every start anew.
      workdir: of the run; '': unknown. budget: Budget.
      writes: whether this machine writes events.jsonl.
    """
    self._ranks, self._workdir, self._budget = ranks, workdir, budget
    self._events, self._writes = [], writes and workdir
    self._children: list[_Child] = []
    self._ended = queue.SimpleQueue()
    self._signals: list[signal.Signals] = []  # that came

  def run(self) -> int:
    """The exit code of the run."""
    taken = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, self._pass) for number in taken}
    try:
      code = self._run()
      self._event('end', code=code)
      return code
    finally:
      for child in self._children:
        child.kill()
      for number, handler in before.items():
        signal.signal(number, handler)

  def _run(self):
    while True:
      begin = self._size()
      ends = self._gang()
      cause = blame(ends)
      for end in ends:  # once, if all say the same
        if end.said and end.said != (cause and cause.said):
          write(end.rank, f'{_WHY}{end.said}\n')
      if cause is None:
        return max(end.code for end in ends)
      if cause.code > 0 and cause.code != errors.EXIT_CRASH:
        self._say(cause.text())
        return cause.code
      if self._signals:
        text = f'{cause.text()}; stopped by {self._signals[0].name}'
        self._say(f'{text}, the last committed step stands')
        interrupted = cause.code == -signal.SIGINT
        return errors.EXIT_INTERRUPTED if interrupted else errors.EXIT_CRASH
      if not self._again(cause, begin):
        return errors.EXIT_CRASH

  def _gang(self) -> list[End]:
    """Starts all and waits for them -> their ends, the first one first."""
    self._ended = queue.SimpleQueue()  # what ended the last gang is of no use
    for rank in self._ranks():
      self._children.append(_Child(rank, self._ended))
    self._tell()  # what came while they started
    pids = {child.number: child.process.pid for child in self._children}
    self._event('launch', processes=len(pids), pids=pids)
    ends, until = [], None
    while self._children:
      child = self._next(until)
      if child is None:
        return self._hung(ends)
      ends.append(self._end(child))
      if blame(ends) and until is None:
        until = time.monotonic() + GRACE_SECONDS
    return ends

  def _hung(self, ends):
    """Kills what is left -> all ends of which one may be to blame.

    A peer that aborts does so because one that hangs gave no sign of life; one
    that crashes is itself to blame for those that wait for it.
    """
    for child in self._children:
      child.said = 'it hung, and was killed'
      child.kill()
    killed = [self._end(child) for child in list(self._children)]
    cause = blame(ends)
    hung = cause is None or cause.code == -signal.SIGABRT
    return killed + ends if hung else ends

  def _next(self, until) -> _Child | None:
    """The next child that ends; None: `until` is over."""
    while True:
      try:
        return self._ended.get(timeout=0.5)
      except queue.Empty:
        self._flush()
      late = until is not None and time.monotonic() > until
      if late or len(self._signals) > 2:
        return None

  def _end(self, child):
    self._children.remove(child)
    end = child.reap()
    self._event('exit', rank=end.rank, exit=end.code)
    return end

  def _again(self, cause, begin):
    """Says what is to happen, waits -> whether all start again."""
    step, saved = last_step(self._workdir, begin), committed(self._workdir)
    when = f' after step {step}' if step >= 0 else ' before its first step'
    text = cause.text(when)
    seconds = self._budget.next(commits(self._workdir))
    used, most = self._budget.used, self._budget.most
    if seconds is None:
      self._say(
        f'{text}; not started again: {most} restarts committed no new step'
      )
      return False
    lost = f' ({step - saved} replayed)' if step > saved >= 0 else ''
    source = f'resuming from committed step {saved}{lost}'
    source = source if saved >= 0 else 'starting from the beginning'
    self._say(f'{text}; {source}, restart {used} of {most} in {seconds:g} s')
    about = dict(rank=cause.rank, exit=cause.code, seconds=seconds)
    known = dict(step=step, committed=saved)  # -1: none
    about |= {name: n for name, n in known.items() if n >= 0}
    self._event('restart', **about)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not self._signals:
      time.sleep(min(0.1, seconds))
    if self._signals:
      self._say(f'stopped by {self._signals[0].name} before restart {used}')
    return not self._signals

  def _pass(self, number, _):
    """Of a signal: to every process, which saves and ends; again: at once."""
    self._signals.append(signal.Signals(number))
    self._tell()

  def _tell(self):
    for child in self._children:
      child.tell(self._signals)

  def _size(self):
    """Bytes of metrics.jsonl."""
    try:
      return os.path.getsize(pathlib.Path(self._workdir) / 'metrics.jsonl')
    except OSError:
      return 0

  def _say(self, text):
    write(0, f'launch: {text}\n')

  def _event(self, name, **fields):
    """Notes an event for the run's ledger; written once the folder is there."""
    self._events.append(dict(event=name, at=time.time()) | fields)
    self._flush()

  def _flush(self):
    silent = lambda line: None  # the processes say what is wrong with the file
    while self._writes and self._events:
      path = pathlib.Path(self._workdir) / ledger.FILE
      if not ledger.note(path, say=silent, **self._events[0]):
        return
      self._events.pop(0)
