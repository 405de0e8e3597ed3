"""Tiny models of `transformers`: what their configs say beyond `COMMON`.

A row is a model_type, or a variant of one ('llama_yarn', whose row names it).
`spread` is the standard deviation of its weights, `ours` fields of schema.Model
that no config.json says.
"""

V, D, N, K, H, F = 48, 16, 4, 2, 8, 24
# Fields that a family has not are left out.
COMMON = dict(
  vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=2,
  num_attention_heads=N, num_key_value_heads=K, head_dim=H,
  max_position_embeddings=64, pad_token_id=None, bos_token_id=1,
  eos_token_id=2,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=50.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
  original_max_position_embeddings=512,
)  # fmt: skip
LLAMA3 = dict(
  rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
  high_freq_factor=4.0, original_max_position_embeddings=16,
)  # fmt: skip
LONGROPE = dict(
  rope_type='longrope', rope_theta=1e4, short_factor=[1.0, 1.1, 1.5, 2.0],
  long_factor=[1.5, 4.0, 9.0, 20.0],
)  # fmt: skip
LINEAR = dict(rope_type='linear', rope_theta=500.0, factor=2.0)
QUIET = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

DENSE = {
  'llama': {},
  'llama_biases': dict(
    model_type='llama', attention_bias=True, mlp_bias=True,
    tie_word_embeddings=True, head_dim=None,
  ),
  'llama_linear': dict(model_type='llama', rope_parameters=LINEAR),
  'llama_llama3': dict(model_type='llama', rope_parameters=LLAMA3),
  'llama_yarn': dict(model_type='llama', rope_parameters=YARN),
  'internlm3': dict(attention_bias=True, mlp_bias=True),
  'iquestcoder': {},
  'mistral': dict(sliding_window=5),
  'qwen2': {},
  'qwen2_window': dict(
    model_type='qwen2', use_sliding_window=True, sliding_window=5,
    max_window_layers=1, num_hidden_layers=3,
  ),
  'qwen3': {},
  'gemma': dict(num_key_value_heads=1),
  'gemma2': dict(
    num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=12,
    attn_logit_softcapping=2.0, final_logit_softcapping=1.5,
  ),
  'gemma3_text': dict(
    num_hidden_layers=7, sliding_window=5, query_pre_attn_scalar=12,
    rope_parameters=dict(
      full_attention=dict(rope_type='linear', rope_theta=1e6, factor=8.0),
      sliding_attention=dict(rope_type='default', rope_theta=1e4),
    ),
  ),
  'smollm3': dict(num_hidden_layers=5),
  'olmo2': {},
  'olmo3': dict(num_hidden_layers=5, sliding_window=5),
  'gpt2': dict(n_positions=32, n_inner=F) | QUIET,
  'olmo': {},
  'olmo_clipped': dict(model_type='olmo', clip_qkv=0.5),
  'apertus': dict(rope_parameters=LLAMA3),
  # Rows have 24 tokens: queries grow at 8 and at 16.
  'ministral3': dict(
    rope_parameters=YARN | dict(
      original_max_position_embeddings=8, llama_4_scaling_beta=0.3,
    ),
  ),
  'nanochat': dict(attention_bias=True),
  'biogpt': dict(activation_dropout=0.0),
  'opt': dict(ffn_dim=F, dropout=0.0),
  'arcee': {},
  'seed_oss': {},
  'helium': dict(head_dim=4),
  'ernie4_5': dict(use_bias=True),
  'starcoder2': dict(sliding_window=5),
  'jais2': {},
  'nemotron': {},
  'persimmon': dict(qk_layernorm=False),
  'stablelm': dict(hidden_size=32, use_qkv_bias=True),
  'stablelm_parallel': dict(
    model_type='stablelm', hidden_size=32, use_parallel_residual=True,
  ),
  'phi': {},
  'phi3': {},
  # Rows have 24 tokens: beyond 16, so that transformers takes the long factors.
  'phi3_longrope': dict(
    model_type='phi3', original_max_position_embeddings=16, hidden_size=32,
    rope_parameters=LONGROPE | dict(attention_factor=1.25),
    ours=dict(rope_long=True),
  ),
  'phi3_longrope_short': dict(
    model_type='phi3', original_max_position_embeddings=32, hidden_size=32,
    rope_parameters=LONGROPE | dict(partial_rotary_factor=0.5)
    | dict(short_factor=[1.0, 1.5], long_factor=[2.0, 9.0]),
  ),
  'gpt_neox': dict(hidden_size=32),
  'gpt_neox_sequential': dict(
    model_type='gpt_neox', hidden_size=32, use_parallel_residual=False,
  ),
  'gptj': dict(n_embd=32, n_inner=F, rotary_dim=4) | QUIET,
  'codegen': dict(n_embd=32, n_inner=F, rotary_dim=4) | QUIET,
  'falcon': dict(ffn_hidden_size=F),
  'falcon_new': dict(
    model_type='falcon', new_decoder_architecture=True, num_kv_heads=2,
    ffn_hidden_size=F, bias=True,
  ),
  'falcon_sequential': dict(
    model_type='falcon', parallel_attn=False, multi_query=False,
    ffn_hidden_size=F,
  ),
  'cohere': {},
  'cohere2': dict(num_hidden_layers=4, sliding_window=5),
  'granite': dict(
    embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.3,
    attention_multiplier=0.2,
  ),
  'granite_swa': dict(
    embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.3,
    attention_multiplier=0.2, num_hidden_layers=5, sliding_window=5,
    layer_rope_theta=[0, 1e3, 1e3, 1e3, 1e4],
    layer_types=['full_attention', *['sliding_attention'] * 3,
                 'full_attention'],
  ),
  'hyperclovax': dict(
    embedding_multiplier=3.0, logits_scaling=0.25, residual_multiplier=0.3,
    attention_multiplier=0.2,
  ),
  'glm': {},
  'glm4': {},
  'exaone4': dict(num_hidden_layers=4, sliding_window=5),
  'ministral': dict(sliding_window=5),
  'cwm': dict(
    num_hidden_layers=4, sliding_window=5,
    rope_parameters=dict(rope_type='default', rope_theta=1e6),
  ),
  'hunyuan_v1_dense': {},
  'vaultgemma': dict(sliding_window=5, query_pre_attn_scalar=12),
  'gpt-sw3': dict(n_embd=D, n_head=N, n_layer=2, n_positions=32) | QUIET,
  'gpt_bigcode': dict(n_positions=32, n_inner=F) | QUIET,
  'gpt_neo': dict(
    num_layers=2, num_heads=4, attention_types=[[['global', 'local'], 1]],
    window_size=5, resid_dropout=0.0, embed_dropout=0.0,
  ),
  'youtu': dict(
    num_key_value_heads=4, q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=5,
  ),
}  # fmt: skip
