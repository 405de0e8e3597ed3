"""Families of Hugging Face by their own leaves: logits and gradients equal.

Goldens say what `transformers` computes of tiny models in float64, whose
weights follow from the names of their tensors: config.json is read by
models/huggingface/config.py, tensors by leaves.py, and all of it is within 1e-9
of the largest. Tests marked `hf` compare with `transformers` itself, and there
and back again (tests/hf_families.py).
"""

import json

import hf_families
import jax.numpy as jnp
import module_cases
import numpy as np
import peers
import pytest
import support

from paraxis.models import decoder
from paraxis.models import layer
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface.families import absent
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import masked
from paraxis.models.mixers import attention

pytestmark = pytest.mark.usefixtures('float64')

TOLERANCE = peers.TOLERANCE


@pytest.mark.sampled(32)
@pytest.mark.parametrize('name', hf_families.TINY)
def test_logits_and_gradients_are_golden(name):
  logits, far = hf_families.against_golden(name)
  assert logits < TOLERANCE and not far


def test_every_family_is_compared():
  compared = {hf_families.type_of(name) for name in hf_families.TINY}
  assert compared == set(known.FAMILIES)


def test_the_table_is_what_is_compared(monkeypatch):
  """Stale where a family comes, a reason goes, or one is not compared."""
  names = [*known.FAMILIES, *absent.REASONS]
  assert len(names) == len(set(names))
  names = [name for name in names if name not in masked.FAMILIES]
  assert hf_families.table(names) == hf_families.TABLE.read_text('utf-8')
  with pytest.raises(AssertionError, match='neither'):
    hf_families.table([*names, 'own'])
  monkeypatch.delitem(hf_families.TINY, 'olmoe')
  with pytest.raises(AssertionError, match='olmoe'):
    hf_families.table(names)


@pytest.mark.parametrize('name', absent.REASONS)
def test_a_reason_is_given(name):
  with support.refused(f'model_type={name!r}', absent.REASONS[name]):
    config_lib.to_model({'model_type': name})


@pytest.mark.hf
def test_every_causal_model_is_exact_or_has_a_reason():
  """And what the reason names is in its source."""
  pytest.importorskip('transformers')
  names = {*known.FAMILIES, *absent.REASONS} - set(masked.FAMILIES)
  assert names == set(hf_families.causal_types())
  missing = [
    (name, part)
    for part, _, of in absent.ROWS
    for name in of.split()
    if part not in hf_families.sources_of(name)
  ]
  assert not missing
  assert 'alibi' not in hf_families.sources_of('llama')


@pytest.mark.parametrize('name', hf_families.TINY)
def test_a_config_there_and_back(name):
  config = hf_families.read_golden(name)['config']
  model = config_lib.to_model(config)
  written = config_lib.from_model(model, config['model_type'])
  written = json.loads(json.dumps(written))
  same = config_lib.canonical
  assert same(config_lib.to_model(written)) == same(model)


@pytest.mark.parametrize('name', hf_families.TINY)
def test_quantised_weights_are_refused(name):
  config = hf_families.read_golden(name)['config']
  config['quantization_config'] = dict(quant_method='gptq', bits=4)
  with support.refused('quantization_config', 'gptq'):
    config_lib.to_model(config)


@pytest.mark.parametrize(
  'name, change',
  [
    ('gemma2', dict(embedding_scale=1.0)),
    ('gemma2', dict(pattern='FW')),
    ('gemma2', dict(window=6)),
    ('gemma3_text', dict(rope_local_theta=0.0)),
    ('gpt2', dict(norm_epsilon=1e-6)),
    ('llama', dict(norm_epsilon=1e-5)),
    ('llama_yarn', dict(rope_high_frequency=4.0)),
    ('olmo2', dict(rope_theta=9e3)),
    ('smollm3', dict(pattern='NFFF')),
    ('mamba2', dict(norm_epsilon=1e-3)),
    ('deepseek_v3', dict(rope_factor=4.0)),
    ('deepseek_v2', dict(rope_mscale=1.0)),
    ('gpt_oss', dict(window=6)),
    ('hunyuan_v1_moe', dict(qk_norm='head')),
    ('recurrent_gemma', dict(embedding_scale=24**0.5)),
    ('qwen3_next', dict(rope_fraction=0.5)),
    ('afmoe', dict(embedding_scale=1.0)),
    ('ministral3', dict(query_growth=0.2)),
    ('llama4_text', dict(query_growth_kinds='all')),
    ('llama4_text', dict(qk_norm='none')),
    ('nanochat', dict(embedding_norm=False)),
    ('olmo_clipped', dict(qkv_clip=0.6)),
    ('opt', dict(position_offset=1)),
    ('llada', dict(visibility='causal')),
    ('llada_tied', dict(visibility='causal')),
    ('Dream', dict(visibility='causal')),
  ],
)
def test_a_wrong_field_is_seen(name, change):
  logits, far = hf_families.against_golden(name, **change)
  assert logits > 100 * TOLERANCE and far


def test_norms_in_another_place_are_seen(monkeypatch):
  """Those behind a part of a layer, moved in front of it."""
  after = layer.Layer._after
  monkeypatch.setattr(layer.Layer, '_before', after)
  monkeypatch.setattr(layer.Layer, '_after', lambda self, name, y: y)
  logits, far = hf_families.against_golden('olmo2')
  assert logits > 100 * TOLERANCE and far


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


def test_another_rotation_is_seen(monkeypatch):
  monkeypatch.setattr(attention.rope, 'rotate', interleaved)
  logits, far = hf_families.against_golden('llama')
  assert logits > 1e-3 and 'layers/attention/query' in far


@pytest.mark.parametrize(
  'name',
  [
    'deepseek_v3', 'gemma2', 'gpt_oss', 'jamba', 'lfm2', 'mamba2',
    'recurrent_gemma', 'qwen3_next', 'zamba2',
  ],
)  # fmt: skip
def test_a_step_of_decoding_is_golden(name):
  """The last token, after a cache of all before it."""
  record = hf_families.read_golden(name)
  config, params = hf_families.params_of(record)
  model = decoder.Decoder(config)
  tokens = hf_families.DATA.tokens
  steps = [tokens.shape[1] - 1] * len(tokens)
  params = model.unstack(params)
  (_, z), _ = module_cases.decoded(model, params, tokens, steps, 1)
  wanted = np.reshape(record['logits'], record['shape'])[:, 1]
  assert peers.distance(z, wanted) < TOLERANCE


@pytest.mark.hf
@pytest.mark.sampled(8)
@pytest.mark.parametrize('name', hf_families.TINY)
def test_equals_transformers(name):
  far = {p: d for p, d in hf_families.compare(name).items() if d >= TOLERANCE}
  assert not far
