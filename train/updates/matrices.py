"""Rules that read a matrix as one, on every layout.

Newton-Schulz steps and eigenvectors want whole matrices. On the shards of a
matrix they would be wrong in silence, and on copies every device would do the
work of all. So the matrices of a step, layers and experts of one parameter and
of all others of the same shape, are stacked, and the stack is shared out over
all devices of the mesh:

    {path: (layers, [experts,] in..., out...)} -> {'MxN': (B, M, N)}
    a device runs the rule on B / devices matrices, without a message
    the results return to the layouts that their parameters have

B is filled up to a multiple of the devices with copies of its last matrix. An
array moves once there and once back: 1 / devices of it from and to each device,
where a step of fsdp gathers all of it three times.

Legend: B matrices, M rows (inputs), N columns (outputs).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.sharding import annotate


class Dims(NamedTuple):
  """How a parameter is a batch of matrices.

  batch: leading dimensions that count matrices. inputs: those after them that
  are rows; the others are columns.
  """

  batch: int
  inputs: int

  def shape(self, shape):
    """(M, N) of a parameter of this shape."""
    middle = self.batch + self.inputs
    rows, columns = shape[self.batch : middle], shape[middle:]
    return math.prod(rows), math.prod(columns)


def names(axes, dims, side):
  """Logical axes of (*batch, K, K), kept of a parameter for one of its sides.

  Of such a matrix the first dimension is sharded, the second never; neither is
  where the parameter itself has no logical axis on that side, as the rank of
  an adapter.

  Args:
    axes: logical axes of the parameter. dims: its Dims.
    side: 'left', K = M, or 'right', K = N.
  """
  batch, rest = axes[: dims.batch], axes[dims.batch :]
  own = rest[: dims.inputs] if side == 'left' else rest[dims.inputs :]
  name = 'expert_statistics' if 'experts' in batch else 'statistics'
  return (*batch, name if any(own) else None, None)


def devices():
  """Mesh axes that share a stack: all."""
  return tuple(annotate.sizes())


def run(rule, dims, arrays, like, whole=()):
  """What `rule` makes of the matrices of some parameters.

  Args:
    rule: ({name: {'MxN': (B, ...)}}, whole) -> {name: {'MxN': (B, ...)}}; B
      of this device alone.
    dims: {path: Dims}.
    arrays: {name: {path: array}}, each shaped as its parameter, (*batch, M, M),
      (*batch, N, N) or (*batch). A path that a name lacks is lacking for all of
      its shape.
    like: {name: {path: array or jax.ShapeDtypeStruct}} of the results.
    whole: arrays that every device has.

  Returns:
    {name: {path: array}}, shaped and laid out as `like`.
  """
  grads = arrays['gradient']
  groups: dict[str, list[str]] = {}
  for path in sorted(grads):
    M, N = dims[path].shape(grads[path].shape)
    groups.setdefault(f'{M}x{N}', []).append(path)
  over = devices()
  n = math.prod(annotate.sizes()[axis] for axis in over)
  there = {
    name: {g: paths for g, paths in groups.items() if paths[0] in tree}
    for name, tree in arrays.items()
  }

  def pack(arrays):
    rows = lambda name, p: _rows(arrays[name][p], dims[p], grads[p].shape)
    return {
      name: {
        g: _stacked([rows(name, p) for p in each], n) for g, each in by.items()
      }
      for name, by in there.items()
    }

  def unpack(found):
    return {
      name: _apart(stacks, groups, like[name], dims)
      for name, stacks in found.items()
    }

  if annotate.mode() != 'explicit' or not annotate.sizes():
    return unpack(rule(pack(arrays), whole))
  shared = jax.P(over or None)
  stacks = {name: dict.fromkeys(by, shared) for name, by in there.items()}
  pack_there: Any = jax.sharding.auto_axes(pack, out_sharding=stacks)
  region = jax.shard_map(
    rule, in_specs=(shared, jax.P()), out_specs=shared, check_vma=False
  )
  back = {
    name: {p: jax.typeof(x).sharding.spec for p, x in tree.items()}
    for name, tree in like.items()
  }
  unpack_there: Any = jax.sharding.auto_axes(unpack, out_sharding=back)
  return unpack_there(region(pack_there(arrays), whole))


def updated(rule, dims, grads, state, **more):
  """(directions, state) after an update by whole matrices.

  Args:
    rule: as for `run`, of the arrays 'gradient', of the state's and `more`, and
      of its count; gives 'direction' and the state's.
    dims: {path: Dims}. grads: {path: gradient}.
    state: a NamedTuple of `count`, () int32, and {path: array}.
  """
  held = state._asdict()
  count = held.pop('count')
  given = dict(gradient=grads, **held, **more)
  found = run(rule, dims, given, dict(direction=grads, **held), count)
  direction = found.pop('direction')
  return direction, state._replace(count=count + 1, **found)


def apiece(function, *stacks):
  """function of one matrix from each stack (B, ...) -> results (B, ...).

  On CPU one matrix after another: jaxlib's LAPACK kernels share a stack among
  the threads that the devices run on and wait for them, so that several devices
  at once can wait for ever. Elsewhere all at once.
  """
  every = lambda *given: jax.lax.map(lambda row: function(*row), given)
  return jax.lax.platform_dependent(
    *stacks, cpu=every, default=jax.vmap(function)
  )


def _rows(x, dims, shape):
  """An array of a parameter of that shape -> (its matrices, ...)."""
  tail = x.shape[dims.batch :]
  if x.shape == shape:
    tail = dims.shape(x.shape)
  return x.reshape(-1, *tail)


def _stacked(rows, n):
  """Stacks of several parameters as one, its length a multiple of n."""
  x = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
  if more := -len(x) % n:
    last = jnp.broadcast_to(x[-1:], (more, *x.shape[1:]))
    x = jnp.concatenate([x, last])
  return x


def _apart(stacks, groups, like, dims):
  """{'MxN': (B, ...)} -> {path: array shaped as in `like`}."""
  out = {}
  for group, x in stacks.items():
    first = 0
    for path in groups[group]:
      shape = like[path].shape
      count = math.prod(shape[: dims[path].batch])
      out[path] = x[first : first + count].reshape(shape)
      first += count
  return out
