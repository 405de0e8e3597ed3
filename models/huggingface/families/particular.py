"""Dense families with a part that no other has."""

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.dense import BIAS
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.kin import llama
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

_GROWTH = 'llama_4_scaling_beta'
_UNUSED = 2  # rows of a position table before that of the first token
FLAT = dict(mlp='', up='fc1', down='fc2')  # tensors of the layer itself


def _growing_rope(config):
  """YaRN, and queries that grow with their position."""
  rope = config.inside('rope_parameters')
  if rope is None:
    return config.refuse('rope_parameters', f'has no {_GROWTH}')
  rope.given('max_position_embeddings')  # nothing reads it
  out = rows.scaling(config, rope, 1e6)
  length = rope('original_max_position_embeddings')
  return out | {
    'query_growth': rope(_GROWTH, 0.0), 'rope_original_length': length
  }  # fmt: skip


def _grown_rope(model):
  rope = rows.written_rope(model) | {
    _GROWTH: model.query_growth,
    'original_max_position_embeddings': model.rope_original_length,
  }
  return {'rope_parameters': rope} | rows.written_length(model)


def _opt_positions(config):
  """Learned ones, whose first rows are unused; embeddings as wide as layers."""
  own = config('hidden_size')
  if config('word_embed_proj_dim', own) != own:
    config.refuse('word_embed_proj_dim', f'is not hidden_size={own}')
  return {
    'max_positions': config('max_position_embeddings') + _UNUSED,
    'position_offset': _UNUSED,
  }  # fmt: skip


OPT = (
  *kin.DIMS, Same('ffn_dim', 'd_ff'), Same('num_attention_heads', 'num_heads'),
  Choice('activation_function', 'mlp', kin.PLAIN, 'relu'),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Choice(
    'enable_bias', ('attention_bias', 'attention_output_bias', 'mlp_bias'),
    {True: (True,) * 3, False: (False,) * 3}, True,
  ),
  Choice(
    'layer_norm_elementwise_affine', 'norm',
    {True: 'layernorm', False: 'layernorm_bare'}, True,
  ),
  Fixed('do_layer_norm_before', True), Fixed('_remove_final_layer_norm', False),
  Computed(
    _opt_positions,
    lambda model: {
      'max_position_embeddings': model.max_positions - _UNUSED,
      'word_embed_proj_dim': model.d_model,
    },
  ),
  Ours({'position': 'learned', 'norm_epsilon': 1e-5}),
)  # fmt: skip


def _biogpt(config):
  scaled = config('scale_embedding', True)
  return {
    'embedding_scale': config('hidden_size') ** 0.5 if scaled else 1.0,
    'max_positions': config('max_position_embeddings', 1024, 1) + _UNUSED,
    'position_offset': _UNUSED,
  }


BIOGPT = (
  *kin.DIMS, kin.WIDTH, Same('num_attention_heads', 'num_heads'),
  Choice('hidden_act', 'mlp', kin.PLAIN, 'gelu'),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Computed(
    _biogpt,
    lambda model: {
      'scale_embedding': model.embedding_scale != 1,
      'max_position_embeddings': model.max_positions - _UNUSED,
    },
  ),
  # Their norms have the default, whatever layer_norm_eps is.
  Ours(dict(
    position='learned', norm='layernorm', norm_epsilon=1e-5,
    attention_bias=True, attention_output_bias=True, mlp_bias=True,
  )),
)  # fmt: skip

FAMILIES = {
  'apertus': family(
    'ApertusForCausalLM',
    llama(
      theta=1.2e7, epsilon=1e-5, gates=kin.PLAIN | {'xielu': 'xielu'},
      default_act='xielu',
    ),
    BIAS, Ours({'qk_norm': 'head'}), mixer_norm='attention_layernorm',
    mlp_norm='feedforward_layernorm',
  ),
  'ministral3': family(
    'Ministral3ForCausalLM',
    llama(epsilon=1e-5, rotary=Computed(_growing_rope, _grown_rope)),
    dense._window_or_not(),
  ),
  'nanochat': family(
    'NanoChatForCausalLM', llama(gates=kin.PLAIN, default_act='relu2'),
    BIAS,
    Same('final_logit_softcapping', 'logit_softcap', 15.0, null=0.0),
    Ours(dict(
      norm='rmsnorm_bare', qk_norm='rotated', embedding_norm=True,
    )), embedding_norm='model.norm', up='fc1', down='fc2', backwards=True,
  ),
  'opt': family(
    'OPTForCausalLM', OPT, silent=('layerdrop', 'init_std'),
    embedding='model.decoder.embed_tokens',
    positions='model.decoder.embed_positions',
    norm='model.decoder.final_layer_norm', layer='model.decoder.layers.{}',
    output='out_proj', mixer_norm='self_attn_layer_norm',
    mlp_norm='final_layer_norm', **FLAT,
  ),
  'biogpt': family(
    'BioGptForCausalLM', BIOGPT,
    silent=('layer_norm_eps', 'layerdrop', 'activation_dropout'),
    embedding='biogpt.embed_tokens', positions='biogpt.embed_positions',
    norm='biogpt.layer_norm', head='output_projection',
    layer='biogpt.layers.{}', output='out_proj',
    mixer_norm='self_attn_layer_norm', mlp_norm='final_layer_norm', **FLAT,
  ),
}  # fmt: skip
