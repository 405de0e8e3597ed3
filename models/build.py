"""From a checked configuration to mesh, rules and model: before any compiling.

Every way in which the numbers of a model, a mesh and a batch cannot fit
together is found here, in plain integers, and reported with both numbers.
"""

import contextlib
from typing import Any, NamedTuple

import jax

from paraxis.configs import errors
from paraxis.models import attention
from paraxis.models import decoder
from paraxis.pallas_kernels import registry
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib


class Built(NamedTuple):
  """mesh: jax Mesh. rules: Rules. model: Decoder.

  params: {path: jax.ShapeDtypeStruct with its NamedSharding}.
  """

  mesh: Any
  rules: Any
  model: Any
  params: Any


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


def build(config, mesh_text='', remat='none', devices=None):
  """`Built` for a schema.Config on `devices` (default: all).

  Raises:
    UserError: the model contradicts itself, the mesh does not fit the devices,
      an axis does not divide, or a mesh axis would be idle.
  """
  check_model(config.model)
  rules = rules_lib.preset(config.mesh.rules)
  mesh = mesh_lib.make(mesh_sizes(config, mesh_text), devices)
  sizes = dict(mesh.shape)
  rules.check_used(sizes)
  model = decoder.Decoder(config.model, remat)
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
  return Built(mesh, rules, model, params)


def check_rows(rows, built, what):
  """UserError if `rows` rows cannot be spread over the batch shards."""
  rules_lib.spec(('batch',), (rows,), built.rules, dict(built.mesh.shape), what)


@contextlib.contextmanager
def layout(built):
  """Context: the rules and the mesh of a `Built` are in force."""
  with annotate.use(built.rules), jax.set_mesh(built.mesh):
    yield
