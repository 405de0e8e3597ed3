"""Claims about minimisers fail where z is not followed, or iterations do not
fall."""

import claim_cases
import numpy as np
import pytest

from paraxis.train.claims.outer import bilevel


def test_minimisers_that_are_not_turned_are_seen():
  claim_cases.falls('mbbo', 'without_turning', seeds=[0], steps=80)


def test_the_closed_form_is_a_derivative():
  rng = np.random.default_rng(3)
  problem, x = bilevel.drawn(rng), rng.normal(size=bilevel.D)
  a, c, b, t = problem

  def value(x):
    y = np.linalg.solve(a, (c @ x + b)[..., None])[..., 0]
    rows = ((y - t) ** 2).sum(1) / 2
    return rows.mean() + bilevel.RIDGE * x @ x / 2

  steps = 1e-6 * np.eye(bilevel.D)
  slope = [(value(x + d) - value(x - d)) / 2e-6 for d in steps]
  np.testing.assert_allclose(bilevel.closed(problem, x), slope, rtol=1e-6)


def test_what_is_touched_is_not_kept():
  """By hand: a dip is none; what stays counts from its first mean on."""
  few, wide = bilevel.HOLD - 50, bilevel.SMOOTH
  low, high = 0.05 * np.ones(few), np.ones(300)
  assert bilevel.kept(np.concatenate([high, low, high]), 0.1) is None
  assert bilevel.kept(low, 0.1) is None  # not for long enough yet
  stays = 0.1 * np.ones(bilevel.HOLD + wide)
  assert bilevel.kept(0.99 * stays, 0.1) == wide
  found = bilevel.kept(np.concatenate([high, low, high, 0.99 * stays]), 0.1)
  assert found == 600 + few + wide


GIVEN = dict(
  tuned={'rates': [1.0, 2.0, 4.0], 'seeds': [7]},
  seeds=[0, 1, 2],
  most=9,
  to=0.1,
)


@pytest.fixture
def fell(monkeypatch):
  """(power of B, of I) -> outcomes by samples and by blocks; the rate of 2 is
  the best for every problem."""

  def ask(of_B, of_I):
    def count(seed, read, B, rate, most, to):
      assert (seed == 7 or rate == 2.0) and (most, to) == (9, 0.1)
      return (1000 + seed) * B**of_B * read**of_I * (1 + abs(rate - 2))

    monkeypatch.setattr(bilevel, 'iterations', count)
    run = claim_cases.run_of('mbbo')
    return bilevel.by_samples(
      run, read=8, samples=[1, 4, 16], power=[-0.5, 0.3], **GIVEN
    ), bilevel.by_blocks(run, blocks=[4, 8, 16], B=16, **GIVEN)

  return ask


def test_iterations_that_do_not_fall_are_seen(fell):
  samples, blocks = fell(-0.5, -1.0)
  assert samples.passed and samples.verdict == 'reproduced'
  assert blocks.passed and '2 (I=8, B=16)' in blocks.caveat
  assert not fell(-0.1, 0.0)[0].passed and not fell(-1.0, 0.0)[0].passed
  assert not fell(0.0, 0.0)[1].passed
  assert fell(0.0, 0.5)[1].verdict == 'opposite'


def test_knock_outs_read_less(monkeypatch):
  """One sample, four blocks, whatever the case; noise of its own for each."""
  seen = []

  def many(alpha, x, near, search, blocks, samples):
    seen.append((alpha, near, blocks.shape[1], samples[2].std()))
    return search, np.zeros((len(blocks), bilevel.D))

  monkeypatch.setattr(bilevel, '_many', many)
  ask = lambda read, B: bilevel.iterations(0, read, B, 0.01, 250, 0.0)
  with bilevel.alone():
    assert ask(8, 1) == ask(8, 16) == 250
  with bilevel.few():
    ask(4, 16), ask(16, 16)
  one, same, four, also = seen
  assert one[:3] == same[:3] == (0.01, 0.3, 8) and one[3] != same[3]
  assert four[:3] == also[:3] == (0.16, 0.15, 4) and four[3] != also[3]
  ask(16, 16)
  assert seen[-1][:3] == (0.16, 0.6, 16)
