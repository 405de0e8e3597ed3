"""Latent attention of DeepSeek-V3 of `transformers`: whole models, and steps.

Random tiny models in float64 with the same weights (dense layers only: experts
are in test_moe_peers.py): logits and gradients within 1e-9 of the largest. HF
rotates pairs of neighbours, we rotate halves: columns of rotated keys and
queries differ.

Legend: B rows, T tokens, D model, F hidden width, V vocabulary, N heads, H key
without position, P rotated key, U value, R latent.
"""

import functools

import module_cases
import numpy as np
import peers
import pytest

from paraxis.configs.base import mixers as mixer_schema
from paraxis.configs.base import model as model_schema
from paraxis.models import decoder

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, V, N = 2, 12, 16, 24, 32, 4
H, P, U, R, LAYERS = 6, 4, 5, 8, 2
TOLERANCE, distance = peers.TOLERANCE, peers.distance
FACTOR, LENGTH = 8.0, 16
# name -> (HF's rope_parameters and query rank, fields of schema.Model)
PEERS = {
  'deepseek': (dict(rope_type='default', rope_theta=100.0), None, {}),
  'deepseek_yarn': (
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
DATA = peers.rows(V, (B, T))


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
  """(logits, {name: weight}, {name: gradient}) of HF's model, float64."""
  import hf_peer  # skips without torch

  transformers = hf_peer.transformers
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
  model = hf_peer.randomised(
    lambda: transformers.DeepseekV3ForCausalLM(config), FAMILY.spread
  )
  return hf_peer.gradients_of(model, DATA)


def halves(w):
  """Columns of P: pairs (0, 1), (2, 3), .. -> first and second half."""
  return np.concatenate([w[..., 0::2], w[..., 1::2]], -1)


def layer_of(hf, i, query_rank):
  """{our path in layer i: array}."""
  at, own = f'model.layers.{i}', {}
  a = f'{at}.self_attn'
  down = hf(f'{a}.kv_a_proj_with_mqa.weight').T
  own['down'], own['shared_key'] = down[:, :R], halves(down[:, R:])
  own['latent_norm'] = hf(f'{a}.kv_a_layernorm.weight')
  up = hf(f'{a}.kv_b_proj.weight').T.reshape(R, N, H + U)
  own['key'], own['value'] = up[..., :H], up[..., H:]
  if query_rank:
    own['query_down'] = hf(f'{a}.q_a_proj.weight').T
    own['query_norm'] = hf(f'{a}.q_a_layernorm.weight')
  q = hf(f'{a}.q_b_proj.weight' if query_rank else f'{a}.q_proj.weight').T
  q = q.reshape(len(q), N, H + P)
  own['query'] = np.concatenate([q[..., :H], halves(q[..., H:])], -1)
  own['output'] = hf(f'{a}.o_proj.weight').T.reshape(N, U, D)
  norm = lambda name: hf(f'{at}.{name}_layernorm.weight')
  return (
    peers.within('latent_attention', own)
    | peers.within('mlp', peers.mlp_of(hf, f'{at}.mlp'))
    | {'latent_attention_norm/scale': norm('input')}
    | {'mlp_norm/scale': norm('post_attention')}
  )


def translate(tensors, name):
  """HF's {name: array} (weights or gradients) by our paths."""
  layer = functools.partial(layer_of, query_rank=PEERS[name][1])
  return peers.translate(tensors, config_of(name), peers.ENDS, layer)


FAMILY = peers.Family(PEERS, 0.4, peer, config_of, translate, DATA)


def ours(name, **changes):
  """(logits, gradients)."""
  params = translate(peer(name)[1], name)
  return peers.ours(config_of(name, **changes), params, DATA)


@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_are_golden(name):
  """What `transformers` computed once: runs without it."""
  logits, far = peers.against_golden(FAMILY, name)
  assert logits < TOLERANCE and not far


def test_a_wrong_field_is_not_golden():
  wrong = config_of('deepseek_yarn', rope_factor=4.0)
  logits, far = peers.against_golden(FAMILY, 'deepseek_yarn', wrong)
  assert logits > 100 * TOLERANCE and far


@pytest.mark.hf
@pytest.mark.parametrize('name', PEERS)
def test_logits_and_gradients_equal(name):
  logits, grads = ours(name)
  assert distance(logits, peer(name)[0]) < TOLERANCE
  assert not peers.far(grads, translate(peer(name)[2], name))


@pytest.mark.hf
def test_a_step_of_decoding_equals():
  """The absorbed form against HF's whole rows."""
  model = decoder.Decoder(config_of('deepseek_yarn'))
  logits, weights, _ = peer('deepseek_yarn')
  params = model.unstack(translate(weights, 'deepseek_yarn'))
  (_, z), _ = module_cases.decoded(model, params, DATA.tokens, [T - 1] * B, 1)
  assert distance(z, logits[:, -1]) < TOLERANCE


@pytest.mark.hf
@pytest.mark.parametrize(
  'name, change',
  [
    ('deepseek', dict(attention_scale=H**-0.5)),
    ('deepseek_yarn', dict(rope_factor=4.0)),
  ],
)
def test_a_wrong_field_is_seen(name, change):
  assert distance(ours(name, **change)[0], peer(name)[0]) > 1e-4
