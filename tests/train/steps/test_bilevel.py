"""Minima over minimisers: a step against NumPy, and where it must end.

Reference: quadratic blocks, all of whose derivatives are written out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.train.steps import bilevel

pytestmark = pytest.mark.usefixtures('float64')

M, D, Q = 5, 3, 2


def inner(x, y, problem):
  a, c, t = problem
  return y @ a @ y / 2 - y @ (c @ x)


def outer(x, y, problem):
  return ((y - problem[2]) ** 2 / 2).sum() + (x**2 / 2 + x**4 / 4).sum()


def problem_of(rng, rows):
  root = rng.normal(size=(rows, Q, Q)) / 3
  a = np.eye(Q) + root @ root.swapaxes(1, 2)
  return a, rng.normal(size=(rows, Q, D)), rng.normal(size=(rows, Q))


def found(x, y, z, problem):
  """(dg/dy, H z - df/dy, df/dx - d2g/dxdy z) of one block, by hand."""
  a, c, t = problem
  return a @ y - c @ x, a @ z - (y - t), x + x**3 + c.T @ z


def by_loop(rates, search, blocks, samples):
  """A step, block by block: (x, y, z, down, turn, along)."""
  m, read = M, len(blocks)
  gamma = 1 - rates.alpha
  if rates.alpha < 1 and read < m:
    gamma += (m - read) / (read * (1 - rates.alpha))
  y, z, down, turn = (
    np.array(v) for v in (search.y, search.z, search.down, search.turn)
  )
  now, then = [], []
  for k, i in enumerate(blocks):
    own = tuple(v[k] for v in samples)
    x0, y0, z0 = search.before
    new = found(search.x, search.y[i], search.z[i], own)
    old = found(x0, y0[i], z0[i], own)
    for kept, a, b in zip((down, turn), new, old, strict=False):
      kept[i] = (1 - rates.alpha) * kept[i] + rates.alpha * a + gamma * (a - b)
    y[i] -= rates.y * down[i]
    z[i] -= rates.z * turn[i]
    now.append(new[2])
    then.append(old[2])
  along = np.mean(now, 0)
  along = along + (1 - rates.beta) * (search.along - np.mean(then, 0))
  return search.x - rates.x * along, y, z, down, turn, along


@pytest.mark.parametrize(
  ('alpha', 'read'), [(0.3, 2), (0.3, M), (1.0, 2), (1.0, M)]
)
def test_steps_equal_a_loop_over_blocks(alpha, read):
  rng = np.random.default_rng(0)
  rates = bilevel.Rates(0.05, 0.1, 0.2, alpha, alpha)
  search = bilevel.begun(
    outer, inner, rng.normal(size=D), jnp.asarray(rng.normal(size=(M, Q))),
    problem_of(rng, M),
  )  # fmt: skip
  for _ in range(3):
    blocks = rng.permutation(M)[:read]
    samples = problem_of(rng, read)
    wanted = by_loop(rates, search, blocks, samples)
    before = np.asarray(search.y)
    search = bilevel.step(outer, inner, rates, search, blocks, samples)
    own = search.x, search.y, search.z, search.down, search.turn, search.along
    for a, b in zip(own, wanted, strict=True):
      support.close(np.asarray(a), np.asarray(b), 1e-12)
    rest = np.setdiff1d(np.arange(M), blocks)
    np.testing.assert_array_equal(search.y[rest], before[rest])
  samples = problem_of(rng, read)
  other = by_loop(rates._replace(alpha=0.5), search, blocks, samples)
  again = by_loop(rates, search, blocks, samples)
  assert np.abs(other[3] - again[3]).max() > 1e-3


def test_without_noise_all_blocks_end_where_the_gradient_is_none():
  rng = np.random.default_rng(1)
  problem = problem_of(rng, M)
  a, c, t = problem
  search = bilevel.begun(
    outer, inner, np.ones(D), jnp.zeros((M, Q)), problem
  )  # fmt: skip
  rates = bilevel.Rates(0.05, 0.5, 0.5, 0.5, 0.5)
  step = jax.jit(functools.partial(bilevel.step, outer, inner, rates))
  for _ in range(400):
    search = step(search, jnp.arange(M), problem)
  x = np.asarray(search.x)
  y = np.stack([np.linalg.solve(a[i], c[i] @ x) for i in range(M)])
  z = np.stack([np.linalg.solve(a[i], y[i] - t[i]) for i in range(M)])
  slope = np.mean([x + x**3 + c[i].T @ z[i] for i in range(M)], 0)
  assert np.abs(slope).max() < 1e-4 < np.abs(z).max()
