"""GGUF files of tiny models, beside the folder that transformers would read.

What llama.cpp's converter does to a folder is written here in loops: names,
rows of heads in pairs, Gemma's norms with 1 added.
"""

import json

import gguf
import numpy as np
from safetensors import numpy as safetensors

HEADS, KV_HEADS, HEAD, D, F, V = 4, 2, 8, 16, 24, 40
LAYERS = 7  # one beyond the period of every family
TOKENS = [f't{i}' for i in range(V)]
CONFIG = dict(
  vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS,
  num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD,
  rms_norm_eps=1e-5, max_position_embeddings=64, eos_token_id=3,
)  # fmt: skip
_GEMMA = dict(
  hidden_activation='gelu_pytorch_tanh', sliding_window=5,
  query_pre_attn_scalar=HEAD, tie_word_embeddings=True,
)  # fmt: skip
_UNTIED = dict(hidden_act='silu', tie_word_embeddings=False)
_THETA = dict(rope_theta=5e5)
# Architecture of GGUF -> config.json beside CONFIG.
FAMILIES = {
  'llama': _UNTIED | _THETA | dict(model_type='llama'),
  'qwen2': _UNTIED | _THETA | dict(model_type='qwen2'),
  'qwen3': _UNTIED | _THETA | dict(model_type='qwen3'),
  'smollm3': _UNTIED
  | _THETA
  | dict(model_type='smollm3', no_rope_layers=[1, 1, 1, 0, 1, 1, 1]),
  'gemma2': _GEMMA
  | dict(
    model_type='gemma2', attn_logit_softcapping=20.0,
    final_logit_softcapping=10.0, rope_theta=1e4,
    layer_types=['sliding_attention', 'full_attention'] * 3
    + ['sliding_attention'],
  ),
  'gemma3': _GEMMA
  | _THETA
  | dict(
    model_type='gemma3_text', rope_local_base_freq=1e4,
    layer_types=['sliding_attention'] * 5
    + ['full_attention', 'sliding_attention'],
  ),
}  # fmt: skip
_NAMES = {
  'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
  'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm',
  'self_attn.o_proj': 'attn_output', 'post_attention_layernorm': 'ffn_norm',
  'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}  # fmt: skip
_GEMMA_NAMES = _NAMES | {
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}


def tensors(kind):
  """{name in a folder: float32 array}; norms are multiples of 2^-6."""
  wide, narrow = HEADS * HEAD, KV_HEADS * HEAD
  shapes = {'model.embed_tokens.weight': (V, D), 'model.norm.weight': (D,)}
  if not FAMILIES[kind]['tie_word_embeddings']:
    shapes['lm_head.weight'] = (V, D)
  layer = {
    'self_attn.q_proj.weight': (wide, D),
    'self_attn.k_proj.weight': (narrow, D),
    'self_attn.v_proj.weight': (narrow, D),
    'self_attn.o_proj.weight': (D, wide), 'mlp.gate_proj.weight': (F, D),
    'mlp.up_proj.weight': (F, D), 'mlp.down_proj.weight': (D, F),
    'input_layernorm.weight': (D,), 'post_attention_layernorm.weight': (D,),
  }  # fmt: skip
  if kind == 'qwen2':
    layer |= {
      'self_attn.q_proj.bias': (wide,), 'self_attn.k_proj.bias': (narrow,),
      'self_attn.v_proj.bias': (narrow,),
    }  # fmt: skip
  if kind in ('qwen3', 'gemma3'):
    layer |= {f'self_attn.{x}_norm.weight': (HEAD,) for x in 'qk'}
  if kind.startswith('gemma'):
    layer |= {
      f'{x}_feedforward_layernorm.weight': (D,) for x in ('pre', 'post')
    }
  for i in range(LAYERS):
    shapes |= {f'model.layers.{i}.{name}': s for name, s in layer.items()}
  rng = np.random.default_rng(0)
  return {
    name: rng.integers(-64, 64, shape).astype('f4') / 64
    if 'norm' in name
    else rng.normal(0, 0.4, shape).astype('f4')
    for name, shape in shapes.items()
  }


def in_pairs(rows, heads):
  """llama.cpp's order of the rows of a head: 0, d/2, 1, d/2 + 1, ..."""
  out, head = np.empty_like(rows), len(rows) // heads
  for h in range(heads):
    for i in range(head // 2):
      out[h * head + 2 * i] = rows[h * head + i]
      out[h * head + 2 * i + 1] = rows[h * head + head // 2 + i]
  return out


def converted(kind, name, x):
  """(name, array) in a GGUF file of a tensor of a folder."""
  top = {'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm',
         'lm_head': 'output'}  # fmt: skip
  stem, _, ending = name.rpartition('.')
  if kind.startswith('gemma') and 'norm' in name:
    x = x + 1
  if stem in top:
    return f'{top[stem]}.{ending}', x
  _, _, block, part = stem.split('.', 3)
  if kind in ('llama', 'smollm3') and part in (
    'self_attn.q_proj', 'self_attn.k_proj'
  ):  # fmt: skip
    x = in_pairs(x, HEADS if 'q_proj' in part else KV_HEADS)
  names = _GEMMA_NAMES if kind.startswith('gemma') else _NAMES
  return f'blk.{block}.{names[part]}.{ending}', x


def folder(path, kind):
  """A folder of Hugging Face; files.Folder reads it."""
  path.mkdir()
  config = CONFIG | FAMILIES[kind]
  (path / 'config.json').write_text(json.dumps(config))
  safetensors.save_file(tensors(kind), str(path / 'model.safetensors'))


def fields(kind):
  """{key: value} of the metadata that llama.cpp's converter writes."""
  config = CONFIG | FAMILIES[kind]
  theirs = {
    'embedding_length': D, 'feed_forward_length': F, 'block_count': LAYERS,
    'context_length': 64, 'attention.head_count': HEADS,
    'attention.head_count_kv': KV_HEADS, 'attention.key_length': HEAD,
    'attention.value_length': HEAD, 'attention.layer_norm_rms_epsilon': 1e-5,
  }  # fmt: skip
  if kind != 'gemma2':  # its converter writes none
    theirs['rope.freq_base'] = config['rope_theta']
  for name in ('attn_logit_softcapping', 'final_logit_softcapping'):
    if name in config:
      theirs[name] = config[name]
  if kind.startswith('gemma'):
    theirs['attention.sliding_window'] = config['sliding_window']
  return {f'{kind}.{name}': value for name, value in theirs.items()} | {
    'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.tokens': TOKENS,
    'tokenizer.ggml.eos_token_id': 3, 'tokenizer.ggml.bos_token_id': 2,
  }  # fmt: skip


def write(path, kind, drop=(), rename=None, more=None, **changed):
  """The same model as `folder`, in one GGUF file.

  drop: names of tensors that it lacks. rename: {name: another}. more: {name:
  array} beside them. changed: fields, '__' for '.'; None: left out.
  """
  writer = gguf.GGUFWriter(str(path), kind)
  found = fields(kind)
  found |= {key.replace('__', '.'): value for key, value in changed.items()}
  for key, value in found.items():
    if isinstance(value, list):
      writer.add_array(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif value is not None:
      writer.add_float32(key, value)
  kept = dict(converted(kind, *pair) for pair in tensors(kind).items())
  for name, x in (kept | (more or {})).items():
    if name not in drop:
      writer.add_tensor((rename or {}).get(name, name), np.ascontiguousarray(x))
  _finish(writer)


def requantised(source, path, kind):
  """A copy of a GGUF file whose matrices are of another type, by name."""
  reader = gguf.GGUFReader(str(source))
  type_ = gguf.GGMLQuantizationType[kind]
  arch = reader.fields['general.architecture'].contents()
  writer = gguf.GGUFWriter(str(path), arch)
  for key, field in reader.fields.items():
    if key.startswith('GGUF.') or key == 'general.architecture':
      continue
    inner = field.types[-1] if len(field.types) > 1 else None
    writer.add_key_value(key, field.contents(), field.types[0], inner)
  for t in reader.tensors:
    x = gguf.dequantize(t.data, t.tensor_type).astype('f4')
    x = x.reshape([int(n) for n in reversed(t.shape)])
    if x.ndim == 1:
      writer.add_tensor(t.name, x)
    else:
      writer.add_tensor(t.name, gguf.quantize(x, type_), raw_dtype=type_)
  _finish(writer)


def _finish(writer):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
