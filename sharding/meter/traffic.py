"""Bytes that a compiled program moves between a chip and its memory.

Every instruction of the schedule counts its operands and results once, times
its executions (compiled.py). A fusion is one such instruction: its inner values
stay on the chip. Of an array that is only sliced, looked up or updated in
place, the accessed part counts. Arrays that the compiler keeps on the chip
(memory spaces other than 0) are free, and so are instructions that move no
data.

It is a lower bound: kernels that the compiler cannot see into count their
operands and results once, and the padding of layouts is left out. Used with a
bandwidth it gives a time that is a model, not a measurement.
"""

from paraxis.sharding.meter import compiled

_FREE = frozenset(
  'parameter constant tuple get-tuple-element bitcast after-all partition-id '
  'replica-id conditional call optimization-barrier async-start async-update '
  'async-done recv domain'.split()
)
# Copies within a fusion, which stay on the chip.
_VIEWS = ('bitcast', 'copy')
_PARTIAL = ('dynamic-slice', 'gather', 'slice')  # read what they give


def hbm_bytes(text: str) -> int:
  """Bytes read and written per device in one run of a compiled program.

  Args:
    text: `compiled.as_text()`.

  Raises:
    ValueError: a loop has a trip count that depends on data.
  """
  program = compiled.CompiledProgram(text)
  weigh = lambda runs: sum(
    moved(program, run.instruction) * run.times for run in runs if not run.fused
  )
  return weigh(program.runs(weigh))


def moved(program, i):
  """Bytes that one execution of a compiled.Instruction moves."""
  home = program.computations[i.home]
  operands = [home[name].results for name in i.operands]
  if i.opcode in _FREE:
    return 0
  if i.opcode == 'fusion':
    inside = program.computations[i.called[0]]
    root = inside[program.roots[i.called[0]]]
    read = [
      _read(program, inside, _inner(program, i, n)[1].name, held)
      for n, held in enumerate(operands)
    ]
    written = _written(program, inside, root, i.results)
    return sum(read) + sum(map(_size, written))
  if i.opcode.endswith('-done'):  # the start has read, the end has written
    return _size(i.results)
  if i.opcode.endswith('-start') or i.opcode == 'send':
    return sum(map(_size, operands))
  if i.opcode in _PARTIAL:
    return _size(i.results) + _touched(i.results, operands[0])
  if i.opcode == 'dynamic-update-slice':
    return _size(operands[1]) + _touched(operands[1], i.results)
  if i.opcode == 'scatter':  # reads, adds, writes what is updated
    return 3 * _size(operands[-1])
  return sum(map(_size, operands)) + _size(i.results)


def _size(arrays):
  return sum(a.bytes for a in arrays if a.space == 0)


def _touched(part, whole):
  """Bytes of `part`, where `whole`, of which it is a part, is in memory."""
  on_chip = any(a.space for a in whole)
  return 0 if on_chip else sum(a.bytes for a in part)


def _read(program, inside, name, held):
  """Bytes that a fusion reads of the parameter `name`, whose arrays are held.

  All of it, unless everything that uses it takes a part.
  """
  total = 0
  for user in inside.values():
    if name not in user.operands:
      continue
    at = user.operands.index(name)
    if user.opcode in _PARTIAL and at == 0:
      total += _touched(user.results, held)
    elif user.opcode == 'dynamic-update-slice' and at == 0:
      continue  # in place: the part is written, see _written
    elif user.opcode in _VIEWS:
      total += _read(program, inside, user.name, held)
    elif user.opcode == 'fusion':
      inner, argument, root = _inner(program, user, at)
      if _viewed(inner, root).name == argument.name:
        total += _read(program, inside, user.name, held)
      else:
        total += _read(program, inner, argument.name, held)
    else:
      return _size(held)
  return min(total, _size(held))


def _inner(program, fusion, at=0):
  """(computation of a fusion, its parameter number `at`, its root)."""
  name = fusion.called[0]
  inner = program.computations[name]
  number = lambda p: p.opcode == 'parameter' and int(p.arguments) == at
  return inner, next(filter(number, inner.values())), inner[program.roots[name]]


def _viewed(inside, i):
  """The instruction of which `i` is a copy within a fusion; else i."""
  while i.opcode in _VIEWS:
    i = inside[i.operands[0]]
  return i


def _written(program, inside, root, results):
  """Arrays that a fusion with that root writes: results, or their parts."""
  root = _viewed(inside, root)
  if root.opcode == 'tuple' and len(root.operands) == len(results):
    return [
      part
      for name, array in zip(root.operands, results, strict=True)
      for part in _written(program, inside, inside[name], [array])
    ]
  if root.opcode == 'dynamic-update-slice':
    update = inside[root.operands[1]].results
    return [] if any(a.space for a in results) else [update]
  if root.opcode == 'fusion' and root.operands:
    inner, _, last = _inner(program, root)
    return _written(program, inner, last, results)
  return [results]
