"""Collectives of a compiled program: kind, mesh axes, bytes, executions.

The figure of merit is `bytes`: what one device receives in one execution, with
O bytes of operands on each device and n devices in a group,

    all-gather          (n - 1) O          all-to-all          (n - 1) / n O
    reduce-scatter      (n - 1) / n O      collective-permute  O
    all-reduce          2 (n - 1) / n O    collective-broadcast O

which the bandwidth-optimal ring algorithms attain and no algorithm beats
(Chan et al., Collective communication, Concurrency 2007, section 3). Payload is
counted, not the padding of layouts. A device that no permute sends to receives
less; the one that receives most is counted. A ragged all-to-all has room for
the worst case on the side that receives: the smaller of its input and output is
counted, what an even spread sends. Remote copies inside kernels are no
collectives and are not seen.

Counting knows what a search for opcodes gets wrong: loops (compiled.py); TPU's
reduce-scatter, a fusion of an all-reduce and the slice that each device keeps;
an asynchronous collective, whose start, steps and end are one; replica groups
in any of their notations; transfers between TPU slices.
"""

import collections
import dataclasses
from typing import NamedTuple

from paraxis.sharding import replica_groups
from paraxis.sharding.meter import compiled

KINDS = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
  'collective-broadcast',
)
PRODUCTS = ('dot', 'convolution')
# Passes on what it is given, piece by piece.
_VIEWS = ('bitcast', 'get-tuple-element', 'copy', 'reshape', 'convert')
# Transfers between TPU slices, which the compiler hands to the hosts.
_BETWEEN_SLICES = dict(
  ALL_REDUCE='all-reduce',
  ALL_GATHER='all-gather',
  REDUCE_SCATTER='reduce-scatter',
  ALL_TO_ALL='all-to-all',
  ONE_TO_ONE='collective-permute',
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program.

  kind: of KINDS. axes: the mesh axes along which its devices differ. group:
  devices in one group. bytes: received per device and execution. count:
  executions in one run of the program. operand_bytes, result_bytes: held per
  device before and after. where: path in the traced program.
  """

  kind: str
  axes: tuple
  group: int
  bytes: int
  count: int
  operand_bytes: int
  result_bytes: int
  where: str

  @property
  def total(self):
    """Bytes that one device receives in one run of the program."""
    return self.bytes * self.count


def collectives(text: str | None, mesh) -> list[Collective]:
  """[Collective] of a compiled program, in the order of its schedule.

  Args:
    text: `compiled.as_text()`.
    mesh: the jax Mesh (or AbstractMesh) it was compiled on: device k of the
      program is the k-th of mesh.devices.flat, whatever its id.

  Raises:
    ValueError: the program has no text, is for another number of devices, or a
      collective is in a loop whose trip count depends on data.
  """
  if text is None:
    raise ValueError('the compiler gives no text of this program.')
  program = compiled.CompiledProgram(text)
  places = replica_groups.Places(mesh)
  if program.partitions != places.partitions:
    raise ValueError(
      f'the program runs on {program.partitions} devices (of a slice), the '
      f'mesh {places.sizes} has {places.partitions}.'
    )
  weigh = lambda runs: sum(c.total for c in _read(program, runs, places))
  return _read(program, program.runs(weigh), places)


def _read(program, runs, places):
  out, chains = [], {}
  for run in runs:
    i = run.instruction
    found = _collective(program, run, places)
    if found is None or found.group == 1:
      continue
    # The steps of an asynchronous chain show the same collective again, in
    # fusions that may stand in inner loops.
    chain = 'chain_id=' in i.rest and i.attribute(r'channel_id=(\d+)')
    if chain in chains:
      at = chains[chain]
      out[at] = min(out[at], found, key=lambda c: c.count)
      continue
    if chain:
      chains[chain] = len(out)
    out.append(found)
  return out


def _collective(program, run, places):
  """`Collective` of a compiled.Execution, or None if it is none."""
  i = run.instruction
  kind = i.opcode.removesuffix('-start')
  operands = program.operand_arrays(i)
  if i.opcode in ('send', 'recv'):
    kind = _BETWEEN_SLICES.get(i.attribute(r'megascale_transfer_type="(\w+)"'))
    if kind is None and 'is_host_transfer=true' not in i.rest:
      raise ValueError(f'{i.name}: {i.opcode} between devices is not counted.')
    if kind is None or i.opcode == 'recv':
      return None
    rows = replica_groups.target(i)
    axes, operands = places.axes_of_ids(rows), operands[:1]
  elif kind == 'collective-permute':
    rows = replica_groups.pairs(i)
    axes = places.axes(rows)
  elif kind in KINDS:
    rows = replica_groups.groups(i, program.partitions)
    axes = places.axes(rows)
    if kind == 'ragged-all-to-all':
      # Input and output buffer; then come the offsets.
      operands = [min(operands[:2], key=lambda a: a.bytes)]
    if kind == 'all-reduce' and run.fused and _sliced(program, i):
      kind = 'reduce-scatter'
  else:
    return None
  permute = kind == 'collective-permute'
  group = places.span(axes) if permute else rows.shape[1]
  held = sum(a.bytes for a in operands)
  sizes = {'all-gather': held * group, 'reduce-scatter': held // group}
  result = sizes.get(kind, held)
  size = received(kind, max(held, result), group)
  return Collective(kind, axes, group, size, run.times, held, result, i.where)


def received(kind: str, whole: int, n: int) -> int:
  """Bytes that one of n devices receives; whole: bytes of the larger side.

  The module's table: an all-gather's larger side is its result, n O.
  """
  if kind in ('collective-permute', 'collective-broadcast'):
    return whole if n > 1 else 0
  part = -(-whole * (n - 1) // n)  # rounded up to whole bytes
  return 2 * part if kind == 'all-reduce' else part


def _sliced(program, reduce):
  """Whether each device keeps only its share of a fused all-reduce."""
  home = program.computations[reduce.home]
  names, slices = {reduce.name}, []
  for i in home.values():
    if names & set(i.operands):
      if i.opcode == 'dynamic-slice':
        slices.append(i)
      elif i.opcode in _VIEWS:
        names.add(i.name)
      elif i.opcode != 'tuple':
        return False  # something reads all of it
  kept = sum(a.bytes for i in slices for a in i.results)
  n = replica_groups.groups(reduce, program.partitions).shape[1]
  return bool(slices) and kept * n == sum(a.bytes for a in reduce.results)


def by_axis(found: list[Collective]) -> dict[str, int]:
  """{'fsdp': bytes, 'data,fsdp': bytes}: received per device and run."""
  return _sum(found, lambda c: ','.join(c.axes))


def by_kind(found: list[Collective]) -> dict[str, int]:
  """{kind: bytes} received per device and run."""
  return _sum(found, lambda c: c.kind)


def _sum(found, key):
  out = collections.Counter()
  for c in found:
    out[key(c)] += c.total
  return dict(sorted(out.items()))


def rows(found):
  """[(kind, axes, executions, bytes per device and run)], most bytes first."""
  out = {}
  for c in found:
    old = out.get((c.kind, c.axes), (0, 0))
    out[c.kind, c.axes] = old[0] + c.count, old[1] + c.total
  order = sorted(out.items(), key=lambda item: -item[1][1])
  return [(kind, ','.join(axes), *both) for (kind, axes), both in order]


def table(found: list[Collective]) -> str:
  """`rows` as text, with the sum of the bytes below."""
  lines = [
    f'{"collective":20} {"mesh axes":24} {"times":>7} {"MB received":>12}'
  ]
  for kind, axes, count, size in rows(found):
    lines.append(f'{kind:20} {axes:24} {count:7,} {size / 1e6:12,.3f}')
  total = sum(c.total for c in found)
  lines.append(f'{"all":20} {"":24} {"":7} {total / 1e6:12,.3f}')
  return '\n'.join(lines)


class Overlap(NamedTuple):
  """A collective of the program's main computation.

  kind: of KINDS. where: path in the traced program. products: paths of products
  beside it; a fusion with a product in it is a product.
  """

  kind: str
  where: str
  products: tuple


def overlapped(text: str) -> list[Overlap]:
  """[Overlap] of a compiled program: products that start while each travels.

  An asynchronous collective is a pair of instructions, -start and -done, or on
  TPU a chain of fusions that has products among it. One that is not
  asynchronous has no products.
  """
  main, steps, products = _main(text)
  places = {name: n for n, name in enumerate(main)}
  within = lambda names, p: places[names[0]] < places[p] < places[names[-1]]
  return _beside(steps, products, within)


def independent(text: str) -> list[Overlap]:
  """[Overlap] of a compiled program: products that each collective neither
  waits for nor holds up, whatever the schedule; what could be overlapped."""
  main, steps, products = _main(text)
  before = {}  # name -> all that it waits for
  for name, i in main.items():
    mine = [{x} | before[x] for x in i.operands if x in before]
    before[name] = set().union(*mine)
  apart = lambda names, p: (
    not (before[p] & {*names} or any(p in before[n] for n in names))
  )
  return _beside(steps, products, apart)


def _beside(steps, products, holds):
  """[Overlap] of steps, with the products p that holds(names of a step, p)."""
  of = lambda names: tuple(x for p, x in products.items() if holds(names, p))
  return [Overlap(kind, where, of(names)) for kind, where, names in steps]


def _main(text):
  """The main computation of a compiled program, in the order of its schedule.

  Returns:
    ({name: Instruction}; [(kind, path, names of its steps)] of collectives;
    {name: path} of products).
  """
  program = compiled.CompiledProgram(text)
  main, steps, products = program.computations[program.entry], {}, {}
  for name, i in main.items():
    for x in _inside(program, i):
      kind = x.opcode.removesuffix('-start').removesuffix('-done')
      if x.opcode in PRODUCTS:
        products.setdefault(name, x.where)
      elif kind in KINDS:
        start = x.operands[0] if x.opcode.endswith('-done') else x.name
        chain = x.attribute(r'chain_id="(\d+)"') or start
        steps.setdefault(chain, (kind, x.where, []))[2].append(name)
  return main, list(steps.values()), products


def _inside(program, i):
  """An instruction, and all that it calls."""
  found = [i]
  for name in i.called:
    for inner in program.computations[name].values():
      found += _inside(program, inner)
  return found
