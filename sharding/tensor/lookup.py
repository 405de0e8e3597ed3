"""Rows of a table by ids, the table and the result laid out by logical names.

Where the rows are sharded over the axes over which the result is scattered, no
table is gathered (sharding/tensor/vocabulary.py).
"""

import functools

import jax

from paraxis.sharding import annotate
from paraxis.sharding.tensor import vocabulary


def lookup(table, table_names, ids, out, dtype):
  """Rows table[ids] in `dtype`, laid out by `out`; ids must be in range.

  Args:
    table: (rows, width), laid out by `table_names`; its gradient is summed in
      its own dtype.
    ids: int, laid out by ('batch', 'length').
    out: names of the result.

  Raises:
    ValueError: (manual) the table's rows are sharded, and the length of `out`
      is not over the same axis: its sum has nowhere to go.
  """
  rows = annotate.carriers(table_names[0])
  scattered = annotate.carriers(out[1])[len(annotate.carriers('length')) :]
  if rows and rows == scattered or annotate.mode() == 'manual':
    run = functools.partial(_lookup, table_names, out, dtype)
    names = table_names, ('batch', 'length')
    return annotate.region(run, names, (out,), single=True)(table, ids)
  # Rows stay where they are: only the width is gathered.
  table = annotate.put(table, (table_names[0], out[-1]))
  if annotate.mode() == 'explicit' and annotate.sizes():
    found = table.at[ids].get(out_sharding=annotate.spec(out))
  else:
    found = table[ids]
  return found.astype(dtype)  # after: sums of the gradient are the table's


def _lookup(table_names, out, dtype, table, ids):
  """`lookup` in a manual region: own rows, summed into shards of the length."""
  rows, width = map(annotate.carriers, table_names)
  scattered = annotate.carriers(out[1])[len(annotate.carriers('length')) :]
  if width:
    table = jax.lax.all_gather(table, width, axis=1, tiled=True)
  shared = tuple(a for a in rows if a in annotate.deferred())
  if rows and rows == shared + scattered:
    return vocabulary.embedding(table, ids, rows, dtype, shared)
  if rows:
    raise ValueError(
      f'lookup: the rows of the table are laid out over {rows}, {out[1]!r} '
      f'over {scattered} beyond ids; in a manual region they must be the same.'
    )
  return table[annotate.own(ids, scattered, 1)].astype(dtype)
