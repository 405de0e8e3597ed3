"""The problems of `paraxis bench device`: one call of every op, and its loop.

Each is sized for all that a kernel may treat apart: ragged ends, rows without
tokens, resets, heads that share keys. An op runs by its kernel for the
platform; where there is none, by the form that 'auto' takes. Legend:
reference.py's.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.pallas_kernels.matmul import grouped
from paraxis.pallas_kernels.matmul import quantized
from paraxis.pallas_kernels.scans import affine
from paraxis.pallas_kernels.scans import delta
from paraxis.pallas_kernels.scans import gated
from paraxis.pallas_kernels.scans import linear
from paraxis.pallas_kernels.scans import newton
from paraxis.pallas_kernels.scans import selective
from paraxis.train.bench.device import reference as reference

LOW, HALF, FULL = 'bfloat16', 'float16', 'float32'


class Problem(NamedTuple):
  """One call of an op, and what it must give.

  arrays: {name: float array in the dtype of the op}, differentiated in order.
  call: of the arrays, -> tuple of outputs. loop: of the same in float64.
  outputs: their names.
  """

  arrays: dict[str, Any]
  call: Callable
  loop: Callable
  outputs: tuple[str, ...]


def kernel_of(op: str, spec: Any = None, begins: str = 'pallas_') -> str:
  """The name of the op's kernel on this target, or 'auto'.

  begins: what the name begins with.
  """
  can = [n for n, _, reason in registry.explain(op, spec=spec) if not reason]
  return next((n for n in can if n.startswith(begins)), 'auto')


def _draw(seed, dtype, **shapes):
  """{name: normal numbers}, rounded to the dtype."""
  draw = np.random.default_rng(seed).normal
  return {n: jnp.asarray(draw(size=s), dtype) for n, s in shapes.items()}


def _resets(shape):
  out = np.zeros(shape, bool)
  out[:, shape[1] // 3] = out[-1, 0] = out[-1, shape[1] // 2 + 1] = True
  return out


# kind of attention -> fields of its mask
MASKS = dict.fromkeys(('causal', 'window', 'segments'), {}) | {
  'full': dict(causal=False), 'softcap, sinks': dict(softcap=5.0),
  'order': {}, 'fewer keys': dict(causal=False), 'heads of 128': {},
  'Triton': {},
}  # fmt: skip
# Of those that are not for float32 and bfloat16: for Hopper GPUs 'auto' has a
# kernel of these two dtypes, beside that of Triton.
DTYPES = {'heads of 128': (HALF,), 'Triton': (LOW,)}


def attention_problem(kind: str, quick: bool, dtype: str) -> Problem:
  """Forward and backward with grouped heads, of a length with a ragged end."""
  b, t, n, kv, h = (2, 24, 4, 2, 16) if quick else (2, 651, 4, 2, 64)
  h = 128 if kind == 'heads of 128' else h
  s = t // 3 if kind == 'fewer keys' else t
  window = t // 5 if kind == 'window' else 0
  mask = attention.Mask(scale=h**-0.5, window=window, **MASKS[kind])
  arrays = _draw(1, dtype, q=(b, t, n, h), k=(b, s, kv, h), v=(b, s, kv, h))
  begins = 'pallas_gpu' if kind == 'Triton' else 'pallas_'
  segments = order = None
  if kind == 'order':  # tokens of a row in any order
    places = np.random.default_rng(20).permuted([np.arange(t)] * b, axis=1)
    order = (places.astype(np.int32),) * 2
  if kind == 'segments':  # two documents, padding that sees nothing, a third
    rows = np.searchsorted([t // 4, t // 2, t // 2 + 5], np.arange(t), 'right')
    rows = np.array([1, 2, 0, 3], np.int32)[rows]
    segments = (np.stack([rows, rows[::-1]]),) * 2
  if 'sinks' in kind:
    arrays |= _draw(2, FULL, sinks=(n,))

  def call(q, k, v, sinks=None):
    documents, at = (
      p and tuple(map(jnp.asarray, p)) for p in (segments, order)
    )
    spec = attention.spec_of(q, k, mask, documents, at)
    impl = kernel_of('attention', spec, begins)
    return attention.attention(q, k, v, mask, documents, at, impl, sinks)

  loop = functools.partial(reference.attention, mask, segments, order)
  return Problem(arrays, call, loop, ('o', 'lse'))


def ragged_problem(quick, dtype, own=False):
  """One query a row, rows of unequal length, one empty; own: and its key."""
  s, h = (24, 16) if quick else (1024, 64)
  n = np.array([1, s - s // 3, s, 0], np.int32)
  arrays = _draw(3, dtype, q=(4, 1, 4, h), k=(4, 2, s, h), v=(4, 2, s, h))
  if own:
    arrays |= _draw(19, dtype, own_k=(4, 1, 2, h), own_v=(4, 1, 2, h))
  mask = attention.Mask(scale=h**-0.5)

  def call(q, k, v, *x):
    seen = jnp.array(reference.SEEN)[:, None]
    mine = decode_attention.Own(x[0], x[1], seen) if x else None
    given = q, k, v, mask, jnp.asarray(n), kernel_of(decode_attention.OP)
    return decode_attention.ragged(*given, own=mine)

  loop = functools.partial(reference.ragged, mask.scale, n)
  return Problem(arrays, call, loop, ('o', 'lse'))


own_problem = functools.partial(ragged_problem, own=True)


def prefix_problem(quick, dtype):
  """Rows with a prefix in common, which is read once."""
  p, s, h = (16, 8, 16) if quick else (512, 256, 64)
  lengths = np.array([1, s, 0, s // 2], np.int32)
  own = (4, 2, s, h)
  arrays = _draw(4, dtype, q=(4, 1, 4, h), k=(p, 2, h), v=(p, 2, h))
  arrays |= _draw(5, dtype, own_k=own, own_v=own)
  mask = attention.Mask(scale=h**-0.5)

  def call(q, k, v, own_k, own_v):
    own, impl = (own_k, own_v), kernel_of(decode_attention.OP)
    n = jnp.asarray(lengths)
    return decode_attention.shared_prefix(q, (k, v), own, mask, n, impl)

  loop = functools.partial(reference.shared_prefix, mask.scale, lengths)
  return Problem(arrays, call, loop, ('o', 'lse'))


def _scan_arrays(quick, dtype):
  t, h = (20, 16) if quick else (300, 64)
  arrays = _draw(6, dtype, q=(2, t, 1, h), k=(2, t, 1, h), v=(2, t, 2, h))
  arrays['k'] = arrays['k'] / h**0.5
  return arrays, _resets((2, t))


def gated_problem(per_key, quick, dtype):
  """Decays of a key or of a head, resets, an initial state."""
  arrays, reset = _scan_arrays(quick, dtype)
  b, t, heads, h = arrays['v'].shape
  shape = (b, t, heads, h) if per_key else (b, t, heads)
  extra = _draw(7, FULL, g=shape, state=(b, heads, h, h))
  extra['g'] = -jax.nn.softplus(extra['g']) / 4

  def call(q, k, v, g, state):
    impl = kernel_of(gated.OP)
    return gated.gated_scan(q, k, v, g, jnp.asarray(reset), state, impl=impl)

  loop = functools.partial(reference.gated_scan, reset)
  return Problem(arrays | extra, call, loop, ('o', 'state'))


def delta_problem(quick, dtype):
  """The gated delta rule; keys of length 1."""
  arrays, reset = _scan_arrays(quick, dtype)
  b, t, heads, h = arrays['v'].shape
  k = arrays['k'].astype(FULL)
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  arrays['k'] = k.astype(dtype)
  row, state = (b, t, heads), (b, heads, h, h)
  extra = _draw(8, FULL, g=row, beta=row, state=state)
  extra['g'] = -jax.nn.softplus(extra['g']) / 4
  extra['beta'] = jax.nn.sigmoid(extra['beta'])

  def call(q, k, v, g, beta, state):
    impl = kernel_of(delta.OP)
    given = q, k, v, g, beta, jnp.asarray(reset), state
    return delta.delta_scan(*given, impl=impl)

  loop = functools.partial(reference.delta_scan, reset)
  return Problem(arrays | extra, call, loop, ('o', 'state'))


def linear_problem(quick, dtype):
  """Factors in 0 .. 1, resets, an initial state, widths of no whole tile."""
  t, d = (20, 24) if quick else (1003, 392)
  arrays = _draw(9, dtype, a=(2, t, d), b=(2, t, d))
  arrays['a'] = jax.nn.sigmoid(arrays['a'].astype(FULL)).astype(dtype)
  arrays |= _draw(10, FULL, state=(2, d))
  reset = _resets((2, t))

  def call(a, b, state):
    impl = kernel_of(linear.OP)
    return linear.linear_scan(a, b, jnp.asarray(reset), state, impl=impl)

  loop = functools.partial(reference.linear_scan, reset)
  return Problem(arrays, call, loop, ('h', 'state'))


def affine_problem(quick, dtype):
  """Two coupled numbers a channel."""
  t, d = (12, 8) if quick else (256, 128)
  arrays = _draw(11, dtype, j=(2, t, 2, 2, d), b=(2, t, 2, d), state=(2, 2, d))
  arrays['j'] = arrays['j'] / 3
  call = lambda *given: (affine.affine_scan(*given),)
  return Problem(arrays, call, reference.affine_scan, ('h',))


def selective_problem(quick, dtype):
  """Mamba's scan, channels and chunks of no whole tile."""
  t, f, s = (20, 8, 4) if quick else (500, 64, 16)
  arrays = _draw(12, dtype, x=(2, t, f), dt=(2, t, f), shared=(2, t, 2, s))
  arrays |= _draw(21, dtype, rate=(f, s), state=(2, f, s))
  arrays['dt'] = jax.nn.softplus(arrays['dt'])
  arrays['rate'] = -jnp.exp(arrays['rate'] / 2)
  reset = jnp.asarray(_resets((2, t)))

  def call(x, dt, shared, rate, state):
    given, impl = (x, dt, shared, rate, reset), kernel_of(selective.OP)
    return selective.selective_scan(*given, state, impl=impl)

  loop = functools.partial(reference.selective_scan, np.asarray(reset))
  return Problem(arrays, call, loop, ('y', 'state'))


def newton_problem(quick, dtype):
  """h = tanh(w h + x), all tokens at once by Newton's method."""
  t, d = (12, 8) if quick else (256, 128)
  arrays = _draw(13, dtype, w=(1, d), x=(2, t, 1, d), state=(2, 1, d))
  arrays['w'] = arrays['w'] / 2

  def call(w, x, state):
    cell = lambda w, h, x: jnp.tanh(w * h + x)
    impl = kernel_of(linear.OP)
    return newton.newton_scan(cell, w, x, None, state, impl=impl)[:1]

  return Problem(arrays, call, reference.tanh_cell, ('h',))


def cross_entropy_problem(quick, dtype):
  """A vocabulary that is no multiple of a chunk."""
  t, d, v = (12, 16, 40) if quick else (300, 128, 5000)
  arrays = _draw(14, dtype, x=(t, d), w=(v, d))
  arrays['w'] = arrays['w'] / 8
  targets = np.random.default_rng(15).integers(0, v, t).astype(np.int32)

  def call(x, w):
    given = x, w, jnp.asarray(targets)
    return cross_entropy.linear_cross_entropy(*given, chunk=v // 3)

  loop = functools.partial(reference.cross_entropy, targets)
  return Problem(arrays, call, loop, ('nll', 'lse'))


def int4_problem(quick, dtype):
  """Weights of 4 bits in groups of 128."""
  t, d, f = (4, 128, 24) if quick else (16, 1024, 2048)
  arrays = _draw(16, dtype, x=(t, d))
  q, scale = quantized.quantize(_draw(17, FULL, w=(d, f))['w'] / d**0.5)

  def call(x, scale):
    impl = kernel_of(quantized.OP)
    return (quantized.quantized_matmul(x, quantized.pack(q), scale, impl),)

  loop = functools.partial(reference.int4_product, np.asarray(q, np.int32))
  return Problem(arrays | dict(scale=scale), call, loop, ('y',))


def grouped_problem(quick, dtype):
  """Runs of unequal length, one of them empty, with the weights' gradient."""
  block, d, f = (16, 16, 24) if quick else (128, 120, 200)
  sizes = np.array([2, 0, 1, 3], np.int32) * block
  arrays = _draw(18, dtype, x=(int(sizes.sum()), d), w=(4, d, f))
  arrays['w'] = arrays['w'] / d**0.5

  def call(x, w):
    runs, impl = jnp.asarray(sizes), kernel_of(grouped.OP)
    y = grouped.product(x, w, runs, block, jnp.float32, impl)
    given = x, y.astype(x.dtype), runs, block, len(w), jnp.float32
    return y, grouped.gradient(*given, impl)

  loop = functools.partial(reference.grouped_product, sizes)
  return Problem(arrays, call, loop, ('y', 'dw'))


# case -> (ops whose kernel runs, problem of (quick, dtype), dtypes)
CASES = {
  f'attention {kind}': (
    'attention', functools.partial(attention_problem, kind),
    DTYPES.get(kind, (FULL, LOW)),
  )
  for kind in MASKS
} | {
  'decode attention ragged': (decode_attention.OP, ragged_problem, (FULL, LOW)),
  'decode attention own': (decode_attention.OP, own_problem, (FULL, LOW)),
  'decode attention prefix': (decode_attention.OP, prefix_problem, (FULL, LOW)),
  'gated scan by key': (
    gated.OP, functools.partial(gated_problem, True), (FULL, LOW)
  ),
  'gated scan by head': (
    gated.OP, functools.partial(gated_problem, False), (FULL, LOW)
  ),
  'linear scan': (linear.OP, linear_problem, (FULL, LOW)),
  'selective scan': (selective.OP, selective_problem, (FULL,)),
  'Newton': (linear.OP, newton_problem, (FULL,)),
  'affine scan': (affine.OP, affine_problem, (FULL,)),
  'delta rule': (delta.OP, delta_problem, (FULL, LOW)),
  'int4 product': (quantized.OP, int4_problem, (FULL, LOW)),
  'cross-entropy': (cross_entropy.OP, cross_entropy_problem, (FULL, LOW)),
  'grouped product': (grouped.OP, grouped_problem, (FULL, LOW)),
}  # fmt: skip
