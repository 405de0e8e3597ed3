"""Fields of decoding, and the methods that there are."""

import dataclasses

from paraxis.configs.base.field import MOST_LENGTH
from paraxis.configs.base.field import field

_LOSSLESS = 'lossless with judge=replay or rejection; typical is not'
# Name -> (what drafts, what is held true of its text).
METHODS = {
  'autoregressive': ('nothing, a token a call', 'the reference'),
  'prompt_lookup': (
    'the tokens that followed the last ones earlier in the text',
    _LOSSLESS,
  ),
  'aggressive': ('the prompt, as far as the text copies it', _LOSSLESS),
  'jacobi': ('the draws of the call before, at each place', _LOSSLESS),
  'speculative': ('the first draft_layers layers of the model', _LOSSLESS),
  'pearl': (
    'the same layers, while the model judges',
    'lossless; judge=replay',
  ),
  'easyspec': (
    'the same layers, the mixers of draft_group of them on the same features',
    _LOSSLESS,
  ),
  'medusa': ('heads of decode.draft, a tree', _LOSSLESS),
  'eagle': ('a layer of decode.draft that continues the features', _LOSSLESS),
  'falcon': (
    'such a layer, behind an LSTM, that makes two features a pass',
    _LOSSLESS,
  ),
  'ppd': (
    'prompt tokens of decode.draft behind every draft, a tree',
    _LOSSLESS,
  ),
  'unmask': (
    'nothing: a call unmasks tokens, in any order (decode.unmask)',
    'for masked models only; not lossless',
  ),
  'wavefront': (
    'nothing: passes over a core for many tokens at once (decode.wavefront)',
    'for models with model.recurrence; lossless only with width=1 and '
    'inner=model.recurrence.iterations',
  ),
}


@dataclasses.dataclass(frozen=True)
class Unmask:
  """Which masks of a canvas a call makes text (decode/unmask/policies.py)."""

  block: int = field(
    32, 'tokens of a canvas; of model.visibility=block, model.block', low=1,
    high=512,
  )  # fmt: skip
  sub_block: int = field(
    0,
    'tokens of a sub-block: those of a block, of model.visibility=block, are '
    'decoded from left to right; 0: the block is one',
    low=0, high=512,
  )  # fmt: skip
  sub_cache: bool = field(
    False,
    'calls read the sub-block alone, and the keys and values that the rest of '
    'the block had at its first call: approximate',
  )
  score: str = field(
    'confidence',
    'which masks come first: the likeliest token, the largest distance to the '
    'second one, the least entropy, random ones, or what a trained filter '
    '(decode.draft) makes of the confidences',
    ('confidence', 'margin', 'entropy', 'random', 'filter'),
  )
  count: str = field(
    'fixed',
    'how many: fixed: unmask.tokens; threshold: those above it; factor: as '
    'many as their scores allow together; hierarchy: the best of each run of '
    'masks, and those above the threshold; ascending: 1, 2, 4, .. of a block, '
    'in log2 of its tokens; one at least',
    ('fixed', 'threshold', 'factor', 'hierarchy', 'ascending'),
  )
  tokens: int = field(1, 'count=fixed: tokens a call', low=1, high=512)
  threshold: float = field(
    0.9, 'count=threshold, hierarchy: least score', low=0.0, high=1.0
  )
  factor: float = field(
    1.0, 'count=factor: what (n + 1) (1 - score) stays below', low=0.0
  )
  end_weight: float = field(
    1.0,
    'of the score of an end in the first call of a canvas; it rises to 1 with '
    'the share that is text',
    low=0.0, high=1.0,
  )  # fmt: skip
  credit_weight: float = field(
    0.0, 'how much a token that was likeliest before gains; 0: nothing',
    low=0.0, high=1000.0,
  )  # fmt: skip
  credit_decay: float = field(
    0.8, 'factor on such a credit, each call', low=0.0, high=1.0
  )
  credit_power: float = field(
    0.2, 'exponent of the probability that a credit gains', low=0.0
  )


@dataclasses.dataclass(frozen=True)
class Wavefront:
  """Tokens that a call takes further through a core (decode/wavefront.py)."""

  width: int = field(32, 'tokens at once, at most', low=1, high=512)
  inner: int = field(
    4, 'passes over the core a call; they divide model.recurrence.iterations',
    low=1, high=1024,
  )  # fmt: skip
  threshold: float = field(
    0.03, 'change of a state in a call, relative to it, below which its token '
    'is text', low=0.0,
  )  # fmt: skip
  headway: int = field(1, 'tokens that join after a call', low=1, high=512)
  noise: float = field(
    0.0, 'share of noise in a state before a call, over 1 + passes', low=0.0,
    high=1.0,
  )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Decode:
  """Sampling, and methods of decoding."""

  max_new_tokens: int = field(64, 'tokens after the prompt', low=1)
  temperature: float = field(0.7, 'softmax temperature; 0: greedy', low=0.0)
  top_k: int = field(0, 'keep the top_k most likely tokens; 0: all', low=0)
  top_p: float = field(1.0, 'keep this probability mass', low=0.0, high=1.0)
  min_p: float = field(
    0.0, 'keep tokens this likely relative to the best', low=0.0, high=1.0
  )
  seed: int = field(0, 'random seed of sampling', low=0, high=2**32 - 1)
  method: str = field(
    'autoregressive',
    'what drafts tokens that one call of the model judges: '
    + '; '.join(f'{name}: {text}' for name, (text, _) in METHODS.items()),
    tuple(METHODS),
  )
  drafts: int = field(
    4,
    'tokens that a method drafts for a call: of medusa and ppd the nodes of a '
    "tree, which is grown from the draft's accuracy and cannot be given; "
    'decode.budget does not bound them',
    low=1,
    high=255,
  )
  draft_layers: int = field(
    0,
    'speculative, pearl, easyspec: layers, from the first on, that draft',
    low=0,
  )
  draft_group: int = field(
    4,
    'easyspec: layers of the draft model whose mixers read the same features; '
    '1: it drafts exactly',
    low=1,
  )
  draft: str = field(
    '',
    "file of a trained draft (`paraxis draft`): medusa's heads, the layer of "
    "eagle or falcon, ppd's prompt tokens, or what speculative, pearl and "
    'easyspec add before the head; of score=filter, its filter',
  )
  judge: str = field(
    'replay',
    'acceptance rule. replay: drafts that autoregressive decoding would '
    'sample, so the text is the same; rejection: rejection sampling, the same '
    'distribution (arXiv:2211.17192); typical: of Medusa, which changes it',
    ('replay', 'rejection', 'typical'),
  )
  unmask: Unmask = Unmask()
  wavefront: Wavefront = Wavefront()
  requests: int = field(
    0,
    'continuous batching, of every method: cache rows, the most prompts that '
    'are decoded at once; 0: a row for each prompt, all at once',
    low=0, high=4096,
  )  # fmt: skip
  budget: int = field(
    128,
    'continuous batching: tokens of prompts that a step reads, in lanes of 64, '
    'at most 64 of one prompt; of methods other than autoregressive, of whole '
    'prompts read at once, at least one (where rows are sharded, of all rows)',
    low=64, high=MOST_LENGTH,
  )  # fmt: skip
  weights: str = field(
    'loaded',
    'matrices of layers. loaded: in model.dtype; int4: rounded to 4 bits, '
    '-7 .. 7 of a scale, an eighth of float32 and the scales, but for experts '
    'and matrices with inputs that 32 does not divide (a line names them); on '
    'CPU and on meshes that saves memory, not time',
    ('loaded', 'int4'),
  )
  weight_group: int = field(
    0,
    'int4: inputs that share a scale, 32, 64 or 128; 0: of each matrix the '
    'most that divide its inputs, whatever the mesh',
    low=0, high=128,
  )  # fmt: skip
  cache_length: int = field(
    1024, 'maximum of prompt and new tokens', low=1, high=MOST_LENGTH
  )
