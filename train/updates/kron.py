"""Kronecker-factored whitening of gradients, learned as it goes (PSGD Kron).

arXiv:1512.04202 and arXiv:2402.11858. Of a matrix W (M, N) with momentum G two
triangular factors are fitted so that Q_L G Q_R' is white, with a random probe V
of G's shape and damped G:

    A = Q_L G Q_R',    C = Q_L^-T V Q_R^-1
    Q_L <- Q_L - rate triu(A A' - C C') Q_L / |A A' + C C'|
    Q_R <- Q_R - rate triu(A' A - C' C) Q_R / |A' A + C' C|
    d = Q_L' Q_L G Q_R' Q_R,    at most CLIP in root mean square

|X| is a lower bound of the largest singular value. Factors are fitted at every
step of the first FLAT, after them every `every` steps, and never where G is 0.
V is a function of the step and of the matrix's place in the model, a layer and
an expert, whatever the layout.

Legend: B matrices, M rows, N columns.
"""

import functools
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.models import depth
from paraxis.train.updates import matrices

RATE = 0.1  # of the factors
FLAT = 500
CLIP = 1.1


class KronState(NamedTuple):
  """count: () int32. mu: {path: as the parameter}, average of gradients. left:
  {path: (*batch, M, M)}, right: {path: (*batch, N, N)}, upper triangles."""

  count: Any
  mu: Any
  left: Any
  right: Any


def scale_by_kron(dims, place, b1, every, held=()):
  """optax.GradientTransformation of {path: array}.

  Args:
    dims: {path: matrices.Dims}. place: as for soap.scale_by_soap.
    b1: decay of the average of gradients. every: steps between two fits, after
      the first FLAT.
    held: {path: depth.Held} how memory holds stacks; what it lacks is in order.
  """

  held = dict(held)

  def init(params):
    def factors(side):
      out = {}
      for path, x in params.items():
        n = dims[path].shape(x.shape)[side == 'right']
        batch = x.shape[: dims[path].batch]
        one = jnp.broadcast_to(jnp.eye(n, dtype=x.dtype), (*batch, n, n))
        out[path] = place(path, side, one)
      return out

    zeros = jax.tree.map(jnp.zeros_like, params)
    return KronState(
      jnp.zeros((), jnp.int32), zeros, factors('left'), factors('right')
    )

  def update(updates, state, params=None):
    del params
    grads: Any = updates
    ids = {
      p: _ids(p, x, dims[p], held.get(p, depth.IN_ORDER))
      for p, x in grads.items()
    }
    rule = functools.partial(_update, b1, every)
    # Accelerators round the operands of float32 products by default, and the
    # damping would be less than that.
    with jax.default_matmul_precision('highest'):
      return matrices.updated(rule, dims, grads, state, ids=ids)

  return optax.GradientTransformation(init, update)


def _ids(path, x, dims, held):
  """(*batch) uint32, a number of its own for each matrix of the model; of an
  empty row 0."""
  batch, (rows, experts) = [*x.shape[: dims.batch]], held
  if rows is not None:
    batch[0] = max(rows) + 1
  if experts and experts[0] >= dims.batch:
    experts = None  # they are columns, as a router's
  first = zlib.crc32(path.encode())
  ids = first + np.arange(np.prod(batch, dtype=int), dtype=np.uint64)
  ids = (ids % 2**32).astype(np.uint32).reshape(batch)
  return jnp.asarray(depth.from_order(ids, rows, experts))


def _update(b1, every, stacks, count):
  """matrices.run's rule: every shape alone."""
  out = {name: {} for name in ('direction', *KronState._fields[1:])}
  due = (count < FLAT) | (count % every == 0)
  for group, g in stacks['gradient'].items():
    mu = b1 * stacks['mu'][group] + (1 - b1) * g
    mean = mu / (1 - b1 ** (count + 1).astype(mu.dtype))
    ids = stacks['ids'][group]
    left, right = jax.lax.cond(
      due,
      functools.partial(_fitted, mean, ids, count),
      lambda left, right: (left, right),
      stacks['left'][group],
      stacks['right'][group],
    )
    # Factors of gradients that nearly vanished are large: squares, and products
    # of both, would overflow when a gradient comes.
    d, inner = _unit(left @ mean @ right.mT)
    d, outer = _unit(left.mT @ d @ right)
    size = jnp.sqrt(jnp.mean(jnp.square(d), (1, 2), keepdims=True))
    d = d * jnp.minimum(inner * outer, CLIP / size)
    for name, x in dict(direction=d, mu=mu, left=left, right=right).items():
      out[name][group] = x
  return out


def _top(x):
  """(B, 1, 1): the largest absolute value of each matrix, above 0."""
  top = jnp.max(jnp.abs(x), (1, 2), keepdims=True)
  return jnp.maximum(top, jnp.finfo(x.dtype).tiny)


def _unit(x):
  """(x / t, t): t as of `_top`."""
  top = _top(x)
  return x / top, top


def _fitted(g, ids, count, left, right):
  """(left, right) after a step of their own; as they are if g is 0."""
  keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(i), count))(ids)
  probe = jax.vmap(lambda key: jax.random.normal(key, g.shape[1:], g.dtype))(
    keys
  )
  damp = jnp.finfo(g.dtype).eps ** 0.5 * jnp.mean(
    jnp.abs(g), (1, 2), keepdims=True
  )
  a = left @ (g + damp * probe) @ right.mT
  solve = functools.partial(
    jax.lax.linalg.triangular_solve, lower=False, left_side=True,
    transpose_a=True,
  )  # fmt: skip
  c = matrices.apiece(solve, left, probe)
  c = matrices.apiece(solve, right, c.mT).mT
  top = jnp.maximum(_top(a), _top(c))  # a step is of their ratio
  a, c = a / top, c / top
  new_left = _stepped(left, a @ a.mT, c @ c.mT)
  new_right = _stepped(right, a.mT @ a, c.mT @ c)
  # Their product counts alone: both are kept of one size.
  share = jnp.sqrt(_top(new_right) / _top(new_left))
  some = jnp.any(g != 0, (1, 2), keepdims=True)  # else they grow without end
  left = jnp.where(some, new_left * share, left)
  return left, jnp.where(some, new_right / share, right)


def _stepped(q, whitened, probed):
  step = jnp.triu(whitened - probed) @ q
  return q - RATE * step / _norm(whitened + probed)


def _norm(x):
  """(B, 1, 1): a lower bound of the largest singular value of symmetric x."""
  squares = jnp.sum(jnp.square(x), 1)  # (B, K), of columns
  at = jnp.argmax(squares, -1)[:, None, None]
  column = jnp.take_along_axis(x, at, axis=2)  # (B, K, 1)
  length = lambda v: jnp.sqrt(jnp.sum(jnp.square(v), (1, 2), keepdims=True))
  tiny = jnp.finfo(x.dtype).tiny
  unit = column / jnp.maximum(length(column), tiny)
  return jnp.maximum(length(x @ unit), tiny)
