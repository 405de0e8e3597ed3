"""Which layer each row of a stack holds, and which rows a pipeline stage has.

On one stage a stack is the layers in order. With stages, axis 0 of every stack
is sharded over the mesh axis `stage`, so that device d holds the rows of its
chunks one after the other: row (d, c, l) is layer l of virtual stage
placement[d, c]. Layers that do not share out evenly leave rows empty: zeros,
masked out. A checkpoint holds the layers in order (`to_order`), whatever the
stages.

Experts may be stacked in an order of their own, so that those of one device are
chosen ones (mesh.expert_order). All that is by expert is permuted alike, also a
router's columns, its counts and biases: the step is the same program, and knows
experts by their slots. A checkpoint holds them in order, too.
"""

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
  def even(self):
    """No row is empty."""
    return self.rows is None or bool((self.rows >= 0).all())


def whole(kinds):
  """`Depth` of all layers on one stage. kinds: of every layer."""
  return Depth(None, tuple(kinds))


def share_out(kinds, placement, unit=1):
  """`Depth` of layers on stages.

  Args:
    kinds: of every layer, in order. unit: layers after which they repeat.
    placement: (stages, chunks) int: the virtual stage of each chunk.

  Raises:
    UserError: fewer layers than chunks, or chunks of different kinds.
  """
  placement = np.asarray(placement)
  stages, chunks = placement.shape
  layers, parts = len(kinds), placement.size
  if layers < parts:
    raise errors.UserError(
      f'model.num_layers={layers} is fewer than mesh.stage={stages} x '
      f'pipeline.chunks={chunks}: every chunk needs a layer.'
    )
  if layers // unit < parts:
    unit = 1
  # Whole units; the first chunks take one more where they do not divide.
  units = layers // unit
  sizes = [unit * (units // parts + (s < units % parts)) for s in range(parts)]
  sizes[-1] += layers % unit
  starts = np.concatenate([[0], np.cumsum(sizes)])
  height = max(sizes)
  rows = np.full((stages, chunks, height), -1)
  for d, c in np.ndindex(stages, chunks):
    s = placement[d, c]
    rows[d, c, : sizes[s]] = starts[s] + np.arange(sizes[s])
  first = tuple(kinds[:height])
  for d, c, l in np.ndindex(rows.shape):
    if rows[d, c, l] >= 0 and kinds[rows[d, c, l]] != first[l]:
      raise errors.UserError(
        f'model.pattern and model.experts.pattern give {layers} layers of '
        f'kinds {" ".join(kinds)}; in runs of {height} on mesh.stage={stages} '
        f'x pipeline.chunks={chunks} they are not the same for every stage: '
        'take a number of layers whose share of a stage is a multiple of the '
        'pattern.'
      )
  return Depth(rows, first)


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
