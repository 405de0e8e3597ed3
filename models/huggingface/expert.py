"""Families with mixtures of experts."""

from paraxis.models.huggingface import dense
from paraxis.models.huggingface import kin
from paraxis.models.huggingface import rows
from paraxis.models.huggingface.kin import family
from paraxis.models.huggingface.kin import llama
from paraxis.models.huggingface.rows import Choice
from paraxis.models.huggingface.rows import Computed
from paraxis.models.huggingface.rows import Fixed
from paraxis.models.huggingface.rows import Ours
from paraxis.models.huggingface.rows import Same

COUNT = Same('num_experts', 'experts.count', other=('num_local_experts',))
LOCAL = Same('num_local_experts', 'experts.count', other=('num_experts',))
TOP = Same('num_experts_per_tok', 'experts.top_k')
NORMALISE = Same('norm_topk_prob', 'experts.normalise', False)


def sparse_layers(config):
  """Which layers have experts, by Qwen's two fields: one letter a layer."""
  step, plain = config('decoder_sparse_step', 1), config('mlp_only_layers', [])
  return ''.join(
    'D' if i in plain or (i + 1) % step else 'E'
    for i in range(config('num_hidden_layers'))
  )


def places(read, write):
  """Which layers have experts.

  read: Reader -> letters, write: them -> theirs.
  """
  return Computed(
    lambda config: {'experts.pattern': rows.unit(read(config))},
    lambda model: write(behind(model)),
  )


def behind(model):
  """E or D for every layer."""
  from paraxis.models import layer

  return ''.join('E' if k[1:] == 'E' else 'D' for k in layer.kinds_of(model)[1])


QWEN_PLACES = places(
  sparse_layers,
  lambda letters: {
    'decoder_sparse_step': 1,
    'mlp_only_layers': [i for i, x in enumerate(letters) if x == 'D'],
  },
)
DENSE_FIRST = places(
  lambda config: ''.join(
    'D' if i < config('first_k_dense_replace', 0) else 'E'
    for i in range(config('num_hidden_layers'))
  ),
  lambda letters: {
    'first_k_dense_replace': len(letters) - len(letters.lstrip('D'))
  },
)
NO_CLIP = Fixed('clip_qkv', None)
QWEN = (COUNT, TOP, NORMALISE, Same('moe_intermediate_size', 'experts.d_ff'))


def _shared(config):
  """One shared expert of its own width, which ours states in experts."""
  width, own = (
    config('shared_expert_intermediate_size'),
    config('moe_intermediate_size'),
  )
  if width % own:
    config.refuse(
      'shared_expert_intermediate_size',
      f'is no multiple of moe_intermediate_size={own}',
    )
  return {'experts.shared': width // own, 'experts.shared_gate': True}


SHARED = Computed(
  _shared,
  lambda model: {
    'shared_expert_intermediate_size': model.experts.shared
    * (model.experts.d_ff or model.d_ff)
  },
)


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
LATENT_SILENT = ('head_dim', 'qk_head_dim', 'ep_size')
GROUPED = (
  Same('routed_scaling_factor', 'experts.scale', 1.0),
  Same('n_group', 'experts.groups', 1),
  Same('topk_group', 'experts.top_groups', 1),
)
ROUTED = (
  Same('n_routed_experts', 'experts.count'), TOP,
  Same('moe_intermediate_size', 'experts.d_ff'),
  Same('n_shared_experts', 'experts.shared', 0), *GROUPED,
)  # fmt: skip
# Balanced by a bias that moves choices alone (arXiv:2408.15664).
BIASED = Ours({
  'experts.scores': 'sigmoid', 'experts.bias_rate': 1e-3,
  'experts.group_best': 2,
})  # fmt: skip
SIGMOID = (*ROUTED, BIASED, Same('norm_topk_prob', 'experts.normalise', True))
LATER_SPARSE = places(
  lambda config: ''.join(
    {'dense': 'D', 'sparse': 'E'}[x]
    for x in config(
      'mlp_layer_types',
      ['dense'] + ['sparse'] * (config('num_hidden_layers') - 1),
    )
  ),
  lambda letters: {
    'mlp_layer_types': ['dense' if x == 'D' else 'sparse' for x in letters]
  },
)


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


def _dots_layers(config):
  """Layers from max_window_layers on have a window, if there is one."""
  depth, window = config('num_hidden_layers'), config('sliding_window', 0)
  return ''.join(
    'W' if window and i >= config('max_window_layers', 62) else 'F'
    for i in range(depth)
  )


ALL_SPARSE = places(
  lambda config: ''.join(
    {'dense': 'D', 'sparse': 'E'}[x]
    for x in config('mlp_layer_types', ['sparse'] * config('num_hidden_layers'))
  ),
  lambda letters: {
    'mlp_layer_types': ['dense' if x == 'D' else 'sparse' for x in letters]
  },
)
EXAONE_WORDS = {'N': 'full_attention', 'W': 'sliding_attention'}


def _exaone_layers(config):
  """With a window, layers without one have no rotary positions."""
  if not config('sliding_window', 0):
    config('layer_types', None)
    return {'pattern': 'F'}
  reader = kin.layers(kin.periodic('WWWN'), EXAONE_WORDS)
  return reader.read(config)


EXAONE_LAYERS = Computed(
  _exaone_layers,
  lambda model: (
    kin.layers(None, EXAONE_WORDS).write(model) or {'sliding_window': None}
  ),
)
GRANITE = (
  Same('embedding_multiplier', 'embedding_scale', 1.0),
  Same('attention_multiplier', 'attention_scale', 1.0),
  Fixed('residual_multiplier', 1.0), Fixed('logits_scaling', 1.0),
  Ours({'experts.normalise': True}),
)  # fmt: skip
GRANITE_NAMES = dict(
  moe='block_sparse_moe', router='router.layer', expert_gate_up='input_linear',
  expert_down='output_linear', expert_suffix='.weight', shared='shared_mlp',
  shared_outside=True, gate_up='input_linear', down='output_linear',
)  # fmt: skip


def _whole_rotation(config):
  """Half of a head is rotated where a file says nothing."""
  rope, name = config('rope_parameters', {}), 'partial_rotary_factor'
  if rope.get(name, config(name, 0.5)) != 1:
    config.refuse(name, 'rotates a part of a head, or has its default, 0.5')
  return {}


WHOLE = Computed(
  _whole_rotation,
  lambda model: {
    'rope_parameters': rows.written_rope(model)
    | dict(partial_rotary_factor=1.0)
  },
)


def _granite_shared(config):
  width, own = (
    config('shared_intermediate_size', 0),
    config('intermediate_size'),
  )
  if width % own:
    config.refuse(
      'shared_intermediate_size', f'is no multiple of intermediate_size={own}'
    )
  return {'experts.shared': width // own}


GRANITE_SHARED = Computed(
  _granite_shared,
  lambda model: {
    'shared_intermediate_size': model.experts.shared
    * (model.experts.d_ff or model.d_ff)
  },
)


def _no_mlp(given):
  """Rows of a family all of whose layers have experts."""
  return tuple(row for row in given if row is not kin.WIDTH)


def _whole_number(name, ours):
  """A field that other files have as a list with a number for each layer."""

  def read(config):
    if not isinstance(config(name), int):
      config.refuse(name, 'is not one number for all layers')
    return {ours: config(name)}

  return Computed(read, lambda model: {name: rows.value(model, ours)})


FAMILIES = {
  'mixtral': family(
    'MixtralForCausalLM', llama(theta=1e6, epsilon=1e-5), LOCAL, TOP,
    dense._window_or_not(), moe='block_sparse_moe', router='gate',
    expert='experts.{}', expert_gate='w1', expert_up='w3', expert_down='w2',
  ),
  'olmoe': family(
    'OlmoeForCausalLM', llama(epsilon=1e-5), dense.BIAS, COUNT, TOP, NORMALISE,
    NO_CLIP, Ours({'qk_norm': 'all'}), **kin.EXPERT_NAMES,
  ),
  'qwen2_moe': family(
    'Qwen2MoeForCausalLM', llama(), QWEN, QWEN_PLACES, SHARED,
    Same('qkv_bias', 'attention_bias', True), dense.QWEN_LAYERS,
    **kin.EXPERT_NAMES | dict(shared='shared_expert'),
  ),
  'qwen3_moe': family(
    'Qwen3MoeForCausalLM', llama(), QWEN, QWEN_PLACES, dense.BIAS,
    Ours({'qk_norm': 'head'}), dense._window_or_not(), dense.USES_WINDOW,
    **kin.EXPERT_NAMES,
  ),
  'flex_olmo': family(
    'FlexOlmoForCausalLM', llama(theta=5e5), COUNT, TOP, NORMALISE, dense.BIAS,
    dense.POST, Ours({'qk_norm': 'all'}), **kin.EXPERT_NAMES,
  ),
  'dots1': family(
    'Dots1ForCausalLM', llama(), SIGMOID, DENSE_FIRST, dense.BIAS,
    Ours({'qk_norm': 'head'}), kin.layers(_dots_layers), **kin.EXPERT_NAMES,
  ),
  'deepseek_v2': family(
    'DeepseekV2ForCausalLM', LATENT, ROUTED, DENSE_FIRST, BEST_OF_GROUPS,
    Ours({'experts.normalise': False}), Fixed('norm_topk_prob', False),
    Fixed('mlp_bias', False), silent=LATENT_SILENT,
    **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'deepseek_v3': family(
    'DeepseekV3ForCausalLM', LATENT, SIGMOID, DENSE_FIRST,
    Fixed('rope_interleave', True),
    silent=(*LATENT_SILENT, 'topk_method', 'scoring_func', 'moe_layer_freq'),
    **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'glm4_moe_lite': family(
    'Glm4MoeLiteForCausalLM', LATENT, SIGMOID, LATER_SPARSE,
    Same('rms_norm_eps', 'norm_epsilon', 1e-5), Fixed('rope_interleave', True),
    silent=LATENT_SILENT, **kin.EXPERT_NAMES, **MLA_NAMES,
  ),
  'minimax_m2': family(
    'MiniMaxM2ForCausalLM', llama(theta=5e6), LOCAL, TOP, BIASED,
    Ours({'experts.normalise': True, 'qk_norm': 'all'}),
    moe='block_sparse_moe', router='gate',
    router_bias='e_score_correction_bias', expert='experts.{}',
    expert_gate='w1', expert_up='w3', expert_down='w2',
  ),
  'solar_open': family(
    'SolarOpenForCausalLM', _no_mlp(llama(theta=1e6, epsilon=1e-5)), SIGMOID,
    Same('attention_bias', 'attention_bias', False), **kin.EXPERT_NAMES,
  ),
  'gpt_oss': family(
    'GptOssForCausalLM', llama(theta=1.5e5, epsilon=1e-5), LOCAL, TOP,
    Fixed('swiglu_limit', 7.0), Fixed('swiglu_alpha', 1.702), dense.BIAS,
    kin.layers(kin.periodic('WF')),
    Ours({
      'mlp': 'clamped', 'sinks': True, 'experts.mlp_bias': True,
      'experts.router_bias': True, 'experts.normalise': True,
    }),
    silent=('experts_per_token', 'initial_context_length'),
    router='router', expert_gate_up='experts.gate_up_proj',
    expert_down='experts.down_proj', interleaved=True,
  ),
  'youtu': family(
    'YoutuForCausalLM', LATENT,
    Same('tie_word_embeddings', 'tied_embedding', True),
    Fixed('rope_interleave', True), Fixed('mlp_bias', False),
    silent=(*LATENT_SILENT, 'embedding_initializer_range'), **MLA_NAMES,
  ),
  'mellum': family(
    'MellumForCausalLM', llama(rotary=dense._per_kind(5e5, 1e4)), QWEN,
    ALL_SPARSE, dense.BIAS, Ours({'qk_norm': 'head'}),
    kin.layers(kin.every('F')),
    silent=('mtp_layer_types', 'mtp_mlp_layer_types', 'num_mtp_layers'),
    **kin.EXPERT_NAMES,
  ),
  'hy_v3': family(
    'HYV3ForCausalLM', llama(theta=11158840.0, epsilon=1e-5), QWEN, BIASED,
    LATER_SPARSE, dense.BIAS, Fixed('mlp_bias', False),
    Same('num_shared_experts', 'experts.shared', 1),
    Same('router_scaling_factor', 'experts.scale', 2.826),
    Ours({'qk_norm': 'head', 'experts.normalise': True}),
    silent=('enable_moe_fp32_combine',),
    **kin.EXPERT_NAMES | dict(
      router='router.gate', router_bias='expert_bias', shared='shared_mlp'
    ),
  ),
  'exaone_moe': family(
    'ExaoneMoeForCausalLM', llama(epsilon=1e-5), QWEN, GROUPED, BIASED,
    LATER_SPARSE, Same('norm_topk_prob', 'experts.normalise', True),
    Same('num_shared_experts', 'experts.shared', 1), EXAONE_LAYERS,
    Ours({'qk_norm': 'head'}),
    silent=('sliding_window_pattern', 'first_k_dense_replace'),
    **kin.EXPERT_NAMES | dict(router_bias='e_score_correction_bias'),
  ),
  'glm4_moe': family(
    'Glm4MoeForCausalLM', llama(epsilon=1e-5), SIGMOID, DENSE_FIRST, WHOLE,
    Same('attention_bias', 'attention_bias', False),
    Choice('use_qk_norm', 'qk_norm', {False: 'none', True: 'head'}, False),
    **kin.EXPERT_NAMES,
  ),
  'granitemoe': family(
    'GraniteMoeForCausalLM', llama(), LOCAL, TOP, dense.BIAS, GRANITE,
    **GRANITE_NAMES,
  ),
  'granitemoeshared': family(
    'GraniteMoeSharedForCausalLM', llama(), LOCAL, TOP, dense.BIAS, GRANITE,
    GRANITE_SHARED, **GRANITE_NAMES,
  ),
  'hunyuan_v1_moe': family(
    'HunYuanMoEV1ForCausalLM', llama(epsilon=1e-5),
    _whole_number('num_experts', 'experts.count'),
    _whole_number('moe_topk', 'experts.top_k'), dense.BIAS,
    Ours({
      'experts.shared': 1, 'experts.normalise': True, 'qk_norm': 'rotated',
    }),
    silent=('eod_token_id',),
    **kin.EXPERT_NAMES | dict(
      router='gate.wg', shared='shared_mlp', query_norm='query_layernorm',
      key_norm='key_layernorm',
    ),
  ),
}  # fmt: skip
