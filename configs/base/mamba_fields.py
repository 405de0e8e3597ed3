"""Fields of the state space mixers: sections of schema.Model (mixers.py)."""

import dataclasses

from paraxis.configs.base.field import MOST_WIDTH
from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Mamba:
  """Mamba-2 (kind M) and Mamba (kind S) (models/mixers/mamba.py)."""

  expand: int = field(2, 'inner width / model.d_model', low=1, high=MOST_WIDTH)
  heads: int = field(
    0, 'M: heads; 0: expand x d_model / head_dim', low=0, high=MOST_WIDTH
  )
  head_dim: int = field(64, 'M: width of a head', low=1, high=MOST_WIDTH)
  state: int = field(
    128, 'numbers kept for every channel', low=1, high=MOST_WIDTH
  )
  groups: int = field(1, 'M: groups of heads that share B and C', low=1)
  conv_width: int = field(
    4, 'taps of the causal convolution', low=1, high=MOST_WIDTH
  )
  dt_rank: int = field(
    0, 'S: rank of the step sizes; 0: d_model / 16', low=0, high=MOST_WIDTH
  )
  dt_min: float = field(1e-3, 'least step size at the start', low=1e-9)
  dt_max: float = field(0.1, 'largest step size at the start', low=1e-9)
  inner_norm: bool = field(
    False, 'S: RMSNorm on the low-rank step, B and C (Jamba)'
  )
  inner_norm_scale: bool = field(
    True, 'S: the inner norms have learned scales (Falcon-Mamba: none)'
  )
  norm_epsilon: float = field(
    0.0, 'epsilon of the norm of M, of the inner norms of S; 0: '
    'model.norm_epsilon', low=0.0,
  )  # fmt: skip
  step_floor: float = field(0.0, 'M: the least step size of a token', low=0.0)


@dataclasses.dataclass(frozen=True)
class Hybrid:
  """Mamba-2 behind a shared block, kind H (models/mixers/hybrid.py).

  A block is attention, as of model, and an mlp.
  """

  blocks: int = field(
    1, 'blocks, which the layers use in turn', low=1, high=MOST_WIDTH
  )
  mlp: str = field(
    'geglu_exact', 'form of the mlps',
    ('swiglu', 'geglu', 'geglu_exact', 'gelu', 'gelu_exact', 'relu', 'relu2'),
  )  # fmt: skip
  d_ff: int = field(
    0, 'hidden width of the mlps; 0: model.d_ff', low=0, high=MOST_WIDTH
  )
  attention_rank: int = field(
    0, 'rank of what every layer adds to the queries, keys and values of its '
    'block; 0: nothing', low=0, high=MOST_WIDTH,
  )  # fmt: skip
  mlp_rank: int = field(
    0, 'rank of what every layer adds to the mlp of its block; 0: nothing',
    low=0, high=MOST_WIDTH,
  )  # fmt: skip
