"""What families share: the names of Llama's tensors, the rows of its config.

A family is these with changes: `names` by our words, without '.weight'.
"""

from typing import Any, NamedTuple

from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same


class Family(NamedTuple):
  """A model_type.

  architecture: class that files name. rows: of config.json (rows.py), later
  ones win. names: our word -> theirs (parts.py). silent: fields of config.json
  that do not matter to this family.
  """

  architecture: str
  rows: tuple
  names: dict[str, Any]
  silent: tuple = ()


NAMES = dict(
  embedding='model.embed_tokens', norm='model.norm', head='lm_head',
  layer='model.layers.{}', attention='self_attn', query='q_proj', key='k_proj',
  value='v_proj', output='o_proj', query_norm='q_norm', key_norm='k_norm',
  mlp='mlp', gate='gate_proj', up='up_proj', down='down_proj',
  mixer_norm='input_layernorm', mlp_norm='post_attention_layernorm',
  mixer_post_norm='post_attention_layernorm',
  mlp_post_norm='post_feedforward_layernorm',
)  # fmt: skip
SANDWICH = dict(mlp_norm='pre_feedforward_layernorm')
EXPERT_NAMES = dict(
  router='gate', expert='experts.{}', expert_gate='gate_proj',
  expert_up='up_proj', expert_down='down_proj', shared='shared_experts',
  shared_gate='shared_expert_gate', router_bias='gate.e_score_correction_bias',
)  # fmt: skip

GATES = {
  'silu': 'swiglu', 'swish': 'swiglu', 'gelu_pytorch_tanh': 'geglu',
  'gelu_new': 'geglu', 'gelu_fast': 'geglu', 'gelu': 'geglu_exact',
}  # fmt: skip
PLAIN = {
  'gelu_pytorch_tanh': 'gelu', 'gelu_new': 'gelu', 'gelu_fast': 'gelu',
  'gelu': 'gelu_exact', 'relu': 'relu', 'relu2': 'relu2',
}  # fmt: skip
HEADS = Computed(
  lambda config: {
    'num_heads': config('num_attention_heads'),
    'num_kv_heads': config('num_key_value_heads', 0, 1),
    'head_dim': config('head_dim', 0, 1),
  },
  lambda model: {
    'num_attention_heads': model.num_heads,
    'num_key_value_heads': model.num_kv_heads or model.num_heads,
    'head_dim': model.head_width,
  },
)


def _divides(config):
  n, d = config('num_attention_heads'), config('hidden_size')
  if d % n:
    config.refuse('num_attention_heads', f'does not divide hidden_size={d}')
  return {}


# Beside HEADS: of classes that ask for it, whatever head_dim is.
DIVIDES = Computed(_divides, lambda model: {})


def whole_heads(grouped=True):
  """Beside HEADS: of classes whose heads share out the width, whatever their
  file says.

  grouped: whether heads may share keys and values.
  """
  kv = 'num_key_value_heads'

  def read(config):
    _divides(config)
    n, d = config('num_attention_heads'), config('hidden_size')
    of = f'as of hidden_size={d}, num_attention_heads={n}'
    if config('head_dim', d // n, 1) != d // n:
      config.refuse('head_dim', f'is not {d // n}, {of}')
    if grouped:
      return {'head_dim': d // n}
    if config(kv, n, 1) != n:
      config.refuse(kv, f'is not {n}, {of}')
    return {'head_dim': d // n, 'num_kv_heads': n}

  def write(model):
    width = {'head_dim': model.d_model // model.num_heads}
    return width if grouped else width | {kv: model.num_heads}

  return Computed(read, write)


DIMS = (
  Same('vocab_size', 'vocab_size'),
  Same('hidden_size', 'd_model'),
  Same('num_hidden_layers', 'num_layers'),
)
WIDTH = Same('intermediate_size', 'd_ff')


def llama(
  theta=1e4, epsilon=1e-6, tied=False, act='hidden_act', gates=None,
  default_act='silu', norm='rms_norm_eps', rotary=None,
):  # fmt: skip
  """Rows of Llama's config.json, without biases, layers and experts."""
  return (
    *DIMS, WIDTH, HEADS,
    Same(norm, 'norm_epsilon', epsilon)
    if norm
    else Ours({'norm_epsilon': epsilon}),
    Same('tie_word_embeddings', 'tied_embedding', tied),
    Choice(act, 'mlp', gates or GATES, default_act),
    rotary or rows.rope(theta),
  )  # fmt: skip


def family(name, *all_rows, silent=(), **names):
  """A family with Llama's names, but for `names`."""
  flat = tuple(r for row in all_rows for r in _flat(row))
  return Family(name, flat, NAMES | names, silent)


def _flat(row):
  return row if isinstance(row, tuple) else (row,)


LAYERS = {'F': 'full_attention', 'W': 'sliding_attention'}


def layers(default, words=None, window='sliding_window'):
  """Kinds of layers, by `layer_types`, and the window.

  Args:
    default: Reader -> the letters, where a file has no layer_types.
    words: letter -> their word. window: their field; '': there is none.
  """
  words = words or LAYERS
  letters = {word: letter for letter, word in words.items()}

  def read(config):
    found = config.each('layer_types', letters, lambda: default(config))
    out = {'pattern': rows.unit(found)}
    width = config(window, 0) if window else 0
    if 'W' in found and not width:
      config.refuse(window, 'is no window, which layers have')
    return out | ({'window': width} if 'W' in found else {})

  def write(model):
    every = pattern(model)
    if not set(every) <= set(words):
      return {}
    out: dict[str, Any] = {'layer_types': [words[x] for x in every]}
    if window:
      out[window] = model.window if 'W' in every else None
    return out

  return Computed(read, write)


def pattern(model):
  """The letter of every layer."""
  from paraxis.models import layer

  return ''.join(kind[0] for kind in layer.kinds_of(model)[1])


def every(letter):
  """All layers of one kind."""
  return lambda config: letter * config('num_hidden_layers')


PERIOD = 'sliding_window_pattern'


def full_each(usual, full='F'):
  """Layers with a window, but for every p-th; p of PERIOD, or `usual`."""

  def read(config):
    step = config(PERIOD, usual)
    return ''.join(
      'W' if (i + 1) % step else full
      for i in range(config('num_hidden_layers'))
    )

  return read


def _spare(config):
  config.given(PERIOD)
  return {}


# Beside `layers`: files that have layer_types keep their PERIOD.
SPARE_PERIOD = Computed(_spare, lambda model: {})


def leading(field, default=0):
  """The number of layers that have no experts, then those that have."""

  def read(config):
    depth = config('num_hidden_layers')
    return ('D' * min(config(field, default, 0), depth)).ljust(depth, 'E')

  return read


def first(letter, rest):
  """One layer of a kind, then those of another."""
  return lambda config: letter + rest * (config('num_hidden_layers') - 1)


def periodic(unit):
  """A unit that repeats."""
  return lambda config: (unit * config('num_hidden_layers'))[
    : config('num_hidden_layers')
  ]
