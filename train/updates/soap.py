"""Adam in the eigenbasis of Shampoo's statistics (SOAP).

arXiv:2409.11321, algorithm 3. Of a matrix W (M, N) with gradient G:

    L <- beta L + (1 - beta) G G',  R <- beta R + (1 - beta) G' G
    Q_L, Q_R: their eigenvectors at first (on a TPU START steps of the next
      line); every `every` steps one of the power method:  Q <- qr(L Q)
    m <- b1 m + (1 - b1) G;         v <- b2 v + (1 - b2) (Q_L' G Q_R)^2
    d = Q_L (Q_L' m Q_R / (sqrt(v) + eps)) Q_R'      bias-corrected, as Adam's

The first gradient makes statistics and bases alone: d is 0. With Q = 1 the rest
is Adam. m is kept in W's own coordinates, so that a new basis needs to turn
nothing; of v the rows and columns are ordered as the bases are.

Early statistics have no full rank. Which vectors then span what is left is
chance, another on every layout, and Adam would depend on it; so bases are those
of L + SPREAD tr(L) / M diag(1 ... 2), whose eigenvalues differ. A column's sign
is that of its product with fixed weights.

A side longer than LARGEST, or more than LONG times the other, has no
statistics, its Q is 1: of an adapter's long side most would stay 0. Cost a
step: 4 products of (M, M) and of (N, N) with (M, N), and some M^3 + N^3 every
`every` steps. Statistics and bases are 2 (M^2 + N^2) numbers.

Legend: B matrices, M rows, N columns.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paraxis.train.updates import matrices

LARGEST, LONG = 10_000, 4
SPREAD = 2e-3
START = 10


class SoapState(NamedTuple):
  """count: () int32. mu, nu: {path: as the parameter}. left, left_basis:
  {path: (*batch, M, M)}, right, right_basis: {path: (*batch, N, N)}."""

  count: Any
  mu: Any
  nu: Any
  left: Any
  left_basis: Any
  right: Any
  right_basis: Any


def sides(dims, params):
  """{'left' | 'right': {path: M | N}} of the sides that have statistics."""
  out: dict[str, dict[str, int]] = {'left': {}, 'right': {}}
  for path, x in params.items():
    both = dims[path].shape(x.shape)
    for name, n in zip(out, both, strict=True):
      if n <= min(LARGEST, LONG * min(both)):
        out[name][path] = n
  return out


def scale_by_soap(dims, place, b1, b2, epsilon, decay, every):
  """optax.GradientTransformation of {path: array}.

  Args:
    dims: {path: matrices.Dims}.
    place: (path, 'left' or 'right', array) -> it, laid out as statistics of
      that side.
    b1, b2, epsilon: as Adam's. decay: beta of the statistics.
    every: steps between two refreshed bases.
  """

  def init(params):
    found = sides(dims, params)

    def of(side):
      square = lambda p, n: (*params[p].shape[: dims[p].batch], n, n)
      empty = lambda p, n: jnp.zeros(square(p, n), params[p].dtype)
      return {p: place(p, side, empty(p, n)) for p, n in found[side].items()}

    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return SoapState(
      jnp.zeros((), jnp.int32), zeros(), zeros(),
      of('left'), of('left'), of('right'), of('right'),
    )  # fmt: skip

  def update(updates, state, params=None):
    del params
    rule = functools.partial(_update, (b1, b2, epsilon, decay, every))
    # Accelerators round the operands of float32 products by default, and SPREAD
    # would be less than that.
    with jax.default_matmul_precision('highest'):
      return matrices.updated(rule, dims, updates, state)

  return optax.GradientTransformation(init, update)


def _update(settings, stacks, count):
  """matrices.run's rule: every shape alone."""
  out = {name: {} for name in ('direction', *SoapState._fields[1:])}
  for group, g in stacks['gradient'].items():
    own = {name: tree.get(group) for name, tree in stacks.items()}
    for name, x in _of_shape(settings, g, own, count).items():
      if x is not None:
        out[name][group] = x
  return out


def _of_shape(settings, g, own, count):
  """{name: (B, ...)} after the gradients g (B, M, N) of update `count`."""
  b1, b2, epsilon, decay, every = settings
  bases = own['left_basis'], own['right_basis']
  mu = b1 * own['mu'] + (1 - b1) * g
  nu = b2 * own['nu'] + (1 - b2) * jnp.square(_rotated(g, *bases))
  # Update 0 is no step of Adam's.
  t = jnp.maximum(count, 1).astype(mu.dtype)
  m_hat = _rotated(mu, *bases) / (1 - b1**t)
  d = m_hat / (jnp.sqrt(nu / (1 - b2**t)) + epsilon)
  out = dict(direction=_rotated(d, *map(_turned, bases)), mu=mu, nu=nu)
  begun = count > 0
  # Of update 0 nothing is kept but statistics and bases.
  out = {n: jnp.where(begun, x, jnp.zeros_like(x)) for n, x in out.items()}
  grams = dict(left=g @ _turned(g), right=_turned(g) @ g)
  for axis, (side, gram) in enumerate(grams.items(), 1):
    if (old := own[side]) is None:
      continue
    new = decay * old + (1 - decay) * gram
    basis, nu = jax.lax.switch(
      jnp.where(begun, 1 + (count % every == 0), 0),
      [_first, _kept, functools.partial(_refreshed, axis)],
      new, own[f'{side}_basis'], out['nu'],
    )  # fmt: skip
    out |= {side: new, f'{side}_basis': basis, 'nu': nu}
  return out


def _turned(x):
  return None if x is None else x.mT


def _rotated(x, left, right):
  """Q_L' x Q_R of (B, M, N); None: 1."""
  x = x if left is None else left.mT @ x
  return x if right is None else x @ right


def _apart(s):
  """Statistics (B, K, K) whose eigenvalues differ."""
  K = s.shape[-1]
  trace = jnp.trace(s, axis1=-2, axis2=-1)[:, None] / K
  return (
    s
    + jnp.eye(K, dtype=s.dtype)
    * (SPREAD * trace * jnp.linspace(1, 2, K, dtype=s.dtype))[:, None, :]
  )


def _signed(q):
  """(B, K, K), each column with the sign that a fixed product gives it."""
  K = q.shape[-1]
  weights = jnp.cos(jnp.arange(K, dtype=q.dtype) * math.sqrt(2))
  product = jnp.einsum('bik,i->bk', q, weights)
  return q * jnp.where(product < 0, -1, 1).astype(q.dtype)[:, None, :]


def _first(s, basis, v):
  """(eigenvectors of s, largest eigenvalue first; v)."""
  del basis
  s = _apart(s)
  return jax.lax.platform_dependent(s, tpu=_began, default=_eigenvectors), v


def _eigenvectors(s):
  vectors = matrices.apiece(lambda x: jnp.linalg.eigh(x)[1], s)
  return _signed(vectors[..., ::-1])


def _began(s):
  """START steps of the power method from 1, nearly as good (on text .3% more
  bits per byte after 240 steps): trip counts of eigh on a TPU depend on data,
  which the compile report refuses to count."""
  one = jnp.broadcast_to(jnp.eye(s.shape[-1], dtype=s.dtype), s.shape)
  return jax.lax.fori_loop(0, START, lambda _, q: _powered(s, q), one)


def _powered(s, basis):
  """qr(s basis), of (B, K, K)."""
  return _signed(matrices.apiece(lambda x: jnp.linalg.qr(x)[0], s @ basis))


def _kept(s, basis, v):
  del s
  return basis, v


def _refreshed(axis, s, basis, v):
  """(the basis after a step of the power method; v in its order)."""
  s = _apart(s)
  values = jnp.einsum('bik,bij,bjk->bk', basis, s, basis)
  order = jnp.argsort(-values, axis=-1)
  basis = jnp.take_along_axis(basis, order[:, None, :], axis=2)
  v = jnp.take_along_axis(v, jnp.expand_dims(order, 3 - axis), axis=axis)
  return _powered(s, basis), v
