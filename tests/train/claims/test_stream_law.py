"""The law of parallel streams: its fit, against another optimizer, by hand."""

import claim_cases
import numpy as np
import pytest
from scipy import optimize
from scipy import special

from paraxis.configs import parscale
from paraxis.train.claims import stream_law


def test_the_law_by_hand():
  found = stream_law.law([1.0, 0.5, 2.0, 0.3], np.array([1e9, 5e8]), np.e)
  np.testing.assert_allclose(found, [1 + (0.5 / 1.3) ** 2, 1 + (1 / 1.3) ** 2])


def test_no_other_optimizer_finds_less():
  n, p, found = stream_law._rows(parscale.SIZES, parscale.LOSSES['Pile'])

  def error(constants):
    r = np.log(stream_law.law(constants, n, p)) - np.log(found)
    return special.huber(stream_law.DELTA, r).sum()

  ours = stream_law.fit(n, p, found)
  start, bounds = [1.0, 0.14, 0.5, 0.4], [(1e-8, None)] * 4
  theirs = optimize.minimize(error, start, method='L-BFGS-B', bounds=bounds)
  assert error(ours) <= theirs.fun


@pytest.mark.parametrize('name', ['several', 'several_of_the_paper'])
def test_claims_on_the_fit_can_fail(name):
  claim_cases.falls('parscale', name)


def test_losses_that_do_not_fall_in_a_seed(tmp_path, monkeypatch):
  run = claim_cases.run_of('parscale', {}, tmp_path)
  given = dict(streams=[1, 2, 4], fields={}, seeds=[0, 1, 2])

  def ask(last):
    rows = {
      '1 streams': [3.0, 3.1, 3.2], '2 streams': [2.9, 3.0, 3.1],
      '4 streams': [2.8, 2.9, last],
    }  # fmt: skip
    train = lambda run, configs, seeds: (rows, 1.0)
    monkeypatch.setattr(stream_law.families, 'train', train)
    return stream_law.falls(run, **given)

  assert ask(3.0).passed and ask(3.0).verdict == 'reproduced'
  assert not ask(3.3).passed and ask(3.3).verdict == 'not reproduced'
