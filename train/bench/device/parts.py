"""The parts of `paraxis bench device`, and the process that runs one of them.

A part is a function quick -> {case: function(Work)} of a module of this room.
It runs in a process of its own, one case after the other; what a case found is
written when it ends. So a case that takes the process down, as a kernel that
reads beyond an array does, costs itself alone: the process is started again for
the cases that are left (command.py).

    python -m paraxis.train.bench.device.parts PART DIR ABOUT ROUNDS [--quick]

Nothing here imports jax before a part begins.
"""

from collections.abc import Callable
import copy
import importlib
import json
import os
import sys
import time
from typing import Any, NamedTuple

from paraxis.train.bench import measure
from paraxis.train.bench.device import report as device_report

AGAIN = 3  # exit code: start the process again for the cases that are left


class Part(NamedTuple):
  """One row of the table, in the order of what it is worth.

  where: 'module:function'. least: seconds without which it is not begun, of
  --quick and else. most: seconds that it may take. longest: one case.
  """

  name: str
  where: str
  about: str
  least: tuple[int, int]
  most: int
  longest: int


PARTS = (
  Part('ceilings', 'speed:ceilings',
       'products and a copy: what others stand beside', (6, 15), 60, 45),
  Part('correct', 'correct:correct',
       'every kernel against a float64 loop', (20, 60), 200, 45),
  Part('train_1b', 'model:train_1b',
       'a training step: compile time, MFU, memory', (15, 75), 190, 120),
  Part('attention', 'speed:attention',
       'attention beside XLA, cuDNN, splash, tokamax', (7, 35), 90, 90),
  Part('kernels', 'kernels:kernels',
       'the other kernels beside XLA', (18, 35), 150, 45),
  Part('decode', 'model:decode',
       'tokens a second beside the bandwidth of a copy', (12, 40), 130, 80),
  Part('train_125m', 'model:train_125m',
       'a training step: compile time, MFU, memory', (10, 40), 80, 60),
  Part('checkpoint', 'model:checkpoint',
       'save and restore', (8, 20), 60, 60),
  Part('blocks', 'speed:blocks',
       "attention's best blocks: DIR/block_table.json", (10, 40), 240, 120),
)  # fmt: skip


class Work(NamedTuple):
  """What a case is given: where it puts its figures, and how much it does.

  folder: of the results. rounds: measured rounds. report: without figures,
  each case has a copy of its own. say: prints a line.
  """

  quick: bool
  rounds: int
  folder: str
  report: measure.BenchReport
  say: Callable[[str], None]


def cases(part: Part, quick: bool) -> dict[str, Callable[[Work], Any]]:
  """{case: function} of a part."""
  name, function = part.where.split(':')
  module = importlib.import_module(f'paraxis.train.bench.device.{name}')
  return getattr(module, function)(quick)


def find(name: str) -> Part:
  """The part of a name."""
  return next(part for part in PARTS if part.name == name)


def _of_device(error):
  """Whether a device may answer nothing more after an error."""
  jax = sys.modules.get('jax')
  return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def run(part: Part, record: dict, work: Work) -> int:
  """Runs the cases that the record lacks, writing it -> exit code.

  0: the part is done, and the record says how. AGAIN: the process must be
  started again, for the device may be in no state to go on.
  """
  parent = os.getppid()
  began, before = time.perf_counter(), record['seconds']

  def save(**fields):
    seconds = before + time.perf_counter() - began
    record.update(fields, seconds=seconds)
    device_report.write(work.folder, record)

  left = cases(part, work.quick)
  save(names=list(left))
  for name, function in left.items():
    if name in record['cases']:
      continue
    if os.getppid() != parent:  # killed: nobody would end this process
      return AGAIN
    save(running=name)
    work.say(name)
    ended, fault = (device_report.OK, ''), None
    own = work._replace(report=copy.deepcopy(work.report))
    try:
      function(own)
    except Exception as e:  # a row that says so; the rest runs
      text = ' '.join(str(e).split())[:300]
      ended, fault = (device_report.FAILED, f'{type(e).__name__}: {text}'), e
      work.say(f'{name}: {ended[1]}')
    record['cases'][name] = ended
    record.update(device_report.with_figures(record, name, own.report))
    save(running=None)
    if _of_device(fault):
      return AGAIN
  bad = any(s != device_report.OK for s, _ in record['cases'].values())
  save(state=device_report.FAILED if bad else device_report.OK)
  return 0


def begun(argv: list[str]) -> tuple[Part, dict, Work]:
  """What `run` takes, from the arguments of a process."""
  quick = '--quick' in argv
  name, folder, identity, rounds = [a for a in argv if a != '--quick']
  part = find(name)
  record = device_report.read(folder, name)
  record = record or device_report.begin(name, json.loads(identity), part.about)
  report = measure.BenchReport(name, '', measure.WALL, not quick)
  say = lambda line: print(f'{name}: {line}', flush=True)
  return part, record, Work(quick, int(rounds), folder, report, say)


def main(argv: list[str]) -> int:
  """One process of a part; see the top of the file."""
  given = begun(argv)
  from paraxis.sharding.meter import aot

  with aot.uncached():  # what is compiled is timed
    return run(*given)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
