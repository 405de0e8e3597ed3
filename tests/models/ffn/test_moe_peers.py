"""Experts of published models: blocks of `transformers`.

Random tiny blocks in float64 with the same weights: outputs, gradients of x and
the experts a token is sent to, within 1e-9 of the largest (whole models:
tests/models/huggingface/test_families.py). HF routes in float32 whatever the
dtype; `Wide` makes that float64 too.
Its grouped products know no float64: its experts run one by one ('eager').

Legend: B rows, T tokens, D model, F hidden width, E experts, K choices,
V vocabulary, N heads, H head width.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
import pytest

from paraxis.configs.base import model as model_schema
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.ffn import moe
from paraxis.models.ffn import router
from paraxis.models.mixers import attention

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, E, K, V, N, H = 2, 12, 16, 8, 8, 3, 32, 4, 4
TOLERANCE, distance = peers.TOLERANCE, peers.distance

SHAPE = dict(
  vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=N,
  num_key_value_heads=2, head_dim=H, max_position_embeddings=64,
  rms_norm_eps=1e-6, pad_token_id=None, bos_token_id=1, eos_token_id=2,
  num_experts_per_tok=K, tie_word_embeddings=False, hidden_act='silu',
  attn_implementation='eager',
)  # fmt: skip

# name -> (module, class of the block, HF's config, fields of schema.Experts)
PEERS = {
  'mixtral': (
    'mixtral', 'MixtralSparseMoeBlock',
    dict(num_local_experts=E, intermediate_size=F), dict(),
  ),
  'olmoe': (
    'olmoe', 'OlmoeSparseMoeBlock',
    dict(num_experts=E, intermediate_size=F), dict(normalise=False),
  ),
  'qwen3': (
    'qwen3_moe', 'Qwen3MoeSparseMoeBlock',
    dict(
      num_experts=E, moe_intermediate_size=F, intermediate_size=F,
      norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    dict(),
  ),
  'deepseek': (
    'deepseek_v3', 'DeepseekV3MoE',
    dict(
      n_routed_experts=E, moe_intermediate_size=F, intermediate_size=F,
      n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5,
      norm_topk_prob=True,
    ),
    dict(
      scores='sigmoid', groups=4, top_groups=2, scale=2.5, shared=2,
      bias_rate=0.01,
    ),
  ),
}  # fmt: skip


def config(name, **changes):
  """Our schema.Model of a peer."""
  *_, experts = PEERS[name]
  fields: dict[str, Any] = dict(
    vocab_size=V, d_model=D, d_ff=F, num_layers=2, num_heads=N, num_kv_heads=2,
    head_dim=H, dtype='float64', param_dtype='float64', attention_block=8,
    tied_embedding=False,
    experts=model_schema.Experts(
      **dict(count=E, top_k=K, balance=0.0, region='') | experts
    ),
  )  # fmt: skip
  return model_schema.Model(**fields | changes)


def module(name):
  """The file of `transformers` with the block; skips without torch."""
  pytest.importorskip('torch', reason='the peer needs torch')
  home = PEERS[name][0]
  return importlib.import_module(f'transformers.models.{home}.modeling_{home}')


def their_config(name):
  home, _, extra, _ = PEERS[name]
  import hf_peer  # skips without torch

  family = {'qwen3_moe': 'Qwen3Moe', 'deepseek_v3': 'DeepseekV3'}
  kind = f'{family.get(home, home.capitalize())}Config'
  config = getattr(hf_peer.transformers, kind)(**SHAPE | extra)
  config._experts_implementation = 'eager'
  return config


def experts_of(hf, prefix=''):
  """{our path: array} of one block, from a function that reads a tensor."""
  both = hf(f'{prefix}experts.gate_up_proj').swapaxes(1, 2)
  return {
    'router': hf(f'{prefix}gate.weight').T,
    'gate': both[..., :F],
    'up': both[..., F:],
    'down': hf(f'{prefix}experts.down_proj').swapaxes(1, 2),
  }


def block(name):
  """(our module with the peer's weights, the peer)."""
  import hf_peer  # skips without torch

  cls = getattr(module(name), PEERS[name][1])
  peer = hf_peer.randomised(lambda: cls(their_config(name)), 0.5)
  tensors, values = hf_peer.weights_of(peer), {}
  if name == 'deepseek':
    values['bias'] = peers.weight('bias', (E,), 0.2)
    peer.gate.e_score_correction_bias.copy_(
      hf_peer.torch.tensor(values['bias'])
    )
    beside = peers.mlp_of(tensors.pop, 'shared_experts')
    values |= peers.within('beside', beside)
  values |= experts_of(tensors.pop)
  assert not tensors
  skeleton = skeleton_lib.Skeleton(lambda rngs: moe.Moe(config(name), rngs))
  values['load'] = np.zeros(E + router.EXTRA)
  assert set(values) == set(skeleton.leaves)
  return skeleton.module({p: jnp.asarray(v) for p, v in values.items()}), peer


def compare(name):
  """(distance of outputs, of gradients of x, share of equal sets of ids)."""
  import hf_peer  # skips without torch

  torch = hf_peer.torch
  ours, peer = block(name)
  x, u = np.random.default_rng(0).normal(size=(2, B, T, D))
  theirs = torch.tensor(x, requires_grad=True)
  with hf_peer.Wide():
    y = peer(theirs)
    _, _, ids = peer.gate(theirs)
  y.backward(torch.tensor(u))
  see = attention.Visibility(None, None)

  @jax.jit
  def run(x):
    out, vjp = jax.vjp(lambda x: ours(x, see)[0], x)
    s = router.scores(x @ ours.router[...], ours.config.experts.scores)
    bias = ours.bias[...] if name == 'deepseek' else None
    return (
      out,
      vjp(jnp.asarray(u))[0],
      router.choose(s, ours.config.experts, bias),
    )

  out, dx, (mine, _) = run(x)
  found = np.sort(np.asarray(mine).reshape(-1, K))
  equal = (found == np.sort(ids.numpy().reshape(-1, K))).mean()
  return distance(out, y.detach()), distance(dx, theirs.grad), equal


@pytest.mark.hf
@pytest.mark.parametrize('name', PEERS)
def test_blocks_equal(name):
  outputs, gradients, ids = compare(name)
  assert outputs < TOLERANCE and gradients < TOLERANCE and ids == 1


@pytest.mark.hf
@pytest.mark.parametrize(
  'name, change',
  [
    ('mixtral', dict(normalise=False)),
    ('olmoe', dict(normalise=True)),
    ('deepseek', dict(scale=1.0)),
  ],
)
def test_a_wrong_field_is_seen(name, change, monkeypatch):
  *peer, fields = PEERS[name]
  monkeypatch.setitem(PEERS, name, (*peer, fields | change))
  cached = their_config(name)
  monkeypatch.setitem(globals(), 'their_config', lambda name: cached)
  outputs, gradients, _ = compare(name)
  assert outputs > 1e-3 and gradients > 1e-3
