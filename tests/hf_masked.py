"""Tiny masked models whose classes `transformers` has not, and their peers.

LLaDA is computed by its Llama, or by its Qwen2 where queries, keys and values
have a bias, Dream by its Qwen2: given a mask that hides nothing, and weights
under the names of their own files. A row is a whole config.json.

Legend: B rows, T tokens.
"""

import re
from typing import Any

import hf_tiny

V, D, N, K, F = hf_tiny.V, hf_tiny.D, hf_tiny.N, hf_tiny.K, hf_tiny.F
LLADA = dict(
  model_type='llada', architectures=['LLaDAModelLM'], activation_type='silu',
  alibi=False, alibi_bias_max=8.0, attention_dropout=0.0,
  attention_layer_norm=False, attention_layer_norm_with_affine=True,
  bias_for_layer_norm=False, block_group_size=1, block_type='llama', d_model=D,
  embedding_dropout=0.0, embedding_size=V, eos_token_id=2,
  flash_attention=False, include_bias=False, include_qkv_bias=False,
  init_cutoff_factor=None, init_device='meta', init_fn='mitchell',
  init_std=0.02, input_emb_norm=False, layer_norm_type='rms',
  layer_norm_with_affine=True, mask_token_id=V - 1, max_sequence_length=64,
  mlp_hidden_size=F, mlp_ratio=4, multi_query_attention=None, n_heads=N,
  n_kv_heads=K, n_layers=2, pad_token_id=2, precision='amp_bf16',
  residual_dropout=0.0, rms_norm_eps=1e-5, rope=True, rope_full_precision=True,
  rope_theta=5e5, scale_logits=False, use_cache=False, vocab_size=V,
  weight_tying=False,
)  # fmt: skip
DREAM = dict(
  model_type='Dream', architectures=['DreamModel'], attention_dropout=0.0,
  bos_token_id=1, eos_token_id=2, hidden_act='silu', hidden_size=D,
  initializer_range=0.02, intermediate_size=F, mask_token_id=V - 1,
  max_position_embeddings=64, max_window_layers=28, num_attention_heads=N,
  num_hidden_layers=2, num_key_value_heads=K, pad_token_id=2, rms_norm_eps=1e-6,
  rope_scaling=None, rope_theta=1e6, sliding_window=None,
  tie_word_embeddings=False, use_cache=True, use_mrope=False,
  use_sliding_window=False, vocab_size=V,
)  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
  'llada': LLADA,
  # One kv head, rows of the table that are no tokens, the mlp by its ratio.
  'llada_tied': LLADA | dict(
    include_qkv_bias=True, weight_tying=True, embedding_size=V + 16,
    multi_query_attention=True, n_kv_heads=None, mlp_hidden_size=None,
    mlp_ratio=2,
  ),
  'Dream': DREAM,
}  # fmt: skip
PEERS = dict(llada='llama', Dream='qwen2')  # of model_types
# Names of Llama's tensors, and of LLaDA's.
NAMES = {
  'model.embed_tokens': 'model.transformer.wte',
  'model.norm': 'model.transformer.ln_f',
  'lm_head': 'model.transformer.ff_out',
  'model.layers': 'model.transformer.blocks',
  'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ff_norm',
  'self_attn.o_proj': 'attn_out', 'self_attn': '', 'mlp.gate_proj': 'ff_proj',
  'mlp.up_proj': 'up_proj', 'mlp.down_proj': 'ff_out',
}  # fmt: skip


def called(kind, name):
  """The name in files of a model_type of a tensor of its peer."""
  if kind != 'llada':
    return name
  for theirs, own in NAMES.items():
    name = re.sub(rf'(^|\.){re.escape(theirs)}\.', rf'\g<1>{own}.', name)
  return name.replace('..', '.')


def peer_of(config):
  """Their config of the peer of a config.json."""
  import hf_peer  # skips without torch

  auto = hf_peer.transformers.AutoConfig
  if config['model_type'] != 'llada':
    kept = {k: x for k, x in config.items() if k not in _OF_DREAM}
    return auto.for_model('qwen2', **kept)
  heads = config['n_heads']
  one = config.get('multi_query_attention')
  bias = config['include_qkv_bias']
  return auto.for_model(
    'qwen2' if bias else 'llama',
    vocab_size=config['embedding_size'],
    hidden_size=config['d_model'],
    intermediate_size=config['mlp_hidden_size']
    or config['mlp_ratio'] * config['d_model'],
    num_hidden_layers=config['n_layers'],
    num_attention_heads=heads,
    num_key_value_heads=config['n_kv_heads'] or (1 if one else heads),
    rms_norm_eps=config['rms_norm_eps'],
    rope_parameters=dict(rope_type='default', rope_theta=config['rope_theta']),
    tie_word_embeddings=config['weight_tying'],
    max_position_embeddings=config['max_sequence_length'],
    pad_token_id=None,
  )


_OF_DREAM = (
  'model_type', 'architectures', 'mask_token_id', 'use_mrope', 'pad_token_id',
)  # fmt: skip


def computed(config, spread, data, hides=False):
  """(weights, gradients, logits) of a config.json, by names of its files.

  hides: what follows a token, as the peers themselves do.
  """
  import hf_peer

  kind, torch = config['model_type'], hf_peer.torch
  auto = hf_peer.transformers.AutoModelForCausalLM
  make = lambda: auto.from_config(
    peer_of(config), attn_implementation='eager'
  )  # fmt: skip
  model = hf_peer.randomised(make, spread, lambda name: called(kind, name))
  size = data.tokens.shape[1]
  shape = (len(data.tokens), 1, size, size)
  seen = torch.zeros(shape, dtype=torch.float64)  # added to scores
  mask = {} if hides else dict(attention_mask=seen)
  logits, weights, grads = hf_peer.gradients_of(model, data, **mask)
  named = lambda table: {called(kind, k): x for k, x in table.items()}
  return named(weights), named(grads), logits
