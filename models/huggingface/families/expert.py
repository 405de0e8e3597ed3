"""Families with mixtures of experts."""

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import dense_kin
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.kin import llama
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

COUNT = Same('num_experts', 'experts.count', other=('num_local_experts',))
LOCAL = Same('num_local_experts', 'experts.count', other=('num_experts',))
TOP = Same('num_experts_per_tok', 'experts.top_k')
NORMALISE = Same('norm_topk_prob', 'experts.normalise', False)


def sparse_layers(config, usual=()):
  """Which layers have experts, by Qwen's two fields: one letter a layer.

  usual: layers without, of files that list none.
  """
  step = config('decoder_sparse_step', 1)
  plain = config.numbers('mlp_only_layers', usual)
  return ''.join(
    'D' if i in plain or (i + 1) % step else 'E'
    for i in range(config('num_hidden_layers'))
  )


def _qwen2_layers(config):
  """Every second layer below max_window_layers has a window, if it is used."""
  depth, used = config('num_hidden_layers'), config(dense.FLAG, False)
  last = config('max_window_layers', 28, 0) if used else 0
  return ''.join('F' if i % 2 or i >= last else 'W' for i in range(depth))


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


def written_sparse(letters):
  """As `sparse_layers` reads them."""
  plain = [i for i, x in enumerate(letters) if x == 'D']
  return {'decoder_sparse_step': 1, 'mlp_only_layers': plain}


QWEN_PLACES = places(sparse_layers, written_sparse)
DENSE_FIRST = places(
  kin.leading('first_k_dense_replace'),
  lambda letters: {
    'first_k_dense_replace': len(letters) - len(letters.lstrip('D'))
  },
)
NO_CLIP = Fixed('clip_qkv', None)
QWEN = (COUNT, TOP, NORMALISE, Same('moe_intermediate_size', 'experts.d_ff'))


def multiple(config, name, width, own):
  """How often a width, which `name` has, is that of the field `own`."""
  if width % config(own):
    config.refuse(name, f'is no multiple of {own}={config(own)}')
  return width // config(own)


def _shared(config):
  """One shared expert of its own width, which ours states in experts."""
  name = 'shared_expert_intermediate_size'
  shared = multiple(config, name, config(name), 'moe_intermediate_size')
  return {'experts.shared': shared, 'experts.shared_gate': True}


SHARED = Computed(
  _shared,
  lambda model: {
    'shared_expert_intermediate_size': model.experts.shared
    * (model.experts.d_ff or model.d_ff)
  },
)


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
SPARSE = {'dense': 'D', 'sparse': 'E'}


def written_places(letters):
  words = {letter: word for word, letter in SPARSE.items()}
  return {'mlp_layer_types': [words[x] for x in letters]}


LATER_SPARSE = places(
  lambda config: config.each(
    'mlp_layer_types', SPARSE, lambda: kin.first('D', 'E')(config)
  ),
  written_places,
)
EXAONE_PLACES = places(
  lambda config: config.each(
    'mlp_layer_types', SPARSE,
    lambda: kin.leading('first_k_dense_replace', 1)(config),
  ), written_places,
)  # fmt: skip


def _dots_layers(config):
  """Layers from max_window_layers on have a window, if there is one."""
  depth, window = config('num_hidden_layers'), config('sliding_window', 0, 1)
  return ''.join(
    'W' if window and i >= config('max_window_layers', 62, 0) else 'F'
    for i in range(depth)
  )


ALL_SPARSE = places(
  lambda config: config.each(
    'mlp_layer_types', SPARSE, lambda: kin.every('E')(config)
  ),
  written_places,
)
GRANITE = (
  *dense_kin.MULTIPLIERS, dense_kin.attention_multiplier(1.0),
  dense_kin.inverse('logits_scaling', 'logit_scale'),
  Ours({'experts.normalise': True}),
)  # fmt: skip
GRANITE_NAMES = dict(
  moe='block_sparse_moe', router='router.layer', expert_gate_up='input_linear',
  expert_down='output_linear', expert_suffix='.weight', shared='shared_mlp',
  shared_outside=True, gate_up='input_linear', down='output_linear',
)  # fmt: skip


def _minimax_fraction(config):
  """Released files say how many numbers of a head rotate."""
  width = config('head_dim')
  usual = config('rotary_dim', width, 1) / width
  return dense_kin.fraction(usual).read(config)


MINIMAX_FRACTION = rows.Fraction(
  _minimax_fraction, dense_kin.fraction(1.0).write
)
# What released files state and the class does not read.
MINIMAX_STATED = (
  Fixed('use_qk_norm', True), Fixed('qk_norm_type', 'per_layer'),
  Fixed('scoring_func', 'sigmoid'), Fixed('use_routing_bias', True),
)  # fmt: skip


def _granite_shared(config):
  name = 'shared_intermediate_size'
  width = config(name, 0)
  return {'experts.shared': multiple(config, name, width, 'intermediate_size')}


GRANITE_SHARED = Computed(
  _granite_shared,
  lambda model: {
    'shared_intermediate_size': model.experts.shared
    * (model.experts.d_ff or model.d_ff)
  },
)


def no_mlp(given):
  """Rows of a family all of whose layers have experts."""
  return tuple(row for row in given if row is not kin.WIDTH)


def _whole_number(name, ours):
  """A field that other files have as a list with a number for each layer."""

  def read(config):
    if isinstance(config.given(name), list):
      config.refuse(name, 'is not one number for all layers')
    return {ours: config.checked(name, config(name), ours)}

  return Computed(read, lambda model: {name: rows.value(model, ours)})


FAMILIES = {
  'mixtral': family(
    'MixtralForCausalLM', llama(theta=1e6, epsilon=1e-5), LOCAL, TOP,
    dense._window_or_not(), moe='block_sparse_moe', router='gate',
    expert='experts.{}', expert_gate='w1', expert_up='w3', expert_down='w2',
  ),
  'olmoe': family(
    'OlmoeForCausalLM', llama(epsilon=1e-5), kin.whole_heads(), dense.BIAS,
    COUNT, TOP, NORMALISE, NO_CLIP, Ours({'qk_norm': 'all'}),
    **kin.EXPERT_NAMES,
  ),
  'qwen2_moe': family(
    'Qwen2MoeForCausalLM', llama(), QWEN, QWEN_PLACES, SHARED,
    Same('qkv_bias', 'attention_bias', True), kin.layers(_qwen2_layers),
    dense.USES_WINDOW,
    **kin.EXPERT_NAMES | dict(shared='shared_expert'),
  ),
  'qwen3_moe': family(
    'Qwen3MoeForCausalLM', llama(), QWEN, QWEN_PLACES, dense.BIAS,
    Ours({'qk_norm': 'head'}), dense._window_or_not(flag=dense.FLAG),
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
  'minimax_m2': family(
    'MiniMaxM2ForCausalLM', llama(theta=5e6), LOCAL, TOP, BIASED,
    Ours({'experts.normalise': True, 'qk_norm': 'all'}), MINIMAX_FRACTION,
    MINIMAX_STATED,
    silent=(
      'attn_type_list', 'layernorm_full_attention_beta',
      'layernorm_linear_attention_beta', 'layernorm_mlp_beta',
      'mlp_intermediate_size', 'mtp_transformer_layers', 'num_mtp_modules',
      'shared_moe_mode', 'use_mtp',
    ),
    moe='block_sparse_moe', router='gate',
    router_bias='e_score_correction_bias', expert='experts.{}',
    expert_gate='w1', expert_up='w3', expert_down='w2',
  ),
  'solar_open': family(
    'SolarOpenForCausalLM', no_mlp(llama(theta=1e6, epsilon=1e-5)), SIGMOID,
    Same('attention_bias', 'attention_bias', False), **kin.EXPERT_NAMES,
  ),
  'gpt_oss': family(
    'GptOssForCausalLM', llama(theta=1.5e5, epsilon=1e-5), LOCAL, TOP,
    Same('swiglu_limit', 'mlp_limit', 7.0),
    Same('swiglu_alpha', 'mlp_slope', 1.702), dense.BIAS,
    kin.layers(kin.periodic('WF')),
    Ours({
      'mlp': 'clamped', 'sinks': True, 'experts.mlp_bias': True,
      'experts.router_bias': True, 'experts.normalise': True,
    }),
    silent=('experts_per_token', 'initial_context_length'),
    router='router', expert_gate_up='experts.gate_up_proj',
    expert_down='experts.down_proj', expert_gate_up_order='by turns',
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
    EXAONE_PLACES, Same('norm_topk_prob', 'experts.normalise', True),
    Same('num_shared_experts', 'experts.shared', 1),
    dense_kin.EXAONE_LAYERS, Ours({'qk_norm': 'head'}),
    silent=('first_k_dense_replace',),  # where there are mlp_layer_types
    **kin.EXPERT_NAMES | dict(router_bias='e_score_correction_bias'),
  ),
  'glm4_moe': family(
    'Glm4MoeForCausalLM', llama(epsilon=1e-5), SIGMOID, DENSE_FIRST,
    dense_kin.fraction(0.5),
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
