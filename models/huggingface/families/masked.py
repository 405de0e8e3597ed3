"""Masked diffusion models: a token sees all of its row, and masks are filled.

Their classes are code beside the weights, which is never run: rows and names
say what it computes. LLaDA (arXiv:2502.09992) is Llama by OLMo's fields, Dream
(arXiv:2508.15487) is Qwen2 whose mask is predicted at the token before it.
"""

from typing import Any

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same


def _mask(rows_of):
  """mask_id, which is an id of the table.

  rows_of: Reader -> rows of the embedding table.
  """

  def read(config):
    found, rows = config('mask_token_id', low=0), rows_of(config)
    if found >= rows:
      config.refuse('mask_token_id', f'is no id of a vocabulary of {rows}')
    return {'mask_id': found}

  return Computed(read, lambda model: {'mask_token_id': model.mask_id})


def _table(config):
  """Rows of LLaDA's embedding: those that pad the vocabulary count, too."""
  vocab, rows = config('vocab_size'), config('embedding_size', 0)
  if rows and rows < vocab:
    config.refuse('embedding_size', f'is less than vocab_size={vocab}')
  return rows or vocab


def _sizes(config):
  """Rows, heads and widths, where null stands for another field."""
  heads, one = config('n_heads'), config('multi_query_attention', None)
  if one is not None:
    one = config.typed('multi_query_attention', one, bool)
  kv_heads = config('n_kv_heads', 0, 1) or (1 if one else heads)
  if one is not None and kv_heads != (1 if one else heads):
    config.refuse(
      'multi_query_attention', f'and n_kv_heads={kv_heads} of n_heads={heads} '
      'are not the same'
    )  # fmt: skip
  width, times = config('mlp_hidden_size', 0, 1), config('mlp_ratio', 4)
  return {
    'vocab_size': _table(config),
    'num_heads': heads,
    'num_kv_heads': kv_heads,
    'd_ff': width or times * config('d_model'),
    # No number depends on it; an export says it again.
    'rope_original_length': config('max_sequence_length', 1024),
  }


def _sizes_written(model):
  out: dict[str, Any] = dict(
    vocab_size=model.vocab_size, embedding_size=model.vocab_size,
    n_heads=model.num_heads, n_kv_heads=model.num_kv_heads or model.num_heads,
    mlp_hidden_size=model.d_ff,
    max_sequence_length=model.rope_original_length,
  )  # fmt: skip
  return out


SEES_ALL = Ours({'visibility': 'full'})
# The second value is what a file without the field means.
LLADA = (
  Computed(_sizes, _sizes_written), Same('d_model', 'd_model'),
  Same('n_layers', 'num_layers'), Same('rms_norm_eps', 'norm_epsilon', 1e-5),
  Same('rope_theta', 'rope_theta', 1e4),
  Same('weight_tying', 'tied_embedding', True),
  Same('include_qkv_bias', 'attention_bias', False),
  Fixed('block_type', 'llama', 'sequential'),
  Fixed('activation_type', 'silu', 'swiglu'),
  Fixed('layer_norm_type', 'rms', 'default'), Fixed('rope', True, False),
  Fixed('alibi', False), Fixed('include_bias', False),
  Fixed('bias_for_layer_norm', False), Fixed('layer_norm_with_affine', True),
  Fixed('attention_layer_norm', False), Fixed('scale_logits', False),
  Fixed('input_emb_norm', False), Fixed('block_group_size', 1),
)  # fmt: skip

FAMILIES = {
  'llada': family(
    'LLaDAModelLM', LLADA, _mask(_table), SEES_ALL,
    silent=(
      'alibi_bias_max', 'attention_layer_norm_with_affine', 'flash_attention',
      'init_cutoff_factor', 'init_device', 'init_fn', 'init_std',
      'precision', 'residual_dropout', 'rope_full_precision',
    ),
    embedding='model.transformer.wte', norm='model.transformer.ln_f',
    head='model.transformer.ff_out', layer='model.transformer.blocks.{}',
    attention='', output='attn_out', mlp='', gate='ff_proj', down='ff_out',
    mixer_norm='attn_norm', mlp_norm='ff_norm',
  ),
  'Dream': family(
    'DreamModel', kin.llama(), dense.QKV_BIAS,
    Fixed('use_sliding_window', False),
    _mask(lambda config: config('vocab_size')), SEES_ALL,
    Ours({'mask_shift': True}), silent=('sliding_window',),
  ),
}  # fmt: skip
