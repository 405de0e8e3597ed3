"""How fast a run is: means since the last printed line, and what is left.

    perf/step_seconds        wall time of a step
    perf/tokens_per_second   tokens that carry loss
    perf/mfu                 model FLOPs utilisation, of all tokens that are
                             read, where the devices' peak is known
                             (train/run/header.py)
    perf/eta_seconds         steps that are left, each as long
    perf/checkpoint_seconds  in which no step ran because of a checkpoint
    perf/evaluation_seconds  of held-out text
    perf/memory_bytes        most on an accelerator, else of the process

Compiling, saving and evaluating are no part of a step's time. Its own time
(run/stragglers.py) is without what it waited for other processes, too.
"""

import contextlib
import math
import time


class Rates:
  """Sums of steps since the last line."""

  def __init__(self, flops: float = math.nan, peak: float | None = None):
    """flops: of a token. peak: of all devices, a second; None: not known."""
    self._flops, self._peak, self._before = flops, peak, time.perf_counter()
    self._waited, self._own = 0.0, []  # seconds; of each step
    self.begin()

  def begin(self):
    """A line was printed: forgets the steps before it."""
    self._steps = self._tokens = self._read = self._seconds = 0
    self._apart = {}

  def step(self, tokens: int, read: int | None = None):
    """Counts a step that ended now.

    tokens: that carry loss. read: with those of prompts; None: as many.
    """
    now = time.perf_counter()
    seconds, self._before = now - self._before, now
    self._steps, self._tokens = self._steps + 1, self._tokens + tokens
    self._read += tokens if read is None else read
    self._seconds += seconds
    self._own.append(seconds - self._waited)
    self._waited = 0.0

  def own(self, fewest: int) -> list[float]:
    """Seconds of each step since the last answer that were not waited.

    fewest: steps; [] until there are so many.
    """
    if len(self._own) < fewest:
      return []
    own, self._own = self._own, []
    return own

  @contextlib.contextmanager
  def waits(self):
    """A block in which a step may wait for devices or other processes."""
    began = time.perf_counter()
    try:
      yield
    finally:
      self._waited += time.perf_counter() - began

  def work(self, read: int) -> dict[str, float]:
    """{'train/flops': of the model for so many tokens}, if they are counted."""
    known = math.isfinite(self._flops)
    return {'train/flops': self._flops * read} if known else {}

  @contextlib.contextmanager
  def apart(self, what: str = ''):
    """Leaves out the time of a block; it is reported under a name, if any."""
    began, waited = time.perf_counter(), self._waited
    try:
      yield
    finally:
      now = time.perf_counter()
      if self._before > began:  # a step was counted within the block
        self._before, waited = now, 0.0
      else:
        self._before += now - began
      self._waited = waited
      if what:
        self._apart[what] = self._apart.get(what, 0.0) + now - began

  def values(self, left: int) -> dict[str, float]:
    """The table's metrics, but for memory; left: steps still to come."""
    each, rate = self._seconds / self._steps, self._tokens / self._seconds
    found = {
      'perf/step_seconds': each,
      'perf/tokens_per_second': rate,
      'perf/eta_seconds': left * each,
    }
    if self._peak and math.isfinite(self._flops):
      work = self._flops * self._read
      found['perf/mfu'] = work / self._seconds / self._peak
    return found | {f'perf/{n}_seconds': s for n, s in self._apart.items()}
