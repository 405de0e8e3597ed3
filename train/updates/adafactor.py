"""Factored second moments (Adafactor, arXiv:1804.04235, section 3).

optax factors an array over its two longest dimensions. Of a stack of layers,
of experts, or of (embed, heads, head_dim) these are others than the rows and
columns of its matrices, so each matrix is given to optax by itself:

    v_row  (*batch, rows) or (*batch, columns), of the shorter side
    v_col  the same of the longer side

Each side keeps the dimensions, and so the layout, that the parameter has there.
Vectors, and matrices with a side below FACTORED, keep all moments.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

FACTORED = 128  # shorter sides are not factored


def kept(dims, shape):
  """(dimensions of v_row, of v_col) of a parameter; (): it is not factored.

  dims: matrices.Dims. shape: of the parameter.
  """
  m, n = dims.shape(shape)
  if min(m, n) < FACTORED:
    return ()
  middle = dims.batch + dims.inputs
  batch, every = range(dims.batch), range(len(shape))
  rows, columns = every[dims.batch : middle], every[middle:]
  sides = (columns, rows) if m > n else (rows, columns)
  return tuple((*batch, *side) for side in sides)


def scale_by_factored(dims):
  """optax.GradientTransformation of {path: array}; dims: {path: Dims}."""
  rule: Any = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
  whole: Any = optax.scale_by_factored_rms(factored=False)

  def init(params):
    state: Any = whole.init(params)
    v_row, v_col, v = dict(state.v_row), dict(state.v_col), dict(state.v)
    for p, x in params.items():
      if sides := kept(dims[p], x.shape):
        zeros = lambda side, x=x: jnp.zeros([x.shape[d] for d in side], x.dtype)
        v_row[p], v_col[p] = map(zeros, sides)
        v[p] = jnp.zeros(1, x.dtype)
    return state._replace(v_row=v_row, v_col=v_col, v=v)

  def one(g, row, col, v, count, p):
    """Of one matrix."""
    each = type(whole.init({}))(count, {0: row}, {0: col}, {0: v})
    moved, new = rule.update({0: g}, each, {0: p})
    return moved[0], new.v_row[0], new.v_col[0]

  def update(updates, state, params=None):
    given: Any = params
    grads: Any = updates
    factored = [p for p in grads if kept(dims[p], grads[p].shape)]
    rest = lambda tree: {p: x for p, x in tree.items() if p not in factored}
    moved, new = whole.update(
      rest(grads),
      state._replace(
        v_row=rest(state.v_row), v_col=rest(state.v_col), v=rest(state.v)
      ),
      rest(given),
    )
    moved, v = dict(moved), dict(new.v)
    v_row, v_col = dict(new.v_row), dict(new.v_col)
    for p in factored:
      g, row, col = grads[p], state.v_row[p], state.v_col[p]
      m, n = dims[p].shape(g.shape)
      size = g.size // (m * n)
      stack = lambda x, *tail, size=size: x.reshape(size, *tail)
      d, r, c = jax.vmap(one, (0, 0, 0, None, None, 0))(
        stack(g, m, n), stack(row, -1), stack(col, -1), state.v[p], state.count,
        stack(given[p], m, n),
      )  # fmt: skip
      moved[p], v[p] = d.reshape(g.shape), state.v[p]
      v_row[p], v_col[p] = r.reshape(row.shape), c.reshape(col.shape)
    order = lambda tree: {p: tree[p] for p in grads}
    return order(moved), new._replace(
      v_row=order(v_row), v_col=order(v_col), v=order(v)
    )

  return optax.GradientTransformation(init, update)
