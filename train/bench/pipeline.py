"""Bench of pipelines: phases that the executor runs, and the cost of a step.

Two things are compared with the lock-step simulator
(sharding/planner/simulate.py):

phases   how often F, B and W are entered on a device: a toy model, whose
         functions count on the host, run through the real executor
time     the gradient of a step on stage=4,data=2, against the same rows and
         layers on data=8. Both keep the inputs of layers and compute the rest
         again; zero_bubble and v_half keep those of chunks, of one layer here

On virtual CPU devices an idle stage computes as much as a busy one and discards
the results, so a step should cost (time / ideal) times the step without a
pipeline; the rest is overhead of the executor: the target is 1.1 times that.
"""

import collections
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import compiling
from paraxis.sharding.meter import flops
from paraxis.sharding.pipeline import executor as pipeline_lib
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import simulate
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train

STAGES, DATA = 4, 2
CHUNKS = {
  'gpipe': 1,
  'one_f_one_b': 1,
  'interleaved': 2,
  'zero_bubble': 2,
  'v_half': 2,
  'skip': 1,
}
# B recomputes its chunk: F again, then the gradient of its input.
COSTS = dict(forward=1, backward=2, weight=1)
TARGET = 1.1


def _make(name, microbatches):
  fraction = 0.25 if name == 'skip' else 0.0
  return schedules.make(name, STAGES, microbatches, CHUNKS[name], fraction)


def _toy(schedule, counts):
  """pipeline.Calls of one product a chunk, which count the phases entered."""
  split = schedule.weight is not None

  def count(phase):
    jax.debug.callback(lambda: counts.update([phase]))

  def forward(values, x, context, mask):
    count('F')
    return x @ values['w'][0], pipeline_lib.Found((), {}), ()

  def backward(values, x, kept, g, context, mask):
    count('B')
    gw = jnp.outer(x, g)[None]
    gx = g @ values['w'][0].T
    return (gx, {}, (x, g)) if split else (gx, {'w': gw}, ())

  def weights(tapes):
    count('W')
    return {'w': jnp.outer(*tapes)[None]}

  return pipeline_lib.Calls(
    embed=lambda ends, i: ends['e'][i],
    loss=lambda ends, y, i: lax.psum(y, pipeline_lib.AXIS).sum(),
    context_of=lambda i: (),
    forward=forward,
    backward=backward,
    weights=weights,
  )


def executed(schedule):
  """{'F' | 'B' | 'W': phases that each device entered}, counted as they run."""
  counts, size = collections.Counter(), 4
  mesh = mesh_lib.make(
    {'stage': schedule.stages}, jax.devices()[: schedule.stages]
  )

  def local(ends, stack):
    calls = _toy(schedule, counts)
    return pipeline_lib.gradients(schedule, calls, ends, stack)[0]

  rows = schedule.virtual_stages
  run = jax.jit(
    jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(), P(pipeline_lib.AXIS)),
      out_specs=P(),
      check_vma=False,
    )
  )
  place = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))
  ends = {'e': place(jnp.ones((schedule.microbatches, size)))}
  stack = {'w': place(jnp.ones((rows, size, size)), pipeline_lib.AXIS)}
  jax.block_until_ready(run(ends, stack))
  jax.effects_barrier()
  return {k: n / schedule.stages for k, n in sorted(counts.items())}


def simulated(schedule):
  """The same from the simulator: a phase costs 1, the others nothing."""
  out = {}
  for phase, name in zip('FBW', ('forward', 'backward', 'weight'), strict=True):
    if phase in schedule.when:
      costs = dict.fromkeys(COSTS, 0) | {name: schedule.chunks}
      out[phase] = simulate.run(schedule, 'lock_step', **costs).time
  return out


class Gradient:
  """The gradient of a step, with its inputs in place."""

  def __init__(self, c, mesh):
    self._job = job = job_lib.on_devices(
      c, mesh, jax.devices()[: STAGES * DATA]
    )
    cut = lambda x: x.reshape(c.microbatches, -1, x.shape[-1])
    whole = bench_train.batch(c)
    batch = jax.tree.map(lambda x: cut(x) if x.ndim else x, whole)
    with job.context():
      self._inputs = job.initial_state().variables, job.put(batch)
      self._function = step_lib.make(
        job.built, job.optimizer, c.optimizer.clip_norm
      )

  def operations(self):
    """Floating-point operations of a device (sharding/meter/flops.py)."""
    with self._job.context():
      return flops.count(self._function.grads, *self._inputs).per_device

  def compile(self, now):
    """-> seconds that it took."""
    with self._job.context():
      before = now()
      self._call = compiling.compile_step(
        'gradient', self._function.grads, *self._inputs
      )
      return now() - before

  def run(self, now):
    """One gradient, once compiled -> {'': seconds}."""
    with self._job.context():
      before = now()
      jax.block_until_ready(self._call(*self._inputs))
      return {'': now() - before}


def config(quick, microbatches, name=''):
  """schema.Config of a schedule, or of the same rows on data=8."""
  sizes = dict(vocab_size=2048, d_model=256, d_ff=512, num_layers=8)
  if quick:
    sizes = dict(vocab_size=256, d_model=64, d_ff=64, num_layers=8)
  train = dict(batch_size=DATA * microbatches, remat='full')
  sections: dict[str, dict] = dict(mesh=dict(stage=STAGES, data=DATA))
  if name:
    chunks = CHUNKS[name]
    apart = _make(name, microbatches).weight is not None
    sections['pipeline'] = dict(
      schedule=name,
      chunks=chunks,
      microbatches=microbatches,
      activations='recompute' if apart else 'store',
      skip_fraction=0.25 if name == 'skip' else 0.0,
    )
  else:
    sections['mesh'] = dict(data=STAGES * DATA, collectives='explicit')
    train['microbatches'] = microbatches // STAGES
  return schema.view(
    dict(
      model=dict(**sizes, num_heads=4),
      data=dict(sequence_length=32 if quick else 128),
      train=train,
      **sections,
    )
  )


def pipeline(rounds, quick, say):
  """Every schedule on stage=4,data=2 against data=8, and the simulator."""
  microbatches = 8 if quick else 16
  plain = f'data={STAGES * DATA}'
  base = config(quick, microbatches)
  now, report = bench_train.begin(
    'pipeline',
    f'{bench_train.describe(base)}, {microbatches} microbatches on '
    f'stage={STAGES},data={DATA} and on {plain}',
    quick,
  )
  report.judged &= report.clock == measure.CPU
  compiled, made = {}, {}
  for name in ('', *CHUNKS):
    say(f'compiling {name or plain}')
    c = config(quick, microbatches, name)
    one = Gradient(c, f'stage={STAGES},data={DATA}' if name else plain)
    compiled[name or plain] = [one.compile(now)]
    made[name or plain] = one
  calls = {n: functools.partial(m.run, now) for n, m in made.items()}
  times = measure.interleave(calls, rounds, now, say)
  report.add({f'gradient, {n}': t for n, t in times.items()})
  report.add({f'compile, {n}': t for n, t in compiled.items()})
  operations = {n: m.operations() for n, m in made.items()}
  for name in CHUNKS:
    schedule = _make(name, microbatches)
    result = simulate.run(schedule, 'lock_step', **COSTS)
    # Over the work without a pipeline, which visits every stage.
    expected = result.time / (microbatches * sum(COSTS.values()))
    ratio = measure.ratios(times[name], times[plain])
    report.add({f'{name} / {plain}': ratio}, 'ratio')
    report.check(
      f'{name} / {plain} / simulated {expected:.3f}',
      [r / expected for r in ratio],
      TARGET,
      least=False,
    )
    ours, theirs = executed(schedule), simulated(schedule)
    phases = ', '.join(
      f'{k} {ours.get(k, 0):g} of {n:g}' for k, n in theirs.items()
    )
    counted = operations[name] / operations[plain]
    report.notes.append(
      f'{name}: {schedule.ticks} ticks; phases executed of simulated: '
      f'{phases}; operations of products counted: {counted:.3f}'
    )
  return report
