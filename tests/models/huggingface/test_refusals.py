"""What no model here expresses is refused by the name of its config field."""

import hf_families
import pytest
import support

from paraxis.models.huggingface import config as config_lib

YARN = dict(
  rope_type='yarn', rope_theta=5e5, factor=8.0,
  original_max_position_embeddings=32, truncate=False,
)  # fmt: skip
LINEAR = dict(rope_type='linear', rope_theta=1e4, factor=2.0)
# (row of the goldens, fields of config.json, the field that is named)
REFUSED = [
  ('deepseek_v2', dict(topk_method='noaux_tc'), 'topk_method'),
  ('deepseek_v2', dict(norm_topk_prob=True), 'norm_topk_prob'),
  ('deepseek_v3', dict(rope_interleave=False), 'rope_interleave'),
  ('deepseek_v3', dict(attention_bias=True), 'attention_bias'),
  ('deepseek_v3', dict(num_key_value_heads=2), 'num_key_value_heads'),
  ('falcon_mamba', dict(use_bias=True), 'use_bias'),
  ('minimax_m2', dict(rotary_dim=99), 'rope_fraction'),
  ('minimax_m2', dict(use_qk_norm=False), 'use_qk_norm'),
  ('minimax_m2', dict(scoring_func='softmax'), 'scoring_func'),
  ('gptj', dict(rotary=False), 'rotary'),
  ('gptj', dict(scale_attn_weights=False), 'scale_attn_weights'),
  ('gpt_oss', dict(swiglu_limit=-5.0), 'swiglu_limit'),
  (
    'granitemoehybrid',
    dict(normalization_function='layernorm'),
    'normalization_function',
  ),
  ('granitemoeshared', dict(shared_intermediate_size=5), 'shared_intermediate'),
  ('granite_swa', dict(rope_parameters=LINEAR), "rope_type='linear'"),
  ('olmo3', dict(rope_parameters=dict(full_attention=YARN)), 'truncate=False'),
  ('olmo3', dict(rope_parameters=None, rope_scaling=YARN), 'truncate=False'),
  ('hunyuan_v1_moe', dict(moe_topk=[3, 3]), 'moe_topk'),
  ('jamba', dict(mamba_proj_bias=True), 'mamba_proj_bias'),
  ('lfm2', dict(conv_bias=True), 'conv_bias'),
  ('mamba2', dict(time_step_limit=[0.1, 1.0]), 'time_step_limit'),
  ('mixtral', dict(own_field=3), 'own_field'),
  ('gpt_neox', dict(head_dim=16), 'head_dim=16 is not 8, as of hidden_size=32'),
  ('gpt_neox', dict(num_key_value_heads=2), 'num_key_value_heads=2 is not 4'),
  ('helium', dict(head_dim=8), 'head_dim=8 is not 4'),
  ('olmoe', dict(head_dim=8), 'head_dim=8 is not 4'),
  ('persimmon', dict(num_key_value_heads=1), 'num_key_value_heads'),
  ('stablelm', dict(num_attention_heads=3), 'does not divide hidden_size=32'),
  ('ministral3', dict(rope_parameters=None), 'llama_4_scaling_beta'),
  ('opt', dict(do_layer_norm_before=False), 'do_layer_norm_before'),
  ('opt', dict(word_embed_proj_dim=8), 'word_embed_proj_dim'),
  ('olmoe', dict(clip_qkv=8.0), 'clip_qkv'),
  ('phi3', dict(rope_parameters=YARN), "rope_type='yarn' is not default or"),
  ('recurrent_gemma', dict(block_types=['mamba']), 'block_types'),
  (
    'recurrent_gemma',
    dict(embeddings_scale_by_sqrt_dim=False),
    'embeddings_scale_by_sqrt_dim',
  ),
  ('recurrent_gemma', dict(logits_soft_cap=0.0), 'logits_soft_cap=0.0'),
  ('recurrent_gemma', dict(rope_parameters=LINEAR), "rope_type='linear'"),
  ('qwen3_next', dict(hidden_act='gelu'), 'hidden_act'),
  ('qwen3_5_text', dict(layer_types=['mamba']), 'layer_types'),
  ('afmoe', dict(attention_bias=True), 'attention_bias'),
  ('llama4_text', dict(floor_scale=8), 'floor_scale'),
  ('llama4_text', dict(layer_types=['full_attention'] * 4), 'layer_types'),
  ('starcoder2', dict(mlp_type='gated'), 'mlp_type'),
  ('deepseek_v2', dict(moe_layer_freq=2), 'moe_layer_freq'),
  ('llada', dict(block_type='sequential'), 'block_type'),
  ('llada', dict(block_type=None), 'block_type'),
  ('llada', dict(activation_type='swiglu'), 'activation_type'),
  ('llada', dict(layer_norm_type='default'), 'layer_norm_type'),
  ('llada', dict(include_bias=True), 'include_bias'),
  ('llada', dict(bias_for_layer_norm=True), 'bias_for_layer_norm'),
  ('llada', dict(layer_norm_with_affine=False), 'layer_norm_with_affine'),
  ('llada', dict(attention_layer_norm=True), 'attention_layer_norm'),
  ('llada', dict(alibi=True), 'alibi'),
  ('llada', dict(rope=False), 'rope'),
  ('llada', dict(scale_logits=True), 'scale_logits'),
  ('llada', dict(input_emb_norm=True), 'input_emb_norm'),
  ('llada', dict(block_group_size=2), 'block_group_size'),
  ('llada', dict(multi_query_attention=True), 'multi_query_attention'),
  ('llada', dict(embedding_size=47), 'embedding_size'),
  ('llada', dict(mask_token_id=48), 'mask_token_id'),
  ('llada', dict(mask_token_id=None), 'mask_token_id'),
  ('Dream', dict(mask_token_id=-1), 'mask_token_id'),
  ('Dream', dict(use_sliding_window=True), 'use_sliding_window'),
  ('Dream', dict(use_mrope=True), 'use_mrope'),
  ('Dream', dict(block_size=32), 'block_size'),
  ('phimoe', dict(), 'model_type'),
  ('longcat_flash', dict(), 'model_type'),
]


# Fields that published files have beside those that transformers 5.23 writes.
OLDER = [
  ('gpt_neox', dict(rotary_emb_base=500, rope_parameters=None), 'rope_theta'),
  ('starcoder2', dict(mlp_type='default', norm_type='layer_norm'), ''),
  (
    'deepseek_v2',
    dict(
      aux_loss_alpha=0.001, seq_aux=True, moe_layer_freq=1, ep_size=1,
      scoring_func='softmax',
    ), '',
  ),
  ('deepseek_v3', dict(aux_loss_alpha=0.001, seq_aux=True), ''),
  ('gpt2', dict(n_ctx=1024, tokenizer_class='GPT2Tokenizer'), ''),
  ('gptj', dict(rotary=True, scale_attn_weights=True), ''),
  ('gemma', dict(hidden_act='gelu', hidden_activation=None), ''),
  (
    'gemma2',
    dict(hidden_act='gelu_pytorch_tanh', cache_implementation='hybrid'), '',
  ),
  (
    'granitemoehybrid',
    dict(normalization_function='rmsnorm', init_method='mup'), '',
  ),
  ('granitemoehybrid_dense', dict(position_embedding_type='nope'), ''),
  ('bamba', dict(time_step_min=0.1), ''),
  ('granitemoehybrid', dict(time_step_min=0.1), ''),
  ('jamba', dict(time_step_min=0.1), ''),
]  # fmt: skip


@pytest.mark.parametrize('name, fields, changed', OLDER)
def test_older_fields_are_read(name, fields, changed):
  config = hf_families.read_golden(name)['config']
  before = config_lib.canonical(config_lib.to_model(config))
  after = config_lib.canonical(config_lib.to_model(config | fields))
  assert {k for k, x in after.items() if x != before[k]} == {*changed.split()}
  assert not changed or after[changed] == fields['rotary_emb_base']


# Released: GLM-4.5, MiniMax-M2. (fields, share of a head that rotates)
PARTS = [
  ('glm4_moe', dict(partial_rotary_factor=0.5, rope_theta=1e6), 0.5),
  ('glm4_moe', dict(rope_theta=1e6), 0.5),
  ('glm4_moe', dict(rope_parameters=dict(partial_rotary_factor=0.25)), 0.25),
  (
    'minimax_m2',
    dict(
      rotary_dim=4, use_qk_norm=True, qk_norm_type='per_layer', use_mtp=True,
      scoring_func='sigmoid', use_routing_bias=True, num_mtp_modules=3,
      mtp_transformer_layers=1, attn_type_list=[1, 1],
      shared_intermediate_size=0, layernorm_mlp_beta=1.0,
    ), 0.5,
  ),
  ('minimax_m2', dict(rotary_dim=4, partial_rotary_factor=0.25), 0.25),
  ('minimax_m2', {}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize('name, fields, part', PARTS)
def test_a_part_of_a_head_rotates(name, fields, part):
  """Of heads of 8; mixers/test_attention.py has what it computes."""
  config = hf_families.read_golden(name)['config']
  config |= dict(rope_parameters=None, head_dim=8) | fields
  model = config_lib.to_model(config)
  assert model.rope_fraction == part
  config = config_lib.from_model(model, name)
  assert config_lib.to_model(config).rope_fraction == part


# Their configs have it, and no class of theirs reads it.
UNREAD = [
  ('gemma3_text', dict(attn_logit_softcapping=50.0)),
  ('nemotron_h', dict(attention_bias=True)),
]


@pytest.mark.parametrize('name, fields', UNREAD)
def test_what_a_class_does_not_read_changes_nothing(name, fields):
  config = hf_families.read_golden(name)['config']
  same = lambda config: config_lib.canonical(config_lib.to_model(config))
  assert same(config | fields) == same(config)


def test_layers_of_one_rotation_are_scaled_alike():
  config = hf_families.read_golden('granite_swa')['config']
  config |= dict(rope_parameters=LINEAR, layer_rope_theta=None)
  model = config_lib.to_model(config)
  assert model.rope_scaling == 'linear' and not model.rope_local_theta
  # Of kinds of layers, too.
  config = hf_families.read_golden('olmo3')['config']
  table = {k: x for k, x in YARN.items() if k != 'truncate'}
  config |= dict(rope_parameters=dict(full_attention=table))
  assert config_lib.to_model(config).rope_truncate


@pytest.mark.parametrize('name, change, field', REFUSED)
def test_refused_by_name(name, change, field):
  known = name in hf_families.TINY
  config = hf_families.read_golden(name)['config'] if known else {}
  config = {'model_type': name} | config | change
  with support.refused(field):
    config_lib.to_model(config)
