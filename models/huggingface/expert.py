"""Families with mixtures of experts."""

from paraxis.models.huggingface import dense
from paraxis.models.huggingface import kin
from paraxis.models.huggingface import rows
from paraxis.models.huggingface.kin import family
from paraxis.models.huggingface.kin import llama
from paraxis.models.huggingface.rows import Computed
from paraxis.models.huggingface.rows import Fixed
from paraxis.models.huggingface.rows import Ours
from paraxis.models.huggingface.rows import Same

COUNT = Same('num_experts', 'experts.count', other=('num_local_experts',))
LOCAL = Same('num_local_experts', 'experts.count', other=('num_experts',))
TOP = Same('num_experts_per_tok', 'experts.top_k')
NORMALISE = Same('norm_topk_prob', 'experts.normalise', False)


def sparse_layers(config):
  """Which layers have experts, by Qwen's two fields: one letter a layer."""
  step, plain = config('decoder_sparse_step', 1), config('mlp_only_layers', [])
  return ''.join(
    'D' if i in plain or (i + 1) % step else 'E'
    for i in range(config('num_hidden_layers'))
  )


def places(read, write):
  """Which layers have experts.

  read: Reader -> letters, write: them -> theirs.
  """
  return Computed(
    lambda config: {'experts.pattern': rows.unit(read(config))},
    lambda model: write(behind(model)),
  )


def behind(model):
  """E or D for every layer."""
  from paraxis.models import layer

  return ''.join('E' if k[1:] == 'E' else 'D' for k in layer.kinds_of(model)[1])


QWEN_PLACES = places(
  sparse_layers,
  lambda letters: {
    'decoder_sparse_step': 1,
    'mlp_only_layers': [i for i, x in enumerate(letters) if x == 'D'],
  },
)
DENSE_FIRST = places(
  lambda config: ''.join(
    'D' if i < config('first_k_dense_replace', 0) else 'E'
    for i in range(config('num_hidden_layers'))
  ),
  lambda letters: {
    'first_k_dense_replace': len(letters) - len(letters.lstrip('D'))
  },
)
NO_CLIP = Fixed('clip_qkv', None)
QWEN = (COUNT, TOP, NORMALISE, Same('moe_intermediate_size', 'experts.d_ff'))


def _shared(config):
  """One shared expert of its own width, which ours states in experts."""
  width, own = (
    config('shared_expert_intermediate_size'),
    config('moe_intermediate_size'),
  )
  if width % own:
    config.refuse(
      'shared_expert_intermediate_size',
      f'is no multiple of moe_intermediate_size={own}',
    )
  return {'experts.shared': width // own, 'experts.shared_gate': True}


SHARED = Computed(
  _shared,
  lambda model: {
    'shared_expert_intermediate_size': model.experts.shared
    * (model.experts.d_ff or model.d_ff)
  },
)
MLA_NAMES = dict(
  latent_attention='self_attn', down='kv_a_proj_with_mqa',
  latent_norm='kv_a_layernorm', latent_up='kv_b_proj', query_down='q_a_proj',
  query_norm='q_a_layernorm', latent_query='q_b_proj',
)  # fmt: skip
LATENT = (
  Same('kv_lora_rank', 'latent.rank'),
  Same('q_lora_rank', 'latent.query_rank', 0),
  Same('qk_nope_head_dim', 'latent.nope_dim'),
  Same('qk_rope_head_dim', 'latent.rope_dim'),
  Same('v_head_dim', 'latent.value_dim'), Ours({'pattern': 'A'}),
)  # fmt: skip
FAMILIES = {
  'mixtral': family(
    'MixtralForCausalLM', llama(theta=1e6, epsilon=1e-5), LOCAL, TOP,
    dense._window_or_not(), moe='block_sparse_moe', router='gate',
    expert='experts.{}', expert_gate='w1', expert_up='w3', expert_down='w2',
  ),
  'olmoe': family(
    'OlmoeForCausalLM', llama(epsilon=1e-5), dense.BIAS, COUNT, TOP, NORMALISE,
    NO_CLIP, Ours({'qk_norm': 'all'}), **kin.EXPERT_NAMES,
  ),
  'qwen2_moe': family(
    'Qwen2MoeForCausalLM', llama(), QWEN, QWEN_PLACES, SHARED,
    Same('qkv_bias', 'attention_bias', True), dense.QWEN_LAYERS,
    **kin.EXPERT_NAMES | dict(shared='shared_expert'),
  ),
  'qwen3_moe': family(
    'Qwen3MoeForCausalLM', llama(), QWEN, QWEN_PLACES, dense.BIAS,
    Ours({'qk_norm': 'head'}), dense._window_or_not(), dense.USES_WINDOW,
    **kin.EXPERT_NAMES,
  ),
}  # fmt: skip
