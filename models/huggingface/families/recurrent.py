"""Families of state space models, and of those beside attention."""

import math

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import reader
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same
from paraxis.models.mixers import mamba


def _rank(name):
  """Rank of the step sizes, 'auto': a sixteenth of the width."""
  return Computed(
    lambda config: {
      'mamba.dt_rank': 0 if config.given(name) == 'auto' else config(name, 0, 1)
    },
    lambda model: {name: model.mamba.dt_rank or 'auto'},
  )


def _only_mamba(letter):
  """Layers of one mixer and nothing behind it."""
  return (
    *kin.DIMS,
    Same('layer_norm_epsilon', 'norm_epsilon', 1e-5),
    Same('state_size', 'mamba.state'), Same('expand', 'mamba.expand', 2),
    Same('conv_kernel', 'mamba.conv_width', 4), Fixed('hidden_act', 'silu'),
    Fixed('use_bias', False), Fixed('use_conv_bias', True),
    Ours({'pattern': letter, 'mlp': 'none', 'position': 'none'}),
  )  # fmt: skip


def _heads(config, heads='num_heads', width='head_dim', expand='expand'):
  """Heads of Mamba-2 share the inner width out."""
  n, inner = config(heads), config(expand, 2) * config('hidden_size')
  each = inner // n if config.given(width) == 'auto' else config(width, 0, 1)
  each = each or inner // n
  if n * each != inner:
    config.refuse(
      heads, f'x {width}={each} is not {expand}={config(expand, 2)} x '
      f'hidden_size={config("hidden_size")}'
    )  # fmt: skip
  return {'mamba.head_dim': each}


MAMBA2_HEADS = Computed(
  _heads,
  lambda model: {
    'num_heads': mamba.num_heads(model),
    'head_dim': model.mamba.head_dim,
  },
)


def _unlimited(config):
  limits = config('time_step_limit', (0.0, math.inf))
  known = (math.inf, 'inf', {'__float__': 'Infinity'})
  if len(limits) != 2 or limits[0] not in (0, 0.0) or limits[1] not in known:
    config.refuse('time_step_limit', 'clips step sizes, which are not here')
  return {}


UNLIMITED = Computed(_unlimited, lambda model: {})
# Of families that take no less of any step, and no time_step_limit; others
# only draw biases by it.
FLOOR = Same('time_step_min', 'mamba.step_floor', 1e-3, zero=True)
NAMES = dict(
  embedding='backbone.embeddings', norm='backbone.norm_f',
  layer='backbone.layers.{}', mamba='mixer', mamba2='mixer', mixer_norm='norm',
)  # fmt: skip
TIED = Same('tie_word_embeddings', 'tied_embedding', True)
ALONE_SILENT = 'intermediate_size', 'layer_types', 'fused_conv'


def _periodic(period, offset, usual, letters):
  """Fields that say: layers i with i % period == offset are the second letter.

  usual: (period, offset) of files that say none.
  """

  def read(config):
    every, first = config(period, usual[0]), config(offset, usual[1], 0)
    return ''.join(
      letters[i % every == first] for i in range(config('num_hidden_layers'))
    )

  def write(found):
    for every in range(1, len(found) + 1):
      for first in range(every):
        made = ''.join(letters[i % every == first] for i in range(len(found)))
        if made == found:
          return {period: every, offset: first}
    if letters[1] in found:
      return {}
    return {period: len(found) + 1, offset: len(found)}

  return read, write


_MIXED = _periodic('attn_layer_period', 'attn_layer_offset', (8, 4), 'SF')
_SPARSE = _periodic('expert_layer_period', 'expert_layer_offset', (2, 1), 'DE')


def _jamba_experts(config):
  """One expert is none."""
  found = config.checked(
    'num_experts', config('num_experts', 16), 'experts.count'
  )
  if found == 1:
    return {'experts.count': 0}
  return {
    'experts.count': found,
    'experts.pattern': rows.unit(_SPARSE[0](config)),
  }


JAMBA = (
  Computed(
    lambda config: {'pattern': rows.unit(_MIXED[0](config))},
    lambda model: _MIXED[1](kin.pattern(model)),
  ),
  Computed(
    _jamba_experts,
    lambda model: {'num_experts': model.experts.count or 1}
    | (_SPARSE[1](expert.behind(model)) if model.experts.count else {}),
  ),
  Same('num_experts_per_tok', 'experts.top_k', 2),
  Same('mamba_d_state', 'mamba.state', 16),
  Same('mamba_d_conv', 'mamba.conv_width', 4),
  Same('mamba_expand', 'mamba.expand', 2), _rank('mamba_dt_rank'),
  Fixed('mamba_conv_bias', True), Fixed('mamba_proj_bias', False),
  Ours({
    'mamba.inner_norm': True, 'experts.normalise': False,
  }),
)  # fmt: skip
NO_POSITION = Ours({'position': 'none'})


def _lfm_layers(config):
  depth = range(config('num_hidden_layers'))
  held = config.numbers('full_attn_idxs', list(depth))
  return ''.join('F' if i in held else 'V' for i in depth)


def _lfm_width(config):
  """The mlp's width, which older files leave to be rounded."""
  width = config('block_ff_dim', 0, 1) or config('intermediate_size')
  if config('block_auto_adjust_ff_dim', True):
    times, width = config('block_ffn_dim_multiplier', 1.0), int(2 * width / 3)
    if not 1 <= times * width < reader.MOST:
      config.refuse('block_ffn_dim_multiplier', f'makes {width} no width')
    width = int(times * width)
    unit = config('block_multiple_of', 256)
    width = -(-width // unit) * unit
  return {'d_ff': width}


LFM_WIDTH = Computed(
  _lfm_width,
  lambda model: {
    'intermediate_size': model.d_ff, 'block_auto_adjust_ff_dim': False,
  },
)  # fmt: skip
LFM = (
  *kin.DIMS, kin.HEADS, Same('norm_eps', 'norm_epsilon', 1e-5),
  Same('tie_word_embeddings', 'tied_embedding', True, ('tie_embedding',)),
  rows.rope(1e6), Fixed('conv_bias', False),
  Same('conv_L_cache', 'short_conv.width', 3),
  kin.layers(_lfm_layers, {'F': 'full_attention', 'V': 'conv'}, ''),
  Ours({'qk_norm': 'head', 'mlp': 'swiglu'}),
)  # fmt: skip
LFM_PLACES = expert.places(
  lambda config: kin.leading('num_dense_layers', 2)(config),
  lambda letters: {'num_dense_layers': len(letters) - len(letters.lstrip('D'))},
)
LFM_NAMES = dict(
  norm='model.embedding_norm', mixer_norm='operator_norm', mlp_norm='ffn_norm',
  mlp='feed_forward', gate='w1', up='w3', down='w2', output='out_proj',
  query_norm='q_layernorm', key_norm='k_layernorm', short_conv='conv',
)  # fmt: skip
BESIDE = {  # Mamba-2 between layers of attention: words of either version
  'linear_attention': 'M', 'mamba': 'M', 'full_attention': 'F',
  'attention': 'F',
}  # fmt: skip


def _beside(config):
  every = lambda: kin.every('M')(config)
  return {'pattern': rows.unit(config.each('layer_types', BESIDE, every))}


HYBRID = (
  Computed(
    lambda config: _heads(
      config, 'mamba_n_heads', 'mamba_d_head', 'mamba_expand'
    ),
    lambda model: {
      'mamba_n_heads': mamba.num_heads(model),
      'mamba_d_head': model.mamba.head_dim,
    },
  ),
  Same('mamba_expand', 'mamba.expand', 2),
  Same('mamba_n_groups', 'mamba.groups', 1),
  Same('mamba_d_state', 'mamba.state', 256),
  Same('mamba_d_conv', 'mamba.conv_width', 4),
  Fixed('mamba_conv_bias', True), Fixed('mamba_proj_bias', False), UNLIMITED,
)  # fmt: skip
GRANITE_HYBRID = (
  Computed(
    _beside,
    lambda model: {
      'layer_types': [
        {'M': 'linear_attention', 'F': 'full_attention'}.get(x, x)
        for x in kin.pattern(model)
      ]
    },
  ),
  Choice(
    'position_embedding_type', 'position',
    {None: 'none', 'nope': 'none', 'rope': 'rope'}, None,
  ),
  Fixed('normalization_function', 'rmsnorm'),
)  # fmt: skip


def _granite_width(config):
  """Without experts the shared ones are the mlp."""
  count = config('num_local_experts', 8, 0)
  config.checked('num_local_experts', count, 'experts.count')
  shared = config('shared_intermediate_size', 1024, 0)
  if not count:
    config.checked('shared_intermediate_size', shared, 'd_ff')
    config('intermediate_size', 0)
    return {'experts.count': 0, 'd_ff': shared}
  name, own = 'shared_intermediate_size', 'intermediate_size'
  times = expert.multiple(config, name, shared, own)
  return {'experts.count': count, 'experts.shared': times}


def _written_granite_width(model):
  own = model.experts
  if not own.count:
    return {'num_local_experts': 0, 'shared_intermediate_size': model.d_ff}
  width = own.shared * (own.d_ff or model.d_ff)
  return {
    'num_local_experts': own.count, 'shared_intermediate_size': width
  }  # fmt: skip


GRANITE_WIDTH = Computed(_granite_width, _written_granite_width)
FAMILIES = {
  'mamba': family(
    'MambaForCausalLM', _only_mamba('S'), _rank('time_step_rank'), TIED,
    silent=ALONE_SILENT, **NAMES,
  ),
  'mamba2': family(
    'Mamba2ForCausalLM', _only_mamba('M'), MAMBA2_HEADS, UNLIMITED,
    Same('n_groups', 'mamba.groups', 8),
    Same('tie_word_embeddings', 'tied_embedding', False),
    silent=ALONE_SILENT, **NAMES,
  ),
  'falcon_mamba': family(
    'FalconMambaForCausalLM', _only_mamba('S'), _rank('time_step_rank'), TIED,
    Same('mixer_rms_eps', 'mamba.norm_epsilon', 1e-6),
    Ours({'mamba.inner_norm': True, 'mamba.inner_norm_scale': False}),
    silent=ALONE_SILENT, **NAMES,
  ),
  'lfm2': family(
    'Lfm2ForCausalLM', LFM, LFM_WIDTH,
    silent=('full_attn_idxs', 'block_multiple_of', 'block_ffn_dim_multiplier'),
    **LFM_NAMES,
  ),
  'lfm2_moe': family(
    'Lfm2MoeForCausalLM', LFM, kin.WIDTH, expert.COUNT, expert.TOP,
    Same('moe_intermediate_size', 'experts.d_ff'),
    Same('norm_topk_prob', 'experts.normalise', True),
    Same('routed_scaling_factor', 'experts.scale', 1.0),
    Choice('use_expert_bias', 'experts.bias_rate', {True: 1e-3, False: 0.0},
           True),
    LFM_PLACES,
    Ours({'experts.scores': 'sigmoid', 'experts.sum_epsilon': 1e-6}),
    **LFM_NAMES | kin.EXPERT_NAMES | dict(
      expert_gate='w1', expert_up='w3', expert_down='w2',
      router_bias='expert_bias',
    ),
  ),
  'granitemoehybrid': family(
    'GraniteMoeHybridForCausalLM', kin.llama(), HYBRID, GRANITE_HYBRID,
    GRANITE_WIDTH, Same('num_experts_per_tok', 'experts.top_k', 2), dense.BIAS,
    expert.GRANITE,
    silent=('mamba_chunk_size', 'layers_block_type', 'init_method'),
    **expert.GRANITE_NAMES | dict(mamba2='mamba', mlp='shared_mlp'),
  ),
  'jamba': family(
    'JambaForCausalLM', kin.llama(rotary=NO_POSITION), JAMBA,
    silent=('layer_types', 'expert_layer_period', 'expert_layer_offset'),
    **kin.EXPERT_NAMES | dict(
      mamba='mamba', mlp='feed_forward', mlp_norm='pre_ff_layernorm',
      norm='model.final_layernorm', router='router',
    ),
  ),
}  # fmt: skip
