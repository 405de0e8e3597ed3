"""Gated scan in plain XLA: a loop over chunks, and a loop over tokens.

    xla    C tokens a step through gated_chunk; a gradient keeps T / C states
    loop   one token a step; a gradient keeps all T states

On a CPU a forward pass alone is cheapest token by token, with gradients in
chunks (B 1, H 4, K V 64, float32, medians of CPU-seconds at 4096 and at 16384
tokens, a decay per key | per head):

    plain loop, differentiated by jax   .88 3.69 | .75 3.04
    loop                                .36 1.44 | .38 1.35
    xla, chunks of 32                   .06  .30 | .03  .15

Legend: B batch, T tokens, H heads, G groups of R heads with one q and k, K key
size, V value size, C tokens of a chunk, N = T / C.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels.scans import gated_chunk

CHUNK = 32


def _over_heads(function, x, *others):
  """function(Tokens, *others) of every head: over B, G and R.

  q and k of a group have no axis R, nor has what is made of them alone.
  """
  split = lambda y: y.reshape(*x.q.shape[:2], -1, *y.shape[2:])
  rest = [0] * len(others)
  run = jax.vmap(
    function, (gated_chunk.GatedTokens(None, None, 0, 0, None), *rest)
  )
  run = jax.vmap(run, (gated_chunk.GatedTokens(0, 0, 0, 0, None), *rest))
  out = jax.vmap(run)(
    x._replace(v=split(x.v), g=split(x.g)), *map(split, others)
  )
  return [y.reshape(len(y), -1, *y.shape[3:]) for y in out]


def _split(x_BTHX, chunk, dtype):
  """(N, B, H, C, X), first of all chunks first."""
  x = x_BTHX.astype(dtype)
  x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
  return jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0)


def _join(x_NBHCX):
  """Inverse of _split, without the dtype."""
  x = jnp.moveaxis(jnp.moveaxis(x_NBHCX, 0, 2), 1, 3)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _chunks(x, chunk, dtype):
  """Tokens of a whole scan -> of all chunks, (N, B, H, ...)."""
  q, k, v, g = (_split(y, chunk, dtype) for y in x[:4])
  if g.ndim == 4:  # one per head
    g = g[..., None, :]
  segment = x.segment.astype(dtype).reshape(len(x.segment), -1, 1, chunk)
  return gated_chunk.GatedTokens(q, k, v, g, jnp.moveaxis(segment, 1, 0))


def forward(x, state, chunk, save):
  """o_BTHV, state_BHKV, and the state at each chunk's start (None: not save).

  Args:
    x: gated_chunk.GatedTokens; T a multiple of chunk.
    state: (B, H, K, V), in the dtype to compute in.
  """
  precision = gated_chunk.precision_of(x.q.dtype)
  body = lambda x, state: gated_chunk.forward(x, state, precision)

  def step(state, x):
    o, after = _over_heads(body, x, state)
    return after, (o, state if save else None)

  last, (o, starts) = jax.lax.scan(step, state, _chunks(x, chunk, state.dtype))
  return _join(o).astype(x.v.dtype), last, starts


def backward(x, starts, cotangents, chunk):
  """(dq, dk, dv, dg, d_state) from those of o and of the last state."""
  do, d_state = cotangents
  precision = gated_chunk.precision_of(x.q.dtype)
  body = lambda *args: gated_chunk.backward(*args, precision=precision)

  def step(d_state, args):
    *gradients, before = _over_heads(body, *args, d_state)
    shared = args[0].q.shape[:2]  # dq and dk: summed over the heads of a group
    gradients[:2] = (
      d.reshape(*shared, -1, *d.shape[2:]).sum(2) for d in gradients[:2]
    )
    return before, gradients

  wide = d_state.dtype
  scanned = _chunks(x, chunk, wide), starts, _split(do, chunk, wide)
  first, gradients = jax.lax.scan(step, d_state, scanned, reverse=True)
  if x.g.ndim == 3:
    gradients[3] = gradients[3][..., 0, :]
  return *_like(map(_join, gradients), x), first


def _like(gradients, x):
  return [d.astype(y.dtype) for d, y in zip(gradients, x[:4], strict=True)]


# ---------------------------------------------------------------- tokens --


def _tokens(x, dtype):
  """(q, k, v, g, keep), time first; keep: the state passes this token."""
  g = x.g if x.g.ndim == 4 else x.g[..., None]
  keep = x.segment[..., None, None] == 0
  each = *(y.astype(dtype) for y in (*x[:3], g)), keep
  return [jnp.moveaxis(y, 1, 0) for y in each]


def _update(token, state):
  """(decay_BHK, state after the token)."""
  _, k, v, g, keep = token
  decay = jnp.where(keep, jnp.exp(g), 0)
  k = _on_heads(k, v)
  # Not 0 times it, which may be NaN.
  kept = jnp.where(keep[..., None], decay[..., None] * state, 0)
  return decay, kept + k[..., None] * v[..., None, :]


def _on_heads(x_BGK, v_BHV):
  return jnp.repeat(x_BGK, v_BHV.shape[1] // x_BGK.shape[1], 1)


def loop_forward(x, state, chunk, save):
  """As `forward`, token by token (chunk 1)."""
  del chunk
  dot = _dot_of(x.q.dtype)

  def step(state, token):
    after = _update(token, state)[1]
    q = _on_heads(token[0], token[2])
    o = dot('bhk,bhkv->bhv', q, after)
    return after, (o, state if save else None)

  last, (o, starts) = jax.lax.scan(step, state, _tokens(x, state.dtype))
  return jnp.moveaxis(o, 0, 1).astype(x.v.dtype), last, starts


def loop_backward(x, starts, cotangents, chunk):
  """As `backward`, token by token; starts: all T states."""
  del chunk
  do, d_state = cotangents
  dot = _dot_of(x.q.dtype)

  def step(d_state, args):
    token, before, do = args
    q, k = (_on_heads(y, token[2]) for y in token[:2])
    v = token[2]
    decay, after = _update(token, before)
    d_state += q[..., None] * do[..., None, :]
    dq = dot('bhv,bhkv->bhk', do, after)
    dk = dot('bhv,bhkv->bhk', v, d_state)
    dv = dot('bhk,bhkv->bhv', k, d_state)
    dg = decay * (d_state * before).sum(-1)
    if x.g.ndim == 3:
      dg = dg.sum(-1)
    return decay[..., None] * d_state, (dq, dk, dv, dg)

  wide = d_state.dtype
  scanned = _tokens(x, wide), starts, jnp.moveaxis(do.astype(wide), 1, 0)
  first, gradients = jax.lax.scan(step, d_state, scanned, reverse=True)
  return *gated_chunk.gradients_of(x, gradients, 0), first


def _dot_of(dtype):
  precision = gated_chunk.precision_of(dtype).products
  return functools.partial(jnp.einsum, precision=precision)
