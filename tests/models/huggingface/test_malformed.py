"""A config.json with one wrong value is a model, or one line that names it."""

import copy

import hf_families
import pytest

from paraxis.configs.base import errors
from paraxis.models import checks
from paraxis.models.huggingface import config as config_lib
from paraxis.models.huggingface import leaves
from paraxis.models.huggingface.families import reader

MANY = 20_000_000  # as a depth, a list of so many layers takes a minute
WRONG = (
  'x', 0, [], {}, None, -1, 1e12, True, MANY, ['x'], [None], [[]], {'x': 'x'},
)  # fmt: skip
GONE = object()


def mutants(config):
  """(field, value or GONE, config) with one field, or one inside it, wrong."""
  for name, old in config.items():
    for value in (*WRONG, GONE):
      yield name, value, _with(config, name, value)
    inner = old if isinstance(old, dict) else {}
    for key in inner:
      for value in (*WRONG, GONE):
        yield key, value, config | {name: _with(inner, key, value)}


def _with(table, name, value):
  table = copy.deepcopy(table)
  if value is GONE:
    del table[name]
  else:
    table[name] = copy.deepcopy(value)
  return table


def fault(field, value, config):
  """What is wrong with how a mutant is answered; '': nothing."""
  what = f'{field}={value!r}'
  try:
    model = config_lib.to_model(config)
  except errors.UserError as error:
    text = str(error)
    if '\n' in text or field not in text:
      return f'{what}: {text}'
    if (
      value not in (None, GONE, {}, {'x': 'x'})
      and reader.shown(value) not in text
    ):
      return f'{what}: no value in {text}'
    return ''
  except Exception as error:  # a crash of whatever kind
    return f'{what}: {type(error).__name__}: {error}'
  try:
    checks.check_model(model)
    leaves.table(model, config['model_type'])
  except errors.UserError:
    pass
  except Exception as error:
    return f'{what} passes, then {type(error).__name__}: {error}'
  return ''


@pytest.mark.sampled(16)
@pytest.mark.parametrize('name', hf_families.TINY)
def test_one_wrong_value(name):
  config = hf_families.read_golden(name)['config']
  faults = [fault(*mutant) for mutant in mutants(config)]
  assert len(faults) > 200 and not [x for x in faults if x]


def test_a_crash_is_seen(monkeypatch):
  """And so is a message that does not name the field."""
  config = hf_families.read_golden('llama')['config']
  mutant = ('head_dim', 'x', config | {'head_dim': 'x'})
  assert not fault(*mutant)
  with monkeypatch.context() as patch:
    trusting = lambda self, name, value, *kind: value
    patch.setattr(reader.Reader, 'typed', trusting)
    patch.setattr(reader.Reader, 'checked', trusting)
    assert 'TypeError' in fault(*mutant)

  def vague(config):
    raise errors.UserError('this config.json is wrong.')

  monkeypatch.setattr(config_lib, 'to_model', vague)
  assert fault(*mutant)
