"""Bamba and Nemotron-H: Mamba-2 between layers of attention.

Nemotron-H (arXiv:2504.03624) is a list of blocks, each a mixer, an mlp or
experts with a norm of its own; a layer here is a mixer with what follows it.
"""

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import dense_kin
from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import recurrent
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same


def _attends(config):
  depth = config('num_hidden_layers')
  held = config.numbers('attn_layer_indices', [])
  return {'pattern': rows.unit(''.join('MF'[i in held] for i in range(depth)))}


BAMBA_LAYERS = Computed(
  _attends,
  lambda model: {
    'attn_layer_indices': [
      i for i, x in enumerate(kin.pattern(model)) if x == 'F'
    ]
  },
)
# Blocks as one letter, and by their words of today and before.
BLOCKS = {
  'linear_attention': 'M', 'mamba': 'M', 'full_attention': '*',
  'attention': '*', 'moe': 'E', 'mlp': '-',
}  # fmt: skip
OLD_BLOCKS = 'hybrid_override_pattern'


def _blocks(config):
  """A letter for each block."""
  name = 'layers_block_type'
  if config.given(OLD_BLOCKS) is not None:
    found = config(OLD_BLOCKS, '')
    if set(found) - set('M*E-'):
      config.refuse(OLD_BLOCKS, 'has blocks that are not M, *, E or -')
    return found
  found = config(name, ['mamba', 'moe', 'attention', 'mlp'])
  if not found:
    config.refuse(name, 'has no block')
  config.checked(name, len(found), 'num_layers')
  if not all(isinstance(x, str) and x in BLOCKS for x in found):
    config.refuse(name, f'has blocks that are not {", ".join(BLOCKS)}')
  return ''.join(BLOCKS[x] for x in found)


def _layers(config):
  """Mixers with what follows them: at most one block."""
  blocks, layers = _blocks(config), []
  for block in blocks:
    if block in 'M*':
      layers.append(block)
    elif not layers or len(layers[-1]) > 1:
      config.refuse(
        'layers_block_type', 'has an mlp or experts that follow no mixer'
      )
    else:
      layers[-1] += block
  if not layers:
    config.refuse('layers_block_type', 'has no mixer')
  follow = [x[1:] for x in layers]
  count, width = (
    config('n_routed_experts', 8),
    config('intermediate_size', 21504),
  )
  units = [x[0] + ('-' if x[1:] else '') for x in layers]
  out = {
    'num_layers': len(layers),
    'pattern': ''.join(rows.unit(units)),
  }
  if not any(follow):
    return out | {'mlp': 'none'}
  if 'E' in follow:
    places = ''.join('D' if x == '-' else 'E' for x in follow)
    out['experts.pattern'] = rows.unit(places)
    out['experts.count'] = config.checked(
      'n_routed_experts', count, 'experts.count'
    )
  return out | ({'d_ff': width} if '-' in follow else {})


def _written_layers(model):
  from paraxis.models import layer

  words = {'M': 'linear_attention'}
  behind = {'': ['mlp'], 'E': ['moe'], '.': []}
  found = []
  for kind in layer.kinds_of(model)[1]:
    found += [words.get(kind[0], 'full_attention'), *behind.get(kind[1:], [])]
  return dict(
    layers_block_type=found, n_routed_experts=model.experts.count or 8,
    intermediate_size=model.d_ff,
  )  # fmt: skip


def _beside(config):
  """Shared experts have a width of their own."""
  name, own = 'moe_shared_expert_intermediate_size', 'moe_intermediate_size'
  each, together = config(own, 7688), config(name, 7688)
  if 'E' not in _blocks(config):
    return {}
  shared = expert.multiple(config, name, together, own)
  return {'experts.shared': shared, 'experts.d_ff': each}


def _written_beside(model):
  width = model.experts.d_ff or model.d_ff
  return dict(
    moe_intermediate_size=width,
    moe_shared_expert_intermediate_size=max(model.experts.shared, 1) * width,
  )


NEMOTRON = (
  Same('vocab_size', 'vocab_size'), Same('hidden_size', 'd_model'),
  kin.HEADS, Computed(_layers, _written_layers),
  Same('layer_norm_epsilon', 'norm_epsilon', 1e-5),
  Same('tie_word_embeddings', 'tied_embedding', False),
  Same('mamba_num_heads', 'mamba.heads', 128),
  Same('mamba_head_dim', 'mamba.head_dim', 64),
  Same('n_groups', 'mamba.groups', 8),
  Same('ssm_state_size', 'mamba.state', 128),
  Same('conv_kernel', 'mamba.conv_width', 4), recurrent.FLOOR,
  Fixed('mamba_hidden_act', 'silu'), Fixed('use_conv_bias', True),
  Fixed('use_bias', False), Fixed('mamba_proj_bias', False),
  Fixed('mlp_bias', False), Fixed('moe_latent_size', None),
  Fixed('sliding_window', None),
  Same('num_experts_per_tok', 'experts.top_k', 2), *expert.GROUPED,
  expert.BIASED, Same('norm_topk_prob', 'experts.normalise', True),
  Computed(_beside, _written_beside),
  # Its attention knows no positions.
  Ours({'position': 'none'}),
)  # fmt: skip


def _activation(config):
  """Of mlps and experts alike, without a gate."""
  found = Choice('mlp_hidden_act', 'mlp', kin.PLAIN, 'relu2').read(config)
  blocks = _blocks(config)
  return found if '-' in blocks or 'E' in blocks else {}


FAMILIES = {
  'bamba': family(
    'BambaForCausalLM', kin.llama(epsilon=1e-5), dense_kin.fraction(0.5),
    recurrent.HYBRID, BAMBA_LAYERS, dense.BIAS, dense.MLP_BIAS,
    silent=('mamba_chunk_size', 'z_loss_coefficient', 'num_logits_to_keep'),
    mamba2='mamba', mlp='feed_forward', mlp_norm='pre_ff_layernorm',
    norm='model.final_layernorm',
  ),
  'nemotron_h': family(
    'NemotronHForCausalLM', NEMOTRON,
    Computed(_activation, Choice('mlp_hidden_act', 'mlp', kin.PLAIN).write),
    silent=(
      # Their attention has no biases, whatever the field says.
      'attention_bias', 'expand', 'num_hidden_layers', 'mamba_ssm_cache_dtype',
      'moe_shared_expert_overlap', 'mtp_layers_block_type', 'n_shared_experts',
      'num_logits_to_keep', 'mtp_hybrid_override_pattern', 'time_step_limit',
    ),
    blocks=True, embedding='backbone.embeddings', norm='backbone.norm_f',
    layer='backbone.layers.{}', mixer_norm='norm', mlp_norm='norm',
    **kin.EXPERT_NAMES | dict(
      mamba2='mixer', attention='mixer', mlp='mixer',
    ),
  ),
}  # fmt: skip
