"""The other kernels of a device beside XLA's form of each, and beside peers.

Protocol and ceilings are those of speed.py. Operations and bytes are the
least that an op needs: its arguments and results once, three times with its
gradients, recomputed ones not counted. In a step with gradients all of them are
used, and the next step begins with their sum.

Legend: B rows, T tokens, S slots, N query heads, K kv heads, H head size,
D model, F outputs, V vocabulary, E experts.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.pallas_kernels.matmul import grouped
from paraxis.pallas_kernels.matmul import quantized
from paraxis.pallas_kernels.scans import affine
from paraxis.pallas_kernels.scans import delta
from paraxis.pallas_kernels.scans import gated
from paraxis.pallas_kernels.scans import linear
from paraxis.pallas_kernels.scans import selective
from paraxis.train.bench import kernel_device
from paraxis.train.bench import measure
from paraxis.train.bench.device import report as device_report
from paraxis.train.bench.device import speed as device_speed

_FAULTS = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


class Speed(NamedTuple):
  """What is timed of one op.

  op: its name in the registry; '': peers alone. arrays: of a step; the first
  is what the next step begins with. step: implementation -> step. flops,
  moved: operations and bytes of one. peers: {what: step}, of others.
  """

  op: str
  arrays: tuple
  step: Callable
  flops: float
  moved: float
  peers: dict[str, Callable] = {}


def _draw(*shapes, dtype='bfloat16'):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  pairs = zip(keys, shapes, strict=True)
  return tuple(jax.random.normal(k, s, dtype) for k, s in pairs)


def _both(function, *arrays):
  """A step of the op and all its gradients, each of the first's shape."""
  out, back = jax.vjp(function, *arrays)
  total = 0.0
  for x in back(out):
    x = x.reshape(*x.shape, *[1] * (arrays[0].ndim - x.ndim))
    total += x.astype(jnp.float32)
  # All are used, or the compiler drops what makes them; none grows.
  return jnp.clip(total, -3, 3).astype(arrays[0].dtype)


def _decode_attention(quick):
  b, s, n, kv, h = (2, 32, 4, 2, 16) if quick else (64, 4096, 32, 8, 128)
  mask = attention_op.Mask(scale=h**-0.5)
  lengths = jnp.full(b, s, jnp.int32)

  def step(impl, q, k, v):
    return decode_attention.ragged(q, k, v, mask, lengths, impl)[0]

  def plain(q, k, v):
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(
      q, k, v, key_value_seq_lengths=lengths, scale=mask.scale
    )

  arrays = _draw((b, 1, n, h), (b, kv, s, h), (b, kv, s, h))
  moved = 2 * 2 * b * s * kv * h
  work = 4 * b * n * s * h
  return Speed(
    decode_attention.OP, arrays, step, work, moved, {'jax.nn': plain}
  )


def _gated(gradients, quick):
  b, t, n, h = (1, 32, 2, 16) if quick else (4, 8192, 16, 128)
  q, k, v = _draw(*[(b, t, n, h)] * 3)
  g = -jax.nn.softplus(_draw((b, t, n, h), dtype='float32')[0]) / 16

  def step(impl, q, k, v, g):
    call = lambda q, k, v, g: gated.gated_scan(q, k / h**0.5, v, g, impl=impl)[
      0
    ]
    return _both(call, q, k, v, g) if gradients else call(q, k, v, g)

  count = q.size
  times, moved = (3, 3) if gradients else (1, 1)
  return Speed(
    gated.OP, (q, k, v, g), step, times * 4 * count * h, moved * 12 * count
  )


def _delta(quick):
  b, t, n, h = (1, 32, 2, 16) if quick else (4, 8192, 16, 128)
  q, k, v = _draw(*[(b, t, n, h)] * 3)
  k = k / jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True)
  g, beta = _draw((b, t, n), (b, t, n), dtype='float32')
  rates = -jax.nn.softplus(g) / 16, jax.nn.sigmoid(beta)

  def step(impl, *arrays):
    return _both(lambda *a: delta.delta_scan(*a, impl=impl)[0], *arrays)

  arrays = q, k.astype(q.dtype), v, *rates
  return Speed(delta.OP, arrays, step, 18 * q.size * h, 3 * 8 * q.size)


def _linear(gradients, quick):
  b, t, d = (1, 32, 16) if quick else (4, 8192, 4096)
  x, a = _draw((b, t, d), (b, t, d), dtype='float32')

  def step(impl, b, a):
    call = lambda b, a: linear.linear_scan(a, b, impl=impl)[0]
    return _both(call, b, a) if gradients else jnp.clip(call(b, a), -3, 3)

  moved = (9 if gradients else 3) * 4 * x.size
  work = (6 if gradients else 2) * x.size
  return Speed(linear.OP, (x, jax.nn.sigmoid(a)), step, work, moved)


def _selective(quick):
  b, t, f, s = (1, 32, 16, 4) if quick else (2, 4096, 2048, 16)
  x, dt, shared = _draw((b, t, f), (b, t, f), (b, t, 2, s), dtype='float32')
  rate = -jnp.exp(_draw((f, s), dtype='float32')[0])

  def step(impl, x, dt):
    call = lambda x, dt: selective.selective_scan(
      x, dt, shared, rate, impl=impl
    )[0]
    return _both(call, x, dt)

  arrays = x, jax.nn.softplus(dt)
  return Speed(selective.OP, arrays, step, 21 * x.size * s, 3 * 3 * 4 * x.size)


def _affine(quick):
  """The scan in each iteration of Newton's method, two numbers a channel."""
  b, t, d = (1, 32, 16) if quick else (2, 8192, 1024)
  j, x, state = _draw((b, t, 2, 2, d), (b, t, 2, d), (b, 2, d), dtype='float32')

  def step(impl, x, j):
    h = affine.affine_scan(j, x, state, impl=impl)
    return jnp.clip(h, -3, 3)

  moved = 4 * (j.size + 2 * x.size)
  return Speed(affine.OP, (x, j / 4), step, 4 * x.size, moved)


def _int4(quick):
  t, d = (4, 128) if quick else (16, 8192)
  x, w = _draw((t, d), (d, d))
  q, scale = quantized.quantize(w / d**0.5)
  q = quantized.pack(q)  # as decoding keeps it

  def step(impl, x, q, scale, w):
    return quantized.quantized_matmul(x, q, scale, impl)

  plain = lambda x, q, scale, w: x @ w
  arrays = x, q, scale, (w / d**0.5).astype(x.dtype)
  moved = d * d / 2 + 4 * scale.size
  peers = {'bfloat16 product': plain}
  return Speed(quantized.OP, arrays, step, 2 * t * d * d, moved, peers)


def _cross_entropy(quick):
  t, d, v = (16, 16, 64) if quick else (8192, 2048, 32768)
  x, w = _draw((t, d), (v, d))
  targets = jnp.arange(t, dtype=jnp.int32) * 7 % v

  def both(nll, x, w):
    out, back = jax.vjp(lambda x, w: nll(x, w).mean(), x, w)
    dx, dw = back(jnp.ones_like(out))
    return jnp.clip(x + dx + dw.sum(0), -3, 3).astype(x.dtype)

  def step(impl, x, w):
    nll = lambda x, w: cross_entropy.linear_cross_entropy(
      x, w, targets, impl=impl
    )[0]
    return both(nll, x, w)

  def dense(x, w):
    z = jnp.einsum('td,vd->tv', x, w, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(z, 1) - z[jnp.arange(t), targets]

  arrays = x, (w / d**0.5).astype(x.dtype)
  peers = {'dense logits': functools.partial(both, dense)}
  moved = 3 * 2 * (v * d + t * d)  # read twice, and gradients written
  return Speed(cross_entropy.OP, arrays, step, 6 * t * v * d, moved, peers)


def _grouped(quick):
  s, d, e = (32, 16, 2) if quick else (8192, 2048, 8)
  x, w = _draw((s, d), (e, d, d))
  size = grouped.block(s, e)
  runs = jnp.full(e, s // e // size * size, jnp.int32)

  def step(impl, x, w):
    y = grouped.product(x, w, runs, size, jnp.float32, impl)
    return jnp.clip(y, -3, 3).astype(x.dtype)

  arrays = x, (w / d**0.5).astype(x.dtype)
  moved = 2 * (2 * s * d + e * d * d)
  return Speed(grouped.OP, arrays, step, 2 * s * d * d, moved)


KERNELS = {
  'decode attention': _decode_attention,
  'gated scan': functools.partial(_gated, False),
  'gated scan, gradients': functools.partial(_gated, True),
  'linear scan': functools.partial(_linear, False),
  'linear scan, gradients': functools.partial(_linear, True),
  "affine scan of Newton's method": _affine,
  'int4 product': _int4,
  'cross-entropy, gradients': _cross_entropy,
  'selective scan, gradients': _selective,
  'delta rule, gradients': _delta,
  'grouped product': _grouped,
}


def _forms(op):
  """Implementations that run here, the chosen one first; why others do not."""
  found = registry.explain(op)
  can = [n for n, _, why in found if not why]
  ours = next(n for n, first, _ in found if first)
  refused = {n: why for n, _, why in found if why}
  # Token by token is a launch a token: of use on a CPU alone.
  return [n for n in can if n != 'loop' or n == ours], refused


def _candidates(name, speed, work):
  """{row: candidate of measure.interleave} of what compiles here."""
  forms, refused = _forms(speed.op)
  notes = work.report.notes
  notes += [f'{name}: {n} is not available: {w}' for n, w in refused.items()]
  steps = {n: functools.partial(speed.step, n) for n in forms} | speed.peers
  repeats = device_speed.TINY.repeats if work.quick else kernel_device.REPEATS
  made = {}
  for form, step in steps.items():
    row = f'{name}: {form}'
    try:
      made[row] = kernel_device.timed(step, speed.arrays, repeats)
    except _FAULTS as e:
      if form == forms[0]:
        raise
      notes.append(f'{row} did not run: {" ".join(str(e).split())[:200]}')
  return made


def _kernel(name, work):
  """Times, rates and shares of one op; the ratio to XLA's form and peers."""
  speed, report = KERNELS[name](work.quick), work.report
  report.setup = f'{registry.current_target()}, bfloat16 where it is taken'
  made = _candidates(name, speed, work)
  times = measure.interleave(made, work.rounds, say=work.say)
  report.add(times)
  tops = {
    row: device_report.median(work.folder, 'ceilings', row)
    for row in (device_speed.PRODUCT, device_speed.COPY)
  }
  kinds = ((speed.flops, 1e12, 'TF/s'), (speed.moved, 1e9, 'GB/s'))
  for row, seconds in times.items():
    for (work_done, unit, text), (top, most) in zip(
      kinds, tops.items(), strict=True
    ):
      rate = [work_done / s / unit for s in seconds]
      report.add({f'{row}, {text}': rate}, text)
      if most:
        report.add({f'{row} / {top}': [x / most for x in rate]}, 'share')
  mine, *others = times
  ours = mine.removeprefix(f'{name}: ')
  for row in others:
    ratios = measure.ratios(times[row], times[mine])
    report.check(f'speed of {ours} / {row}', ratios, 1.0)
  copy = tops[device_speed.COPY]
  if speed.op == decode_attention.OP and copy:
    goal = f'{device_report.GOAL}decode attention: bytes read / copy'
    share = [speed.moved / s / 1e9 / copy for s in times[mine]]
    report.check(goal, share, device_speed.READ_GOAL)


def kernels(quick: bool) -> dict[str, Callable]:
  """Cases of the part: an op each."""
  del quick
  return {name: functools.partial(_kernel, name) for name in KERNELS}
