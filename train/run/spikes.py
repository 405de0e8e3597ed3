"""Loss spikes: when a run goes back, and which batches it leaves out then.

A loss far above those before it, for some steps in a row, means that the state
has left its path or that the batches are bad. The run goes back to the last
checkpoint before the spike and continues with the batches after it, as PaLM's
authors did by hand (arXiv:2204.02311, section 5.1). What was left out is in the
cursor of every later checkpoint: [[step, batches], ...], so that the batch of a
step stays a pure function of cursor and step, and a replay takes the same path.
A run that goes back to one step more than MOST times ends: what spikes there is
not a few bad batches.
"""

import collections
from collections.abc import Iterable, Sequence
import math

from paraxis.configs.base import errors
from paraxis.train.data import shape_cycle

MOST = 5  # times that a run goes back to the same step


def check(config) -> None:
  """UserError if the run of a schema.Config cannot tell its loss spikes."""
  spike, steps = config.train.spike, config.train.steps
  if not spike.deviations:
    return
  if spike.window + spike.in_a_row > steps:
    raise errors.UserError(
      f'train.spike.window={spike.window} and train.spike.in_a_row='
      f'{spike.in_a_row} are more than train.steps={steps}: no spike could be '
      'found. Give a smaller window, or train.spike.deviations=0.'
    )
  whole = config.data.sequence_length
  lengths = [whole // k for k in shape_cycle.of(config).all(steps)]
  if len(lengths) > 1:
    raise errors.UserError(
      f'train.spike.deviations={spike.deviations:g} compares losses, and those '
      f'of rows of {", ".join(map(str, lengths))} tokens, as of '
      f'train.shape_cycle={config.train.shape_cycle!r}, are not one series: '
      "give train.spike.deviations=0, or train.shape_cycle=''."
    )


def left_out(skips: Iterable[Sequence[int]]) -> int:
  """Batches that are left out before the batch of the next step.

  skips: [[step that the run went back to, batches left out], ...].
  """
  return sum(count for _, count in skips)


class Detector:
  """Looks at one loss after the other.

  Attributes:
    row: spiking losses in a row, up to the last one seen.
    first: step of the first of them; 0: unknown, of an older checkpoint.
  """

  def __init__(
    self, spike, losses: Iterable[float] = (), row: int = 0, first: int = 0
  ):
    """spike: schema.Spike. losses, row, first: what `state` gave."""
    self._spike, self.row, self.first = spike, row, first
    self._window = collections.deque(losses, maxlen=spike.window)

  def seen(self, step: int, loss: float) -> bool:
    """Adds the loss of a step; whether so many in a row spike.

    The window has no spiking losses, nor any that is not finite.
    """
    if not self._spike.deviations or not math.isfinite(loss):
      return False
    if len(self._window) == self._spike.window and loss > self._most():
      self.first = self.first if self.row else step
      self.row += 1
      return self.found
    self.row = self.first = 0
    self._window.append(loss)
    return False

  @property
  def found(self) -> bool:
    """Whether so many losses in a row spike."""
    return bool(self._spike.deviations) and self.row >= self._spike.in_a_row

  def _most(self):
    mean = math.fsum(self._window) / len(self._window)
    squares = math.fsum((x - mean) ** 2 for x in self._window)
    deviation = math.sqrt(squares / len(self._window))
    return mean + self._spike.deviations * deviation

  def state(self) -> dict:
    """What a checkpoint carries, so that a resumed run sees the same spikes."""
    if not self._spike.deviations:
      return {}
    return dict(losses=list(self._window), row=self.row, first=self.first)
