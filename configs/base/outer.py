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
    'none: data parallel, gradients are averaged in every step; mean: local '
    'steps, and every outer.period steps the mean of the parameters moves the '
    'anchor, from which all continue (local SGD, DiLoCo); pairs: gossip, each '
    'replica has an anchor, moved by its own and one other replica (NoLoCo). '
    'mean and pairs: with next_token and elementwise update rules only, no '
    'stages, experts or ema_decay',
    ('none', 'mean', 'pairs'),
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
    0,
    'steps from sending a fragment to the use of the sum, up to the period',
    low=0,
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
  clip: float = field(
    0.0, 'elementwise bound on the momentum; 0: none', low=0.0
  )
  penalty: bool = field(
    False,
    'divides what arrives by 1 + the distance that the anchor has moved since '
    'it was sent, in lengths of what arrives; of delay=period',
  )
  pull: float = field(
    0.0, 'of exchange=pairs: rate at which two anchors approach', low=0.0
  )

  @property
  def active(self):
    """Whether replicas step alone."""
    return self.exchange != 'none'

  @property
  def kinds(self):
    """Names of what happens to a fragment, functions of train/steps/outer.py:
    the last when it is sent, one before it when it lands at another step."""
    if self.exchange == 'pairs':
      return ('pair',)
    if self.delay == self.period:
      return ('turn',)
    return ('land', 'send') if self.delay else ('exchange',)

  def due(self, done):
    """What is due after `done` steps, in order: [(one of `kinds`, fragment)].

    Fragment p is sent p period // fragments steps after the end of a period.
    """
    if not self.active:
      return []
    offset = lambda p: p * self.period // self.fragments
    at = lambda t, p: t > 0 and (t - offset(p)) % self.period == 0
    every, (*lands, sends) = range(self.fragments), self.kinds
    later = [(k, p) for k in lands for p in every if at(done - self.delay, p)]
    return later + [(sends, p) for p in every if at(done, p)]

  def missed(self, steps):
    """Steps at the end of a run that are not in every fragment's anchor."""
    last = dict.fromkeys(range(self.fragments), 0)
    first = max(1, steps - 2 * self.period - self.delay)  # each has arrived
    for t in range(first, steps + 1):
      arrived = [p for kind, p in self.due(t) if kind != 'send']
      last |= dict.fromkeys(arrived, max(t - self.delay, 0))
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
    self._check_kind()
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

  def _check_kind(self):
    """UserError: fields that the kind of exchange would not read."""
    pairs = self.exchange == 'pairs'
    late = self.delay == self.period
    for wrong, text in (
      (
        pairs and (self.delay or self.codec),
        f'outer.exchange=pairs with outer.delay={self.delay}, outer.codec='
        f'{self.codec!r}: two replicas exchange at once, numbers as they are. '
        'Leave both out.',
      ),
      (
        pairs and self.penalty,
        'outer.exchange=pairs with outer.penalty: two replicas exchange at '
        'once, nothing is late. Leave it out.',
      ),
      (
        self.exchange == 'mean' and self.pull,
        f'outer.pull={self.pull:g} is read by outer.exchange=pairs alone: of '
        'exchange=mean there is one anchor. Leave it out.',
      ),
      (
        pairs and self.pull and not self.rate,
        f'outer.pull={self.pull:g} with outer.rate=0: both are in one '
        'momentum, in units of the rate. Give a rate above 0.',
      ),
      (
        self.active and self.penalty and not late,
        f'outer.penalty with outer.delay={self.delay} and outer.period='
        f'{self.period}: an anchor moves between sending and landing only if '
        'the delay is the period. Give that, or leave the penalty out.',
      ),
      (
        self.penalty and self.nesterov,
        'outer.penalty with outer.nesterov: the last move of the anchor is '
        'known from a heavy-ball momentum alone. Give outer.nesterov=False.',
      ),
    ):
      if wrong:
        raise UserError(text)
