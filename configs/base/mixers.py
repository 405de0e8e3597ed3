"""The token mixers (models/mixers/): their fields, and one table row for each.

A new mixer is its module, a row of `TABLE` here (with a section of fields in
`Sections` if it has some), its class under the same letter in models/layer.py,
and a test. The schema, shrinking, rotary positions and the documentation of
model.pattern read the table.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

from paraxis.configs.base import errors
from paraxis.configs.base import mamba_fields
from paraxis.configs.base.field import MOST_WIDTH
from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class GatedLinear:
  """Gated linear attention, kind G (models/mixers/gated_linear.py)."""

  heads: int = field(0, 'heads; 0: model.num_heads', low=0, high=MOST_WIDTH)
  key_expand: float = field(
    0.5, 'width of all keys / model.d_model', low=0.0, high=MOST_WIDTH
  )
  value_expand: float = field(
    1.0, 'width of all values / model.d_model', low=0.0, high=MOST_WIDTH
  )
  gate_rank: int = field(
    16, 'rank of the map from a token to decays', low=1, high=MOST_WIDTH
  )
  gate_normaliser: float = field(
    16.0, 'log decays are log sigmoid(x) divided by it', low=1.0
  )
  conv_width: int = field(
    0,
    'taps of a causal convolution on q, k and v; 0: none',
    low=0,
    high=MOST_WIDTH,
  )


Mamba, Hybrid = mamba_fields.Mamba, mamba_fields.Hybrid


@dataclasses.dataclass(frozen=True)
class Recurrent:
  """Nonlinear cells, kinds R (ParaGRU) and L (ParaLSTM)
  (models/mixers/recurrent.py).

  A sequence is solved by Newton's method (pallas_kernels/scans/newton.py).
  """

  heads: int = field(
    2, 'blocks of the block-diagonal input maps', low=1, high=MOST_WIDTH
  )
  conv_width: int = field(
    4, 'taps of the causal convolution', low=1, high=MOST_WIDTH
  )
  init_std: float = field(
    0.0,
    'standard deviation of the diagonal recurrent weights; 0: 2 / sqrt(5 '
    'width)',
    low=0.0,
  )
  solver: str = field(
    'newton',
    'newton: all tokens in parallel; sequential: one token after another',
    ('newton', 'sequential'),
  )
  tolerance: float = field(
    1e-6, 'largest residual of a step that counts as converged', low=0.0
  )
  iterations: int = field(20, 'Newton steps at most', low=1)
  bound: float = field(
    1.0, 'iterates are clipped to it; states of R and L stay within 1', low=1e-9
  )
  strict: bool = field(
    False, 'unconverged: stop the run; else solve again, token by token'
  )


@dataclasses.dataclass(frozen=True)
class Tcn:
  """Dilated convolutions, then attention in chunks, kind C."""

  kernel: int = field(17, 'taps of a convolution', low=1, high=MOST_WIDTH)
  dilation: int = field(
    2, 'factor from one convolution to the next', low=1, high=MOST_WIDTH
  )
  depth: int = field(4, 'convolutions in sequence', low=1, high=64)
  chunk: int = field(
    64, 'tokens in a chunk of attention', low=1, high=MOST_WIDTH
  )
  key_dim: int = field(
    64, 'width of the queries and keys', low=1, high=MOST_WIDTH
  )
  value_expand: float = field(
    2.0, 'width of the values / model.d_model', low=0.0, high=MOST_WIDTH
  )


@dataclasses.dataclass(frozen=True)
class Latent:
  """Multi-head latent attention, kind A (models/mixers/latent.py)."""

  rank: int = field(
    128, 'width of the latent that is cached', low=1, high=MOST_WIDTH
  )
  query_rank: int = field(
    0, 'width of the latent of queries; 0: none', low=0, high=MOST_WIDTH
  )
  nope_dim: int = field(
    32, 'width of a key without position', low=1, high=MOST_WIDTH
  )
  rope_dim: int = field(
    16, 'width of the rotated key all heads share', low=2, high=MOST_WIDTH
  )
  value_dim: int = field(32, 'width of a value', low=1, high=MOST_WIDTH)
  norm_epsilon: float = field(
    0.0, 'epsilon of the norms of latents; 0: model.norm_epsilon', low=0.0
  )
  groups: int = field(
    1, 'shards of the latent in decoding (TPLA); 1: not sharded', low=1
  )
  rotation: str = field(
    'none',
    'basis change of the latent before it is sharded: none, hadamard, or pca '
    'of its covariance',
    ('none', 'hadamard', 'pca'),
  )
  scores: str = field(
    'summed',
    'summed: scores are summed over shards, exact; own: each shard has its own '
    'softmax (TPLA, changes the numbers)',
    ('summed', 'own'),
  )


@dataclasses.dataclass(frozen=True)
class ShortConv:
  """Gated short convolutions, kind V (models/mixers/short_conv.py)."""

  width: int = field(
    3, 'taps of the causal convolution', low=1, high=MOST_WIDTH
  )


@dataclasses.dataclass(frozen=True)
class RgLru:
  """Real-gated linear recurrent units, kind U (models/mixers/rg_lru.py)."""

  width: int = field(0, 'channels; 0: model.d_model', low=0, high=MOST_WIDTH)
  heads: int = field(
    0,
    'blocks of the block-diagonal gates; 0: model.num_heads',
    low=0,
    high=MOST_WIDTH,
  )
  conv_width: int = field(
    4, 'taps of the causal convolution', low=1, high=MOST_WIDTH
  )


@dataclasses.dataclass(frozen=True)
class GatedDelta:
  """The gated delta rule, kind D (models/mixers/gated_delta.py)."""

  heads: int = field(
    0, 'heads of queries and keys; 0: model.num_heads', low=0, high=MOST_WIDTH
  )
  value_heads: int = field(
    0, 'heads of values, a multiple of heads; 0: heads', low=0, high=MOST_WIDTH
  )
  key_dim: int = field(
    0,
    'width of a query and a key; 0: that of attention',
    low=0,
    high=MOST_WIDTH,
  )
  value_dim: int = field(
    0, 'width of a value; 0: key_dim', low=0, high=MOST_WIDTH
  )
  conv_width: int = field(
    4, 'taps of a causal convolution on q, k and v', low=1, high=MOST_WIDTH
  )
  reflect: bool = field(
    False,
    'tokens write with shares up to 2, not 1: eigenvalues down to -1 '
    '(arXiv:2411.12537)',
  )


@dataclasses.dataclass(frozen=True)
class Sections:
  """Sections of schema.Model that only some mixers read."""

  gated_linear: GatedLinear = GatedLinear()
  mamba: Mamba = Mamba()
  hybrid: Hybrid = Hybrid()
  recurrent: Recurrent = Recurrent()
  tcn: Tcn = Tcn()
  latent: Latent = Latent()
  short_conv: ShortConv = ShortConv()
  rg_lru: RgLru = RgLru()
  gated_delta: GatedDelta = GatedDelta()


def _at_most(section, **sizes):
  """{field: its value in a section, or the given size if that is less}."""
  return {name: min(getattr(section, name), n) for name, n in sizes.items()}


def _small_gated_linear(model, few):
  own = model.gated_linear
  heads = few(own.heads or model.num_heads, 4)
  return dict(heads=heads) | _at_most(own, gate_rank=4)


def _small_mamba(model, few):
  small = _at_most(model.mamba, head_dim=4, state=8, groups=2, dt_rank=4)
  return small | dict(heads=few(model.mamba.heads, 8))


def _small_hybrid(model, few):
  own = model.hybrid
  small = _at_most(own, blocks=2, attention_rank=4, mlp_rank=4)
  return small | dict(d_ff=few(own.d_ff, 64))


def _small_recurrent(model, few):
  return dict(heads=few(model.recurrent.heads, 4))


def _small_tcn(model, few):
  del few
  # On 8 shards of 8 tokens a convolution reads what three ranks hold.
  return _at_most(model.tcn, kernel=10, depth=2, chunk=4)


def _small_latent(model, few):
  own = model.latent
  ranks = dict(rank=few(own.rank, 16), query_rank=few(own.query_rank, 16))
  return ranks | _at_most(own, nope_dim=4, rope_dim=4, value_dim=4)


def _small_short_conv(model, few):
  del few
  return _at_most(model.short_conv, width=4)


def _small_rg_lru(model, few):
  own = model.rg_lru
  heads = few(own.heads or model.num_heads, 4)
  return dict(heads=heads, width=4 * heads)


def _small_gated_delta(model, few):
  own = model.gated_delta
  heads = own.heads or model.num_heads
  small = few(heads, 4)
  values = -(-own.value_heads // heads) * small
  return dict(heads=small, value_heads=values, key_dim=4, value_dim=3)


class MixerKind(NamedTuple):
  """What configs and positions need to know of a mixer.

  word: its name in the documentation of model.pattern.
  section: the section of schema.Model that it reads; '': none.
  shrink: (model, few) -> fields of the section in a small model, where
    few(n, target) is about `target`, a multiple of the devices (0 stays 0).
  rotary: model -> width of the rotated queries and keys; None: no positions.
  windowed: it sees model.window tokens, and has a rotary base of its own.
  chunked: it sees tokens of its own chunk of model.attention_chunk positions.
  scales_scores: YaRN's factor is in its scores, not in cos and sin.
  within: letters of mixers of which it is made.
  shares: its layers use model.hybrid.blocks blocks in turn.
  sums_last: what it gives is a sum over devices that it does not read itself.
  like: of a user's own (models/register.py), the letter whose row it took over.
  """

  word: str
  section: str = ''
  shrink: Callable[[Any, Callable[[int, int], int]], dict] | None = None
  rotary: Callable[[Any], int] | None = None
  windowed: bool = False
  chunked: bool = False
  scales_scores: bool = False
  within: str = ''
  shares: bool = False
  sums_last: bool = True
  like: str = ''


class Origin(NamedTuple):
  """The user's file that a mixer is from: its path, and sha256 of its code."""

  file: str
  sha256: str


def rotated(model):
  """Columns of a head of attention that rotate."""
  return int(model.head_width * model.rope_fraction + 1e-6)


def factors(text):
  """Factors of LongRoPE, '1.0,1.25,2'; UserError: not numbers above 0."""
  try:
    found = [float(part) for part in text.split(',')]
  except ValueError:
    found = [0.0]
  if not all(0 < x < float('inf') for x in found):
    raise errors.UserError(
      f"model.rope_scaling='longrope': factors {text!r} are no numbers above "
      '0, separated by commas.'
    )
  return found


TABLE = {
  'F': MixerKind('full attention', rotary=rotated),
  'W': MixerKind('sliding window', rotary=rotated, windowed=True),
  'K': MixerKind('attention within chunks', rotary=rotated, chunked=True),
  'N': MixerKind('full attention without rotary positions'),
  'A': MixerKind(
    'latent attention', 'latent', _small_latent,
    rotary=lambda model: model.latent.rope_dim, scales_scores=True,
  ),
  'G': MixerKind(
    'gated linear attention', 'gated_linear', _small_gated_linear
  ),
  'M': MixerKind('Mamba-2', 'mamba', _small_mamba),
  'S': MixerKind('Mamba', 'mamba', _small_mamba),
  'H': MixerKind(
    'Mamba-2 behind a shared block', 'hybrid', _small_hybrid, rotary=rotated,
    within='MF', shares=True,
  ),
  'R': MixerKind('ParaGRU', 'recurrent', _small_recurrent),
  'L': MixerKind('ParaLSTM', 'recurrent', _small_recurrent),
  'V': MixerKind(
    'gated short convolution', 'short_conv', _small_short_conv
  ),
  'U': MixerKind('RG-LRU', 'rg_lru', _small_rg_lru),
  'D': MixerKind('gated delta rule', 'gated_delta', _small_gated_delta),
  'C': MixerKind(
    'convolutions and attention in chunks', 'tcn', _small_tcn, sums_last=False
  ),
}  # fmt: skip


# Letter -> where it is from, of mixers that models/register.py added.
OWN: dict[str, Origin] = {}


def of_pattern(pattern):
  """'M-M*' -> ('MMF', (True, True, False)): letters, and which have an mlp.

  Without a '-' all have one. UserError: a letter that is no mixer, or a '-'
  that follows none.
  """
  letters, follows = '', []
  for letter in pattern.replace('*', 'F'):
    if letter == '-' and follows and not follows[-1]:
      follows[-1] = True
      continue
    if letter not in TABLE:
      what = 'an mlp that follows no mixer' if letter == '-' else 'no mixer'
      raise errors.UserError(
        f'model.pattern={pattern!r}: {letter!r} is {what} '
        f'({", ".join(TABLE)} and * for F, each with a - behind it or not).'
      )
    letters += letter
    follows.append(False)
  if not letters:
    raise errors.UserError(
      'model.pattern is empty: name at least one layer kind.'
    )
  return letters, tuple(follows) if '-' in pattern else (True,) * len(letters)


def inside(letters):
  """The letters, and those of the mixers of which some are made."""
  return letters + ''.join(TABLE[k].within + TABLE[k].like for k in letters)


def others(letters, kinds):
  """Letters, sorted, that are none of the kinds and like none of them."""
  return sorted(k for k in {*letters} if not {k, TABLE[k].like} & {*kinds})


def words():
  """'F full attention, W sliding window, ...'."""
  return ', '.join(f'{letter} {kind.word}' for letter, kind in TABLE.items())
