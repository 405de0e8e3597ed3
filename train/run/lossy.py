"""Output that may lose its reader: lines are lost then, the run is not.

`paraxis train | head` closes the pipe after ten lines, a terminal goes away
with its window: what is printed then fails, with EPIPE or EIO. Any other
command ends there, for its output is all it does; a training continues, and
metrics.jsonl has its numbers.
"""

import contextlib
import errno
import functools
import os
import sys
from typing import Any

_GONE = errno.EPIPE, errno.EIO


class _Lossy:
  """A text stream, of which nothing arrives once its reader went away."""

  def __init__(self, stream, lost):
    """lost: called once, when the reader went away."""
    self._stream, self._lost, self._gone = stream, lost, False

  def __getattr__(self, name) -> Any:
    return getattr(self._stream, name)

  def write(self, text):
    self._try(lambda: self._stream.write(text))
    return len(text)

  def flush(self):
    self._try(self._stream.flush)

  def _try(self, act):
    if self._gone:
      return
    try:
      act()
    except OSError as e:
      if e.errno not in _GONE:
        raise
      self._gone = True
      # Buffered lines, other writers and the end of the process: to nowhere.
      with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
      self._lost()


def output(run):
  """A command that continues when nobody reads its output any more."""

  def lost():
    print(
      'paraxis: nobody reads the output any more; the run continues, '
      'metrics.jsonl has its numbers',
      file=sys.stderr,
    )

  @functools.wraps(run)
  def kept(*arguments):
    with (
      contextlib.redirect_stderr(_Lossy(sys.stderr, lambda: None)),
      contextlib.redirect_stdout(_Lossy(sys.stdout, lost)),
    ):
      return run(*arguments)

  return kept
