"""Tensor parallelism without named axes (Redco, arXiv:2310.16355).

`follow` reads it off the program (`mesh.rules=auto`), `decide` off paths and
shapes alone, as the paper does. Its two rules pick the one dimension of each
matrix that is split:

    attention   q, k, v: the last (heads)     o: the first (heads)
    mlp         up, gate, wi, in: the last    down, wo, out: the first
    embeddings  the first (rows)
    other       alternates: not the dimension of the matrix before it

so that each pair is (column, row): Megatron's layout, with two all-reduces
forward and two backward in a layer. Where that dimension does not divide, the
matrix's other side is split; where neither does, Redco keeps the matrix whole
on every device, and here it is an error. Vectors stay whole, as in Redco, also
those that Megatron splits (the bias of a column, the scale of all heads).

The rules by name speak of matrices with inputs and outputs. They carry over so:
axis 0 of 'layers/...' is the depth, never split ('layers/3/...' has no such
axis). A side of several dimensions, (heads, head_dim), is split by its first
one: whole heads. Its last one, which the letter of the rule names, would cut
every head, and each score would be a partial sum. A head that is a table of
rows, (vocab, embed), is split by rows like the embedding.

Names say nothing of most recurrences and of experts, and "the matrix before" is
the one before in the alphabet. `follow` keeps what the rules are after, one
dimension of a matrix, pairs of column and row, tables by rows, and reads from
the program which matrix feeds which (program_axes.py). An axis can be split if

    it leaves a product with one parameter and enters that with another, so
      that all between the two stays split,
    it is a stack, of words or of experts, or
    it leaves the program (the logits).

Axes are taken in order of cost: numbers that products then sum, for every
number of a parameter that is split. One that meets an axis taken before, in any
parameter, stays whole. Vectors follow.
"""

import math
import re
from typing import NamedTuple

from jax.sharding import PartitionSpec

from paraxis.configs.base import errors

COLUMN, ROW, TABLE, VECTOR = 'column', 'row', 'table', 'vector'
AXIS, WHOLE = 'axis', 'whole'  # by `follow`
_VECTOR = re.compile(r'(.*_)?(bias|scale|norm)$')
_COLUMN = re.compile(r'up|gate|wi|(.*_)?in(_|$)')
_ROW = re.compile(r'down|wo|(.*_)?out(_|$)')


class Decision(NamedTuple):
  """What is split of one parameter.

  kind: COLUMN (outputs), ROW (inputs), TABLE (rows) or VECTOR (nothing); by
    `follow`: AXIS or WHOLE.
  dim: the dimension, None for a vector and for WHOLE.
  """

  kind: str
  dim: int | None


def _depth(path):
  """Leading dimensions that count layers."""
  return int(bool(re.match(r'layers/(?!\d+/)', path)))


def _kind(path):
  """What the path says of a parameter; '' if its name says nothing."""
  *folders, name = path.lower().split('/')
  kernel = name in ('kernel', 'weight')
  name = folders.pop() if kernel and folders else name  # its module's
  if _VECTOR.match(name):
    return VECTOR
  if name.endswith(('embedding', 'positions')):
    return TABLE
  if name.endswith('head'):
    return COLUMN if kernel else TABLE
  if any('attention' in f or 'attn' in f for f in folders):
    if name[0] in 'qkv' or name[-1] in 'qkv':
      return COLUMN
    if 'o' in (name[0], name[-1]):
      return ROW
  return COLUMN if _COLUMN.match(name) else ROW if _ROW.match(name) else ''


def decide(shapes, size):
  """Redco's decision for every parameter.

  Args:
    shapes: {path: shape, or anything that has one}.
    size: devices along the axis that splits them.

  Returns:
    {path: Decision}, in the order of `shapes`.

  Raises:
    UserError: a matrix of which neither side divides.
  """
  shape = {p: tuple(getattr(x, 'shape', x)) for p, x in shapes.items()}
  alike = {}  # the same matrix of every layer -> its paths
  for path in shapes:
    alike.setdefault(re.sub(r'/\d+(?=/)', '', path), []).append(path)
  out, before = {}, None
  for _, paths in sorted(alike.items()):
    depth, named = _depth(paths[0]), _kind(paths[0])
    if named == VECTOR or len(shape[paths[0]]) - depth < 2:
      out |= dict.fromkeys(paths, Decision(VECTOR, None))
      continue
    kind = named or (ROW if before == COLUMN else COLUMN)
    last = len(shape[paths[0]]) - 1
    wanted, other = (depth + 1, depth) if kind == COLUMN else (depth, last)
    fits = lambda d, paths=paths: all(shape[p][d] % size == 0 for p in paths)
    if not fits(wanted) and not fits(other):
      raise _stuck(paths[0], shape[paths[0]], (wanted, other), size)
    if not fits(wanted):
      wanted, kind = other, ROW if kind == COLUMN else COLUMN
    if not named:
      before = kind
    out |= dict.fromkeys(paths, Decision(kind, wanted))
  return {path: out[path] for path in shapes}


def _stuck(path, shape, dims, size):
  near = max(n for n in range(1, size) if any(shape[d] % n == 0 for d in dims))
  return errors.UserError(
    f'{path} of shape {shape}: {size} shards divide neither {shape[dims[0]]} '
    f'nor {shape[dims[1]]}; the nearest that do are {near}.'
  )


def follow(shapes, size, found):
  """The decision for every parameter, by the axes of the program.

  Args:
    shapes, size: as `decide`.
    found: program_axes.Axes of the program that reads these parameters.

  Returns:
    {path: Decision}, in the order of `shapes`.

  Raises:
    UserError: an axis to split that `size` does not divide. Of one with
      dimensions of several sizes (heads, and fewer of keys) those that it does
      not divide stay whole.
  """
  shape = {p: tuple(x.shape) for p, x in shapes.items()}
  members = {}  # axis -> {path: its dimension}
  for path, axes in found.of.items():
    for dim, axis in enumerate(axes):
      if dim >= _depth(path):
        members.setdefault(axis, {}).setdefault(path, dim)
  ends = found.stacks | (found.columns & found.ends)
  able = ends | (found.columns & set(found.rows))
  held = lambda axis: sum(math.prod(shape[p]) for p in members[axis])
  cost = {a: found.rows.get(a, 0) / held(a) for a in able & set(members)}
  out = {}
  for axis in sorted(cost, key=lambda a: (cost[a], min(members[a].items()))):
    if out.keys() & members[axis].keys():
      continue
    width = {p: shape[p][d] for p, d in members[axis].items()}
    path = max(width, key=lambda p: width[p])
    if width[path] % size:
      raise _undivided(path, shape[path], width[path], size)
    for path, dim in members[axis].items():
      fits = width[path] % size == 0
      out[path] = Decision(AXIS, dim) if fits else Decision(WHOLE, None)
  return {p: out.get(p, Decision(WHOLE, None)) for p in shapes}


def _undivided(path, shape, width, size):
  near = max(n for n in range(1, size) if width % n == 0)
  return errors.UserError(
    f'mesh.rules=auto: {path} of shape {shape} is to be split by its {width}, '
    f'which tensor={size} does not divide; the nearest that does is {near}.'
  )


def specs(shapes, size, found=None):
  """{path: PartitionSpec} of the decisions, over the mesh axis 'tensor'.

  Args, Raises: as `follow`; without `found` as `decide`.
  """
  out = {}
  for path, decision in _decisions(shapes, size, found).items():
    ndim = len(getattr(shapes[path], 'shape', shapes[path]))
    split = ['tensor' if d == decision.dim else None for d in range(ndim)]
    out[path] = PartitionSpec(*split)
  return out


def _decisions(shapes, size, found):
  return follow(shapes, size, found) if found else decide(shapes, size)


# Logical axes that layers compute in parts.
_CARRIED = ('heads', 'kv_heads', 'mlp', 'vocab', 'positions', 'experts')


def table(shapes, axes, size, found=None):
  """The decisions for logical axes, for a model that names them.

  Args:
    shapes, size, found: as `specs`.
    axes: {path: logical names of the dimensions}.

  Returns:
    {logical axis of a parameter: ('tensor',) or ()}. Vectors of `decide`
    follow their logical axes.

  Raises:
    UserError: as `specs`; a logical axis that is split in one matrix and whole
      in another, which no table can express (`specs` does); one that no layer
      computes in parts.
  """
  seen = {}  # logical axis -> (split?, the first path that decides it)
  for path, decision in _decisions(shapes, size, found).items():
    if decision.kind == VECTOR:
      continue
    for d, logical in enumerate(axes[path]):
      split = d == decision.dim
      old, first = seen.setdefault(logical, (split, path))
      if old != split:
        whole, cut = (path, first) if old else (first, path)
        raise errors.UserError(
          f'mesh.rules=auto over tensor={size}: {logical!r} is split in {cut} '
          f'and whole in {whole}; no table of logical axes says that.'
        )
      if split and logical not in _CARRIED:
        raise errors.UserError(
          f'mesh.rules=auto over tensor={size}: {path} of shape '
          f'{tuple(shapes[path].shape)} is to be split by its dimension {d} '
          f'({logical}), which no layer computes in parts.'
        )
  return {a: ('tensor',) if cut else () for a, (cut, _) in seen.items() if a}
