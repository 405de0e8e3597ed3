"""Experts of published models: blocks, and whole models, of `transformers`.

Random tiny models in float64 with the same weights: outputs, gradients of x and
the experts a token is sent to, then logits of whole models, within 1e-9 of the
largest. HF routes in float32 whatever the dtype; `Wide` makes that float64 too.
Its grouped products know no float64: its experts run one by one ('eager').

Legend: B rows, T tokens, D model, F hidden width, E experts, K choices,
V vocabulary, N heads, H head width.
"""

import functools
import importlib

from flax import nnx
import hf_peer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs.base import model as model_schema
from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.ffn import moe
from paraxis.models.ffn import router
from paraxis.models.mixers import attention

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures('float64')]
torch, transformers = hf_peer.torch, hf_peer.transformers

B, T, D, F, E, K, V, N, H = 2, 12, 16, 8, 8, 3, 32, 4, 4
TOLERANCE = 1e-9


# LLVM's optimisations take half of the time and change no number here.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': '0'}
)

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
  return model_schema.Model(**dict(
    vocab_size=V, d_model=D, d_ff=F, num_layers=2, num_heads=N, num_kv_heads=2,
    head_dim=H, dtype='float64', param_dtype='float64', attention_block=8,
    tied_embedding=False,
    experts=model_schema.Experts(
      **dict(count=E, top_k=K, balance=0.0, region='') | experts
    ),
  ) | changes)  # fmt: skip


def module(name):
  home = PEERS[name][0]
  return importlib.import_module(f'transformers.models.{home}.modeling_{home}')


def their_config(name):
  home, _, extra, _ = PEERS[name]
  family = {'qwen3_moe': 'Qwen3Moe', 'deepseek_v3': 'DeepseekV3'}
  kind = f'{family.get(home, home.capitalize())}Config'
  config = getattr(transformers, kind)(**SHAPE | extra)
  config._experts_implementation = 'eager'
  return config


def double(make):
  """A module in float64 whose weights, and buffers, are normal."""
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    torch.manual_seed(0)
    out = make().double().eval()
    with torch.no_grad():
      for p in out.parameters():
        p.normal_(0, 0.5)
      for key, buffer in out.named_buffers():
        if 'bias' in key:
          buffer.normal_(0, 0.2)
  finally:
    torch.set_default_dtype(before)
  return out


def experts_of(hf, prefix=''):
  """{our path: array} of one block, from a function that reads a tensor."""
  both = hf(f'{prefix}experts.gate_up_proj').swapaxes(1, 2)
  return {
    'router': hf(f'{prefix}gate.weight').T,
    'gate': both[..., :F],
    'up': both[..., F:],
    'down': hf(f'{prefix}experts.down_proj').swapaxes(1, 2),
  }


def tensors(peer):
  """(function of a name, names that it has not been asked for)."""
  values = {**dict(peer.named_parameters()), **dict(peer.named_buffers())}
  unused = {k for k in values if 'inv_freq' not in k}

  def hf(name):
    unused.discard(name)
    return values[name].detach().numpy()

  return hf, unused


def block(name):
  """(our module with the peer's weights, the peer)."""
  cls = getattr(module(name), PEERS[name][1])
  peer = double(lambda: cls(their_config(name)))
  hf, unused = tensors(peer)
  values = experts_of(hf)
  if name == 'deepseek':
    values['bias'] = hf('gate.e_score_correction_bias')
    for key in ('gate', 'up', 'down'):
      values[f'beside/{key}'] = hf(f'shared_experts.{key}_proj.weight').T
  assert not unused
  graph, state = nnx.split(
    nnx.eval_shape(lambda: moe.Moe(config(name), nnx.Rngs(0)))
  )
  values['load'] = np.zeros(E + router.EXTRA)
  flat = [
    (p, v.replace(jnp.asarray(values.pop('/'.join(p)))))
    for p, v in nnx.to_flat_state(state)
  ]
  assert not values
  return nnx.merge(graph, nnx.from_flat_state(flat)), peer


def distance(a, b):
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  return np.abs(a - b).max() / np.abs(b).max()


def compare(name):
  """(distance of outputs, of gradients of x, share of equal sets of ids)."""
  ours, peer = block(name)
  x, u = np.random.default_rng(0).normal(size=(2, B, T, D))
  theirs = torch.tensor(x, requires_grad=True)
  with hf_peer.Wide():
    y = peer(theirs)
    _, _, ids = peer.gate(theirs)
  y.backward(torch.tensor(u))
  see = attention.Visibility(None, None)

  @jit
  def run(x):
    out, vjp = jax.vjp(lambda x: ours(x, see), x)
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


@pytest.mark.parametrize('name', PEERS)
def test_blocks_equal(name):
  outputs, gradients, ids = compare(name)
  assert outputs < TOLERANCE and gradients < TOLERANCE and ids == 1


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


def translate(peer, config):
  """HF's whole model by our paths; every tensor is used."""
  hf, unused = tensors(peer)
  out = {
    'embedding': hf('model.embed_tokens.weight'),
    'norm/scale': hf('model.norm.weight'),
    'head': hf('lm_head.weight'),
  }
  layers = []
  for i in range(config.num_layers):
    p = f'model.layers.{i}.'
    layer = {f'moe/{k}': v for k, v in experts_of(hf, f'{p}mlp.').items()} | {
      'moe/load': np.zeros(E + router.EXTRA)
    }
    for ours, theirs in (('query', 'q'), ('key', 'k'), ('value', 'v')):
      w = hf(f'{p}self_attn.{theirs}_proj.weight')
      layer[f'attention/{ours}'] = w.T.reshape(D, -1, H)
      if config.qk_norm != 'none' and ours != 'value':
        w = hf(f'{p}self_attn.{theirs}_norm.weight')
        shape = (-1, H) if config.qk_norm == 'all' else (H,)
        layer[f'attention/{ours}_norm'] = w.reshape(shape)
    w = hf(f'{p}self_attn.o_proj.weight')
    layer['attention/output'] = w.T.reshape(N, H, D)
    layer['attention_norm/scale'] = hf(f'{p}input_layernorm.weight')
    layer['mlp_norm/scale'] = hf(f'{p}post_attention_layernorm.weight')
    layers.append(layer)
  for path in layers[0]:
    out[f'layers/{path}'] = np.stack([x[path] for x in layers])
  assert not unused, unused
  return out


@pytest.mark.parametrize(
  'name, family, fields',
  [
    ('mixtral', 'Mixtral', dict(rope_theta=1e6)),
    ('olmoe', 'Olmoe', dict(qk_norm='all')),
    ('qwen3', 'Qwen3Moe', dict(qk_norm='head')),
  ],
)
def test_logits_of_whole_models_equal(name, family, fields):
  ours = config(name, **fields)
  model_checks.check_model(ours)
  make = getattr(transformers, f'{family}ForCausalLM')
  with hf_peer.Wide():
    peer = double(lambda: make(their_config(name)))
    theirs_ids = np.random.default_rng(1).integers(0, V, (B, T))
    with torch.no_grad():
      theirs = peer(input_ids=torch.tensor(theirs_ids), use_cache=False).logits
  ones = np.ones((B, T), np.int32)
  data = batch.Batch(
    theirs_ids.astype(np.int32), theirs_ids.astype(np.int32), ones,
    np.arange(T, dtype=np.int32) * ones, ones * 1.0, ones.sum() * 1.0,
  )  # fmt: skip
  model = decoder.Decoder(ours)
  params = translate(peer, ours)

  @jit
  def run(params):
    return model.logits(params, model(params, data)[0])

  assert distance(run(params), theirs) < TOLERANCE
