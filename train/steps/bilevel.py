"""A minimum over x of functions of minimisers, by blocks and by samples.

    min_x  mean_i f_i(x, y_i(x)),    y_i(x) = argmin_y g_i(x, y),   i = 1 .. m
    its gradient: mean of  df/dx - d2g/dxdy z_i,   z_i = (d2g/dydy)^-1 df/dy

A step reads I of the m blocks and B samples of each (BSVRB, arXiv:2305.18730,
algorithm 2). z_i is no inverse: it goes down 1/2 z H z - z df/dy by products of
the Hessian with a vector. What is followed of a block, h_i = (dg/dy, H z -
df/dy), is a running estimate that is corrected by how much the same samples
say it has moved; blocks that are not read keep theirs (MSVR):

    h_i <- (1 - alpha) h_i + alpha h(t) + gamma (h(t) - h(t - 1))
    gamma = (m - I) / (I (1 - alpha)) + 1 - alpha
    d   <- G(t) + (1 - beta) (d - G(t - 1)),    G the mean over blocks read
    x <- x - rate d,  y_i <- y_i - rate_y h_i,  z_i likewise

alpha = beta = 1 is plain descent along samples. Cost: two evaluations of I B
samples; a row of six for each of m blocks is kept.

Legend: m blocks, I of them read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Rates(NamedTuple):
  """x, y, z: learning rates. alpha, beta: see the top."""

  x: float
  y: float
  z: float
  alpha: float
  beta: float


class Search(NamedTuple):
  """x; y, z (m, ..) of each block; before: (x, y, z) a step ago.

  down, turn: (m, ..) what is followed of dg/dy and H z - df/dy. along: d.
  """

  x: Any
  y: Any
  z: Any
  before: Any
  down: Any
  turn: Any
  along: Any


def _found(outer, inner, x, y, z, sample):
  """(dg/dy, H z - df/dy, df/dx - d2g/dxdy z) of a block by its samples."""
  slope = lambda x, y: jax.grad(inner, 1)(x, y, sample)
  down, turned = jax.jvp(functools.partial(slope, x), (y,), (z,))
  crossed = jax.grad(lambda x: jnp.vdot(slope(x, y), z))(x)
  of_x, of_y = jax.grad(outer, (0, 1))(x, y, sample)
  return down, turned - of_y, of_x - crossed


def _each(outer, inner, point, blocks, samples):
  x, y, z = point
  of = functools.partial(_found, outer, inner)
  of = jax.vmap(of, (None, 0, 0, 0))
  return of(x, y[blocks], z[blocks], samples)


def begun(outer, inner, x, y, samples):
  """`Search` at x and y (m, ..), z 0; samples: of every block."""
  point = x, y, jnp.zeros_like(y)
  blocks = jnp.arange(len(y))
  down, turn, along = _each(outer, inner, point, blocks, samples)
  return Search(*point, point, down, turn, along.mean(0))


def step(outer, inner, rates, search, blocks, samples):
  """The `Search` after a step.

  Args:
    outer, inner: (x, y of a block, its samples) -> (), f and g.
    blocks: (I,) int32, which are read, each once. samples: leaves (I, ..).
  """
  m, read = len(search.y), len(blocks)
  gamma = 1 - rates.alpha
  if gamma and read < m:
    gamma += (m - read) / (read * gamma)
  point = search.x, search.y, search.z
  down, turn, along = _each(outer, inner, point, blocks, samples)
  old = _each(outer, inner, search.before, blocks, samples)

  def followed(kept, now, then):
    new = (1 - rates.alpha) * kept[blocks] + rates.alpha * now
    return kept.at[blocks].set(new + gamma * (now - then))

  down = followed(search.down, down, old[0])
  turn = followed(search.turn, turn, old[1])
  carried = (1 - rates.beta) * (search.along - old[2].mean(0))
  along = along.mean(0) + carried
  return Search(
    search.x - rates.x * along,
    search.y.at[blocks].add(-rates.y * down[blocks]),
    search.z.at[blocks].add(-rates.z * turn[blocks]),
    point, down, turn, along,
  )  # fmt: skip
