"""Gated scan on a GPU (Triton): one program a head, the state in registers.

The grid is (B, H, blocks of V): nothing in the scan mixes columns of the state,
so a block of V columns is a scan of its own. Each program walks its chunks in
order (backwards for the gradient) and keeps S, or its cotangent, from chunk to
chunk. dq, dk and dg are sums over V: each block writes its part and XLA adds
them. Chunks are short, 16 or 32 tokens: longer ones need more shared memory
than a block of threads has. All sums are float32; products of bfloat16 inputs
are TF32, of float32 inputs full float32.

Legend: B batch, T tokens, H heads, K key size, V value size, W columns of a
block of V, C tokens of a chunk, N = T / C, M = V / W.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import gated_chunk

# A decay per key has log2(C) products more, of numbers that leave the registers
# at 32: 14.8 ms at 32, 6.5 at 16 (H200, B4 T8192 H16 K128 V128, forward).
CHUNK, KEY_CHUNK = 32, 16
DTYPES = 'bfloat16', 'float16', 'float32'
_CHUNKS = 16, 32
_SIZES = 16, 32, 64, 128  # of K and V
_COLUMNS = 64
_FULL = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  del target
  for name, size in (('key size', spec.q[3]), ('value size', spec.values)):
    if size not in _SIZES:
      return f'{name} {size} is not one of {_SIZES}'
  if spec.chunk not in (0, *_CHUNKS):
    return f'chunk {spec.chunk} is not one of {_CHUNKS}: shared memory'
  return None


def _load(refs, at):
  """Tokens of the chunk at tokens `at`, one per head as a row."""
  q, k, v, g, segment = (r[at] if len(r.shape) == 1 else r[at, :] for r in refs)
  x = q, k, v, g if g.ndim == 2 else g[None, :], segment[None, :]
  return gated_chunk.GatedTokens(*(y.astype(jnp.float32) for y in x))


def _forward_kernel(*refs, chunk, precision):
  inputs, first_ref, o_ref, last_ref = refs[:5], *refs[5:8]
  starts_ref = refs[8:]

  def step(i, state):
    at = pl.ds(i * chunk, chunk)
    for ref in starts_ref:
      ref[i] = state
    o, after = gated_chunk.forward(_load(inputs, at), state, precision)
    o_ref[at, :] = o.astype(o_ref.dtype)
    return after

  count = o_ref.shape[0] // chunk
  last_ref[...] = jax.lax.fori_loop(0, count, step, first_ref[...])


def _backward_kernel(*refs, chunk, precision):
  inputs, starts_ref, do_ref, last_ref = refs[:5], *refs[5:8]
  *out_refs, first_ref = refs[8:]
  count = do_ref.shape[0] // chunk

  def step(j, d_state):
    i = count - 1 - j
    at = pl.ds(i * chunk, chunk)
    *gradients, before = gated_chunk.backward(
      _load(inputs, at), starts_ref[i], do_ref[at, :].astype(jnp.float32),
      d_state, precision,
    )  # fmt: skip
    for ref, x in zip(out_refs, gradients, strict=True):
      if len(ref.shape) == 1:
        ref[at] = x.reshape(chunk)
      else:
        ref[at, :] = x.astype(ref.dtype)
    return before

  first_ref[...] = jax.lax.fori_loop(0, count, step, last_ref[...])


def _whole(*shape):
  """All of one head's array (B, H, *shape)."""
  zeros = (0,) * len(shape)
  return pl.BlockSpec((None, None, *shape), lambda b, h, m: (b, h, *zeros))


def _columns(*shape):
  """One head's block of columns of (B, H, *shape without W, V)."""
  zeros = (0,) * (len(shape) - 1)
  return pl.BlockSpec((None, None, *shape), lambda b, h, m: (b, h, *zeros, m))


def _part(*shape):
  """One head's part of (M, B, H, *shape), from block m of columns."""
  zeros = (0,) * len(shape)
  return pl.BlockSpec(
    (None, None, None, *shape), lambda b, h, m: (m, b, h, *zeros)
  )


def _call(kernel, x, chunk, interpret, **options):
  (B, _, H, V), K = x.v.shape, x.q.shape[3]
  W = min(V, _COLUMNS)
  warps = 4 if K * W <= 64 * 64 else 8  # at most 32 registers for the state
  name = kernel.__name__.strip('_').replace('kernel', 'chunks')
  # The interpreter runs on a CPU, which has no TF32.
  full = jax.lax.Precision.HIGHEST if interpret else _FULL
  precision = gated_chunk.precision_of(x.q.dtype, full)
  return pl.pallas_call(
    functools.partial(kernel, chunk=chunk, precision=precision),
    grid=(B, H, V // W),
    compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
    cost_estimate=gated_chunk.cost(x, chunk, kernel is _backward_kernel),
    interpret=interpret,
    name=f'gated_scan_{name}',
    **options,
  )


def _inputs(x):
  """(arrays, heads before tokens, and their BlockSpecs)."""
  (_, T, G, K), (_, _, H, V) = x.q.shape, x.v.shape
  W = min(V, _COLUMNS)
  arrays = *(jnp.moveaxis(y, 1, 2) for y in x[:4]), x.segment
  g = _whole(T) if x.g.ndim == 3 else _whole(T, K)
  segment = pl.BlockSpec((None, T), lambda b, h, m: (b, 0))
  shared = pl.BlockSpec(
    (None, None, T, K), lambda b, h, m: (b, h // (H // G), 0, 0)
  )
  return arrays, [shared, shared, _columns(T, W), g, segment]


def forward(x, state, chunk, save, interpret=False):
  """As of gated_xla.py, for not float64; interpret: of pallas_call."""
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  N, W = T // chunk, min(V, _COLUMNS)
  arrays, specs = _inputs(x)
  shape = functools.partial(varying.result, x.q)
  out_specs = [_columns(T, W), _columns(K, W)]
  out_shape = [shape((B, H, T, V), x.v.dtype), shape(state.shape, jnp.float32)]
  if save:
    out_specs.append(_columns(N, K, W))
    out_shape.append(shape((B, H, N, K, V), jnp.float32))
  o, *states = _call(
    _forward_kernel, x, chunk, interpret, in_specs=[*specs, _columns(K, W)],
    out_specs=out_specs, out_shape=out_shape,
  )(*arrays, state)  # fmt: skip
  return jnp.moveaxis(o, 2, 1), *states, *([] if save else [None])


def backward(x, starts, cotangents, chunk, interpret=False):
  """(dq, dk, dv, dg, d_state) from those of o and of the last state."""
  do, d_state = cotangents
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  N, W = T // chunk, min(V, _COLUMNS)
  M = V // W
  arrays, specs = _inputs(x)
  shape = functools.partial(varying.result, x.q, dtype=jnp.float32)
  g = (T,) if x.g.ndim == 3 else (T, K)
  parts = [(T, K), (T, K), g]
  *parts_specs, g_spec = (_part(*size) for size in parts)
  *parts_shape, g_shape = (shape((M, B, H, *size)) for size in parts)
  parts_shape.append(shape((B, H, T, V)))
  state = _columns(K, W)
  dq, dk, dv, dg, first = _call(
    _backward_kernel, x, chunk, interpret,
    in_specs=[*specs, _columns(N, K, W), _columns(T, W), state],
    out_specs=[*parts_specs, _columns(T, W), g_spec, state],
    out_shape=[*parts_shape, g_shape, shape(d_state.shape)],
  )(*arrays, starts, jnp.moveaxis(do, 2, 1), d_state)  # fmt: skip
  gradients = dq.sum(0), dk.sum(0), dv, dg.sum(0)
  return *gated_chunk.gradients_of(x, gradients, 2), first
