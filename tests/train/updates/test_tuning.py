"""Rates far above those of tuning are said, of pretrained weights alone."""

import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.train.updates import tuning

THEIRS, OURS = dict(kind='llama'), dict(kind='')


def said(about=THEIRS, **fields):
  config = schema.with_values(
    schema.Config(), {f'optimizer.{name}': x for name, x in fields.items()}
  )
  return tuning.line(config, about)


@pytest.mark.parametrize(
  'fields, words',
  [
    ({}, ['learning_rate=0.003']),
    (dict(learning_rate=2e-3), ['learning_rate=0.002']),
    (
      dict(name='muon'),
      ['learning_rate=0.003', 'matrix_learning_rate=0.02'],
    ),
    (dict(name='muon', learning_rate=1e-4), ['matrix_learning_rate=0.02']),
    (dict(name='soap', matrix_learning_rate=3e-3), ['matrix_learning_rate=']),
  ],
)
def test_a_rate_far_above_is_said(fields, words):
  line = said(**fields)
  assert all(word in line for word in words) and '\n' not in line
  assert tuning.USUAL in line and f'--config={tuning.CONFIG}' in line


@pytest.mark.parametrize(
  'fields',
  [
    dict(learning_rate=2e-5),
    dict(learning_rate=1e-3),  # of adapters
    dict(name='prodigy', learning_rate=1.0),
    dict(name='muon', learning_rate=1e-4, matrix_learning_rate=2e-3),
  ],
)
def test_other_rates_are_not(fields):
  assert not said(**fields)


def test_what_is_new_is_not_tuned():
  """A run of one's own, and a network beside layers that are frozen."""
  assert not said(OURS)
  beside = schema.with_value(schema.Config(), 'train.side', 8)
  assert not tuning.line(beside, THEIRS)


def test_the_config_that_is_named_is_there():
  config = schema.view(command_line.load(tuning.CONFIG))
  assert not tuning.line(config, THEIRS)
