"""What a run begins with: a screen that says what is trained, where, on what.

    model        1,568,480 parameters, 1,240,800 besides embeddings
    devices      data=8: 8 x cpu, 2 of the machine's processors
    ...

Operations of a token are those of the model alone: three times those of its
forward pass (PaLM, arXiv:2204.02311, appendix B), counted in the traced program
of one device (loop.cost), so that neither a layout, nor microbatches, nor
recomputation changes them (less the third that makes gradients of parameters,
of the share of them that is frozen); a blockwise attention counts the blocks it
walks. Model FLOPs utilisation (MFU) is their rate over the devices' bfloat16
peak.
"""

import collections
import math
import os
from typing import NamedTuple

import jax

from paraxis.pallas_kernels import registry
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import flops
from paraxis.sharding.meter import liveness
from paraxis.sharding.meter import target
from paraxis.sharding.meter import traced as traced_lib

OUTER = (
  'embedding',
  'head',
  'positions',
)  # leaves that only look up or read out


LITTLE = 0.01  # share of the parameters that may stay whole unsaid


class Cost(NamedTuple):
  """Operations of a token, forward and backward, of a cycle of shapes the mean
  over a run; why: they were not counted; own: the run's step is another than
  the standard one, of whose loss they are."""

  flops: float
  why: str = ''
  own: bool = False


class Sizes(NamedTuple):
  """Parameters: in all, besides embeddings, those that a token meets, and
  those that are not learned (train.freeze)."""

  total: int
  inner: int
  active: int
  frozen: int


def sizes(model, shapes) -> Sizes:
  """`Sizes` of a Decoder; shapes: {path: array}, its parameters."""
  count = model.sizes(shapes)
  outer = sum(n for p, n in count.items() if p.split('/')[0] in OUTER)
  idle = 0.0
  for path, n in count.items():
    axes = model.axes[path]
    if 'experts' in axes:
      experts = shapes[path].shape[axes.index('experts')]
      idle += n * (1 - model.config.experts.top_k / experts)
  total = sum(count.values())
  frozen = sum(n for p, n in count.items() if p in model.frozen)
  return Sizes(total, total - outer, round(total - idle), frozen)


def cost(forward, tokens: int, learned: float = 1.0) -> Cost:
  """`Cost` of a model; forward: jaxpr of its evaluation, of so many tokens.

  learned: share of the parameters that have a gradient.
  """
  try:
    return Cost((2 + learned) * flops.of_jaxpr(forward).total / tokens)
  except ValueError as e:  # a loop whose length depends on data
    return Cost(math.nan, str(e))


def mean(found) -> Cost:
  """`Cost` of a token of [(share of all tokens, `Cost`)]."""
  total = math.fsum(share * one.flops for share, one in found)
  return Cost(total, next((one.why for _, one in found if one.why), ''))


def peak(devices) -> float | None:
  """bfloat16 operations a second of all devices; None: no figure is known."""
  devices = list(devices)
  chips = [target.of_device(device) for device in devices]
  if not all(chips):
    return None
  return sum(c.flops for c in chips if c) / target.cores(devices)


class Traced(NamedTuple):
  """What tracing a gradient shows.

  memory: bytes that a device is predicted to need: state, batch, gradient; as
    `paraxis check`.
  kernels: {op: names of the implementations that its calls resolve to}.
  """

  memory: int
  kernels: dict[str, tuple[str, ...]]


def trace(job, grads) -> Traced:
  """`Traced` of a job.

  The trace is kept: compiling the gradient does not repeat it, and reading it
  takes 0.1 CPU-seconds.

  Args:
    job: program.Program. grads: of its step.Step.
  """
  sizes, batch = dict(job.mesh.shape), job.batch_shapes()
  with job.context(), registry.recording() as kernels:
    closed = jax.jit(grads).trace(job.state.inner, batch).jaxpr
  inner = liveness.estimate(traced_lib.of_jaxpr(closed, sizes))
  needed = held((job.state, batch), sizes) + inner.peak
  return Traced(needed, {op: tuple(names) for op, names in kernels.items()})


def held(tree, sizes) -> int:
  """Bytes of one device's share; tree: of arrays or their shapes, laid out."""
  return sum(traced_lib.Value(x, sizes).bytes for x in jax.tree.leaves(tree))


def text(job, found: Cost, workdir='', traced=None) -> str:
  """The screen, of at most 80 columns where names allow it.

  Args:
    job: program.Job. found: its `cost`. workdir: of the run, or ''.
    traced: `Traced`, or None: neither kernels nor memory are shown.
  """
  config = job.config
  rows = [
    ('model', _model(sizes(job.model, job.state.params))),
    ('devices', _devices(job)),
    ('numbers', _numbers(config)),
    *([('kernels', _kernels(traced.kernels))] if traced else []),
    ('step', _step(config)),
    *([('stages', _stages(job))] if job.built.schedule else []),
    *([('ZeRO', kept)] if (kept := whole(job.built)) else []),
    *([('replicas', _replicas(job))] if config.outer.active else []),
    ('data', _data(job)),
    ('held out', held_out(job)),
    ('compute', _compute(job, found)),
  ]
  if traced:
    rows.append(('memory', _memory(job, traced.memory)))
  every, keep = config.checkpoint.every, config.checkpoint.keep
  saved = f'every {every} steps, the last {keep} kept, in {workdir}'
  rows.append(('checkpoints', saved if workdir else 'none without --workdir'))
  return '\n'.join(f'{name:12} {what}' for name, what in rows)


def _model(found):
  line = f'{found.total:,} parameters, {found.inner:,} besides embeddings'
  if found.active != found.total:
    line += f', {found.active:,} active for a token'
  if found.frozen:
    learned = found.total - found.frozen
    line += f'; {learned:,} learned, {found.frozen:,} frozen'
  return line


def _devices(job):
  flat = job.mesh.devices.flat
  kinds = collections.Counter(d.device_kind for d in flat)
  line = ', '.join(f'{n} x {kind}' for kind, n in kinds.items())
  if set(kinds) == {'cpu'} and job.mesh.size > 1:
    line += f', virtual, on {os.cpu_count()} processors'
  if jax.process_count() > 1:
    line += f', of {jax.process_count()} processes'
  return f'{mesh_lib.describe(dict(job.mesh.shape)) or "one device"}: {line}'


def whole(built) -> str:
  """What ZeRO does not share, as text; '': next to nothing.

  built: build.Built.
  """
  model, sizes = built.model, dict(built.mesh.shape)
  if built.rules.zero < rules_lib.OPTIMIZER or sizes['data'] == 1:
    return ''
  axes = {p: x for p, x in model.axes.items() if p not in model.frozen}
  shapes = {p: built.params[p].shape for p in axes}
  total, found = sum(map(math.prod, shapes.values())), {}
  for path, names in axes.items():
    given = names, shapes[path], built.rules, sizes, rules_lib.OPTIMIZER
    flat = jax.tree.leaves(tuple(rules_lib.stored(*given, path)))
    if 'data' not in flat:
      found[path] = math.prod(shapes[path])
  share = sum(found.values()) / max(total, 1)
  if share < LITTLE:
    return ''
  most = max(found, key=found.__getitem__)
  others = f' and {len(found) - 1} others' if len(found) > 1 else ''
  return (
    f'data={sizes["data"]} divides no size of {most} {shapes[most]}{others}: '
    f'{share:.0%} of the optimizer state is not sharded'
  )


def _numbers(config):
  model = config.model
  return f'parameters {model.param_dtype}, products {model.dtype}'


def _kernels(chosen):
  used = [f'{op} {"/".join(names)}' for op, names in chosen.items()]
  return ', '.join(used) or 'none: every op is plain XLA'


def _step(config):
  train, length = config.train, config.data.sequence_length
  line = (
    f'{train.batch_size} rows of {length:,} tokens: '
    f'{train.batch_size * length:,} tokens'
  )
  if train.batch_ramp:
    line += f' at the end of the ramp {train.batch_ramp}'
  if train.shape_cycle:
    line += f', in shorter rows by the cycle {train.shape_cycle}'
  if config.microbatches > 1:
    line += f', in {config.microbatches} microbatches'
  return f'{line}; {train.steps:,} steps'


def _stages(job):
  """The schedule, and rows that a stage computes for nothing."""
  schedule, held = job.built.schedule, job.model.depth
  line = f'{schedule.name}, {schedule.stages} stages'
  if schedule.chunks > 1:
    line += f' of {schedule.chunks} chunks'
  line += f', {len(held.kinds)} layers a chunk at most'
  if held.empty:
    line += (
      f'; {held.empty} of {held.rows.size} layer slots are padding, computed '
      'and discarded'
    )
  return line


def _replicas(job):
  """How replicas exchange, and the last steps that no exchange sees."""
  outer, steps = job.config.outer, job.config.train.steps
  kind = 'Nesterov' if outer.nesterov else 'heavy ball'
  n, what = job.config.mesh.replica, 'their mean'
  if outer.exchange == 'pairs':
    odd = n > 2 and n % 2 and ', one of them none,'
    what = f'each meets another{odd or ""} drawn anew'
  line = (
    f'{n} step alone; {what} every {outer.period} '
    f'steps, rate {outer.rate:g}, {kind} {outer.momentum:g}'
  )
  if outer.pull:
    line += f', pull {outer.pull:g}'
  if outer.clip:
    line += f', each number at most {outer.clip:g}'
  if outer.penalty:
    line += ', less for what is late'
  if outer.fragments > 1:
    line += f', {outer.fragments} fragments'
  if outer.codec:
    line += f', sent in {outer.codec}'
  if outer.delay:
    line += f', {outer.delay} steps late'
  if outer.mixing:
    line += f', mixing {outer.mixing:g}'
  elif 0 < outer.delay < outer.period:
    line += ', which replace those of a replica'
  missed = outer.missed(steps)
  if missed:
    line += f'; the last {missed} of {steps} steps are not all in the anchor'
  return line


def _data(job):
  batches, length = job.batches, job.config.data.sequence_length
  epochs = batches.epochs(job.config.train.steps)
  read = ', '.join(
    f'{part or ""} {_times(n)}'.strip() for part, n in epochs.items()
  )
  return (
    f'{job.corpus.path}: {batches.rows * length:,} tokens in rows, read '
    f'{read}; tokenizer {job.tokenizer.name}'
  )


def held_out(job) -> str:
  """What an evaluation reads, beside what the steps read; job: program.Job."""
  train, length = job.config.train, job.config.data.sequence_length
  tokens = sum(held.n_pairs for held in job.held_out)
  when = f'every {train.eval_every} steps' if train.eval_every else 'at the end'
  line = f'{tokens:,} tokens of {len(job.held_out)} domains, read {when}: '
  steps = tokens / (train.batch_size * length)
  if steps <= train.steps:
    return line + f'as many as {steps:,.3g} steps train on'
  times = steps / train.steps
  return line + f'{times:,.3g} times the training (cap: train.eval_batches)'


def _times(epochs):
  """1.234 -> '1.23 times', 0.00321 -> 'to 0.321%'."""
  return f'{epochs:.2f} times' if epochs >= 1 else f'to {100 * epochs:.3g}%'


def _compute(job, found):
  full = peak(job.mesh.devices.flat)
  if found.why:
    return f'not counted: {found.why}'
  line = f'{_metric(found.flops)}FLOP a token'
  line += ' of the standard loss (make_step has its own)' * found.own
  if full is None:
    kind = job.mesh.devices.flat[0].device_kind
    return f'{line}; no MFU, the peak of {kind} is not known'
  return f'{line}; MFU is of {_metric(full)}FLOP/s in bfloat16'


def _memory(job, predicted):
  """Predicted bytes beside those that a device may allocate."""
  line = f'{predicted / 2**30:.2f} GiB a device, predicted'
  mine = [
    d for d in job.mesh.devices.flat if d.process_index == jax.process_index()
  ]
  if mine[0].platform == 'cpu':
    ram = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    share = f', shared by all {len(mine)}' if mine[1:] else ''
    return f'{line}, of {ram / 2**30:.1f} GiB of RAM{share}'
  limit = (mine[0].memory_stats() or {}).get('bytes_limit')
  if not limit:  # the runtime does not say: the chip's own
    chip = target.of_device(mine[0])
    limit = chip.hbm // target.cores(mine) if chip else 0
  return f'{line}, of {limit / 2**30:.1f} GiB' if limit else line


def _metric(number):
  """1.2e9 -> '1.20 G'."""
  power = max(0, min(int(math.log10(max(number, 1))) // 3, 6))
  return f'{number / 1000**power:.3g} {" kMGTPE"[power].strip()}'
