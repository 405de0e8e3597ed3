"""Families of linear recurrences between layers of attention."""

import jax.numpy as jnp
import numpy as np

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import dense_kin
from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import expert_kin
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

BLOCKS = {'recurrent': 'U', 'attention': 'W'}


def _blocks(config):
  given = config('block_types', ['recurrent', 'recurrent', 'attention'])
  if not given or not all(isinstance(x, str) and x in BLOCKS for x in given):
    config.refuse('block_types', 'has kinds that layers here have not')
  depth = config('num_hidden_layers')
  found = ''.join(BLOCKS[x] for x in given)
  found = (found * depth)[:depth]
  window = config('attention_window_size', 2048)
  return {'pattern': rows.unit(found)} | (
    {'window': window} if 'W' in found else {}
  )


def _written_blocks(model):
  words = {letter: word for word, letter in BLOCKS.items()}
  letters = kin.pattern(model)
  if not set(letters) <= set(words):
    return {}
  window = {'attention_window_size': model.window} if 'W' in letters else {}
  return {'block_types': [words[x] for x in letters]} | window


def _whole_heads(config):
  """Heads of attention, which are as wide as they fit."""
  n, d = config('num_attention_heads'), config('hidden_size')
  if config('head_dim', d // n) != d // n:
    config.refuse(
      'head_dim', f'is not hidden_size={d} / num_attention_heads={n}'
    )
  return {
    'num_heads': n, 'num_kv_heads': config('num_key_value_heads', n),
    'head_dim': d // n,
  }  # fmt: skip


def _rounded_root(config):
  """The scale of embeddings is a constant in bfloat16."""
  root = np.float64(config('hidden_size')) ** 0.5
  return {'embedding_scale': float(root.astype(jnp.bfloat16))}


RECURRENT_GEMMA = (
  *kin.llama(tied=True, act='hidden_activation',
             default_act='gelu_pytorch_tanh'),
  Fixed('hidden_activation', 'gelu_pytorch_tanh'),
  Computed(_whole_heads, lambda model: {
    'num_attention_heads': model.num_heads,
    'num_key_value_heads': model.num_kv_heads or model.num_heads,
  }),
  # Half of it for each of gate and up.
  Computed(
    lambda config: {'d_ff': config('intermediate_size') // 2},
    lambda model: {'intermediate_size': 2 * model.d_ff},
  ),
  Computed(
    lambda config: {'rg_lru.width': config('lru_width', 0)},
    lambda model: {'lru_width': model.rg_lru.width or model.d_model},
  ),
  Same('conv1d_width', 'rg_lru.conv_width', 4),
  # Logits always have it: their class divides by it.
  Computed(
    lambda config: {'logit_softcap': config('logits_soft_cap', 30.0, 1e-9)},
    lambda model: {'logits_soft_cap': model.logit_softcap},
  ),
  Same('attention_bias', 'attention_bias', False),
  Fixed('embeddings_scale_by_sqrt_dim', True),
  dense_kin.fraction(0.5), rows.scaled_by(), Computed(_blocks, _written_blocks),
  Computed(_rounded_root, lambda model: {}),
  Ours({
    'norm_zero_centered': True, 'mlp_bias': True, 'attention_output_bias': True,
  }),
)  # fmt: skip
DELTA_WORDS = {'D': 'linear_attention', 'F': 'full_attention'}


def _delta_layers(config):
  every = config('full_attention_interval', 4)
  return ''.join(
    'D' if (i + 1) % every else 'F' for i in range(config('num_hidden_layers'))
  )


QWEN_DELTA = (
  *kin.llama(), dense.BIAS, dense_kin.fraction(0.25),
  kin.layers(_delta_layers, DELTA_WORDS, ''),
  Same('linear_conv_kernel_dim', 'gated_delta.conv_width', 4),
  Same('linear_num_key_heads', 'gated_delta.heads', 16),
  Same('linear_num_value_heads', 'gated_delta.value_heads', 32),
  Same('linear_key_head_dim', 'gated_delta.key_dim', 128),
  Same('linear_value_head_dim', 'gated_delta.value_dim', 128),
  Fixed('hidden_act', 'silu'),
  Ours({
    'qk_norm': 'head', 'norm_zero_centered': True, 'attention_gate': True,
  }),
)  # fmt: skip
DELTA_NAMES = dict(gated_delta='linear_attn')
EXPERTS = expert_kin.QWEN_NAMES | DELTA_NAMES
SILENT = ('full_attention_interval',)  # where there are layer_types
# Positions of a text are the same in all three parts.
MROPE = ('mrope_section', 'mrope_interleaved', *SILENT)
AFMOE = (
  *kin.llama(epsilon=1e-5), expert.BIASED, dense.SANDWICH,
  dense.NO_BIAS, Same('num_experts_per_tok', 'experts.top_k', 6),
  Same('num_experts', 'experts.count', 64),
  Same('moe_intermediate_size', 'experts.d_ff', 1408),
  Same('num_shared_experts', 'experts.shared', 2),
  Same('route_scale', 'experts.scale', 1.0),
  expert.places(
    kin.leading('num_dense_layers', 1),
    lambda letters: {
      'num_dense_layers': len(letters) - len(letters.lstrip('D'))
    },
  ),
  kin.layers(
    lambda config: ''.join(
      'W' if (i + 1) % config('global_attn_every_n_layers', 4) else 'N'
      for i in range(config('num_hidden_layers'))
    ),
    dense_kin.NOPE,
  ),
  Computed(
    lambda config: {
      'embedding_scale': config('hidden_size') ** 0.5
      if config('mup_enabled', False) else 1.0
    },
    lambda model: {'mup_enabled': model.embedding_scale != 1},
  ),
  Ours({
    'qk_norm': 'head', 'attention_gate': True, 'experts.normalise': True,
  }),
)  # fmt: skip
FAMILIES = {
  'recurrent_gemma': family(
    'RecurrentGemmaForCausalLM', RECURRENT_GEMMA,
    silent=('w_init_variance_scale', 'final_w_init_variance_scale'),
    norm='model.final_norm', attention='temporal_block',
    rg_lru='temporal_block', mixer_norm='temporal_pre_norm',
    mlp_norm='channel_pre_norm', mlp='mlp_block',
  ),
  'qwen3_next': family(
    'Qwen3NextForCausalLM', QWEN_DELTA, expert.QWEN,
    Same('norm_topk_prob', 'experts.normalise', True), expert.QWEN_PLACES,
    expert.SHARED, silent=SILENT, **EXPERTS,
  ),
  'qwen3_5_text': family(
    'Qwen3_5ForCausalLM', QWEN_DELTA, silent=MROPE, delta_apart=True,
    **DELTA_NAMES,
  ),
  'qwen3_5_moe_text': family(
    'Qwen3_5MoeForCausalLM', expert.no_mlp(QWEN_DELTA), expert.QWEN,
    expert.SHARED, Ours({'experts.normalise': True}), silent=MROPE,
    delta_apart=True, **EXPERTS,
  ),
  'afmoe': family(
    'AfmoeForCausalLM', AFMOE, silent=('global_attn_every_n_layers',),
    mlp_norm='pre_mlp_layernorm', mlp_post_norm='post_mlp_layernorm',
    attention_gate='gate_proj',
    **kin.EXPERT_NAMES | dict(router='router.gate', router_bias='expert_bias'),
  ),
}  # fmt: skip
