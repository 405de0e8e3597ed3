"""Families of attention and an mlp."""

from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.kin import llama
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

BIAS = Choice(
  'attention_bias', ('attention_bias', 'attention_output_bias'),
  {False: (False, False), True: (True, True)}, False,
)  # fmt: skip
MLP_BIAS = Same('mlp_bias', 'mlp_bias', False)
QKV_BIAS = Ours({'attention_bias': True})
NO_BIAS = Fixed('attention_bias', False)
SANDWICH = Ours({'norm_placement': 'sandwich'})
POST = Ours({'norm_placement': 'post'})


FLAG = 'use_sliding_window'


def _window_or_not(field='sliding_window', flag=''):
  """All layers have a window, or none; flag: a field without which none has."""

  def read(config):
    used = not flag or config(flag, False)
    width = config(field, 0, 1) if used else config.given(field) and 0
    return {'pattern': 'W', 'window': width} if width else {'pattern': 'F'}

  def write(model):
    has = 'W' in kin.pattern(model)
    return {field: model.window if has else None} | (
      {flag: has} if flag else {}
    )

  return Computed(read, write)


def _qwen_layers(config):
  """Layers from max_window_layers on have a window, if windows are used."""
  depth = config('num_hidden_layers')
  if not (config(FLAG, False) and config('sliding_window', 0, 1)):
    return 'F' * depth
  return ''.join(
    'W' if i >= config('max_window_layers', 28, 0) else 'F'
    for i in range(depth)
  )


def _uses_window(config):
  listed = config('layer_types', [])
  if not config(FLAG, False) and kin.LAYERS['W'] in listed:
    config.refuse(FLAG, 'is not true, and layer_types has layers with a window')
  return {}


USES_WINDOW = Computed(
  _uses_window, lambda model: {FLAG: 'W' in kin.pattern(model)}
)
QWEN_LAYERS = (kin.layers(_qwen_layers), USES_WINDOW)


def _scale(default):
  """attention_scale from query_pre_attn_scalar."""
  return Computed(
    lambda config: {
      'attention_scale': config('query_pre_attn_scalar', float(default), 1e-9)
      ** -0.5
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
LOGIT_CAP = Same('final_logit_softcapping', 'logit_softcap', 0.0, null=0.0)
GEMMA_CAPS = (
  Same('attn_logit_softcapping', 'attention_softcap', 0.0, null=0.0),
  LOGIT_CAP,
)


def _truncated(rope):
  """Rotary parameters of one kind of layers.

  transformers looks for `truncate` beside those of each kind, not in them.
  """
  if not rope('truncate', True):
    rope.refuse('truncate', 'is only true where kinds of layers have their own')
  return rope


def _older(full, other, names):
  """Fields before transformers 5 that say the same; names: those there are."""
  table = rows.older_too(full)
  table |= {LOCAL_BASE: other.get('rope_theta')}
  return {name: table[name] for name in names if table.get(name) is not None}


LOCAL_BASE = 'rope_local_base_freq'
OLDER = rows.OLD_BASE, rows.OLD_ROPE


def _per_kind(theta, local, older=()):
  """Rotary parameters that layers with a window have of their own.

  older: names of fields before transformers 5, which are written beside them.
  """

  def read(config):
    rope = config.inside('rope_parameters')
    kinds = ('full_attention', 'sliding_attention')
    nested = rope is not None and any(k in rope.config for k in kinds)
    if rope is None:  # fields before transformers 5
      full = _truncated(rows.given_rope(config))
      theta_of = config('rope_theta', float(theta), 1)
      out = rows.scaling(config, full, theta_of)
      found = {'rope_theta': config('rope_local_base_freq', float(local), 1)}
    else:
      full, other = map(rope.inside, kinds) if nested else (rope, rope)
      if full is None:
        return rope.refuse('full_attention', 'is not there')
      for table in (rope, full):
        _truncated(table)
      other = full if other is None else other
      same = dict(rope_type='default') | full.config
      same = _older(same, other.config, older)
      for name in older:
        if config.given(name) not in (None, same.get(name)):
          config.refuse(name, 'and rope_parameters are there, and differ')
      out = rows.scaling(config, full, theta)
      found = rows.scaling(config, other, local if nested else theta)
      if other.config == full.config:
        return out
    if 'rope_scaling' in found:
      config.refuse('rope_parameters', 'scales the layers with a window')
    if 'rope_scaling' in out or found['rope_theta'] != out['rope_theta']:
      out['rope_local_theta'] = found['rope_theta']
    return out

  def write(model):
    full = rows.written_rope(model)
    base = model.rope_local_theta
    other = dict(rope_type='default', rope_theta=base) if base else full
    both = dict(full_attention=full, sliding_attention=other)
    return (
      {'rope_parameters': both}
      | _older(full, other, older)
      | rows.written_length(model)
    )

  return Computed(read, write)


def _smollm(config):
  step = config('no_rope_layer_interval', 4)
  periodic = lambda: ''.join(
    'FN'[(i + 1) % step == 0] for i in range(config('num_hidden_layers'))
  )
  found = config.each('no_rope_layers', {0: 'N', 1: 'F'}, periodic)
  return {'pattern': rows.unit(found)}


SMOLLM_LAYERS = (
  Fixed('use_sliding_window', False),
  Computed(
    _smollm,
    lambda model: {
      'no_rope_layers': [int(x != 'N') for x in kin.pattern(model)]
    },
  ),
)

FAMILIES = {
  'llama': family('LlamaForCausalLM', llama(), kin.DIVIDES, BIAS, MLP_BIAS),
  'internlm3': family(
    'LlamaForCausalLM', llama(epsilon=1e-5), kin.DIVIDES, BIAS, MLP_BIAS
  ),
  'iquestcoder': family(
    'LlamaForCausalLM', llama(epsilon=1e-5), kin.DIVIDES, BIAS, MLP_BIAS
  ),
  'mistral': family('MistralForCausalLM', llama(), _window_or_not()),
  'qwen2': family('Qwen2ForCausalLM', llama(), QKV_BIAS, QWEN_LAYERS),
  'qwen3': family(
    'Qwen3ForCausalLM', llama(), BIAS, QWEN_LAYERS, Ours({'qk_norm': 'head'})
  ),
  'gemma': family(
    'GemmaForCausalLM',
    llama(
      tied=True, default_act='gelu_pytorch_tanh',
      gates=kin.GATES | {'gelu': 'geglu'},  # what its first files mean by it
    ), GEMMA, silent=('hidden_activation',),
  ),
  'gemma2': family(
    'Gemma2ForCausalLM', llama(tied=True, act='hidden_activation'), GEMMA,
    SANDWICH, _scale(256), GEMMA_CAPS, kin.layers(kin.periodic('WF')),
    kin.DIVIDES,
    silent=('hidden_act',), **kin.SANDWICH,
  ),
  'gemma3_text': family(
    'Gemma3ForCausalLM',
    llama(
      tied=True, act='hidden_activation',
      rotary=_per_kind(1e6, 1e4, (*OLDER, LOCAL_BASE)),
    ),
    Ours({'norm_zero_centered': True, 'qk_norm': 'head'}), GEMMA_SCALE,
    Fixed('use_bidirectional_attention', False), NO_BIAS, SANDWICH,
    _scale(256), LOGIT_CAP, kin.layers(kin.full_each(6)), kin.SPARE_PERIOD,
    kin.DIVIDES,
    # Their attention has no cap, whatever the field says.
    silent=('_sliding_window_pattern', 'attn_logit_softcapping'),
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
    'Olmo3ForCausalLM', llama(epsilon=1e-5, rotary=_per_kind(5e5, 5e5, OLDER)),
    BIAS, POST, Ours({'qk_norm': 'all'}), kin.layers(kin.periodic('WWWF')),
  ),
}  # fmt: skip
