"""Interleaved measurements: spreads, ratios, targets.

Candidates run in turn, A B C A B C ..., so that what else the machine does
falls on all of them; a ratio is taken within a round. The clock counts
CPU-seconds of the whole process, all its threads: shared cores stretch wall
time by any factor, CPU time by a few percent. Standard library only.
"""

import dataclasses
import json
import statistics
import time
from typing import Any, NamedTuple

CPU = 'CPU-seconds of the process'
WALL = 'device time (wall seconds around block_until_ready)'


class Spread(NamedTuple):
  """Least, median and greatest of some values."""

  low: float
  median: float
  high: float


def spread(values):
  """Spread of a non-empty sequence."""
  return Spread(min(values), statistics.median(values), max(values))


class Check(NamedTuple):
  """One target.

  what: the ratio, in words. values: it, one per round. target: its bound.
  least: the bound is a lower one. judged: False where sizes are not those that
  the target is about.
  """

  what: str
  values: Any
  target: float
  least: bool
  judged: bool = True

  @property
  def verdict(self):
    """'met' or 'missed', by the median; '-' if not judged."""
    if not self.judged:
      return '-'
    median = spread(self.values).median
    good = median >= self.target if self.least else median <= self.target
    return 'met' if good else 'missed'

  @property
  def bound(self):
    """'>= 0.80' or '<= 1.20'."""
    return f'{">=" if self.least else "<="} {self.target:g}'


@dataclasses.dataclass
class BenchReport:
  """What one bench found.

  name: of the bench. setup: sizes, in words. clock: what its seconds measure.
  judged: whether these are the sizes that the targets are for. rows: {what:
  (unit, values)}, values one per round. checks: targets. notes: lines of text.
  """

  name: str
  setup: str
  clock: str
  judged: bool = True
  rows: dict = dataclasses.field(default_factory=dict)
  checks: list = dataclasses.field(default_factory=list)
  notes: list = dataclasses.field(default_factory=list)

  def add(self, times, unit='s'):
    """Rows from {what: values}; without values there is no row."""
    self.rows.update({w: (unit, list(v)) for w, v in times.items() if v})

  def check(self, what, values, target, least=True, judged=None):
    """A target, judged by the median of `values`."""
    judged = self.judged if judged is None else judged
    self.checks.append(Check(what, list(values), target, least, judged))


def settled(clock=time.process_time, sleep=time.sleep, pause=0.004):
  """CPU-seconds, read once the process has done nothing for three pauses.

  Threads of XLA continue after the results are ready (freeing 2 GiB takes a
  third of a second): that time belongs to the candidate that caused it.
  """
  before, idle = clock(), 0
  while idle < 3:
    sleep(pause)
    after = clock()
    idle = idle + 1 if after - before < pause / 10 else 0
    before = after
  return before


def interleave(candidates, rounds, clock=time.process_time, say=None):
  """Runs every candidate once per round, in order, after one round unmeasured.

  Args:
    candidates: {name: function}. A function that times itself returns
      {part: seconds}; its rows are 'name' + part. None leaves anything running.
    rounds: measured rounds, >= 1.
    clock: -> seconds.
    say: called with one line per round.

  Returns:
    {row: [seconds, one per round]}.
  """
  times = {}
  for number in range(rounds + 1):
    for name, function in candidates.items():
      before = clock()
      parts = function()
      if not isinstance(parts, dict):
        parts = {'': clock() - before}
      for part, seconds in parts.items():
        if number:
          times.setdefault(f'{name}{part}', []).append(seconds)
    if say:
      say(f'round {number} of {rounds}' if number else 'warmed up')
  return times


def temporary(compiled):
  """[MiB of temporary memory] of a jax.stages.Compiled; [] where unknown."""
  memory = compiled.memory_analysis()
  return [memory.temp_size_in_bytes / 2**20] if memory else []


def ratios(over, under):
  """over / under, round by round."""
  return [a / b for a, b in zip(over, under, strict=True)]


def number(x):
  """Three significant digits: 0.0123, 1.23, 123, 1.23e+09."""
  if x and not 1e-3 <= abs(x) < 1e6:
    return f'{x:.2e}'
  digits = 3 if abs(x) < 1 else 2 if abs(x) < 100 else 0
  return f'{x:.{digits}f}'


def text(report):
  """A report as aligned lines."""
  lines = [f'{report.name}: {report.setup}', f'  clock: {report.clock}', '']
  body: list[tuple[str, ...]] = [('', 'unit', 'min', 'median', 'max', '', '')]
  for what, (unit, values) in report.rows.items():
    body.append((what, unit, *map(number, spread(values)), '', ''))
  for c in report.checks:
    shown = (f'{x:.2f}' for x in spread(c.values))
    body.append((f'> {c.what}', 'ratio', *shown, c.bound, c.verdict))
  widths = [max(map(len, column)) for column in zip(*body, strict=True)]
  for cells in body:
    first = f'{cells[0]:{widths[0]}}  {cells[1]:{widths[1]}}'
    rest = (f'{c:>{w}}' for c, w in zip(cells[2:], widths[2:], strict=True))
    lines.append(f'  {first}  {"  ".join(rest)}'.rstrip())
  lines += [f'  note: {note}' for note in report.notes]
  return '\n'.join(lines)


def to_json(reports):
  """Reports as JSON text; `from_json` reads it back."""
  out = []
  for report in reports:
    fields = dict(vars(report))
    fields['rows'] = {
      what: dict(unit=unit, values=values)
      for what, (unit, values) in report.rows.items()
    }
    fields['checks'] = [
      c._asdict() | dict(verdict=c.verdict) for c in report.checks
    ]
    out.append(fields)
  return json.dumps(out, indent=1)


def from_json(text):
  """List of BenchReport."""
  reports = [BenchReport(**fields) for fields in json.loads(text)]
  for report in reports:
    report.rows = {
      what: (row['unit'], row['values']) for what, row in report.rows.items()
    }
    report.checks = [
      Check(**{f: c[f] for f in Check._fields}) for c in report.checks
    ]
  return reports


def summary(reports, command):
  """The targets of some reports as a Markdown table, with its command."""
  lines = [
    f'`{command}`',
    '',
    '| bench | ratio | min | median | max | target | |',
    '|---|---|---|---|---|---|---|',
  ]
  for report in reports:
    for c in report.checks:
      low, median, high = (f'{x:.2f}' for x in spread(c.values))
      lines.append(
        f'| {report.name} | {c.what} | {low} | {median} | {high} | {c.bound} '
        f'| {c.verdict} |'
      )
  return '\n'.join(lines)
