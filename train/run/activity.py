"""What a run does now, told to its ledger and to its watchdog by one call."""

import contextlib

from paraxis.train.run import ledger
from paraxis.train.run import watchdog


class Activity(contextlib.AbstractContextManager):
  """A ledger.Ledger and a watchdog.Watchdog; the watchdog begins inside."""

  def __init__(self, path, stall_seconds, say=print, began=None):
    """path, say, began: as for Ledger. stall_seconds: as for Watchdog."""
    self._ledger = ledger.Ledger(path, say, began)
    self._dog = watchdog.Watchdog(stall_seconds, self._ledger.stalled)
    self._stack = contextlib.ExitStack()
    self.beat = self._dog.beat
    self.commit = self._ledger.commit
    self.end = self._ledger.end

  def __enter__(self):
    self._stack.enter_context(self._ledger)
    self._stack.enter_context(self._dog)
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  @contextlib.contextmanager
  def phase(self, name, step=None):
    """What the run does in a block: a name of ledger.PHASES."""
    with self._ledger.phase(name, step), self._dog.phase(name):
      yield

  def step(self, step):
    """So many steps are done."""
    self._dog.step(step)
    self._ledger.step(step)
