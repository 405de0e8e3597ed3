"""The thread that writes checkpoints, and what it does when one fails.

One write at a time, in the order in which they were begun. Processes wait for
each other through the coordination service (sharding/meeting.py). A failed save
changes neither the run nor an older checkpoint: it is reported, and an error
when `failures` fail in a row, or when it is the last.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import pathlib
import re
import shutil
import sys
import threading
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp

from paraxis.configs.base import errors
from paraxis.sharding import meeting
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import folders
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import retention
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import stored

SPACE = 1.3  # free disk needed, in sizes of the state
BARRIERS = 2  # of Orbax in a write: all files are there; they have their name
SLOWEST = 1e7  # bytes a second at which a disk is read back, at least
SUSPECT = 'suspect'  # in `meta`: saved within skipped steps or a loss spike


class Options(NamedTuple):
  """How a store keeps steps.

  Attributes:
    keep: newest good steps that stay (retention.py).
    asynchronous: `save` and `barrier` return before the state is written.
    failures: so many saves in a row that fail are an error.
    host_bytes: of snapshots in memory; 0: of two. More wait.
    verify_every: commits between those whose files are read back and compared
      with their fingerprints, in the writing thread; 0: none.
    chunk_bytes: the most that a stored chunk holds; 0: a shard (chunks.py).
    committed: called with each committed step, in the writing thread.
  """

  keep: int = 3
  asynchronous: bool = True
  failures: int = 1
  host_bytes: int = 0
  verify_every: int = 0
  chunk_bytes: int = 0
  committed: Callable[[int], None] = lambda step: None


class _Writing(NamedTuple):
  """size: bytes in memory until it is written. state: bytes of the state. Both
  are 0 of a save that was refused."""

  step: int
  size: int
  state: int
  future: futures.Future


class Writer:
  """Writes, commits and prunes the steps of a directory.

  Attributes:
    bad, verified: steps whose arrays were found damaged, and whole.
  """

  def __init__(self, directory: pathlib.Path, options: Options, say):
    """say: called with one line of text per finding."""
    self._directory, self._options, self._say = directory, options, say
    self._first = jax.process_index() == 0
    self.bad, self.verified = set(), set()
    self._writing: collections.deque[_Writing] = collections.deque()
    self._failures = self._commits = 0  # failures: in a row
    self._lost: Exception | None = None  # why the last save was not written
    self._now: int | None = None  # step that is being written
    self._left = 0  # barriers of it that are to come, while all could write
    self._orbax: ocp.AsyncCheckpointer | None = None
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pruning = threading.Lock()

  def _folder(self, step):
    return self._directory / str(step)

  def submit(self, step, tree, size, manifest) -> None:
    """Writes a step, later; or reports that there is no room for it.

    size: bytes in memory until it is written.
    """
    state = fingerprint.nbytes(tree)
    try:
      self._make_room(state)
      work = self._thread.submit(self._write, step, tree, manifest)
    except errors.UserError as e:  # settled behind those that came before it
      size, state, work = 0, 0, futures.Future()
      work.set_exception(e)
    self._writing.append(_Writing(step, size, state, work))
    self.check()

  def writes(self, step) -> bool:
    """Whether a step is queued or being written."""
    return any(w.step == step for w in self._writing)

  def wait_for_memory(self, step, size) -> None:
    """Returns when a snapshot of `size` bytes more is within `host_bytes`."""
    most = self._options.host_bytes or 2 * size
    self.check()
    while self._writing and sum(w.size for w in self._writing) + size > most:
      self._say(
        f'checkpoint {step} waits until {self._writing[0].step} is written: '
        f'{len(self._writing)} snapshots of {size} bytes are in memory '
        '(checkpoint.host_bytes)'
      )
      futures.wait([self._writing[0].future])
      self.check()

  def room(self, size, more=0) -> None:
    """UserError unless the disk has room for `more` checkpoints and one."""
    if not self._fits(size, more):
      raise self._too_small(size, more)

  def _too_small(self, size, more=0):
    """The error to raise where the disk has no room."""
    need = int((SPACE + more) * size)
    free = shutil.disk_usage(self._directory).free
    steps = f' of {more + 1} to keep' if more else ''
    return errors.UserError(
      f'{self._directory}: a checkpoint{steps} needs {need} free bytes '
      f'({SPACE + more:g} x {size}), the disk has {free}. Free some or use '
      'another directory.'
    )

  def _make_room(self, size):
    """UserError unless it fits, perhaps without the oldest step."""
    size += sum(w.state for w in self._writing)
    if meeting.agree('disk looked at', self._fits(size)):
      return
    if self._first and self._options.keep > 1:
      self._prune(self._options.keep - 1)
    meeting.meet('disk pruned')
    # All or none: a process that wrote would wait for one that did not.
    if not meeting.agree('disk looked at again', self._fits(size)):
      raise self._too_small(size)

  def _fits(self, size, more=0):
    need = int((SPACE + more) * size)
    return shutil.disk_usage(self._directory).free >= need

  def _write(self, step, tree, manifest):
    """In the thread: writes and commits a step, or raises."""
    error, self._now, self._left = None, step, BARRIERS
    hook = saved_arrays.hear_no_abandoned()
    try:
      if self._orbax is None:
        self._orbax = saved_arrays.checkpointer(
          self._force, self._options.chunk_bytes, self._meet
        )
      self._orbax.save(
        self._folder(step),
        args=ocp.args.Composite(
          state=saved_arrays.item(tree),
          manifest=ocp.args.JsonSave(manifest),
        ),
      )
      self._orbax.wait_until_finished()
      # Other hosts may not see yet what process 0 has just renamed (NFS).
      if self._first and not self._folder(step).is_dir():
        raise RuntimeError('the folder does not exist after the save')
      folders.force_name(self._directory)
      sys.unraisablehook = hook  # else it stays: ends are not observable
    except Exception as e:  # Orbax raises many kinds
      error = e
    try:
      if error and self._left:  # the others wait, or will, in `_meet`
        meeting.agree('checkpoint files', False)
      agreed = meeting.agree('checkpoint written', error is None)
    except meeting.LateError as e:
      raise (meeting.LateError(f'{error}; {e}') if error else e) from error
    if not agreed:
      self._clean(step)
      raise error or RuntimeError('another process could not write')
    self._commits += 1
    every = self._options.verify_every
    if every and self._commits % every == 0:
      self._read_back(step, fingerprint.nbytes(tree))
    if self._first:
      self._prune(self._options.keep)
      self._options.committed(step)

  def _meet(self, key, timeout_ms):
    """A barrier of a write: all leave it when one process could not write."""
    del key  # each write has the same ones, one after the other
    all_could = meeting.agree('checkpoint files', True, timeout_ms / 1000)
    self._left = self._left - 1 if all_could else 0
    if not all_could:
      raise RuntimeError('another process could not write')

  def _read_back(self, step, size):
    """CrashError if what is on disk is not what was saved; it is kept.

    size: bytes that process 0 reads, while the others wait.
    """
    faults = stored.Step(self._folder(step)).faults() if self._first else []
    patience = meeting.SECONDS + size / SLOWEST
    if not meeting.agree('checkpoint read back', not faults, patience):
      self.bad.add(step)
      why = faults[0].rstrip('.') if faults else 'process 0 says why'
      raise errors.CrashError(f'it does not read back: {why}')
    self.verified.add(step)

  def _force(self):
    """All files of the step are on the disk before its folder has its name."""
    for path in folders.unfinished(self._directory, str(self._now)):
      folders.force(path)

  def _clean(self, step):
    """After a failed write: a new writer, and nothing of the step on disk."""
    orbax, self._orbax = self._orbax, None
    try:
      if orbax:
        orbax.close()
    except Exception as e:  # a second error of the same save
      self._say(saved_arrays.first_line(e))
    for path in (
      folders.unfinished(self._directory, step) if self._first else []
    ):
      shutil.rmtree(path, ignore_errors=True)

  def _prune(self, keep):
    """Deletes the good steps that need not stay; called in either thread."""
    with self._pruning:  # what one lists the other must not delete
      found = {
        s: m
        for s, m in manifest_lib.committed(self._directory).items()
        if s not in self.bad
      }
      suspect = [s for s, m in found.items() if m['meta'].get(SUSPECT)]
      for step in retention.expendable(found, keep, suspect, self.verified):
        try:
          folders.remove(self._folder(step))
        except OSError as e:  # the new step is written all the same
          self._say(f'checkpoint {self._folder(step)} is not deleted: {e}')

  def forget(self, step) -> None:
    """Of the steps after one nothing is known: they are deleted."""
    self.bad = {s for s in self.bad if s <= step}
    self.verified = {s for s in self.verified if s <= step}

  def check(self) -> None:
    """Reports finished writes; never waits. Call every step.

    Raises:
      CrashError: `failures` saves in a row were not written.
    """
    while self._writing and self._writing[0].future.done():
      self._settle(self._writing.popleft())

  def drain(self) -> None:
    """Returns when nothing is being written; raises as `check`."""
    futures.wait([w.future for w in self._writing])
    self.check()

  def wait(self) -> None:
    """Returns when all is written.

    Raises:
      CrashError: as `check`, or the last save was not written.
    """
    while self._writing:
      self._settle(self._writing.popleft(), not self._writing)
    lost, self._lost = self._lost, None
    if lost:
      raise errors.CrashError(str(lost)) from lost

  def _settle(self, written, last=False):
    try:
      written.future.result()
      self._failures, self._lost = 0, None
      return
    except Exception as e:  # Orbax raises many kinds
      error = e
    # Processes that did not meet are out of step: nothing more can be saved.
    last |= isinstance(error, meeting.LateError)
    if not written.state:
      return self._failed(error, last)
    text = f'checkpoint {self._folder(written.step)} was not written'
    if re.search(r'os_error_code=.(28|122)|No space left', str(error)):
      free = shutil.disk_usage(self._directory).free
      text += f': the disk is full, {free} bytes free of {written.state}'
    else:
      text += f': {saved_arrays.first_line(error)}'
    self._failed(
      errors.CrashError(f'{text}. Older checkpoints are intact.'), last
    )

  def _failed(self, error, last=False):
    """Counts a failed save; raises if it is one too many, else reports it."""
    self._failures, self._lost = self._failures + 1, error
    most = self._options.failures
    if last or self._failures >= most:
      row = f' {self._failures} in a row failed' if self._failures > 1 else ''
      self._lost = None
      raise errors.CrashError(f'{error}{row}') from error
    self._say(f'{error} Training continues ({self._failures} of {most}).')

  def close(self) -> None:
    """Frees the threads, after what is being written."""
    self._thread.shutdown()
    if self._orbax:
      self._orbax.close()
