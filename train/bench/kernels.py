"""Bench of the ops: forms against forms on a CPU, static schedules for TPUs.

On a CPU, XLA forms against what XLA makes of the plain definition, in turn, in
CPU-seconds: kernels for accelerators do not run there, and an interpreter's
time would say nothing. Where libtpu is installed, bundles of the attention
kernels beside jax's splash (kernel_schedules.py): static, not measured. Where
an accelerator is, its time instead of both (kernel_device.py).

A ratio below 1.5 on shared cores is no difference. The targets are what kernels
and forms must keep; where the plain form is cheaper on a CPU and takes more
memory, the target bounds how much slower ours may be.

Legend: B rows, T tokens, S slots, N query heads, K kv heads, H head size,
D model, F outputs, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective as selective_scan
from paraxis.sharding.meter import aot
from paraxis.train.bench import kernel_device
from paraxis.train.bench import kernel_schedules
from paraxis.train.bench import measure

# Topology, tokens of a block; targets: splash's bundles, for each kind.
SCHEDULES = (('v5e:1x1', 512),)
BOUNDS = dict(full=0.95, partial=1.25)
GAP = 'largest difference of results'


class Comparison(NamedTuple):
  """One op, two forms (plain, ours), the same arrays; target: plain / ours."""

  op: str
  names: tuple[str, str]
  forms: tuple
  arrays: tuple
  target: float


def _draw(*shapes, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def _gradients(function):
  """function(*arrays) -> (result, gradients for the cosine of the result)."""

  def both(*arrays):
    out, back = jax.vjp(function, *arrays)
    return out, back(jax.tree.map(jnp.cos, out))

  return both


def _attention(length, target):
  mask = attention.Mask(scale=64**-0.5)
  dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
  ours = lambda q, k, v: attention.attention(q, k, v, mask)[0]
  arrays = _draw(*[(1, length, 4, 64)] * 3)
  return Comparison(
    f'attention T{length}, gradients', ('jax.nn', 'blocks'),
    (_gradients(dense), _gradients(ours)), arrays, target,
  )  # fmt: skip


def _packed_attention(length, documents):
  """Documents packed into a row beside the same documents, each a row."""
  mask = attention.Mask(scale=64**-0.5)
  segments = jnp.arange(length)[None] * documents // length + 1
  shape = 1, length, 4, 64

  def apart(q, k, v):
    one = jnp.ones((documents, length // documents), jnp.int32)
    q, k, v = (x.reshape(*one.shape, *x.shape[2:]) for x in (q, k, v))
    return attention.attention(q, k, v, mask, (one, one))[0].reshape(shape)

  def ours(q, k, v):
    return attention.attention(q, k, v, mask, (segments, segments))[0]

  return Comparison(
    f'{documents} packed documents T{length}, gradients', ('rows', 'packed'),
    (_gradients(apart), _gradients(ours)),
    _draw(*[shape] * 3), 0.67,
  )  # fmt: skip


def _gated_scan(length):
  def form(impl, q, k, v, g):
    return gated_scan.gated_scan(q, k, v, -jax.nn.softplus(g) / 16, impl=impl)

  return Comparison(
    f'gated scan T{length}, gradients', ('loop', 'chunks'),
    tuple(_gradients(functools.partial(form, i)) for i in ('loop', 'xla')),
    _draw(*[(1, length, 4, 64)] * 4), 4.0,
  )  # fmt: skip


def _delta_scan(length):
  def form(impl, q, k, v, g, beta):
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return delta_scan.delta_scan(
      q, k, v, -jax.nn.softplus(g) / 16, jax.nn.sigmoid(beta), impl=impl
    )[0]

  keys, values, rates = (1, length, 2, 64), (1, length, 4, 64), (1, length, 4)
  return Comparison(
    f'delta rule T{length}, gradients', ('loop', 'chunks'),
    tuple(_gradients(functools.partial(form, i)) for i in ('loop', 'xla')),
    _draw(keys, keys, values, rates, rates), 2.0,
  )  # fmt: skip


def _linear_scan(length):
  def form(impl, a, b):
    return linear_scan.linear_scan(jax.nn.sigmoid(a), b, impl=impl)

  return Comparison(
    f'linear scan T{length}, gradients', ('associative', 'loop'),
    tuple(_gradients(functools.partial(form, i)) for i in ('xla', 'loop')),
    _draw(*[(4, length, 256)] * 2), 1.5,
  )  # fmt: skip


def _selective_scan(length):
  """Beside two nested loops, of which the inner one is computed again."""
  chunk, width, state = 64, 256, 16

  def loops(x, dt, shared, rate):
    def token(h, one):
      x, dt, (b, c) = one
      h = jnp.exp(dt[:, None] * rate) * h + (dt * x)[:, None] * b
      return h, h @ c

    inner = jax.checkpoint(lambda h, some: jax.lax.scan(token, h, some))
    rows = (x[0], dt[0], shared[0])
    parts = (y.reshape(-1, chunk, *y.shape[1:]) for y in rows)
    _, y = jax.lax.scan(inner, jnp.zeros((width, state)), tuple(parts))
    return y.reshape(x.shape)

  def form(run, x, dt, shared, rate):
    return run(x, jax.nn.softplus(dt), shared, -jnp.exp(rate))

  ours = lambda *arrays: selective_scan.selective_scan(*arrays)[0]
  rows = (1, length, width)
  return Comparison(
    f'selective scan T{length}, gradients', ('nested loops', 'ours'),
    tuple(_gradients(functools.partial(form, f)) for f in (loops, ours)),
    _draw(rows, rows, (1, length, 2, state), (width, state)), 1.0,
  )  # fmt: skip


def _decode_attention(slots):
  mask = attention.Mask(scale=64**-0.5)
  lengths = jnp.full(4, slots, jnp.int32)

  def plain(q, k, v):
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(
      q, k, v, key_value_seq_lengths=lengths, scale=mask.scale
    )

  def ours(q, k, v):
    return decode_attention.ragged(q, k, v, mask, lengths)[0]

  cache = (4, 2, slots, 64)
  return Comparison(
    f'decode attention S{slots}', ('jax.nn', 'ours'),
    (plain, ours), _draw((4, 1, 8, 64), cache, cache), 1.0,
  )  # fmt: skip


def _cross_entropy(tokens, vocab):
  targets = jnp.asarray(np.random.default_rng(1).integers(0, vocab, tokens))

  def plain(x, w):
    z = x @ w.T
    picked = jnp.take_along_axis(z, targets[:, None], 1)[:, 0]
    return jax.nn.logsumexp(z, 1) - picked

  def ours(x, w):
    return cross_entropy.linear_cross_entropy(x, w, targets)[0]

  x, w = _draw((tokens, 128), (vocab, 128))
  return Comparison(
    f'cross-entropy T{tokens} V{vocab}, gradients', ('dense', 'chunks'),
    (_gradients(plain), _gradients(ours)), (x, w / 8), 0.8,
  )  # fmt: skip


def _quantized_matmul(width, features):
  x, w = _draw((16, width), (width, features))
  q, scale = quantized_matmul.quantize(w)
  w = quantized_matmul.dequantize(q, scale)
  ours = lambda x, w, q, scale: quantized_matmul.quantized_matmul(x, q, scale)
  return Comparison(
    f'int4 product {width} x {features}', ('float32', 'int4'),
    (lambda x, w, q, scale: x @ w, ours), (x, w, q, scale), 0.4,
  )  # fmt: skip


def comparisons(quick):
  """Every `Comparison`, made one at a time."""
  yield _attention(128 if quick else 1024, 2.0)
  yield _attention(256 if quick else 4096, 4.0)
  yield _packed_attention(*((64, 4) if quick else (4096, 8)))
  yield _gated_scan(64 if quick else 2048)
  yield _delta_scan(64 if quick else 2048)
  yield _linear_scan(64 if quick else 4096)
  yield _selective_scan(64 if quick else 4096)
  yield _decode_attention(64 if quick else 16384)
  yield _cross_entropy(*((64, 256) if quick else (2048, 16384)))
  yield _quantized_matmul(*((128, 128) if quick else (2048, 8192)))


def largest_gap(a, b):
  """Largest difference of two trees, relative to each array's maximum."""
  gaps = jax.tree.map(
    lambda x, y: jnp.abs(x - y).max() / jnp.abs(y).max(), a, b
  )
  return max(map(float, jax.tree.leaves(gaps)))


def _run(call, arrays):
  jax.block_until_ready(call(*arrays))


def on_cpu(report, rounds, quick):
  """Adds every pair: CPU-seconds, temporary memory, ratio, difference."""
  for pair in comparisons(quick):
    if not report.lacks(pair.op):
      continue
    made, results = {}, []
    for name, form in zip(pair.names, pair.forms, strict=True):
      row = f'{pair.op}: {name}'
      call = jax.jit(form).lower(*pair.arrays).compile()
      results.append(call(*pair.arrays))
      made[row] = functools.partial(_run, call, pair.arrays)
      report.add({f'{row}, temporaries': measure.temporary(call)}, 'MiB')
    report.add({f'{pair.op}: {GAP}': [largest_gap(*results)]}, 'relative')
    times = measure.interleave(made, rounds, measure.settled)
    report.add(times)
    report.check(
      f'{pair.op}: {" / ".join(pair.names)}',
      measure.ratios(*times.values()),
      pair.target,
    )
    report.finish(pair.op)


def static(report, say):
  """Adds bundles, shares and spills of the attention kernels for TPUs."""
  lacking = aot.missing('tpu')
  if lacking:
    report.notes.append(f'no static schedules: {lacking}')
    return
  for name, block in SCHEDULES:
    say(f'compiling attention for {name}, blocks of {block}')
    found = kernel_schedules.measure(name, block)
    kind = f'{name.partition(":")[0]} {block}'
    for form, passes in found.items():
      for which, x in sorted(passes.items()):
        row = f'{kind} {which}, {form}'
        report.add({f'{row}: bundles': [x.bundles]}, 'static')
        report.add({f'{row}: MXU share': [x.mxu]}, 'static')
        report.add({f'{row}: spills': [x.spills]}, 'static')
        if form in BOUNDS:
          ratio = [x.bundles / found['splash'][which].bundles]
          what = f'{row} / splash, bundles, static'
          report.check(what, ratio, BOUNDS[form], least=False)
  report.notes.append(
    'static: schedules compiled ahead of time for a TPU; not measured'
  )


def kernels(rounds, quick, say):
  """The ops of pallas_kernels: see the top of the file."""
  if jax.default_backend() != 'cpu':
    return kernel_device.kernels(rounds, quick, say)
  report = measure.begin(
    'kernels',
    'XLA forms in float32, outputs and where named gradients; TPU schedules',
    f'{measure.CPU}; rows of unit "static" are no times',
    not quick,
  )
  on_cpu(report, rounds, quick)
  if quick:
    report.notes.append('no static schedules: --quick')
  else:
    static(report, say)
  return report
