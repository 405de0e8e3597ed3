"""Which mesh axes carry which logical axis: the only place where they meet.

Models name logical axes; a `Rules` table maps each to a tuple of mesh axes.
Parameters and activations use different names for the model width ('embed',
'hidden'), so that parameters are sharded over fsdp while activations keep their
batch sharded (ZeRO stage 3, arXiv:1910.02054). An axis that does not divide is
an error that names both numbers: nothing is ever silently replicated, and a
mesh axis that no rule uses would leave devices idle, which is an error too.
"""

import dataclasses
import math

from jax.sharding import PartitionSpec

from paraxis.configs import errors
from paraxis.configs import schema

LOGICAL = {
  'batch': 'rows of a step',
  'length': 'tokens of a row',
  'hidden': 'width of activations',
  'embed': 'width of the model in parameters',
  'layers': 'depth',
  'heads': 'query heads',
  'kv_heads': 'key/value heads',
  'head_dim': 'width of a head',
  'mlp': 'hidden width of the mlp',
  'vocab': 'vocabulary',
  'norm': 'scales and biases of norms',
  'positions': 'rows of a learned position table',
}

_BATCH = {'batch': ('replica', 'data', 'fsdp')}
_FSDP = {'embed': ('fsdp',)}
_TENSOR = {a: ('tensor',) for a in ('heads', 'kv_heads', 'mlp', 'vocab')}


@dataclasses.dataclass(frozen=True)
class Rules:
  """Logical axis -> mesh axes. Axes that the table lacks are not sharded."""

  name: str
  table: dict

  def axes(self, logical):
    """Mesh axes of a logical axis (None: not sharded)."""
    if logical is None:
      return ()
    if logical not in LOGICAL:
      raise ValueError(
        f'{logical!r} is not a logical axis.' + schema.suggest(logical, LOGICAL)
      )
    return self.table.get(logical, ())

  def check_used(self, sizes):
    """UserError if a mesh axis larger than 1 carries nothing."""
    if self.name == 'replicated':
      return  # asked for by name: every device does the same
    used = {a for axes in self.table.values() for a in axes}
    for axis, size in sizes.items():
      if size > 1 and axis not in used:
        raise errors.UserError(
          f'mesh axis {axis}={size}: the rules {self.name!r} put nothing on '
          f'it, so its devices would repeat each other; they use '
          f'{", ".join(sorted(used)) or "no axis"}.'
        )


PRESETS = {
  r.name: r
  for r in (
    Rules('replicated', {}),
    Rules('data', _BATCH),
    Rules('fsdp', _BATCH | _FSDP),
    Rules('tensor', _BATCH | _TENSOR),
    Rules('fsdp_tensor', _BATCH | _FSDP | _TENSOR),
  )
}


def preset(name):
  """The table of that name; UserError lists the names."""
  if name not in PRESETS:
    raise errors.UserError(
      f'mesh.rules={name!r} is not one of {", ".join(PRESETS)}.'
      + schema.suggest(name, PRESETS)
    )
  return PRESETS[name]


def spec(names, shape, rules, sizes, where=''):
  """Logical names of an array's dimensions -> PartitionSpec.

  Args:
    names: one logical axis (or None) per dimension.
    shape: the array's global shape, or None to skip the divisibility check.
    rules: a `Rules`.
    sizes: mesh axis -> size; axes of size 1 are dropped from the spec.
    where: what the array is, for the error.

  Raises:
    UserError: a dimension that its mesh axes do not divide, with both numbers
      and the nearest that would.
    ValueError: a mesh axis would shard two dimensions of one array.
  """
  used, out = {}, []
  for i, name in enumerate(names):
    axes = tuple(a for a in rules.axes(name) if sizes.get(a, 1) > 1)
    for axis in axes:
      if axis in used:
        raise ValueError(
          f'{where or names}: mesh axis {axis!r} serves both '
          f'{used[axis]!r} and {name!r}.'
        )
      used[axis] = name
    n = math.prod(sizes[a] for a in axes)
    if shape is not None and shape[i] % n:
      nearest = max(d for d in range(1, n) if shape[i] % d == 0)
      raise errors.UserError(
        f'{where + ": " if where else ""}{name!r} has size {shape[i]}, which '
        f'{" x ".join(f"{a}={sizes[a]}" for a in axes)} does not divide '
        f'({n} shards); the nearest that does is {nearest}.'
      )
    out.append(axes[0] if len(axes) == 1 else axes or None)
  return PartitionSpec(*out)
