"""Gated delta rule in plain XLA: a loop over chunks, and a loop over tokens.

Unrolled over the C tokens of a chunk that starts in state S, what each token
writes, w_t = b_t (v_t - e^g_t S_(t-1)^T k_t), solves a unit triangular system
(the UT transform of arXiv:2406.06484, section 3.2; with decays: section 3.3 of
arXiv:2412.06464):

    D_ij = e^(g_(j+1) + ... + g_i), j <= i in one document, else 0
    r_i  = e^(g_1 + ... + g_i), 0 from the first reset on
    (I + A) w = b (v - r (K S)),       A = strictly lower part of b D (K K^T)
    o  = r (Q S) + (D (Q K^T)) w
    S' = r_C S + (D_C K)^T w

No exponent is positive and none is a difference of running sums, which would
lose what is small beside them: row i of the exponents of D is row i - 1 plus
g_i. A chunk's own C x C and C x V arrays are made again in the backward pass
from the state at its start, which is all that is kept.

Only products invert I + A (`inverse`): the solver of LAPACK, which XLA calls on
a CPU, took 6 times as long and, where other work kept the cores busy, up to 170
times. With gradients (B 1, G 2, H 4, K V 64, 2048 tokens, float32, medians of
CPU-seconds): chunks of 16 .06, 32 .07, 64 .10, 128 .23; token by token .18;
a plain loop, differentiated by jax, 1.1.

Legend: B batch, T tokens, H = G R heads, G groups that share q and k, K key
size, V value size, C tokens of a chunk, N = T / C.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.pallas_kernels.scans import gated_chunk

# Tokens of a chunk where the caller does not say.
CHUNKS = dict(xla=32, batched=64, loop=1)


class DeltaTokens(NamedTuple):
  """Inputs of a scan, (B, T, ..), or of its chunks, (N, B, .., C, ..).

  q, k: (B, T, G, K), (N, B, G, C, K). v: (B, T, H, V), (N, B, G, R, C, V). g,
  the log decay, and beta: (B, T, H), (N, B, G, R, C). segment: resets since the
  start of the token's chunk, (B, T) int32, (N, B, C).
  """

  q: Any
  k: Any
  v: Any
  g: Any
  beta: Any
  segment: Any


def split(x, chunk, dtype):
  """Tokens of a whole scan -> of all chunks, first of all chunks first."""
  b, t, groups, _ = x.q.shape

  def one(y):
    y = y.astype(dtype).reshape(b, t // chunk, chunk, *y.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(y, 3, 2), 1, 0)  # (N, B, G or H, C, ..)

  heads = lambda y: y.reshape(*y.shape[:2], groups, -1, *y.shape[3:])
  segment = jnp.moveaxis(x.segment.reshape(b, -1, chunk), 1, 0)
  q, k, *of_heads = map(one, x[:5])
  v, g, beta = map(heads, of_heads)
  return DeltaTokens(q, k, v, g, beta, segment)


def join(y):
  """Inverse of split, of an array (N, B, G, C, ..) or (N, B, H, C, ..)."""
  y = jnp.moveaxis(jnp.moveaxis(y, 0, 1), 3, 2)
  return y.reshape(y.shape[0], -1, *y.shape[3:])


def of_heads(y):
  """(.., B, G, R, ..) -> (.., B, H, ..), chunks first."""
  return y.reshape(*y.shape[:2], -1, *y.shape[4:])


def _grid(x):
  """Row and column indices of a chunk's pairs of tokens, each (C, C)."""
  shape = (x.shape[-1],) * 2
  return [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)]


def decays(g, segment):
  """(D, r) of a chunk: (B, G, R, C, C), (B, G, R, C)."""
  row, col = _grid(g)
  total = jnp.cumsum(jnp.where(row > col, g[..., None], 0), -2)
  reach = jnp.where(segment[:, None, None] == 0, jnp.exp(jnp.cumsum(g, -1)), 0)
  same = segment[:, :, None] == segment[:, None]
  inside = same[:, None, None] & (col <= row)
  return jnp.where(inside, jnp.exp(total), 0), reach


def inverse(below):
  """(I + A)^-1 of A (.., C, C), strictly lower triangular; C a power of two.

  Block by block: of [[L, 0], [M, N]] it is [[L^-1, 0], [-N^-1 M L^-1, N^-1]],
  for blocks of 1, 2, 4, .. rows, all blocks of a size at once. The powers of A
  would cancel: of equal keys they grow as binomial coefficients.
  """
  row, col = _grid(below)
  dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
  found = jnp.broadcast_to(jnp.where(row == col, 1.0, 0), below.shape)
  found = found.astype(below.dtype)
  for level in range(below.shape[-1].bit_length() - 1):
    n = 1 << level
    block = row // (2 * n) == col // (2 * n)
    pairs = block & ((row & n) != 0) & ((col & n) == 0)
    found -= dot(dot(found, jnp.where(pairs, below, 0)), found)
  return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(dot, below, rhs):
  """(I + A)^-1 rhs_CV; `below` is A."""
  return _solve_forward(dot, below, rhs)[0]


def _solve_forward(dot, below, rhs):
  found = inverse(below)
  solved = dot('...ij,...jv->...iv', found, rhs)
  return solved, (found, solved)


def _solve_backward(dot, residuals, d_solved):
  found, solved = residuals
  d_rhs = dot('...ji,...jv->...iv', found, d_solved)
  return -dot('...iv,...jv->...ij', d_rhs, solved), d_rhs


_solve.defvjp(_solve_forward, _solve_backward)


def chunk(x, state, dot):
  """(o_BGRCV, state_BGRKV at its end) of one chunk.

  Args:
    x: DeltaTokens of one chunk, in one float dtype. state: at its start.
    dot: einsum.
  """
  decay, reach = decays(x.g, x.segment)
  over = lambda y: y[:, :, None]  # all heads of a group
  scale = lambda s, y: s[..., None] * y
  known = scale(reach, dot('bgck,bgrkv->bgrcv', x.k, state))
  pairs = decay * over(dot('bgik,bgjk->bgij', x.k, x.k))
  row, col = _grid(x.g)
  pairs = jnp.where(row > col, pairs, 0)
  writes = _solve(dot, scale(x.beta, pairs), scale(x.beta, x.v - known))
  scores = decay * over(dot('bgik,bgjk->bgij', x.q, x.k))
  o = scale(reach, dot('bgck,bgrkv->bgrcv', x.q, state))
  o += dot('bgrij,bgrjv->bgriv', scores, writes)
  left = scale(decay[..., -1, :], writes)
  after = reach[..., -1:, None] * state
  return o, after + dot('bgck,bgrcv->bgrkv', x.k, left)


def token(x, state, dot):
  """`chunk` of one token, without a system to solve."""
  kept = (x.segment == 0)[:, None, None, :, None]
  state = jnp.where(kept, jnp.exp(x.g)[..., None] * state, 0)
  known = dot('bgck,bgrkv->bgrcv', x.k, state)
  writes = x.beta[..., None] * (x.v - known)
  state = state + dot('bgck,bgrcv->bgrkv', x.k, writes)
  return dot('bgck,bgrkv->bgrcv', x.q, state), state


def dot_of(dtype):
  precision = gated_chunk.precision_of(dtype).products
  return functools.partial(jnp.einsum, precision=precision)


def _forward(body, x, state, size, save):
  """o_BTHV, state_BHKV, and the states at chunks' starts (None: not save).

  Args:
    body: `chunk` or `token`. x: DeltaTokens; T a multiple of size.
    state: (B, H, K, V), in the dtype to compute in.
  """
  b, h, k, v = state.shape
  dot = dot_of(x.q.dtype)

  def step(state, x):
    o, after = body(x, state, dot)
    return after, (o, state if save else None)

  state = state.reshape(b, x.q.shape[2], -1, k, v)
  last, (o, starts) = lax.scan(step, state, split(x, size, state.dtype))
  o = join(of_heads(o)).astype(x.v.dtype)
  return o, last.reshape(b, h, k, v), starts


def _backward(body, x, starts, cotangents, size):
  """(dq, dk, dv, dg, db, d_state) from those of o and of the last state."""
  do, d_state = cotangents
  (b, h, k, v), wide, dot = d_state.shape, d_state.dtype, dot_of(x.q.dtype)

  def step(d_state, args):
    x, start, do = args
    run = lambda *arrays: body(
      DeltaTokens(*arrays[:5], segment=x.segment), arrays[5], dot
    )
    *gradients, before = jax.vjp(run, *x[:5], start)[1]((do, d_state))
    return before, gradients

  d_state = d_state.reshape(b, x.q.shape[2], -1, k, v)
  do = split(x._replace(v=do), size, wide).v
  scanned = split(x, size, wide), starts, do
  first, found = lax.scan(step, d_state, scanned, reverse=True)
  return *joined(x, found), first.reshape(b, h, k, v)


def joined(x, found):
  """Gradients of chunks -> of a scan's DeltaTokens, without segment."""
  found = *found[:2], *map(of_heads, found[2:])
  return [join(d).astype(y.dtype) for d, y in zip(found, x[:5], strict=True)]


forward = functools.partial(_forward, chunk)
backward = functools.partial(_backward, chunk)
loop_forward = functools.partial(_forward, token)
loop_backward = functools.partial(_backward, token)
