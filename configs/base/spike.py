"""Fields of loss spikes."""

import dataclasses

from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Spike:
  """Rolling back when the loss jumps (train/run/spikes.py).

  A run that goes back to the same step more than 5 times ends.
  """

  deviations: float = field(
    0.0,
    'a loss so many standard deviations above the mean of the window spikes; '
    '0: never',
    low=0.0,
  )
  window: int = field(100, 'earlier losses that the mean is of', low=2)
  in_a_row: int = field(
    3, 'spiking steps in a row that roll the run back', low=1
  )
