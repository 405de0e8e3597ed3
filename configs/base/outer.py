"""Fields of replicas that step alone and exchange now and then."""

import dataclasses

from paraxis.configs.base.errors import UserError
from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Outer:
  """Replicas (mesh.replica) that step alone, and what they exchange
  (train/steps/outer.py)."""

  exchange: str = field(
    'none',
    'what replicas exchange: none, they average the gradients of every step; '
    'mean, each steps alone, and every outer.period steps the mean of their '
    'parameters moves the anchor, from which all continue',
    ('none', 'mean'),
  )
  period: int = field(
    0, 'steps between two exchanges of a fragment; 0: of exchange=none', low=0
  )
  rate: float = field(0.7, 'learning rate of the anchor', low=0.0)
  momentum: float = field(
    0.9, 'momentum of the anchor; 0 with rate 1: local SGD', low=0.0, high=1.0
  )
  nesterov: bool = field(True, 'the momentum is Nesterov, else heavy ball')
  fragments: int = field(
    1,
    'parts of the parameters that are exchanged at different steps: layers of '
    'a kind are in them by turns, the two ends of the model in the last',
    low=1,
  )
  delay: int = field(
    0, 'steps from sending a fragment to the use of the sum', low=0
  )
  mixing: float = field(
    0.0,
    'share of its own parameters that a replica keeps when the anchor arrives',
    low=0.0,
    high=1.0,
  )
  codec: str = field(
    '',
    'what is sent: numbers as they are; e3m0, in 4 bits (train/steps/codec.py)',
    ('', 'e3m0'),
  )

  @property
  def active(self):
    """Whether replicas step alone."""
    return self.exchange != 'none'

  def due(self, done):
    """After `done` steps: ([fragments that land], [that are sent]).

    Fragment p is sent p period // fragments steps after the end of a period.
    Without a delay what is sent lands at once, and is in the second list alone.
    """
    if not self.active:
      return [], []
    offset = lambda p: p * self.period // self.fragments
    at = lambda t, p: t > 0 and (t - offset(p)) % self.period == 0
    every = range(self.fragments)
    lands = [p for p in every if self.delay and at(done - self.delay, p)]
    return lands, [p for p in every if at(done, p)]

  def missed(self, steps):
    """Steps at the end of a run that are not in every fragment's anchor."""
    last = dict.fromkeys(range(self.fragments), 0)
    first = max(1, steps - 2 * self.period - self.delay)  # each has arrived
    for t in range(first, steps + 1):
      lands, sends = self.due(t)
      arrived = lands if self.delay else sends
      last |= dict.fromkeys(arrived, t - self.delay)
    return steps - min(last.values())

  def __post_init__(self):
    if self.active != bool(self.period):
      raise UserError(
        f'outer.exchange={self.exchange} and outer.period={self.period}: an '
        'exchange needs a period of at least 1 step, and none has the period 0.'
      )
    unused = [
      f'outer.{f.name}={getattr(self, f.name)!r}'
      for f in dataclasses.fields(self)
      if getattr(self, f.name) != f.default
    ]
    if unused and not self.active:
      raise UserError(
        f'outer.exchange=none reads no other field, and {", ".join(unused)} is '
        'given: take exchange=mean, or leave it out.'
      )
    if self.delay and self.delay == self.period and not self.mixing:
      raise UserError(
        f'outer.delay={self.delay} is outer.period, and outer.mixing=0: what '
        'arrives would replace every step since it was sent, all of a period. '
        'Give a smaller delay, or a mixing above 0.'
      )
    if self.delay > self.period:
      raise UserError(
        f'outer.delay={self.delay} is above outer.period={self.period}: a '
        'fragment would be sent again before it arrives. Give at most the '
        'period.'
      )
    if self.fragments > max(self.period, 1):
      raise UserError(
        f'outer.fragments={self.fragments} are more than the steps of a '
        f'period, outer.period={self.period}: each has a step of its own. Give '
        'at most as many.'
      )
