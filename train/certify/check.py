"""`paraxis check`: is this layout possible, and what does it cost? No devices.

    paraxis check --config=llama_70b --mesh=data=64,fsdp=8,tensor=8

The gradient and the update of a step are traced from shapes alone on a mesh
without devices (jax.sharding.AbstractMesh): every layout is type-checked, and
the types give what each chip holds (sharding/meter/liveness.py) and receives
(sharding/meter/predict.py). Printed: parameters, bytes per chip by class, every
collective by the line that causes it, bytes received per mesh axis. Activations
are estimated and collectives predicted; `paraxis compile` counts both in a
compiled program. Sizes that their mesh axes do not divide are reported first,
all of them, with the nearest that divide (exit code 2). What replicas that step
alone exchange (train/steps/outer.py) stands apart: it is sent once in
outer.period steps. Cost: below a second for 70B parameters on 4096 chips.
"""

import dataclasses
import json
import math
import textwrap
from typing import Any, NamedTuple

import jax

from paraxis.configs.base import errors
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import liveness
from paraxis.sharding.meter import predict
from paraxis.sharding.meter import traced
from paraxis.train import expert_counts
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.run import header
from paraxis.train.steps import outer
from paraxis.train.steps import zeroth_order

SHOWN = 6  # saved arrays in the text; the JSON has them all
CLASSES = ('parameters', 'gradients', 'optimizer', 'activations')
OUTER = 'outer'  # a class too, of replicas: anchors, momentum, sums under way


class Problem(NamedTuple):
  """A logical axis that its mesh axes do not divide.

  where: a parameter or field with this axis. mesh: axis -> size. nearest: the
  largest smaller number of shards that divides it.
  """

  axis: str
  size: int
  where: str
  mesh: dict
  nearest: int

  def __str__(self):
    over = ' x '.join(f'{a}={n}' for a, n in self.mesh.items())
    what = f'{self.axis}={self.size:,} of {self.where}'
    return f'{what} over {over} (nearest {self.nearest})'


class Prediction(NamedTuple):
  """What `paraxis check` prints; bytes are per chip.

  mesh: axis -> size. parameters: of the whole model. held: {class: bytes}.
  memory: liveness.MemoryEstimate of the gradient. peak: most bytes in use at a
  time, state and batch included. sharded: [(logical axis, size, mesh axes,
  shards)]. messages: list of predict.Message; phase 'update': of the update.
  unknown: operations whose collectives could not be predicted. exchanges:
  messages of what is due once in `period` steps, by fragment in `phase`.
  whole: of header.whole.
  """

  mesh: dict
  rules: str
  remat: str
  parameters: int
  held: dict
  memory: Any
  peak: int
  sharded: list
  messages: list
  unknown: list
  exchanges: list
  period: int
  whole: str


def run(config, mesh_text='', as_json=False, say=print, more=None):
  """Checks and prints -> exit code: 0, or 2 if the layout is impossible.

  Args:
    config: schema.Config.
    mesh_text: --mesh=; '': the config's.
    as_json: one JSON document instead of text; it also lists the problems.
    say: prints a text.
    more: a function of the `Prediction`, whose text, or dict, comes behind.

  Raises:
    UserError: an impossible layout, in one line (as_json: sizes that do not
      divide are in the document instead).
  """
  found, fits = problems(config, mesh_text)
  if found and as_json:
    rows = [p._asdict() for p in found]
    say(json.dumps({'problems': rows, 'fits': fits}, indent=1))
    return errors.EXIT_USER
  if found:
    mesh = mesh_text or mesh_lib.describe(build.mesh_sizes(config))
    line = f'mesh {mesh} does not divide: {"; ".join(map(str, found))}.'
    for axis, sizes in fits.items():
      line += f' With {axis}={" or ".join(map(str, sizes))} its parts divide.'
    raise errors.UserError(line)
  report = check(config, mesh_text)
  behind = more(report) if more else None
  if as_json:
    say(json.dumps(to_json(report) | (behind or {}), indent=1))
  else:
    say('\n'.join(filter(None, (text(report), behind))))
  return errors.EXIT_OK


def parameters(config):
  """Number of parameters of a schema.Config, counted from shapes.

  Without what layers count for themselves (train/expert_counts.py).
  """
  model, shapes = _shapes(config)
  counted = set(expert_counts.paths(model))
  return sum(math.prod(n) for p, n in shapes.items() if p not in counted)


def _shapes(config):
  """(decoder.Decoder, {path: shape}), on no mesh."""
  model_checks.check_model(config.model)
  model = decoder.Decoder(config.model)
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
    leaves = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  return model, {path: leaf.shape for path, leaf in leaves.items()}


def resolved(config, mesh_text=''):
  """The schema.Config with the sizes of its mesh, or of --mesh=, which
  replaces them all: a pipeline has as many microbatches as stages."""
  sizes = dict(mesh_lib.abstract(build.mesh_sizes(config, mesh_text)).shape)
  mesh = dataclasses.replace(config.mesh, **sizes)
  return dataclasses.replace(config, mesh=mesh)


def problems(config, mesh_text=''):
  """Every dimension that its mesh axes do not divide.

  Returns:
    ([Problem], {mesh axis: nearest sizes}): with one of these sizes, the other
    axes unchanged, this axis divides every dimension that it shards.
  """
  config = resolved(config, mesh_text)
  sizes = build.mesh_sizes(config)
  dimensions = _dimensions(config)
  kv_heads = attention.num_kv_heads(config.model)

  def failing(sizes):
    rules = rules_lib.of(config.mesh, sizes, kv_heads)
    change = zeroth_order.layout(config, sizes)
    rules = change(rules) if change else rules
    for (name, size), where in dimensions.items():
      shards = math.prod(sizes[a] for a in rules.axes(name))
      if size % shards:
        yield name, size, where, rules.axes(name), shards

  found, guilty = [], set()
  for name, size, where, axes, shards in failing(sizes):
    mesh = {a: sizes[a] for a in axes if sizes[a] > 1}
    nearest = max(d for d in range(1, shards) if size % d == 0)
    found.append(Problem(name, size, where, mesh, nearest))
    guilty.update(mesh)
  fits = {}
  for axis in (a for a in mesh_lib.AXES if a in guilty):
    splits = lambda n, axis=axis: any(
      axis in axes for *_, axes, _ in failing({**sizes, axis: n})
    )
    good = [n for n in range(1, 2 * sizes[axis]) if not splits(n)]
    near = sorted(good, key=lambda n, axis=axis: abs(n - sizes[axis]))[:2]
    if near:
      fits[axis] = sorted(near)
  return found, fits


def _dimensions(config):
  """{(logical axis, size): the parameter or field that has it}, with batch."""
  model, shapes = _shapes(config)
  out = {}
  for path, shape in shapes.items():
    for name, size in zip(model.axes[path], shape, strict=True):
      if name != 'layers':  # stages share them out unevenly too
        out.setdefault((name, size), path)
  train, length = config.train, config.data.sequence_length
  rows = config.microbatch_rows
  what = f'train.batch_size={train.batch_size}'
  if config.microbatches > 1:
    what += f' in {config.microbatches} microbatches'
  out['batch', rows] = what
  for name in ('length', 'residual_length'):
    out[name, length] = f'data.sequence_length={length}'
  return {key: where for key, where in out.items() if key[0] is not None}


def check(config, mesh_text=''):
  """`Prediction` of a schema.Config; UserError: an impossible layout."""
  config = resolved(config, mesh_text)
  job = job_lib.of_shapes(config, '', abstract=True)
  built, state = job.built, job.state
  made = step_lib.make(built, job.optimizer, config.optimizer.clip_norm)
  sizes = dict(built.mesh.shape)
  with job.context():
    arguments = state.inner, job.batch_shapes()
    gradient, found = traced.trace(made.grads, sizes, *arguments)
    update, _ = traced.trace(made.update, sizes, state, *found)
    due = {
      name: traced.trace(run, sizes, state)[0]
      for name, run in outer.functions(job.config, built.model).items()
    }
  memory = liveness.estimate(gradient)
  messages, unknown = predict.collectives(gradient, sizes)
  updates, more = predict.collectives(update, sizes)
  exchanges = []
  for name, body in due.items():
    sent, less = predict.collectives(body, sizes)
    exchanges += [c._replace(phase=name) for c in sent]
    more = more + less
  held = lambda tree: header.held(tree, sizes)
  trees = state.inner, found[1], state.optimizer
  classes: dict = dict(zip(CLASSES, map(held, trees), strict=False))
  if due:
    classes[OUTER] = held((state.params, state.outer._replace(params={})))
  return Prediction(
    sizes,
    built.rules.name,
    config.train.remat,
    sum(built.model.sizes(state.params).values()),
    classes | {'activations': memory.saved},
    memory,
    held((state, arguments[1])) + memory.peak,
    _sharded(config, built),
    messages + [c._replace(phase='update') for c in updates],
    unknown + more,
    exchanges,
    config.outer.period,
    header.whole(built),
  )


def _sharded(config, built):
  """[(logical axis, size, mesh axes, shards)] of all that is sharded."""
  out, sizes = [], dict(built.mesh.shape)
  for name, size in _dimensions(config):
    axes = [a for a in built.rules.axes(name) if sizes[a] > 1]
    if axes:
      shards = math.prod(sizes[a] for a in axes)
      out.append((name, size, ','.join(axes), shards))
  return out


def to_json(report):
  """A `Prediction` as plain data; every number of `text` is in it."""
  keys = 'axis', 'size', 'mesh', 'shards'
  return {
    'mesh': report.mesh,
    'chips': math.prod(report.mesh.values()),
    'rules': report.rules,
    'remat': report.remat,
    'parameters': report.parameters,
    'bytes_per_chip': report.held,
    'offloaded_bytes_per_chip': report.memory.offloaded,
    'peak_bytes_per_chip_estimate': report.peak,
    'saved_for_backward': [k._asdict() for k in report.memory.kept],
    'sharded': [dict(zip(keys, row, strict=True)) for row in report.sharded],
    'messages_predicted': [
      dict(c._asdict(), total=c.total) for c in report.messages
    ],
    'bytes_received_by_axis': hlo.by_axis(_sent(report)),
    'bytes_received_by_kind': hlo.by_kind(_sent(report)),
    'exchanged_in_a_period': [
      dict(c._asdict(), total=c.total) for c in report.exchanges
    ],
    'period': report.period,
    'not_sharded_by_zero': report.whole,
    'not_predicted': report.unknown,
    'problems': [],
  }


def _sent(report):
  """Messages without slices, which send nothing."""
  return [c for c in report.messages if c.kind != predict.SLICE]


def text(report):
  """A `Prediction` as text of at most 80 columns."""
  chips = math.prod(report.mesh.values())
  mesh = mesh_lib.describe(report.mesh)
  lines = [
    f'{mesh}: {chips:,} chips, rules {report.rules}',
    f'{report.parameters:,} parameters',
    '',
    'bytes per chip',
  ]
  lines += [
    f'  {name:12} {_size(report.held[name])}'
    for name in (OUTER, *CLASSES)
    if name in report.held
  ]
  lines[-1] += f'  saved for the backward pass, remat {report.remat} (estimate)'
  if report.memory.offloaded:
    offloaded = _size(report.memory.offloaded)
    lines.append(f'  {"offloaded":12} {offloaded}  to the host')
  peak = _size(report.peak)
  lines += [
    f'  {"at most":12} {peak}  during the gradient, in total (estimate)',
    '',
    'most of the activations',
  ]
  for k in report.memory.kept[:SHOWN]:
    lines += _wrapped(f'{_size(k.bytes)}  {k.what}  {k.where}', 2)
  lines += ['', 'sharded dimensions']
  for name, size, axes, shards in report.sharded:
    lines.append(f'  {name:15} {size:>9,} over {axes}: {size // shards:,} each')
  if report.whole:
    lines += ['', *_wrapped(f'mesh.zero: {report.whole}', 0)]
  lines += ['', 'messages, predicted: times x bytes received, most first']
  for c, phases in _by_place(report.messages):
    axes = ','.join(c.axes)
    head = f'{c.count:>6,} x {_size(c.bytes)}  {c.kind} {axes}  {c.where}'
    lines += _wrapped(head, 0) + _wrapped(f'{phases}: {c.what}', 10)
  lines += ['', 'per mesh axis, predicted, received by a chip in a step']
  lines.append(hlo.table(_sent(report)))
  if report.exchanges:
    lines += ['', *_exchanged(report)]
  if report.unknown:
    lines += ['', 'not predicted:', *(f'  {what}' for what in report.unknown)]
  return '\n'.join(line.rstrip() for line in lines)


def _exchanged(report):
  """Lines on what replicas exchange."""
  total, every = sum(c.total for c in report.exchanges), report.period
  lines = [
    f'exchanged by replicas, predicted, once in {every:,} steps: '
    f'{_size(total).strip()}, {_size(total / every).strip()} a step'
  ]
  for name in dict.fromkeys(c.phase for c in report.exchanges):
    mine = [c for c in report.exchanges if c.phase == name]
    sizes = hlo.by_kind(mine)
    sent = ', '.join(f'{k} {_size(n).strip()}' for k, n in sizes.items())
    lines += _wrapped(f'{name}: {sent}', 2)
  return lines


def _wrapped(line, indent):
  """Lines of 80 columns, the first indented by `indent`, the others by 12."""
  return textwrap.wrap(
    line,
    80,
    initial_indent=' ' * indent,
    subsequent_indent=' ' * 12,
    break_long_words=False,
    break_on_hyphens=False,
  )


def _by_place(messages):
  """[(message, phases)], most bytes first; one row for all its phases."""
  groups = {}
  for c in messages:
    groups.setdefault(c._replace(count=0, phase=''), []).append(c)
  rows = []
  for key, same in groups.items():
    phases = ', '.join(f'{c.phase} {c.count:,}' for c in same)
    rows.append((key._replace(count=sum(c.count for c in same)), phases))
  return sorted(rows, key=lambda row: -row[0].total)


def _size(count):
  """Bytes as text of 10 columns."""
  units = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
  power = 0
  while count >= 1000 and power < len(units) - 1:
    count, power = count / 1024, power + 1
  return f'{count:6.{2 if power else 0}f} {units[power]:3}'
