"""The typed view of a config: every wrong value is one clear line."""

import json
from typing import Any

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors


def _with(name, value):
  config: Any = schema.default()
  section, field = name.split('.')
  with config.unlocked(), config.ignore_type():
    config[section][field] = value
  return config


def test_the_default_is_a_view_of_itself():
  assert schema.view(schema.default()) == schema.Config()


def test_json_carries_every_field():
  config = schema.view(_with('train.steps', 7))
  again = schema.from_json(schema.to_json(config))
  assert again == config and again.train.steps == 7
  data = json.loads(schema.to_json(config))

  def names(tree, prefix=''):
    for key, value in tree.items():
      inner = isinstance(value, dict)
      yield from names(value, f'{prefix}{key}.') if inner else [prefix + key]

  assert [*names(data)] == [name for name, _ in schema.fields()]


def test_an_older_json_takes_the_defaults():
  data = json.loads(schema.to_json(schema.Config()))
  del data['train']['remat'], data['decode']
  assert schema.from_json(json.dumps(data)) == schema.Config()


def test_an_integer_is_a_float():
  value = schema.view(_with('optimizer.learning_rate', 1)).optimizer
  assert type(value.learning_rate) is float


@pytest.mark.parametrize(
  'name, value, words',
  [
    ('train.steps', 1.5, 'train.steps must be int, got float 1.5'),
    ('train.steps', True, 'must be int, got bool'),
    ('train.steps', 0, 'train.steps=0 is below its lowest valid value 1'),
    ('optimizer.b1', 1.5, 'above its highest valid value 0.99999'),
    ('optimizer.learning_rate', float('nan'), 'learning_rate=nan'),
    ('checkpoint.chunk_bytes', 100, 'chunk_bytes=100 is below 4096, which a'),
    ('checkpoint.chunk_bytes', -1, 'is below its lowest valid value 0'),
    ('model.norm', 'rmsnrm', "Did you mean 'rmsnorm'?"),
    ('model.mlp', 'tanh', 'not one of swiglu, geglu, geglu_exact'),
    ('train.stesp', 3, "unknown config key train.stesp. Did you mean 'steps'?"),
  ],
)
def test_a_wrong_value(name, value, words):
  with support.refused(words):
    schema.view(_with(name, value))


def test_an_unknown_section():
  with pytest.raises(errors.UserError, match="Did you mean 'model'"):
    schema.view({'modle': {}})


def test_every_field_is_documented():
  rows = list(schema.fields())
  assert len(rows) > 70
  for name, field in rows:
    assert field.metadata['doc'], name
    choices = field.metadata['choices']
    assert not choices or field.default in choices, name


def test_the_default_is_locked():
  default: Any = schema.default()
  with pytest.raises((AttributeError, KeyError)):
    default.train.stesp = 3
