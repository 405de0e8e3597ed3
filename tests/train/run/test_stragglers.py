"""The process that is slow, and none where none is."""

import numpy as np
import pytest

from paraxis.train.run import stragglers


def times(processes, slow=(), factor=3.0, seed=0):
  """(P, 8) seconds around 0.1 with 5% of noise; those in `slow` factor x."""
  own_PS = 0.1 * (1 + 0.05 * np.random.default_rng(seed).normal(size=(8,)))
  own_PS = np.tile(own_PS, (processes, 1))
  own_PS[list(slow)] *= factor
  return own_PS


def marked(text):
  return [int(r.split()[0]) for r in text.splitlines() if r.endswith('  slow')]


@pytest.mark.fault(8)
@pytest.mark.parametrize(
  'processes, slow', [(2, [1]), (2, [0]), (3, [2]), (8, [5]), (8, [0, 3, 7])]
)
def test_the_slow_ones_are_named(processes, slow):
  text = stragglers.table(times(processes, slow), 40)
  assert marked(text) == slow
  head, _, *rows = text.splitlines()
  assert head == (
    f'stragglers at step 40: process {", ".join(map(str, slow))} above 2 '
    'medians of the others, over 8 steps'
  )
  assert len(rows) == processes
  for row in rows:
    p, _, _, ratio, *_ = row.split()
    assert (float(ratio) > 2.5) == (int(p) in slow)


@pytest.mark.parametrize('processes', [1, 2, 3, 8])
def test_none_where_none_is(processes):
  for seed in range(200):
    assert stragglers.table(times(processes, seed=seed), 1) == ''
  assert stragglers.table(times(processes, [0], 1.9), 1) == ''


def test_one_slow_step_and_noise_of_the_host_are_none():
  own_PS = times(4)
  own_PS[2, 3] = 60.0
  assert stragglers.table(own_PS, 1) == ''
  assert stragglers.table(times(4, [2], 9.0) / 1e3, 1) == ''  # microseconds
  assert stragglers.table(times(4, [2], 9.0) / 10, 1)


def test_the_median_of_all_would_never_name_one_of_two():
  """Why it is of the others."""
  own_PS = times(2, [1], 1e3)
  own = np.median(own_PS, 1)
  assert not np.any(own > 2 * np.median(own))
  assert marked(stragglers.table(own_PS, 1)) == [1]


def test_names_and_others_that_take_no_time():
  text = stragglers.table([[0.0, 0.0], [1.0, 2.0]], 7, ['tall', 'small'])
  assert text.splitlines()[2:] == [
    '      0           0.0       0.0     0.00  tall',
    '      1        1500.0    2000.0        -  slow  small',
  ]
