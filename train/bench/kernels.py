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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models.mixers import recurrent
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.pallas_kernels.matmul import quantized as quantized_matmul
from paraxis.pallas_kernels.scans import affine as affine_scan
from paraxis.pallas_kernels.scans import causal_conv
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import newton as newton_scan
from paraxis.pallas_kernels.scans import selective as selective_scan
from paraxis.train.bench import kernel_device
from paraxis.train.bench import kernel_schedules
from paraxis.train.bench import measure

GAP = 'largest difference of results'


class Comparison(NamedTuple):
  """One op, two forms (plain, ours), the same arrays; target: plain / ours.

  of: the module of the op; every one has a comparison (tests). memory: most
  temporary bytes of the second form over the first's; 0: no target.
  """

  of: Any
  op: str
  names: tuple[str, str]
  forms: tuple
  arrays: tuple
  target: float
  memory: float = 0.0


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
    attention, f'attention T{length}, gradients', ('jax.nn', 'blocks'),
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
    attention, f'{documents} packed documents T{length}, gradients',
    ('rows', 'packed'), (_gradients(apart), _gradients(ours)),
    _draw(*[shape] * 3), 0.67,
  )  # fmt: skip


def _gated_scan(length):
  def form(impl, q, k, v, g):
    return gated_scan.gated_scan(q, k, v, -jax.nn.softplus(g) / 16, impl=impl)

  return Comparison(
    gated_scan, f'gated scan T{length}, gradients', ('loop', 'chunks'),
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
    delta_scan, f'delta rule T{length}, gradients', ('loop', 'chunks'),
    tuple(_gradients(functools.partial(form, i)) for i in ('loop', 'xla')),
    _draw(keys, keys, values, rates, rates), 2.0,
  )  # fmt: skip


def _nested(token, first, rows, chunk=64):
  """Two nested loops over tokens, of which the inner one is computed again."""
  inner = jax.checkpoint(lambda h, some: jax.lax.scan(token, h, some))
  parts = jax.tree.map(lambda y: y.reshape(-1, chunk, *y.shape[1:]), rows)
  y = jax.lax.scan(inner, first, parts)[1]
  return y.reshape(-1, *y.shape[2:])


def _linear_scan(length):
  def form(impl, a, b):
    return linear_scan.linear_scan(jax.nn.sigmoid(a), b, impl=impl)

  return Comparison(
    linear_scan, f'linear scan T{length}, gradients', ('associative', 'loop'),
    tuple(_gradients(functools.partial(form, i)) for i in ('xla', 'loop')),
    _draw(*[(4, length, 256)] * 2), 1.5,
  )  # fmt: skip


def _selective_scan(length):
  width, state = 256, 16

  def loops(x, dt, shared, rate):
    def token(h, one):
      x, dt, (b, c) = one
      h = jnp.exp(dt[:, None] * rate) * h + (dt * x)[:, None] * b
      return h, h @ c

    rows = (x[0], dt[0], shared[0])
    return _nested(token, jnp.zeros((width, state)), rows)[None]

  def form(run, x, dt, shared, rate):
    return run(x, jax.nn.softplus(dt), shared, -jnp.exp(rate))

  ours = lambda *arrays: selective_scan.selective_scan(*arrays)[0]
  rows = (1, length, width)
  return Comparison(
    selective_scan, f'selective scan T{length}, gradients',
    ('nested loops', 'ours'),
    tuple(_gradients(functools.partial(form, f)) for f in (loops, ours)),
    _draw(rows, rows, (1, length, 2, state), (width, state)), 1.0, memory=1.0,
  )  # fmt: skip


def _affine_scan(length):
  def loops(j, b):
    def token(h, one):
      j, b = one
      h = (j * h).sum(1) + b
      return h, h

    return _nested(token, jnp.zeros((2, 256)), (j[0], b[0]))[None]

  def form(run, j, b):
    return run(jnp.tanh(j) / 2, b)

  ours = lambda j, b: affine_scan.affine_scan(j, b, jnp.zeros((1, 2, 256)))
  return Comparison(
    affine_scan, f'affine scan T{length}, gradients', ('nested loops', 'ours'),
    tuple(_gradients(functools.partial(form, f)) for f in (loops, ours)),
    _draw((1, length, 2, 2, 256), (1, length, 2, 256)), 1.0,
  )  # fmt: skip


def _newton_scan(length):
  """A GRU with recurrent weights of .3; parallel in time, so slower here."""
  width, cell = 256, recurrent.gru

  def loops(a, u):
    def token(h, u):
      h = cell(a * 0.3, h, u)
      return h, h

    return _nested(token, jnp.zeros((1, width)), u[0])[None]

  def ours(a, u):
    start = jnp.zeros((1, 1, width))
    return newton_scan.newton_scan(cell, a * 0.3, u, None, start)[0]

  return Comparison(
    newton_scan, f'newton scan T{length}, gradients', ('nested loops', 'ours'),
    (_gradients(loops), _gradients(ours)),
    _draw((3, width), (1, length, 3, width)), 0.25,
  )  # fmt: skip


def _short_conv(length, plain):
  """Four taps; `plain` knows no documents."""
  taps, width = 4, 256
  positions = jnp.arange(length)[None]

  def shifted(x, w):
    longer = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    cut = lambda j: longer[:, taps - 1 - j :][:, :length]
    return sum(w[j] * cut(j) for j in range(taps))

  def convolved(x, w):
    return jax.lax.conv_general_dilated(
      x, w[::-1, None], (1,), [(taps - 1, 0)], feature_group_count=width,
      dimension_numbers=('NWC', 'WIO', 'NWC'),
    )  # fmt: skip

  form, target = dict(shifted=(shifted, 0.8), lax=(convolved, 1.0))[plain]
  ours = lambda x, w: causal_conv.causal_conv(x, w, positions)[0]
  return Comparison(
    causal_conv, f'short convolution T{length} beside {plain}, gradients',
    (plain, 'ours'), (_gradients(form), _gradients(ours)),
    _draw((1, length, width), (taps, width)), target,
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
    decode_attention, f'decode attention S{slots}', ('jax.nn', 'ours'),
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
    cross_entropy, f'cross-entropy T{tokens} V{vocab}, gradients',
    ('dense', 'chunks'), (_gradients(plain), _gradients(ours)), (x, w / 8), 0.8,
  )  # fmt: skip


def _grouped_matmul(rows, width, features):
  """Uneven runs, beside one batched product with a matrix for every block."""
  groups = 4
  size = grouped_matmul.block(rows, groups)
  sizes = size * np.array([1, 1, 2, rows // size - 4], 'i4')
  of_block = np.repeat(np.arange(groups), sizes // size)
  sizes = jnp.asarray(sizes)

  def batched(x, w):
    x = x.reshape(-1, size, width)
    return jnp.einsum('GND,GDF->GNF', x, w[of_block]).reshape(rows, -1)

  def plain(x, w):
    y, back = jax.vjp(lambda w: batched(x, w), w)
    return y, back(jnp.cos(y))[0]

  def ours(x, w):
    y = grouped_matmul.product(x, w, sizes, size, jnp.float32)
    given = x, jnp.cos(y), sizes, size, groups, jnp.float32
    return y, grouped_matmul.gradient(*given)

  return Comparison(
    grouped_matmul, f'grouped product {rows} rows, gradient',
    ('batched', 'ours'), (plain, ours),
    _draw((rows, width), (groups, width, features)), 0.8,
  )  # fmt: skip


def _quantized_matmul(width, features):
  x, w = _draw((16, width), (width, features))
  q, scale = quantized_matmul.quantize(w)
  w = quantized_matmul.dequantize(q, scale)
  ours = lambda x, w, q, scale: quantized_matmul.quantized_matmul(x, q, scale)
  return Comparison(
    quantized_matmul, f'int4 product {width} x {features}', ('float32', 'int4'),
    (lambda x, w, q, scale: x @ w, ours), (x, w, q, scale), 0.4,
  )  # fmt: skip


def comparisons(quick):
  """Every `Comparison`, made one at a time."""
  yield _attention(128 if quick else 1024, 2.0)
  yield _attention(256 if quick else 4096, 4.0)
  yield _packed_attention(*((64, 4) if quick else (4096, 8)))
  yield _packed_attention(*((128, 8) if quick else (16384, 16)))
  yield _gated_scan(64 if quick else 2048)
  yield _delta_scan(64 if quick else 2048)
  yield _linear_scan(64 if quick else 4096)
  yield _selective_scan(64 if quick else 4096)
  yield _selective_scan(128 if quick else 16384)
  yield _affine_scan(64 if quick else 4096)
  yield _newton_scan(64 if quick else 4096)
  yield _short_conv(64 if quick else 4096, 'shifted')
  yield _short_conv(64 if quick else 4096, 'lax')
  yield _decode_attention(64 if quick else 16384)
  yield _cross_entropy(*((64, 256) if quick else (2048, 16384)))
  yield _grouped_matmul(*((64, 32, 32) if quick else (4096, 256, 512)))
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
    made, results, held = {}, [], []
    for name, form in zip(pair.names, pair.forms, strict=True):
      row = f'{pair.op}: {name}'
      call = jax.jit(form).lower(*pair.arrays).compile()
      results.append(call(*pair.arrays))
      made[row] = functools.partial(_run, call, pair.arrays)
      held.append(measure.temporary(call))
      report.add({f'{row}, temporaries': held[-1]}, 'MiB')
    report.add({f'{pair.op}: {GAP}': [largest_gap(*results)]}, 'relative')
    times = measure.interleave(made, rounds, measure.settled)
    report.add(times)
    report.check(
      f'{pair.op}: {" / ".join(pair.names)}',
      measure.ratios(*times.values()),
      pair.target,
    )
    if pair.memory and all(held):
      report.check(
        f'{pair.op}: temporaries of {" / ".join(pair.names[::-1])}',
        measure.ratios(*held[::-1]),
        pair.memory,
        least=False,
      )
    report.finish(pair.op)


def kernels(rounds, quick, say):
  """The ops of pallas_kernels: see the top of the file."""
  if jax.default_backend() != 'cpu':
    return kernel_device.kernels(rounds, quick, say, begin=measure.begin)
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
    kernel_schedules.judge(report, say)
  return report
