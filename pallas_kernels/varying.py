"""Shared by the ops: scores of hidden pairs, padding, varying mesh axes.

In shard_map with check_vma jax tracks over which mesh axes a value differs
between devices; operands and the carry of a scan must agree on them. Outside of
a manual region these functions return their arguments unchanged.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

NEG = -1e30  # score of an invisible pair: finite, so no merge makes a NaN
# Least maximum that is subtracted: e^(NEG - FLOOR) is exactly 0, so a row that
# sees nothing gets p = 0 without a second `where`.
FLOOR = NEG / 2


def same(tree: Any) -> Any:
  """Makes all arrays vary over the same manual mesh axes (in shard_map)."""
  leaves = jax.tree.leaves(tree)
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in leaves))
  return jax.tree.map(lambda x: vary(x, axes), tree)


def vary(x: jax.Array, axes: frozenset) -> jax.Array:
  """x, typed as different on every device along the mesh axes `axes` too."""
  more = tuple(sorted(axes - jax.typeof(x).mat.varying))
  return jax.lax.pcast(x, more, to='varying') if more else x


def like(x: jax.Array, fill, dtype) -> jax.Array:
  """A constant with x's shape, sharding and varying axes (a scan carry)."""
  return vary(jnp.full_like(x, fill, dtype=dtype), jax.typeof(x).mat.varying)


def pad(x: jax.Array, length: int, axis: int = 1, fill: float = 0) -> jax.Array:
  """Appends `fill` on an axis up to `length`."""
  if x.shape[axis] == length:
    return x
  width = [(0, 0)] * x.ndim
  width[axis] = 0, length - x.shape[axis]
  return jnp.pad(x, width, constant_values=fill)


def result(x: jax.Array, shape: Iterable[int], dtype) -> jax.ShapeDtypeStruct:
  """A kernel's result that varies over the same manual mesh axes as x."""
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).mat)


def dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """einsum in promote_types(dtype, float32)."""
  wide = jnp.result_type(x, y, jnp.float32)
  return jnp.einsum(equation, x, y, preferred_element_type=wide)
