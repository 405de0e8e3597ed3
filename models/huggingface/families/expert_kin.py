"""More families with mixtures of experts, each like one of expert.py."""

from paraxis.models.huggingface.families import dense
from paraxis.models.huggingface.families import dense_kin
from paraxis.models.huggingface.families import expert
from paraxis.models.huggingface.families import kin
from paraxis.models.huggingface.families import rows
from paraxis.models.huggingface.families.kin import family
from paraxis.models.huggingface.families.kin import llama
from paraxis.models.huggingface.families.rows import Choice
from paraxis.models.huggingface.families.rows import Computed
from paraxis.models.huggingface.families.rows import Fixed
from paraxis.models.huggingface.families.rows import Ours
from paraxis.models.huggingface.families.rows import Same

# Every tensor of experts in its own matrix, by the names of Qwen's.
QWEN_NAMES = kin.EXPERT_NAMES | dict(shared='shared_expert')


def _ernie_places(config):
  """Every interval-th layer from the first to the last that has experts."""
  depth, every = config('num_hidden_layers'), config('moe_layer_interval', 1)
  first = config('moe_layer_start_index', 1, 0)
  last = config.given('moe_layer_end_index')
  last = depth - 1 if last in (None, -1) else config('moe_layer_end_index', 0)
  return ''.join(
    'E' if (i + 1) % every == 0 and first <= i <= last else 'D'
    for i in range(depth)
  )


def _ernie_written(letters):
  held = [i for i, x in enumerate(letters) if x == 'E'] or [0]
  return dict(
    moe_layer_start_index=held[0], moe_layer_end_index=held[-1],
    moe_layer_interval=held[1] - held[0] if held[1:] else 1,
  )  # fmt: skip


def _never_binds(config):
  """The least sum of chosen probabilities is a clamp that is never met.

  The choices of a softmax over E experts add up to 1 / E or more.
  """
  least = config('moe_norm_min', 1e-12)
  if least * config('moe_num_experts', 64) > 1:
    config.refuse(
      'moe_norm_min', 'would clamp sums, which are not clamped here'
    )
  return {'experts.sum_epsilon': 0.0}


ERNIE = (
  Same('moe_num_experts', 'experts.count', 64, ('num_experts',)),
  Same('moe_k', 'experts.top_k', 6, ('num_experts_per_tok',)),
  Same('moe_intermediate_size', 'experts.d_ff', 1536),
  Same('moe_num_shared_experts', 'experts.shared', 2, zero=True),
  expert.places(_ernie_places, _ernie_written),
  Computed(_never_binds, lambda model: {}), Fixed('use_bias', False),
  Ours({'experts.normalise': True, 'experts.bias_rate': 1e-3}),
)  # fmt: skip


COHERE_WORDS = {'sliding_attention': 'W', 'full_attention': 'N'}


def _cohere_layers(config):
  """Layers without a window have no rotary positions, but for dense ones where
  prefix_dense_sliding_window_pattern is 1."""
  first = 'first_k_dense_replace'
  places = config.each(
    'mlp_layer_types', expert.SPARSE, lambda: kin.leading(first)(config)
  )
  width = config('prefix_dense_intermediate_size', 0, 1)
  if 'D' in places and not width:
    config.refuse('prefix_dense_intermediate_size', 'is needed by dense layers')
  step = config('prefix_dense_sliding_window_pattern', 1)
  forced, dense_first = step == 1, min(config(first, 0), len(places))

  def kinds():
    """Dense layers count to a period of their own."""
    prefix = ''.join(
      'W' if i % step else 'N' for i in range(1, dense_first + 1)
    )
    return (prefix + kin.full_each(4, 'N')(config))[: len(places)]

  letters = config.each('layer_types', COHERE_WORDS, kinds)
  letters = ''.join(
    'F' if kind == 'N' and place == 'D' and forced else kind
    for kind, place in zip(letters, places, strict=True)
  )
  window = config('sliding_window', 0, 1)
  out = {'experts.pattern': rows.unit(places), 'pattern': rows.unit(letters)}
  return (
    out | ({'d_ff': width} if width else {})
    | ({'window': window} if 'W' in letters else {})
  )  # fmt: skip


def _cohere_written(model):
  letters = kin.pattern(model)
  full, windowed = 'full_attention', 'sliding_attention'
  return dict(
    layer_types=[windowed if x == 'W' else full for x in letters],
    prefix_dense_sliding_window_pattern=1 if 'F' in letters else 2,
    prefix_dense_intermediate_size=model.d_ff,
    sliding_window=model.window or None,
    **expert.written_places(expert.behind(model)),
  )


def _cohere_norm(config):
  """RMSNorm if its epsilon is given, else LayerNorm without a bias."""
  epsilon = config('layer_norm_eps', 1e-5)
  if config.given('rms_norm_eps') is None:
    return {'norm': 'layernorm_unbiased', 'norm_epsilon': epsilon}
  return {'norm': 'rmsnorm', 'norm_epsilon': config('rms_norm_eps', epsilon)}


def _cohere_scores(config):
  """Sigmoids are normalised or not; a softmax is over those chosen."""
  name, known = 'expert_selection_fn', ('softmax', 'sigmoid')
  scores = config(name, 'softmax')
  if scores not in known:
    config.refuse(name, f'is not one of {", ".join(known)}')
  normal = config('norm_topk_prob', True) or scores == 'softmax'
  return {'experts.scores': scores, 'experts.normalise': normal}


def _cohere_together(config):
  """What shared experts and the others add up to, or the mean of both."""
  name = 'shared_expert_combination_strategy'
  how, scales = config(name, 'average'), {'sum': 1.0, 'average': 0.5}
  if how not in scales:
    config.refuse(name, f'is not one of {", ".join(scales)}')
  if not config('num_shared_experts', 0):
    return {'experts.shared': 0}
  return {
    'experts.shared': config('num_shared_experts', 0),
    'experts.scale': scales[how],
    'experts.shared_scale': scales[how],
  }


COHERE = (
  *kin.DIMS, kin.HEADS, dense.BIAS, rows.rope(1e4), expert.COUNT, expert.TOP,
  Same('intermediate_size', 'experts.d_ff'),
  Same('tie_word_embeddings', 'tied_embedding', True),
  Same('logit_scale', 'logit_scale', 0.0625),
  Choice('hidden_act', 'mlp', kin.GATES, 'silu'),
  Computed(_cohere_layers, _cohere_written),
  Computed(_cohere_norm, lambda model: {
    'rms_norm_eps': model.norm_epsilon if model.norm == 'rmsnorm' else None,
    'layer_norm_eps': model.norm_epsilon,
  }),
  Computed(_cohere_scores, lambda model: {
    'expert_selection_fn': model.experts.scores,
    'norm_topk_prob': model.experts.normalise,
  }),
  Computed(_cohere_together, lambda model: {
    'num_shared_experts': model.experts.shared,
    'shared_expert_combination_strategy': (
      'sum' if model.experts.shared_scale == 1 else 'average'
    ),
  }),
  Ours({'residual': 'shared', 'experts.sum_epsilon': 0.0}),
)  # fmt: skip


def _flint_layers(config):
  depth = config('num_hidden_layers')
  return ''.join(
    'N' if i < 2 or i % 4 == 1 or i == depth - 1 else 'W' for i in range(depth)
  )


FLINT_PLACES = expert.places(
  lambda config: expert.sparse_layers(config, (0, 1)),
  expert.written_sparse,
)


def _flint_shared(config):
  name = 'shared_expert_intermediate_size'
  width, own = config(name), 'moe_intermediate_size'
  return {'experts.shared': expert.multiple(config, name, width, own)}


# Llama 4: layers that rotate see chunks, the others everything.
LLAMA4_WORDS = {'chunked_attention': 'K', 'full_attention': 'N'}


def _llama4_layers(config):
  depth = config('num_hidden_layers')
  every = config('no_rope_layer_interval', 4, 1)
  rotated = config.numbers('no_rope_layers', [])[:depth]
  rotated = rotated or [(i + 1) % every for i in range(depth)]
  wanted = ''.join('K' if x else 'N' for x in rotated)
  found = config.each('layer_types', LLAMA4_WORDS, lambda: wanted)
  if found != wanted:
    config.refuse('layer_types', 'has chunks where no_rope_layers has none')
  chunk = config('attention_chunk_size', 8192, 1)
  return {'pattern': rows.unit(found), 'attention_chunk': chunk}


def _llama4_written(model):
  letters = kin.pattern(model)
  words = {letter: word for word, letter in LLAMA4_WORDS.items()}
  if not set(letters) <= set(words):
    return {}
  return dict(
    no_rope_layers=[int(x == 'K') for x in letters],
    layer_types=[words[x] for x in letters],
    attention_chunk_size=model.attention_chunk or 8192,
  )


def _llama4_places(config):
  depth = config('num_hidden_layers')
  step = config('interleave_moe_layer_step', 1, 1)
  held = range(step - 1, depth, step)
  if config.given('moe_layers') is not None:
    held = config.numbers('moe_layers', [])
  return ''.join('E' if i in held else 'D' for i in range(depth))


def _llama4_positions(config):
  """Rotation, and queries that grow where there is none."""
  out = rows.rope(5e5).read(config)
  growth, length = config('attn_scale', 0.1), config('floor_scale', 8192, 1)
  if config.given('attn_temperature_tuning') in (False, 0):
    return out
  own = out.setdefault('rope_original_length', length)
  if own != length:
    config.refuse(
      'floor_scale', f'is not original_max_position_embeddings, {own}'
    )
  return out | {'query_growth': growth, 'query_growth_kinds': 'unrotated'}


LLAMA4 = (
  *expert.no_mlp(llama(epsilon=1e-5)), dense.BIAS,
  Same('intermediate_size', 'experts.d_ff', 8192),
  Same('intermediate_size_mlp', 'd_ff', 16384),
  Same('num_local_experts', 'experts.count', 16),
  Same('num_experts_per_tok', 'experts.top_k', 1),
  Computed(
    lambda config: {'head_dim': config('head_dim', 128, 1)},
    lambda model: {'head_dim': model.head_width},
  ),
  Choice('use_qk_norm', 'qk_norm', {True: 'rotated_bare', False: 'none'}, True),
  Computed(_llama4_layers, _llama4_written),
  expert.places(_llama4_places, lambda letters: {
    'moe_layers': [i for i, x in enumerate(letters) if x == 'E'],
  }),
  Computed(_llama4_positions, lambda model: {
    'rope_parameters': rows.written_rope(model),
    **rows.written_length(model),
    'attn_temperature_tuning': model.query_growth > 0,
    'attn_scale': model.query_growth or 0.1,
    'floor_scale': model.rope_original_length,
  }),
  Ours({
    'experts.scores': 'sigmoid', 'experts.normalise': False,
    'experts.shared': 1, 'experts.scale_inputs': True,
  }),
)  # fmt: skip


FAMILIES = {
  'ernie4_5_moe': family(
    'Ernie4_5_MoeForCausalLM', llama(theta=5e5, epsilon=1e-5, tied=True),
    ERNIE, neighbours=True, router_bias_shape=(1, -1),
    **kin.EXPERT_NAMES
    | dict(router_bias='moe_statics.e_score_correction_bias'),
  ),
  'aria_text': family(
    'AriaTextForCausalLM', expert.no_mlp(llama()), kin.DIVIDES, dense.BIAS,
    Same('intermediate_size', 'experts.d_ff'),
    Same('moe_num_experts', 'experts.count', 8),
    Same('moe_topk', 'experts.top_k', 2),
    Same('moe_num_shared_experts', 'experts.shared', 2),
    Fixed('hidden_act', 'silu'), Fixed('mlp_bias', False),
    Ours({'experts.normalise': True}),
    **kin.EXPERT_NAMES | dict(
      router='router', expert_gate_up='experts.fc1.weight',
      expert_down='experts.fc2.weight', expert_gate_up_order='inputs first',
    ),
  ),
  'cohere2_moe': family(
    'Cohere2MoeForCausalLM', COHERE, kin.SPARE_PERIOD, neighbours=True,
    **kin.EXPERT_NAMES,
  ),
  'flint': family(
    'FlintForCausalLM', llama(), expert.QWEN, FLINT_PLACES, dense.BIAS,
    Same('norm_topk_prob', 'experts.normalise', True),
    kin.layers(_flint_layers, dense_kin.NOPE),
    Computed(_flint_shared, expert.SHARED.writes),
    Ours({
      'qk_norm': 'head', 'sinks': True, 'experts.scores': 'sigmoid',
      'experts.sum_epsilon': 0.0,
    }),
    sinks='softmax_offset', **QWEN_NAMES,
  ),
  'llama4_text': family(
    'Llama4ForCausalLM', LLAMA4, silent=('for_llm_compressor',),
    neighbours=True, mlp='feed_forward', moe='feed_forward', router='router',
    expert_gate_up='experts.gate_up_proj', expert_down='experts.down_proj',
    expert_gate_up_order='inputs first', shared='shared_expert',
  ),
  'granitemoe_swa': family(
    'GraniteMoeSWAForCausalLM', llama(), expert.LOCAL, expert.TOP, dense.BIAS,
    expert.GRANITE, expert.GRANITE_SHARED, dense_kin.SWA,
    **expert.GRANITE_NAMES | dict(
      router='router', expert_gate_up='experts.gate_up_proj',
      expert_down='experts.down_proj', expert_suffix='',
    ),
  ),
}  # fmt: skip
