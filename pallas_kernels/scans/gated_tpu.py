"""Gated scan on a TPU: one program a chunk, the state in on-chip memory.

The grid is (B, H, N). Chunks of a head run in order (backwards for the
gradient), so the state S and its cotangent stay in VMEM scratch and reach HBM
once per chunk, as what the gradient starts from, and only if one is wanted.
Inputs are read and outputs written once. All sums are float32; products of
bfloat16 inputs are those of the hardware, of float32 inputs full float32.

Legend: B batch, T tokens, H heads, K key size, V value size, C tokens of a
chunk, N = T / C.
"""

import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import gated_chunk

CHUNK = 64
DTYPES = 'bfloat16', 'float32'
_MOST = 256  # of K, V and C: fits VMEM and compiles


def limits(spec, target):
  """None, or what else the kernels cannot take (registry.kernel)."""
  del target
  for name, size in (
    ('key size', spec.q[3]), ('value size', spec.values), ('chunk', spec.chunk)
  ):  # fmt: skip
    if size > _MOST:
      return f'{name} {size} is above {_MOST}'
  return None


def _load(q_ref, k_ref, v_ref, g_ref, segment_ref):
  refs = q_ref, k_ref, v_ref, g_ref, segment_ref
  return gated_chunk.GatedTokens(*(r[...].astype(jnp.float32) for r in refs))


def _forward_kernel(*refs, precision):
  *inputs, first_ref, o_ref, last_ref = refs[:8]
  starts_ref, state_ref = refs[8:-1], refs[-1]
  i = pl.program_id(2)

  @pl.when(i == 0)
  def _():
    state_ref[...] = first_ref[...]

  for ref in starts_ref:
    ref[...] = state_ref[...]
  o, after = gated_chunk.forward(_load(*inputs), state_ref[...], precision)
  o_ref[...] = o.astype(o_ref.dtype)
  state_ref[...] = after

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    last_ref[...] = after


def _backward_kernel(*refs, precision):
  *inputs, start_ref, do_ref, last_ref = refs[:8]
  *out_refs, first_ref, state_ref = refs[8:]
  i = pl.program_id(2)

  @pl.when(i == 0)
  def _():
    state_ref[...] = last_ref[...]

  *gradients, before = gated_chunk.backward(
    _load(*inputs), start_ref[...], do_ref[...].astype(jnp.float32),
    state_ref[...], precision,
  )  # fmt: skip
  for ref, x in zip(out_refs, gradients, strict=True):
    ref[...] = x.astype(ref.dtype)
  state_ref[...] = before

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    first_ref[...] = before


def _arrays(x, chunk):
  """Tokens as the kernel reads them: heads before tokens, rows of chunks."""
  swap = lambda y: jnp.moveaxis(y, 1, 2)
  q, k, v, g = map(swap, x[:4])
  if g.ndim == 3:  # one per head
    g = g.reshape(*g.shape[:2], -1, 1, chunk)
  segment = x.segment.astype(jnp.float32)
  return q, k, v, g, segment.reshape(len(segment), -1, 1, chunk)


def _specs(x, chunk, at):
  """BlockSpecs of (q, k, v, g, segment), of do, starts and one state.

  at: the chunk of grid step i.
  """
  (_, _, G, K), (_, _, H, V) = x.q.shape, x.v.shape
  tokens = lambda size, of=lambda h: h: pl.BlockSpec(
    (None, None, chunk, size), lambda b, h, i: (b, of(h), at(i), 0)
  )
  shared = tokens(K, lambda h: h // (H // G))
  g = tokens(K)
  if x.g.ndim == 3:
    g = pl.BlockSpec(
      (None, None, None, 1, chunk), lambda b, h, i: (b, h, at(i), 0, 0)
    )
  segment = pl.BlockSpec(
    (None, None, 1, chunk), lambda b, h, i: (b, at(i), 0, 0)
  )
  inputs = [shared, shared, tokens(V), g, segment]
  starts = pl.BlockSpec(
    (None, None, None, K, V), lambda b, h, i: (b, h, at(i), 0, 0)
  )
  state = pl.BlockSpec((None, None, K, V), lambda b, h, i: (b, h, 0, 0))
  return inputs, tokens(V), starts, state


def _call(kernel, x, chunk, interpret, **options):
  """pallas_call over (B, H, N) with one (K, V) scratch."""
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  semantics = 'parallel', 'parallel', 'arbitrary'
  name = kernel.__name__.strip('_').replace('kernel', 'chunks')
  gradient = kernel is _backward_kernel
  return pl.pallas_call(
    functools.partial(kernel, precision=gated_chunk.precision_of(x.q.dtype)),
    grid=(B, H, T // chunk),
    scratch_shapes=[pltpu.VMEM((K, V), jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    cost_estimate=gated_chunk.cost(x, chunk, gradient),
    interpret=interpret,
    name=f'gated_scan_{name}',
    **options,
  )


def forward(x, state, chunk, save, interpret=False):
  """As of gated_xla.py, for float32 or bfloat16; interpret: of pallas_call."""
  (B, T, H, V), K = x.v.shape, x.q.shape[3]
  inputs, tokens, starts, one = _specs(x, chunk, lambda i: i)
  shape = functools.partial(varying.result, x.q)
  out_specs = [tokens, one]
  out_shape = [shape((B, H, T, V), x.v.dtype), shape(state.shape, jnp.float32)]
  if save:
    out_specs.append(starts)
    out_shape.append(shape((B, H, T // chunk, K, V), jnp.float32))
  o, *states = _call(
    _forward_kernel, x, chunk, interpret,
    in_specs=[*inputs, one], out_specs=out_specs, out_shape=out_shape,
  )(*_arrays(x, chunk), state)  # fmt: skip
  return jnp.moveaxis(o, 2, 1), *states, *([] if save else [None])


def backward(x, starts, cotangents, chunk, interpret=False):
  """(dq, dk, dv, dg, d_state) from those of o and of the last state."""
  do, d_state = cotangents
  (B, T, H, _), K = x.v.shape, x.q.shape[3]
  inputs, tokens, start, one = _specs(x, chunk, lambda i: T // chunk - 1 - i)
  arrays = _arrays(x, chunk)
  like = functools.partial(varying.result, x.q)
  # Of every head; those of a group are then summed, in float32.
  shared = x.q.dtype if x.q.shape[2] == H else jnp.float32
  out_shape = [like((B, H, T, K), shared)] * 2
  out_shape += [like(y.shape, y.dtype) for y in arrays[2:4]]
  out_shape.append(like(d_state.shape, jnp.float32))
  own = pl.BlockSpec(
    (None, None, chunk, K), lambda b, h, i: (b, h, T // chunk - 1 - i, 0)
  )
  *gradients, first = _call(
    _backward_kernel, x, chunk, interpret,
    in_specs=[*inputs, start, tokens, one],
    out_specs=[own, own, *inputs[2:4], one], out_shape=out_shape,
  )(*arrays, starts, jnp.moveaxis(do, 2, 1), d_state)  # fmt: skip
  if x.g.ndim == 3:
    gradients[3] = gradients[3].reshape(B, H, T)
  return *gated_chunk.gradients_of(x, gradients, 2), first
