"""Model_types of causal models that no family here loads, each with its reason.

A row is (what its source has, as the source of `transformers` spells it; what
that is; the model_types). tests/hf_families.py finds the first in the source of
each, and known.find says the second.
"""

_INDEXER = 'attention sees the tokens that an indexer chooses'
_IMAGES = 'it reads images or audio beside tokens'
_STREAMS = 'the residual is several streams (hyper-connections)'
_SINES = 'positions are sines that are added to embeddings'
_ALIBI = 'attention adds distances to its scores (ALiBi)'
_SHARED = 'layers take keys and values of others, or a target model'
_NORMS = 'norms stand inside attention and the mlp'
_CONVOLVED = 'layers have short convolutions and relative logits'

ROWS = (
  (
    'encoder_hidden_states',
    'it is an encoder, or a decoder that reads one',
    'bart bert bert-generation big_bird bigbird_pegasus blenderbot '
    'blenderbot-small camembert data2vec-text electra ernie marian mbart '
    'megatron-bert musicgen musicgen_melody mvp pegasus plbart prophetnet '
    'rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper '
    'xlm-roberta xlm-roberta-xl xmod',
  ),
  (
    'pixel_values',
    _IMAGES,
    'dots3_note emu3 gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 '
    'llama4 mllama qwen3_5 qwen3_5_moe qwen4_exp',
  ),
  ('image_patches', _IMAGES, 'fuyu'),
  ('image_pixel_values', _IMAGES, 'phi4_multimodal'),
  ('input_features', _IMAGES, 'moss_transcribe_diarize'),
  ('audio_codes', _IMAGES, 'moshi'),
  ('depth_scaled_residual_add', 'the residual is scaled by depth', 'beam'),
  ('use_attention_gate', 'attention has one gate a head', 'lfm3'),
  (
    'num_attention_heads_per_layer', 'layers have other numbers of heads',
    'laguna',
  ),
  ('post_mlp_layernorm', 'experts have a norm on their sum', 'axk1'),
  (
    'Indexer', _INDEXER,
    'axk2 deepseek_v32 dots3_note_text glm_moe_dsa minimax_m3_vl_text',
  ),
  ('HyperConnection', _STREAMS, 'deepseek_v4 hy_v4'),
  (
    'ForgetGate', 'every channel of the delta rule has its own decay',
    'bailing_hybrid kimi_linear',
  ),
  (
    'OlmoHybridLinearAttentionDecoderLayer',
    'norms stand before layers of one kind and behind those of the other',
    'olmo_hybrid',
  ),
  ('NGramEmbedding', 'embeddings are of n-grams, too', 'qwen4_exp_text'),
  ('LightningAttention', 'layers are lightning attention', 'minimax'),
  ('ffn_sub_norm', _NORMS, 'bitnet'),
  ('alibi', _ALIBI, 'bloom mpt'),
  ('patch_lengths', 'it reads patches of bytes', 'blt'),
  ('mrope_section', 'positions have three axes', 'cohere_compass_text'),
  (
    'SegmentPositionEmbedding', 'attention has a bias by buckets of distance',
    'cpmant',
  ),
  ('pos_encoding', _SINES, 'ctrl'),
  ('SinusoidalPositionalEmbedding', _SINES, 'xglm'),
  ('create_sinusoidal_embeddings', _SINES, 'xlm'),
  (
    'split_expert_shape', 'a matrix holds all experts, one after the other',
    'dbrx',
  ),
  ('lambda_q1', 'attention is the difference of two (Diff)', 'diffllama'),
  ('dt_proj', 'attention has a mask that is learned', 'doge'),
  (
    'attention_in_multiplier', 'a layer has Mamba-2 beside attention',
    'falcon_h1',
  ),
  ('AltUp', 'the residual is several streams (AltUp)', 'gemma3n_text'),
  ('shared_kv_states', _SHARED, 'gemma4_assistant gemma4_unified_assistant'),
  ('is_kv_shared_layer', _SHARED, 'gemma4_text gemma4_unified_text'),
  ('dense_bias', 'the last layer alone has a bias', 'gpt_neox_japanese'),
  ('H_cycles', 'two stacks of layers run in cycles', 'hrm_text'),
  ('RelativeLogits', _CONVOLVED, 'inkling2_text inkling_text'),
  ('MoA', 'heads of attention are chosen as experts are', 'jetmoe'),
  (
    'router_logits + self.e_score_correction_bias',
    'the bias of its router is added to logits, not to scores', 'kolibri1',
  ),
  (
    'zero_expert', 'experts return what they are given', 'longcat_flash'
  ),
  ('v_scale', 'layers with a window have other heads', 'mimo_v2_flash'),
  ('PredictionHead', 'its head has a layer of its own', 'modernbert-decoder'),
  ('ln_1(x + a)', 'norms are of the sum with the residual', 'openai-gpt'),
  ('sparsemixer', 'its router is SparseMixer', 'phimoe'),
  ('LSH', 'attention sees the tokens of the same hash', 'reformer'),
  ('LinearAttention', 'layers are a recurrence that is not here', 'rwkv'),
  ('mlstm', 'layers are a recurrence that is not here', 'xlstm'),
  ('rel_shift', 'attention has relative positions', 'xlnet'),
  ('x_proj_weight', 'heads of Mamba have maps of their own', 'zamba'),
  ('CCAProjection', 'attention is in a convolved, smaller space', 'zaya'),
)  # fmt: skip
REASONS = {name: why for _, why, names in ROWS for name in names.split()}
