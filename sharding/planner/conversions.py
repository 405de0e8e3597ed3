"""SBP layouts of tensors, conversions between them, and their cost.

Used by claims only; training moves arrays with sharding/annotate.py.

    on one mesh axis    each rank holds        the tensor is
    S(d)  split         a block of dim d       their concatenation
    B     broadcast     all of it              any of them
    P     partial       a term                 their sum

(OneFlow's SBP signatures, arXiv:2110.15032, section 3.) `convert` takes a
tensor from one layout to another by the steps below; `cost` predicts their
bytes, received by each device, with T bytes on it before the step and p ranks.

    S -> B      all-gather     (p - 1) T       B -> S  slice                0
    S(i)->S(j)  all-to-all     (p - 1) T / p   S -> P  zeros elsewhere      0
    P -> S      reduce-scatter (p - 1) T / p   B -> P  zeros but on rank 0  0
    P -> B      all-reduce     2 (p - 1) T / p

Times p this is OneFlow's table 2, which counts all devices together. Over
several axes the cheapest sequence of steps is found (Dijkstra; one axis at a
time, sums also over all partial axes at once). Several axes on one dimension
are written major first: a step takes off or adds the minor one, and where the
order differs the blocks are permuted, T bytes.

Gradients: the cotangent of a tensor is laid out by the dual layout, in which B
and P change places. So the transpose of a conversion is the conversion between
the duals, and nothing is counted twice, whatever the number of ranks.
"""

import dataclasses
import functools
import heapq
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paraxis.configs.base import errors
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class SbpLayout:
  """Placement of one tensor on every mesh axis; made by `of` or `parse`.

  Placements are written 'S(0)', 'B' and 'P'. Axes that are not named broadcast.
  Equal layouts are equal values.

  Attributes:
    splits: ((dimension, mesh axes, major first), ...), by dimension.
    partial: mesh axes over which the values are terms, sorted.
  """

  splits: tuple[tuple[int, tuple[str, ...]], ...] = ()
  partial: tuple[str, ...] = ()

  def __getitem__(self, axis):
    """The placement on one mesh axis."""
    if axis in self.partial:
      return 'P'
    return next((f'S({d})' for d, axes in self.splits if axis in axes), 'B')

  def __str__(self):
    named = [a for _, axes in self.splits for a in axes] + list(self.partial)
    return ' '.join(f'{a}:{self[a]}' for a in named) or 'B'

  def axes(self, dim):
    """Mesh axes that split a dimension, major first."""
    return dict(self.splits).get(dim, ())

  def spec(self, ndim):
    """PartitionSpec of the global array of a tensor of `ndim` dimensions.

    With partial axes the array is the stack of the terms: a first dimension
    more, which those axes split.
    """
    parts = [self.axes(d) for d in range(ndim)]
    parts = [self.partial, *parts] if self.partial else parts
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in parts))

  def local(self, shape, sizes):
    """Shape on one device; UserError, with both numbers, if it is uneven."""
    out = list(shape)
    for d, axes in self.splits:
      n = math.prod(sizes.get(a, 1) for a in axes)
      if d >= len(shape) or shape[d] % n:
        size = shape[d] if d < len(shape) else 'missing'
        raise errors.UserError(
          f'layout {self}: dimension {d} of {tuple(shape)} is {size}, and '
          f'{" x ".join(f"{a}={sizes.get(a, 1)}" for a in axes)} needs a '
          f'multiple of {n}: change one of them.'
        )
      out[d] //= n
    return tuple(out)

  def dual(self, sizes):
    """Layout of the cotangent on a mesh: B and P change places."""
    taken = {a for _, axes in self.splits for a in axes} | {*self.partial}
    return _make(dict(self.splits), [a for a in sizes if a not in taken])


def _make(splits, partial=()):
  splits = tuple((d, axes) for d, axes in sorted(splits.items()) if axes)
  return SbpLayout(splits, tuple(sorted(partial)))


def of(placements):
  """{mesh axis: placement} -> SbpLayout; axes of one dimension major first.

  Raises:
    ValueError: an axis that no mesh has, or what is no placement.
  """
  splits, partial = {}, []
  for axis, placement in placements.items():
    if axis not in mesh_lib.AXES:
      raise ValueError(f'{axis!r} is not a mesh axis {mesh_lib.AXES}.')
    match = re.fullmatch(r'B|P|S\((\d+)\)', placement)
    if not match:
      raise ValueError(f'{axis}:{placement} is not {axis}:S(0), :B or :P.')
    if match[1]:
      dim = int(match[1])
      splits[dim] = (*splits.get(dim, ()), axis)
    elif placement == 'P':
      partial.append(axis)
  return _make(splits, partial)


def parse(text):
  """'data:S(0) tensor:P', the str() of an SbpLayout -> that SbpLayout."""
  placements = {}
  for part in [] if text == 'B' else text.split():
    axis, _, placement = part.partition(':')
    if axis in placements:
      raise ValueError(f'{text!r}: {axis} twice.')
    placements[axis] = placement
  return of(placements)


class ConversionStep(NamedTuple):
  """One collective or local operation of a conversion.

  dims: (dimension,), or (from, to) of an all-to-all. bytes: received by each
  device. result: the layout after it, without axes that stay B or P.
  """

  kind: str
  axes: tuple
  dims: tuple
  bytes: int
  result: SbpLayout


def _steps(at, shape, itemsize, sizes, goal):
  """Yields every `ConversionStep` from the layout `at`."""
  local, splits = at.local(shape, sizes), dict(at.splits)
  here = math.prod(local) * itemsize
  share = lambda p: -(-(p - 1) * here // p)  # rounded up to whole bytes
  make = functools.partial(_make, partial=at.partial)
  for d, axes in at.splits:
    last, p = axes[-1:], sizes[axes[-1]]
    rest = {**splits, d: axes[:-1]}
    yield ConversionStep('all_gather', last, (d,), (p - 1) * here, make(rest))
    for j, n in enumerate(local):
      if j != d and n % p == 0:
        to = make({**rest, j: splits.get(j, ()) + last})
        yield ConversionStep('all_to_all', last, (d, j), share(p), to)
    if last[0] in goal.partial:
      yield ConversionStep('pad', last, (d,), 0, _make(rest, at.partial + last))
    for order in itertools.permutations(axes):
      if order != axes:
        yield ConversionStep(
          'permute', axes, (d,), here, make({**splits, d: order})
        )
  for axis, p in sizes.items():
    if at[axis].startswith('S'):
      continue
    term, left = axis in at.partial, [a for a in at.partial if a != axis]
    for d, n in enumerate(local):
      if n % p == 0:
        kind, moved = ('reduce_scatter', share(p)) if term else ('slice', 0)
        to = _make({**splits, d: splits.get(d, ()) + (axis,)}, left)
        yield ConversionStep(kind, (axis,), (d,), moved, to)
    if axis in goal.partial and not term:
      more = _make(splits, at.partial + (axis,))
      yield ConversionStep('keep', (axis,), (), 0, more)
  alone = [(a,) for a in at.partial]
  for axes in dict.fromkeys(alone + [at.partial] if alone else []):
    n = math.prod(sizes[a] for a in axes)
    to = _make(splits, [a for a in at.partial if a not in axes])
    yield ConversionStep('all_reduce', axes, (), 2 * share(n), to)


@functools.lru_cache(maxsize=4096)
def _plan(shape, itemsize, source, target, sizes):
  """Cheapest in bytes, then in steps; ties fall alike in every process."""
  sizes, count = dict(sizes), itertools.count()
  queue: list[tuple] = [(0, 0, next(count), source, ())]
  done = set()
  while True:
    total, n, _, at, path = heapq.heappop(queue)
    if at == target:
      return path
    if at in done:
      continue
    done.add(at)
    for step in _steps(at, shape, itemsize, sizes, target):
      if step.result not in done:
        way = step.result, (*path, step)
        heapq.heappush(queue, (total + step.bytes, n + 1, next(count), *way))


def _fit(layout, sizes):
  """Without the axes that `sizes` lacks."""
  keep = lambda axes: tuple(a for a in axes if a in sizes)
  splits = {d: keep(axes) for d, axes in layout.splits}
  return _make(splits, keep(layout.partial))


def plan(shape, dtype, source, target, sizes):
  """The steps of a conversion, without running it.

  Args:
    shape: global shape of the tensor. dtype: its dtype.
    source, target: `SbpLayout`s.
    sizes: mesh axis -> size.

  Returns:
    A tuple of `ConversionStep`, those that move the fewest bytes.

  Raises:
    UserError: source or target does not divide the shape.
  """
  for layout in (source, target):
    layout.local(shape, sizes)
  # An axis that stays B, or P, takes part in no step.
  moves = lambda a: source[a].startswith('S') or source[a] != target[a]
  sizes = {a: n for a, n in sizes.items() if n > 1 and moves(a)}
  source, target = _fit(source, sizes), _fit(target, sizes)
  itemsize = jnp.dtype(dtype).itemsize
  return _plan(tuple(shape), itemsize, source, target, tuple(sizes.items()))


def cost(shape, dtype, source, target, sizes):
  """{mesh axis: bytes received per device} of a conversion; as `plan`.

  A step over several axes at once (a joint all-reduce, a permutation) stands
  under their names, 'data,tensor'; what moves nothing is left out: as
  hlo.by_axis counts the compiled program.
  """
  out = {}
  for step in plan(shape, dtype, source, target, sizes):
    axes = step.axes
    if step.kind == 'permute':
      pairs = _order(axes, step.result.axes(*step.dims), sizes)
      axes = [a for a in axes if any(old[a] != new[a] for old, new in pairs)]
    if step.bytes:
      name = ','.join(_in_order(axes))
      out[name] = out.get(name, 0) + step.bytes
  return out


def convert(x, source, target):
  """A tensor from one layout to another.

  For use inside a fully manual shard_map, on local blocks (without a mesh there
  is nothing to do). Terms are added in their own dtype, so that what moves is
  what was declared: make them wide (einsum's preferred_element_type) where that
  matters.

  Args:
    x: local array.
    source, target: `SbpLayout`s.

  Raises:
    UserError: a layout does not divide a tensor.
    ValueError: on Explicit axes, outside of shard_map.
  """
  sizes = annotate.sizes()
  if sizes and annotate.mode() != 'manual':
    raise ValueError('layout.convert works in shard_map; else use `on_mesh`.')
  at = _fit(source, sizes)
  blocks = lambda d: math.prod(sizes[a] for a in at.axes(d))
  shape = [n * blocks(d) for d, n in enumerate(x.shape)]
  for step in plan(shape, x.dtype, source, target, sizes):
    x = _apply(step, x, sizes)
  return x


def _apply(step, x, sizes):
  """One step on a local block."""
  axis, p = step.axes[0], sizes[step.axes[0]]
  d: Any = step.dims[0] if step.dims else None
  if step.kind == 'all_gather':
    return jax.lax.all_gather(x, axis, axis=d, tiled=True)
  if step.kind == 'all_to_all':
    return jax.lax.all_to_all(x, axis, step.dims[1], d, tiled=True)
  if step.kind == 'reduce_scatter':
    return jax.lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)
  if step.kind == 'all_reduce':
    return jax.lax.psum(x, step.axes)
  if step.kind == 'permute':
    axes = _in_order(step.axes)  # as the mesh has them: jax 0.12 insists
    pairs = _order(step.axes, step.result.axes(d), sizes)
    ranks = [[_number(place, axes, sizes) for place in p] for p in pairs]
    return jax.lax.ppermute(x, axes, ranks)
  rank = jax.lax.axis_index(axis)
  if step.kind == 'keep':
    return jnp.where(rank == 0, x, 0)
  n = x.shape[d]
  if step.kind == 'slice':
    return jax.lax.dynamic_slice_in_dim(x, rank * (n // p), n // p, d)
  wide = jnp.zeros((*x.shape[:d], n * p, *x.shape[d + 1 :]), x.dtype)
  return jax.lax.dynamic_update_slice_in_dim(wide, x, rank * n, d)


def _in_order(axes):
  return tuple(a for a in mesh_lib.AXES if a in axes)


def _number(place, axes, sizes):
  """Place {axis: index} -> its number, counting along the axes, major first."""
  return functools.reduce(lambda n, a: n * sizes[a] + place[a], axes, 0)


def _order(old, new, sizes):
  """[(place of the block now, place that wants it)] from order old to new."""
  indices = itertools.product(*(range(sizes[a]) for a in old))
  places = [dict(zip(old, index, strict=True)) for index in indices]
  holds = {_number(place, old, sizes): place for place in places}
  return [(holds[_number(place, new, sizes)], place) for place in places]


def on_mesh(x, source, target):
  """`convert` for a global array, under the mesh in force (jax.set_mesh).

  The array must be laid out by `source`. With partial axes it has no global
  value yet: it is the stack of its terms (SbpLayout.spec), before or after.

  Args, Raises: as `convert`.
  """
  ndim = x.ndim - bool(source.partial)

  def move(x):
    y = convert(x[0] if source.partial else x, source, target)
    return y[None] if target.partial else y

  return jax.shard_map(
    move,
    in_specs=source.spec(ndim),
    out_specs=target.spec(ndim),
    check_vma=False,
  )(x)
