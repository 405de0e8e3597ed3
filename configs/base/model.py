"""Fields of the model, and of its experts: meaning, default, valid values."""

import dataclasses
from typing import Any

from paraxis.configs.base import extra as extra_lib
from paraxis.configs.base import mixers
from paraxis.configs.base.field import MOST_LENGTH
from paraxis.configs.base.field import MOST_WIDTH
from paraxis.configs.base.field import field
from paraxis.configs.base.recurrence import Recurrence

MOST_ROWS = 2**31 - 1  # a token is an int32
MOST_LAYERS = 10_000
MOST_EXPERTS = 4_096


@dataclasses.dataclass(frozen=True)
class Experts:
  """Mixture of experts in place of the mlp (models/ffn/moe.py)."""

  count: int = field(
    0, 'experts of a layer; 0: a plain mlp', low=0, high=MOST_EXPERTS
  )
  top_k: int = field(2, 'experts a token is sent to', low=1)
  pattern: str = field(
    'E',
    'repeated over the depth: E experts, P twice as many (pyramid), D mlp',
  )
  d_ff: int = field(
    0, 'hidden width of an expert; 0: model.d_ff', low=0, high=MOST_WIDTH
  )
  shared: int = field(0, 'experts that see every token', low=0, high=MOST_WIDTH)
  shared_gate: bool = field(False, 'a sigmoid gate on the shared experts')
  shared_scale: float = field(1.0, 'multiplies the shared experts', low=0.0)
  residual: bool = field(
    False, 'an mlp beside the experts, mixed by a learned softmax (PR-MoE)'
  )
  scores: str = field(
    'softmax',
    'router score function; softmax is over all experts',
    ('softmax', 'sigmoid'),
  )
  normalise: bool = field(True, 'the weights of a token add up to 1')
  sum_epsilon: float = field(
    1e-20, 'added to the sum that weights are divided by', low=0.0
  )
  scale: float = field(1.0, 'multiplies the weights', low=0.0)
  scale_inputs: bool = field(
    False, 'weights multiply what experts read, not what they give (Llama 4)'
  )
  mlp_bias: bool = field(False, 'biases of the experts')
  router_bias: bool = field(False, "a learned bias on the router's logits")
  groups: int = field(1, 'groups of experts that a token first chooses', low=1)
  top_groups: int = field(1, 'groups a token may be sent to', low=1)
  group_best: int = field(
    2, 'best scores of a group that are summed to choose it', low=1
  )
  capacity_factor: float = field(
    0.0, 'slots of an expert / even share; 0: as many as needed', low=0.0
  )
  drop_limit: float = field(
    0.1, 'warn when a larger share is dropped', low=0.0, high=1.0
  )
  region: str = field(
    'tensor',
    "mesh axes that experts are sharded over: 'context+tensor'; '': none",
  )
  hierarchical: bool = field(
    False, 'exchange axis by axis of the region, not at once'
  )
  hot: int = field(
    0, 'most loaded experts, which all devices gather each step (Hecate)', low=0
  )
  balance: float = field(0.01, 'weight of the load-balancing loss', low=0.0)
  balance_scope: str = field(
    'step',
    'tokens over which loads are counted: a whole step (one more forward pass '
    'if it has several microbatches), or a sequence; running: the step before. '
    'What one device or one microbatch counts depends on the layout',
    ('sequence', 'device', 'microbatch', 'step', 'running'),
  )
  router_z: float = field(0.0, 'weight of the router z-loss', low=0.0)
  bias_rate: float = field(
    0.0, 'step of the balancing bias on scores; 0: no bias', low=0.0
  )


@dataclasses.dataclass(frozen=True)
class DecoderFields:
  """Fields of `Model` that belong to no mixer alone."""

  vocab_size: int = field(
    2048, 'rows of the embedding table', low=2, high=MOST_ROWS
  )
  d_model: int = field(
    160, 'width of the residual stream', low=1, high=MOST_WIDTH
  )
  num_layers: int = field(4, 'layers', low=1, high=MOST_LAYERS)
  num_heads: int = field(4, 'query heads', low=1, high=MOST_WIDTH)
  num_kv_heads: int = field(
    0, 'key/value heads; 0: num_heads', low=0, high=MOST_WIDTH
  )
  head_dim: int = field(
    0, 'width of a head; 0: d_model / num_heads', low=0, high=MOST_WIDTH
  )
  d_ff: int = field(432, 'hidden width of the mlp', low=1, high=MOST_WIDTH)
  pattern: str = field(
    'F',
    f'kinds of layers, repeated over the depth: {mixers.words()}; * is F; with '
    "a - anywhere only the kinds before one have an mlp: 'M-M-*-'",
  )
  visibility: str = field(
    'causal',
    'what a token sees of its document: causal: itself and those before it; '
    'block: all of its block of model.block tokens too; full: all. block and '
    'full are for layers of kind F and N',
    ('causal', 'block', 'full'),
  )
  block: int = field(
    0, 'tokens of a block of a document (model.visibility=block)', low=0
  )
  mask_id: int = field(
    -1,
    'token that stands for one to predict (train.objective), which no text '
    "has, such as the first id behind the tokenizer's; -1: none",
    low=-1,
  )
  mask_shift: bool = field(
    False, 'a mask is predicted at the token before it, not where it is'
  )
  features: int = field(
    0, 'numbers of a frame at a place of a row (models/frames.py); 0: none',
    low=0, high=MOST_WIDTH,
  )  # fmt: skip
  window: int = field(0, 'tokens a W layer sees, itself included', low=0)
  attention_chunk: int = field(
    0, 'tokens of a chunk of a document, of which a K layer sees its own', low=0
  )
  norm: str = field(
    'rmsnorm',
    'normalisation; unbiased: without bias; bare: without scale and bias '
    '(rmsnorm_bare: nor have queries and keys a scale)',
    (
      'rmsnorm', 'rmsnorm_bare', 'layernorm', 'layernorm_unbiased',
      'layernorm_bare',
    ),
  )  # fmt: skip
  embedding_norm: bool = field(False, 'a norm on the embeddings')
  residual: str = field(
    'sequential',
    'an mlp follows attention, or both read the same input: parallel with a '
    'norm each, shared with one norm',
    ('sequential', 'parallel', 'shared'),
  )
  wiring: str = field(
    'standard',
    'what layers read, and what is carried over the depth (models/wiring.py): '
    'standard: as residual says; parallel: as residual=parallel; ladder: what '
    'the part before the last one left, so that a sum over devices overlaps '
    'with the next part; groups: the layers of a group read the same; streams: '
    'standard, of copies of each row with prefix keys (models/streams.py)',
    ('standard', 'parallel', 'ladder', 'groups', 'streams'),
  )
  streams: int = field(
    0, 'copies of each row (model.wiring=streams); 1: no prefixes', low=0,
    high=64,
  )  # fmt: skip
  stream_prefix: int = field(
    48, 'keys and values of a stream before each row', low=1, high=MOST_WIDTH
  )
  groups: int = field(
    0, 'groups over the depth, of as many layers each (model.wiring=groups)',
    low=0, high=MOST_LAYERS,
  )  # fmt: skip
  residual_scale: float = field(
    1.0, 'multiplies what a part adds to the residual', low=0.0
  )
  norm_placement: str = field(
    'pre',
    'before a sublayer, after it (inside the residual), or both',
    ('pre', 'post', 'sandwich'),
  )
  norm_epsilon: float = field(1e-6, 'added to the variance', low=0.0)
  norm_zero_centered: bool = field(False, 'scale is 1 + weight (Gemma)')
  qk_norm: str = field(
    'none',
    'RMSNorm on queries and keys: per head, over all heads at once, or per '
    'head after the rotation; rotated_bare: so, without a scale, and none in '
    'layers that do not rotate',
    ('none', 'head', 'all', 'rotated', 'rotated_bare'),
  )
  mlp: str = field(
    'swiglu',
    'mlp form, exact: gelu by erf; none: no layer has one; clamped: SwiGLU of '
    'gpt-oss, by mlp_limit and mlp_slope; xielu: a parabola and an '
    'exponential, with learned slopes',
    (
      'swiglu', 'geglu', 'geglu_exact', 'gelu', 'gelu_exact', 'relu', 'relu2',
      'xielu', 'clamped', 'none',
    ),
  )  # fmt: skip
  mlp_limit: float = field(
    7.0, 'clamped: largest gate, and largest up either way', low=0.0
  )
  mlp_slope: float = field(1.702, 'clamped: of the sigmoid', low=0.0)
  experts: Experts = Experts()
  recurrence: Recurrence = Recurrence()
  attention_bias: bool = field(False, 'bias on the q, k, v projections')
  attention_gate: bool = field(
    False, 'the output of attention times sigmoid(x W), W a projection as of q'
  )
  attention_output_bias: bool = field(False, 'bias on the output projection')
  mlp_bias: bool = field(False, 'bias on the mlp projections')
  position: str = field(
    'rope', 'position encoding', ('rope', 'learned', 'none')
  )
  max_positions: int = field(
    0, 'rows of the learned position table; 0 with rope', low=0, high=MOST_ROWS
  )
  position_offset: int = field(
    0, 'row of the learned position table for the first token', low=0
  )
  rope_theta: float = field(1e4, 'rotary base', low=1.0)
  rope_fraction: float = field(
    1.0, 'share of a head that rotates: its first columns', low=0.0, high=1.0
  )
  rope_local_theta: float = field(
    0.0, 'rotary base of W layers; 0: rope_theta', low=0.0
  )
  rope_scaling: str = field(
    'none',
    'frequency scaling (not of W layers with a base of their own)',
    ('none', 'linear', 'llama3', 'yarn', 'longrope'),
  )
  rope_factor: float = field(1.0, 'context extension factor', low=1.0)
  rope_low_frequency: float = field(
    1.0, 'llama3: low_freq_factor; yarn: beta_slow', low=0.0
  )
  rope_high_frequency: float = field(
    4.0, 'llama3: high_freq_factor; yarn: beta_fast', low=0.0
  )
  rope_original_length: int = field(
    8192, 'tokens of context before the extension', low=1
  )
  rope_mscale: float = field(
    1.0,
    'yarn: scores are corrected by (0.1 x this x ln(factor) + 1)^2',
    low=0.0,
  )
  rope_truncate: bool = field(
    True, 'yarn: the ramp begins and ends at a whole dimension'
  )
  rope_short_factors: str = field(
    '', "longrope: what each frequency is divided by, '1.0,1.25', in rows of "
    'up to rope_original_length tokens',
  )  # fmt: skip
  rope_long_factors: str = field('', 'longrope: the same, where rope_long')
  rope_long: bool = field(
    False, 'longrope: take the long factors, whatever the length of a row'
  )
  rope_attention_factor: float = field(
    1.0, 'longrope: multiplies rotated queries and keys', low=0.0
  )
  tied_embedding: bool = field(True, 'the head is the embedding, transposed')
  head_bias: bool = field(False, 'bias on the logits')
  logit_scale: float = field(1.0, 'multiplies the logits', low=0.0)
  embedding_scale: float = field(1.0, 'multiplies the embeddings', low=0.0)
  attention_scale: float = field(
    0.0, 'multiplies q.k; 0: head_dim ** -0.5', low=0.0
  )
  query_growth: float = field(
    0.0, 'attention: at position p queries are multiplied by 1 + this x ln(1 + '
    'floor(p / rope_original_length))', low=0.0,
  )  # fmt: skip
  query_growth_kinds: str = field(
    'all',
    'layers of query_growth: all, or those without rotation, counting p from 1',
    ('all', 'unrotated'),
  )
  qkv_clip: float = field(
    0.0, 'attention: queries, keys, values are clipped to it; 0: off', low=0.0
  )
  sinks: bool = field(
    False, 'attention: a learned logit a head that takes weight, gives no value'
  )
  attention_softcap: float = field(
    0.0, 'scores become c tanh(s / c); 0: off', low=0.0
  )
  logit_softcap: float = field(
    0.0, 'logits become c tanh(z / c); 0: off', low=0.0
  )
  init_std: float = field(
    0.0, 'standard deviation of matrices; 0: fan_in ** -0.5', low=0.0
  )
  embedding_init_std: float = field(
    0.02, 'standard deviation of the embedding table', low=0.0
  )
  dtype: str = field(
    'float32',
    'arithmetic of the forward and backward pass',
    ('float32', 'bfloat16', 'float64'),
  )
  param_dtype: str = field(
    'float32',
    'storage of parameters and optimizer state',
    ('float32', 'float64'),
  )
  unroll: int = field(
    1, 'units of the pattern unrolled in the scan over layers', low=1
  )
  loss: str = field(
    'auto',
    'logits: all at once; chunked: at most 2**24 on a device at a time, '
    'recomputed in the backward pass; auto: chunked where a device has more '
    'and its vocabulary shard is at least 4 x d_model (train/loss.py)',
    ('auto', 'logits', 'chunked'),
  )
  attention: str = field('auto', 'attention kernel (paraxis doctor lists them)')
  attention_block: int = field(
    256, 'tokens in an attention block', low=1, high=MOST_LENGTH
  )
  scan: str = field('auto', 'kernel of gated scans (paraxis doctor lists them)')

  @property
  def head_width(self) -> int:
    """Width of an attention head, by default d_model / num_heads."""
    return self.head_dim or self.d_model // self.num_heads

  @property
  def group_layers(self) -> int:
    """Layers that read the same features (model.wiring=groups)."""
    return self.num_layers // self.groups if self.groups else 1

  @property
  def stream_copies(self) -> int:
    """Rows that are read for one; 0: it alone, as it stands."""
    return self.streams if self.streams > 1 else 0


@dataclasses.dataclass(frozen=True)
class Model(mixers.Sections, DecoderFields):
  """A decoder as data, which models/decoder.py builds.

  extra: of the whole configuration, config.extra (extra.py).
  """

  extra: Any = extra_lib.NOTHING
