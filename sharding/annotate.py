"""Every annotation of a layout, by logical names, in all three worlds.

    Explicit mesh    move -> reshard                einsum -> out_sharding
    Manual region    move -> all_gather             einsum -> psum_scatter
    no mesh          nothing                        plain

So one model code runs under jit and inside a fully manual shard_map. In a
manual region, contracting a sharded axis leaves a partial sum: it is scattered
over the output dimension that carries the same mesh axis, and if there is none
that is an error, because doing nothing would be silently wrong.
"""

import contextlib
import contextvars

import jax
from jax.sharding import AxisType
import jax.numpy as jnp

from paraxis.sharding import rules as rules_lib

_rules = contextvars.ContextVar(
    'rules', default=rules_lib.PRESETS['fsdp_tensor']
)


@contextlib.contextmanager
def use(rules):
  """Within this context logical names mean what `rules` says."""
  token = _rules.set(rules)
  try:
    yield rules
  finally:
    _rules.reset(token)


def sizes():
  """Mesh axis -> size of the mesh in force, axes of size 1 left out."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return {}
  return {a: n for a, n in zip(mesh.axis_names, mesh.axis_sizes) if n > 1}


def mode():
  """'none', 'explicit' or 'manual'."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 'none'
  return 'manual' if AxisType.Manual in mesh.axis_types else 'explicit'


def spec(names, shape=None, where=''):
  """PartitionSpec of logical names under the rules and mesh in force."""
  return rules_lib.spec(names, shape, _rules.get(), sizes(), where)


def shards(name):
  """Number of shards of a logical axis under the rules and mesh in force."""
  n = sizes()
  out = 1
  for axis in _rules.get().axes(name):
    out *= n.get(axis, 1)
  return out


def _carriers(name):
  return tuple(a for a in _rules.get().axes(name) if a in sizes())


def move(x, source, target):
  """x from the layout `source` to the layout `target` (logical names)."""
  if mode() == 'manual':
    for i, (a, b) in enumerate(zip(source, target)):
      old, new = _carriers(a), _carriers(b)
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


def einsum(equation, x, x_names, w, w_names, out, dtype=None):
  """Two-operand einsum whose output has the layout `out`.

  Args:
    equation: as jnp.einsum, two operands.
    x, w: operands, with logical names `x_names`, `w_names`.
    out: logical names of the output.
    dtype: accumulation and output dtype; default that of the operands.

  Raises:
    ValueError: (manual) a contracted axis is sharded and no output dimension
      takes the scatter.
  """
  if mode() == 'explicit' and sizes():
    return jnp.einsum(
        equation, x, w, preferred_element_type=dtype, out_sharding=spec(out)
    )
  y = jnp.einsum(equation, x, w, preferred_element_type=dtype)
  if mode() == 'manual':
    ins, result = equation.split('->')
    a, b = ins.split(',')
    for letter in sorted(set(a) & set(b) - set(result)):
      for axis in _carriers(x_names[a.index(letter)]):
        dims = [i for i, n in enumerate(out) if axis in _carriers(n)]
        if not dims:
          raise ValueError(
              f'einsum {equation}: contracts {letter!r} over {axis!r}, and no '
              f'output dimension of {out} takes the scatter.'
          )
        y = jax.lax.psum_scatter(
            y, axis, scatter_dimension=dims[0], tiled=True
        )
  return y


def gather(table, ids, out):
  """table[ids] with the layout `out`; ids must be in range."""
  if mode() == 'explicit' and sizes():
    return table.at[ids].get(out_sharding=spec(out))
  return table[ids]


def like(x, fill, dtype=None):
  """A constant with x's shape, sharding and varying axes (scan carries)."""
  y = jnp.full_like(x, fill, dtype=dtype)
  if mode() != 'manual':
    return y
  missing = tuple(jax.typeof(x).mat.varying - jax.typeof(y).mat.varying)
  return jax.lax.pcast(y, missing, to='varying') if missing else y
