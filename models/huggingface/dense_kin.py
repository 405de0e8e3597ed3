"""Dense families with LayerNorm, part of a head rotated, parts side by side,
multipliers, or mlps without a gate.
"""

from paraxis.models.huggingface import dense
from paraxis.models.huggingface import expert
from paraxis.models.huggingface import kin
from paraxis.models.huggingface import rows
from paraxis.models.huggingface.dense import BIAS
from paraxis.models.huggingface.dense import MLP_BIAS
from paraxis.models.huggingface.dense import POST
from paraxis.models.huggingface.dense import SANDWICH
from paraxis.models.huggingface.kin import family
from paraxis.models.huggingface.kin import llama
from paraxis.models.huggingface.rows import Choice
from paraxis.models.huggingface.rows import Computed
from paraxis.models.huggingface.rows import Fixed
from paraxis.models.huggingface.rows import Ours
from paraxis.models.huggingface.rows import Same

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
    found = (config('rope_parameters', None) or {}).get('partial_rotary_factor')
    for name in ('partial_rotary_factor', *older):
      given = config(name, None)
      found = given if found is None else found
    return {'rope_fraction': float(default if found is None else found)}

  def write(model):
    rope = rows.written_rope(model)
    return {
      'rope_parameters': rope | {'partial_rotary_factor': model.rope_fraction}
    }

  return rows.Fraction(read, write)


def inverse(theirs, ours):
  """A divisor, which is a factor here."""
  return Computed(
    lambda config: {ours: 1 / config(theirs, 1.0)},
    lambda model: {theirs: dense._whole(1 / rows.value(model, ours))},
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
    if not config('sliding_window', None):
      return 'F' * config('num_hidden_layers')
    return letters(config)

  return default


# GPT-J and its kin count in GPT-2's words.
GPTJ = (
  *(row for row in dense.GPT2 if isinstance(row, Same | Computed)
    and getattr(row, 'ours', '') not in ('max_positions', 'tied_embedding')),
  Choice('activation_function', 'mlp', kin.PLAIN, 'gelu_new'),
  Same('tie_word_embeddings', 'tied_embedding', False),
  Computed(
    lambda config: {
      'rope_fraction': config('rotary_dim', 64)
      * config('n_head') / config('n_embd')
    },
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
BIGCODE = (
  *(row for row in dense.GPT2 if getattr(row, 'theirs', '') not in (
    'scale_attn_by_inverse_layer_idx', 'activation_function')),
  Choice('activation_function', 'mlp', kin.PLAIN, 'gelu_pytorch_tanh'),
  Computed(
    lambda config: {
      'num_kv_heads': 1 if config('multi_query', True) else config('n_head')
    },
    lambda model: {'multi_query': model.num_kv_heads == 1},
  ),
)  # fmt: skip


def _neo_layers(config):
  """Kinds of attention as [[[kinds], times], ...]."""
  given = config('attention_types', [[['global', 'local'], 12]])
  found = [k for kinds, times in given for _ in range(times) for k in kinds]
  layers = config('attention_layers', found)
  out = {'pattern': ''.join('FW'[k == 'local'] for k in layers)}
  depth = config('num_layers')
  if len(layers) != depth:
    config.refuse('attention_types', f'has other than num_layers={depth} kinds')
  window = (
    {'window': config('window_size', 256)} if 'W' in out['pattern'] else {}
  )
  return {'pattern': rows.unit(out['pattern'])} | window


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


def _falcon(config):
  heads, new = config('num_attention_heads'), config(
    'new_decoder_architecture', False
  )  # fmt: skip
  norms, beside = config('num_ln_in_parallel_attn', None), config(
    'parallel_attn', True
  )  # fmt: skip
  both = new and (norms or 2) == 2
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
NOPE = {'W': 'sliding_attention', 'N': 'full_attention'}
EITHER = {'F': 'full_attention'} | NOPE

FAMILIES = {
  'olmo': family(
    'OlmoForCausalLM', llama(epsilon=1e-5, norm=''), BIAS,
    Fixed('clip_qkv', None), Ours({'norm': 'layernorm_bare'}),
  ),
  'arcee': family(
    'ArceeForCausalLM',
    llama(epsilon=1e-5, gates=kin.PLAIN, default_act='relu2'), BIAS, MLP_BIAS,
  ),
  'seed_oss': family(
    'SeedOssForCausalLM', llama(),
    Same('attention_bias', 'attention_bias', True),
    Same('attention_out_bias', 'attention_output_bias', False), MLP_BIAS,
    silent=('residual_dropout',),
  ),
  'helium': family(
    'HeliumForCausalLM', llama(epsilon=1e-8), QKV, MLP_BIAS, neighbours=True,
  ),
  'ernie4_5': family(
    'Ernie4_5ForCausalLM', llama(theta=5e5, epsilon=1e-5, tied=True),
    biases('use_bias', False), neighbours=True,
  ),
  'starcoder2': family(
    'Starcoder2ForCausalLM',
    layernorm(norm='norm_epsilon', act='gelu_pytorch_tanh', tied=True),
    biases('use_bias', True), dense._window_or_not(),
    silent=('residual_dropout',), up='c_fc', down='c_proj',
  ),
  'jais2': family(
    'Jais2ForCausalLM', layernorm(act='relu2'),
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
    'PersimmonForCausalLM', layernorm(act='relu2'), fraction(0.5),
    Fixed('qk_layernorm', False, True),
    Ours(dict(
      attention_bias=True, attention_output_bias=True, mlp_bias=True,
    )), norm='model.final_layernorm', **WIDE,
  ),
  'stablelm': family(
    'StableLmForCausalLM', llama(epsilon=1e-5, norm='layer_norm_eps'),
    Same('use_qkv_bias', 'attention_bias', False), NO_QK_NORM,
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
    'Phi3ForCausalLM', llama(epsilon=1e-5), fraction(1.0),
    dense._window_or_not(), silent=('original_max_position_embeddings',),
    qkv='qkv_proj', gate_up='gate_up_proj',
  ),
  'gpt_neox': family(
    'GPTNeoXForCausalLM', layernorm(act='gelu'),
    fraction(0.25, ('rotary_pct',)),
    Choice('use_parallel_residual', 'residual',
           {True: 'parallel', False: 'sequential'}, True),
    Choice(
      'attention_bias', ('attention_bias', 'attention_output_bias'),
      {False: (False, False), True: (True, True)}, True,
    ), Ours({'mlp_bias': True}), silent=('classifier_dropout',),
    embedding='gpt_neox.embed_in', norm='gpt_neox.final_layer_norm',
    head='embed_out', layer='gpt_neox.layers.{}', attention='attention', **WIDE,
  ),
  'gptj': family('GPTJForCausalLM', GPTJ, **GPTJ_NAMES),
  'codegen': family(
    'CodeGenForCausalLM', GPTJ, silent=('n_ctx',), qkv='qkv_proj',
    qkv_order='codegen', **GPTJ_NAMES,
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
    kin.layers(kin.periodic('WWWN'), NOPE),
    Ours({'norm': 'layernorm_unbiased', 'residual': 'shared'}),
    silent=('_sliding_window_pattern', 'sliding_window_pattern'),
    neighbours=True,
  ),
  'granite': family(
    'GraniteForCausalLM', llama(), BIAS, MLP_BIAS, MULTIPLIERS,
    attention_multiplier(1.0), inverse('logits_scaling', 'logit_scale'),
  ),
  'hyperclovax': family(
    'HyperCLOVAXForCausalLM', llama(), BIAS, MLP_BIAS, MULTIPLIERS,
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
    kin.layers(_sliding_or(kin.periodic('WWWN')), EITHER),
    silent=('sliding_window_pattern',),
  ),
  'ministral': family(
    'MinistralForCausalLM', llama(),
    kin.layers(_sliding_or(kin.every('W'))),
  ),
  'cwm': family(
    'CwmForCausalLM', llama(theta=1e6, epsilon=1e-5), MLP_BIAS,
    kin.layers(kin.periodic('FWWW')),
  ),
  'hunyuan_v1_dense': family(
    'HunYuanDenseV1ForCausalLM', llama(epsilon=1e-5), BIAS,
    Ours({'qk_norm': 'rotated'}), silent=('eod_token_id',),
    query_norm='query_layernorm', key_norm='key_layernorm',
  ),
  'vaultgemma': family(
    'VaultGemmaForCausalLM', llama(tied=True, act='hidden_activation'),
    dense.GEMMA, dense._scale(256), dense.GEMMA_CAPS,
    kin.layers(kin.periodic('WF')), mlp_norm='pre_feedforward_layernorm',
  ),
  'gpt-sw3': dense.FAMILIES['gpt2'],
  'gpt_bigcode': family(
    'GPTBigCodeForCausalLM', BIGCODE,
    silent=('attention_softmax_in_fp32', 'scale_attention_softmax_in_fp32'),
    **dense.GPT2_NAMES | dict(qkv_order='grouped', conv1d=False),
  ),
  'gpt_neo': family(
    'GPTNeoForCausalLM', GPT_NEO,
    silent=('embed_dropout', 'classifier_dropout'),
    embedding='transformer.wte', positions='transformer.wpe',
    norm='transformer.ln_f', layer='transformer.h.{}',
    attention='attn.attention', output='out_proj', mixer_norm='ln_1',
    mlp_norm='ln_2', up='c_fc', down='c_proj',
  ),
  'youtu': family(
    'YoutuForCausalLM', llama(tied=True), expert.LATENT,
    Fixed('rope_interleave', True), dense.NO_BIAS,
    silent=('qk_head_dim', 'embedding_initializer_range',), **expert.MLA_NAMES,
  ),
}  # fmt: skip
