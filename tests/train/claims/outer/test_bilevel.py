"""Claims about minimisers fail where z is not followed, or iterations do not
fall."""

import claim_cases
import numpy as np

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


def test_iterations_that_do_not_fall_are_seen(monkeypatch):
  run = claim_cases.run_of('mbbo')
  given = dict(
    blocks=[4, 8, 16], samples=[1, 16], seeds=[0, 1, 2], most=9, to=0.1,
    power=[-0.5, 0.3], alone=False,
  )  # fmt: skip

  def fell(power):
    count = lambda seed, read, B, growth, most, to: (
      10_000 * B**power / read + seed
    )
    monkeypatch.setattr(bilevel, 'iterations', count)
    return bilevel.fewer(run, **given)

  assert fell(-0.5).passed and fell(-0.5).verdict == 'reproduced'
  assert not fell(-0.1).passed and not fell(-1.0).passed
