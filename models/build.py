"""From a checked configuration to mesh, rules and model: before any compiling.

Every way in which the numbers of a model, a mesh and a batch cannot fit
together is found here, in plain integers, and reported with both numbers.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax

from paraxis.configs import errors
from paraxis.configs import schema
from paraxis.models import attention
from paraxis.models import decoder
from paraxis.models import memory
from paraxis.models import parameter
from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding import context
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib


class Built(NamedTuple):
  """mesh: jax Mesh. rules: Rules. model: Decoder.

  params: {path: jax.ShapeDtypeStruct with its NamedSharding}.
  choices: schema.Mesh.
  """

  mesh: Any
  rules: Any
  model: Any
  params: Any
  choices: Any


def _need(condition, text):
  if not condition:
    raise errors.UserError(text)


def check_model(model):
  """UserError if the fields of a schema.Model contradict each other."""
  d, n, k = model.d_model, model.num_heads, attention.num_kv_heads(model)
  _need(
    model.head_dim or d % n == 0,
    f'model.d_model={d} is not divisible by model.num_heads={n}; set '
    'model.head_dim, or change one of them.',
  )
  _need(
    n % k == 0,
    f'model.num_heads={n} is not divisible by model.num_kv_heads={k}.',
  )
  h = attention.head_dim(model)
  rope = model.position == 'rope'
  _need(
    not rope or h % 2 == 0,
    f'model.head_dim={h} is odd: rotary positions turn pairs.',
  )
  _need(
    'float64' not in (model.dtype, model.param_dtype)
    or jax.dtypes.canonicalize_dtype('float64') == 'float64',
    'model.dtype or model.param_dtype is float64, which jax has switched off: '
    'set JAX_ENABLE_X64=1 in the environment.',
  )
  registry.resolve('attention', model.attention)
  low, high = model.rope_low_frequency, model.rope_high_frequency
  _need(
    model.rope_scaling not in ('llama3', 'yarn') or 0 < low < high,
    f'model.rope_scaling={model.rope_scaling!r} needs 0 < '
    f'model.rope_low_frequency={low} < model.rope_high_frequency={high}.',
  )
  _need(
    model.rope_scaling != 'yarn' or model.rope_theta > 1,
    f"model.rope_scaling='yarn' needs model.rope_theta={model.rope_theta} "
    'above 1.',
  )
  _need(model.pattern, 'model.pattern is empty: name at least one layer kind.')
  for kind in model.pattern:
    _need(
      kind in decoder.KINDS,
      f'model.pattern={model.pattern!r}: {kind!r} is not a layer kind '
      f'({", ".join(decoder.KINDS)}).',
    )
  _need(
    'W' not in model.pattern or model.window,
    f'model.pattern={model.pattern!r} has W layers but model.window=0.',
  )
  _need(
    rope or model.max_positions,
    "model.position='learned' needs model.max_positions, rows of its table.",
  )


def check_length(model, length, what):
  """UserError if a learned position table is shorter than `length`."""
  if model.position == 'learned':
    _need(
      length <= model.max_positions,
      f'{what} is {length} tokens, but model.max_positions='
      f'{model.max_positions} is the length of the position table.',
    )


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
    _need(
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


def _check_activations(mesh, rules, sizes):
  """UserError if the rules lay activations out as no product can make them."""
  for names in ACTIVATIONS:
    rules_lib.spec(names, None, rules, sizes, 'activations')
  over = functools.partial(_split_over, rules, sizes)
  length, residual = over('length'), over('residual_length')
  _need(
    len(length) < 2,
    f'mesh.rules={mesh.rules!r}: length is over {" and ".join(length)}; '
    'attention crosses one mesh axis, context.',
  )
  scattered = residual[len(length) :]
  explicit = mesh.collectives == 'explicit'
  names = ('heads', 'mlp', 'vocab') if explicit else ('heads', 'mlp')
  for name in names:
    if scattered or explicit:
      _need(
        over(name) == scattered,
        f'mesh.rules={mesh.rules!r}: residual_length is over '
        f'{scattered or "no axis"} beyond length, {name} over '
        f'{over(name) or "no axis"}: what one sums the other scatters. Give '
        'them the same axes'
        + (
          f" (mesh.collectives='explicit', tensor={sizes['tensor']}, needs "
          'mesh.sequence=True).'
          if explicit
          else ', or set mesh.sequence=False.'
        ),
      )
  tokens = (*over('batch'), *residual)
  idle = [f'{a}={n}' for a, n in sizes.items() if n > 1 and a not in tokens]
  _need(
    not (explicit and idle),
    f"mesh.collectives='explicit' sums gradients over every mesh axis, but the "
    f'rules {mesh.rules!r} split no tokens over {", ".join(idle)}.',
  )


def _layout(config, rules, sizes):
  """parameter.Layout of a schema.Config; UserError if it cannot be."""
  mesh, model = config.mesh, config.model
  rings = _rings(mesh.collective_matmul)
  length = functools.partial(_split_over, rules, sizes)
  gathered = length('residual_length') != length('length')
  _need(
    not rings or gathered,
    f'mesh.collective_matmul={mesh.collective_matmul!r} overlaps the gathers '
    'of sequence-sharded residuals, and here are none: it needs a tensor axis '
    f'above 1 (tensor={sizes["tensor"]}) and mesh.sequence=True.',
  )
  _check_activations(mesh, rules, sizes)
  if not length('length'):
    return parameter.Layout(rings)
  shards = math.prod(sizes[a] for a in rules.axes('heads'))
  heads = model.num_heads // shards
  kv_heads = attention.num_kv_heads(model)
  kv_heads = max(1, math.lcm(kv_heads, shards) // shards)
  (axis,) = length('length')
  order = context.resolve_order(
    mesh.context_order,
    [attention.mask_of(model, kind) for kind in set(model.pattern)],
  )
  plan = context.Plan(
    mesh.context_form, axis, sizes[axis], order, mesh.context_inner
  )
  context.check(
    plan.form, plan.n, heads, kv_heads, config.data.sequence_length,
    plan.layout, plan.inner,
  )  # fmt: skip
  return parameter.Layout(rings, plan)


def build(config, mesh_text='', remat=None, devices=None, abstract=False):
  """`Built` for a schema.Config on `devices` (default: all).

  remat: schema.Train.remat, with config.train.memory; None: not for training.
  abstract: a mesh of no devices (jax.sharding.AbstractMesh), to check a layout.

  Raises:
    UserError: the model contradicts itself, the mesh does not fit the devices,
      an axis does not divide, or a mesh axis would be idle.
  """
  check_model(config.model)
  sizes = mesh_sizes(config, mesh_text)
  if abstract:
    mesh = mesh_lib.abstract(sizes)
  else:
    mesh = mesh_lib.make(sizes, devices)
  sizes = dict(mesh.shape)
  rules = rules_lib.of(config.mesh, sizes, attention.num_kv_heads(config.model))
  rules.check_used(sizes)
  layout = _layout(config, rules, sizes)
  policy = remat and memory.policy(remat, config.train.memory)
  model = decoder.Decoder(config.model, policy, layout)
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
  return Built(mesh, rules, model, params, config.mesh)


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
def layout(built):
  """Context: the rules and the mesh of a `Built` are in force."""
  abstract = isinstance(built.mesh, jax.sharding.AbstractMesh)
  enter = jax.sharding.use_abstract_mesh if abstract else jax.set_mesh
  with annotate.use(built.rules), enter(built.mesh):
    yield
