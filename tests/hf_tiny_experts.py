"""Tiny models of `transformers` that are not dense: rows as in hf_tiny.py."""

MOE = dict(num_experts=8, num_experts_per_tok=3, spread=0.5)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=3, spread=0.5)
ROUTED = dict(
  n_routed_experts=8, moe_intermediate_size=8, num_experts_per_tok=3,
  n_shared_experts=2, routed_scaling_factor=1.5, num_hidden_layers=3,
  spread=0.5,
)  # fmt: skip
DENSE_FIRST = ROUTED | dict(first_k_dense_replace=1)
MLA = dict(
  num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6,
  qk_rope_head_dim=4, v_head_dim=5, head_dim=4,
)  # fmt: skip


def yarn(mscale):
  """YaRN as DeepSeek's, whose mscale and mscale_all_dim are equal."""
  rope = dict(
    rope_type='yarn', rope_theta=100.0, factor=8.0, beta_fast=32.0,
    beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale,
    original_max_position_embeddings=16,
  )  # fmt: skip
  return dict(rope_parameters=rope, max_position_embeddings=128)


GROUPS = dict(n_group=4, topk_group=2)
SSM = dict(state_size=6, conv_kernel=4, expand=2)
JAMBA = dict(mamba_d_state=6, mamba_dt_rank=3)
GRANITE = LOCAL | dict(
  intermediate_size=8, embedding_multiplier=3.0, attention_multiplier=0.3,
  residual_multiplier=0.4, logits_scaling=2.0,
)  # fmt: skip
LLAMA4 = LOCAL | dict(
  num_hidden_layers=4, no_rope_layer_interval=2, interleave_moe_layer_step=2,
  intermediate_size=8, intermediate_size_mlp=24, attention_chunk_size=5,
  floor_scale=16, attn_scale=0.5,
  rope_parameters=dict(
    rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
    high_freq_factor=4.0, original_max_position_embeddings=16,
  ),
)  # fmt: skip
HYBRID = dict(
  mamba_n_heads=8, mamba_d_head=4, mamba_d_state=6, mamba_chunk_size=8
)
NEMOTRON = dict(
  mamba_num_heads=6, mamba_head_dim=4, n_groups=2, ssm_state_size=6,
  chunk_size=8, moe_intermediate_size=8, num_experts_per_tok=3,
  moe_shared_expert_intermediate_size=16, spread=0.5,
)  # fmt: skip
CONV = dict(num_hidden_layers=3, layer_types=['conv', 'full_attention', 'conv'])

DELTA = dict(
  linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
  linear_value_head_dim=5, linear_conv_kernel_dim=3, num_hidden_layers=3,
  layer_types=['linear_attention', 'full_attention', 'linear_attention'],
)  # fmt: skip

ZAMBA2 = dict(
  n_mamba_heads=4, mamba_d_state=4, chunk_size=8, adapter_rank=3,
  num_key_value_heads=4,
)  # fmt: skip
EXPERTS = {
  'mixtral': LOCAL,
  'olmoe': MOE,
  'flex_olmo': MOE,
  'qwen2_moe': MOE
  | dict(moe_intermediate_size=12, shared_expert_intermediate_size=24),
  'qwen3_moe': MOE | dict(moe_intermediate_size=12, mlp_only_layers=[1]),
  'dots1': DENSE_FIRST
  | dict(norm_topk_prob=True, sliding_window=5, max_window_layers=1),
  'deepseek_v2': DENSE_FIRST | MLA | yarn(0.707),
  'deepseek_v2_grouped': DENSE_FIRST
  | MLA
  | GROUPS
  | dict(
    model_type='deepseek_v2', topk_method='group_limited_greedy',
    q_lora_rank=None,
  ),
  'deepseek_v3': DENSE_FIRST | MLA | yarn(1.0) | GROUPS,
  'glm4_moe_lite': ROUTED | MLA,
  'minimax_m2': LOCAL | dict(intermediate_size=8),
  'solar_open': ROUTED,
  'hunyuan_v1_moe': dict(num_experts=8, moe_topk=3, spread=0.5),
  'mamba': SSM | dict(time_step_rank=3),
  'mamba2': SSM | dict(num_heads=8, head_dim=4, n_groups=2, chunk_size=8),
  'falcon_mamba': SSM | dict(time_step_rank=3),
  'gpt_oss': LOCAL | dict(intermediate_size=8, sliding_window=5),
  'gpt_oss_clamped': LOCAL
  | dict(model_type='gpt_oss', intermediate_size=8, swiglu_limit=0.5),
  'youtu': MLA | dict(num_hidden_layers=2),
  'mellum': MOE
  | dict(
    moe_intermediate_size=8, num_hidden_layers=3, sliding_window=5,
    layer_types=['sliding_attention', 'full_attention', 'sliding_attention'],
    mlp_layer_types=['sparse', 'dense', 'sparse'],
  ),
  'hy_v3': MOE | dict(moe_intermediate_size=8, num_shared_experts=2),
  'exaone_moe': MOE
  | GROUPS
  | dict(
    moe_intermediate_size=8, num_shared_experts=2, sliding_window=5,
    sliding_window_pattern=2,
  ),
  'glm4_moe': DENSE_FIRST
  | dict(
    use_qk_norm=True, attention_bias=True,
    rope_parameters=dict(
      rope_type='default', rope_theta=1e4, partial_rotary_factor=1.0
    ),
  ),
  'granitemoe': GRANITE,
  'granitemoeshared': GRANITE | dict(shared_intermediate_size=16),
  'granitemoehybrid': GRANITE
  | HYBRID
  | dict(
    shared_intermediate_size=16, position_embedding_type='rope',
    num_hidden_layers=3,
    layer_types=['linear_attention', 'full_attention', 'linear_attention'],
  ),
  'granitemoehybrid_dense': HYBRID
  | dict(
    model_type='granitemoehybrid', num_local_experts=0,
    shared_intermediate_size=24, mamba_n_groups=2,
    layer_types=['linear_attention', 'full_attention'],
  ),
  'bamba': HYBRID
  | dict(mamba_n_groups=2, num_hidden_layers=3, attn_layer_indices=[1]),
  'nemotron_h': NEMOTRON
  | dict(layers_block_type=[*'mamba mlp mamba attention mlp mamba'.split()]),
  'nemotron_h_experts': NEMOTRON
  | dict(
    model_type='nemotron_h', n_group=4, topk_group=2,
    routed_scaling_factor=1.5,
    layers_block_type=[*'mamba moe mamba attention moe'.split()],
  ),
  'lfm2': CONV | dict(block_multiple_of=8),
  'recurrent_gemma': dict(
    hidden_size=24, num_hidden_layers=3, lru_width=16, attention_window_size=5,
    intermediate_size=32, logits_soft_cap=1.5, attention_bias=True,
    num_attention_heads=2, num_key_value_heads=1,
  ),
  'lfm2_moe': CONV
  | MOE
  | dict(
    moe_intermediate_size=8, num_dense_layers=1, routed_scaling_factor=1.5
  ),
  'ernie4_5_moe': dict(
    moe_num_experts=8, moe_k=3, moe_intermediate_size=8, num_hidden_layers=3,
    spread=0.5,
  ),
  'aria_text': dict(
    moe_num_experts=8, moe_topk=3, intermediate_size=8, spread=0.5
  ),
  'cohere2_moe': MOE
  | dict(
    num_hidden_layers=4, intermediate_size=8, sliding_window=5,
    num_shared_experts=2, expert_selection_fn='sigmoid', norm_topk_prob=False,
    prefix_dense_intermediate_size=24,
    mlp_layer_types=['dense', *['sparse'] * 3],
    layer_types=['full_attention', *['sliding_attention'] * 2,
                 'full_attention'],
  ),
  'cohere2_moe_softmax': MOE
  | dict(
    model_type='cohere2_moe', num_hidden_layers=4, intermediate_size=8,
    sliding_window=5, rms_norm_eps=1e-5, num_shared_experts=1,
    shared_expert_combination_strategy='sum',
  ),
  'flint': MOE
  | dict(
    moe_intermediate_size=8, shared_expert_intermediate_size=16,
    num_hidden_layers=4, sliding_window=5, mlp_only_layers=[0],
  ),
  'llama4_text': LLAMA4,
  'llama4_text_plain': LLAMA4
  | dict(
    model_type='llama4_text', use_qk_norm=False, attn_temperature_tuning=False,
    interleave_moe_layer_step=1, num_experts_per_tok=1, rope_parameters=None,
  ),
  'granitemoe_swa': GRANITE
  | dict(
    shared_intermediate_size=16, num_hidden_layers=3, sliding_window=5,
  ),
  'minicpm3': MLA | dict(scale_emb=3, dim_model_base=8),
  'qwen3_next': MOE
  | DELTA
  | dict(
    moe_intermediate_size=12, shared_expert_intermediate_size=24,
    decoder_sparse_step=2,
  ),
  'qwen3_5_text': DELTA | dict(attention_bias=True),
  'qwen3_5_moe_text': MOE
  | DELTA
  | dict(moe_intermediate_size=12, shared_expert_intermediate_size=12),
  'afmoe': MOE
  | dict(
    moe_intermediate_size=8, num_shared_experts=2, route_scale=1.5,
    mup_enabled=True, num_dense_layers=1, num_hidden_layers=4, sliding_window=5,
  ),
  # Four uses of two blocks; head_dim is 2 D / N.
  'zamba2': ZAMBA2
  | dict(
    num_hidden_layers=9, num_mem_blocks=2, use_shared_attention_adapter=True,
    layers_block_type=[*['linear_attention', 'hybrid'] * 4, 'linear_attention'],
    use_mem_rope=True,
  ),
  # Three uses of one, at no period; queries share keys.
  'zamba2_one_block': ZAMBA2
  | dict(
    model_type='zamba2', num_hidden_layers=5, mamba_ngroups=2,
    layers_block_type=['hybrid', 'linear_attention', *['hybrid'] * 2,
                       'linear_attention'],
    num_key_value_heads=2, time_step_min=0.3, rms_norm_eps=1e-2,
  ),
  'jamba': JAMBA
  | dict(
    num_hidden_layers=3, num_experts=1, attn_layer_period=3,
    attn_layer_offset=1,
  ),
  'jamba_experts': JAMBA
  | dict(
    model_type='jamba', num_hidden_layers=4, num_experts=4,
    attn_layer_period=4, attn_layer_offset=2,
  ),
}  # fmt: skip
