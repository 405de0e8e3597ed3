"""A compiled program read from its text: instructions and their executions.

`compiled.as_text()` is the optimised HLO of one device. Work done in a loop is
printed once, so every instruction gets a number of executions: the product of
the trip counts of the loops around it. A trip count is the compiler's own
(`known_trip_count`) where the text has one. TPU text has none; there it is
solved from the loop's condition:

    trips = ceil((limit - start) / step)    while index < limit, index += step

start from the loop's initial tuple, step from its body. A trip count without a
solution is an error, never a guess. Of a conditional the larger branch counts.
Cost: one pass over the text, about 0.2 s per MB.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from paraxis.sharding import turns

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{$')
_LINE = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_OPCODE = re.compile(r' ([a-z][\w\-]*)\(')
_ARRAY = re.compile(r'([a-z][a-z0-9]*)\[([\d,<= ]*)\](\{[^}]*\})?')
_SPACE = re.compile(r'S\((\d+)\)')
_NAME = re.compile(r'%([\w.\-]+)')
_CALLED = re.compile(
  r'(?:calls|to_apply|called_computations|async_execution_computation)='
  r'(\{[^}]*\}|%[\w.\-]+)'
)
_BRANCHES = re.compile(
  r'(?:branch_computations|true_computation|false_computation)='
  r'(\{[^}]*\}|%[\w.\-]+)'
)
# Opcodes that pass an integer on unchanged.
_SAME = frozenset(
  'copy bitcast convert reshape copy-start copy-done '
  'optimization-barrier'.split()
)
# Comparisons that bound a loop, and the same with the sides exchanged.
_FLIPPED = dict(LT='GT', GT='LT', LE='GE', GE='LE', NE='NE')
# Opcodes that run a computation as it is; all others fuse it or apply it.
_INLINE = ('call', 'async-start', 'conditional')
_MAX_LINKS = 1000  # of a chain of definitions; more is a cycle


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a type: dtype name, dimensions, memory space (0: HBM)."""

  dtype: str
  shape: tuple
  space: int

  @property
  def bits(self):
    """Of one element."""
    if self.dtype in ('token', 'opaque'):
      return 0
    return 8 if self.dtype == 'pred' else int(re.findall(r'\d+', self.dtype)[0])

  @property
  def bytes(self):
    """Payload, without the padding of the layout."""
    return math.ceil(math.prod(self.shape) * self.bits / 8)


def arrays(text):
  """The arrays of a type, tuples flattened: 'f32[2,3]{1,0}' -> [Array]."""
  out = []
  for dtype, shape, layout in _ARRAY.findall(text):
    sizes = [int(n) for n in re.findall(r'\d+', shape)]
    space = _SPACE.search(layout)
    out.append(Array(dtype, tuple(sizes), int(space[1]) if space else 0))
  return out


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line. `home` is its computation, `rest` what follows the operands."""

  home: str
  name: str
  opcode: str
  type: str
  arguments: str
  rest: str

  @functools.cached_property
  def results(self):
    """Arrays that it makes."""
    return arrays(self.type)

  @functools.cached_property
  def operands(self):
    """Names of its operands."""
    return _NAME.findall(self.arguments)

  @functools.cached_property
  def called(self):
    """Computations that run whenever it does."""
    return _names(_CALLED, self.rest)

  @functools.cached_property
  def branches(self):
    """Computations of which a conditional runs one."""
    return _names(_BRANCHES, self.rest)

  def attribute(self, pattern):
    """First group of `pattern` in what follows the operands, or ''."""
    match = re.search(pattern, self.rest)
    return match[1] if match else ''

  @property
  def where(self):
    """Where in the traced program it comes from."""
    return self.attribute(r'op_name="([^"]*)"')


def _names(pattern, text):
  return [n for part in pattern.findall(text) for n in _NAME.findall(part)]


@dataclasses.dataclass(frozen=True)
class Execution:
  """An instruction and its number of executions. fused: inside a fusion."""

  instruction: Instruction
  times: int
  fused: bool


class CompiledProgram:
  """Computations of a compiled text.

  Attributes:
    computations: name -> {name: Instruction}, in the order of the schedule.
    roots: computation -> name of its root instruction.
    entry: name of the computation that runs.
    partitions: devices that run it together.
  """

  def __init__(self, text):
    """Reads `compiled.as_text()`; ValueError if it is another text."""
    self.computations, self.roots, self.entry = {}, {}, None
    head = text.partition('\n')[0]
    found = re.search(r'num_partitions=(\d+)', head)
    self.partitions = int(found[1]) if found else 1
    home = None
    for line in text.splitlines():
      if match := _HEAD.match(line):
        home = match[2]
        self.computations[home] = {}
        if match[1]:
          self.entry = home
      elif home and (match := _LINE.match(line)):
        i = _instruction(home, match[2], match[3])
        if i is None:
          continue
        self.computations[home][i.name] = i
        if match[1]:
          self.roots[home] = i.name
      elif line.startswith('}'):
        home = None
    if self.entry is None:
      raise ValueError('no ENTRY computation: this is no compiled program')

  def operand_arrays(self, i):
    """Arrays that an instruction reads."""
    home = self.computations[i.home]
    return [a for name in i.operands for a in home[name].results]

  def runs(self, weigh):
    """[Execution] of everything that runs, loops multiplied out.

    Args:
      weigh: [Execution] -> number; the branch of a conditional that counts is
        the one that weighs most, and a loop without a known trip count is an
        error only if its body weighs anything."""
    return self._runs(self.entry, 1, False, weigh)

  def _runs(self, name, times, fused, weigh):
    out = []
    for i in self.computations[name].values():
      if i.opcode == 'while':
        out += self._loop(i, times, weigh)
        continue
      out.append(Execution(i, times, fused))
      if i.branches:
        taken = turns.times(times, turns.share(i.where))
        sides = [self._runs(b, taken, fused, weigh) for b in i.branches]
        out += max(sides, key=weigh)
      for other in i.called:
        inside = fused or i.opcode not in _INLINE
        out += self._runs(other, times, inside, weigh)
    return out

  def _loop(self, i, times, weigh):
    body = i.attribute(r'body=%([\w.\-]+)')
    trips = self.trips(i)
    if trips is None:
      trips = turns.trips(i.where)
    if trips is None:
      if weigh(self._runs(body, 1, False, weigh)):
        raise ValueError(
          f'loop {i.name} ({i.where}): its trip count is not in the compiled '
          'text and depends on data, so what it does cannot be counted.'
        )
      trips = 1
    return self._runs(body, times * trips, False, weigh)

  def trips(self, loop):
    """Trip count of a `while` Instruction, or None if it depends on data."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known:
      return int(known)
    compare, scope, _ = self._root(loop.attribute(r'condition=%([\w.\-]+)'))
    direction = compare.attribute(r'direction=(\w+)')
    if compare.opcode != 'compare' or direction not in _FLIPPED:
      return None
    sides = [self._follow(o, compare.home, scope) for o in compare.operands]
    if sides[0].slot is None or self._step(loop, sides[0].slot) == 0:
      sides, direction = sides[::-1], _FLIPPED[direction]
    index, limit = sides
    start, step = (f(loop, index.slot) for f in (self._start, self._step))
    end = _integer(limit)
    if end is None and self._step(loop, limit.slot) == 0:  # carried along
      end = self._start(loop, limit.slot)
    if start is None or end is None or step is None:
      return None
    if direction in ('GT', 'GE'):
      start, end, step = -start, -end, -step
    if step <= 0:
      return None
    inclusive = direction in ('LE', 'GE')
    return max(0, math.ceil((end - start + inclusive) / step))

  def _start(self, loop, slot):
    """Integer with which slot `slot` of a loop's state starts, or None."""
    state, scope, _ = self._follow(loop.operands[0], loop.home, {})
    if slot is None or state.opcode != 'tuple':
      return None
    return _integer(self._follow(state.operands[slot], state.home, scope))

  def _step(self, loop, slot):
    """What one turn adds to slot `slot`, or None if that is no constant."""
    root, scope, _ = self._root(loop.attribute(r'body=%([\w.\-]+)'))
    if slot is None or root.opcode != 'tuple':
      return None
    new = self._follow(root.operands[slot], root.home, scope)
    if new.slot == slot:
      return 0
    i = new.instruction
    if i.opcode != 'add':
      return None
    parts = [self._follow(o, i.home, new.scope) for o in i.operands]
    steps = [_integer(p) for p in parts if p.slot != slot]
    return steps[0] if len(steps) == 1 else None

  def _root(self, name):
    return self._follow(self.roots[name], name, {})

  def _follow(self, name, home, scope):
    """`_Value` of a name, seen through copies, fusions, calls and tuples.

    scope: parameter number of `home` -> (name, home, scope) of its argument;
    empty for the body and the condition of a loop.
    """
    for _ in range(_MAX_LINKS):
      i = self.computations[home][name]
      if i.opcode in _SAME:
        name = i.operands[0]
      elif i.opcode in ('fusion', 'call'):
        scope = {n: (o, home, scope) for n, o in enumerate(i.operands)}
        home = i.called[0]
        name = self.roots[home]
      elif i.opcode == 'parameter' and int(i.arguments) in scope:
        name, home, scope = scope[int(i.arguments)]
      elif i.opcode == 'get-tuple-element':
        whole, inner, _ = self._follow(i.operands[0], home, scope)
        slot = int(i.attribute(r'index=(\d+)'))
        if whole.opcode != 'tuple':
          free = whole.opcode == 'parameter'
          return _Value(i, scope, slot if free else None)
        name, home, scope = whole.operands[slot], whole.home, inner
      else:
        return _Value(i, scope, None)
    raise ValueError(f'{name}: its definition leads back to itself')


class _Value(NamedTuple):
  """The instruction that makes a value. slot: its slot of a loop's state."""

  instruction: Instruction
  scope: dict
  slot: int | None


def _integer(value):
  """The value of an integer constant, or None."""
  i = value.instruction
  number = i.opcode == 'constant' and re.fullmatch(r'-?\d+', i.arguments)
  return int(i.arguments) if number else None


def _instruction(home, name, text):
  """'f32[2] add(%a, %b), metadata={}' -> Instruction, None if it is no such."""
  start = _close(text, 0) + 1 if text.startswith('(') else 0
  match = _OPCODE.search(text, start)
  if not match:
    return None
  opening = match.end() - 1
  end = _close(text, opening)
  return Instruction(
    home,
    name,
    match[1],
    text[: match.start()],
    text[opening + 1 : end],
    text[end + 1 :],
  )


def _close(text, start):
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for at in range(start, len(text)):
    if text[at] == '(':
      depth += 1
    elif text[at] == ')':
      depth -= 1
      if depth == 0:
        return at
  raise ValueError(f'unbalanced parentheses in {text[:80]!r}')
