"""Mamba, Mamba-2 and Jamba of `transformers`: logits and gradients equal.

Random tiny models in float64 with the same weights, within 1e-9 of the largest.
HF computes steps, decays, norms and logits in float32 whatever the dtype;
`Wide` makes that float64 too.

Legend: B rows, T tokens, D model, N heads, P head width, G groups, S numbers of
the state, F inner width, R rank of the steps, W taps, V vocabulary.
"""

import functools

import hf_peer
import jax
import numpy as np
import pytest

from paraxis.configs.base import mixers as mixer_schema
from paraxis.configs.base import model as model_schema
from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.train import loss

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures('float64')]
torch, transformers = hf_peer.torch, hf_peer.transformers

B, T, V = 2, 19, 32
D, N, P, G, S, W, R = 16, 8, 4, 2, 6, 4, 3
F, HEAD = 2 * D, 4
TOLERANCE = 1e-9


# LLVM's optimisations take half of the time and change no number here.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': '0'}
)

SHAPE = dict(
  vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=S,
  conv_kernel=W, expand=2, layer_norm_epsilon=1e-5, pad_token_id=None,
  bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FIELDS = dict(
  vocab_size=V, d_model=D, num_layers=2, num_heads=4, head_dim=HEAD, d_ff=24,
  dtype='float64', param_dtype='float64', attention_block=8, position='none',
)  # fmt: skip
OWN = dict(head_dim=P, groups=G, state=S, conv_width=W, dt_rank=R)
ALONE = dict(mlp='none', norm_epsilon=1e-5)
# name -> (HF's config, our fields, our fields of mixer_schema.Mamba)
PEERS = {
  'Mamba': (SHAPE | dict(time_step_rank=R), ALONE | dict(pattern='S'), {}),
  'Mamba2': (
    SHAPE | dict(num_heads=N, head_dim=P, n_groups=G, chunk_size=8),
    ALONE | dict(pattern='M', tied_embedding=False),
    {},
  ),
  'Jamba': (
    dict(
      vocab_size=V, hidden_size=D, intermediate_size=24, num_hidden_layers=3,
      num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
      num_experts=1, attn_layer_period=3, attn_layer_offset=1,
      mamba_d_state=S, mamba_d_conv=W, mamba_expand=2, mamba_dt_rank=R,
      pad_token_id=None, bos_token_id=1, eos_token_id=2,
      attn_implementation='eager',
    ),
    dict(pattern='SFS', num_layers=3, num_kv_heads=2, tied_embedding=False),
    dict(inner_norm=True),
  ),
}  # fmt: skip


def rows():
  """A batch of one document a row."""
  ids = np.random.default_rng(1).integers(0, V, (B, T + 1)).astype(np.int32)
  ones = np.ones((B, T), np.int32)
  positions = np.arange(T, dtype=np.int32) * ones
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


@functools.cache
def peer(name):
  """(logits, {name: weight}, {name: gradient}) of HF's model, float64."""
  config = getattr(transformers, f'{name}Config')(**PEERS[name][0])
  make = getattr(transformers, f'{name}ForCausalLM')
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with hf_peer.Wide():
      torch.manual_seed(0)
      model = make(config).double().eval()
      with torch.no_grad():  # also scales and biases, or they hide mistakes
        for p in model.parameters():
          p.normal_(0, 0.3)
      tokens, targets = (torch.tensor(x).long() for x in rows()[:2])
      logits = model(input_ids=tokens, use_cache=False).logits
      torch.nn.functional.cross_entropy(
        logits.reshape(-1, V), targets.reshape(-1)
      ).backward()
  finally:
    torch.set_default_dtype(before)
  values = dict(model.named_parameters())
  weights = {k: v.detach().numpy() for k, v in values.items()}
  grads = {k: v.grad.numpy() for k, v in values.items()}
  return logits.detach().numpy(), weights, grads


def taps(hf, name):
  """(W, channels), the token's own first, and the bias."""
  w = hf(f'{name}.conv1d.weight')[:, 0]
  return w.T[::-1], hf(f'{name}.conv1d.bias')


def mamba_of(hf, name):
  """Weights of a Mamba mixer by our paths."""
  x, z = np.split(hf(f'{name}.in_proj.weight').T, 2, 1)
  low, b, c = np.split(hf(f'{name}.x_proj.weight').T, [R, R + S], 1)
  conv, bias = taps(hf, name)
  return dict(
    value=x, gate=z, value_conv=conv, value_bias=bias, step_down=low,
    shared=np.stack([b, c], 1), step_up=hf(f'{name}.dt_proj.weight').T,
    step_bias=hf(f'{name}.dt_proj.bias'), a_log=hf(f'{name}.A_log'),
    skip=hf(f'{name}.D'), output=hf(f'{name}.out_proj.weight').T,
  )  # fmt: skip


def jamba_of(hf, name):
  norm = lambda what: hf(f'{name}.{what}_layernorm.weight')
  both = np.stack([norm('b'), norm('c')])
  return mamba_of(hf, name) | dict(step_norm=norm('dt'), shared_norm=both)


def mamba2_of(hf, name):
  at = np.cumsum([F, F, G * S, G * S])
  parts = np.split(hf(f'{name}.in_proj.weight').T, at, 1)
  z, x, b, c, dt = parts
  conv, bias = taps(hf, name)
  value_conv, *shared_conv = np.split(conv, [F, F + G * S], 1)
  value_bias, *shared_bias = np.split(bias, [F, F + G * S])
  heads, groups = (N, P), (G, S)
  own = lambda x: x.reshape(*x.shape[:-1], *heads)
  both = lambda parts: np.stack(
    [x.reshape(*x.shape[:-1], *groups) for x in parts], parts[0].ndim - 1
  )
  return dict(
    gate=own(z), value=own(x), step=dt, shared=both([b, c]),
    value_conv=own(value_conv), shared_conv=both(shared_conv),
    value_bias=own(value_bias), shared_bias=both(shared_bias),
    step_bias=hf(f'{name}.dt_bias'), a_log=hf(f'{name}.A_log'),
    skip=hf(f'{name}.D'), norm=own(hf(f'{name}.norm.weight')),
    output=hf(f'{name}.out_proj.weight').T.reshape(N, P, D),
  )  # fmt: skip


def attention_of(hf, name):
  wide = lambda x: hf(f'{name}.{x}_proj.weight').T.reshape(D, -1, HEAD)
  return dict(
    query=wide('q'), key=wide('k'), value=wide('v'),
    output=hf(f'{name}.o_proj.weight').T.reshape(-1, HEAD, D),
  )  # fmt: skip


def mlp_of(hf, name):
  return {x: hf(f'{name}.{x}_proj.weight').T for x in ('gate', 'up', 'down')}


def layer_of(hf, i, name, config):
  """{our path in a layer: array}."""
  if name != 'Jamba':
    at, own = f'backbone.layers.{i}', 'mamba2' if name == 'Mamba2' else 'mamba'
    read = mamba2_of if name == 'Mamba2' else mamba_of
    parts = {own: read(hf, f'{at}.mixer')}
    norms = {own: 'norm'}
  else:
    at, mixes = f'model.layers.{i}', config.pattern[i] == 'S'
    own = 'mamba' if mixes else 'attention'
    parts = (
      {own: jamba_of(hf, f'{at}.mamba')}
      if mixes
      else {own: attention_of(hf, f'{at}.self_attn')}
    )
    parts['mlp'] = mlp_of(hf, f'{at}.feed_forward')
    norms = {own: 'input_layernorm', 'mlp': 'pre_ff_layernorm'}
  out = {f'{p}/{k}': v for p, part in parts.items() for k, v in part.items()}
  return out | {
    f'{p}_norm/scale': hf(f'{at}.{n}.weight') for p, n in norms.items()
  }


def translate(values, name, config):
  """{our path: array}; every array of HF's is used."""
  unused = set(values)

  def hf(key):
    unused.discard(key)
    return values[key]

  home, last = 'backbone', 'norm_f'
  embedding = 'backbone.embeddings.weight'
  if name == 'Jamba':
    home, last, embedding = 'model', 'final_layernorm', None
  out = {
    'embedding': hf(embedding or 'model.embed_tokens.weight'),
    'norm/scale': hf(f'{home}.{last}.weight'),
  }
  if not config.tied_embedding:
    out['head'] = hf('lm_head.weight')
  stacks = {}
  for i in range(config.num_layers):
    for path, value in layer_of(hf, i, name, config).items():
      stacks.setdefault(f'layers/{path}', []).append(value)
  assert not unused, unused
  return out | {p: np.stack(v) for p, v in stacks.items()}


def ours(name, own=(), **changes):
  """(logits, gradients, HF's gradients by our paths)."""
  _, fields, mamba = PEERS[name]
  config = model_schema.Model(
    **FIELDS | fields | changes,
    mamba=mixer_schema.Mamba(**OWN | mamba | dict(own)),
  )
  model_checks.check_model(config)
  _, weights, grads = peer(name)
  model, data = decoder.Decoder(config), rows()
  params = translate(weights, name, config)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  assert {p: v.shape for p, v in params.items()} == {
    p: v.shape for p, v in shapes.items()
  }

  def mean(params):
    z = model.logits(params, model(params, data)[0])
    return loss.negative_log_likelihood(z, data.targets).mean(), z

  found, logits = jit(jax.grad(mean, has_aux=True))(params)
  return logits, found, translate(grads, name, config)


def distance(a, b):
  """Largest difference, relative to the largest value."""
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  assert np.isfinite(a).all() and np.abs(b).max() > 0
  return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_equal(name):
  logits, grads, expected = ours(name)
  assert distance(logits, peer(name)[0]) < TOLERANCE
  assert set(grads) == set(expected)
  far = {p: distance(g, expected[p]) for p, g in grads.items()}
  assert not {p: d for p, d in far.items() if not d < TOLERANCE}


@pytest.mark.parametrize(
  'name, change', [('Mamba2', dict(norm_epsilon=1e-3)), ('Jamba', {})]
)
def test_a_wrong_map_is_seen(name, change, monkeypatch):
  """Another epsilon; or B in the place of C."""
  if not change:
    right = mamba_of
    monkeypatch.setitem(
      globals(),
      'mamba_of',
      lambda *at: (w := right(*at)) | dict(shared=w['shared'][:, ::-1]),
    )
  assert distance(ours(name, **change)[0], peer(name)[0]) > 1e-5
