"""Zamba2 (arXiv:2411.15242): Mamba-2, some of it behind shared blocks."""

from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import recurrent
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same
from paraxis.models.mixers import attention
from paraxis.models.mixers import mamba

# By their words of today and before.
_WORDS = {'linear_attention': 'M', 'mamba': 'M', 'hybrid': 'H'}
_LAYERS = 'layers_block_type'
# Of files that list none: 54 layers.
_USUAL = 'M' + 'MMMMMH' * 7 + 'MMMMH' + 'MMMH' + 'MM'


def _check(config, name, derived, **others):
  """UserError: a field that follows from others says something else."""
  if config.given(name) not in (None, derived):
    given = ', '.join(f'{k}={x}' for k, x in others.items())
    config.refuse(name, f'is not {derived}, as of {given}')


def _layers(config):
  found = config.each(_LAYERS, _WORDS, lambda: _USUAL)
  depth = config('num_hidden_layers', 54)
  if len(found) != depth:
    config.refuse('num_hidden_layers', f'is not the {len(found)} of {_LAYERS}')
  users = [i for i, letter in enumerate(found) if letter == 'H']
  _check(config, 'hybrid_layer_ids', users, **{_LAYERS: found})
  return {'num_layers': depth, 'pattern': rows.unit(found)}


def _written_layers(model):
  words = {'M': 'linear_attention', 'H': 'hybrid'}
  every = kin.pattern(model)
  if not set(every) <= set(words):
    return {}
  return {
    'num_hidden_layers': len(every), _LAYERS: [words[x] for x in every],
  }  # fmt: skip


def _attention(config):
  """Heads of [x, e] together; scores by half their width."""
  d, n = config('hidden_size', 2560), config('num_attention_heads', 32)
  k, width = config('num_key_value_heads', n), 2 * d // n
  if not width or n * width != 2 * d:
    config.refuse('num_attention_heads', f'does not divide 2 x hidden_size={d}')
  sizes = dict(hidden_size=d, num_attention_heads=n)
  _check(config, 'attention_hidden_size', 2 * d, **sizes)
  for name in ('attention_head_dim', 'head_dim'):
    _check(config, name, width, **sizes)
  rank = config('adapter_rank', 128)
  has = config('use_shared_attention_adapter', False)
  if has and k != n:
    config.refuse(
      'use_shared_attention_adapter', f'adds {n} heads to num_key_value_heads='
      f'{k} of keys'
    )  # fmt: skip
  return {
    'd_model': d, 'num_heads': n, 'num_kv_heads': k, 'head_dim': width,
    'attention_scale': (width / 2) ** -0.5, 'hybrid.mlp_rank': rank,
    'hybrid.attention_rank': rank if has else 0,
    'hybrid.d_ff': config('intermediate_size', 0, 0) or 4 * d,
  }  # fmt: skip


def _written_attention(model):
  own = model.hybrid
  return {
    'hidden_size': model.d_model,
    'num_attention_heads': model.num_heads,
    'num_key_value_heads': attention.num_kv_heads(model),
    'adapter_rank': own.mlp_rank,
    'use_shared_attention_adapter': own.attention_rank > 0,
    'intermediate_size': own.d_ff or model.d_ff,
  }


def _heads(config):
  """Heads of Mamba-2 share the inner width out."""
  n, times = config('n_mamba_heads', 8), config('mamba_expand', 2)
  inner = times * config('hidden_size', 2560)
  if inner % n:
    config.refuse('n_mamba_heads', f'does not divide the inner width {inner}')
  sizes = dict(n_mamba_heads=n, mamba_expand=times, hidden_size=inner // times)
  _check(config, 'mamba_headdim', inner // n, **sizes)
  return {
    'mamba.expand': times, 'mamba.heads': n, 'mamba.head_dim': inner // n,
  }  # fmt: skip


def _written_heads(model):
  return {
    'n_mamba_heads': mamba.num_heads(model), 'mamba_expand': model.mamba.expand,
  }  # fmt: skip


_ROPE = rows.rope()


def _positions(config):
  if config('use_mem_rope', False):
    return {'position': 'rope'} | _ROPE.read(config)
  for name in ('rope_theta', 'rope_parameters', rows.OLD_ROPE):
    config.given(name)
  return {'position': 'none'}


def _written_positions(model):
  rotates = model.position == 'rope'
  return {'use_mem_rope': rotates} | (_ROPE.write(model) if rotates else {})


ZAMBA2 = (
  Same('vocab_size', 'vocab_size', 32000),
  Computed(_layers, _written_layers), Computed(_attention, _written_attention),
  Computed(_heads, _written_heads), Computed(_positions, _written_positions),
  Same('num_mem_blocks', 'hybrid.blocks', 1),
  Choice('hidden_act', 'hybrid.mlp', kin.GATES, 'gelu'),
  Same('rms_norm_eps', 'norm_epsilon', 1e-5),
  # Without it `transformers` ties no blocks either.
  Fixed('tie_word_embeddings', True),
  Same('mamba_d_state', 'mamba.state', 64),
  Same('mamba_d_conv', 'mamba.conv_width', 4),
  Same('mamba_ngroups', 'mamba.groups', 1),
  recurrent.FLOOR, Fixed('add_bias_linear', False),
  # It scaled the rotary base once; now it does not.
  Fixed('use_long_context', False),
  Ours({'mlp': 'none', 'mamba.norm_epsilon': 1e-5, 'tied_embedding': True}),
)  # fmt: skip
FAMILIES = {
  'zamba2': family(
    'Zamba2ForCausalLM', ZAMBA2,
    silent=(
      'use_conv_bias', 'use_mem_eff_path', 'num_logits_to_keep', 'kv_channels',
      'num_query_groups', 'time_step_limit',
    ),
    norm='model.final_layernorm', mamba2='mamba', inner='mamba_decoder',
    join='linear', block='shared_transformer', mlp='feed_forward',
    mlp_norm='pre_ff_layernorm', gate_up='gate_up_proj',
  ),
}  # fmt: skip
