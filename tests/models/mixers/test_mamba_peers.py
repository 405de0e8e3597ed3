"""Mamba, Mamba-2 and Jamba of `transformers`: logits and gradients equal.

Random tiny models in float64 with the same weights, within 1e-9 of the largest.
HF computes steps, decays, norms and logits in float32 whatever the dtype;
`Wide` makes that float64 too.

Legend: B rows, T tokens, D model, N heads, P head width, G groups, S numbers of
the state, F inner width, R rank of the steps, W taps, V vocabulary.
"""

import functools

import numpy as np
import peers
import pytest

from paraxis.configs.base import mixers as mixer_schema
from paraxis.configs.base import model as model_schema

pytestmark = pytest.mark.usefixtures('float64')

B, T, V = 2, 19, 32
D, N, P, G, S, W, R = 16, 8, 4, 2, 6, 4, 3
F = 2 * D
TOLERANCE, distance = peers.TOLERANCE, peers.distance

SHAPE = dict(
  vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=S,
  conv_kernel=W, expand=2, layer_norm_epsilon=1e-5, pad_token_id=None,
  bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FIELDS = dict(
  vocab_size=V, d_model=D, num_layers=2, num_heads=4, head_dim=4, d_ff=24,
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


DATA = peers.rows(V, (B, T))


@functools.cache
def peer(name):
  """(logits, {name: weight}, {name: gradient}) of HF's model, float64."""
  import hf_peer  # skips without torch

  transformers = hf_peer.transformers
  config = getattr(transformers, f'{name}Config')(**PEERS[name][0])
  make = getattr(transformers, f'{name}ForCausalLM')
  model = hf_peer.randomised(lambda: make(config), FAMILY.spread)
  return hf_peer.gradients_of(model, DATA)


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


def layer_of(hf, i, name, config):
  """{our path in layer i: array}."""
  if name == 'Jamba':
    at, mixes = f'model.layers.{i}', config.pattern[i] == 'S'
    own = 'mamba' if mixes else 'attention'
    parts = {
      own: jamba_of(hf, f'{at}.mamba')
      if mixes
      else peers.attention_of(hf, f'{at}.self_attn', config),
      'mlp': peers.mlp_of(hf, f'{at}.feed_forward'),
    }
    norms = {own: 'input_layernorm', 'mlp': 'pre_ff_layernorm'}
  else:
    at, own = f'backbone.layers.{i}', name.lower()
    read = mamba2_of if name == 'Mamba2' else mamba_of
    parts, norms = {own: read(hf, f'{at}.mixer')}, {own: 'norm'}
  out = {f'{p}_norm/scale': hf(f'{at}.{n}.weight') for p, n in norms.items()}
  for part, values in parts.items():
    out |= peers.within(part, values)
  return out


def config_of(name, **changes):
  _, fields, mamba = PEERS[name]
  return model_schema.Model(
    **FIELDS | fields | changes, mamba=mixer_schema.Mamba(**OWN | mamba)
  )


def translate(values, name):
  """HF's {name: array} by our paths."""
  config = config_of(name)
  ends = {
    'embedding': 'backbone.embeddings.weight',
    'norm/scale': 'backbone.norm_f.weight',
  }
  if name == 'Jamba':
    ends = peers.ENDS | {'norm/scale': 'model.final_layernorm.weight'}
  elif not config.tied_embedding:
    ends['head'] = 'lm_head.weight'
  layer = functools.partial(layer_of, name=name, config=config)
  return peers.translate(values, config, ends, layer)


FAMILY = peers.Family(PEERS, 0.3, peer, config_of, translate, DATA)


def ours(name, **changes):
  """(logits, gradients, HF's gradients by our paths)."""
  _, weights, grads = peer(name)
  found = peers.ours(config_of(name, **changes), translate(weights, name), DATA)
  return *found, translate(grads, name)


@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_are_golden(name):
  """What `transformers` computed once: runs without it."""
  logits, far = peers.against_golden(FAMILY, name)
  assert logits < TOLERANCE and not far


def test_a_wrong_field_is_not_golden():
  wrong = config_of('Mamba2', norm_epsilon=1e-3)
  logits, far = peers.against_golden(FAMILY, 'Mamba2', wrong)
  assert logits > 100 * TOLERANCE and far


@pytest.mark.hf
@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_equal(name):
  logits, grads, expected = ours(name)
  assert distance(logits, peer(name)[0]) < TOLERANCE
  assert not peers.far(grads, expected)


@pytest.mark.hf
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
