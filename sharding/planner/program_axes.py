"""Axes of a program: dimensions of parameters that it computes with as one.

A traced program (a jaxpr) says which dimensions belong together: a product
contracts one of each operand, a sum adds two by position, a reshape splits one.
Joining all that must have one layout leaves classes of dimensions: what a model
that names its axes calls 'heads' or 'mlp', found without a name.

    up (D, F)    gate (D, F)    down (F, D)
    F of the three is one axis, the output of two products and the input of one

Where an operation is not known, dimensions are joined only if rank, place and
size agree; one that is joined with none is an axis of its own.

Legend: D model, F mlp.
"""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core


class _Value(NamedTuple):
  """dims: ids of an array's dimensions. source: the parameter it is, or ''."""

  dims: tuple[int, ...]
  source: str = ''


@dataclasses.dataclass(frozen=True)
class Axes:
  """What a program says of its parameters' dimensions.

  of: {path: axis of each dimension}, equal where they are one.
  columns: axes that are the output of a product with a parameter.
  rows: axis -> numbers a token that products sum if it is split, over all
    parameters that have it as their input.
  stacks: axes whose rows are chosen by an index or multiplied one by one: words
    of an embedding, experts.
  ends: axes of the program's own outputs.
  """

  of: dict[str, tuple[int, ...]]
  columns: frozenset[int]
  rows: dict[int, int]
  stacks: frozenset[int]
  ends: frozenset[int]


class _Joined:
  """Union-find over dimensions, and what products say of them."""

  def __init__(self):
    self.parent, self.size = [], []
    self.columns, self.stacks, self.rows = set(), set(), {}

  def new(self, shape, source=''):
    first = len(self.parent)
    self.parent += range(first, first + len(shape))
    self.size += shape
    return _Value(tuple(range(first, first + len(shape))), source)

  def root(self, i):
    while self.parent[i] != i:
      i = self.parent[i]
    return i

  def join(self, a, b):
    self.parent[self.root(a)] = self.root(b)

  def same(self, a, b):
    """Joins dimensions of two arrays by place, where their sizes agree."""
    if len(a.dims) == len(b.dims):
      for i, j in zip(a.dims, b.dims, strict=True):
        if self.size[i] == self.size[j] != 1:
          self.join(i, j)

  def product(self, x, w, contracted, free, batch):
    """A product with the parameter w; the rest: dimensions of w."""
    outputs = math.prod(self.size[w.dims[d]] for d in free)
    for d in contracted:
      self.rows[w.source, w.dims[d]] = outputs
    self.columns.update(w.dims[d] for d in free)
    self.stacks.update(w.dims[d] for d in batch)


def find(function, params, *args) -> Axes:
  """`Axes` of function(params, *args).

  Args:
    params: {path: jax.ShapeDtypeStruct}. args: shapes, too; sizes of 1 are
      joined with nothing.
  """
  closed = jax.make_jaxpr(function)(params, *args)
  joined, paths = _Joined(), sorted(params)  # as jax flattens a dict
  given = [joined.new(params[p].shape, p) for p in paths]
  rest = closed.jaxpr.invars[len(paths) :]
  outs = _run(
    joined, closed, [*given, *(joined.new(v.aval.shape) for v in rest)]
  )
  root, rows = joined.root, collections.Counter()
  for (_, dim), outputs in joined.rows.items():
    rows[root(dim)] += outputs
  return Axes(
    {p: tuple(map(root, v.dims)) for p, v in zip(paths, given, strict=True)},
    frozenset(map(root, joined.columns)),
    dict(rows),
    frozenset(map(root, joined.stacks)),
    frozenset(root(i) for v in outs for i in v.dims),
  )


def _run(joined, closed, values):
  """Values of the outputs of a jaxpr, which may be closed."""
  jaxpr = getattr(closed, 'jaxpr', closed)
  known = dict(zip(jaxpr.invars, values, strict=True))

  def read(v):
    if isinstance(v, core.Literal) or v not in known:
      return joined.new(getattr(v.aval, 'shape', ()))
    return known[v]

  for eqn in jaxpr.eqns:
    ins = [read(v) for v in eqn.invars]
    found = _HANDLERS.get(eqn.primitive.name, _other)(joined, eqn, ins)
    if found is None:
      found = [joined.new(getattr(v.aval, 'shape', ())) for v in eqn.outvars]
    known.update(zip(eqn.outvars, found, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _inner(eqn) -> Any:
  """The jaxpr that an operation calls with its own operands, or None."""
  for value in eqn.params.values():
    jaxpr = getattr(value, 'jaxpr', value)
    if hasattr(jaxpr, 'eqns') and len(jaxpr.invars) == len(eqn.invars):
      return value
  return None


def _other(joined, eqn, ins):
  """A call, or an operation whose dimensions agree by place."""
  inner = _inner(eqn)
  if inner is not None:
    return _run(joined, inner, ins)
  arrays = [v for v in ins if v.dims]
  source = arrays[0].source if len(arrays) == 1 else ''
  outs = [joined.new(v.aval.shape, source) for v in eqn.outvars]
  for out in outs:
    for value in arrays:
      joined.same(value, out)
  return outs


def _dot_general(joined, eqn, ins):
  x, w = ins
  (lc, rc), (lb, rb) = eqn.params['dimension_numbers']
  for a, b in zip((*lc, *lb), (*rc, *rb), strict=True):
    joined.join(x.dims[a], w.dims[b])
  free = [
    [d for d in range(len(v.dims)) if d not in (*c, *b)]
    for v, c, b in ((x, lc, lb), (w, rc, rb))
  ]
  if w.source and not x.source:
    joined.product(x, w, rc, free[1], rb)
  elif x.source and not w.source:
    joined.product(w, x, lc, free[0], lb)
  dims = [x.dims[d] for d in (*lb, *free[0])] + [w.dims[d] for d in free[1]]
  return [_Value(tuple(dims))]


def _ragged_dot(joined, eqn, ins):
  """Rows times the matrix of their group: (S, D), (E, D, F)."""
  x, w = ins[:2]
  numbers = eqn.params['ragged_dot_dimension_numbers']
  (lc, rc), _ = numbers.dot_dimension_numbers
  groups = tuple(numbers.rhs_group_dimensions)
  for a, b in zip(lc, rc, strict=True):
    joined.join(x.dims[a], w.dims[b])
  free = [d for d in range(len(w.dims)) if d not in (*rc, *groups)]
  if w.source:
    joined.product(x, w, rc, free, groups)
  rows = [x.dims[d] for d in range(len(x.dims)) if d not in lc]
  return [_Value((*rows, *(w.dims[d] for d in free)))]


def _broadcast(joined, eqn, ins):
  out = joined.new(eqn.outvars[0].aval.shape, ins[0].source)
  for i, d in zip(ins[0].dims, eqn.params['broadcast_dimensions'], strict=True):
    if joined.size[i] == joined.size[out.dims[d]] != 1:
      joined.join(i, out.dims[d])
  return [out]


def _transpose(joined, eqn, ins):
  (x,) = ins
  dims = tuple(x.dims[d] for d in eqn.params['permutation'])
  return [_Value(dims, x.source)]


def _reduce(joined, eqn, ins):
  dropped, outs = eqn.params['axes'], []
  for x, _ in zip(ins, eqn.outvars, strict=False):
    kept = [i for d, i in enumerate(x.dims) if d not in dropped]
    outs.append(_Value(tuple(kept)))
  return outs


def _reshape(joined, eqn, ins):
  """Dimensions of equal products meet; a split one continues as its first."""
  x, out = ins[0], joined.new(eqn.outvars[0].aval.shape, ins[0].source)
  size = lambda dims: [i for i in dims if joined.size[i] != 1]
  left, right = size(x.dims), size(out.dims)
  while left and right:
    i, j = left[0], right[0]
    joined.join(i, j)
    a, b = joined.size[left.pop(0)], joined.size[right.pop(0)]
    while a != b:
      if a < b:
        a *= joined.size[left.pop(0)]
      else:
        b *= joined.size[right.pop(0)]
  return [out]


def _gather(joined, eqn, ins):
  """Slices of x: whole dimensions stay, those picked by an index end."""
  x, shape = ins[0], eqn.outvars[0].aval.shape
  # One row for every index is an activation, the matrix of one a parameter.
  out = joined.new(shape, x.source if len(shape) < len(x.dims) else '')
  numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
  gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
  kept = [d for d in range(len(x.dims)) if d not in gone]
  for d, at in zip(kept, numbers.offset_dims, strict=True):
    if joined.size[x.dims[d]] == sizes[d]:
      joined.join(x.dims[d], out.dims[at])
  if x.source:
    joined.stacks.update(x.dims[d] for d in numbers.collapsed_slice_dims)
  return [out]


def _dynamic_slice(joined, eqn, ins):
  """One of many along a dimension of a parameter: a stack."""
  (out,) = _other(joined, eqn, ins[:1])
  if ins[0].source:
    joined.stacks.update(
      i
      for i, n in zip(ins[0].dims, eqn.params['slice_sizes'], strict=True)
      if n == 1 < joined.size[i]
    )
  return [out]


def _scan(joined, eqn, ins):
  consts, carry = eqn.params['num_consts'], eqn.params['num_carry']
  own, of_rows = ins[: consts + carry], ins[consts + carry :]
  rows = [_Value(v.dims[1:], v.source) for v in of_rows]
  outs = _run(joined, eqn.params['jaxpr'], [*own, *rows])
  for before, after in zip(own[consts:], outs[:carry], strict=True):
    joined.same(before, after)
  length = lambda: joined.new((eqn.params['length'],)).dims
  return [
    *outs[:carry],
    *(_Value((*length(), *v.dims)) for v in outs[carry:]),
  ]


def _while(joined, eqn, ins):
  first, second = eqn.params['cond_nconsts'], eqn.params['body_nconsts']
  carry = ins[first + second :]
  outs = _run(joined, eqn.params['body_jaxpr'], ins[first:])
  for before, after in zip(carry, outs, strict=True):
    joined.same(before, after)
  return outs


def _cond(joined, eqn, ins):
  outs, *others = (_run(joined, b, ins[1:]) for b in eqn.params['branches'])
  for other in others:
    for a, b in zip(outs, other, strict=True):
      joined.same(a, b)
  return [_Value(v.dims) for v in outs]


_HANDLERS = {
  'dot_general': _dot_general,
  'ragged_dot_general': _ragged_dot,
  'broadcast_in_dim': _broadcast,
  'transpose': _transpose,
  'reshape': _reshape,
  'squeeze': _reshape,
  'expand_dims': _reshape,
  'gather': _gather,
  'dynamic_slice': _dynamic_slice,
  'scan': _scan,
  'while': _while,
  'cond': _cond,
} | dict.fromkeys(
  (
    'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod', 'reduce_and',
    'reduce_or', 'argmax', 'argmin',
  ),
  _reduce,
)  # fmt: skip
