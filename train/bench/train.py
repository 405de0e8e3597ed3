"""Benches of training: a step and its compilation, layouts.

Ours is what `paraxis train` runs: both halves of a step, from train/step.py, on
parameters laid out by the rules. The reference is train/bench/reference.py.
Every candidate waits for all that it started before its time is taken.

Legend: B rows, T tokens, N heads, H head size.
"""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.sharding.meter import compiling
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure
from paraxis.train.bench import peers
from paraxis.train.bench import reference
from paraxis.train.data import objectives

_EXPLICIT = dict(collectives='explicit')
# Most time of a bfloat16 step over a float32 one, by whether there is AMX.
NARROW = {False: 1.0, True: 0.5}
# Layers of as many kinds as there are, of one: (pattern, layers), by --quick.
MIXED = {False: ('FMGSRL', 24), True: ('FG', 2)}
LAYOUTS = {  # name -> (mesh, choices, most CPU-seconds of 8 devices / of one)
  'tensor=8': ('tensor=8', {}, 1.2),
  'tensor=8 explicit': ('tensor=8', _EXPLICIT, 1.2),
  'data=8': ('data=8', {}, 1.15),
  'data=8 zero=1': ('data=8', dict(zero=1), 1.15),
  'data=8 zero=2 explicit': ('data=8', dict(zero=2) | _EXPLICIT, 1.15),
  'fsdp=8': ('fsdp=8', {}, 1.1),
  'fsdp=8 explicit': ('fsdp=8', _EXPLICIT, 1.1),
  'data=2,fsdp=2,tensor=2': ('data=2,fsdp=2,tensor=2', {}, 1.1),
  'data=2,fsdp=2,tensor=2 explicit': (
    'data=2,fsdp=2,tensor=2', _EXPLICIT, 1.1
  ),
}  # fmt: skip


def begin(name, setup, quick):
  """(clock of the devices present: function -> seconds, new BenchReport)."""
  now, label = time.perf_counter, measure.WALL
  if jax.default_backend() == 'cpu':
    now, label = measure.settled, measure.CPU
  return now, measure.begin(name, setup, label, not quick)


def config(quick, heads=6, unrolled=False, choices=(), dtype='float32'):
  """schema.Config of the bench: 17M parameters, or a tiny one."""
  sizes = dict(vocab_size=8192, d_model=384, num_layers=6, d_ff=1024)
  if quick:
    sizes = dict(vocab_size=256, d_model=96, num_layers=2, d_ff=128)
  model = dict(**sizes, num_heads=heads, tied_embedding=False, dtype=dtype)
  if unrolled:
    model['unroll'] = sizes['num_layers']
  return schema.view(
    dict(
      model=model,
      mesh=dict(choices),
      train=dict(batch_size=8),
      data=dict(sequence_length=64 if quick else 256),
    )
  )


def describe(c):
  """The sizes of a config, in words."""
  m = c.model
  return (
    f'V{m.vocab_size} D{m.d_model} N{m.num_heads} L{m.num_layers} F{m.d_ff} '
    f'T{c.data.sequence_length} B{c.train.batch_size}, float32, AdamW'
  )


def batch(c):
  """Random tokens, one document a row."""
  shape = c.train.batch_size, c.data.sequence_length
  tokens = np.random.default_rng(0).integers(
    0, c.model.vocab_size, (shape[0], shape[1] + 1), np.int32
  )
  positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
  return batch_lib.Batch(
    tokens[:, :-1],
    tokens[:, 1:],
    np.ones(shape, np.int32),
    positions,
    np.ones(shape, np.float32),
    np.float32(shape[0] * shape[1]),
  )


class PlainJax:
  """The reference: one program for the whole step."""

  def __init__(self, c, scan, now):
    self._c, self.now = c, now
    start, _ = reference.make_step(c.model)
    params = jax.jit(lambda k: reference.init(c.model, k, scan))(
      jax.random.key(0)
    )
    self._state = params, jax.jit(start)(params)
    host = batch(c)
    self._batch = jnp.asarray(host.tokens), jnp.asarray(host.targets)
    self._step = self._compile()

  def _compile(self):
    _, step = reference.make_step(self._c.model)
    return step.lower(*self._state, *self._batch).compile()

  def temporary(self):
    """[MiB of temporaries of the step]."""
    return measure.temporary(self._step)

  def compile(self):
    """Compiles anew -> {'': seconds}."""
    return _timed(self._compile, self.now)

  def run(self):
    """One step -> {'': seconds}."""
    before = self.now()
    *self._state, loss = self._step(*self._state, *self._batch)
    jax.block_until_ready((self._state, loss))
    return {'': self.now() - before}


class Ours:
  """Both halves of our step on a mesh of the first devices.

  Attributes:
    job: program.Program. numbers: metrics of the last step. built: seconds that
      compiling took. programs: both, compiled.
  """

  def __init__(self, c, mesh, now):
    devices = jax.devices()[: 1 if mesh == 'data=1' else 8]
    self.job, self._now = job_lib.on_devices(c, mesh, devices), now
    self.numbers: Any = None
    with self.job.context():
      self._state = self.job.initial_state()
      rows = c.train.batch_size
      made = objectives.batch(c, batch(c), 0, range(rows), rows)
      self._batch = self.job.put(made)
      jax.block_until_ready((self._state, self._batch))
      before = now()
      self.programs = self._grads, self._update = self._compile()
      self.built = now() - before

  def gradient(self):
    """(loss, gradients, aux.Aux) of its batch at its state."""
    return self.programs[0](self._state.inner, self._batch)

  def _compile(self):
    job = self.job
    clip = job.config.optimizer.clip_norm
    made = step_lib.make(job.built, job.optimizer, clip)
    grads = compiling.compile_step(
      'gradient', made.grads, job.state.inner, self._batch
    )
    return grads, job.compile_update(made.update, grads)

  def temporary(self):
    """[MiB of temporaries of the half that has more]."""
    each = [measure.temporary(half) for half in (self._grads, self._update)]
    return max(each)

  def compile(self):
    """Compiles both halves anew -> {'': seconds}."""
    with self.job.context():
      return _timed(self._compile, self._now)

  def run(self):
    """One step -> seconds of it and of its halves."""
    with self.job.context():
      before = self._now()
      found = jax.block_until_ready(self.gradient())
      middle = self._now()
      self._state, self.numbers = self._update(self._state, *found)
      jax.block_until_ready((self._state, self.numbers))
      end = self._now()
    return {
      '': end - before,
      ': gradient': middle - before,
      ': update': end - middle,
    }


def _timed(function, now):
  """Seconds of a compilation that finds nothing in any cache."""
  jax.clear_caches()
  before = now()
  function()
  return {'': now() - before}


def step(rounds, quick, say):
  """A step and its compilation on one device, against plain JAX."""
  c = config(quick)
  setup = f'{describe(c)}, one {jax.default_backend()} device'
  now, report = begin('step', setup, quick)
  say('compiling')
  made = {
    'plain JAX, unrolled': PlainJax(c, False, now),
    'plain JAX, scan': PlainJax(c, True, now),
    f'ours, default (unroll={c.model.unroll})': Ours(c, 'data=1', now),
    'ours, unrolled': Ours(config(quick, unrolled=True), 'data=1', now),
  }
  plain, scan, default, unrolled = made
  if report.lacks('steps'):
    steps = _steps(report, made, quick, rounds, say)
    report.add({f'step, {k}': v for k, v in steps.items()})
    report.add(
      {f'temporaries, {k}': m.temporary() for k, m in made.items()}, 'MiB'
    )
    for name in (default, unrolled):
      report.check(
        f'step: speed of {name} / {plain}',
        measure.ratios(steps[plain], steps[name]),
        1.0,
      )
    report.finish('steps')
  if report.lacks('compile'):
    say('compiling anew')
    builds = measure.interleave(
      {k: m.compile for k, m in made.items()}, rounds, now, say
    )
    report.add({f'compile, {k}': v for k, v in builds.items()})
    for name in (default, unrolled):
      report.check(
        f'compile: time of {name} / {scan}',
        measure.ratios(builds[name], builds[scan]),
        1.2,
        least=False,
      )
    report.finish('compile')
  say('compiling mixed layers')
  _mixed(report, quick, rounds, now, say)
  return report


def _steps(report, made, quick, rounds, say):
  """Times of a step of all candidates and of the session's peers."""
  now, c = made['plain JAX, scan'].now, config(quick)
  sizes = peers.sizes_of(c.model)
  sizes |= dict(rows=c.train.batch_size, length=c.data.sequence_length)
  wide, narrow = f'ours, default (unroll={c.model.unroll})', 'ours, bfloat16'
  made = made | {narrow: Ours(config(quick, dtype='bfloat16'), 'data=1', now)}
  with peers.beside(report, sizes, say) as others:
    ours = {'': wide, 'hf_autocast': narrow}
    times = measure.interleave(
      {k: m.run for k, m in made.items()} | others.candidates, rounds, now, say
    )
    others.judge(times, ours, 'step: ')
  report.check(
    f'step: time of {narrow} / {wide}',
    measure.ratios(times[narrow], times[wide]),
    NARROW[amx()],
    least=False,
  )
  return times


def amx() -> bool:
  """Whether the processor multiplies bfloat16 in tiles (Intel AMX)."""
  try:
    return 'amx_bf16' in pathlib.Path('/proc/cpuinfo').read_text('utf-8')
  except OSError:
    return False


def _mixed(report, quick, rounds, now, say):
  """Compiling the gradient of layers of many kinds, and of as many of one."""
  mixed, layers = MIXED[quick]

  def compiling_of(pattern):
    fields = {'model.pattern': pattern, 'model.num_layers': layers}
    c = schema.with_values(config(quick), fields)
    job = job_lib.on_devices(c, 'data=1', jax.devices()[:1])
    made = step_lib.make(job.built, job.optimizer, 0.0)

    def run():
      with job.context():
        given = job.state.variables, job.batch_shapes()
        return _timed(
          lambda: compiling.compile_step('gradient', made.grads, *given), now
        )

    return run

  names = {p: f'{layers} layers of pattern {p}' for p in ('F', mixed)}
  builds = measure.interleave(
    {f'compile, {name}': compiling_of(p) for p, name in names.items()},
    rounds, now, say,
  )  # fmt: skip
  report.add(builds)
  one, many = builds.values()
  report.check(
    f'compile: time of {names[mixed]} / {names["F"]}',
    measure.ratios(many, one),
    3.0,
    least=False,
  )


def layouts(rounds, quick, say):
  """The same model and step on 8 virtual devices and on one."""
  c = config(quick, heads=8)
  setup = f'{describe(c)}, unroll={c.model.unroll}, 1 and 8 devices'
  now, report = begin('layouts', setup, quick)
  made, builds = {'data=1': Ours(c, 'data=1', now)}, {}
  for name, (mesh, choices, _) in LAYOUTS.items():
    say(f'compiling {name}')
    made[name] = Ours(config(quick, 8, choices=choices), mesh, now)
    builds[f'compile, {name}'] = [made[name].built]
  times = measure.interleave(
    {name: ours.run for name, ours in made.items()}, rounds, now, say
  )
  report.add(times)
  report.add(builds)
  for name, (_, _, target) in LAYOUTS.items():
    report.check(
      f'time of {name} / data=1',
      measure.ratios(times[name], times['data=1']),
      target,
      least=False,
    )
  return report
