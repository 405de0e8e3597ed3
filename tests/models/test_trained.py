"""Patterns that choose what a run learns."""

from typing import NamedTuple

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import lora
from paraxis.models import trained

KINDS = {
  'embedding': 'embedding', 'norm/scale': 'vector',
  'layers/attention/query': 'matrix', 'layers/mlp/up': 'matrix',
  'layers/moe/load': 'statistic', 'layers/moe/bias': 'balance',
}  # fmt: skip


def _frozen(text):
  return trained.frozen(trained.Trained(trained.patterns(text)), KINDS)


@pytest.mark.parametrize(
  'text, wanted',
  [
    ('', ()),
    ('embedding', ('embedding',)),
    ('layers/moe/*', ('layers/moe/bias',)),  # counts go on
    (
      ' embedding, layers/*',
      ('embedding', 'layers/attention/query', 'layers/mlp/up',
       'layers/moe/bias'),
    ),
    ('*/query,*/up', ('layers/attention/query', 'layers/mlp/up')),
  ],
)  # fmt: skip
def test_what_patterns_match(text, wanted):
  assert _frozen(text) == frozenset(wanted)


def test_patterns_that_match_nothing_or_everything():
  with support.refused("'layers/mpl/up'", 'matches no', "'layers/mlp/up'"):
    _frozen('embedding,layers/mpl/up')
  with support.refused("'zzz'", 'There are embedding'):
    _frozen('zzz')
  with support.refused("'layers/moe/load'", 'matches no'):
    _frozen('layers/moe/load')
  for text in ('*', 'embedding,norm/scale,layers/*'):
    with support.refused('nothing is left'):
      _frozen(text)


class Leaf(NamedTuple):
  axes: tuple
  kind: str


LEAVES = {
  'layers/attention/query': Leaf(('embed', 'heads', 'head_dim'), 'matrix'),
  'layers/attention/query_bias': Leaf(('heads', 'head_dim'), 'vector'),
  'layers/mlp/up': Leaf(('embed', 'mlp'), 'matrix'),
  'layers/mlp/down': Leaf(('mlp', 'embed'), 'matrix'),
  'layers/moe/router': Leaf(('norm', 'choices'), 'matrix'),
  'layers/moe/mix': Leaf(('norm', None), 'matrix'),
  'layers/moe/up': Leaf(('experts', 'expert_embed', 'expert_mlp'), 'matrix'),
  'layers/mamba/value_conv': Leaf((None, 'mlp'), 'embedding'),
  'layers/hybrid/up_adapter_a': Leaf(('embed', None), 'matrix'),
  'layers/hybrid/up_adapter_b': Leaf((None, 'mlp'), 'matrix'),
}
MLP = ('layers/mlp/down', 'layers/mlp/up')


def _targets(text):
  rank = trained.Trained(rank=2, alpha=1, targets=trained.patterns(text))
  return tuple(sorted(trained.targets(rank, LEAVES)))


@pytest.mark.parametrize(
  'text, wanted',
  [
    ('', ('layers/attention/query', *MLP)),
    ('layers/attention/*', ('layers/attention/query',)),
    ('layers/mlp/*, */mix', (*MLP, 'layers/moe/mix')),
  ],
)
def test_what_gets_an_adapter(text, wanted):
  assert _targets(text) == wanted


@pytest.mark.parametrize(
  'text, words',
  [
    ('layers/mlp/ups', ("'layers/mlp/ups'", 'matches no', "'layers/mlp/up'")),
    ('layers/moe/*', ('layers/moe/router', 'experts')),
    ('layers/moe/u*', ('layers/moe/up', 'experts')),
    ('layers/attention/query_bias', ('layers/attention/query_bias', 'matrix')),
    ('*conv', ('layers/mamba/value_conv', 'matrix')),
    ('*/up_adapter_b', ('layers/hybrid/up_adapter_b', 'part of the model')),
  ],
)
def test_what_can_have_none(text, words):
  with support.refused('train.lora.targets', *words):
    _targets(text)


def test_targets_without_a_rank():
  train = schema.Train(lora=lora.Lora(targets='layers/mlp/*'))
  with support.refused('train.lora.targets', 'train.lora.rank=0'):
    trained.of(train)
