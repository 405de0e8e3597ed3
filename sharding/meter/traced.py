"""A traced program as one device sees it: operations on local arrays.

A jaxpr has nested calls, and every array has its layout in its type. Here the
calls are inlined and only loops, branches and manual regions stay nested; every
array becomes a `Value` with the mesh axes of each dimension and the bytes that
one device holds. Nothing is run and no device is needed, so that a layout can
be checked (sharding/meter/predict.py counts what it sends,
sharding/meter/liveness.py what it keeps).

Three worlds, as in sharding/annotate.py: on Explicit axes layouts are in types;
in a manual region shapes are local already; inside jax.sharding.auto_axes the
compiler chooses, and here a layout is carried through operations that keep it.
"""

from collections.abc import Mapping
import copy
import fractions
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend import source_info_util
from jax.sharding import AxisType

from paraxis.sharding import annotate
from paraxis.sharding import turns
from paraxis.sharding.tensor import lookup
from paraxis.sharding.tensor import project
from paraxis.sharding.tensor import rings
from paraxis.sharding.tensor import tape
from paraxis.sharding.tensor import worlds

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
# Not ours: outside our folder, or in an environment inside it.
_FOREIGN = re.compile(r'\.\.|.*\bsite-packages\b')
# Frames of these files annotate an operation; its owner is further up.
_PASSED = {m.__file__ for m in (annotate, lookup, project, rings, tape, worlds)}
# Of Pallas, and of Mosaic for GPUs: their bodies hold references, and run on
# one device.
KERNELS = 'pallas_call', 'mpmd_map'
_CALLS = (
  'jit', 'pjit', 'closed_call', 'core_call', 'remat', 'remat2', 'checkpoint',
  'custom_jvp_call', 'custom_vjp_call', 'custom_vjp_call_jaxpr', 'custom_lin',
)  # fmt: skip
_NESTING = ('scan', 'while', 'cond', 'shard_map')
_MIXING = ('dot_general', 'sort', 'rev', *_NESTING)
_ADDED = ('scatter-add', 'scatter_add')
_SHORT = dict(
  float64='f64', float32='f32', bfloat16='bf16', float16='f16', int32='s32',
  uint32='u32', int8='s8', bool='pred',
)  # fmt: skip
FORWARD, RECOMPUTE, BACKWARD = 'forward', 'recompute', 'backward'


class Value:
  """An array; two of them are the same array if they are the same object.

  layout: mesh axes of every dimension, as (('data', 'fsdp'), (), ('tensor',)).
  partial: axes over which it is an unreduced sum. bytes: of one device's share.
  auto: the compiler chooses its layout, and `layout` is our guess. host: it is
  in the memory of the host.
  """

  __slots__ = ('auto', 'bytes', 'dtype', 'host', 'layout', 'partial', 'shape')

  def __init__(self, aval, sizes, guess=None):
    self.shape = tuple(getattr(aval, 'shape', ()))
    self.dtype = getattr(aval, 'dtype', None)
    self.host = getattr(aval, 'memory_space', None) is jax.memory.Space.Host
    spec, kinds = _spec(aval)
    self.auto = AxisType.Auto in kinds
    self.partial = frozenset(getattr(spec, 'unreduced', None) or ())
    own = ()
    if AxisType.Explicit in kinds:
      own = tuple(map(_axes, spec.partitions))
    elif self.auto and guess is not None:
      own = guess
    self.layout = tuple(
      tuple(a for a in axes if sizes.get(a, 1) > 1)
      for axes in (*own, *((),) * (len(self.shape) - len(own)))
    )
    self.measure(sizes)

  def measure(self, sizes):
    """Sets `bytes` from the layout."""
    local = (
      -(-n // math.prod(sizes[a] for a in axes))
      for n, axes in zip(self.shape, self.layout, strict=True)
    )
    self.bytes = getattr(self.dtype, 'itemsize', 0) * math.prod(local)

  def __repr__(self):
    dims = (
      f'{n}@{"+".join(axes)}' if axes else str(n)
      for n, axes in zip(self.shape, self.layout, strict=True)
    )
    return f'{_SHORT.get(str(self.dtype), self.dtype)}[{",".join(dims)}]'


def shard(aval) -> Value:
  """The `Value` of a jaxpr's type, on the mesh that the type names."""
  sharding = getattr(aval, 'sharding', None)
  return Value(aval, dict(sharding.mesh.shape) if sharding else {})


class Op(NamedTuple):
  """One operation. ins, outs: Values. params: of the jaxpr's equation.

  where: 'models/ffn/mlp.py:40 BTD,DF->BTF'. phase: forward, recompute or
  backward.
  bodies: `Body` of each branch of a cond, or the one of a loop or region.
  times: how often a body runs, below 1 for a branch that is not always taken,
    or None if that depends on data.
  """

  name: str
  ins: tuple
  outs: tuple
  params: Any
  where: str
  phase: str
  bodies: tuple = ()
  times: int | fractions.Fraction | None = 1


class Body(NamedTuple):
  """ins, outs: Values. ops: [Op] in order."""

  ins: tuple
  outs: tuple
  ops: list


def _axes(part):
  return () if part is None else part if isinstance(part, tuple) else (part,)


def _spec(aval) -> tuple[Any, tuple]:
  sharding = getattr(aval, 'sharding', None)
  if sharding is None or sharding.mesh.empty:
    return None, ()
  return sharding.spec, sharding.mesh.axis_types


class Origin(NamedTuple):
  """where: 'models/ffn/mlp.py:40 BTD,DF->BTF'. phase: of the step."""

  where: str = ''
  phase: str = FORWARD


def line(source):
  """'models/ffn/mlp.py:40' of a source_info; '' if the line is not ours."""
  for frame in source.traceback.frames if source.traceback else ():
    name = os.path.relpath(frame.file_name, _ROOT)
    if not _FOREIGN.match(name) and frame.file_name not in _PASSED:
      return f'{name}:{frame.line_num}'
  return ''


def _origin(source, outer):
  """`Origin` of an equation inside another; what it lacks is the outer's.

  An equation that no line of ours made has the line of its user.
  """
  stack, where = str(source.name_stack), line(source)
  if where:
    equation = re.findall(r'[A-Z]+,[A-Z]+->[A-Z]*', stack)
    where = ' '.join([where, *equation[-1:]])
  phase = outer.phase
  if 'rematted_computation' in stack:
    phase = RECOMPUTE
  elif phase == FORWARD and 'transpose(' in stack:
    phase = BACKWARD
  where = (
    where or outer.where or os.path.basename(source_info_util.summarize(source))
  )
  return Origin(where, phase)


class _Reader:
  """Unfolds jaxprs for a mesh of `sizes`.

  Operations of one body that are the same on the same Values are one, as XLA's
  common subexpressions are; rematerialised ones stand behind a barrier.
  """

  def __init__(self, sizes):
    self.sizes = sizes
    self.known = {}  # of the body being read: what an operation is -> its outs

  def value(self, aval, guess=None):
    return Value(aval, self.sizes, guess)

  def body(self, jaxpr, outer, origin):
    """`Body` of a nested jaxpr; `outer`: Values whose layouts it takes on."""
    ins = tuple(
      self.value(v.aval, _tail(o.layout, len(v.aval.shape)))
      for v, o in zip(jaxpr.invars, outer, strict=True)
    )
    ops, known, self.known = [], self.known, {}
    outs = self.unfold(jaxpr, ins, ops, origin)
    self.known = known
    return Body(ins, outs, _used(ops, outs))

  def unfold(self, jaxpr, ins, ops, origin):
    """Appends the operations of `jaxpr` on the Values `ins` -> its outputs."""
    table = dict(zip(jaxpr.invars, ins, strict=True))
    for var in jaxpr.constvars:
      table[var] = self.value(var.aval)

    def read(atom):
      if not isinstance(atom, core.Literal):
        return table[atom]
      key = str(atom.aval), repr(atom.val)
      return self.known.setdefault(key, (self.value(atom.aval),))[0]

    for equation in jaxpr.eqns:
      args = tuple(map(read, equation.invars))
      outs = self.equation(equation, args, ops, origin)
      table.update(zip(equation.outvars, outs, strict=True))
    return tuple(map(read, jaxpr.outvars))

  def equation(self, equation, ins, ops, outer):
    """Appends one equation, or what it calls -> its output Values."""
    name, params = equation.primitive.name, equation.params
    origin = _origin(equation.source_info, outer)
    jaxprs = []
    if name in (*_CALLS, *_NESTING):
      jaxprs = list(core.jaxprs_in_params(params))
    if name in _CALLS:
      if params.get('prevent_cse'):
        before, ins = ins, tuple(map(copy.copy, ins))
        ops.append(Op('optimization_barrier', before, ins, {}, *origin))
      return self.unfold(jaxprs[0], ins, ops, origin)
    key = _key(name, ins, params, equation.effects)
    if key in self.known:
      return self.known[key]
    if name == 'reshard':
      self.settle(ins[0], equation.outvars[0].aval, ops)
    outs = tuple(
      self.value(v.aval, _guess(name, ins, params, v.aval))
      for v in equation.outvars
    )
    names = equation.source_info.name_stack
    nested = self.nested(name, params, ins, jaxprs, origin, names)
    ops.append(Op(name, ins, outs, params, *origin, *nested))
    if key is not None:
      self.known[key] = outs
    return outs

  def nested(self, name, params, ins, jaxprs, origin, names):
    """(bodies, how often they run) of a loop, a branch or a region."""
    times = 1
    if name == 'scan':
      times = params['length']
    elif name == 'while':
      times, jaxprs = turns.trips(names), jaxprs[1:]
      ins = ins[params['cond_nconsts'] :]
    elif name == 'cond':
      times, ins = turns.share(names), ins[1:]
    return tuple(self.body(j, ins, origin) for j in jaxprs), times

  def settle(self, value, target, ops):
    """A sum of rows that the compiler lays out takes what it becomes.

    Its axes over which rows are summed stay with the rows.
    """
    made = [op for op in ops if op.name in _ADDED and op.outs[0] is value]
    if value.auto and made:
      taken = {a for axes in made[0].ins[2].layout for a in axes}
      wanted = self.value(target).layout
      value.layout = tuple(
        tuple(a for a in axes if a not in taken) for axes in wanted
      )
      value.measure(self.sizes)


def _key(name, ins, params, effects):
  """What makes two operations the same; None if they cannot be compared."""
  named = all(type(e).__name__ == 'NamedAxisEffect' for e in effects)
  if name in _NESTING or not named or name == 'optimization_barrier':
    return None
  key = name, ins, tuple(sorted(params.items(), key=lambda item: item[0]))
  try:
    hash(key)
  except TypeError:
    return None
  return key


def _used(ops, outs):
  """The operations that `outs` need."""
  needed, kept = set(outs), []
  for op in reversed(ops):
    if needed.intersection(op.outs) or not op.outs:
      needed.update(op.ins)
      kept.append(op)
  return kept[::-1]


def _tail(layout, ndim):
  return layout[len(layout) - ndim :] if ndim else ()


def _guess(name, ins, params, aval):
  """Layout of a result inside auto_axes, where types do not say it; or None."""
  if not ins or AxisType.Auto not in _spec(aval)[1]:
    return None
  x = max(ins, key=lambda v: sum(map(bool, v.layout)))
  if name == 'broadcast_in_dim':
    out = [()] * len(aval.shape)
    for i, place in enumerate(params['broadcast_dimensions']):
      out[place] = x.layout[i]
    return tuple(out)
  if name == 'transpose':
    return tuple(x.layout[i] for i in params['permutation'])
  if name in ('squeeze', 'reduce_sum', 'reduce_max'):
    gone = params.get('dimensions', params.get('axes'))
    return tuple(a for i, a in enumerate(x.layout) if i not in gone)
  if name == 'gather':
    return gathered(ins[0], ins[1], params['dimension_numbers'])
  if name == 'reshard' or name in _ADDED:
    return ins[0].layout
  same = name not in _MIXING and x.shape == aval.shape
  return x.layout if same else None


def gathered(table, ids, numbers):
  """Layout of table[ids]: of ids where ids index, of table elsewhere."""
  rest = [
    axes
    for i, axes in enumerate(table.layout)
    if i not in numbers.collapsed_slice_dims
  ]
  index = list(ids.layout[:-1])
  out, used = [], set()
  for i in range(len(rest) + len(index)):
    axes = (rest if i in numbers.offset_dims else index).pop(0)
    out.append(tuple(a for a in axes if a not in used))
    used |= set(axes)
  return tuple(out)


def trace(function, sizes: Mapping[str, int], *shapes) -> tuple[Body, Any]:
  """Traces function(*shapes) under the Explicit mesh in force, and reads it.

  Args:
    function: of arrays; not run.
    sizes: mesh axis -> size.
    shapes: pytrees of jax.ShapeDtypeStruct with their shardings.

  Returns:
    (`Body`, the shapes of the results); nested bodies are in its operations.
  """
  closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
  return of_jaxpr(closed, sizes), out


def of_jaxpr(closed, sizes: Mapping[str, int]) -> Body:
  """`Body` of what a mesh of these sizes traced: a ClosedJaxpr."""
  reader, ops = _Reader(dict(sizes)), []
  ins = tuple(reader.value(v.aval) for v in closed.jaxpr.invars)
  outs = reader.unfold(closed.jaxpr, ins, ops, Origin())
  return Body(ins, outs, _used(ops, outs))
