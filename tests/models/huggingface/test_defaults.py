"""Fields that a config.json does not have are what transformers takes."""

import json

import hf_families
import pytest
import support

from paraxis.configs.base import errors
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface.families import defaults
from paraxis.models.huggingface.families import known
from paraxis.models.huggingface.families import masked


def without(name, *fields, **changed):
  """config.json of a golden, but for some fields."""
  config = hf_families.read_golden(name)['config']
  return {k: x for k, x in config.items() if k not in fields} | changed


def fields_of(config, *names):
  found = config_lib.canonical(config_lib.to_model(config))
  return tuple(found[name] for name in names)


@pytest.mark.parametrize(
  'name, absent, values',
  [
    ('gemma2', 'attn_logit_softcapping', dict(attention_softcap=50.0)),
    ('gemma2', 'final_logit_softcapping', dict(logit_softcap=30.0)),
    ('gemma2', 'hidden_activation', dict(mlp='geglu')),
    ('gemma2', 'head_dim', dict(head_dim=256)),
    ('deepseek_v3', 'routed_scaling_factor', {'experts.scale': 2.5}),
    ('deepseek_v3', 'q_lora_rank', {'latent.query_rank': 1536}),
    ('deepseek_v3', 'topk_group', {'experts.top_groups': 4}),
    ('mistral', 'sliding_window', dict(pattern='W W', window=4096)),
    ('minicpm3', 'scale_depth', dict(residual_scale=1.4 / 2**0.5)),
    ('mellum', 'norm_topk_prob', {'experts.normalise': True}),
    ('flint', 'mlp_only_layers', dict(pattern='N N WE NE')),
    ('helium', 'rope_parameters', dict(rope_theta=1e5)),
    ('nemotron_h', 'time_step_min', {'mamba.step_floor': 1e-3}),
    ('gpt_oss', 'rope_parameters', dict(rope_theta=1.5e5, rope_factor=32.0)),
  ],
)
def test_absent_fields(name, absent, values, monkeypatch):
  config = without(name, absent)
  assert fields_of(config, *values) == pytest.approx(tuple(values.values()))
  if name not in ('flint', 'nemotron_h'):  # their rows know it
    monkeypatch.setattr(defaults, 'FIELDS', {})
    assert fields_of(config, *values) != tuple(values.values())


def test_null_is_not_absent():
  null = lambda name, field: without(name, **{field: None})
  assert fields_of(null('mistral', 'sliding_window'), 'window') == (0,)
  wanted = 'attention_softcap', 'logit_softcap'
  config = null('gemma2', 'attn_logit_softcapping')
  assert fields_of(config, *wanted)[0] == 0
  config = null('deepseek_v3', 'q_lora_rank')
  assert fields_of(config, 'latent.query_rank') == (0,)


@pytest.mark.parametrize('name', ['rope_theta', 'rope_scaling'])
def test_a_file_with_an_older_field_has_its_rotation(name):
  value = 5e3 if name == 'rope_theta' else dict(type='linear', factor=2.0)
  config = without('gpt_oss', 'rope_parameters', **{name: value})
  scaling, theta = fields_of(config, 'rope_scaling', 'rope_theta')
  assert scaling == ('none' if name == 'rope_theta' else 'linear')
  assert name != 'rope_theta' or theta == 5e3


def test_steps_are_no_less_than_a_file_says():
  floor = 'mamba.step_floor'
  config = without('nemotron_h', time_step_min=0.3, time_step_limit=[0.1, 1.0])
  assert fields_of(config, floor) == (0.3,)
  written = config_lib.from_model(config_lib.to_model(config), 'nemotron_h')
  assert written['time_step_min'] == 0.3
  assert fields_of(without('mamba2', time_step_min=0.3), floor) == (0.0,)


FLAG = dict(use_sliding_window=True, max_window_layers=1)


@pytest.mark.parametrize(
  'name, changed, pattern',
  [
    ('gemma3_text', dict(sliding_window_pattern=3), 'W W F W W F W'),
    ('cohere2', dict(sliding_window_pattern=2), 'W N W N'),
    ('exaone4', dict(sliding_window_pattern=3), 'W W N W'),
    ('exaone_moe', dict(sliding_window_pattern=2), 'W NE'),
    (
      'exaone_moe',
      dict(mlp_layer_types=None, first_k_dense_replace=2),
      'W W',
    ),
    ('cohere2_moe', dict(sliding_window_pattern=2), 'W NE WE NE'),
    (
      'cohere2_moe',
      dict(
        mlp_layer_types=None, first_k_dense_replace=2, sliding_window_pattern=2
      ), 'F F WE NE',
    ),
    ('qwen2', dict(sliding_window=4), 'F F'),
    ('qwen2', FLAG | dict(sliding_window=None), 'F F'),
    ('qwen2', FLAG | dict(sliding_window=4), 'F W'),
    ('qwen2_moe', dict(sliding_window=4), 'FE FE'),
    ('qwen2_moe', FLAG | dict(sliding_window=4), 'WE FE'),
    ('qwen3_moe', dict(sliding_window=4), 'FE F'),
    ('qwen3_moe', FLAG | dict(sliding_window=4), 'WE W'),
  ],
)  # fmt: skip
def test_kinds_of_layers_that_no_list_says(name, changed, pattern):
  gone = 'layer_types', 'use_sliding_window', 'sliding_window_pattern'
  assert fields_of(without(name, *gone, **changed), 'pattern') == (pattern,)


@pytest.mark.parametrize('name', ['qwen2', 'qwen3', 'qwen3_moe'])
def test_windows_that_are_used_have_a_width(name):
  config = without(name, 'layer_types', 'sliding_window', **FLAG)
  assert fields_of(config, 'window') == (4096,)


@pytest.mark.parametrize('name', ['exaone4', 'exaone_moe'])
def test_all_layers_rotate_without_a_window(name):
  listed = without(name)['layer_types']
  full = ['full_attention'] * len(listed)
  config = without(name, sliding_window=None, layer_types=full)
  model = config_lib.to_model(config)
  assert config_lib.canonical(model)['position'] == 'rope'
  written = config_lib.from_model(model, name)
  assert written['sliding_window'] is None and written['layer_types'] == full
  unlisted = config | dict(layer_types=None)
  assert fields_of(unlisted, 'position') == ('rope',)
  windows = config | dict(layer_types=['sliding_attention'] * len(full))
  with support.refused('sliding_window=None'):
    config_lib.to_model(windows)
  # With one, a layer without it does not.
  config = without(name, sliding_window=5, layer_types=listed[:-1] + full[-1:])
  assert 'N' in fields_of(config, 'pattern')[0]


def test_what_layers_do_not_say():
  name, list_ = 'sliding_window_pattern', 'layer_types'
  for value in ('LLLG', True, 0.5):
    with support.refused(name, repr(value)):
      fields_of(without('exaone4', list_, **{name: value}), 'pattern')
    assert fields_of(without('exaone4', **{name: value}), 'window') == (5,)
  with support.refused('use_sliding_window=False', list_):
    fields_of(without('qwen2_window', use_sliding_window=False), 'window')


def test_of_known_families():
  assert set(defaults.FIELDS) <= set(known.FAMILIES)


# ------------------------------------------------------------------ the peer

HEADS = 'num_attention_heads', 'n_head', 'num_heads'


def theirs(config):
  """config.json that transformers makes of another."""
  from transformers import AutoConfig

  rest = {k: x for k, x in config.items() if k != 'model_type'}
  if 'time_step_limit' in rest:  # as JSON: {'__float__': 'Infinity'}
    rest['time_step_limit'] = [0.0, float('inf')]
  made = AutoConfig.for_model(config['model_type'], **rest)
  return json.loads(json.dumps(made.to_dict(), default=str))


def numbers(config):
  found = config_lib.canonical(config_lib.to_model(config))
  if found['head_dim']:  # 0 and this are the same
    scale = found['attention_scale'] or found['head_dim'] ** -0.5
    found['attention_scale'] = scale
  return found


def compared(config):
  """{field: (ours, theirs)} that differ; None: one of both refuses it."""
  try:
    ours = numbers(config)
  except errors.UserError:
    return None
  try:
    other = numbers(theirs(config))
  except Exception:  # of transformers: any
    return None
  return {k: (x, other[k]) for k, x in ours.items() if x != other[k]}


OF_TRANSFORMERS = [
  name
  for name in hf_families.TINY
  if hf_families.type_of(name) not in masked.FAMILIES
]


@pytest.mark.hf
@pytest.mark.sampled(8)
@pytest.mark.parametrize('name', OF_TRANSFORMERS)
def test_every_absent_field_is_what_transformers_takes(name):
  """Of heads as many as in the golden, and of four times as many."""
  pytest.importorskip('transformers')
  config = hf_families.read_golden(name)['config']
  more = {k: 4 * config[k] for k in HEADS if k in config}
  assert compared(config) == {}
  seen, far = 0, {}
  for base in (config, config | more):
    for lists in ((), ('layer_types',), ('mlp_layer_types',)):
      for field in config.keys() - {'model_type', 'architectures'}:
        gone = {field, *lists}
        found = compared({k: x for k, x in base.items() if k not in gone})
        seen += found is not None
        if found:
          far[field, *lists] = found
  assert seen and not far
