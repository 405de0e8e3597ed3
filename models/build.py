"""A configuration becomes mesh, rules and model, checked before any compiling.

Sizes of the model, the mesh and the batch that do not fit together are reported
with both numbers; those of the model alone in checks.py.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

from paraxis.configs import schema
from paraxis.configs.base import mixers
from paraxis.models import batch as batch_lib
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models import layer
from paraxis.models import memory
from paraxis.models import parameter
from paraxis.models import side
from paraxis.models import trained
from paraxis.models.mixers import attention
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.sharding.pipeline import schedules
from paraxis.sharding.planner import auto_rules
from paraxis.sharding.planner import program_axes
from paraxis.sharding.sequence import attention as context
from paraxis.sharding.sequence import order as context_order
from paraxis.sharding.sequence import scan


class Built(NamedTuple):
  """mesh: jax Mesh. rules: Rules. model: Decoder.

  params: {path: jax.ShapeDtypeStruct with its NamedSharding}.
  choices: schema.Mesh. schedule: schedules.Schedule, None on one stage.
  pipeline: schema.Pipeline. outer: schema.Outer.
  """

  mesh: Any
  rules: Any
  model: Any
  params: Any
  choices: Any
  schedule: Any = None
  pipeline: Any = None
  outer: Any = schema.Outer()


def mesh_sizes(config, text=''):
  """Mesh axis -> size: `text` (--mesh=) replaces the whole config.mesh."""
  if text:
    return mesh_lib.parse(text)
  return {a: getattr(config.mesh, a) for a in mesh_lib.AXES}


RINGS = ('qkv', 'output', 'gate_up', 'down')


def _rings(text):
  """mesh.collective_matmul -> the products that run as rings."""
  names = tuple(filter(None, text.replace(' ', '').split(',')))
  for name in names:
    model_checks.need(
      name in (*RINGS, 'all'),
      f'mesh.collective_matmul={text!r}: {name!r} is not one of '
      f"{', '.join(RINGS)}, or 'all'." + schema.suggest(name, RINGS),
    )
  return RINGS if 'all' in names else names


def _split_over(rules, sizes, name):
  return tuple(a for a in rules.axes(name) if sizes[a] > 1)


ACTIVATIONS = (
  ('batch', 'residual_length', 'hidden'),
  ('batch', 'length', 'mlp'),
  ('batch', 'length', 'heads', 'head_dim'),
  ('batch', 'length', 'kv_heads', 'head_dim'),
  ('batch', 'length', 'vocab'),
)


def _check_activations(mesh, rules, sizes, apart):
  """UserError if the rules lay activations out as no product can make them.

  apart: replicas step alone, each in a manual region.
  """
  for names in ACTIVATIONS:
    rules_lib.spec(names, None, rules, sizes, 'activations')
  over = functools.partial(_split_over, rules, sizes)
  length, residual = over('length'), over('residual_length')
  model_checks.need(
    len(length) < 2,
    f'mesh.rules={mesh.rules!r}: length is over {" and ".join(length)}; '
    'attention crosses one mesh axis, context.',
  )
  layers = over('layers')
  model_checks.need(
    layers == (('stage',) if sizes['stage'] > 1 else ()),
    f'mesh.rules={mesh.rules!r}: layers are over '
    f'{" and ".join(layers) or "no axis"}; stages alone share them out, and do '
    f'(mesh.stage={sizes["stage"]}): take layers=stage.',
  )
  scattered = residual[len(length) :]
  apart = apart or bool(over('twins'))
  manual = "mesh.collectives='explicit'"
  if sizes['stage'] > 1:
    manual = f'A pipeline (mesh.stage={sizes["stage"]})'
  elif apart:
    manual = 'A replica apart (outer.exchange, train.estimator)'
  explicit = mesh.collectives == 'explicit' or sizes['stage'] > 1 or apart
  names = ('heads', 'mlp', 'vocab') if explicit else ('heads', 'mlp')
  for name in names:
    if scattered or explicit:
      found = tuple(a for a in over(name) if a != 'stage')
      model_checks.need(
        found == scattered,
        f'mesh.rules={mesh.rules!r}: residual_length is over '
        f'{scattered or "no axis"} beyond length, {name} over '
        f'{found or "no axis"}: what one sums the other scatters. Give '
        'them the same axes'
        + (
          f' ({manual}, tensor={sizes["tensor"]}, needs mesh.sequence=True).'
          if explicit
          else ', or set mesh.sequence=False.'
        ),
      )
  tokens = (*over('batch'), *over('twins'), *residual, 'stage')
  idle = [f'{a}={n}' for a, n in sizes.items() if n > 1 and a not in tokens]
  model_checks.need(
    not (explicit and idle),
    f'{manual} sums gradients over every mesh axis, but the rules '
    f'{mesh.rules!r} split no tokens over {", ".join(idle)}.',
  )


def _check_groups(config, stages):
  """UserError if chunks of layers would have parts of groups."""
  model, chunks = config.model, config.pipeline.chunks
  unit, kinds = layer.kinds_of(model)
  runs = len(kinds) // len(unit)
  model_checks.need(
    not model.groups or runs >= stages * chunks,
    f'model.groups={model.groups}: whole groups are in {runs} runs of '
    f'{len(unit)} layers (model.pattern={model.pattern!r}), fewer than '
    f'mesh.stage={stages} x pipeline.chunks={chunks}: take more groups, or '
    'fewer chunks.',
  )


def _schedule(config, sizes):
  """schedules.Schedule of a schema.Config; None on one stage."""
  pipeline = config.pipeline
  if sizes['stage'] == 1:
    return None
  model_checks.check_stages(config.model, sizes['stage'])
  _check_groups(config, sizes['stage'])
  options = {}
  model_checks.need(
    pipeline.schedule == 'skip' or not pipeline.skip_fraction,
    f'pipeline.skip_fraction={pipeline.skip_fraction} leaves stages out, which '
    f"pipeline.schedule={pipeline.schedule!r} does not: take 'skip', or 0.",
  )
  experts = config.model.experts
  model_checks.need(
    not (pipeline.skip_fraction and experts.count)
    or not (experts.balance or experts.router_z),
    f'pipeline.skip_fraction={pipeline.skip_fraction} leaves stages out of '
    'microbatches, and their experts would count the tokens of those alone in '
    f'model.experts.balance={experts.balance:g}, router_z='
    f'{experts.router_z:g}: take 0 for both, or no skip_fraction.',
  )
  if pipeline.schedule == 'skip':
    options = dict(fraction=pipeline.skip_fraction, seed=config.train.seed)
  schedule = schedules.make(
    pipeline.schedule,
    sizes['stage'],
    config.microbatches,
    pipeline.chunks,
    **options,
  )
  apart = schedule.weight is not None
  moved = 'offload' in memory.actions('full', config.train.memory).values()
  model_checks.need(
    not (moved and pipeline.activations == 'store'),
    f"pipeline.activations='store' keeps activations in slots on the device, "
    f'and train.memory={config.train.memory!r} offloads some: take '
    "'recompute', or offload none.",
  )
  model_checks.need(
    not (apart and config.mesh.collective_matmul),
    f'mesh.collective_matmul={config.mesh.collective_matmul!r} overlaps '
    f'products with sends, but pipeline.schedule={pipeline.schedule!r} takes '
    'their weight gradients apart: leave it empty.',
  )
  return schedule


def _layout(config, rules, sizes, schedule):
  """parameter.Layout of a schema.Config; UserError if it cannot be."""
  mesh, model = config.mesh, config.model
  rings = _rings(mesh.collective_matmul)
  length = functools.partial(_split_over, rules, sizes)
  gathered = length('residual_length') != length('length')
  model_checks.need(
    not rings or gathered,
    f'mesh.collective_matmul={mesh.collective_matmul!r} overlaps the gathers '
    'of sequence-sharded residuals, and here are none: it needs a tensor axis '
    f'above 1 (tensor={sizes["tensor"]}) and mesh.sequence=True.',
  )
  _check_activations(mesh, rules, sizes, config.outer.active)
  placement, experts = None, model_checks.expert_order(mesh, model)
  if schedule is not None:  # modules hold static data: no arrays
    placement = tuple(map(tuple, schedule.placement.tolist()))
  if not length('length'):
    return parameter.Layout(rings, placement=placement, experts=experts)
  letters = set(mixers.of_pattern(model.pattern)[0])
  attending = [k for k in sorted(letters) if layer.MIXERS[k].capabilities.slots]
  order = _token_order(mesh, model, attending, letters)
  shards = math.prod(sizes[a] for a in rules.axes('heads'))
  heads = model.num_heads // shards
  kv_heads = attention.num_kv_heads(model)
  kv_heads = max(1, math.lcm(kv_heads, shards) // shards)
  (axis,) = length('length')
  plan = context.ContextPlan(
    mesh.context_form, axis, sizes[axis], order, mesh.context_inner,
    model.attention,
  )  # fmt: skip
  length = config.data.sequence_length
  if attending:
    context.check(
      plan.form, plan.n, heads, kv_heads, length, plan.layout, plan.inner,
      plan.impl,
    )  # fmt: skip
  else:
    context_order.permutation(order, plan.n, length)  # it divides, or an error
  for kind in sorted(letters):
    layer.MIXERS[kind].check_context(model, length // plan.n)
  # Replicas that step alone, too, end a Newton scan together, by one number: on
  # CPU a message within one waits for all devices.
  together = tuple(a for a, n in sizes.items() if n > 1)
  across = scan.ScanPlan(mesh.context_scan, axis, together)
  return parameter.Layout(rings, plan, placement, across, experts)


def _token_order(mesh, model, attending, letters):
  """Order of tokens on the context axis; recurrences need them in a row."""
  order = context_order.resolve_order(
    mesh.context_order,
    [attention.mask_of(model, kind) for kind in attending],
  )
  recurs = lambda kind: layer.MIXERS[kind].capabilities.recurs
  recurrent = sorted(k for k in letters if k not in attending or recurs(k))
  if not recurrent:
    return order
  model_checks.need(
    mesh.context_order in ('auto', 'contiguous'),
    f'mesh.context_order={mesh.context_order!r}: the state of a recurrence '
    f'(model.pattern={model.pattern!r}: {", ".join(recurrent)}) passes from '
    "shard to shard in the order of tokens; take 'contiguous' or 'auto'.",
  )
  return 'contiguous'


@functools.lru_cache(maxsize=16)
def program_axes_of(model):
  """(shapes of parameters, their logical names, program_axes.Axes).

  model: schema.Model. It is traced for one CPU device, where no kernel hides a
  product.
  """
  made = decoder.Decoder(
    dataclasses.replace(model, attention='auto', scan='auto')
  )
  tokens = jax.ShapeDtypeStruct((2, 8), jax.numpy.int32)
  number = jax.ShapeDtypeStruct((), jax.numpy.float32)
  data = batch_lib.Batch(*[tokens] * 5, denominator=number)
  with (
    jax.default_device(jax.local_devices(backend='cpu')[0]),
    jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
  ):
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    found = program_axes.find(
      lambda p, b: made.logits(p, made.features(p, b)[0]), shapes, data
    )
  return shapes, made.axes, found


def _automatic(config, sizes):
  """{logical axis: mesh axes} of mesh.rules=auto; None: it is not asked for."""
  if config.mesh.rules != rules_lib.AUTO or sizes['tensor'] == 1:
    return None
  model_checks.need(
    not config.model.features,
    f'mesh.rules=auto traces rows of tokens, and model.features='
    f'{config.model.features} reads frames, too: name the rules.',
  )
  model_checks.need(
    not config.model.stream_copies,
    f'mesh.rules=auto traces rows as they stand, and model.streams='
    f'{config.model.streams} reads copies of them: name the rules.',
  )
  shapes, axes, found = program_axes_of(config.model)
  table = auto_rules.table(shapes, axes, sizes['tensor'], found)
  stages = rules_lib.PRESETS['data'].table  # over them, too: depth, vocabulary
  return {a: (*stages.get(a, ()), *over) for a, over in table.items()}


def build(
  config, mesh_text='', remat=None, devices=None, abstract=False, change=None
):
  """`Built` for a schema.Config on `devices` (default: all).

  remat: schema.Train.remat, with config.train.memory; None: not for training.
  abstract: a mesh of no devices (jax.sharding.AbstractMesh), to check a layout.
  change: rules.Rules -> those to use in place of them; None: they are used.

  Raises:
    UserError: the model contradicts itself, the mesh does not fit the devices,
      an axis does not divide, or a mesh axis would be idle.
  """
  model_checks.check_model(config.model)
  sizes = mesh_sizes(config, mesh_text)
  if abstract:
    mesh = mesh_lib.abstract(sizes)
  else:
    mesh = mesh_lib.make(sizes, devices)
  sizes = dict(mesh.shape)
  config = dataclasses.replace(
    config, mesh=dataclasses.replace(config.mesh, **sizes)
  )
  rules = rules_lib.of(
    config.mesh,
    sizes,
    attention.num_kv_heads(config.model),
    config.model.experts.region if config.model.experts.count else '',
    _automatic(config, sizes),
  )
  rules = rules if change is None else change(rules)
  rules.check_used(sizes)
  side.check(config, sizes['stage'])
  schedule = _schedule(config, sizes)
  layout = _layout(config, rules, sizes, schedule)
  model_checks.check_region(config.model, rules, sizes)
  policy = remat and memory.policy(remat, config.train.memory)
  learned = trained.of(config.train)
  pairs = remat is not None and config.train.objective == 'block'
  model = decoder.Decoder(config.model, policy, layout, learned, pairs)
  with (
    annotate.use(rules),
    jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
  ):
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  params = {}
  for path, leaf in shapes.items():
    spec = rules_lib.spec(model.axes[path], leaf.shape, rules, sizes, path)
    params[path] = jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec)
    )
  return Built(
    mesh, rules, model, params, config.mesh, schedule, config.pipeline,
    config.outer,
  )  # fmt: skip


def check_rows(rows, built, what):
  """UserError if `rows` rows cannot be spread over the batch shards."""
  rules_lib.spec(('batch',), (rows,), built.rules, dict(built.mesh.shape), what)


def check_tokens(length, built, what):
  """UserError if `length` tokens cannot be spread over the shards of a row."""
  for name in ('length', 'residual_length'):
    rules_lib.spec(
      (name,), (length,), built.rules, dict(built.mesh.shape), what
    )


@contextlib.contextmanager
def use(built):
  """Within this context the rules and the mesh of a `Built` are in force."""
  abstract = isinstance(built.mesh, jax.sharding.AbstractMesh)
  enter = jax.sharding.use_abstract_mesh if abstract else jax.set_mesh
  with annotate.use(built.rules), enter(built.mesh):
    yield
