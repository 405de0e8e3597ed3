"""Fields of update rules."""

import dataclasses

from paraxis.configs.base.field import field

NAMES = (
  'adamw', 'nadamw', 'lion', 'ademamix', 'sophia', 'adafactor', 'mars',
  'prodigy', 'schedule_free', 'muon', 'scion', 'soap', 'kron',
)  # fmt: skip
# Old names of fields, in files that were written with them -> new ones.
RENAMED = {
  'muon_learning_rate': 'matrix_learning_rate',
  'muon_momentum': 'matrix_momentum',
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Update rule, schedule and clipping."""

  name: str = field(
    'adamw',
    'update rule; muon, scion, soap and kron are of matrices, adamw (of scion '
    'signs) of embeddings, norms and biases',
    NAMES,
  )
  learning_rate: float = field(
    3e-3, 'peak learning rate; of prodigy a factor of its own: take 1', low=0.0
  )
  matrix_learning_rate: float = field(
    0.02, 'peak learning rate of muon, scion, soap and kron', low=0.0
  )
  b1: float = field(0.9, 'decay of first moments', low=0.0, high=0.99999)
  b2: float = field(0.95, 'decay of second moments', low=0.0, high=0.99999)
  epsilon: float = field(
    1e-8, 'added to the denominators of moments', low=1e-30
  )
  weight_decay: float = field(
    0.1, 'decoupled weight decay; not of norms and biases', low=0.0
  )
  matrix_momentum: float = field(
    0.95, 'momentum of muon and scion', low=0.0, high=0.99999
  )
  precondition_decay: float = field(
    0.95, 'soap: decay of statistics', low=0.0, high=0.99999
  )
  precondition_every: int = field(
    10, 'steps between bases (soap), factors (kron), Hessians (sophia)', low=1
  )
  curvature: float = field(
    0.01, 'sophia: factor of the Hessian; below it steps are clipped', low=0.0
  )
  correction: float = field(
    0.025, 'mars: weight of the change of the gradient', low=0.0
  )
  slow_decay: float = field(
    0.9999, 'ademamix: decay of the slow average at the end', low=0.5,
    high=0.9999999,
  )  # fmt: skip
  slow_weight: float = field(
    5.0, 'ademamix: weight of the slow average at the end', low=0.0
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

  @property
  def follows_steps(self):
    """Whether steps depend on train.steps, the length of the run: by their rate
    (train/updates/optimizers.py), or by the averages of ademamix."""
    return self.schedule != 'constant' or self.name == 'ademamix'
