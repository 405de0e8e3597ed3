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
  dim: the dimension, None for a vector.
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


def specs(shapes, size):
  """{path: PartitionSpec} of the decisions, over the mesh axis 'tensor'.

  Args, Raises: as `decide`.
  """
  out = {}
  for path, decision in decide(shapes, size).items():
    ndim = len(getattr(shapes[path], 'shape', shapes[path]))
    split = ['tensor' if d == decision.dim else None for d in range(ndim)]
    out[path] = PartitionSpec(*split)
  return out


def rules(shapes, axes, size):
  """The decisions as a table of logical axes, for a model that names them.

  Args:
    shapes, size: as `decide`.
    axes: {path: logical names of the dimensions}.

  Returns:
    rules.Rules 'redco'; batch and length as in the preset 'tensor'. Vectors
    follow their logical axes.

  Raises:
    UserError: as `decide`; a logical axis that is split in one matrix and whole
      in another, which no table can express (`specs` does).
  """
  seen = {}  # logical axis -> (split?, the first path that decides it)
  for path, decision in decide(shapes, size).items():
    if decision.kind == VECTOR:
      continue
    for d, logical in enumerate(axes[path]):
      split = d == decision.dim
      old, first = seen.setdefault(logical, (split, path))
      if old != split:
        whole, cut = (path, first) if old else (first, path)
        raise errors.UserError(
          f'redco over tensor={size}: {logical!r} is split in {cut} and whole '
          f'in {whole}; no table of logical axes says that, take the specs.'
        )
  table = dict(rules_lib.PRESETS['data'].table)
  table |= {a: ('tensor',) for a, (split, _) in seen.items() if split}
  return rules_lib.Rules('redco', table)
