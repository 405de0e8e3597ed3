"""Latent attention of DeepSeek-V3 of `transformers`: whole models, and steps.

Random tiny models in float64 with the same weights (dense layers only: experts
are in test_moe_peers.py): logits within 1e-9 of the largest. HF rotates pairs
of neighbours, we rotate halves: columns of rotated keys and queries differ.

Legend: B rows, T tokens, D model, F hidden width, V vocabulary, N heads, H key
without position, P rotated key, U value, R latent.
"""

import functools

import hf_peer
import jax
import numpy as np
import pytest

from paraxis.configs.base import mixers as mixer_schema
from paraxis.configs.base import model as model_schema
from paraxis.decode import step
from paraxis.models import batch
from paraxis.models import checks as model_checks
from paraxis.models import decoder

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures('float64')]
torch, transformers = hf_peer.torch, hf_peer.transformers

B, T, D, F, V, N = 2, 12, 16, 24, 32, 4
H, P, U, R, LAYERS = 6, 4, 5, 8, 2
TOLERANCE = 1e-9
FACTOR, LENGTH = 8.0, 16
# name -> (HF's rope_parameters and query rank, fields of schema.Model)
PEERS = {
  'plain': (dict(rope_type='default', rope_theta=100.0), None, {}),
  'yarn': (
    dict(
      rope_type='yarn', rope_theta=100.0, factor=FACTOR, beta_fast=32.0,
      beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
      original_max_position_embeddings=LENGTH,
    ),
    10,
    dict(
      rope_scaling='yarn', rope_factor=FACTOR, rope_high_frequency=32.0,
      rope_low_frequency=1.0, rope_original_length=LENGTH,
    ),
  ),
}  # fmt: skip
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': '0'}
)


def config_of(name, **changes):
  _, query_rank, fields = PEERS[name]
  return model_schema.Model(**dict(
    vocab_size=V, d_model=D, d_ff=F, num_layers=LAYERS, num_heads=N,
    pattern='A', dtype='float64', param_dtype='float64', attention_block=8,
    tied_embedding=False, rope_theta=100.0,
    latent=mixer_schema.Latent(
      rank=R, query_rank=query_rank or 0, nope_dim=H, rope_dim=P, value_dim=U,
    ),
  ) | fields | changes)  # fmt: skip


@functools.cache
def peer(name):
  rope, query_rank, _ = PEERS[name]
  config = transformers.DeepseekV3Config(
    vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS,
    num_attention_heads=N, num_key_value_heads=N, first_k_dense_replace=LAYERS,
    q_lora_rank=query_rank, kv_lora_rank=R, qk_nope_head_dim=H,
    qk_rope_head_dim=P, v_head_dim=U, rope_parameters=dict(rope),
    max_position_embeddings=int(FACTOR * LENGTH), rms_norm_eps=1e-6,
    tie_word_embeddings=False, attn_implementation='eager', pad_token_id=None,
    bos_token_id=1, eos_token_id=2,
  )  # fmt: skip
  torch.manual_seed(0)
  before = torch.get_default_dtype()
  torch.set_default_dtype(torch.float64)
  try:
    with hf_peer.Wide():
      out = transformers.DeepseekV3ForCausalLM(config).double().eval()
  finally:
    torch.set_default_dtype(before)
  with torch.no_grad():
    for p in out.parameters():
      p.normal_(0, 0.4)
  return out


def halves(w):
  """Columns of P: pairs (0, 1), (2, 3), .. -> first and second half."""
  return np.concatenate([w[..., 0::2], w[..., 1::2]], -1)


def translate(name):
  """HF's model by our paths; every tensor is used."""
  values = dict(peer(name).named_parameters())
  take = lambda key: values.pop(key).detach().numpy()
  out = {
    'embedding': take('model.embed_tokens.weight'),
    'norm/scale': take('model.norm.weight'),
    'head': take('lm_head.weight'),
  }
  layers = []
  for i in range(LAYERS):
    p = f'model.layers.{i}.'
    a, mine = f'{p}self_attn.', {}
    down = take(f'{a}kv_a_proj_with_mqa.weight').T
    mine['down'], mine['shared_key'] = down[:, :R], halves(down[:, R:])
    mine['latent_norm'] = take(f'{a}kv_a_layernorm.weight')
    up = take(f'{a}kv_b_proj.weight').T.reshape(R, N, H + U)
    mine['key'], mine['value'] = up[..., :H], up[..., H:]
    if PEERS[name][1]:
      mine['query_down'] = take(f'{a}q_a_proj.weight').T
      mine['query_norm'] = take(f'{a}q_a_layernorm.weight')
      q = take(f'{a}q_b_proj.weight').T
    else:
      q = take(f'{a}q_proj.weight').T
    q = q.reshape(len(q), N, H + P)
    mine['query'] = np.concatenate([q[..., :H], halves(q[..., H:])], -1)
    mine['output'] = take(f'{a}o_proj.weight').T.reshape(N, U, D)
    layer = {f'latent_attention/{k}': v for k, v in mine.items()}
    for ours, theirs in (
      ('latent_attention_norm', 'input'), ('mlp_norm', 'post_attention'),
    ):  # fmt: skip
      layer[f'{ours}/scale'] = take(f'{p}{theirs}_layernorm.weight')
    for ours in ('gate', 'up', 'down'):
      layer[f'mlp/{ours}'] = take(f'{p}mlp.{ours}_proj.weight').T
    layers.append(layer)
  assert not values, values.keys()
  for path in layers[0]:
    out[f'layers/{path}'] = np.stack([x[path] for x in layers])
  return out


IDS = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)


@functools.cache
def theirs(name):
  with hf_peer.Wide(), torch.no_grad():
    ids = torch.tensor(IDS.astype(np.int64))
    return peer(name)(input_ids=ids, use_cache=False).logits.numpy()


def ours(name, **changes):
  model = decoder.Decoder(config_of(name, **changes))
  model_checks.check_model(model.config)
  ones = np.ones_like(IDS)
  order = np.arange(T, dtype=np.int32) * ones
  data = batch.Batch(IDS, None, ones, order, None, None)
  run = lambda params: model.logits(params, model(params, data)[0])
  return jit(run)(translate(name))


def distance(a, b):
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize('name', PEERS)
def test_logits_of_whole_models_equal(name):
  assert distance(ours(name), theirs(name)) < TOLERANCE


def test_a_step_of_decoding_equals():
  """The absorbed form against HF's whole rows."""
  model = decoder.Decoder(config_of('yarn'))
  params = model.unstack(translate('yarn'))
  lengths = np.full(B, T - 1)
  start = jit(lambda p, x: step.prefill(model, p, x, lengths, T)[1])
  cache = start(params, IDS[:, :-1])
  advance = jit(functools.partial(step.advance, model))
  z, _ = advance(params, cache, IDS[:, -1], lengths, np.ones(B, bool))
  assert distance(z, theirs('yarn')[:, -1]) < TOLERANCE


@pytest.mark.parametrize(
  'name, change',
  [('plain', dict(attention_scale=H**-0.5)), ('yarn', dict(rope_factor=4.0))],
)
def test_a_wrong_field_is_seen(name, change):
  assert distance(ours(name, **change), theirs(name)) > 1e-4
