"""Tensor parallelism from parameter paths and shapes alone (arXiv:2310.16355).

Redco's two rules pick the one dimension of each matrix that is split:

    attention   q, k, v: the last (heads)     o: the first (heads)
    mlp         up, gate, wi, in: the last    down, wo, out: the first
    embeddings  the first (rows)
    other       alternates: not the dimension of the matrix before it

so that each pair is (column, row): Megatron's layout, with two all-reduces
forward and two backward in a layer. Used by claims only; training takes the
tables of sharding/rules.py. Where that dimension does not divide, the
matrix's other side is split; where neither does, Redco keeps the matrix whole
on every device, and here it is an error. Vectors stay whole, as in Redco, also
those that Megatron splits (the bias of a column, the scale of all heads).

The rules speak of matrices with inputs and outputs. They carry over so: axis 0
of 'layers/...' is the depth, never split ('layers/3/...' has no such axis). A
side of several dimensions, (heads, head_dim), is split by its first one: whole
heads. Its last one, which the letter of the rule names, would cut every head,
and each score would be a partial sum. A head that is a table of rows, (vocab,
embed), is split by rows like the embedding.
"""

import re
from typing import NamedTuple

from jax.sharding import PartitionSpec

from paraxis.configs.base import errors
from paraxis.sharding import rules as rules_lib

COLUMN, ROW, TABLE, VECTOR = 'column', 'row', 'table', 'vector'
_VECTOR = re.compile(r'(.*_)?(bias|scale|norm)$')
_COLUMN = re.compile(r'up|gate|wi|(.*_)?in(_|$)')
_ROW = re.compile(r'down|wo|(.*_)?out(_|$)')


class Decision(NamedTuple):
  """What is split of one parameter.

  kind: COLUMN (outputs), ROW (inputs), TABLE (rows) or VECTOR (nothing).
  dim: the dimension, None for a vector. why: in words.
  """

  kind: str
  dim: int | None
  why: str


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
    depth, kind = _depth(paths[0]), _kind(paths[0])
    if kind == VECTOR or len(shape[paths[0]]) - depth < 2:
      out |= dict.fromkeys(paths, Decision(VECTOR, None, 'a vector is whole'))
      continue
    why = 'its name'
    if not kind:
      kind = ROW if before == COLUMN else COLUMN
      why = f'after a {before}' if before else 'the first without a known name'
    last = len(shape[paths[0]]) - 1
    wanted, other = (depth + 1, depth) if kind == COLUMN else (depth, last)
    fits = lambda d, paths=paths: all(shape[p][d] % size == 0 for p in paths)
    if not fits(wanted) and not fits(other):
      raise _stuck(paths[0], shape[paths[0]], (wanted, other), size)
    if not fits(wanted):
      turned = {COLUMN: ROW, ROW: COLUMN, TABLE: COLUMN}[kind]
      why = f'a {kind} by {why}, but {size} does not divide dimension {wanted}'
      wanted, kind = other, turned
    if not _kind(paths[0]):
      before = kind
    out |= dict.fromkeys(paths, Decision(kind, wanted, why))
  return {path: out[path] for path in shapes}


def _stuck(path, shape, dims, size):
  near = max(n for n in range(1, size) if any(shape[d] % n == 0 for d in dims))
  return errors.UserError(
    f'{path} of shape {shape}: {size} shards divide neither {shape[dims[0]]} '
    f'nor {shape[dims[1]]}; the nearest that do are {near}.'
  )


def specs(shapes, size, axis='tensor'):
  """{path: PartitionSpec} of the decisions.

  Args, Raises: as `decide`; axis: the mesh axis with `size` devices.
  """
  out = {}
  for path, decision in decide(shapes, size).items():
    ndim = len(getattr(shapes[path], 'shape', shapes[path]))
    split = [axis if d == decision.dim else None for d in range(ndim)]
    out[path] = PartitionSpec(*split)
  return out


def rules(shapes, axes, size, axis='tensor'):
  """The decisions as a table of logical axes, for a model that names them.

  Args:
    shapes, size, axis: as `specs`.
    axes: {path: logical names of the dimensions}.

  Returns:
    rules.Rules 'redco'; batch and length as the preset 'tensor' has them.
    Vectors follow their logical axes.

  Raises:
    UserError: as `decide`; a logical axis that is split in one matrix and whole
      in another, so that no table says it (`specs` does).
  """
  said = {}  # logical axis -> (split?, the first path that says so)
  for path, decision in decide(shapes, size).items():
    if decision.kind == VECTOR:
      continue
    for d, logical in enumerate(axes[path]):
      split = d == decision.dim
      old, first = said.setdefault(logical, (split, path))
      if old != split:
        whole, cut = (path, first) if old else (first, path)
        raise errors.UserError(
          f'redco over {axis}={size}: {logical!r} is split in {cut} and whole '
          f'in {whole}; no table of logical axes says that, take the specs.'
        )
  table = dict(rules_lib.PRESETS['data'].table)
  table |= {a: (axis,) for a, (split, _) in said.items() if split}
  return rules_lib.Rules('redco', table)


def table(shapes, size):
  """The decisions as text, a line for each matrix."""
  rows = [
    (path, 'x'.join(map(str, getattr(shapes[path], 'shape', shapes[path]))), d)
    for path, d in decide(shapes, size).items()
    if d.kind != VECTOR
  ]
  wide = [max(len(row[i]) for row in rows) for i in range(2)]
  return '\n'.join(
    f'{path:{wide[0]}}  {shape:{wide[1]}}  {d.kind:6} {d.dim}  {d.why}'
    for path, shape, d in rows
  )
