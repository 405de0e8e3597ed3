"""Fields of the token mixers that are not attention (models/mixers/)."""

import dataclasses

from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class GatedLinear:
  """Gated linear attention, kind G (models/mixers/gated_linear.py)."""

  heads: int = field(0, 'heads; 0: model.num_heads', low=0)
  key_expand: float = field(0.5, 'width of all keys / model.d_model', low=0.0)
  value_expand: float = field(
    1.0, 'width of all values / model.d_model', low=0.0
  )
  gate_rank: int = field(16, 'rank of the map from a token to decays', low=1)
  gate_normaliser: float = field(
    16.0, 'log decays are log sigmoid(x) divided by it', low=1.0
  )
  conv_width: int = field(
    0, 'taps of a causal convolution on q, k and v; 0: none', low=0
  )


@dataclasses.dataclass(frozen=True)
class Mamba:
  """Mamba-2 (kind M) and Mamba (kind S) (models/mixers/mamba.py)."""

  expand: int = field(2, 'inner width / model.d_model', low=1)
  head_dim: int = field(64, 'M: width of a head', low=1)
  state: int = field(128, 'numbers kept for every channel', low=1)
  groups: int = field(1, 'M: groups of heads that share B and C', low=1)
  conv_width: int = field(4, 'taps of the causal convolution', low=1)
  dt_rank: int = field(0, 'S: rank of the step sizes; 0: d_model / 16', low=0)
  dt_min: float = field(1e-3, 'least step size at the start', low=1e-9)
  dt_max: float = field(0.1, 'largest step size at the start', low=1e-9)
  inner_norm: bool = field(
    False, 'S: RMSNorm on the low-rank step, B and C (Jamba)'
  )


@dataclasses.dataclass(frozen=True)
class Recurrent:
  """Nonlinear cells, kinds R (ParaGRU) and L (ParaLSTM)
  (models/mixers/recurrent.py).

  A sequence is solved by Newton's method (pallas_kernels/scans/newton.py).
  """

  heads: int = field(2, 'blocks of the block-diagonal input maps', low=1)
  conv_width: int = field(4, 'taps of the causal convolution', low=1)
  init_std: float = field(
    0.0, 'of the diagonal recurrent weights; 0: 2 / sqrt(5 width)', low=0.0
  )
  solver: str = field(
    'newton',
    'newton: all tokens at once; sequential: one after the other',
    ('newton', 'sequential'),
  )
  tolerance: float = field(
    1e-6, 'largest residual of a step that counts as solved', low=0.0
  )
  iterations: int = field(20, 'Newton steps at most', low=1)
  bound: float = field(
    1.0, 'iterates are clipped to it; no state of R or L is above 1', low=1e-9
  )
  strict: bool = field(
    False, 'an unsolved sequence stops the run; else it is solved in sequence'
  )


@dataclasses.dataclass(frozen=True)
class Tcn:
  """Dilated convolutions, then attention in chunks, kind C."""

  kernel: int = field(17, 'taps of a convolution', low=1)
  dilation: int = field(2, 'factor from one convolution to the next', low=1)
  depth: int = field(4, 'convolutions, one upon the other', low=1)
  chunk: int = field(64, 'tokens that attend to one another', low=1)
  key_dim: int = field(64, 'width of the queries and keys', low=1)
  value_expand: float = field(
    2.0, 'width of the values / model.d_model', low=0.0
  )


@dataclasses.dataclass(frozen=True)
class Latent:
  """Multi-head latent attention, kind A (models/mixers/latent.py)."""

  rank: int = field(128, 'width of the latent that is cached', low=1)
  query_rank: int = field(0, 'width of the latent of queries; 0: none', low=0)
  nope_dim: int = field(32, 'width of a key without position', low=1)
  rope_dim: int = field(16, 'width of the rotated key all heads share', low=2)
  value_dim: int = field(32, 'width of a value', low=1)
  groups: int = field(
    1, 'parts of the latent that decoding holds apart (TPLA); 1: whole', low=1
  )
  rotation: str = field(
    'none',
    'of the latent before it is parted: none, hadamard, or pca of its '
    'covariance',
    ('none', 'hadamard', 'pca'),
  )
  scores: str = field(
    'summed',
    'summed: parts add up their scores, exact; own: each part goes by its own '
    '(TPLA, changes the numbers)',
    ('summed', 'own'),
  )
