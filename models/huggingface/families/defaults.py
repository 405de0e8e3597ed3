"""What `transformers` takes for a field that a config.json does not have.

Only where it is neither null nor what a row (rows.py) takes by itself: a file
that says null means null. Fields that follow from others, as layer_types do,
are for the rows.

Source: the classes of configuration_*.py of transformers 5.23;
tests/models/huggingface/test_defaults.py compares both for every field of every
golden.
"""

from typing import Any

ROPE = ('rope_parameters', 'rope_scaling', 'rope_theta', 'rotary_emb_base')
_SOFT = dict(
  attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
  hidden_activation='gelu_pytorch_tanh', head_dim=256, num_key_value_heads=4,
)  # fmt: skip
_LLAMA3 = dict(
  rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)  # fmt: skip
_YARN = dict(
  rope_type='yarn', rope_theta=150000.0, factor=32.0, beta_fast=32.0,
  beta_slow=1.0, truncate=False, original_max_position_embeddings=4096,
)  # fmt: skip

FIELDS: dict[str, dict[str, Any]] = {
  'afmoe': dict(head_dim=128),
  'apertus': dict(rope_parameters=_LLAMA3 | dict(rope_theta=1.2e7, factor=8.0)),
  'bamba': dict(num_key_value_heads=8),
  'cohere': dict(rope_parameters=dict(rope_theta=5e5)),
  'cohere2_moe': dict(head_dim=128, sliding_window=4096),
  'cwm': dict(
    head_dim=128, num_key_value_heads=8,
    rope_parameters=_LLAMA3 | dict(rope_theta=1e6, factor=16.0),
  ),
  'deepseek_v2': dict(n_shared_experts=2, q_lora_rank=1536),
  'deepseek_v3': dict(
    first_k_dense_replace=3, n_group=8, n_shared_experts=1, q_lora_rank=1536,
    routed_scaling_factor=2.5, topk_group=4,
  ),
  'dots1': dict(
    norm_topk_prob=False, num_key_value_heads=32, sliding_window=4096
  ),
  'ernie4_5': dict(head_dim=128, num_key_value_heads=2),
  'ernie4_5_moe': dict(num_key_value_heads=4),
  'exaone4': dict(num_key_value_heads=32, sliding_window=4096),
  'exaone_moe': dict(
    num_key_value_heads=32, routed_scaling_factor=2.5, sliding_window=4096
  ),
  'flint': dict(head_dim=128, num_key_value_heads=4),
  'gemma': dict(head_dim=256, num_key_value_heads=16),
  'gemma2': _SOFT,
  'gemma3_text': dict(
    head_dim=256, hidden_activation='gelu_pytorch_tanh', num_key_value_heads=4
  ),
  'glm': dict(head_dim=128, num_key_value_heads=2),
  'glm4': dict(head_dim=128, num_key_value_heads=2),
  'glm4_moe': dict(
    first_k_dense_replace=1, n_shared_experts=1, num_key_value_heads=8
  ),
  'glm4_moe_lite': dict(
    n_shared_experts=1, q_lora_rank=768, routed_scaling_factor=1.8
  ),
  'gpt_oss': dict(
    attention_bias=True, head_dim=64, num_key_value_heads=8,
    rope_parameters=_YARN,
  ),
  'granite_swa': dict(num_key_value_heads=4),
  'helium': dict(
    head_dim=128, num_key_value_heads=20, rope_parameters=dict(rope_theta=1e5)
  ),
  'hy_v3': dict(head_dim=128, num_key_value_heads=8),
  'internlm3': dict(head_dim=128, num_key_value_heads=2),
  'iquestcoder': dict(head_dim=128, num_key_value_heads=8),
  'jamba': dict(num_key_value_heads=8),
  'lfm2': dict(num_key_value_heads=8),
  'lfm2_moe': dict(num_key_value_heads=8),
  'llama4_text': dict(num_key_value_heads=8),
  'mellum': dict(head_dim=128, norm_topk_prob=True, num_key_value_heads=4),
  'minicpm3': dict(dim_model_base=256, q_lora_rank=768, scale_depth=1.4),
  'minimax_m2': dict(head_dim=128, num_key_value_heads=8),
  'ministral': dict(num_key_value_heads=8, sliding_window=4096),
  'ministral3': dict(head_dim=128, num_key_value_heads=8),
  'mistral': dict(num_key_value_heads=8, sliding_window=4096),
  'mixtral': dict(num_key_value_heads=8),
  'nemotron_h': dict(head_dim=128, num_key_value_heads=8),
  'phi3': dict(
    max_position_embeddings=4096, original_max_position_embeddings=4096
  ),
  'qwen2': dict(num_key_value_heads=32, sliding_window=4096),
  'qwen2_moe': dict(num_key_value_heads=16, sliding_window=4096),
  'qwen3': dict(head_dim=128, num_key_value_heads=32, sliding_window=4096),
  'qwen3_5_moe_text': dict(head_dim=256, num_key_value_heads=2),
  'qwen3_5_text': dict(head_dim=256, num_key_value_heads=4),
  'qwen3_moe': dict(num_key_value_heads=4, sliding_window=4096),
  'qwen3_next': dict(head_dim=256, num_key_value_heads=2),
  'seed_oss': dict(head_dim=128, num_key_value_heads=8),
  'smollm3': dict(num_key_value_heads=4),
  'solar_open': dict(head_dim=128, n_shared_experts=1, num_key_value_heads=8),
  'stablelm': dict(num_key_value_heads=32),
  'starcoder2': dict(num_key_value_heads=2),
  'vaultgemma': _SOFT,
  'youtu': dict(q_lora_rank=1536),
}  # fmt: skip


def filled(config: dict[str, Any]) -> dict[str, Any]:
  """A config.json with the fields that it does not have."""
  usual = FIELDS.get(config['model_type'], {})
  if any(name in config for name in ROPE):
    usual = {k: x for k, x in usual.items() if k != 'rope_parameters'}
  return usual | config
