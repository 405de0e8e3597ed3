"""A GGUF file of a dense model, as if it were a folder of Hugging Face.

    model_type     q, k        norms       layers with a window; without rotary
    llama          in pairs
    qwen2, qwen3
    smollm3        in pairs                -; every fourth
    gemma2                     1 + scale   1, 3, 5, ...; -
    gemma3                     1 + scale   five of six; -

In pairs: llama.cpp stores the rows of a query or key head for rotary pairs
(2i, 2i + 1); Hugging Face and we turn (i, i + head_dim / 2), so the rows are
put back: with them as stored a model still answers, at 17 times the perplexity.
What no field says is what llama.cpp takes for that architecture.

Source: the specification in github.com/ggml-org/ggml, docs/gguf.md;
convert_hf_to_gguf.py and llama-model.cpp in github.com/ggml-org/llama.cpp.
"""

import collections
import functools
import json
import math
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from paraxis.configs.base import errors
from paraxis.models.huggingface import files
from paraxis.models.huggingface import gguf_container

_TOP = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
}
_HEAD = 'output.weight'  # where it is not the embedding
_LAYER = {
  'attn_norm.weight': 'input_layernorm.weight',
  'attn_q.weight': 'self_attn.q_proj.weight',
  'attn_k.weight': 'self_attn.k_proj.weight',
  'attn_v.weight': 'self_attn.v_proj.weight',
  'attn_output.weight': 'self_attn.o_proj.weight',
  'ffn_norm.weight': 'post_attention_layernorm.weight',
  'ffn_gate.weight': 'mlp.gate_proj.weight',
  'ffn_up.weight': 'mlp.up_proj.weight',
  'ffn_down.weight': 'mlp.down_proj.weight',
}
_BIASES = {
  f'attn_{x}.bias': f'self_attn.{x}_proj.bias' for x in ('q', 'k', 'v')
}
_NORMS = {
  f'attn_{x}_norm.weight': f'self_attn.{x}_norm.weight' for x in ('q', 'k')
}
_SANDWICH = {
  'post_attention_norm.weight': 'post_attention_layernorm.weight',
  'ffn_norm.weight': 'pre_feedforward_layernorm.weight',
  'post_ffw_norm.weight': 'post_feedforward_layernorm.weight',
}


class _Kind(NamedTuple):
  """An architecture.

  model_type, architecture: of Hugging Face. more: tensors of a layer, beside
  Llama's. fixed: of config.json. pairs: whether rows of q and k lie in pairs.
  """

  model_type: str
  architecture: str
  more: dict[str, str]
  fixed: dict[str, Any]
  pairs: bool = False


_SILU = dict(hidden_act='silu')
_PLAIN = _SILU | dict(attention_bias=False, mlp_bias=False)
_GELU = dict(hidden_activation='gelu_pytorch_tanh')
_KINDS = {
  'llama': _Kind('llama', 'LlamaForCausalLM', {}, _PLAIN, True),
  'qwen2': _Kind('qwen2', 'Qwen2ForCausalLM', _BIASES, _SILU),
  'qwen3': _Kind(
    'qwen3', 'Qwen3ForCausalLM', _NORMS, _SILU | dict(attention_bias=False)
  ),
  'smollm3': _Kind('smollm3', 'SmolLM3ForCausalLM', {}, _PLAIN, True),
  'gemma2': _Kind('gemma2', 'Gemma2ForCausalLM', _SANDWICH, _GELU),
  'gemma3': _Kind(
    'gemma3_text', 'Gemma3ForCausalLM', _SANDWICH | _NORMS, _GELU
  ),
}
_GEMMA = ('gemma2', 'gemma3')  # norms are stored as 1 + scale
_LARGEST = {'gemma2': 46, 'gemma3': 62}  # layers of the 27B
_NUMBER = (int, float)
_CONTROL = 3  # token type of special tokens
# Before the bytes: how a text is split, by the name of tokenizer.ggml.pre.
_SPLITS: dict[str, Any] = {
  'smollm': lambda: [pre_tokenizers.Digits(individual_digits=True)],
  'gpt-2': lambda: [],
}


class Gguf(files.Files):
  """One .gguf file.

  Raises:
    errors.UserError: as gguf_container.Container; another architecture;
      tensors that are missing or too many, each named; fields that are missing
      or no model here expresses; ids beyond the vocabulary.
  """

  def __init__(self, path):
    self.path = path.resolve()
    self._file = gguf_container.Container(self.path)
    self._name = self._field('general.architecture', kind=str)
    if self._name not in _KINDS:
      raise errors.UserError(
        f'{self.path}: general.architecture is {self._name[:60]!r}; GGUF files '
        f'are read of {", ".join(_KINDS)}. Take the folder of safetensors.'
      )
    self._kind = _KINDS[self._name]
    self._depth = self._own('block_count', kind=int)
    self._tensors = self._renamed()
    self.shapes = {name: t.shape for name, t in self._tensors.items()}
    self.config = self._config() | self._scaling() | self._layers()
    self._check_ids()
    self.licence = self._field('general.license', '', str)
    self.template = self._field('tokenizer.chat_template', '', str)
    adds = 'tokenizer.ggml.add_bos_token'
    if adds in self._file.fields:
      self.adds_bos = self._field(adds, kind=bool)
    forms = [t.form for t in self._tensors.values()]
    few = (form.name for form in forms if form.size < form.values)
    self.quantized = collections.Counter(few)
    numbers = collections.Counter()
    for t in self._tensors.values():
      numbers[t.form.name] += math.prod(t.shape)
    self.half = files.half(numbers)

  def _field(self, name, default: Any = None, kind: Any = object) -> Any:
    """A field; UserError: not there, without a default, or of another type."""
    found = self._file.fields.get(name, default)
    if found is None:
      raise errors.UserError(f'{self.path} has no field {name}.')
    if not isinstance(found, kind) or (kind is int and found is True):
      raise errors.UserError(
        f'{self.path}: field {name} is {str(found)[:60]!r}, a '
        f'{type(found).__name__}, which is not read here.'
      )
    return found

  def _own(self, name, default: Any = None, kind: Any = _NUMBER) -> Any:
    """A field of the architecture."""
    return self._field(f'{self._name}.{name}', default, kind)

  def _renamed(self):
    """{name in a folder of Hugging Face: gguf_container.Tensor}."""
    found = self._file.tensors
    if self._depth > len(found):
      raise errors.UserError(
        f'{self.path}: {self._name}.block_count is {self._depth}, and the file '
        f'has {len(found)} tensors.'
      )
    layer = (_LAYER | self._kind.more).items()
    names = _TOP | {
      f'blk.{i}.{here}': f'model.layers.{i}.{there}'
      for i in range(self._depth)
      for here, there in layer
    }
    missing = [name for name in names if name not in found]
    names[_HEAD] = 'lm_head.weight'
    rest = [name for name in found if name not in names]
    for bad, what in ((missing, 'lacks'), (rest, 'has, unused,')):
      if bad:
        raise errors.UserError(
          f'{self.path} {what} {len(bad)} tensors of {self._depth} layers of '
          f'{self._name}: {files.grouped(bad)}. Take the folder of safetensors.'
        )
    return {names[name]: tensor for name, tensor in found.items()}

  def _config(self):
    """What config.json would be, of what all architectures have."""
    heads = self._own('attention.head_count', kind=int)
    width = self._own('embedding_length', kind=int)
    head = self._own('attention.key_length', width // max(heads, 1), int)
    for name in ('attention.value_length', 'rope.dimension_count'):
      if self._own(name, head) != head:
        raise errors.UserError(
          f'{self.path}: {self._name}.{name} is {self._own(name)}; of GGUF '
          f'files only those with the {head} of a key are read. Take the '
          'folder of safetensors.'
        )
    ends = [
      self._field(f'tokenizer.ggml.{name}_token_id', -1, int)
      for name in ('eos', 'eot')
    ]
    return self._kind.fixed | dict(
      model_type=self._kind.model_type,
      architectures=[self._kind.architecture],
      vocab_size=len(self._field('tokenizer.ggml.tokens', kind=list)),
      hidden_size=width,
      intermediate_size=self._own('feed_forward_length', kind=int),
      num_hidden_layers=self._depth,
      num_attention_heads=heads,
      num_key_value_heads=self._own('attention.head_count_kv', heads, int),
      head_dim=head,
      rms_norm_eps=_decimal(self._own('attention.layer_norm_rms_epsilon')),
      rope_theta=float(self._own('rope.freq_base', 1e4)),
      max_position_embeddings=self._own('context_length', kind=int),
      bos_token_id=self._field('tokenizer.ggml.bos_token_id', -1, int),
      eos_token_id=[i for i in dict.fromkeys(ends) if i >= 0],
      tie_word_embeddings='lm_head.weight' not in self.shapes,
    )

  def _scaling(self):
    """rope_scaling, or nothing; UserError: neither linear nor none.

    A file with a factor and no type is linear, as it is for llama.cpp; files
    before the type have the factor as rope.scale_linear.
    """
    kind = self._own('rope.scaling.type', 'linear', str)
    if kind not in ('none', 'linear'):
      raise errors.UserError(
        f'{self.path} scales rotary frequencies ({kind[:60]!r}); of GGUF files '
        'only plain and linear ones are read. Take the folder of safetensors.'
      )
    old = self._own('rope.scale_linear', 0.0)
    factor = float(self._own('rope.scaling.factor', old))
    if kind == 'none' or factor in (0, 1):
      return {}
    return dict(rope_scaling=dict(rope_type='linear', factor=factor))

  def _layers(self):
    """What differs from layer to layer, and Gemma's scales and caps."""
    every = lambda step: [int((i + 1) % step != 0) for i in range(self._depth)]
    if self._name == 'smollm3':
      return dict(no_rope_layers=every(4))
    if self._name not in _GEMMA:
      return {}
    old = self._name == 'gemma2'
    window = self._own('attention.sliding_window', 4096 if old else 0, int)
    layers = every(2 if old else 6) if window else [0] * self._depth
    kinds = 'full_attention', 'sliding_attention'
    width, heads = self._own('embedding_length'), self._own(
      'attention.head_count'
    )  # fmt: skip
    share = width // max(heads, 1)
    largest = self._depth == _LARGEST[self._name]
    out = dict(
      layer_types=[kinds[inside] for inside in layers],
      sliding_window=window or None,
      query_pre_attn_scalar=share
      if largest
      else self._own('attention.key_length', share),
    )
    if not old:
      out['rope_local_base_freq'] = float(self._own('rope.freq_base_swa', 1e4))
    for name, cap in (('attn', 50.0), ('final', 30.0)):
      name = f'{name}_logit_softcapping'
      out[name] = float(self._own(name, cap if old else 0.0)) or None
    return out

  def _check_ids(self):
    """UserError: ids that name no row of the embedding."""
    vocab = self.config['vocab_size']
    rows = self.shapes['model.embed_tokens.weight'][0]
    if rows != vocab:
      raise errors.UserError(
        f'{self.path}: tokenizer.ggml.tokens are {vocab:,}, and '
        f'token_embd.weight has {rows:,} rows: they do not belong together.'
      )
    for name in ('bos', 'eos', 'eot'):
      field = f'tokenizer.ggml.{name}_token_id'
      if (found := self._field(field, 0, int)) >= vocab:
        raise errors.UserError(
          f'{self.path}: {field} is {found:,}, and the vocabulary has '
          f'{vocab:,} ids: the file is damaged.'
        )

  def read(self, name):
    found = self._file.read(self._tensors[name])
    if self._name in _GEMMA and name.endswith('norm.weight'):
      return found - 1
    heads = {
      'q_proj': self.config['num_attention_heads'],
      'k_proj': self.config['num_key_value_heads'],
    }.get(name.split('.')[-2])
    return _half_rotary(found, heads) if heads and self._kind.pairs else found

  @functools.cached_property
  def _text(self):
    kind = self._field('tokenizer.ggml.model')
    split = self._field('tokenizer.ggml.pre', 'gpt-2')
    if kind != 'gpt2' or split not in _SPLITS:
      return ''
    tokens = self._field('tokenizer.ggml.tokens')
    types = self._field('tokenizer.ggml.token_type', kind=list)
    merges = self._field('tokenizer.ggml.merges', kind=list)
    try:
      kinds = zip(tokens, types, strict=True)
      special = [token for token, of in kinds if of == _CONTROL]
      made = _byte_level(tokens, merges, special, _SPLITS[split]())
    except Exception as e:  # the library raises bare Exception
      raise errors.UserError(
        f'{self.path}: its tokenizer is damaged: {" ".join(str(e).split())}.'
      ) from e
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False)

  def tokenizer(self):
    """tokenizer.json of a byte-level BPE; '': of another kind."""
    return self._text


def _byte_level(tokens, merges, special, splits) -> Any:
  """tokenizers.Tokenizer of a byte-level BPE."""
  made: Any = tokenizers.Tokenizer(
    models.BPE(
      vocab={t: i for i, t in enumerate(tokens)},
      merges=[tuple(pair.split(' ')) for pair in merges],
    )
  )
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
  )
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(special)
  return made


def _decimal(x):
  """1e-5 is stored as a float32; its shortest decimal is what was meant."""
  return float(str(np.float32(x)))


def _half_rotary(rows, heads):
  """(heads * d, n), each head's pairs side by side -> in its two halves."""
  pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)
