"""Gated delta rule for a GPU: only the states are made one after the other.

With the letters of delta_xla.py, a chunk that starts in state S writes

    w = U - W S,   U = (I + A)^-1 b v,   W = (I + A)^-1 b r K
    S' = r_C S + L^T w,   L = D_C K          o = r (Q S) + (D (Q K^T)) w

(the WY form of arXiv:2406.06484, section 3.2). Nothing but the line of S' waits
for the chunk before. So of `BATCH` chunks U, W and L are made at once, then a
loop makes the states, two products a chunk, then the outputs are made at once;
a loop of whole chunks is hundreds of small launches a chunk. The gradient goes
through the batches in reverse: a loop over its states,

    dw = (D (Q K^T))^T do + L dS',   dS = r_C dS' + (r Q)^T do - W^T dw

and then, of all chunks of the batch, what delta_xla.chunk gives for its inputs.

Memory: all that a chunk needs, of `BATCH` of them; for the gradient a state a
chunk, as delta_xla.py keeps.

Legend: that of delta_xla.py.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.pallas_kernels.scans import delta_xla

BATCH = 16  # chunks that are computed at once


def _batches(tree, chunks):
  """Arrays (N, ..) -> (N / M, M, ..), M <= BATCH; chunks of zeros at the end.

  Such a chunk changes no state: b, k and g are 0.
  """
  size = min(BATCH, chunks)
  more = -chunks % size

  def one(x):
    x = jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])

  return jax.tree.map(one, tree)


def _whole(tree, chunks):
  """The inverse of `_batches`."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:chunks], tree)


def _over(y):
  return y[:, :, None]  # all heads of a group


def _scale(s, y):
  return s[..., None] * y


def _maps(dot, x):
  """(U, W, L, r_C) of a chunk: (B, G, R, C, V or K), (B, G, R, 1, 1)."""
  decays, reach = delta_xla.decays(x.g, x.segment)
  pairs = decays * _over(dot('bgik,bgjk->bgij', x.k, x.k))
  found = delta_xla.inverse(_scale(x.beta, jnp.tril(pairs, -1)))
  solve = lambda y: dot('bgrij,bgrjv->bgriv', found, y)
  left = _scale(decays[..., -1, :], _over(x.k))
  moved = solve(_scale(x.beta * reach, _over(x.k)))
  return solve(_scale(x.beta, x.v)), moved, left, reach[..., -1:, None]


def _scores(dot, x):
  """(D (Q K^T), r Q) of a chunk."""
  decays, reach = delta_xla.decays(x.g, x.segment)
  scores = decays * _over(dot('bgik,bgjk->bgij', x.q, x.k))
  return scores, _scale(reach, _over(x.q))


def _outputs(dot, x, state, writes):
  scores, reached = _scores(dot, x)
  o = dot('bgrck,bgrkv->bgrcv', reached, state)
  return o + dot('bgrij,bgrjv->bgriv', scores, writes)


def _without_state(dot, x, do):
  """(of dw, of dS) what `do` alone gives."""
  scores, reached = _scores(dot, x)
  return (
    dot('bgrij,bgriv->bgrjv', scores, do),
    dot('bgrck,bgrcv->bgrkv', reached, do),
  )


def forward(x, state, size, save):
  """As delta_xla.forward."""
  b, h, k, v = state.shape
  dot = delta_xla.dot_of(x.q.dtype)
  chunks = delta_xla.split(x, size, state.dtype)

  def step(state, maps):
    own, moved, left, kept = maps
    writes = own - dot('bgrck,bgrkv->bgrcv', moved, state)
    after = kept * state + dot('bgrck,bgrcv->bgrkv', left, writes)
    return after, (state, writes)

  def batch(state, chunks):
    maps = jax.vmap(functools.partial(_maps, dot))(chunks)
    state, (starts, writes) = lax.scan(step, state, maps)
    outputs = functools.partial(_outputs, dot)
    o = jax.vmap(outputs)(chunks, starts, writes)
    return state, (o, starts if save else None)

  state = state.reshape(b, x.q.shape[2], -1, k, v)
  count = len(chunks.q)
  last, found = lax.scan(batch, state, _batches(chunks, count))
  o, starts = _whole(found, count)
  o = delta_xla.join(delta_xla.of_heads(o)).astype(x.v.dtype)
  return o, last.reshape(b, h, k, v), starts


def backward(x, starts, cotangents, size):
  """As delta_xla.backward."""
  do, d_state = cotangents
  (b, h, k, v), wide = d_state.shape, d_state.dtype
  dot = delta_xla.dot_of(x.q.dtype)
  chunks = delta_xla.split(x, size, wide)
  do = delta_xla.split(x._replace(v=do), size, wide).v

  def step(d_after, given):
    (moved, left, kept), (d_writes, d_state) = given
    d_writes += dot('bgrck,bgrkv->bgrcv', left, d_after)
    d_state += kept * d_after - dot('bgrck,bgrcv->bgrkv', moved, d_writes)
    return d_state, d_after

  def gradients(x, start, do, d_after):
    def run(*arrays):
      chunk = delta_xla.DeltaTokens(*arrays, segment=x.segment)
      return delta_xla.chunk(chunk, start, dot)

    return jax.vjp(run, *x[:5])[1]((do, d_after))

  def batch(d_state, given):
    chunks, starts, do = given
    _, *maps = jax.vmap(functools.partial(_maps, dot))(chunks)
    known = jax.vmap(functools.partial(_without_state, dot))(chunks, do)
    d_state, d_after = lax.scan(step, d_state, (maps, known), reverse=True)
    return d_state, jax.vmap(gradients)(chunks, starts, do, d_after)

  d_state = d_state.reshape(b, x.q.shape[2], -1, k, v)
  count = len(starts)
  given = _batches((chunks, starts, do), count)
  first, found = lax.scan(batch, d_state, given, reverse=True)
  found = delta_xla.joined(x, _whole(found, count))
  return *found, first.reshape(b, h, k, v)
