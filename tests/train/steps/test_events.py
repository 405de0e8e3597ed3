"""Nodes that minimise a sum by events at random times (DADAO)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.train.claims.outer import decentralized
from paraxis.train.steps import events

CHAIN = [(0, 1), (1, 2), (2, 3)]


def test_exchanges_of_a_chain_by_hand():
  """Eigenvalues of a chain of n: 2 - 2 cos(k pi / n); its edges resist 1."""
  rate, chi1 = events.exchanges(4, CHAIN)
  least = (2 - 2 * np.cos(np.pi / 4)) / 3
  np.testing.assert_allclose(rate, np.sqrt(3 / least))
  np.testing.assert_allclose(chi1, 1 / least / rate)
  both = events.exchanges(2, [(0, 1)])
  np.testing.assert_allclose(both, [np.sqrt(0.5), np.sqrt(0.5)])


def test_events_are_of_the_rates_that_were_asked():
  some = events.drawn(np.random.default_rng(0), 4, CHAIN, 8.0, 6000)
  assert (np.diff(some.times) > 0).all()
  np.testing.assert_allclose(some.times[-1], 6000 / 12, rtol=0.05)
  alone = some.pairs[:, 0] == some.pairs[:, 1]
  np.testing.assert_allclose(alone.mean(), 4 / 12, rtol=0.05)
  assert set(map(tuple, some.pairs[~alone])) == set(CHAIN)
  gaps, last = events.waited(some, np.zeros(4))
  for node in range(4):  # gaps of a node add up to its last event
    mine = (some.pairs == node) & np.stack([np.ones(6000, bool), ~alone], 1)
    np.testing.assert_allclose(gaps[mine].sum(), last[node])


@pytest.mark.usefixtures('float64')
def test_nodes_find_the_minimiser_of_the_sum():
  """Of quadratics with minimisers of their own: their weighted mean."""
  n, own = 4, np.random.default_rng(5).normal(size=(4, 2))
  weights = 1 + 0.2 * np.arange(n)
  best = weights @ own / weights.sum()
  c = events.constants(2.0, 0.5, events.exchanges(n, CHAIN)[1])
  some = events.drawn(np.random.default_rng(1), n, CHAIN, 5.0, 4000)
  gaps, last = events.waited(some, np.zeros(n))
  put = jnp.asarray
  gradient = lambda i, x: put(weights)[i] * (x - put(own)[i])
  state = events.begun(jnp.zeros((n, 2)))
  state = events.run(gradient, state, some.pairs, gaps, c)
  x = events.at(state, last, some.times[-1], c)
  np.testing.assert_allclose(x, np.tile(best, (n, 1)), atol=1e-8)


@pytest.mark.usefixtures('float64')
def test_without_exchanges_nodes_find_minima_of_their_own():
  n = 3
  problem = decentralized.Problem(n, np.random.default_rng(2))
  c = events.constants(problem.smooth, problem.convex, 1.0)
  rng = np.random.default_rng(3)
  some = events.drawn(rng, n, [(0, 1), (1, 2)], 1e-9, 3000)
  assert (some.pairs[:, 0] == some.pairs[:, 1]).all()
  gaps, last = events.waited(some, np.zeros(n))
  state = events.begun(jnp.zeros((n, decentralized.DIM)))
  state = events.run(problem.gradient, state, some.pairs, gaps, c)
  x = np.asarray(events.at(state, last, some.times[-1], c))
  # Z stays 0: each solves grad f_i = 0 alone, far from the sum's minimiser.
  np.testing.assert_allclose(problem.gradients(x), 0, atol=1e-6)
  assert problem.error(x) > 1e-2
  assert jax.tree.all(jax.tree.map(lambda z: (z == 0).all(), state[:, 4:]))
