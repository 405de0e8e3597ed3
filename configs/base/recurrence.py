"""Fields of a core of layers that runs several times."""

import dataclasses

from paraxis.configs.base.field import field

MOST_PASSES = 1024


@dataclasses.dataclass(frozen=True)
class Recurrence:
  """Recurrent depth: prelude, core, coda (models/recurrent_depth.py).

  The coda is the layers that model.num_layers leaves.
  """

  core: int = field(0, 'layers that run again and again; 0: none', low=0)
  prelude: int = field(0, 'layers before them', low=0)
  iterations: int = field(
    8,
    'passes over the core; in training, with spread, one less than the mean of '
    'what is drawn',
    low=1, high=MOST_PASSES,
  )  # fmt: skip
  spread: float = field(
    0.5,
    'training: 1 + Poisson(e^n) passes, n normal with this standard deviation '
    'and E[e^n] = iterations; 0: always as many as iterations says',
    low=0.0, high=2.0,
  )  # fmt: skip
  gradients: int = field(
    8, 'passes, the last ones, that gradients flow through', low=1,
    high=MOST_PASSES,
  )  # fmt: skip
