"""Shards and reshards arrays by logical names, in all three worlds.

              no mesh   Explicit mesh              manual region
    move      x         reshard to `target`        all_gather to `target`; to
                                                   scatter is an error
    put       x         reshard to `names`         x: its layout is not known
    stored    x         reshard as rules.stored    x
    part      x         reshard to `target`        the shard's slice of x, which
                                                   is not differentiated
    take      x         reshard to `names`         the shard's slice of x along
                                                   one dimension that was whole
    mean      jnp.mean  jnp.mean                   pmean over the axes of `name`
    region    function  shard_map of the function  function

So the same model code runs under jit and in a fully manual shard_map. Products
with parameters, and their collectives, are in sharding/tensor/project.py. On a
mesh, logical names need the rules that `use` sets; without them they are an
error.
"""

import contextlib
import contextvars
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from paraxis.sharding import rules as rules_lib

_rules: contextvars.ContextVar[rules_lib.Rules | None] = contextvars.ContextVar(
  'rules', default=None
)


# Mesh axes over which the caller adds up what the backward pass of a manual
# region leaves as partial sums: a pipeline's stages, for embedding and head.
_deferred = contextvars.ContextVar('deferred', default=())

# A mesh axis whose places compute apart: see `hide`.
_hidden: contextvars.ContextVar[str] = contextvars.ContextVar(
  'hidden', default=''
)


@contextlib.contextmanager
def within(variable, value):
  """A contextvars.ContextVar has a value until this context ends."""
  token = variable.set(value)
  try:
    yield value
  finally:
    variable.reset(token)


def defer(axes):
  """Within this context partial sums over `axes` are left to the caller."""
  return within(_deferred, tuple(axes))


def deferred():
  """Mesh axes that `defer` named."""
  return _deferred.get()


def hide(axis):
  """Within this context layouts and sums do not see a mesh axis: they are of
  one place along it (train/steps/replicas.py)."""
  return within(_hidden, axis)


def use(rules):
  """Within this context logical names mean what `rules` says."""
  return within(_rules, rules)


def _in_force():
  """The rules that `use` named.

  Raises:
    LookupError: there are none, and a mesh that they would lay arrays out on.
  """
  rules = _rules.get()
  if rules is not None:
    return rules
  if sizes():
    raise LookupError(
      f'a mesh of {sizes()} and no rules that say what logical names mean on '
      'it: enter annotate.use(rules), or build.use(built), which enters both.'
    )
  return rules_lib.PRESETS['fsdp_tensor']  # names are checked, nothing is moved


def sizes():
  """Mesh axis -> size of the mesh in force, axes of size 1 left out, and one
  that `hide` names."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return {}
  found = zip(mesh.axis_names, mesh.axis_sizes, strict=True)
  return {a: n for a, n in found if n > 1 and a != _hidden.get()}


def mode():
  """'none', 'explicit' or 'manual'."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 'none'
  return 'manual' if AxisType.Manual in mesh.axis_types else 'explicit'


def spec(names, shape=None, where=''):
  """PartitionSpec of logical names under the rules and mesh in force."""
  return rules_lib.spec(names, shape, _in_force(), sizes(), where)


def shards(name):
  """Number of shards of a logical axis under the rules and mesh in force."""
  n = sizes()
  out = 1
  for axis in _in_force().axes(name):
    out *= n.get(axis, 1)
  return out


def carriers(name):
  """Mesh axes, larger than 1, of a logical axis under the rules in force."""
  return tuple(a for a in _in_force().axes(name) if a in sizes())


def move(x, source, target):
  """x from the layout `source` to the layout `target` (logical names)."""
  if mode() == 'manual':
    for i, (a, b) in enumerate(zip(source, target, strict=True)):
      old, new = carriers(a), carriers(b)
      if old[: len(new)] != new:
        raise ValueError(
          f'move {source} -> {target}: dimension {i} can be gathered in a '
          f'manual region, not scattered from {old} to {new}.'
        )
      if old[len(new) :]:
        x = jax.lax.all_gather(x, old[len(new) :], axis=i, tiled=True)
    return x
  return put(x, target)


def put(x, names):
  """x laid out by logical names (no mesh: x)."""
  if not sizes() or mode() != 'explicit':
    return x
  want = spec(names, x.shape)
  return x if jax.typeof(x).sharding.spec == want else jax.reshard(x, want)


def stored(x, names, stage):
  """x laid out as rules.stored says: a gradient, or optimizer state."""
  if not sizes() or mode() != 'explicit':
    return x
  want = rules_lib.stored(names, x.shape, _in_force(), sizes(), stage)
  return x if jax.typeof(x).sharding.spec == want else jax.reshard(x, want)


def part(x, source, target):
  """x, which is not differentiated, cut from a layout into a finer one."""
  if mode() != 'manual':
    return put(x, target)
  for i, (a, b) in enumerate(zip(source, target, strict=True)):
    old, new = carriers(a), carriers(b)
    if new[: len(old)] != old:
      raise ValueError(f'part {source} -> {target}: {old} is not within {new}.')
    x = own(x, new[len(old) :], i)
  return x


def take(x, names, dimension):
  """x, which every shard holds whole, laid out by `names` on one dimension."""
  if mode() != 'manual':
    return put(x, names)
  return own(x, carriers(names[dimension]), dimension)


def own(x, axes, dimension):
  """This shard's slice of x, one of equal ones over mesh axes, in a region."""
  if not axes:
    return x
  size = x.shape[dimension] // math.prod(map(jax.lax.axis_size, axes))
  first = jax.lax.axis_index(axes) * size
  return jax.lax.dynamic_slice_in_dim(x, first, size, dimension)


def mean(x, axis, name=None):
  """Mean over dimensions of which `name` may be split; dimensions are kept.

  In a manual region each shard continues with its own part of what the mean
  divides, so the sum's transpose is a sum again, and differentiating is right.
  """
  y = jnp.mean(x, axis, keepdims=True)
  axes = carriers(name) if name and mode() == 'manual' else ()
  return jax.lax.pmean(y, axes) if axes else y


def region(function, names, out_names, single=False) -> Any:
  """function of arrays, run in a region that is manual over all mesh axes.

  Args:
    function: of local arrays, by mesh axis names.
    names: logical names of each argument. out_names: of each result, or a
      PartitionSpec (`everywhere`), for all arrays of a pytree.
    single: the function returns one array, not a tuple.
  """
  if mode() != 'explicit' or not sizes():
    return function
  of = lambda row: row if isinstance(row, jax.P) else spec(row)
  specs = lambda rows: tuple(map(of, rows))
  return jax.shard_map(
    function,
    in_specs=specs(names),
    out_specs=specs(out_names)[0] if single else specs(out_names),
    check_vma=False,
  )


def alone(x):
  """x; on CPU only once it is computed: there many programs with collectives
  at once can starve each other. Elsewhere nobody waits."""
  cpu = all(d.platform == 'cpu' for d in x.sharding.device_set)
  return jax.block_until_ready(x) if cpu else x


def everywhere():
  """PartitionSpec of parts along axis 0, one of each device of the mesh."""
  return jax.P(tuple(sizes()) or None)
