"""Dense families with LayerNorm, part of a head rotated, parts side by side,
multipliers, or mlps without a gate.
"""

from typing import Any

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.dense import BIAS
from paraxis.models.huggingface.families.dense import MLP_BIAS
from paraxis.models.huggingface.families.dense import POST
from paraxis.models.huggingface.families.dense import SANDWICH
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.kin import llama
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

NO_QK_NORM = Fixed('qk_layernorm', False)
QKV = Same('attention_bias', 'attention_bias', False)


def biases(field, default):
  """One field for the biases of all matrices."""
  every = ('attention_bias', 'attention_output_bias', 'mlp_bias')
  return Choice(field, every, {False: (False,) * 3, True: (True,) * 3}, default)


def layernorm(epsilon=1e-5, norm='layer_norm_eps', act='gelu_new', **options):
  """Llama's fields, with LayerNorm and an mlp without a gate."""
  return (
    *llama(
      epsilon=epsilon, norm=norm, gates=kin.PLAIN, default_act=act, **options
    ),
    Ours({'norm': 'layernorm'}),
  )  # fmt: skip


def fraction(default, older=()):
  """Share of a head that rotates, in rope_parameters or on its own."""

  def read(config):
    part, out = 'partial_rotary_factor', {'rope_fraction': default}
    rope = rows.given_rope(config)
    for where, name in (*((config, x) for x in (*older, part)), (rope, part)):
      found = where.given(name)
      if found is not None:
        out['rope_fraction'] = where.checked(name, found, 'rope_fraction')
    return out

  def write(model):
    part, name = model.rope_fraction, 'partial_rotary_factor'
    out = rows.older_too(rows.written_rope(model) | {name: part})
    del out[rows.OLD_BASE]  # by its own name in another row
    return out | dict.fromkeys(older or (name,), part)

  return rows.Fraction(read, write)


LEAST = 1e-30  # of a divisor


def inverse(theirs, ours):
  """A divisor, which is a factor here."""
  return Computed(
    lambda config: {ours: 1 / config(theirs, 1.0, LEAST)},
    lambda model: {
      theirs: dense._whole(1 / max(rows.value(model, ours), LEAST))
    },
  )


def attention_multiplier(default):
  """default: of a file that has none; 0: the usual scale."""
  return Computed(
    lambda config: {'attention_scale': config('attention_multiplier', default)},
    lambda model: {
      'attention_multiplier': model.attention_scale or model.head_width**-0.5
    },
  )


MULTIPLIERS = (
  Same('embedding_multiplier', 'embedding_scale', 1.0),
  Same('residual_multiplier', 'residual_scale', 1.0),
)


def _sliding_or(letters):
  """Sliding layers if a file has a window; of others `letters` says.

  letters: Reader -> the letters of a file with a window, without layer_types.
  """

  def default(config):
    if not config('sliding_window', 0, 1):
      return 'F' * config('num_hidden_layers')
    return letters(config)

  return default


def _falcon(config):
  heads, new = config('num_attention_heads'), config(
    'new_decoder_architecture', False
  )  # fmt: skip
  norms, beside = config('num_ln_in_parallel_attn', 2), config(
    'parallel_attn', True
  )  # fmt: skip
  both = new and norms == 2
  one = config('multi_query', True) and not new
  kv_heads = config('num_kv_heads', heads)
  kv_heads = kv_heads if new else heads
  return {
    'residual': 'parallel' if both else 'shared' if beside or new
    else 'sequential',
    'num_kv_heads': 1 if one else kv_heads,
    'd_ff': config('ffn_hidden_size', 4 * config('hidden_size')),
  }  # fmt: skip


def _falcon_written(model):
  beside = model.residual != 'sequential'
  heads = model.num_kv_heads or model.num_heads
  return dict(
    new_decoder_architecture=beside, parallel_attn=beside, num_kv_heads=heads,
    num_ln_in_parallel_attn=2 if model.residual == 'parallel' else 1,
    multi_query=heads == 1, ffn_hidden_size=model.d_ff,
  )  # fmt: skip


def _swa_layers(config):
  """Kinds of layers, and the rotary base of each: 0 is none."""
  depth = config('num_hidden_layers')
  found = config.each(
    'layer_types', {'full_attention': 'F', 'sliding_attention': 'W'},
    lambda: ''.join('WF'[i % 4 == 0] for i in range(depth)),
  )  # fmt: skip
  name, usual = 'layer_rope_theta', _usual_theta(config)
  bases = config.numbers(name, [usual] * depth, float)
  if len(bases) != depth:
    config.refuse(name, f'has {len(bases)} entries, not one a layer ({depth})')
  kinds = {kind: {b for k, b in zip(found, bases, strict=True) if k == kind}
           for kind in 'FW'}  # fmt: skip
  rotating = sorted(kinds['F'] - {0})
  if 0 in kinds['W'] or len(kinds['W']) > 1 or rotating[1:]:
    config.refuse(name, 'is not one for layers with a window, one for others')
  letters = ''.join(
    'N' if k == 'F' and not b else k for k, b in zip(found, bases, strict=True)
  )
  out: dict[str, Any] = {'pattern': rows.unit(letters)}
  windowed = [*kinds['W']]
  if rotating or windowed:
    out['rope_theta'] = float([*rotating, *windowed][0])
  if rotating and windowed and windowed != rotating:
    rope = rows.given_rope(config)
    kind = rope('rope_type', rope('type', 'default'))
    if kind != 'default':
      why = f'scales layers with a window, whose {name} is another'
      rope.refuse('rope_type', why, kind)
    out['rope_local_theta'] = float(windowed[0])
  if 'W' in letters:
    out['window'] = config('sliding_window', 128)
  return out


def _usual_theta(config):
  return rows.given_rope(config)('rope_theta', config('rope_theta', 1e4, 1), 1)


def _swa_written(model):
  letters, local = kin.pattern(model), model.rope_local_theta
  base = {'F': model.rope_theta, 'N': 0, 'W': local or model.rope_theta}
  full, windowed = 'full_attention', 'sliding_attention'
  return dict(
    layer_types=[windowed if x == 'W' else full for x in letters],
    layer_rope_theta=[base.get(x, 0) for x in letters],
    sliding_window=model.window or 128,
  )


SWA = (Computed(_swa_layers, _swa_written), Ours({'sinks': True}))
FALCON = (
  *kin.DIMS, Same('num_attention_heads', 'num_heads'),
  Computed(_falcon, _falcon_written), biases('bias', False),
  Same('layer_norm_epsilon', 'norm_epsilon', 1e-5),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Choice('activation', 'mlp', kin.PLAIN, 'gelu'), Fixed('alibi', False),
  rows.rope(1e4), Ours({'norm': 'layernorm'}),
)  # fmt: skip
WIDE = dict(
  output='dense', up='dense_h_to_4h', down='dense_4h_to_h',
  qkv='query_key_value', qkv_order='grouped',
)  # fmt: skip
# Their file has it again, and that goes first.
ORIGINAL = Computed(lambda config: {}, lambda model: {
  'original_max_position_embeddings': model.rope_original_length
})  # fmt: skip
NOPE = {'W': 'sliding_attention', 'N': 'full_attention'}


def _exaone_layers(config):
  """With a window, layers without one have no rotary positions."""
  if not config('sliding_window', 0, 1):
    words = {word: letter for letter, word in NOPE.items()}
    if 'W' in config.each('layer_types', words, lambda: ''):
      config.refuse('sliding_window', 'is no window, which layers have')
    return {'pattern': 'F'}
  return kin.layers(kin.full_each(4, 'N'), NOPE).read(config)


def _written_exaone_layers(model):
  every = kin.pattern(model)
  if set(every) != {'F'}:
    return kin.layers(None, NOPE).write(model)
  # transformers makes no list of its own where there is no window.
  return {'layer_types': [NOPE['N']] * len(every), 'sliding_window': None}


EXAONE_LAYERS = (
  Computed(_exaone_layers, _written_exaone_layers), kin.SPARE_PERIOD,
)  # fmt: skip

FAMILIES = {
  'olmo': family(
    'OlmoForCausalLM', llama(epsilon=1e-5, norm=''), BIAS,
    Same('clip_qkv', 'qkv_clip', 0.0, null=0.0),
    Ours({'norm': 'layernorm_bare'}),
  ),
  'arcee': family(
    'ArceeForCausalLM',
    llama(epsilon=1e-5, gates=kin.PLAIN, default_act='relu2'), kin.DIVIDES,
    BIAS, MLP_BIAS,
  ),
  'seed_oss': family(
    'SeedOssForCausalLM', llama(),
    Same('attention_bias', 'attention_bias', True),
    Same('attention_out_bias', 'attention_output_bias', False), MLP_BIAS,
    silent=('residual_dropout',),
  ),
  'helium': family(
    'HeliumForCausalLM', llama(epsilon=1e-8), kin.whole_heads(), QKV, MLP_BIAS,
    neighbours=True,
  ),
  'ernie4_5': family(
    'Ernie4_5ForCausalLM', llama(theta=5e5, epsilon=1e-5, tied=True),
    biases('use_bias', False), neighbours=True,
  ),
  'starcoder2': family(
    'Starcoder2ForCausalLM',
    layernorm(norm='norm_epsilon', act='gelu_pytorch_tanh', tied=True),
    biases('use_bias', True), dense._window_or_not(),
    Fixed('mlp_type', 'default'), Fixed('norm_type', 'layer_norm'),
    silent=('residual_dropout',), up='c_fc', down='c_proj',
  ),
  'jais2': family(
    'Jais2ForCausalLM', layernorm(act='relu2'), kin.DIVIDES,
    Choice(
      'attention_bias', ('attention_bias', 'attention_output_bias'),
      {False: (False, False), True: (True, True)}, True,
    ),
    Same('mlp_bias', 'mlp_bias', True),
  ),
  'nemotron': family(
    'NemotronForCausalLM', layernorm(norm='norm_eps', act='relu2'), BIAS,
    MLP_BIAS, fraction(0.5), Ours({'norm_zero_centered': True}),
  ),
  'persimmon': family(
    'PersimmonForCausalLM', layernorm(act='relu2'),
    kin.whole_heads(grouped=False), fraction(0.5),
    Fixed('qk_layernorm', False, True),
    Ours(dict(
      attention_bias=True, attention_output_bias=True, mlp_bias=True,
    )), norm='model.final_layernorm', **WIDE,
  ),
  'stablelm': family(
    'StableLmForCausalLM', llama(epsilon=1e-5, norm='layer_norm_eps'),
    kin.whole_heads(), NO_QK_NORM,
    Same('use_qkv_bias', 'attention_bias', False),
    Choice('use_parallel_residual', 'residual',
           {False: 'sequential', True: 'shared'}, False),
    fraction(0.25), Ours({'norm': 'layernorm'}),
  ),
  'phi': family(
    'PhiForCausalLM', layernorm(), fraction(0.5), NO_QK_NORM,
    Ours(dict(
      residual='shared', attention_bias=True, attention_output_bias=True,
      mlp_bias=True, head_bias=True,
    )), output='dense', up='fc1', down='fc2', norm='model.final_layernorm',
  ),
  'phi3': family(
    'Phi3ForCausalLM', llama(epsilon=1e-5), fraction(1.0), ORIGINAL,
    rows.scaled_by('longrope'), dense._window_or_not(),
    qkv='qkv_proj', gate_up='gate_up_proj',
  ),
  'gpt_neox': family(
    'GPTNeoXForCausalLM',
    layernorm(act='gelu', rotary=rows.rope(base='rotary_emb_base')),
    kin.whole_heads(grouped=False), fraction(0.25, ('rotary_pct',)),
    Choice('use_parallel_residual', 'residual',
           {True: 'parallel', False: 'sequential'}, True),
    Choice(
      'attention_bias', ('attention_bias', 'attention_output_bias'),
      {False: (False, False), True: (True, True)}, True,
    ), Ours({'mlp_bias': True}), silent=('classifier_dropout',),
    embedding='gpt_neox.embed_in', norm='gpt_neox.final_layer_norm',
    head='embed_out', layer='gpt_neox.layers.{}', attention='attention', **WIDE,
  ),
  'falcon': family(
    'FalconForCausalLM', FALCON, embedding='transformer.word_embeddings',
    norm='transformer.ln_f', layer='transformer.h.{}',
    attention='self_attention',
    parallel=dict(mixer_norm='ln_attn', mlp_norm='ln_mlp'), **WIDE,
  ),
  'cohere': family(
    'CohereForCausalLM',
    llama(epsilon=1e-5, norm='layer_norm_eps', tied=True), BIAS,
    Fixed('use_qk_norm', False), Same('logit_scale', 'logit_scale', 0.0625),
    Ours({'norm': 'layernorm_unbiased', 'residual': 'shared'}),
    neighbours=True,
  ),
  'cohere2': family(
    'Cohere2ForCausalLM',
    llama(epsilon=1e-5, norm='layer_norm_eps', tied=True), BIAS,
    Same('logit_scale', 'logit_scale', 0.0625),
    kin.layers(kin.full_each(4, 'N'), NOPE), kin.SPARE_PERIOD,
    Ours({'norm': 'layernorm_unbiased', 'residual': 'shared'}),
    silent=('_sliding_window_pattern',), neighbours=True,
  ),
  'granite': family(
    'GraniteForCausalLM', llama(), BIAS, MLP_BIAS, MULTIPLIERS,
    attention_multiplier(1.0), inverse('logits_scaling', 'logit_scale'),
  ),
  'granite_swa': family(
    'GraniteSWAForCausalLM', llama(epsilon=1e-5, tied=True), BIAS, MLP_BIAS,
    MULTIPLIERS, attention_multiplier(1.0),
    inverse('logits_scaling', 'logit_scale'), SWA,
  ),
  'hyperclovax': family(
    'HyperCLOVAXForCausalLM', llama(), kin.DIVIDES, BIAS, MLP_BIAS, MULTIPLIERS,
    attention_multiplier(0.0), Same('logits_scaling', 'logit_scale', 1.0),
    Choice('use_post_norm', 'norm_placement',
           {True: 'sandwich', False: 'pre'}, True),
    mixer_post_norm='post_norm1', mlp_post_norm='post_norm2',
  ),
  'glm': family(
    'GlmForCausalLM', llama(epsilon=1.5625e-7), fraction(0.5),
    Same('attention_bias', 'attention_bias', True), gate_up='gate_up_proj',
    neighbours=True,
  ),
  'glm4': family(
    'Glm4ForCausalLM', llama(epsilon=1.5625e-7), fraction(0.5),
    Same('attention_bias', 'attention_bias', True), SANDWICH,
    gate_up='gate_up_proj', neighbours=True,
    mixer_post_norm='post_self_attn_layernorm',
    mlp_post_norm='post_mlp_layernorm',
  ),
  'exaone4': family(
    'Exaone4ForCausalLM', llama(epsilon=1e-5), POST, Ours({'qk_norm': 'head'}),
    EXAONE_LAYERS,
  ),
  'ministral': family(
    'MinistralForCausalLM', llama(),
    kin.layers(_sliding_or(kin.every('W'))),
  ),
  'cwm': family(
    'CwmForCausalLM', llama(theta=1e6, epsilon=1e-5), MLP_BIAS,
    kin.DIVIDES, kin.layers(kin.periodic('FWWW')),
  ),
  'hunyuan_v1_dense': family(
    'HunYuanDenseV1ForCausalLM', llama(epsilon=1e-5), BIAS,
    Ours({'qk_norm': 'rotated'}), silent=('eod_token_id',),
    query_norm='query_layernorm', key_norm='key_layernorm',
  ),
  'vaultgemma': family(
    'VaultGemmaForCausalLM', llama(tied=True, act='hidden_activation'),
    dense.GEMMA, dense._scale(256), dense.GEMMA_CAPS, kin.DIVIDES,
    kin.layers(kin.periodic('WF')), mlp_norm='pre_feedforward_layernorm',
  ),
}  # fmt: skip
