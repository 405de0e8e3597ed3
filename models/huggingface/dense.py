"""Families of attention and an mlp."""

from typing import Any

from paraxis.models.huggingface import kin
from paraxis.models.huggingface import rows
from paraxis.models.huggingface.kin import family
from paraxis.models.huggingface.kin import llama
from paraxis.models.huggingface.rows import Choice
from paraxis.models.huggingface.rows import Computed
from paraxis.models.huggingface.rows import Fixed
from paraxis.models.huggingface.rows import Ours
from paraxis.models.huggingface.rows import Same

BIAS = Choice(
  'attention_bias', ('attention_bias', 'attention_output_bias'),
  {False: (False, False), True: (True, True)}, False,
)  # fmt: skip
MLP_BIAS = Same('mlp_bias', 'mlp_bias', False)
QKV_BIAS = Ours({'attention_bias': True})
NO_BIAS = Fixed('attention_bias', False)
SANDWICH = Ours({'norm_placement': 'sandwich'})
POST = Ours({'norm_placement': 'post'})


def _window_or_not(field='sliding_window'):
  """All layers have a window, or none."""

  def read(config):
    width = config(field, 0)
    return {'pattern': 'W', 'window': width} if width else {'pattern': 'F'}

  def write(model):
    return {field: model.window if 'W' in kin.pattern(model) else None}

  return Computed(read, write)


def _qwen_layers(config):
  """Layers from max_window_layers on have a window, if windows are used."""
  depth = config('num_hidden_layers')
  if not config('use_sliding_window', False):
    return 'F' * depth
  return ''.join(
    'W' if i >= config('max_window_layers', 28) else 'F' for i in range(depth)
  )


USES_WINDOW = Computed(
  lambda config: config('use_sliding_window', False) and {} or {},
  lambda model: {'use_sliding_window': 'W' in kin.pattern(model)},
)
QWEN_LAYERS = (kin.layers(_qwen_layers), USES_WINDOW)


def _scale(default):
  """attention_scale from query_pre_attn_scalar."""
  return Computed(
    lambda config: {
      'attention_scale': config('query_pre_attn_scalar', default) ** -0.5
    },
    lambda model: {
      'query_pre_attn_scalar': _whole(
        (model.attention_scale or model.head_width**-0.5) ** -2
      )
    },
  )


def _whole(x):
  return round(x) if abs(x - round(x)) < 1e-9 * x else x


GEMMA_SCALE = Computed(
  lambda config: {'embedding_scale': config('hidden_size') ** 0.5},
  lambda model: {},
)
GEMMA = (
  Ours({'norm_zero_centered': True}), GEMMA_SCALE,
  Fixed('use_bidirectional_attention', None), NO_BIAS,
)  # fmt: skip
GEMMA_CAPS = (
  Same('attn_logit_softcapping', 'attention_softcap', 0.0, null=0.0),
  Same('final_logit_softcapping', 'logit_softcap', 0.0, null=0.0),
)


def _per_kind(theta, local):
  """Rotary parameters that layers with a window have of their own."""

  def read(config):
    both: Any = config('rope_parameters', None)
    if both is None:  # fields before transformers 5
      both = dict(
        full_attention=dict(config('rope_scaling', {}) or {})
        | dict(rope_theta=config('rope_theta', theta)),
        sliding_attention=dict(
          rope_theta=config('rope_local_base_freq', local)
        ),
      )
    if 'full_attention' not in both:
      both = dict(full_attention=both, sliding_attention=both)
    out = rows.scaling(config, 'rope_parameters', both['full_attention'], theta)
    other = both.get('sliding_attention') or both['full_attention']
    if other.get('rope_type', 'default') != 'default':
      if other == both['full_attention']:
        return out
      config.refuse('rope_parameters', 'scales the layers with a window')
    same = out.get('rope_scaling', 'none') == 'none'
    base = float(other.get('rope_theta') or local)
    if not same or base != out['rope_theta']:
      out['rope_local_theta'] = base
    return out

  def write(model):
    full = rows.written_rope(model)
    base = model.rope_local_theta
    other = dict(rope_type='default', rope_theta=base) if base else full
    return {
      'rope_parameters': dict(full_attention=full, sliding_attention=other)
    } | rows.written_length(model)

  return Computed(read, write)


def _smollm(config):
  given = config('no_rope_layers', None)
  depth = config('num_hidden_layers')
  if given is None:
    step = config('no_rope_layer_interval', 4)
    given = [int((i + 1) % step != 0) for i in range(depth)]
  return {'pattern': rows.unit(''.join('NF'[x] for x in given))}


SMOLLM_LAYERS = (
  Fixed('use_sliding_window', False),
  Computed(
    _smollm,
    lambda model: {
      'no_rope_layers': [int(x != 'N') for x in kin.pattern(model)]
    },
  ),
)
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

FAMILIES = {
  'llama': family('LlamaForCausalLM', llama(), BIAS, MLP_BIAS),
  'mistral': family('MistralForCausalLM', llama(), _window_or_not()),
  'qwen2': family('Qwen2ForCausalLM', llama(), QKV_BIAS, QWEN_LAYERS),
  'qwen3': family(
    'Qwen3ForCausalLM', llama(), BIAS, QWEN_LAYERS, Ours({'qk_norm': 'head'})
  ),
  'gemma': family(
    'GemmaForCausalLM',
    llama(tied=True, default_act='gelu_pytorch_tanh'), GEMMA,
  ),
  'gemma2': family(
    'Gemma2ForCausalLM', llama(tied=True, act='hidden_activation'), GEMMA,
    SANDWICH, _scale(256), GEMMA_CAPS, kin.layers(kin.periodic('WF')),
    **kin.SANDWICH,
  ),
  'gemma3_text': family(
    'Gemma3ForCausalLM',
    llama(
      tied=True, act='hidden_activation', rotary=_per_kind(1e6, 1e4)
    ),
    Ours({'norm_zero_centered': True, 'qk_norm': 'head'}), GEMMA_SCALE,
    Fixed('use_bidirectional_attention', False), NO_BIAS, SANDWICH,
    _scale(256), GEMMA_CAPS, kin.layers(kin.periodic('WWWWWF')),
    silent=('sliding_window_pattern', '_sliding_window_pattern'),
    **kin.SANDWICH,
  ),
  'smollm3': family(
    'SmolLM3ForCausalLM', llama(theta=2e6, tied=True), BIAS, MLP_BIAS,
    SMOLLM_LAYERS, silent=('layer_types', 'no_rope_layer_interval'),
  ),
  'olmo2': family(
    'Olmo2ForCausalLM', llama(epsilon=1e-5), BIAS, POST,
    Ours({'qk_norm': 'all'}),
  ),
  'olmo3': family(
    'Olmo3ForCausalLM', llama(epsilon=1e-5, rotary=_per_kind(5e5, 5e5)), BIAS,
    POST, Ours({'qk_norm': 'all'}), kin.layers(kin.periodic('WWWF')),
  ),
  'gpt2': family('GPT2LMHeadModel', GPT2, **GPT2_NAMES),
}  # fmt: skip
