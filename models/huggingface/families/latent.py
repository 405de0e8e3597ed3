"""Families with DeepSeek's latent attention."""

from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same


def _one_key_a_head(config):
  heads = config('num_attention_heads')
  if config('num_key_value_heads', heads) != heads:
    config.refuse('num_key_value_heads', f'is not num_attention_heads={heads}')
  return {}


MLA_NAMES = dict(
  latent_attention='self_attn', latent_down='kv_a_proj_with_mqa',
  latent_norm='kv_a_layernorm', latent_up='kv_b_proj', query_down='q_a_proj',
  query_norm='q_a_layernorm', latent_query='q_b_proj',
)  # fmt: skip
LATENT = (
  *kin.DIMS, kin.WIDTH, Same('num_attention_heads', 'num_heads'),
  Computed(_one_key_a_head, lambda m: {'num_key_value_heads': m.num_heads}),
  Same('rms_norm_eps', 'norm_epsilon', 1e-6),
  Same('tie_word_embeddings', 'tied_embedding', False),
  Choice('hidden_act', 'mlp', kin.GATES, 'silu'),
  rows.rope(latent=True),
  Same('kv_lora_rank', 'latent.rank'),
  Same('q_lora_rank', 'latent.query_rank', 0, null=0),
  Same('qk_nope_head_dim', 'latent.nope_dim'),
  Same('qk_rope_head_dim', 'latent.rope_dim'),
  Same('v_head_dim', 'latent.value_dim'),
  # Their norms of latents have the default, whatever rms_norm_eps is.
  Ours({'pattern': 'A', 'latent.norm_epsilon': 1e-6}),
  Fixed('attention_bias', False),
)  # fmt: skip
LATENT_SILENT = (
  'head_dim', 'qk_head_dim', 'ep_size', 'aux_loss_alpha', 'seq_aux'
)  # fmt: skip


def _best_of_groups(config):
  """DeepSeek-V2 chooses groups by their best expert, or has none."""
  method = config('topk_method', 'greedy')
  if method == 'greedy':
    return {'experts.groups': 1, 'experts.top_groups': 1}
  if method != 'group_limited_greedy':
    config.refuse('topk_method', 'is not greedy or group_limited_greedy')
  return {'experts.group_best': 1}


BEST_OF_GROUPS = Computed(
  _best_of_groups,
  lambda model: {
    'topk_method': 'group_limited_greedy'
    if model.experts.groups > 1
    else 'greedy'
  },
)


def _minicpm_scales(config):
  """Multipliers that follow from depth and width."""
  depth, width = config('num_hidden_layers'), config('hidden_size')
  base = config('dim_model_base', width)
  return {
    'embedding_scale': config('scale_emb', 12.0),
    'residual_scale': config('scale_depth', depth**0.5) / depth**0.5,
    'logit_scale': base / width,
  }


MINICPM_SCALES = Computed(
  _minicpm_scales,
  lambda model: dict(
    scale_emb=model.embedding_scale,
    scale_depth=model.residual_scale * model.num_layers**0.5,
    dim_model_base=round(model.logit_scale * model.d_model),
  ),
)
FAMILIES = {
  'deepseek_v2': family(
    'DeepseekV2ForCausalLM', LATENT, kin.DIVIDES, expert.ROUTED,
    expert.DENSE_FIRST, BEST_OF_GROUPS, Ours({'experts.normalise': False}),
    Fixed('norm_topk_prob', False), Fixed('mlp_bias', False),
    Fixed('moe_layer_freq', 1), Fixed('scoring_func', 'softmax'),
    silent=LATENT_SILENT, **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'deepseek_v3': family(
    'DeepseekV3ForCausalLM', LATENT, expert.SIGMOID, expert.DENSE_FIRST,
    Fixed('rope_interleave', True),
    silent=(*LATENT_SILENT, 'topk_method', 'scoring_func', 'moe_layer_freq'),
    **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'glm4_moe_lite': family(
    'Glm4MoeLiteForCausalLM', LATENT, expert.SIGMOID, expert.LATER_SPARSE,
    Same('rms_norm_eps', 'norm_epsilon', 1e-5), Fixed('rope_interleave', True),
    silent=LATENT_SILENT, **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'minicpm3': family(
    'MiniCPM3ForCausalLM', LATENT, kin.DIVIDES, MINICPM_SCALES,
    Same('rms_norm_eps', 'norm_epsilon', 1e-5),
    Same('tie_word_embeddings', 'tied_embedding', True),
    Fixed('mlp_bias', False), silent=LATENT_SILENT, latent_pairs=False,
    **MLA_NAMES,
  ),
  'youtu': family(
    'YoutuForCausalLM', LATENT,
    Same('tie_word_embeddings', 'tied_embedding', True),
    Fixed('rope_interleave', True), Fixed('mlp_bias', False),
    silent=(*LATENT_SILENT, 'embedding_initializer_range'), **MLA_NAMES,
  ),
}  # fmt: skip
