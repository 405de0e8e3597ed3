"""Messages of a layout, read from types: a prediction, made without devices.

Every array of a traced program has its layout (traced.py), which determines
what each operation receives. Explicit collectives and reshards are counted as
written; for other operations this is what XLA's partitioner does:
  product, contracted dimension sharded     sum over its axes, scattered where
                                            the result carries the axis
  product, an operand sharded otherwise     that operand is gathered
  sum or maximum over a sharded dimension   all-reduce of the result
  rows of a table whose rows are sharded    masked rows, all-reduced
Bytes are what one device receives, once (hlo.received). A scan counts its
length, a cond its costliest branch, the same gather in one loop body once (XLA
merges them). It is a prediction: sharding/meter/hlo.py counts what a compiled
program did. Of a 7B step for 512 TPU v5p all bytes per kind and mesh axes were
as predicted, but for a sixth of the reduce-scatters, which the compiler made
rings of permutes with more bytes (its collective matmul). On CPU it never
scatters a sum and adds over one dimension's axes at a time.
"""

from collections.abc import Mapping
import math
from typing import NamedTuple

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import turns
from paraxis.sharding.meter import hlo
from paraxis.sharding.meter import traced

_REDUCTIONS = (
  'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and',
  'reduce_or', 'argmax', 'argmin',
)  # fmt: skip
# Collectives of a manual region -> (kind, name of the parameter with the axes).
_MANUAL = {
  'psum': ('all-reduce', 'axes'),
  'psum_invariant': ('all-reduce', 'axes'),
  'pmax': ('all-reduce', 'axes'),
  'pmin': ('all-reduce', 'axes'),
  'all_gather': ('all-gather', 'axis_name'),
  'all_gather_invariant': ('all-gather', 'axis_name'),
  'reduce_scatter': ('reduce-scatter', 'axis_name'),
  'all_to_all': ('all-to-all', 'axis_name'),
  'ragged_all_to_all': ('all-to-all', 'axis_name'),
  'ppermute': ('collective-permute', 'axis_name'),
}
# These receive from neighbours if they work along a sharded dimension.
_ALONG = (
  'slice', 'dynamic_slice', 'dynamic_update_slice', 'split', 'pad', 'rev',
  'concatenate', 'sort', 'top_k', 'cumsum', 'cumprod', 'cummax', 'cummin',
  'cumlogsumexp', 'conv_general_dilated', 'ragged_dot',
)  # fmt: skip
_ROWS = ('gather', 'scatter-add', 'scatter_add')
SLICE = 'slice'  # a reshard that keeps a part: nothing is sent


class Message(NamedTuple):
  """One kind of message. bytes: received by a device, each time.

  kind: as in HLO ('all-gather', ...), or 'slice' with 0 bytes. axes: of the
  mesh. count: times a step. where: line and einsum. phase: of the step.
  what: the array before and after. manual: a collective of a manual region,
  which the compiler takes as it is.
  """

  kind: str
  axes: tuple
  bytes: int
  count: int
  where: str
  phase: str = ''
  what: str = ''
  manual: bool = False

  @property
  def total(self):
    """Bytes that one device receives in one step."""
    return self.bytes * self.count


def collectives(
  body: traced.Body, sizes: Mapping[str, int]
) -> tuple[list[Message], list[str]]:
  """All messages of a program -> ([Message], [lines that are not predicted]).

  Args:
    body: traced.Body.
    sizes: mesh axis -> size.
  """
  walk = _Walk(dict(sizes))
  walk.body(body, 1)
  return merged(walk.found), sorted(set(walk.unknown))


def merged(found):
  """The same messages from the same place as one, with their counts added."""
  counts = {}
  for c in found:
    key = c._replace(count=0)
    counts[key] = counts.get(key, 0) + c.count
  return [key._replace(count=n) for key, n in counts.items()]


def _places(value):
  """{mesh axis: dimension} of a Value."""
  return {a: i for i, axes in enumerate(value.layout) for a in axes}


class _Walk:
  """Visits every operation; `found`: messages, `unknown`: not predicted."""

  def __init__(self, sizes):
    self.sizes, self.found, self.unknown = sizes, [], []

  def body(self, body, times):
    self.gathered = set()  # (Value, *axes) in this body
    for op in body.ops:
      self._visit(op, times)

  def _visit(self, op, times):
    if op.bodies:
      gathered = self.gathered
      self._nested(op, times)
      self.gathered = gathered
    elif op.name == 'reshard':
      self._move(op, op.ins[0], op.outs[0], times)
    elif any(v.auto for v in op.outs) and op.name not in _ROWS:
      self._island(op)
    elif op.name == 'dot_general':
      self._product(op, times)
    elif op.name in _REDUCTIONS:
      self._reduction(op, times)
    elif op.name == 'gather':
      self._rows(op, times)
    elif op.name in _ROWS:
      self._added_rows(op, times)
    elif op.name in _MANUAL:
      self._manual(op, times)
    elif op.name in _ALONG:
      self._along(op)

  def _nested(self, op, times):
    if len(op.bodies) == 1:
      before = len(self.found)
      self.body(op.bodies[0], times * (1 if op.times is None else op.times))
      if op.name == 'while' and len(self.found) > before:
        often = 'once' if op.times is None else f'as {op.times}'
        self.unknown.append(
          f'{op.where}: trips of a while loop that sends, counted {often}'
        )
      return
    branches = []
    for body in op.bodies:
      walk = _Walk(self.sizes)
      walk.body(body, turns.times(times, op.times))
      branches.append(walk)
    costliest = max(branches, key=lambda walk: sum(c.total for c in walk.found))
    self.found += costliest.found
    self.unknown += [text for walk in branches for text in walk.unknown]

  def _emit(self, op, kind, axes, whole, times, what, n=0):
    """One message over `axes`, in groups of n; whole: bytes of its larger side.

    n: default all devices along the axes.
    """
    n = n or self._size(axes)
    if n == 1:
      return
    axes = tuple(a for a in mesh_lib.AXES if a in axes and self.sizes[a] > 1)
    size = hlo.received(kind, whole, n) if kind != SLICE else 0
    manual = op.name in _MANUAL
    self.found.append(
      Message(kind, axes, size, times, op.where, op.phase, what, manual)
    )

  def _size(self, axes):
    return math.prod(self.sizes[a] for a in axes)

  def _move(self, op, x, y, times):
    """x in the layout (and reduced as) y, in the cheapest order."""
    old, new = _places(x), _places(y)
    summed = x.partial - y.partial
    what = f'{x} -> {y}'
    held = x.bytes
    cut = [a for a in new if a not in old and a not in summed]
    held //= self._size(cut)
    scattered = [a for a in new if a in summed]
    self._emit(op, 'reduce-scatter', scattered, held, times, what)
    held //= self._size(scattered)
    turned = [a for a in new if a in old and old[a] != new[a]]
    self._emit(op, 'all-to-all', turned, held, times, what)
    if any(_reordered(a, b) for a, b in zip(x.layout, y.layout, strict=True)):
      axes = [a for a in new if old.get(a) == new[a]]
      self._emit(op, 'collective-permute', axes, held, times, what)
    left = [a for a in summed if a not in new]
    self._emit(op, 'all-reduce', left, held, times, what)
    gathered = [a for a in old if a not in new]
    held *= self._size(gathered)
    self._emit(op, 'all-gather', gathered, held, times, what)
    if cut and not (scattered or turned or left or gathered):
      self._emit(op, SLICE, cut, held, times, what)

  def _product(self, op, times):
    """A product whose collectives the types leave open: the module's table."""
    x, w, y = *op.ins, op.outs[0]
    (cx, cw), (bx, bw) = op.params['dimension_numbers']
    to_x, to_w = {}, {}  # dimension of an operand -> of y
    for i, (a, b) in enumerate(zip(bx, bw, strict=True)):
      to_x[a], to_w[b] = i, i
    free = [i for i in range(len(x.shape)) if i not in (*cx, *bx)]
    to_x |= {d: len(bx) + i for i, d in enumerate(free)}
    start = len(bx) + len(free)
    free = [i for i in range(len(w.shape)) if i not in (*cw, *bw)]
    to_w |= {d: start + i for i, d in enumerate(free)}
    pairs = dict(zip(cx, cw, strict=True))
    px, pw, py = _places(x), _places(w), _places(y)
    summed, from_x, from_w = [], [], []
    for a in {**px, **pw}:
      if a in px and pairs.get(px[a], -1) == pw.get(a, -2):
        summed.append(a)
      elif a not in py and not (px.get(a) in cx and pw.get(a) in cw):
        alone = (a in px and px[a] in cx) or (a in pw and pw[a] in cw)
        if alone:  # the other operand is cut for free
          summed.append(a)
        else:
          (from_x if a in px else from_w).append(a)
      else:
        if a in px and to_x.get(px[a], -1) != py.get(a, -2):
          from_x.append(a)
        if a in pw and to_w.get(pw[a], -1) != py.get(a, -2):
          from_w.append(a)
    for v, axes in ((x, from_x), (w, from_w)):
      if (v, *axes) not in self.gathered:
        whole = v.bytes * self._size(axes)
        self._emit(op, 'all-gather', axes, whole, times, f'{v} gathered')
      self.gathered.add((v, *axes))
    summed = [a for a in summed if a not in y.partial]
    scattered = [a for a in summed if a in py]
    held = y.bytes * self._size(scattered)
    what = f'partial sums -> {y}'
    self._emit(op, 'reduce-scatter', scattered, held, times, what)
    left = [a for a in summed if a not in py]
    self._emit(op, 'all-reduce', left, y.bytes, times, what)

  def _reduction(self, op, times):
    x, y = op.ins[0], op.outs[0]
    axes = [a for i in op.params['axes'] for a in x.layout[i]]
    axes = [a for a in axes if a not in y.partial]
    self._emit(op, 'all-reduce', axes, y.bytes, times, f'{x} -> {y}')

  def _rows(self, op, times):
    """table[ids]: each shard of the rows answers for its own, zeros elsewhere.

    A width sharded as the ids are has to be gathered first.
    """
    table, ids, y = *op.ins[:2], op.outs[0]
    numbers = op.params['dimension_numbers']
    rows = [a for i in numbers.collapsed_slice_dims for a in table.layout[i]]
    width = [a for a in _places(table) if a not in rows and a in _places(ids)]
    whole = table.bytes * self._size(width)
    self._emit(op, 'all-gather', width, whole, times, f'{table} gathered')
    self._emit(op, 'all-reduce', rows, y.bytes, times, f'{table} -> rows {y}')

  def _added_rows(self, op, times):
    """Rows added to a table: every shard of the rows has a share of the sum."""
    updates, y = op.ins[2], op.outs[0]
    window = op.params['dimension_numbers'].update_window_dims
    axes = [
      a
      for i, part in enumerate(updates.layout)
      for a in part
      if i not in window and a not in _places(y)
    ]
    self._emit(op, 'all-reduce', axes, y.bytes, times, f'rows {updates} -> {y}')

  def _manual(self, op, times):
    kind, name = _MANUAL[op.name]
    axes = op.params[name]
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    axes = [a for a in axes if isinstance(a, str)]
    if kind == 'collective-permute' and not op.params['perm']:
      return
    groups = op.params.get('axis_index_groups')
    for x, y in zip(op.ins, op.outs, strict=False):
      larger = min if op.name == 'ragged_all_to_all' else max  # hlo.py
      whole = larger(x.bytes, y.bytes)
      n = len(groups[0]) if groups else self._size(axes)
      self._emit(op, kind, axes, whole, times, f'{x} -> {y}', n)

  def _island(self, op):
    """Inside auto_axes only operations that keep their layout are predicted."""
    axes_of = lambda values: {a for v in values for a in _places(v)}
    if axes_of(op.ins) - axes_of(op.outs):
      self.unknown.append(f'{op.where}: the compiler lays out this island')

  def _along(self, op):
    """Reports an operation along a sharded dimension as not predicted."""
    y = op.outs[0]
    whole = op.name in ('sort', 'top_k', 'rev') or op.name.startswith('cum')
    for x in op.ins:
      same = len(x.shape) == len(y.shape) and not whole
      for i, axes in enumerate(x.layout):
        if axes and not (same and x.shape[i] == y.shape[i]):
          self.unknown.append(f'{op.where}: {op.name} of {x}')
          break


def _reordered(old, new):
  """Whether two dimensions hold the same axes in another order."""
  both = [a for a in old if a in new]
  return both != [a for a in new if a in old]
