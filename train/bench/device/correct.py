"""Are the kernels of a device right? Each against a plain loop in float64.

Every op of pallas_kernels runs on the device, uninterpreted, by its kernel for
the platform; where there is none, by the form that 'auto' takes, and the row
names it. Inputs are normal numbers, rounded to the dtype of the case first, so
that both sides have the same. Outputs, final states and every gradient are
compared, row by row (a row is the last axis):

    error = max over rows of |x - ref| / (|ref| + a tenth of the rms row)

so that one wrong row counts as it would alone, and a row that is nearly zero
has the scale of the others. float32 has the bound of rounding: a kernel that
rounds to TF32 or bfloat16 does not pass. XLA's forms are asked for float32 by
jax.default_matmul_precision. Legend: reference.py's.
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

# Largest error of an output and of a gradient. A rounding to bfloat16 is
# 2**-9 of a number; attention and scans round two or three times in between.
BOUNDS = dict(float32=(1e-4, 2e-4), bfloat16=(0.03, 0.06))
# dq of attention has do.v - sum_h o do, of a rounded o: what rounding leaves is
# a sixth of a small row, in XLA's form too (T 651).
CANCELS = 0.3
LOW, FULL = 'bfloat16', 'float32'


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


class WrongError(ValueError):
  """A result differs from its reference by more than the bound."""


def kernel_of(op: str, spec: Any = None) -> str:
  """The name of the op's kernel on this target, or 'auto'."""
  can = [n for n, _, reason in registry.explain(op, spec=spec) if not reason]
  return next((n for n in can if n.startswith('pallas_')), 'auto')


def form_of(names: Any) -> str:
  """What ran, of the names of implementations, in words."""
  text = ', '.join(names)
  return text if 'pallas_' in text else f'{text}, no kernel'


def _draw(seed, dtype, **shapes):
  """{name: normal numbers}, rounded to the dtype."""
  draw = np.random.default_rng(seed).normal
  return {n: jnp.asarray(draw(size=s), dtype) for n, s in shapes.items()}


def _resets(shape):
  out = np.zeros(shape, bool)
  out[:, shape[1] // 3] = out[-1, 0] = out[-1, shape[1] // 2 + 1] = True
  return out


MASKS = dict.fromkeys(('causal', 'window', 'segments'), {}) | {
  'full': dict(causal=False), 'softcap, sinks': dict(softcap=5.0)
}  # fmt: skip


def attention_problem(kind: str, quick: bool, dtype: str) -> Problem:
  """Forward and backward with grouped heads, of a length with a ragged end."""
  b, t, n, kv, h = (2, 24, 4, 2, 16) if quick else (2, 651, 4, 2, 64)
  window = t // 5 if kind == 'window' else 0
  mask = attention.Mask(scale=h**-0.5, window=window, **MASKS[kind])
  arrays = _draw(1, dtype, q=(b, t, n, h), k=(b, t, kv, h), v=(b, t, kv, h))
  segments = None
  if kind == 'segments':  # two documents, padding that sees nothing, a third
    rows = np.searchsorted([t // 4, t // 2, t // 2 + 5], np.arange(t), 'right')
    rows = np.array([1, 2, 0, 3], np.int32)[rows]
    segments = (np.stack([rows, rows[::-1]]),) * 2
  if 'sinks' in kind:
    arrays |= _draw(2, FULL, sinks=(n,))

  def call(q, k, v, sinks=None):
    given = None if segments is None else tuple(map(jnp.asarray, segments))
    impl = kernel_of('attention', attention.spec_of(q, k, mask, given, None))
    return attention.attention(q, k, v, mask, given, None, impl, sinks)

  loop = functools.partial(reference.attention, mask, segments)
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
    'attention', functools.partial(attention_problem, kind), (FULL, LOW)
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


def errors_of(problem: Problem) -> dict[str, float]:
  """{output, or 'd' and the argument: its error}."""
  names, arrays = list(problem.arrays), tuple(problem.arrays.values())
  wide = [np.asarray(x, np.float64) for x in arrays]
  wanted, back = problem.loop(*wide)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(problem.call, *arrays)
  cotangents = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]

  @jax.jit
  def run(arrays, cotangents):
    if back is None:
      return tuple(problem.call(*arrays)), ()
    out, pull = jax.vjp(lambda *x: tuple(problem.call(*x)), *arrays)
    return tuple(out), pull(tuple(cotangents))

  found, grads = jax.device_get(run(arrays, cotangents))
  out = {
    name: reference.error(x, y)
    for name, x, y in zip(problem.outputs, found, wanted, strict=True)
  }
  if back is not None:
    expected = back(*(np.asarray(c, np.float64) for c in cotangents))
    for name, x, y in zip(names, grads, expected, strict=True):
      out[f'd{name}'] = reference.error(x, y)
  return out


def bound_of(name: str, dtype: str, what: str) -> float:
  """The largest error of an output, or of the gradient 'd...'."""
  if (dtype, what) == (LOW, 'dq') and name.startswith('attention'):
    return CANCELS
  return BOUNDS[dtype][what.startswith('d')]


def check(name: str, dtype: str, work: Any) -> None:
  """Adds the worst error of a case to the report.

  Raises:
    WrongError: it is above its bound, which the report says too.
  """
  op, make, _ = CASES[name]
  precision = 'highest' if dtype == FULL else 'default'
  with jax.default_matmul_precision(precision), registry.recording() as ran:
    found = errors_of(make(work.quick, dtype))
  worst = max(found, key=lambda n: found[n] / bound_of(name, dtype, n))
  what = f'{name} {dtype} ({form_of(ran[op])}): error of {worst}, the worst of '
  what += ' '.join(found)
  bound = bound_of(name, dtype, worst)
  work.report.check(what, [found[worst]], bound, least=False, judged=True)
  if not found[worst] <= bound:
    raise WrongError(
      f'{name} {dtype}: {worst} is wrong by {found[worst]:.1e}, the bound is '
      f'{bound:.0e}'
    )


# What --quick computes in bfloat16 too.
BRIEF = ('attention causal', 'linear scan', 'gated scan by head')


def correct(quick: bool) -> dict[str, Callable]:
  """The cases of the part: every op, mask and dtype."""
  return {
    f'{name} {dtype}': functools.partial(check, name, dtype)
    for name, (_, _, dtypes) in CASES.items()
    for dtype in dtypes
    if dtype == FULL or not quick or name in BRIEF
  }
