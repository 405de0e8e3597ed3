"""What befalls the run of soak.py: it is killed, its disk full, a bit flipped.

A moment is seen in events.jsonl, metrics.jsonl and the folders of saves, which
are read every few milliseconds.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import soak_checks

from paraxis.sharding.checkpoint import folders
from paraxis.sharding.checkpoint import stored
from paraxis.train.launch import supervisor
from paraxis.train.run import ledger

REFUSED, FULL = DISKS = 'no room', 'full'
DISK_BYTES, LEFT_BYTES = 2**25, 2**16
TRIES = 3  # kills for one that hits the phase that it is meant for
PROMPT_SECONDS = 60.0  # to report a save that failed; to the next one
MOST_SECONDS = 900.0  # to the moment of an act


class StoppedError(Exception):
  """The run ended, or did not do what was waited for."""


class Act(NamedTuple):
  """kind: a phase, 'flip' or of DISKS. step: from which on. rank: to kill.
  delay: seconds after the moment is seen."""

  kind: str
  step: int
  rank: int
  delay: float


class Run:
  """`paraxis launch` of the tiny run in a workdir; polled.

  Attributes:
    rows: of events.jsonl so far. hits: the phase that each kill hit.
    seconds: from begin to end.
  """

  def __init__(self, folder, workdir, kills=0):
    self.workdir, self._log = workdir, folder / f'{workdir.name}.log'
    self.rows, self.hits, self.seconds = [], [], 0.0
    self._read = self._begin = 0
    workdir.mkdir(parents=True)
    command = [sys.executable, '-m', 'paraxis.train.cli', 'launch']
    command += ['--processes=2', '--devices_per_process=4', '--backoff=1']
    command += [f'--restarts={kills + TRIES}', '--', 'train']
    command += [f'--config={folder / "tiny.py"}', f'--workdir={workdir}']
    environ = dict(os.environ, PARAXIS_CACHE=str(folder / 'cache'))
    self._began = time.time()
    with self._log.open('wb') as log:
      self.process = subprocess.Popen(
        command, env=environ, stdout=log, stderr=subprocess.STDOUT
      )

  def said(self, begin=0):
    """What it printed, from a byte on."""
    return self._log.read_bytes()[begin:].decode('latin-1')

  def _poll(self):
    with contextlib.suppress(FileNotFoundError):
      with open(self.workdir / ledger.FILE, 'rb') as file:
        file.seek(self._read)
        whole = file.read().rpartition(b'\n')[0]
      self._read += len(whole) + bool(whole)
      for line in whole.splitlines():
        with contextlib.suppress(ValueError):  # a full disk cuts lines
          self.rows.append(json.loads(line))

  def _within(self, seconds, holds):
    """Polls -> whether it holds in time; StoppedError when the run ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      self._poll()
      if holds():
        return True
      if self.process.poll() is not None:
        raise StoppedError(f'exit code {self.process.returncode}, too early')
      time.sleep(0.002)
    return False

  def _until(self, holds, what):
    if not self._within(MOST_SECONDS, holds):
      raise StoppedError(f'{what}: not within {MOST_SECONDS:g} s')

  def _gang(self):
    """The rows since the last launch; [] while no process runs."""
    for i in reversed(range(len(self.rows))):
      if self.rows[i]['event'] in ('launch', 'restart'):
        return self.rows[i:] if self.rows[i]['event'] == 'launch' else []
    return []

  def _phase(self):
    """Of the gang, as its ledger says now; '': none."""
    found = [r['name'] for r in self._gang() if r['event'] == 'phase']
    return found[-1] if found else ''

  def unfinished(self):
    """Steps of saves that are under way, or were when all were killed."""
    found = folders.unfinished(self.workdir / 'checkpoints')
    found = [path.name.partition('.') for path in found]
    return [int(n) for n, _, end in found if not end.endswith('-deleted')]

  def _moment(self, act):
    """Whether it is time for an act."""
    if act.kind in ('compile', 'restore'):
      return self._phase() == act.kind
    if act.kind in ('save', FULL):  # what a killed save left goes before
      running = self._phase() in ('steps', 'save')
      return running and max(self.unfinished(), default=0) >= act.step
    if act.kind == REFUSED:
      found = [r['step'] for r in self.rows if r['event'] == 'commit']
      return max(found, default=0) >= act.step
    return supervisor.last_step(self.workdir, self._begin) >= act.step

  def kill(self, act):
    """Kills a rank at its moment, waits until none runs -> the phase hit."""
    self._until(lambda: self._moment(act), f'moment for {act}')
    time.sleep(act.delay)
    self._poll()
    if not self._gang():
      raise StoppedError(f'it ended by itself, before {act}')
    pids, writes = self._gang()[0]['pids'], self.unfinished()
    os.kill(pids[str(act.rank)], signal.SIGKILL)
    phase, count = self._phase(), len(self.rows)
    is_down = lambda: any(r['event'] == 'restart' for r in self.rows[count:])
    self._until(is_down, f'restart after {act}')
    with contextlib.suppress(FileNotFoundError):
      self._begin = (self.workdir / 'metrics.jsonl').stat().st_size
    hit = 'save' if {*writes} & {*self.unfinished()} else phase
    self.hits.append(hit)
    self._note(f'{act}: hit {hit}')
    return hit

  def fill(self, act):
    """Fills the disk at a moment, until a save that failed is reported.

    Returns:
      seconds until the report, and from it to the next commit; inf: more than
      PROMPT_SECONDS.
    """
    self._until(lambda: self._moment(act), f'moment for {act}')
    ballast, begin = self.workdir.parent / 'ballast', self._log.stat().st_size
    left = LEFT_BYTES if act.kind == REFUSED else 0
    with ballast.open('wb', buffering=0) as file, contextlib.suppress(OSError):
      while (free := shutil.disk_usage(ballast).free) > left:
        file.write(bytes(min(free - left, 2**22)))
    reported = self._seconds(lambda: soak_checks.reported(self.said(begin)))
    ballast.unlink()
    count = len(self.rows)
    again = self._seconds(
      lambda: any(row['event'] == 'commit' for row in self.rows[count:])
    )
    self._note(f'{act}: reported after {reported:.1f} s, saved {again:.1f} s')
    return reported, again

  def _seconds(self, holds):
    since = time.monotonic()
    found = self._within(PROMPT_SECONDS, holds)
    return time.monotonic() - since if found else math.inf

  def _note(self, text):
    print(f'{time.time() - self._began:6.1f} s  {text}', flush=True)

  def wait(self):
    """-> exit code."""
    try:
      code = self.process.wait(1800)
    except subprocess.TimeoutExpired:
      raise StoppedError('the run does not end within 1800 s') from None
    self.seconds = time.time() - self._began
    self._poll()
    return code

  def close(self):
    """Kills what runs."""
    if self.process.poll() is None:
      self._poll()
      self.process.kill()
      for pid in self._gang()[0]['pids'].values() if self._gang() else []:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      self.process.wait()


def flip(checkpoints, rng):
  """Flips a bit of the arrays of the newest committed step -> its number.

  Of the bytes in a file, some are nodes of a tree that later ones replaced:
  drawn again until it is one that counts.
  """
  step = folders.steps(checkpoints)[0]
  folder = checkpoints / str(step)
  files = folder.glob('state/ocdbt.process_*/d/*')
  path = max(files, key=lambda p: p.stat().st_size)
  whole = path.read_bytes()
  while True:
    data, at = bytearray(whole), rng.randrange(len(whole))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    if faults := stored.Step(folder).faults():
      print(f'          step {step}, flipped bit in byte {at}: {faults[0]}')
      return step


@contextlib.contextmanager
def small_disk(path):
  """A tmpfs at `path` while it lasts -> whether there is one."""
  path.mkdir(parents=True)
  mount = ['mount', '-t', 'tmpfs', '-o', f'size={DISK_BYTES}', 'soak', path]
  try:
    done = subprocess.run(mount, capture_output=True, text=True)
    code, why = done.returncode, done.stderr.strip()
  except OSError as e:
    code, why = 1, str(e)
  if code:
    print(f'no disk is filled: a tmpfs needs root ({why})')
  try:
    yield not code
  finally:
    if not code:
      subprocess.run(['umount', '-l', path], check=True)  # one may still end
