"""Claims about nodes of a graph fail where nothing flows, or is exchanged, or
six times as much is."""

import contextlib
import types

import numpy as np
import pytest

from paraxis.train.claims.outer import decentralized

SMALL = dict(graphs=['chain'], nodes=4, seeds=[0, 1, 2])


def claim(check, off=contextlib.nullcontext, **given):
  with off():
    return check(Said(), **given)


class Said:
  """A harness.Run, of which these claims only say."""

  def __init__(self):
    self.lines = []

  def say(self, line):
    self.lines.append(line)


@pytest.mark.parametrize('name', ['chain', 'grid', 'random'])
def test_graphs_are_connected(name):
  edges = decentralized.graph(name, 16, np.random.default_rng(0))
  reached = {0}
  for _ in range(16):
    reached |= {i for edge in edges for i in edge if reached & set(edge)}
  assert reached == set(range(16))
  assert len(edges) == len(set(edges)) >= 15
  assert len(edges) == dict(chain=15, grid=24, random=len(edges))[name]


def test_events_equal_the_equations():
  given = dict(graphs=['grid'], nodes=4, count=80, within=1e-10)
  check = decentralized.equals_numpy
  assert claim(check, **given).passed
  assert not claim(check, decentralized.still, **given).passed


def test_the_minimiser_is_one():
  problem = decentralized.Problem(5, np.random.default_rng(4))
  at = np.tile(problem.best, (5, 1))
  np.testing.assert_allclose(problem.gradients(at).sum(0), 0, atol=1e-9)
  step = 1e-6 * np.eye(decentralized.DIM)
  loss = lambda x: sum(
    np.log1p(np.exp(-a @ x)).mean() + decentralized.RIDGE * x @ x / 2
    for a in problem.features
  )
  x = problem.best + 0.3
  slope = [(loss(x + d) - loss(x - d)) / 2e-6 for d in step]
  own = problem.gradients(np.tile(x, (5, 1))).sum(0)
  np.testing.assert_allclose(own, slope, rtol=1e-5)


def test_the_rate_is_linear_where_nodes_exchange():
  given = SMALL | dict(most=60_000, to=1e-16, straight=0.9)
  assert claim(decentralized.rate, **given).passed
  silent = claim(
    decentralized.rate, decentralized.silent, **given | dict(most=5000)
  )
  assert not silent.passed and silent.verdict == 'not reproduced'


def test_exchanges_are_counted_beside_baselines():
  given = SMALL | dict(most=60_000, tracking=False)
  found = claim(decentralized.fewer, **given)
  assert 'chain, gossip' in found.caveat and found.passed
  silent = claim(
    decentralized.fewer, decentralized.silent, **given | dict(most=5000)
  )
  assert not silent.passed


def test_exchanges_by_hand():
  """Two nodes: the Laplacian's eigenvalue is 2, the resistance 1/2 + 1/2."""
  problem = types.SimpleNamespace(smooth=8.0, convex=1.0)
  time = 8 * 4 * np.log(1e6)
  assert decentralized.allowed(problem, [(0, 1)], 2) == int(0.5**0.5 * time)


def test_more_exchanges_than_the_theorem_allows_are_seen(monkeypatch):
  """Whoever is slow: gossip SGD is counted no further than to the bound."""
  counted = []
  slow = lambda problem, edges, n, rng, most: counted.append(most) or most
  monkeypatch.setattr(decentralized, '_gossip', slow)
  given = SMALL | dict(most=60_000, tracking=False)
  assert claim(decentralized.fewer, **given).passed
  often = claim(decentralized.fewer, decentralized.six_times, **given)
  assert not often.passed and 'not' not in often.measured, often
  assert counted[:3] == counted[3:]  # whatever DADAO takes


def test_rates_of_gossip_fall_as_gradients_are_taken(monkeypatch):
  seen = []

  def step(gradient, x, pairs, rate):
    seen.append(rate)
    return x

  monkeypatch.setattr(decentralized, '_gossiped', step)
  problem, edges, rng = decentralized._made('chain', 4, 0)
  decentralized._gossip(problem, edges, 4, rng, 2000)
  constant = [s / problem.smooth for s in decentralized.SHARES]
  assert {*constant} < {*seen}
  falling = [r for r in seen if r not in constant]
  assert falling and min(falling) > 0 and max(falling) < constant[0]
