"""Patterns that choose what a run learns."""

import pytest
import support

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
