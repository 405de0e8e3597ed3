"""A GGUF file of a Llama-like model, as if it were a folder of Hugging Face.

Its tensors are dequantised to float32 by the package `gguf`. llama.cpp stores
the rows of a query or key head for rotary pairs (2i, 2i + 1); Hugging Face and
we turn (i, i + head_dim / 2), so the rows are put back: with them as stored the
model still answers, at 17 times the perplexity.

Source: the specification in github.com/ggml-org/ggml, docs/gguf.md.
"""

import functools
import importlib
import json
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from paraxis.configs.base import errors
from paraxis.models.huggingface import files

_TOP = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  'output.weight': 'lm_head.weight',
}
_LAYER = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_CONTROL = 3  # token type of special tokens
# Before the bytes: how a text is split, by the name of tokenizer.ggml.pre.
_SPLITS = {
  'smollm': lambda: [pre_tokenizers.Digits(individual_digits=True)],
  'gpt-2': lambda: [],
}


class Gguf(files.Files):
  """One .gguf file of the architecture `llama`."""

  def __init__(self, path):
    self.path = path.resolve()
    try:
      self._gguf: Any = importlib.import_module('gguf')
    except ImportError:
      raise errors.UserError(
        f"{path}: the package gguf is not installed: pip install 'gguf'."
      ) from None
    try:
      self._reader = self._gguf.GGUFReader(str(path))
    except (OSError, ValueError, KeyError, IndexError) as e:
      raise errors.UserError(f'{path} is not a GGUF file: {e}.') from e
    self.config = self._config()
    self._tensors = {self._name(t.name): t for t in self._reader.tensors}
    self.shapes = {
      name: tuple(int(n) for n in reversed(t.shape))
      for name, t in self._tensors.items()
    }
    self.config['tie_word_embeddings'] = 'lm_head.weight' not in self.shapes
    self.licence = self._field('general.license', '')
    self.template = self._field('tokenizer.chat_template', '')

  def _field(self, name, default: Any = None) -> Any:
    field = self._reader.fields.get(name)
    if field is not None:
      return field.contents()
    if default is None:
      raise errors.UserError(f'{self.path} has no field {name}.')
    return default

  def _config(self):
    """What config.json would be."""
    kind = self._field('general.architecture')
    if kind != 'llama':
      raise errors.UserError(
        f'{self.path}: general.architecture is {kind!r}; GGUF files are read '
        "of 'llama' only. Take the folder of safetensors."
      )
    scaling = self._field('llama.rope.scaling.type', 'none')
    if scaling != 'none' or 'rope_freqs.weight' in {
      t.name for t in self._reader.tensors
    }:
      raise errors.UserError(
        f'{self.path} scales rotary frequencies ({scaling}); of GGUF files '
        'only plain ones are read. Take the folder of safetensors.'
      )
    heads = self._field('llama.attention.head_count')
    width = self._field('llama.embedding_length')
    # 1e-5 is stored as a float32; its shortest decimal is what was meant.
    epsilon = self._field('llama.attention.layer_norm_rms_epsilon')
    return dict(
      model_type='llama',
      architectures=['LlamaForCausalLM'],
      hidden_act='silu',
      vocab_size=len(self._field('tokenizer.ggml.tokens')),
      hidden_size=width,
      intermediate_size=self._field('llama.feed_forward_length'),
      num_hidden_layers=self._field('llama.block_count'),
      num_attention_heads=heads,
      num_key_value_heads=self._field('llama.attention.head_count_kv', heads),
      head_dim=self._field('llama.attention.key_length', width // heads),
      rms_norm_eps=float(str(np.float32(epsilon))),
      rope_theta=float(self._field('llama.rope.freq_base', 1e4)),
      max_position_embeddings=self._field('llama.context_length'),
      bos_token_id=self._field('tokenizer.ggml.bos_token_id'),
      eos_token_id=self._field('tokenizer.ggml.eos_token_id'),
      attention_bias=False,
      mlp_bias=False,
    )

  def _name(self, name):
    """The tensor's name in a folder of Hugging Face."""
    if name in _TOP:
      return _TOP[name]
    block, _, rest = name.removeprefix('blk.').partition('.')
    part, _, kind = rest.partition('.')
    if block.isdecimal() and part in _LAYER and kind == 'weight':
      return f'model.layers.{block}.{_LAYER[part]}.weight'
    raise errors.UserError(f'{self.path} has a tensor {name}: not a Llama.')

  def read(self, name):
    tensor = self._tensors[name]
    try:
      found = self._gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as e:
      raise errors.UserError(
        f'{self.path}: {tensor.name} is of type {tensor.tensor_type.name}, '
        'which the package gguf does not dequantise.'
      ) from e
    found = np.asarray(found, np.float32).reshape(self.shapes[name])
    config = self.config
    heads = {
      'q_proj': config['num_attention_heads'],
      'k_proj': config['num_key_value_heads'],
    }.get(name.split('.')[-2])
    return _half_rotary(found, heads) if heads else found

  @functools.cached_property
  def _text(self):
    kind = self._field('tokenizer.ggml.model')
    split = self._field('tokenizer.ggml.pre', 'gpt-2')
    if kind != 'gpt2' or split not in _SPLITS:
      return ''
    tokens = self._field('tokenizer.ggml.tokens')
    merges = [tuple(m.split(' ')) for m in self._field('tokenizer.ggml.merges')]
    made: Any = tokenizers.Tokenizer(
      models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
      [*_SPLITS[split](), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = self._field('tokenizer.ggml.token_type')
    special = zip(tokens, types, strict=True)
    made.add_special_tokens([t for t, n in special if n == _CONTROL])
    return json.dumps(json.loads(made.to_str()), ensure_ascii=False)

  def tokenizer(self):
    """tokenizer.json of a byte-level BPE; '': of another kind."""
    return self._text


def _half_rotary(rows, heads):
  """(heads * d, n), each head's pairs side by side -> in its two halves."""
  pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)
