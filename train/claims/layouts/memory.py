"""Claims about what a layout makes each device hold.

ZeRO (arXiv:1910.02054, section 5) divides parameters, gradients and optimizer
state, 2 + 2 + K bytes a parameter in mixed precision (K = 12); in float32 they
are 4 + 4 + 8. On N devices, stage by stage:

    0: 2 + 2 + K    1: 2 + 2 + K / N    2: 2 + (2 + K) / N    3: (2 + 2 + K) / N

Gradients count as the sums over microbatches that a step holds: whole until
stage 2. Held bytes are read from arrays on devices (HLO), from a compile ahead
of time for a TPU topology (AOT), or from the rules alone (SIM); predicted ones
are those of `paraxis check` (train/certify/check.py), and no time follows from
them.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.models import memory as policies
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import placement
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import liveness
from paraxis.sharding.meter import traced
from paraxis.train import step as step_lib
from paraxis.train.certify import check
from paraxis.train.certify import trial
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

STAGES = range(4)


def zero_off():
  """Knock-out: gradients and optimizer state are laid out as parameters are."""
  own = lambda names, shape, rules, sizes, stage, where='': rules_lib.spec(
    names, shape, rules, sizes, where
  )
  return knockouts.patched(rules_lib, 'stored', own)


def parameters_whole():
  """Knock-out: ZeRO 3 leaves parameters whole, as ZeRO 2 does."""
  real = rules_lib.of
  two = lambda mesh, *given, **how: real(
    dataclasses.replace(mesh, zero=min(mesh.zero, 2)), *given, **how
  )
  return knockouts.patched(rules_lib, 'of', two)


def all_saved():
  """Knock-out: nothing is recomputed, whatever train.remat says."""
  return knockouts.patched(policies, 'policy', lambda remat, text='': None)


def _sums(body, times):
  """Bytes of what the first loop of `times` turns carries, or None."""
  for op in body.ops:
    if op.name == 'scan' and op.times == times:
      return sum(v.bytes for v in op.outs)
    inner = [_sums(b, times) for b in op.bodies]
    if any(inner):
      return next(filter(None, inner))
  return None


@functools.lru_cache(maxsize=8)
def _held(config, devices):
  """Bytes of {parameters, sums, gradients, optimizer, peak}, paths.

  sums: of gradients over microbatches. gradients: as they leave the step.
  peak: of the gradient, its arguments not counted (an estimate). paths: of
  parameters that stay whole.
  """
  side, times = trial.Runner(config, devices), config.train.microbatches
  job, rng = side.job, np.random.default_rng(0)
  params = {
    p: rng.normal(size=x.shape).astype(x.dtype)
    for p, x in job.built.params.items()
  }
  state = side.start(params)
  grads = step_lib.make(job.built, job.optimizer, 0.0).grads
  with job.context():
    batch = side.put(trial.batches(config, False)[0])
    found = side.gradients(state, trial.batches(config, False)[0])[1]
    body, _ = traced.trace(grads, dict(job.mesh.shape), state.variables, batch)
  held = lambda tree: experiment.bytes_by_device(tree)[0]
  whole = [p for p, x in state.params.items() if not any(x.sharding.spec)]
  return {
    'parameters': held(state.params),
    'sums': _sums(body, times),
    'gradients': held(found),
    'optimizer': held(state.optimizer),
    'peak': liveness.estimate(body).peak,
  }, whole


def zero_memory(run, *, mesh, bytes_per_parameter, within):
  """HLO: bytes a device holds at ZeRO stages 0 to 3, from real arrays.

  Parameters, sums of gradients over 2 microbatches, optimizer state.
  """
  how = {'mesh.collectives': 'explicit', 'train.microbatches': 2}
  held, whole = [], []
  for stage in STAGES:
    row, whole = _held(
      *experiment.on(run.config, mesh, how | {'mesh.zero': stage})
    )
    held.append(row)
  count = held[0]['parameters'] / 4  # float32, and whole at stage 0
  per = lambda name: experiment.numbers(
    [row[name] / count for row in held], '.2f'
  )
  total = [
    (row['parameters'] + row['sums'] + row['optimizer']) / count for row in held
  ]
  return experiment.near(
    total,
    bytes_per_parameter,
    within,
    f'{mesh}, float32, bytes a parameter: parameters {per("parameters")}; sums '
    f'over microbatches {per("sums")}; optimizer {per("optimizer")}. '
    f'Gradients leave the step as {per("gradients")}. Whole at stage 3: '
    f'{", ".join(whole)}. Below stage 3 the gradient of one microbatch is '
    'whole until it is scattered: beside the parameters the gradient takes, '
    f'activations included, {per("peak")} (estimate)',
  )


def _counts(config, stage):
  """Numbers a device holds: of parameters, of gradients' sums, of state."""
  config = experiment.fields(config, {'mesh.zero': stage})
  built = build.build(config, abstract=True)
  sizes = dict(built.mesh.shape)

  def held(first):
    total = 0
    for p, x in built.params.items():
      axes = built.model.axes[p]
      spec = rules_lib.stored(axes, x.shape, built.rules, sizes, first)
      shard = jax.NamedSharding(built.mesh, spec).shard_shape(x.shape)
      total += math.prod(shard)
    return total

  own = math.inf  # a stage from which nothing more is sharded
  return tuple(map(held, (own, rules_lib.SUMS, rules_lib.OPTIMIZER)))


def zero_published(run, *, model, devices, widths, gigabytes, within):
  """SIM: the table of the paper's figure 1, by our rules, without devices.

  Args:
    model: {'section.field': value} beyond the config's.
    devices: on the data axis.
    widths: bytes of a parameter, of its gradient, of its optimizer state.
    gigabytes: of each stage. within: relative difference.
  """
  sizes = experiment.ONE | {'mesh.data': devices}
  config = experiment.fields(run.config, sizes, model)
  counts = [_counts(config, stage) for stage in STAGES]
  table = lambda widths: [
    sum(n * w for n, w in zip(row, widths, strict=True)) / 1e9 for row in counts
  ]
  text = lambda row: experiment.numbers(row, '.3g')
  found = table(widths)
  return claims.Outcome(
    f'{text(gigabytes)} +-{within:.1%}',
    text(found),
    f'GB a device, data={devices}, {counts[0][0] / 1e9:.2f}B parameters, '
    f'bytes {" + ".join(map(str, widths))}; in float32, 4 + 4 + 8: '
    f'{text(table((4, 4, 8)))}',
    all(
      abs(a - b) <= within * b for a, b in zip(found, gigabytes, strict=True)
    ),
  )


def zero_compiled(run, *, model, topologies, within):
  """AOT: what the update of a step holds on real machines, stages 0, 1, 3.

  Its arguments: parameters, optimizer state, gradients as they leave the step
  (which from stage 1 on are sharded: stage 2 is stage 1 here).

  Args:
    model: {'section.field': value} beyond the config's.
    topologies: data spans the devices of each.
    within: relative difference from the formula.
  """
  off, held = [], []
  for name in topologies:
    n, row = len(aot.topology(name).devices), []
    for stage, least in ((0, 16), (1, 4 + 12 / n), (3, 16 / n)):
      layout = {
        'mesh.data': n,
        'mesh.zero': stage,
        'train.batch_size': n,
        'train.microbatches': 1,
      }
      config = experiment.fields(run.config, layout, model)
      memory, job = experiment.step_memory(config, name, 'update')
      count = sum(math.prod(p.shape) for p in job.state.params.values())
      off.append(abs(memory.arguments / (count * least) - 1))
      row.append(f'{memory.arguments / 1e9:.2f} ({memory.peak / 1e9:.2f})')
    held.append(f'{name} {", ".join(row)}')
  return claims.Outcome(
    f'<= {within:.1%} off',
    f'{max(off):.1%} off',
    f'{count / 1e9:.2f}B parameters in float32; 16, 4 + 12 / N, 16 / N bytes '
    'each. GB, and at the worst moment of the update, when parameters are '
    f'gathered: {"; ".join(held)}',
    max(off) <= within,
  )


@functools.lru_cache(maxsize=64)
def _report(config):
  return check.check(config)


def _predicted(config, fields):
  """{quantity: bytes} of `paraxis check`: held, 'peak', received by axis.

  fields: {'section.field': value}; mesh axes left out are 1.
  """
  report = _report(experiment.fields(config, experiment.ONE, fields))
  if report.unknown:
    raise errors.UserError(
      f'{fields}: {"; ".join(report.unknown)}: not predicted, so no claim.'
    )
  return {**report.held, 'peak': report.peak, **hlo.by_axis(report.messages)}


def _gigabytes(size):
  return f'{size / 1e9:,.0f}' if size >= 1e12 else f'{size / 1e9:.3g}'


def predicted_ratios(run, *, models, base, steps, ratios, within):
  """SIM: how predicted bytes of a chip change with the layout.

  Args:
    models: {name: {'section.field': value} beyond the config's}.
    base: {'section.field': value}; mesh axes left out are 1.
    steps: list of fields that change in `base`.
    ratios: {quantity: ratio to base of each step}; a quantity is a class of
      bytes held (parameters, gradients, optimizer, activations, peak) or a
      mesh axis, over which bytes are received.
    within: relative difference allowed.
  """
  off, predicted = [], []
  for name, fields in models.items():
    rows = [_predicted(run.config, fields | base | s) for s in ({}, *steps)]
    parts = []
    for quantity, wanted in ratios.items():
      values = [row.get(quantity, 0) for row in rows]
      parts.append(f'{quantity} {" ".join(map(_gigabytes, values))}')
      for value, ratio in zip(values[1:], wanted, strict=True):
        off.append(abs(value / values[0] / ratio - 1))
    predicted.append(f'{name} {", ".join(parts)}')
  wanted = '; '.join(
    f'{name} {experiment.numbers(row, ".3g")}' for name, row in ratios.items()
  )
  return claims.Outcome(
    f'{wanted}; +-{within:.0%}',
    f'{max(off):.1%} off',
    f'predicted GB a chip: {"; ".join(predicted)}; '
    f'{" -> ".join(map(_fields, (base, *steps)))}',
    max(off) <= within,
  )


def _fields(fields):
  return ','.join(f'{k}={v}' for k, v in fields.items())


def predicted_at_most(run, *, base, step, quantity, ratio):
  """SIM: predicted bytes of a chip shrink at least so much.

  Args:
    base, step, quantity: as in `predicted_ratios`, of one step.
    ratio: the most that step over base may be.
  """
  before, after = (
    _predicted(run.config, base | fields)[quantity] for fields in ({}, step)
  )
  return experiment.at_most(
    after / before,
    ratio,
    f'predicted GB a chip, {quantity}: {_gigabytes(before)} -> '
    f'{_gigabytes(after)}; {_fields(base)} -> {_fields(step)}',
  )


def predicted_fits(run, *, models, layouts, memory, fits):
  """SIM: which models fit into a chip's memory, in which layout.

  Args:
    models: {name: {'section.field': value} beyond the config's}.
    layouts: list of fields, as in `predicted_ratios`.
    memory: of a chip, in bytes.
    fits: {name: whether each of the layouts fits}.
  """
  found, predicted = {}, []
  for name, fields in models.items():
    peaks = [_predicted(run.config, fields | l)['peak'] for l in layouts]
    found[name] = [bool(peak <= memory) for peak in peaks]
    predicted.append(f'{name} {" ".join(map(_gigabytes, peaks))}')
  say = lambda table: '; '.join(
    f'{name} {" ".join("no yes".split()[fit] for fit in row)}'
    for name, row in table.items()
  )
  return claims.Outcome(
    say(fits),
    say(found),
    f'predicted GB at the worst moment, of {memory / 1e9:g}: '
    f'{"; ".join(predicted)}; layouts {"; ".join(map(_fields, layouts))}. No '
    'throughput is claimed',
    found == fits,
  )


@dataclasses.dataclass(frozen=True)
class _Chip:
  """What sharding/placement.py asks of a device; hosts hold them in turn."""

  id: int
  process_index: int
  platform: str = 'gpu'
  device_kind: str = 'any'


def tensor_outermost():
  """Knock-out: neighbours on the mesh axis `tensor` are far apart."""
  real = placement.place

  def place(sizes, devices):
    turned = {'tensor': sizes['tensor']} | dict(sizes)
    first = [*turned].index('tensor')
    placed = real({'tensor': turned.pop('tensor')} | turned, devices)
    return np.moveaxis(placed, first, [*sizes].index('tensor'))

  return knockouts.patched(placement, 'place', place)


def axis_within_host(run, *, axis, host, meshes, crosses):
  """SIM: hosts that one group of a mesh axis spans, as devices are placed.

  By `placement.place`, for devices that are listed host by host, without a
  torus.

  Args:
    axis: of the mesh. host: chips of one.
    meshes: list of them. crosses: for each, hosts.
  """
  found = []
  for mesh in meshes:
    asked = mesh_lib.parse(mesh)
    count = math.prod(asked.values())
    chips = [_Chip(i, i // host) for i in range(count)]
    placed = placement.place(mesh_lib.resolve(asked, count), chips)
    rows = np.moveaxis(placed, mesh_lib.AXES.index(axis), -1)
    groups = rows.reshape(-1, asked[axis])
    found.append(max(len(set(map(placement.host_of, g))) for g in groups))
  text = experiment.numbers
  return claims.Outcome(
    text(crosses),
    text(found),
    f'hosts of {host} chips that a group of {axis} spans, as sharding/'
    f'placement.py places {"; ".join(meshes)}',
    found == list(crosses),
  )
