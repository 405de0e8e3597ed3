"""Claims about contexts that are read alone, and how they fail."""

import claim_cases
import pytest


@pytest.mark.parametrize(
  'knockout, words',
  [
    ('prefix_each', ('20', '28')),
    ('one_query', ('fewer tokens', '1.0 x')),
    ('read_anew', ('fewer tokens', 'NOT as counted')),
  ],
)
def test_what_is_saved_is_counted(knockout, words):
  given = dict(count=2, sizes=[8, 6, 0])
  if knockout != 'prefix_each':
    given = dict(count=4, sizes=[8, 16, 8])
  right, wrong = claim_cases.falls('ape', knockout, **given)
  assert words[0] in right.measured or words[0] in right.expected
  assert words[1] in wrong.measured


def test_contexts_in_any_order():
  right, wrong = claim_cases.falls('ape', 'see_each_other')
  assert right.passed and float(wrong.measured) > 1e-3
