"""Published shapes are configs of one file: logits and gradients equal HF's.

Random tiny models of `transformers` in float64 against models/decoder.py with
the same weights: logits, and the gradient of the loss by every parameter, both
within 1e-9 of the largest; without torch, some of both (peers.py). HF computes
norms, angles and soft-max in float32 whatever the dtype; `Wide` makes those
float64 too.

Legend: B rows, T tokens, D model, N heads, K kv heads, H head width, F mlp,
V vocabulary, L layers.
"""

import functools

import jax.numpy as jnp
import peers
import pytest

from paraxis.configs import schema
from paraxis.models import layer
from paraxis.models.mixers import attention

pytestmark = pytest.mark.usefixtures('float64')

B, T, V = 2, 24, 48
D, N, K, H, F = 16, 4, 2, 8, 24
TOLERANCE, distance = peers.TOLERANCE, peers.distance

SHAPE = dict(
  vocab_size=V, hidden_size=D, intermediate_size=F, num_attention_heads=N,
  num_key_value_heads=K, head_dim=H, max_position_embeddings=64,
  rms_norm_eps=1e-6, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FIELDS = dict(
  vocab_size=V, d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, d_ff=F,
  num_layers=2, dtype='float64', param_dtype='float64', attention_block=8,
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=50.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
  original_max_position_embeddings=512,
)  # fmt: skip
LLAMA3 = dict(
  rope_type='llama3', rope_theta=1e4, factor=8.0, low_freq_factor=1.0,
  high_freq_factor=4.0, original_max_position_embeddings=16,
)  # fmt: skip
SCALED = dict(rope_original_length=16, tied_embedding=False)
GEMMA = dict(
  norm_placement='sandwich', norm_zero_centered=True, mlp='geglu', window=5,
  embedding_scale=D**0.5,
)  # fmt: skip
LLAMA = dict(num_hidden_layers=2, tie_word_embeddings=False)

# name -> (HF family, its config beyond SHAPE, our fields beyond FIELDS)
SHAPES = {
  'llama': ('Llama', LLAMA, dict(tied_embedding=False)),
  'llama_linear': (
    'Llama',
    LLAMA
    | dict(
      rope_parameters=dict(rope_type='linear', rope_theta=500.0, factor=2.0)
    ),
    SCALED | dict(rope_scaling='linear', rope_factor=2.0, rope_theta=500.0),
  ),
  'llama_llama3': (
    'Llama',
    LLAMA | dict(rope_parameters=LLAMA3),
    SCALED | dict(rope_scaling='llama3', rope_factor=8.0),
  ),
  'llama_yarn': (
    'Llama',
    LLAMA | dict(rope_parameters=YARN),
    SCALED
    | dict(
      rope_scaling='yarn', rope_factor=4.0, rope_high_frequency=8.0,
      rope_theta=50.0, rope_original_length=512,
    ),
  ),
  'qwen2': ('Qwen2', LLAMA, dict(tied_embedding=False, attention_bias=True)),
  'qwen3': ('Qwen3', LLAMA, dict(tied_embedding=False, qk_norm='head')),
  # Layers 0, 2 see a window, 1, 3 everything.
  'gemma2': (
    'Gemma2',
    dict(
      num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=12,
      attn_logit_softcapping=2.0, final_logit_softcapping=1.5,
    ),
    GEMMA
    | dict(
      num_layers=3, pattern='WF', attention_scale=12**-0.5,
      attention_softcap=2.0, logit_softcap=1.5,
    ),
  ),
  'gemma3': (
    'Gemma3Text',
    dict(
      num_hidden_layers=7, sliding_window=5, query_pre_attn_scalar=12,
      rope_parameters=dict(
        full_attention=dict(rope_type='linear', rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type='default', rope_theta=1e4),
      ),
    ),
    GEMMA
    | dict(
      num_layers=7, pattern='WWWWWF', attention_scale=12**-0.5,
      qk_norm='head', rope_theta=1e6, rope_local_theta=1e4,
      rope_scaling='linear', rope_factor=8.0,
    ),
  ),
  'smollm3': (
    'SmolLM3',
    dict(num_hidden_layers=5, rope_parameters=dict(
      rope_type='default', rope_theta=2e6)),
    dict(num_layers=5, pattern='FFFN', rope_theta=2e6),
  ),
  'olmo2': (
    'Olmo2',
    LLAMA,
    dict(tied_embedding=False, norm_placement='post', qk_norm='all'),
  ),
  'gpt2': (
    'GPT2',
    dict(
      n_embd=D, n_head=N, n_layer=2, n_inner=F, n_positions=32,
      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    dict(
      num_kv_heads=0, head_dim=0, position='learned', max_positions=32,
      norm='layernorm', norm_epsilon=1e-5, mlp='gelu', mlp_bias=True,
      attention_bias=True, attention_output_bias=True,
    ),
  ),
}  # fmt: skip

NORMS = {
  'pre': dict(
    input_layernorm='attention_norm', post_attention_layernorm='mlp_norm'
  ),
  'post': dict(
    post_attention_layernorm='attention_post_norm',
    post_feedforward_layernorm='mlp_post_norm',
  ),
  'sandwich': dict(
    input_layernorm='attention_norm',
    post_attention_layernorm='attention_post_norm',
    pre_feedforward_layernorm='mlp_norm',
    post_feedforward_layernorm='mlp_post_norm',
  ),
}
GPT2_ENDS = {
  'embedding': 'transformer.wte.weight',
  'positions': 'transformer.wpe.weight',
  'norm/scale': 'transformer.ln_f.weight',
  'norm/bias': 'transformer.ln_f.bias',
}


def layer_of_llama(hf, i, config):
  """Layer i by our paths."""
  at = f'model.layers.{i}'
  norms = NORMS[config.norm_placement].items()
  return (
    peers.within('attention', peers.attention_of(hf, f'{at}.self_attn', config))
    | peers.within('mlp', peers.mlp_of(hf, f'{at}.mlp'))
    | {f'{ours}/scale': hf(f'{at}.{theirs}.weight') for theirs, ours in norms}
  )


def layer_of_gpt2(hf, i):
  """GPT-2 keeps (in, out), and q, k, v in one matrix."""
  prefix, out, h = f'transformer.h.{i}', {}, D // N
  w = hf(f'{prefix}.attn.c_attn.weight').reshape(D, 3, N, h)
  b = hf(f'{prefix}.attn.c_attn.bias').reshape(3, N, h)
  for i, name in enumerate(('query', 'key', 'value')):
    out[f'attention/{name}'] = w[:, i]
    out[f'attention/{name}_bias'] = b[i]
  out['attention/output'] = hf(f'{prefix}.attn.c_proj.weight').reshape(N, h, D)
  out['attention/output_bias'] = hf(f'{prefix}.attn.c_proj.bias')
  for ours, theirs in (('up', 'c_fc'), ('down', 'c_proj')):
    out[f'mlp/{ours}'] = hf(f'{prefix}.mlp.{theirs}.weight')
    out[f'mlp/{ours}_bias'] = hf(f'{prefix}.mlp.{theirs}.bias')
  for ours, theirs in (('attention_norm', 'ln_1'), ('mlp_norm', 'ln_2')):
    out[f'{ours}/scale'] = hf(f'{prefix}.{theirs}.weight')
    out[f'{ours}/bias'] = hf(f'{prefix}.{theirs}.bias')
  return out


def config_of(name, **changes):
  return schema.Model(**FIELDS | SHAPES[name][2] | changes)


def translate(tensors, name):
  """HF's {name: array} (weights or gradients) by our paths."""
  config = config_of(name)
  layer = functools.partial(layer_of_llama, config=config)
  ends = dict(peers.ENDS)
  if config.tied_embedding:
    del ends['head']
  if config.position == 'learned':
    layer, ends = layer_of_gpt2, GPT2_ENDS
  return peers.translate(tensors, config, ends, layer)


DATA = peers.rows(V, (B, T))


@functools.cache
def peer(name):
  """(logits, {name: weight}, {name: gradient}) of HF's model, float64."""
  import hf_peer  # skips without torch

  transformers = hf_peer.transformers
  family, extra, _ = SHAPES[name]
  shape = {} if family == 'GPT2' else SHAPE
  settings = dict(vocab_size=V, attn_implementation='eager') | shape | extra
  if family == 'GPT2':
    settings |= dict(bos_token_id=1, eos_token_id=2)
  config = getattr(transformers, f'{family}Config')(**settings)
  head = 'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'
  make = getattr(transformers, family.removesuffix('Text') + head)
  model = hf_peer.randomised(lambda: make(config), FAMILY.spread)
  return hf_peer.gradients_of(model, DATA)


FAMILY = peers.Family(SHAPES, 0.3, peer, config_of, translate, DATA)


def ours(name, **changes):
  """(logits, gradients, HF's gradients by our paths)."""
  _, weights, grads = peer(name)
  found = peers.ours(config_of(name, **changes), translate(weights, name), DATA)
  return *found, translate(grads, name)


@pytest.mark.parametrize('name', SHAPES)
def test_logits_and_gradients_are_golden(name):
  """What `transformers` computed once: runs without it."""
  logits, far = peers.against_golden(FAMILY, name)
  assert logits < TOLERANCE and not far


@pytest.mark.parametrize(
  'name, change',
  [
    ('gemma2', dict(embedding_scale=1.0)),
    ('llama', dict(norm_epsilon=1e-5)),
    ('olmo2', dict(rope_theta=9e3)),
  ],
)
def test_a_wrong_field_is_not_golden(name, change):
  logits, far = peers.against_golden(FAMILY, name, config_of(name, **change))
  assert logits > 100 * TOLERANCE and far


def test_norms_in_another_place_are_not_golden(monkeypatch):
  """Those behind a part of a layer, moved in front of it."""
  after = layer.Layer._after
  monkeypatch.setattr(layer.Layer, '_before', after)
  monkeypatch.setattr(layer.Layer, '_after', lambda self, name, y: y)
  logits, far = peers.against_golden(FAMILY, 'olmo2')
  assert logits > 100 * TOLERANCE and far


@pytest.mark.hf
@pytest.mark.parametrize('name', SHAPES)
def test_logits_and_gradients_equal(name):
  logits, grads, expected = ours(name)
  assert distance(logits, peer(name)[0]) < TOLERANCE
  # Without rotation a key bias shifts all scores of a query alike: its gradient
  # is rounding around 0, so it is measured by the query bias's.
  scale = {p: expected[p.replace('key_bias', 'query_bias')] for p in expected}
  assert not peers.far(grads, expected, scale)


def interleaved(x_BTNH, cos, sin):
  """Rotates neighbours instead of halves."""
  y = jnp.stack(
    [
      x_BTNH[..., 0::2] * cos - x_BTNH[..., 1::2] * sin,
      x_BTNH[..., 1::2] * cos + x_BTNH[..., 0::2] * sin,
    ],
    -1,
  )
  return y.reshape(x_BTNH.shape)


@pytest.mark.hf
def test_another_rotation_is_seen(monkeypatch):
  monkeypatch.setattr(attention.rope, 'rotate', interleaved)
  logits, grads, expected = ours('llama')
  assert distance(logits, peer('llama')[0]) > 1e-3
  path = 'layers/attention/query'
  assert distance(grads[path], expected[path]) > 1e-3


@pytest.mark.hf
@pytest.mark.parametrize(
  'name, change',
  [
    ('gemma2', dict(pattern='FW')),
    ('gemma2', dict(window=6)),
    ('gemma3', dict(rope_local_theta=0.0)),
    ('smollm3', dict(pattern='NFFF')),
    ('llama_yarn', dict(rope_high_frequency=4.0)),
    ('gpt2', dict(norm_epsilon=1e-6)),
  ],
)
def test_a_wrong_field_is_seen(name, change):
  logits, *_ = ours(name, **change)
  assert distance(logits, peer(name)[0]) > 100 * TOLERANCE
