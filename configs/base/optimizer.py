"""Fields of update rules."""

import dataclasses

from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Update rule, schedule and clipping."""

  name: str = field(
    'adamw',
    'adamw; or muon on matrices, adamw on embeddings, norms and biases',
    ('adamw', 'muon'),
  )
  learning_rate: float = field(3e-3, 'peak learning rate of adamw', low=0.0)
  muon_learning_rate: float = field(0.02, 'peak learning rate of muon', low=0.0)
  b1: float = field(0.9, 'decay of adamw first moments', low=0.0, high=0.99999)
  b2: float = field(
    0.95, 'decay of adamw second moments', low=0.0, high=0.99999
  )
  epsilon: float = field(1e-8, 'added to the denominator of adamw', low=0.0)
  weight_decay: float = field(
    0.1, 'decoupled weight decay; not of norms and biases', low=0.0
  )
  muon_momentum: float = field(
    0.95, 'Nesterov momentum of muon', low=0.0, high=1.0
  )
  clip_norm: float = field(1.0, 'maximum global gradient norm; 0: off', low=0.0)
  schedule: str = field(
    'cosine', 'learning rate after warm-up', ('cosine', 'wsd', 'constant')
  )
  warmup_steps: int = field(40, 'steps of linear warm-up from 0', low=0)
  decay_steps: int = field(0, 'wsd: steps of linear decay at the end', low=0)
  final_fraction: float = field(
    0.0, 'final learning rate / peak', low=0.0, high=1.0
  )
  ema_decay: float = field(
    0.0,
    'decay of an average of the parameters, which decode --ema reads; 0: none',
    low=0.0,
    high=0.999999,
  )
