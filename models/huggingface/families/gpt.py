"""GPT-2, and families whose config.json counts in its words."""

from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

GPT2 = (
  Same('vocab_size', 'vocab_size'), Same('n_embd', 'd_model'),
  Same('n_layer', 'num_layers'), Same('n_head', 'num_heads'),
  Computed(
    lambda config: {'d_ff': config('n_inner', 4 * config('n_embd'))},
    lambda model: {'n_inner': model.d_ff},
  ),
  Same('n_positions', 'max_positions'),
  Same('layer_norm_epsilon', 'norm_epsilon', 1e-5),
  Choice(
    'activation_function', 'mlp',
    {'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'gelu_fast': 'gelu'},
    'gelu_new',
  ),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Fixed('scale_attn_weights', True),
  Fixed('scale_attn_by_inverse_layer_idx', False),
  Fixed('add_cross_attention', False),
  Ours(dict(
    norm='layernorm', position='learned', attention_bias=True,
    attention_output_bias=True, mlp_bias=True,
  )),
)  # fmt: skip
GPT2_NAMES = dict(
  embedding='transformer.wte', positions='transformer.wpe',
  norm='transformer.ln_f', layer='transformer.h.{}', attention='attn',
  qkv='c_attn', qkv_order='conv1d', output='c_proj', conv1d=True,
  mixer_norm='ln_1', mlp_norm='ln_2', up='c_fc', down='c_proj',
)  # fmt: skip


def _rotary_dim(config):
  d, n, part = config('n_embd'), config('n_head'), config('rotary_dim', 64)
  if part > d // n or config.config.get('rotary_dim', 64) is None:
    config.refuse(
      'rotary_dim', f'is wider than a head, n_embd={d} / n_head={n}'
    )
  return {'rope_fraction': part * n / d}


# GPT-J and its kin count in GPT-2's words.
GPTJ = (
  *(row for row in GPT2 if isinstance(row, Same | Computed)
    and getattr(row, 'ours', '') not in ('max_positions', 'tied_embedding')),
  Choice('activation_function', 'mlp', kin.PLAIN, 'gelu_new'),
  Same('tie_word_embeddings', 'tied_embedding', False),
  Fixed('rotary', True), Fixed('scale_attn_weights', True),
  Computed(
    _rotary_dim,
    lambda model: {'rotary_dim': round(model.rope_fraction * model.head_width)},
  ),
  Ours(dict(
    norm='layernorm', residual='shared', mlp_bias=True, head_bias=True,
  )),
)  # fmt: skip
GPTJ_NAMES = dict(
  embedding='transformer.wte', norm='transformer.ln_f',
  layer='transformer.h.{}', attention='attn', output='out_proj',
  mixer_norm='ln_1', up='fc_in', down='fc_out', neighbours=True,
)  # fmt: skip


def _one_or_all(config):
  heads = 1 if config('multi_query', True) else config('n_head')
  if config('num_key_value_heads', heads) != heads:
    config.refuse('num_key_value_heads', f'is not {heads}, as multi_query says')
  return {'num_kv_heads': heads}


BIGCODE = (
  *(row for row in GPT2 if getattr(row, 'theirs', '') not in (
    'scale_attn_by_inverse_layer_idx', 'activation_function')),
  Choice('activation_function', 'mlp', kin.PLAIN, 'gelu_pytorch_tanh'),
  Computed(
    _one_or_all, lambda model: {'multi_query': model.num_kv_heads == 1}
  ),
)  # fmt: skip


def _neo_layers(config):
  """Kinds of attention as [[[kinds], times], ...], and written out."""
  name, depth, found = 'attention_types', config('num_layers'), ''
  for part in config(name, [[['global', 'local'], 12]]):
    pair = isinstance(part, list) and len(part) == 2
    if not (pair and isinstance(part[0], list) and type(part[1]) is int):
      config.refuse(name, 'is not [[[kinds], times], ...]')
    kinds, times = part[0], min(part[1], depth + 1)
    if not all(k in ('global', 'local') for k in kinds):
      config.refuse(name, 'has kinds that are not global or local')
    found += ''.join('FW'[k == 'local'] for k in kinds) * times
  if len(found) != depth:
    config.refuse(name, f'has {len(found)} kinds, num_layers={depth}')
  words = [('global', 'local')[x == 'W'] for x in found]
  if config('attention_layers', words) != words:
    config.refuse('attention_layers', f'is not {name}={words}')
  window = config('window_size', 256)
  return {'pattern': rows.unit(found)} | (
    {'window': window} if 'W' in found else {}
  )


def _neo_written(model):
  letters = kin.pattern(model)
  words = [('global', 'local')[x == 'W'] for x in letters]
  return dict(
    attention_types=[[words, 1]], attention_layers=words,
    window_size=model.window or 256,
  )  # fmt: skip


GPT_NEO = (
  Same('vocab_size', 'vocab_size'), Same('hidden_size', 'd_model'),
  Same('num_layers', 'num_layers'), Same('num_heads', 'num_heads'),
  Computed(
    lambda config: {
      'd_ff': config('intermediate_size', 4 * config('hidden_size'))
    },
    lambda model: {'intermediate_size': model.d_ff},
  ),
  Same('max_position_embeddings', 'max_positions'),
  Same('layer_norm_epsilon', 'norm_epsilon', 1e-5),
  Choice('activation_function', 'mlp', kin.PLAIN, 'gelu_new'),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Computed(_neo_layers, _neo_written),
  Ours(dict(
    norm='layernorm', position='learned', attention_output_bias=True,
    mlp_bias=True, attention_scale=1.0,
  )),
)  # fmt: skip

FAMILIES = {
  'gpt2': family('GPT2LMHeadModel', GPT2, silent=('n_ctx',), **GPT2_NAMES),
  'gptj': family('GPTJForCausalLM', GPTJ, **GPTJ_NAMES),
  'codegen': family(
    'CodeGenForCausalLM', GPTJ, silent=('n_ctx',), qkv='qkv_proj',
    qkv_order='codegen', **GPTJ_NAMES,
  ),
  'gpt-sw3': family('GPT2LMHeadModel', GPT2, silent=('n_ctx',), **GPT2_NAMES),
  'gpt_bigcode': family(
    'GPTBigCodeForCausalLM', BIGCODE,
    silent=('attention_softmax_in_fp32', 'scale_attention_softmax_in_fp32'),
    **GPT2_NAMES | dict(qkv_order='grouped', conv1d=False),
  ),
  'gpt_neo': family(
    'GPTNeoForCausalLM', GPT_NEO,
    silent=('embed_dropout', 'classifier_dropout'),
    embedding='transformer.wte', positions='transformer.wpe',
    norm='transformer.ln_f', layer='transformer.h.{}',
    attention='attn.attention', output='out_proj', mixer_norm='ln_1',
    mlp_norm='ln_2', up='c_fc', down='c_proj',
  ),
}  # fmt: skip
