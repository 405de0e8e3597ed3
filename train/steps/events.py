"""Nodes of a graph minimise a sum: alone, and with a neighbour at times.

DADAO (arXiv:2208.00779, section 4): node i has f_i, smooth (L) and strongly
convex (mu), and six vectors v = (X, X~, Y, Y~, Z, Z~). Gradients and exchanges
are events at random times, of two Poisson processes that know nothing of each
other; between its events a node's vectors follow d/dt v = M v, so that whoever
is part of an event first takes v <- exp(M dt) v. With nu = mu / 2:

    M: X  = -eta X + eta X~          X~ =  eta X - eta X~
       Y  = -alpha Y + alpha Y~      Y~ = -theta (nu X~ + Y + Z)
       Z  = -alpha Z + alpha Z~      Z~ =  eta Z - eta Z~
    gradient at i:  q = grad f_i(X) - nu X - Y~
       X -= gamma q;  X~ -= gamma~ q;  Y~ += (1 + delta) q
    exchange of i and j:  g = (Y + Z)_i - (Y + Z)_j
       Z_i -= g / 2;  Z~_i -= beta g;  at j with the other sign

A node takes a gradient once in a unit of time, in the mean. Of G edges, all as
likely, there are sqrt(2 chi1 chi2) exchanges in it: with the Laplacian divided
by G, chi1 is one over its least eigenvalue above 0, chi2 half the largest
resistance of an edge.

Time and nodes are simulated: one process runs the list of events.

Legend: N nodes, D numbers of a vector, E events.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VECTORS = 6
X, X_, Y, Y_, Z, Z_ = range(VECTORS)


class Events(NamedTuple):
  """times (E,), rising. pairs (E, 2): nodes of an exchange; of a gradient both
  are the node that takes it."""

  times: np.ndarray
  pairs: np.ndarray


class Constants(NamedTuple):
  """Of the equations above; matrix (6, 6): M."""

  matrix: np.ndarray
  nu: float
  gamma: float
  gamma_: float
  delta: float
  beta: float


def exchanges(n, edges):
  """(exchanges in a unit of time, chi1 of as many) of a connected graph.

  n: nodes. edges: (G, 2) of them.
  """
  laplacian = np.zeros((n, n))
  for i, j in edges:
    laplacian[[i, j], [i, j]] += 1
    laplacian[i, j] -= 1
    laplacian[j, i] -= 1
  laplacian /= len(edges)
  chi1 = 1 / np.linalg.eigvalsh(laplacian)[1]
  inverse = np.linalg.pinv(laplacian)
  i, j = np.asarray(edges).T
  resistance = inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]
  rate = np.sqrt(chi1 * resistance.max())  # chi2 is half of the resistance
  return rate, chi1 / rate


def constants(smooth, convex, chi1):
  """`Constants` of functions with L and mu. chi1: of `exchanges`."""
  nu = convex / 2
  root = np.sqrt(nu / smooth)
  alpha, eta, theta = root / 4, root / 8, 1 / (2 * root)
  matrix = np.zeros((VECTORS, VECTORS))
  matrix[X, [X, X_]] = -eta, eta
  matrix[X_, [X, X_]] = eta, -eta
  matrix[Y, [Y, Y_]] = -alpha, alpha
  matrix[Y_, [X_, Y, Z]] = -theta * nu, -theta, -theta
  matrix[Z, [Z, Z_]] = -alpha, alpha
  matrix[Z_, [Z, Z_]] = eta, -eta
  return Constants(
    matrix,
    nu,
    gamma=1 / (4 * smooth),
    gamma_=1 / (4 * np.sqrt(smooth * nu)),
    delta=root / 4,
    beta=2 * chi1 / root,
  )


def drawn(rng, n, edges, rate, count):
  """`Events`, so many. rate: exchanges in a unit of time; gradients are n."""
  times = np.cumsum(rng.exponential(1 / (n + rate), count))
  nodes = np.repeat(rng.integers(0, n, (count, 1)), 2, 1)
  chosen = np.asarray(edges)[rng.integers(0, len(edges), count)]
  exchange = rng.random((count, 1)) < rate / (n + rate)
  return Events(times, np.where(exchange, chosen, nodes))


def begun(x):
  """(N, 6, D): X is x (N, D), the others are 0."""
  return jnp.zeros((len(x), VECTORS, x.shape[1]), x.dtype).at[:, X].set(x)


def waited(events, last):
  """(E, 2) time since either node's last event, and `last` after them.

  last: (N,) times of the last event of each node; it is not changed.
  """
  last, out = np.array(last), np.empty(events.pairs.shape)
  listed = zip(events.times, events.pairs, strict=True)
  for e, (time, pair) in enumerate(listed):
    out[e] = time - last[pair]
    last[pair] = time
  return out, last


@functools.partial(jax.jit, static_argnums=0)
def run(gradient, state, pairs, gaps, c):
  """State (N, 6, D) after events, each node as of its own last one.

  Args:
    gradient: (node, (D,)) -> (D,).
    pairs: Events.pairs. gaps: (E, 2) of `waited`. c: Constants.
  """
  flows = jax.vmap(jax.vmap(lambda t: jax.scipy.linalg.expm(c.matrix * t)))(
    gaps
  )

  def of_gradient(state, i, j, flow):
    v = flow[0] @ state[i]
    q = gradient(i, v[X]) - c.nu * v[X] - v[Y_]
    v = v.at[X].add(-c.gamma * q).at[X_].add(-c.gamma_ * q)
    return state.at[i].set(v.at[Y_].add((1 + c.delta) * q))

  def of_exchange(state, i, j, flow):
    a, b = flow[0] @ state[i], flow[1] @ state[j]
    g = a[Y] + a[Z] - b[Y] - b[Z]
    a = a.at[Z].add(-g / 2).at[Z_].add(-c.beta * g)
    b = b.at[Z].add(g / 2).at[Z_].add(c.beta * g)
    return state.at[i].set(a).at[j].set(b)

  def body(state, event):
    (i, j), flow = event
    args = state, i, j, flow
    return jax.lax.cond(i == j, of_gradient, of_exchange, *args), None

  return jax.lax.scan(body, state, (pairs, flows))[0]


def at(state, last, now, c):
  """(N, D): X of every node at a time. last: as of `waited`. c: Constants."""
  flows = jax.vmap(lambda t: jax.scipy.linalg.expm(c.matrix * t))(now - last)
  return jnp.einsum('nv,nvd->nd', flows[:, X], state)
