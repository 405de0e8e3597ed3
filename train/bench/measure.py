"""Interleaved measurements: spreads, ratios, targets.

Candidates run in turn, A B C A B C ..., so that what else the machine does
falls on all of them; a ratio is taken within a round. The clock counts
CPU-seconds of the whole process, all its threads: shared cores stretch wall
time by any factor, CPU time by a few percent. Standard library only.

A bench is a series of comparisons. After each its rows are printed and, within
a `session` that has a file, kept; so is every round of one that is not done. A
bench that is cut continues after the last round, with a warm-up.
"""

import contextlib
import copy
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import time
from typing import Any, NamedTuple

from paraxis.configs.base import errors

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
  the target is about. missed: the word for a target that is. most: what no
  value can be above, unless what it is a ratio to, or the clock, is wrong.
  """

  what: str
  values: Any
  target: float
  least: bool
  judged: bool = True
  missed: str = 'missed'
  most: float | None = None

  @property
  def verdict(self):
    """'met' or 'missed' if every round says so, else 'within noise'.

    '-': not judged. 'above the limit': a value is above `most`.
    """
    if not self.judged:
      return '-'
    low, _, high = spread(self.values)
    if self.most is not None and high > self.most:
      return 'above the limit'
    worst, best = (low, high) if self.least else (-high, -low)
    target = self.target if self.least else -self.target
    if worst >= target:
      return 'met'
    return self.missed if best < target else 'within noise'

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
  parts: comparisons that are done. facts: versions, rounds, flags. complete:
  whether all comparisons are done. dates: ISO, on which it measured. cut:
  {comparison: {what: values}}, the rounds of one that is not done.
  """

  name: str
  setup: str
  clock: str
  judged: bool = True
  rows: dict = dataclasses.field(default_factory=dict)
  checks: list = dataclasses.field(default_factory=list)
  notes: list = dataclasses.field(default_factory=list)
  parts: list = dataclasses.field(default_factory=list)
  facts: dict = dataclasses.field(default_factory=dict)
  complete: bool = False
  dates: list = dataclasses.field(default_factory=list)
  cut: dict = dataclasses.field(default_factory=dict)

  def add(self, times, unit='s'):
    """Rows from {what: values}; without values there is no row."""
    self.rows.update({w: (unit, list(v)) for w, v in times.items() if v})

  def check(self, what, values, target, least=True, judged=None, **words):
    """A target, which `values` meet, miss (words), or leave within noise."""
    judged = self.judged if judged is None else judged
    given = what, list(values), target, least, judged
    self.checks.append(Check(*given, **words))

  def lacks(self, part):
    """Whether a comparison has yet to be made."""
    return part not in self.parts

  def finish(self, part=''):
    """Ends a comparison: prints what is new, keeps all; '': ends the bench."""
    if part:
      self.parts.append(part)
      _SESSION.show(self)
    self.measured_today()
    self.complete |= not part
    self.cut = {}
    # Those from before a comparison are said again where a bench is resumed.
    self.notes = list(dict.fromkeys(self.notes))
    _SESSION.keep(self)

  def measured_today(self):
    today = datetime.date.today().isoformat()
    if today not in self.dates:
      self.dates.append(today)


class KeptError(Exception):
  """Raised by `begin` where the session has the whole report: args[0]."""


@dataclasses.dataclass
class Session:
  """What holds for all benches of a process.

  path: file that keeps reports as JSON, or None. resume: continue what is in
  it. facts: what must be equal for that: versions, rounds, flags. peers: (name,
  Python) pairs (peers.py). drafts: files of trained drafts, for the bench
  `methods`. say: prints one line.
  """

  path: pathlib.Path | None = None
  resume: bool = False
  facts: dict = dataclasses.field(default_factory=dict)
  peers: tuple = ()
  drafts: tuple = ()
  say: Any = None
  _shown: set = dataclasses.field(default_factory=set, init=False)
  # The report of this process as the file has it, and how often it was asked
  # for rounds since: a comparison is known by its number.
  _kept: Any = dataclasses.field(default=None, init=False)
  _asked: int = dataclasses.field(default=0, init=False)

  def __post_init__(self):
    if self.resume and not self.path:
      raise errors.UserError('--resume needs --out=FILE, which it continues.')
    if self.path and self.path.exists() and not self.resume:
      raise errors.UserError(
        f'{self.path} exists: --resume continues it, or name another file.'
      )
    if self.path and not self.path.resolve().parent.is_dir():
      raise errors.UserError(f'--out={self.path}: there is no such folder.')
    self.read()

  def read(self):
    """Reports of the file."""
    return _reports(self.path)

  def keep(self, report):
    """Writes the report into the file, at once or not at all."""
    self._kept, self._asked = copy.deepcopy(report), 0
    _put(self.path, self._kept)

  def begun(self, report):
    """What `report` has is what its next rounds are kept with."""
    self._kept, self._asked = copy.deepcopy(report), 0

  def rounds(self, names):
    """(times of a comparison that was cut, a function that keeps them).

    names: of its candidates. times: {row: [seconds]}, empty without a cut.
    """
    self._asked += 1
    if self._kept is None:  # no bench: nothing is kept
      return {}, lambda times: None
    key = f'{self._asked}: {", ".join(names)}'

    def keep(times):
      self._kept.cut[key] = copy.deepcopy(times)
      self._kept.measured_today()
      _put(self.path, self._kept)

    return copy.deepcopy(self._kept.cut.get(key, {})), keep

  def show(self, report):
    """Prints the rows and checks that it has not printed yet."""
    for row in table(report) if self.say else ():
      if row not in self._shown:
        self._shown.add(row)
        self.say(f'{report.name}: ' + ' '.join(filter(None, row)))

  def found(self, new):
    """The report that the file has of the same measurement, or None.

    One of another is kept beside the file, as FILE.before, and measured anew.
    """
    for old in self.read() if self.resume else ():
      fields = 'setup', 'clock', 'facts'
      differ = [f for f in fields if getattr(old, f) != getattr(new, f)]
      if old.name == new.name and differ:
        before = pathlib.Path(f'{self.path}.before')
        _put(before, old)  # beside those of benches that came before it
        facts = [n for n, x in new.facts.items() if old.facts.get(n) != x]
        what = [f for f in differ if f != 'facts'] + facts
        self.say(
          f'{new.name}: measured anew, its {", ".join(what)} differ; {before} '
          'has what there was'
        )
      elif old.name == new.name:
        self.say(f'{new.name}: kept {", ".join(old.parts) or "nothing"}')
        return old
    return None


def _reports(path):
  """Reports of a file, if there is one."""
  try:
    return from_json(path.read_text('utf-8')) if path and path.exists() else []
  except (ValueError, TypeError, KeyError, OSError) as e:
    text = f'{path} holds no reports of paraxis bench: {e}.'
    raise errors.UserError(text) from e


def _put(path, report):
  """Replaces the report of its name in a file, if any, whole or not at all."""
  if not path:
    return
  others = [r for r in _reports(path) if r.name != report.name]
  part = path.with_name(f'{path.name}.part')
  part.write_text(to_json([*others, report]), encoding='utf-8')
  os.replace(part, path)


_SESSION = Session()


@contextlib.contextmanager
def session(**fields):
  """Session(**fields) in force; what it was before comes back."""
  global _SESSION
  before, _SESSION = _SESSION, Session(**fields)
  try:
    yield _SESSION
  finally:
    _SESSION = before


def current():
  """The `Session` in force."""
  return _SESSION


def begin(name, setup, clock, judged):
  """A `BenchReport`, with the comparisons that the session has kept of it.

  Raises:
    KeptError: it has all of them.
  """
  new = BenchReport(name, setup, clock, judged, facts=dict(_SESSION.facts))
  old = _SESSION.found(new)
  if old and old.complete:
    raise KeptError(old)
  _SESSION.begun(old or new)
  return old or new


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
    {row: [seconds, one per round]}, with the rounds that a session has kept.
  """
  times, keep = _SESSION.rounds(candidates)
  done = min(map(len, times.values()), default=0)
  whole = True  # whether all candidates answered, so far
  for number in (0, *range(done + 1, rounds + 1)):
    for name, function in candidates.items():
      before = clock()
      parts = function()
      if not isinstance(parts, dict):
        parts = {'': clock() - before}
      whole &= bool(parts)
      for part, seconds in parts.items():
        if number:
          times.setdefault(f'{name}{part}', []).append(seconds)
    if number and whole:
      keep(times)
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


def table(report):
  """[(what, unit, min, median, max, bound, verdict)] of a report, as text."""
  body: list[tuple[str, ...]] = []
  for what, (unit, values) in report.rows.items():
    body.append((what, unit, *map(number, spread(values)), '', ''))
  for c in report.checks:
    shown = (f'{x:.2f}' for x in spread(c.values))
    body.append((f'> {c.what}', 'ratio', *shown, c.bound, c.verdict))
  return body


def text(report):
  """A report as aligned lines."""
  lines = [f'{report.name}: {report.setup}', f'  clock: {report.clock}', '']
  body = [('', 'unit', 'min', 'median', 'max', '', ''), *table(report)]
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
    rows = {w: dict(unit=u, values=v) for w, (u, v) in report.rows.items()}
    checks = [c._asdict() | dict(verdict=c.verdict) for c in report.checks]
    out.append(vars(report) | dict(rows=rows, checks=checks))
  return json.dumps(out, indent=1)


def from_json(text):
  """List of BenchReport."""
  reports = [BenchReport(**fields) for fields in json.loads(text)]
  for report in reports:
    report.rows = {
      what: (row['unit'], row['values']) for what, row in report.rows.items()
    }
    report.checks = [
      Check(**{f: c[f] for f in Check._fields if f in c}) for c in report.checks
    ]
  return reports
