"""Bench of scaling: how cost grows, as exponents beside those it should have.

    cost ~ size^e,  e by least squares of log cost over log size

of CPU-seconds, temporary memory and compilation, over devices (the same step on
1 to 8 virtual ones, whose CPU-seconds should not grow), length (attention 2, a
window and scans 1), depth (a gradient 1, its compilation 0), rows and cache
slots (a decoding step: 1 at most). What is fixed makes small sizes dear and an
exponent small; one that is 0.1 above its ideal is `above`.

With --out=FILE.json the curves are drawn to FILE.png.

Legend: B rows, T tokens, N heads, H head size, F channels, S state.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.decode import step as decode_step
from paraxis.models import build
from paraxis.pallas_kernels.attention import op as attention_lib
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import selective as selective_scan
from paraxis.sharding.meter import compiling
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train
from paraxis.train.plot import figures

SIZES = dict(
  devices=(1, 2, 4, 8),
  length=tuple(2**i for i in range(10, 16)),
  depth=(2, 6, 12, 24, 48),
  batch=(1, 4, 16, 64),
  cache=(128, 1024, 8192, 32768),
)
QUICK = dict(
  devices=(1, 2), length=(64, 128), depth=(1, 2), batch=(1, 2), cache=(32, 64)
)
SLACK = 0.1  # by which an exponent may exceed its ideal
FLOOR = 2**-10  # MiB; a program without temporaries is constant
ROW = re.compile(r'(\w+) (\d+): (.*)')  # axis, size, what
CALLS = 8  # decoding steps that are timed together


class Case(NamedTuple):
  """One program, compiled: its call, MiB of temporaries, CPU-seconds."""

  run: Any
  temporaries: list
  compiled: float


class Curve(NamedTuple):
  """make(size, quick, now) -> Case, and the ideal exponents.

  compilation: None: not measured.
  """

  name: str
  make: Any
  time: float
  memory: float
  compilation: float | None = None


def _case(compiled, arguments, seconds):
  run = lambda: jax.block_until_ready(compiled(*arguments)) and None
  return Case(run, measure.temporary(compiled), seconds)


def _op(function, shapes, now):
  """An op with the gradients of all its arguments."""
  keys = jax.random.split(jax.random.key(0), len(shapes))
  arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

  def both(*arrays):
    out, back = jax.vjp(function, *arrays)
    return back(jax.tree.map(jnp.cos, out))

  before = now()
  compiled = jax.jit(both).lower(*arrays).compile()
  return _case(compiled, arrays, now() - before)


def _attention(window, length, quick, now):
  mask = attention_lib.Mask(scale=1 / 8, window=min(window, length // 2))
  run = lambda q, k, v: attention_lib.attention(q, k, v, mask)[0]
  return _op(run, [(1, length, 1, 64)] * 3, now)


def _gated(length, quick, now):
  def run(q, k, v, g):
    return gated_scan.gated_scan(q, k, v, -jax.nn.softplus(g) / 16)[0]

  return _op(run, [(1, length, 2, 64)] * 4, now)


def _delta(length, quick, now):
  def run(q, k, v, g, beta):
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    decay, rate = -jax.nn.softplus(g) / 16, jax.nn.sigmoid(beta)
    return delta_scan.delta_scan(q, k, v, decay, rate)[0]

  return _op(run, [(1, length, 2, 64)] * 3 + [(1, length, 2)] * 2, now)


def _linear(length, quick, now):
  def run(a, b):
    return linear_scan.linear_scan(jax.nn.sigmoid(a), b)[0]

  return _op(run, [(1, length, 256)] * 2, now)


def _selective(length, quick, now):
  def run(x, dt, shared, rate):
    return selective_scan.selective_scan(
      x, jax.nn.softplus(dt), shared, -jnp.exp(rate)
    )[0]

  row = 1, length, 128
  return _op(run, [row, row, (1, length, 2, 16), (128, 16)], now)


def _gradient(c, mesh, devices, now):
  """The gradient of a training step, its compilation from nothing."""
  job = job_lib.on_devices(c, mesh, devices)
  with job.context():
    arguments = job.initial_state().variables, job.put(bench_train.batch(c))
    made = step_lib.make(job.built, job.optimizer, c.optimizer.clip_norm)
    jax.clear_caches()
    before = now()
    compiled = compiling.compile_step('gradient', made.grads, *arguments)
    case = _case(compiled, arguments, now() - before)

  def run():
    with job.context():
      case.run()

  return case._replace(run=run)


def _on_devices(count, quick, now):
  c = bench_train.config(quick, heads=8)
  return _gradient(c, f'fsdp={count}', jax.devices()[:count], now)


def _of_depth(depth, quick, now):
  width = 32 if quick else 128
  model = dict(
    vocab_size=256, d_model=width, num_heads=2, d_ff=2 * width, num_layers=depth
  )
  data = dict(sequence_length=32 if quick else 256)
  c = schema.view(dict(model=model, data=data, train=dict(batch_size=2)))
  return _gradient(c, 'data=1', jax.devices()[:1], now)


def _decode(batch, slots, quick, now):
  """A decoding step of `batch` rows, all `slots` but one in use."""
  c = bench_train.config(quick)
  c = schema.view(dict(model=schema.to_dict(c)['model']))
  built = build.build(c, 'data=1', devices=jax.devices()[:1])
  model, last = built.model, jnp.int32(slots - 1)
  rows = jnp.zeros(batch, jnp.int32)

  def program(params, cache):
    live = rows == 0
    logits, cache = decode_step.advance(model, params, cache, rows, live)
    # The next call writes the same slot.
    return logits, cache._replace(length=rows + last)

  def start(key):
    cache = model.init_cache(batch, slots)._replace(length=rows + last)
    return model.unstack(model.init(key)), cache

  with build.use(built):
    params, cache = jax.jit(start)(jax.random.key(0))
    before = now()
    jitted = jax.jit(program, donate_argnums=1)
    compiled = jitted.lower(params, cache).compile()
    seconds, held = now() - before, [cache]

  def run():
    for _ in range(CALLS):
      logits, held[0] = compiled(params, held[0])
    jax.block_until_ready((logits, held))

  return Case(run, measure.temporary(compiled), seconds)


CURVES = dict(
  devices=[Curve('gradient, fsdp', _on_devices, 0, -1)],
  length=[
    Curve('attention', functools.partial(_attention, 0), 2, 1),
    Curve('window 256', functools.partial(_attention, 256), 1, 1),
    Curve('gated scan', _gated, 1, 1),
    Curve('delta rule', _delta, 1, 1),
    Curve('linear scan', _linear, 1, 1),
    Curve('selective scan', _selective, 1, 1),
  ],
  depth=[Curve('gradient', _of_depth, 1, 1, 0)],
  batch=[
    Curve('decoding', lambda n, *given: _decode(n, 256, *given), 1, 1),
  ],
  cache=[Curve('decoding', functools.partial(_decode, 1), 1, 1)],
)


def exponent(sizes, costs, floor=1e-9):
  """e of costs ~ sizes^e, by least squares of the logarithms."""
  x = [math.log(size) for size in sizes]
  y = [math.log(max(cost, floor)) for cost in costs]
  mean, middle = sum(x) / len(x), sum(y) / len(y)
  pairs = zip(x, y, strict=True)
  top = sum((a - mean) * (b - middle) for a, b in pairs)
  return top / sum((a - mean) ** 2 for a in x)


def _judge(report, axis, what, ideal, floor=1e-9):
  """Adds the exponents, one a round, of the rows 'axis size: what'."""
  rows = {
    int(found[2]): values
    for name, (_, values) in report.rows.items()
    if (found := ROW.fullmatch(name)) and found.group(1, 3) == (axis, what)
  }
  if not rows:  # temporary memory is not known everywhere
    return
  each = [
    exponent(rows, costs, floor) for costs in zip(*rows.values(), strict=True)
  ]
  report.check(
    f'{axis}: {what}, exponent; ideal {ideal:g}', each, ideal + SLACK,
    least=False, missed='above',
  )  # fmt: skip


def _axis(report, axis, sizes, quick, rounds, now, say):
  """Measures all curves over one axis."""
  made, memory, builds = {}, {}, {}
  for curve in CURVES[axis]:
    for size in sizes:
      say(f'compiling {curve.name}, {axis} {size}')
      case = curve.make(size, quick, now)
      row = f'{axis} {size}: {curve.name}'
      made[row] = case.run
      memory[f'{row}, temporaries'] = case.temporaries
      if curve.compilation is not None:
        builds[f'{row}, compilation'] = [case.compiled]
  report.add(measure.interleave(made, rounds, now, say))
  report.add(memory, 'MiB')
  report.add(builds)
  for curve in CURVES[axis]:
    _judge(report, axis, curve.name, curve.time)
    _judge(report, axis, f'{curve.name}, temporaries', curve.memory, FLOOR)
    if curve.compilation is not None:
      _judge(report, axis, f'{curve.name}, compilation', curve.compilation)


def _narrow(ax):
  """Whether the y axis shows less than two powers of ten."""
  low, high = ax.get_ylim()
  return high < 50 * low


def draw(report, path):
  """Draws all curves, seconds above MiB, with exponents -> path of the PNG."""
  curves = {}
  for name, (unit, values) in report.rows.items():
    if found := ROW.fullmatch(name):
      key = found[1], unit, found[3]
      floor = 1e-9 if unit == 's' else FLOOR
      median = max(measure.spread(values).median, floor)
      curves.setdefault(key, []).append((int(found[2]), median))
  axes = list(dict.fromkeys(axis for axis, *_ in curves))
  fig = figures.make(3.4 * len(axes), 6.4)
  grid = fig.subplots(2, len(axes), squeeze=False)
  for row, (unit, label) in enumerate((('s', 'CPU-seconds'), ('MiB', 'MiB'))):
    for ax, axis in zip(grid[row], axes, strict=True):
      shown = [k for k in curves if k[:2] == (axis, unit)]
      for key, colour in zip(shown, figures.COLOURS, strict=False):
        x, y = zip(*curves[key], strict=True)
        name = f'{key[2].partition(", temp")[0]}: {exponent(x, y):.2f}'
        ax.loglog(x, y, 'o-', color=colour, label=name)
      ax.set(xlabel=axis, ylabel=label if axis == axes[0] else '')
      ax.legend(frameon=False, fontsize=7)
      figures.tidy(ax)
      every = sorted({x for key in shown for x, _ in curves[key]})
      ax.set_xticks(every, [f'{x:,}' for x in every], minor=False)
      ax.set_xticks([], minor=True)
      ax.yaxis.set_major_formatter('{x:g}')
      ax.yaxis.set_minor_formatter('{x:g}' if _narrow(ax) else '')
      ax.tick_params(axis='both', which='both', labelsize=6)
  return figures.save(fig, path)


def scaling(rounds, quick, say):
  """Exponents of time, memory and compilation over every size."""
  sizes = QUICK if quick else SIZES
  now, report = bench_train.begin(
    'scaling',
    '; '.join(f'{k} {", ".join(map(str, v))}' for k, v in sizes.items()),
    quick,
  )
  for axis in sizes:
    if report.lacks(axis):
      _axis(report, axis, sizes[axis], quick, rounds, now, say)
      report.finish(axis)
  path = measure.current().path
  if path:
    report.notes.append(f'drawn: {draw(report, path.with_suffix(".png"))}')
  return report
