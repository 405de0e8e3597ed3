"""Which layer each row of a stack holds, and which rows a pipeline stage has.

On one stage a stack is the layers in order. With stages, axis 0 of every stack
is sharded over the mesh axis `stage`, so that device d holds the rows of its
chunks one after the other: row (d, c, l) is layer l of virtual stage
placement[d, c]. Layers that do not share out evenly leave rows empty: zeros,
masked out. A checkpoint holds the layers in order (`to_order`), whatever the
stages.

All stages run one program, so row l has one kind on all of them. Where a
pattern does not repeat as stages do, the rows are a sequence of kinds of which
the layers of every chunk are a part, in order: D E E E E on two stages holds
D E E E | E E E E (a first layer without experts), with one empty row on each.
An empty row costs the time and the memory of its kind.

Experts may be stacked in an order of their own, so that those of one device are
chosen ones (mesh.expert_order). All that is by expert is permuted alike, also a
router's columns, its counts and biases: the step is the same program, and knows
experts by their slots. A checkpoint holds them in order, too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding import annotate


class Held(NamedTuple):
  """How memory holds the stack of one parameter; hashable.

  rows: of `stack_rows`, as a tuple; None: layers in order. experts: the
  dimension that counts experts, and the expert of every slot; None: in order.
  """

  rows: tuple | None = None
  experts: tuple | None = None


IN_ORDER = Held()
BY_EXPERT = ('experts', 'choices')  # logical axes that count experts


class Depth(NamedTuple):
  """Which layer each row of the stacks holds.

  rows: layer of every row, -1 for an empty one; (stages, chunks, layers of a
    chunk) int, or None: one stage, all layers in order.
  kinds: kind of every layer of a chunk.
  """

  rows: np.ndarray | None
  kinds: tuple

  @property
  def empty(self):
    """How many rows are empty."""
    return 0 if self.rows is None else int((self.rows < 0).sum())

  @property
  def even(self):
    """No row is empty."""
    return not self.empty


def whole(kinds):
  """`Depth` of all layers on one stage. kinds: of every layer."""
  return Depth(None, tuple(kinds))


def share_out(kinds, placement, unit=1):
  """`Depth` of layers on stages.

  Args:
    kinds: of every layer, in order. unit: layers after which they repeat.
    placement: (stages, chunks) int: the virtual stage of each chunk.

  Raises:
    UserError: fewer layers than chunks.
  """
  placement = np.asarray(placement)
  stages, chunks = placement.shape
  layers, parts = len(kinds), placement.size
  if layers < parts:
    raise errors.UserError(
      f'model.num_layers={layers} is fewer than mesh.stage={stages} x '
      f'pipeline.chunks={chunks}: every chunk needs a layer.'
    )
  found, runs = _repeated(kinds, parts, unit) or _rows_of(tuple(kinds), parts)
  rows, layer = np.full((parts, len(found)), -1), iter(range(layers))
  for part, run in enumerate(runs):
    rows[part, run] = [next(layer) for _ in run]
  rows = rows[placement]
  return Depth(rows, found)


def repeats(kinds, parts, unit):
  """Whether chunks, of units shared out evenly, are of the same kinds."""
  return _repeated(kinds, parts, unit) is not None


def _repeated(kinds, parts, unit):
  """As `_rows_of`, of whole units in sequence; None: chunks would differ."""
  if len(kinds) // unit < parts:
    unit = 1
  # The first chunks take one unit more where they do not divide.
  units = len(kinds) // unit
  sizes = [unit * (units // parts + (s < units % parts)) for s in range(parts)]
  sizes[-1] += len(kinds) % unit
  found, runs = tuple(kinds[: max(sizes)]), [list(range(n)) for n in sizes]
  same = [found[row] for run in runs for row in run] == list(kinds)
  return (found, runs) if same else None


@functools.cache
def _rows_of(kinds, parts):
  """(kinds of the fewest rows that serve every chunk, rows that each uses).

  The rows are layers in sequence, of any part of the pattern: tried by their
  number; those of the whole depth always serve. Chunks share layers out as
  evenly as these rows can.
  """
  layers = len(kinds)
  for count in range(-(-layers // parts), layers + 1):
    tried = dict.fromkeys(
      kinds[at : at + count] for at in range(layers - count + 1)
    )
    for even in (True, False):
      for found in tried:
        runs = _dealt(kinds, found, parts, even)
        if runs is not None:
          return _used(found, runs)
  raise AssertionError('the rows of the whole depth serve')


def _used(found, runs):
  """`_rows_of` without the rows that no chunk uses."""
  rows = sorted({row for run in runs for row in run})
  runs = [[rows.index(row) for row in run] for run in runs]
  return tuple(found[row] for row in rows), runs


def _dealt(kinds, found, parts, even):
  """Rows of kinds `found` that each chunk uses, or None: they do not serve.

  even: no chunk takes more than its share of the layers that are left.
  """
  at, runs = 0, []
  for behind in reversed(range(parts)):
    left = len(kinds) - at
    most = -(-left // (behind + 1)) if even else left - behind
    run = []
    for row, kind in enumerate(found):
      if len(run) < most and kinds[at] == kind:
        run.append(row)
        at += 1
        if at == len(kinds):
          break
    if not run:
      return None
    runs.append(run)
    if at == len(kinds) and behind:
      return None
  return runs if at == len(kinds) else None


def stack_rows(depth, owners):
  """Rows of the stack of one parameter: indices into its owners, -1 empty.

  Args:
    depth: `Depth`. owners: the layers that have the parameter, in order.

  Returns:
    1-d int array, or None: the owners in order.
  """
  if depth.rows is None:
    return None
  slot = {layer: i for i, layer in enumerate(owners)}
  mine = [
    l
    for l in range(len(depth.kinds))
    if slot.keys() & {*depth.rows[..., l].flat}
  ]
  picked = depth.rows[..., mine].reshape(-1)
  return np.array([slot.get(int(layer), -1) for layer in picked])


def homes(paths, row):
  """{path: {layer that reads it: the layer whose row that is}}.

  paths: of every layer, those that it reads. row: (path, use) -> the row that
    the use-th reader has, of its own or of an earlier one.
  """
  readers, out = {}, {}
  for layer, mine in enumerate(paths):
    for path in mine:
      before = readers.setdefault(path, [])
      before.append(layer)
      home = before[row(path, len(before) - 1)]
      out.setdefault(path, {})[layer] = home
  return out


def from_order(x, rows, experts=None):
  """A stack of layers and experts in order -> as memory holds it (`Held`)."""
  if experts is not None:
    dim, order = experts
    x = _pick(x, _slots(x, dim, order), dim)
  if rows is None:
    return x
  rows = np.asarray(rows)
  xp = np if isinstance(x, np.ndarray) else jnp
  filled = (rows >= 0).reshape(-1, *[1] * (x.ndim - 1))
  return xp.where(filled, _pick(x, np.maximum(rows, 0)), xp.zeros((), x.dtype))


def to_order(x, rows, experts=None):
  """The inverse: layers and experts in order, empty rows left out."""
  if experts is not None:
    dim, order = experts
    x = _pick(x, _slots(x, dim, np.argsort(order)), dim)
  if rows is None:
    return x
  back = {layer: row for row, layer in enumerate(rows) if layer >= 0}
  return _pick(x, np.array([back[i] for i in range(len(back))]))


def _slots(x, dim, order):
  """Indices of all of a dimension; what follows the experts keeps its place."""
  return np.array([*order, *range(len(order), x.shape[dim])])


def _pick(x, rows, dim=0):
  """x[rows] along a dimension, which on a mesh must not be sharded."""
  at = (slice(None),) * dim + (rows,)
  if isinstance(x, np.ndarray) or not annotate.sizes():
    return x[at]
  return x.at[at].get(out_sharding=jax.typeof(x).sharding.spec)
