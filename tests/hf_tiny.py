"""Tiny models of `transformers`: what their configs say beyond `COMMON`.

A row is a model_type, or a variant of one ('llama_yarn', whose row names it).
`spread` is the standard deviation of its weights.
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
}  # fmt: skip
