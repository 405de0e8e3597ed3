"""`paraxis check --chip=v5p`: does a layout fit the chip, and what would?

Fits: what `paraxis check` predicts of one device at its peak against the memory
of the chip (sharding/meter/target.py); of v4 and tpu7x a device is half a chip.
What does not fit is predicted again with one change at a time, by the same
function: more recomputation, more microbatches, another mesh of as many
devices, a larger mesh; then recomputation with each of the others.

The least time of a step is a model, not a measurement (meter/roofline.py):

    compute   3 forward passes in bfloat16 at the chip's peak; recomputation is
              not counted
    memory    parameters twice a microbatch, gradients twice, parameters and
              optimizer state read and written, saved activations twice
    links     predicted messages, at the bandwidth of their mesh axes

with consecutive devices on one host (of eight GPUs) or in one slice.
Cost: of one prediction (a second at 70B parameters), times the changes tried.
"""

import math
import types
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import roofline
from paraxis.sharding.meter import target
from paraxis.train import loop
from paraxis.train.certify import check

REMAT = ('none', 'attention', 'dots', 'full')
CORES = {'v4': 2, 'tpu7x': 2}  # devices that share one chip
MOST_GROWTH = 16  # times the devices asked for
MOVES = (('data', 'fsdp'), ('data', 'tensor'), ('fsdp', 'tensor'))


class Trial(NamedTuple):
  """A change and the peak that it is predicted to have, in bytes."""

  flags: str
  peak: int


class ChipVerdict(NamedTuple):
  """A layout on a chip: bytes of a device, {part: seconds}, what was tried.

  why: the compute part was not counted. padded: links and memory are those of
  a padded exchange of experts, which the chip does not use.
  """

  chip: str
  memory: int
  peak: int
  seconds: dict
  why: str
  tried: list
  padded: bool = False

  @property
  def fits(self):
    return self.peak <= self.memory

  @property
  def fitting(self):
    return [t for t in self.tried if t.peak <= self.memory]


def parse(name: str) -> tuple[target.Chip, int]:
  """(Chip, bytes of one of its devices); UserError lists those known."""
  if name not in target.CHIPS:
    raise errors.UserError(
      f'--chip={name} is not one of {", ".join(target.CHIPS)}.'
      + schema.suggest(name.lower(), target.CHIPS)
    )
  chip = target.CHIPS[name]
  return chip, chip.hbm // CORES.get(name, 1)


def run(config, mesh_text='', as_json=False, chip='', say=print) -> int:
  """`paraxis check` -> exit code: 0; 1 if the layout does not fit the chip."""
  if not chip:
    return check.run(config, mesh_text, as_json, say)
  parse(chip)
  found = []

  def more(report):
    found.append(verdict(config, mesh_text, chip, report))
    return dict(chip=to_json(found[0])) if as_json else text(found[0])

  code = check.run(config, mesh_text, as_json, say, more)
  if code != errors.EXIT_OK:
    return code
  return errors.EXIT_OK if found[0].fits else errors.EXIT_DIFFERENT


def verdict(config, mesh_text, name, report=None) -> ChipVerdict:
  """`ChipVerdict` on a schema.Config; report: check.check of it, if known."""
  _, memory = parse(name)
  config = check.resolved(config, mesh_text)
  report = report or check.check(config, mesh_text)
  seconds, why = times(config, report, name)
  tried = []
  if report.peak > memory:
    tried = _tried(config, report.mesh, memory)
  experts = config.model.experts
  split = experts.count and any(
    axis == 'experts' for axis, *_ in report.sharded
  )
  padded = split and not (experts.capacity_factor or experts.hierarchical)
  return ChipVerdict(
    name, memory, report.peak, seconds, why, tried, bool(padded)
  )


def _tried(config, sizes, memory):
  """[Trial] of one change at a time, then with full recomputation."""
  alone = [*_recomputed(config), *_sliced(config), *_meshes(sizes)]
  found, fits = [], set()

  def attempt(kind, changes, mesh):
    if kind in fits:
      return  # the nearest of its kind is known
    flags = [f'--config.{n}={v}' for n, v in changes.items()]
    if mesh != sizes:
      flags.append(f'--mesh={mesh_lib.describe(mesh)}')
    changed = schema.with_values(config, changes)
    try:
      peak = check.check(changed, mesh_lib.describe(mesh)).peak
    except errors.UserError:
      return  # it does not divide
    found.append(Trial(' '.join(flags), peak))
    if peak <= memory:
      fits.add(kind)

  for kind, changes, mesh in alone:
    attempt(kind, changes, mesh or sizes)
  if fits or config.train.remat == 'full':
    return found
  for kind, changes, mesh in alone:
    if kind != 'remat':
      attempt(kind, {'train.remat': 'full', **changes}, mesh or sizes)
  return found


def _recomputed(config):
  at = REMAT.index(config.train.remat)
  for remat in REMAT[at + 1 :]:
    yield 'remat', {'train.remat': remat}, None


def _sliced(config):
  """More accumulation slices (train.microbatches), with stages too."""
  name = 'train.microbatches'
  count = config.train.microbatches * 2
  while config.train.batch_size % count == 0:
    yield 'microbatches', {name: count}, None
    count *= 2


def _meshes(sizes):
  """Meshes of as many devices, then larger ones; fsdp grows."""
  for kind, (giver, taker) in zip('abc', MOVES, strict=False):
    mesh = dict(sizes)
    while mesh[giver] % 2 == 0:
      mesh = mesh | {giver: mesh[giver] // 2, taker: mesh[taker] * 2}
      yield kind, {}, mesh
  factor = 2
  while factor <= MOST_GROWTH:
    yield 'larger', {}, sizes | {'fsdp': sizes['fsdp'] * factor}
    factor *= 2


def times(config, report, name) -> tuple[dict[str, Any], str]:
  """({'compute', 'memory', 'links': seconds}, why compute is not counted)."""
  chip, _ = parse(name)
  count, cores = math.prod(report.mesh.values()), CORES.get(name, 1)
  cost = loop.cost(config)
  tokens = config.train.batch_size * config.data.sequence_length
  held, parts = report.held, config.microbatches
  moved = 2 * (held['parameters'] + held['activations']) * parts
  moved += 2 * (held['parameters'] + held['gradients'] + held['optimizer'])
  where = types.SimpleNamespace(
    axis_names=tuple(report.mesh),
    devices=_places(chip, tuple(report.mesh.values()), count, cores),
  )
  topology = aot.Topology(name, name, chip, 1, (), cores)
  sent = [c for c in report.messages if c.total and c.axes]
  flops = cost.flops * tokens / count
  found = roofline.times(topology, where, flops, moved, sent).parts
  if cost.why:
    found['compute'] = 0.0
  return found, cost.why


def _places(chip, shape, count, cores):
  """Stand-ins for devices that know their host and slice."""
  hosts = target.GPUS_PER_HOST if chip.platform == 'cuda' else 4 * cores
  devices = np.empty(count, object)
  for i in range(count):
    devices[i] = types.SimpleNamespace(
      platform='tpu' if chip.platform == 'tpu' else 'gpu',
      slice_index=i // (chip.most * cores),
      process_index=i // hosts,
    )
  return devices.reshape(shape)


def to_json(found: ChipVerdict) -> dict:
  """A `ChipVerdict` as plain data."""
  return dict(
    name=found.chip,
    memory_bytes=found.memory,
    fits=found.fits,
    missing_bytes=max(0, found.peak - found.memory),
    seconds_model_not_measured=found.seconds,
    compute_not_counted=found.why,
    padded_exchange=found.padded,
    tried=[t._asdict() for t in found.tried],
  )


def text(found: ChipVerdict) -> str:
  """A `ChipVerdict` as lines."""
  gib = lambda n: f'{n / 2**30:.2f} GiB'
  over = gib(abs(found.memory - found.peak))
  says = (
    f'fits: {over} left' if found.fits else f'DOES NOT FIT: {over} too much'
  )
  lines = [
    '',
    f'{found.chip}: {says}',
    f'  {gib(found.peak)} of {gib(found.memory)} at the peak (estimate)',
  ]
  for trial in sorted(found.fitting, key=lambda t: t.peak):
    lines.append(f'  fits with {trial.flags}: {gib(trial.peak)}')
  if not found.fits and not found.fitting:
    if found.tried:
      least = min(found.tried, key=lambda t: t.peak)
      lines.append(
        f'  none of {len(found.tried)} changes fits; the least, {least.flags}: '
        f'{gib(least.peak)}'
      )
    else:
      lines.append('  no change that divides is known')
  parts = ', '.join(
    f'{name} {_seconds(s)}'
    for name, s in found.seconds.items()
    if name != 'compute' or not found.why
  )
  least = max(found.seconds.values())
  lines.append(
    f'a step takes at least {_seconds(least)}: a model, not measured'
  )
  lines.append(f'  {parts}')
  if found.padded:
    lines.append(
      '  links and memory count a padded exchange of experts, which is ragged '
      'there: up to experts / top_k times less is sent'
    )
  if found.why:
    lines.append(f'  compute is not counted: {found.why}')
  return '\n'.join(lines)


def _seconds(s):
  return f'{s:.3g} s' if s >= 1 else f'{s * 1e3:.3g} ms'
