"""`paraxis compile`: a step compiled ahead of time for a TPU or GPU topology.

    paraxis compile --config=llama_7b --topology=v5p:8x8x8 \\
      --mesh=data=16,fsdp=8,tensor=4

Gradient and update are traced from shapes alone (no text, no tokenizer, no
weights) and compiled for the topology (sharding/meter/aot.py). Printed: memory
per device by class, collectives with their bytes per mesh axis
(sharding/meter/hlo.py), floating-point operations counted in the program
(sharding/meter/flops.py) and by the model's formula, and a roofline, which is a
model and not a measurement (sharding/meter/roofline.py). Exit code 1 if the
step needs more memory than a device has. With replicas that step alone their
exchanges too (train/steps/outer.py), each of them once in outer.period steps;
sums of a step are without them.

The optimizer's state is no argument of the gradient program but stays in memory
while it runs: it is added to its peak.

    operations of the model = 3 (2 N tokens + 4 pairs x heads x head width)

N: parameters of matrices and of the head; pairs: of a query and a key that the
mask admits, one document to a row. A core's passes that no gradients flow
through (model.recurrence.gradients) count once, not 3 times. Without gradients
(train.estimator) a step is two forward passes.
"""

import dataclasses
import json
import time
from typing import Any

import jax

from paraxis.configs.base import errors
from paraxis.models import layer
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import flops as flops_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import roofline
from paraxis.sharding.meter import traffic
from paraxis.train import loss as loss_lib
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import pipeline_report
from paraxis.train.run import memory as memory_lib
from paraxis.train.run import metrics
from paraxis.train.steps import outer

PROGRAMS = ('gradient', 'update')
CLASSES = ('parameters', 'optimizer', 'gradients', 'temporaries', 'code')
OUTER = 'outer'  # a class too, of replicas that step alone


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """What one compiled program costs a device.

  memory: aot.Memory. collectives: list of hlo.Collective. flops: flops.Flops.
  hbm_bytes: moved to and from memory. times: roofline.Times.
  """

  memory: Any
  collectives: Any
  flops: Any
  hbm_bytes: int
  times: Any


@dataclasses.dataclass(frozen=True)
class Report:
  """What `paraxis compile` prints.

  parameters: of the model. held: {class: bytes on one device} of parameters,
  optimizer, gradients and, of replicas that step alone, outer: the anchor, its
  momentum, sums under way. programs: {name: CompiledStep}; exchanges: likewise.
  loss: its form, and why. pipeline: lines of pipeline_report. model_flops: of
  a step.
  cpu_seconds, peak_rss: of this process, compiling included.
  """

  config: Any
  topology: Any
  mesh: Any
  parameters: int
  held: dict
  programs: dict
  exchanges: dict
  loss: tuple[str, str]
  pipeline: list
  model_flops: float
  cpu_seconds: float
  peak_rss: int

  def peak(self, name):
    """Most bytes in use on a device at a time while a program runs."""
    every = self.programs | self.exchanges
    code = sum(p.memory.code for p in every.values())
    idle = [n for n in ('optimizer', OUTER) if name == 'gradient']
    waiting = sum(self.held.get(n, 0) for n in idle)
    return every[name].memory.peak + waiting + code

  def classes(self, name):
    """{class: bytes} whose sum is `peak(name)`.

    temporaries: the rest: activations, buffers, the batch, padding.
    """
    every = self.programs | self.exchanges
    code = sum(p.memory.code for p in every.values())
    known = dict(self.held, code=code)
    if name in self.exchanges:  # gradients are gone
      known['gradients'] = 0
    rest = self.peak(name) - sum(known.values())
    return {c: known.get(c, rest) for c in self.names}

  @property
  def names(self):
    """The classes that there are."""
    return (*CLASSES, OUTER) if OUTER in self.held else CLASSES

  @property
  def worst(self):
    """Name of the program that needs most memory."""
    return max((*PROGRAMS, *self.exchanges), key=self.peak)

  @property
  def fits(self):
    """Whether the step fits into the memory of a device."""
    return self.peak(self.worst) <= self.topology.hbm


def run(config, mesh_text, topology, slices=1, as_json=False, say=print):
  """Compiles and prints -> exit code: 1 if the step does not fit.

  Args:
    config: schema.Config.
    mesh_text: --mesh=; '': the config's.
    topology: --topology=, such as 'v5p:8x8x8'.
    slices: TPU slices of that shape.
    as_json: one JSON document instead of text.
    say: prints a text.

  Raises:
    UserError: anything that does not fit together, before compiling; or a
      program that the compiler cannot fit on the chip.
  """
  report = compile_config(config, mesh_text, topology, slices)
  say(json.dumps(to_json(report), indent=1) if as_json else text(report))
  return errors.EXIT_OK if report.fits else errors.EXIT_DIFFERENT


def compile_config(config, mesh_text, topology, slices=1):
  """`Report` of a schema.Config on a topology; arguments as of `run`."""
  started = time.process_time()
  settings: Any = jax.config
  if not settings.jax_platforms:  # no accelerator of this machine is started
    jax.config.update('jax_platforms', 'cpu')
  target = aot.topology(topology, slices)
  with target.context():
    job = job_lib.of_shapes(config, mesh_text, target.devices)
    traces, due = trace(job), trace_exchanges(job)
    with job.context():
      rows, length = job.config.microbatch_rows, job.config.data.sequence_length
      loss = loss_lib.form(job.config.model, (rows, length))
      pipeline = pipeline_report.lines(job.built, job.config)
  programs, exchanges = (
    {n: _program(job, target, n, t) for n, t in each.items()}
    for each in (traces, due)
  )
  gradients = job_lib.with_layouts(job.mesh, traces['gradient'].out_info[1])
  held = {
    'parameters': memory_lib.device_bytes(job.state.inner),
    'optimizer': memory_lib.device_bytes(job.state.optimizer),
    'gradients': memory_lib.device_bytes(gradients),
  }
  if due:
    kept = job.state.params, job.state.outer._replace(params={})
    held[OUTER] = memory_lib.device_bytes(kept)
  return Report(
    job.config,
    target,
    job.mesh,
    sum(job.model.sizes(job.state.params).values()),
    held,
    programs,
    exchanges,
    loss,
    pipeline,
    model_flops(job.config, job.built),
    time.process_time() - started,
    metrics.peak_resident_bytes(),
  )


def trace(job):
  """{'gradient': jax.stages.Traced, 'update': ...} of a job's step."""
  made = step_lib.make(job.built, job.optimizer, job.config.optimizer.clip_norm)
  with job.context():
    gradient = jax.jit(made.grads).trace(job.state.inner, job.batch_shapes())
    found = job_lib.with_layouts(job.mesh, gradient.out_info)
    update = jax.jit(made.update, donate_argnums=0)
    return dict(gradient=gradient, update=update.trace(job.state, *found))


def trace_exchanges(job):
  """{name: jax.stages.Traced} of what replicas exchange once a period."""
  due = outer.functions(job.config, job.model)
  with job.context():
    return {
      name: jax.jit(run, donate_argnums=0).trace(job.state)
      for name, run in due.items()
    }


def _program(job, target, name, traced):
  """`CompiledStep` of a jax.stages.Traced."""
  with job.context():
    compiled = aot.compile_for(target, name, traced)
  text = compiled.as_text()
  found = hlo.collectives(text, job.mesh)
  work = flops_lib.of_jaxpr(traced.jaxpr)
  moved = traffic.hbm_bytes(text)
  times = roofline.times(target, job.mesh, work.per_device, moved, found)
  return CompiledStep(aot.memory(compiled), found, work, moved, times)


def model_flops(config, built):
  """Floating-point operations of a step by the model's formula (see top)."""
  forward, backward = (_row_flops(config, built, x) for x in (False, True))
  if config.train.estimator != 'backprop':  # steps/zeroth_order.py
    return config.train.batch_size * 2 * forward
  return config.train.batch_size * (forward + 2 * backward)


def _row_flops(config, built, learned):
  """Of a row's forward pass; learned: of what gradients flow through alone."""
  model, length = config.model, config.data.sequence_length
  stack = built.model.stack
  head = 'embedding' if model.tied_embedding else 'head'
  copies = pipeline_report.copies(config)
  weights = 0
  for path, size in built.model.sizes(built.params).items():
    axes = built.model.axes[path]
    size *= stack.uses(path, learned)
    size *= copies if path.startswith('layers/') else 1
    if 'experts' in axes:  # of which a token uses top_k
      count = built.params[path].shape[axes.index('experts')]
      weights += size * model.experts.top_k / count
    elif built.model.kinds[path] == 'matrix' or path == head:
      weights += size
  mixing = sum(
    layer.MIXERS[kind[0]].mixing_flops(model, kind[0], length)
    for kind in (stack.learned if learned else stack.cached)
  )  # a core's layers once a pass
  return 2 * weights * length + copies * mixing


def to_json(report):
  """`Report` as a dictionary of plain values."""
  programs = report.programs.values()
  every = [c for p in programs for c in p.collectives]
  seconds = {
    name: dict(p.times.parts, links_by_axis=p.times.links)
    for name, p in (report.programs | report.exchanges).items()
  }
  return dict(
    topology=report.topology.name,
    period=report.config.outer.period,
    slices=report.topology.slices,
    devices=len(report.topology.devices),
    mesh=mesh_lib.describe(dict(report.mesh.shape)),
    jax=jax.__version__,
    parameters=report.parameters,
    loss=report.loss[0],
    peak_bytes=report.peak(report.worst),
    peak_program=report.worst,
    memory_bytes=report.topology.hbm,
    fits=report.fits,
    memory={
      name: report.classes(name) for name in (*PROGRAMS, *report.exchanges)
    },
    collective_bytes_by_axis=hlo.by_axis(every),
    collectives={
      name: [
        dict(kind=kind, axes=axes, executions=count, bytes=size)
        for kind, axes, count, size in hlo.rows(p.collectives)
      ]
      for name, p in (report.programs | report.exchanges).items()
    },
    flops=dict(
      total=sum(p.flops.total for p in programs),
      per_device=sum(p.flops.per_device for p in programs),
      model=report.model_flops,
    ),
    hbm_traffic_bytes=sum(p.hbm_bytes for p in programs),
    seconds_model_not_measured=seconds,
    compile=dict(cpu_seconds=report.cpu_seconds, peak_rss=report.peak_rss),
  )


def text(report):
  """`Report` for people."""
  target = report.topology
  chips = len(target.devices) // target.cores
  share = f', {target.cores} devices to a chip' if target.cores > 1 else ''
  lines = [
    f'{target.name}{f" x {target.slices} slices" * (target.slices > 1)}: '
    f'{chips} chips{share}; mesh {mesh_lib.describe(dict(report.mesh.shape))}',
    f'{report.parameters:,} parameters; compiled in '
    f'{report.cpu_seconds:.0f} CPU-seconds and '
    f'{report.peak_rss / 1e9:.1f} GB of memory',
    f'loss: {report.loss[0]}',
    *(f'  {why}' for why in report.loss[1].split('; ')),
    *report.pipeline,
    '',
    *_memory_lines(report),
  ]
  every = report.config.outer.period
  often = dict.fromkeys(report.exchanges, f', once in {every} steps')
  for name, p in (report.programs | report.exchanges).items():
    what = f'{name}{often.get(name, "")}'
    lines += ['', f'{what}: what one device receives']
    lines += ['  ' + line for line in hlo.table(p.collectives).splitlines()]
  return '\n'.join([*lines, '', *_work_lines(report)])


def _memory_lines(report):
  gib = lambda size: f'{size / 2**30:10.3f}'
  lines = [f'{"GiB on a device":16}' + ''.join(f'{n:>10}' for n in PROGRAMS)]
  for name in (*report.names, 'peak'):
    row = [
      report.peak(p) if name == 'peak' else report.classes(p)[name]
      for p in PROGRAMS
    ]
    lines.append(f'  {name:14}' + ''.join(map(gib, row)))
  for name in report.exchanges:
    lines.append(f'  {gib(report.peak(name)).strip()}, peak of {name}')
  have = report.topology.hbm
  need = report.peak(report.worst)
  verdict = f'fits: {need / have:.0%} of'
  if not report.fits:
    verdict = f'DOES NOT FIT: {(need - have) / 2**30:.2f} GiB more than'
  return [*lines, f'  {verdict} {have / 2**30:.1f} GiB']


def _work_lines(report):
  programs = report.programs.values()
  total = sum(p.flops.total for p in programs)
  mine = sum(p.flops.per_device for p in programs)
  lines = [
    f'floating-point operations of a step: {total:.4g} counted, '
    f'{report.model_flops:.4g} of the model ({total / report.model_flops:.2f} '
    f'x); {mine:.4g} on one device',
    '',
    'roofline of a step, in ms; a model, not measured',
  ]
  period = report.config.outer.period
  often = dict.fromkeys(report.exchanges, f', once in {period} steps')
  for name, p in (report.programs | report.exchanges).items():
    parts = ', '.join(f'{k} {v * 1e3:.2f}' for k, v in p.times.parts.items())
    lines.append(f'  {name}{often.get(name, "")}: {parts}')
    axes = ', '.join(f'{k} {v * 1e3:.2f}' for k, v in p.times.links.items())
    lines += [f'    links by mesh axes: {axes}'] if axes else []
  least = sum(p.times.least for p in programs)
  most = sum(p.times.most for p in programs)
  target = report.topology
  peak = target.chip.flops / target.cores * len(target.devices)
  lines.append(
    f'  both: {least * 1e3:.2f} if all of it overlaps, {most * 1e3:.2f} if '
    f'nothing does; {report.model_flops / peak / least:.0%} and '
    f'{report.model_flops / peak / most:.0%} of the peak for the model'
  )
  return lines
