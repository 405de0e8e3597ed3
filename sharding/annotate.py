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
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

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
  return {
    a: n for a, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if n > 1
  }


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
    for i, (a, b) in enumerate(zip(source, target, strict=True)):
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
    x, w: operands, with logical names `x_names`, `w_names`. w is computed with
      in x's dtype; its gradient is summed in w's own, over devices too.
    out: logical names of the output.
    dtype: accumulation and output dtype; default that of x.

  Raises:
    ValueError: (manual) a contracted axis is sharded and no output dimension
      takes the scatter, or `out` names a layout that the operands do not have.
  """
  if mode() != 'manual':
    return _einsum(equation, (x_names, w_names, out), dtype, x, w)
  y = jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=dtype)
  return _scatter(equation, y, x_names, w_names, out)


def _product(equation, x, w, out, dtype):
  explicit = mode() == 'explicit' and sizes()
  layout = dict(out_sharding=spec(out)) if explicit else {}
  w = w.astype(x.dtype)
  return jnp.einsum(equation, x, w, preferred_element_type=dtype, **layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(equation, names, dtype, x, w):
  return _product(equation, x, w, names[2], dtype)


def _einsum_forward(equation, names, dtype, x, w):
  return _product(equation, x, w, names[2], dtype), (x, w)


def _einsum_backward(equation, names, dtype, operands, g):
  """dx = g w, dw = x g, in the layouts of x and w.

  What plain differentiation gives, but for the order of operands in dw: with g
  first, XLA on CPU transposes g, which is larger than x, and dw takes twice the
  time. g takes x's dtype: with bfloat16 the products are bfloat16, and their
  sums, also those over devices and microbatches, are in w's float32.
  """
  del dtype
  x, w = operands
  ins, out = equation.split('->')
  a, b = ins.split(',')
  g = g.astype(x.dtype)
  dx = _product(f'{out},{b}->{a}', g, w, names[0], x.dtype)
  dw = _product(f'{a},{out}->{b}', x, g, names[1], w.dtype)
  return dx, dw


_einsum.defvjp(_einsum_forward, _einsum_backward)


def _scatter(equation, y, x_names, w_names, out):
  """Sums y over the mesh axes of contracted letters, into dimensions of out."""
  spec(out)  # one mesh axis on two dimensions is an error here too
  ins, result = equation.split('->')
  held, summed = {}, {}
  for letters, names in zip(ins.split(','), (x_names, w_names), strict=True):
    for letter, name in zip(letters, names, strict=True):
      held[letter] = _carriers(name)
      if letter not in result:
        summed |= {axis: letter for axis in _carriers(name)}
  for i, (letter, name) in enumerate(zip(result, out, strict=True)):
    now, want = held[letter], _carriers(name)
    # A sum may only be scattered below (minor to) what is already split.
    if want[: len(now)] != now or set(want[len(now) :]) - set(summed):
      raise ValueError(
        f'einsum {equation}: {letter!r} is laid out over {now}, and {out} '
        f'says {want}; move the operand first.'
      )
    for axis in want[len(now) :]:
      y = jax.lax.psum_scatter(y, axis, scatter_dimension=i, tiled=True)
      del summed[axis]
  for axis, letter in summed.items():
    raise ValueError(
      f'einsum {equation}: contracts {letter!r} over {axis!r}, and no '
      f'output dimension of {out} takes the scatter.'
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
