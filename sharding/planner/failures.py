"""Goodput of a run that fails, starts again and repeats what it lost.

Failures are a Poisson process: independent, of constant rate, also while a run
starts. Nothing fails while nothing runs. One attempt, from a start to its
failure or the end of the run, is

    compile, restore (not at the first start), then for k = 1, 2, ...
      work k    `interval` steps                on 'steps', after save k - 1
      save k    the step thread is blocked      on 'steps', after write k - 1
      write k   in the background; committed    on 'disk'
                when it ends

which sharding/planner/events.py lays out. The failure cuts it: what is
committed is kept, other work is lost; then come `detect` and `replace`, and the
next attempt. All times are exact fractions, so the parts add up to the wall.

In the long run this is a renewal process. With T = work k, s = save, w = write,
R = compile + restore, L = max(T, w) + s from one commit to the next, and
failures at rate f, an attempt lasts 1 / f on average, and commit k is reached
with probability exp(-f (R + T + s + w + (k - 1) L)):

    goodput = T exp(-f (R + T + s + w)) / (1 - exp(-f L)) / (1 / f + detect +
              replace)

which for w = 0 is Daly's model (2006, FGCS 22), and to first order in f that of
Young (1974): with M = 1 / f,

    1 / goodput - 1 ~ s / T + (T / 2 + R + detect + replace) / M

least at T = sqrt(2 s M).
"""

import bisect
from collections.abc import Mapping
import fractions
import functools
import math
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.sharding.planner import events

# Seconds of each; NEEDED must be given, the others are 0 if they are not.
NEEDED = {
  'step': 'one step that counts',
  'save': 'for which a save blocks the steps',
  'restore': 'to read a checkpoint at a start',
  'compile': 'to compile and whatever else a start takes',
  'detect': 'from a failure until it is known, and the run is ended',
}
OPTIONAL = {
  'write': 'from the end of save until the checkpoint is committed',
  'replace': 'to find what is broken and to have it replaced',
}
PARTS = (
  'productive', 'lost', 'save', 'restore', 'compile', 'detect', 'replace',
)  # fmt: skip
OF_ERRORS = ('lost', 'restore', 'compile', 'detect', 'replace')
MOST = 1_000_000  # failures of a run
Fraction = fractions.Fraction


class Account(NamedTuple):
  """Where the time of a run went.

  Attributes:
    parts: {of PARTS: seconds, exact}.
    failures: how many there were.
  """

  parts: dict
  failures: int

  @property
  def wall(self) -> Fraction:
    """Seconds from the first start to the last step."""
    return sum(self.parts.values(), Fraction(0))

  @property
  def goodput(self) -> float:
    """Share of the wall in steps that count."""
    return float(self.parts['productive'] / self.wall)

  @property
  def of_errors(self) -> float:
    """Share of the wall that failures cost: OF_ERRORS, not the saves."""
    return float(sum(self.parts[p] for p in OF_ERRORS) / self.wall)


def run(
  costs: Mapping[str, Any],
  *,
  interval: int,
  rate: float,
  steps: int,
  seed: int = 0,
) -> Account:
  """Simulates a run to its last step.

  Args:
    costs: {of NEEDED and OPTIONAL: seconds}, as measured or assumed.
    interval: steps between saves. rate: failures a second; 0: none.
    steps: of the run; nothing is saved after the last.
    seed: of the failures; the times between them are the same for all costs.

  Raises:
    UserError: costs that are missing, unknown, or no durations; an interval,
      rate or number of steps that is none; a run that fails too often to end.
  """
  cost = _checked(costs, interval, rate)
  if steps < 1:
    raise errors.UserError(f'steps={steps}: a run has one at least.')
  rng = np.random.default_rng(seed)
  training = _training(interval * cost['step'], cost['save'], cost['write'])
  parts: dict[str, Fraction] = dict.fromkeys(PARTS, Fraction(0))
  done = failures = 0
  while failures <= MOST:
    left = (steps - done) * cost['step']
    time: Any = Fraction(rng.exponential(1 / rate)) if rate else math.inf
    for part in ('compile', 'restore') if failures else ('compile',):
      spent = min(cost[part], time)
      parts[part] += spent
      time -= spent
    end = training.reaches(left, time)
    if end is not None:  # it lived to see the last step
      parts['productive'] += left
      parts['save'] += end - left
      return Account(parts, failures)
    worked, commits = training.work(time), training.commits(time)
    kept = commits * training.period
    parts['productive'] += kept
    parts['lost'] += worked - kept
    parts['save'] += time - worked
    parts['detect'] += cost['detect']
    parts['replace'] += cost['replace']
    done += commits * interval
    failures += 1
  raise errors.UserError(
    f'{MOST:,} failures, and {done:,} of {steps:,} steps are done: at '
    f'{rate:.3g} failures a second hardly any {interval} steps are saved.'
  )


class Training:
  """Training without a failure, from a start, as far as was asked for.

  What an event simulator says of the first k saves is true of any longer run.
  """

  def __init__(self, period, save, write):
    self.period, self._save, self._write = period, save, write  # seconds
    self._begun, self._committed = [], []  # times of each work, each write
    self._extend(8)

  def _extend(self, count):
    tasks = []
    for k in range(count):
      saved = (('save', k - 1),) if k else ()
      written = (('write', k - 1),) if k else ()
      work, save, write = ((what, k) for what in ('work', 'save', 'write'))
      tasks += [
        events.Task(work, self.period, saved, 'steps'),
        events.Task(save, self._save, (work, *written), 'steps'),
        events.Task(write, self._write, (save,), 'disk'),
      ]
    found = events.run(tasks, {'steps': 'one', 'disk': 'one'})
    self._begun = [found['work', k].start for k in range(count)]
    self._committed = [found['write', k].end for k in range(count)]

  def reaches(self, work, limit):
    """When so many seconds of steps are done; None: not by the limit."""
    whole = math.ceil(work / self.period) - 1  # with a save behind them
    while len(self._begun) <= whole:
      if self._begun[-1] > limit:
        return None
      self._extend(2 * len(self._begun))
    end = self._begun[whole] + work - whole * self.period
    return end if end <= limit else None

  def work(self, time):
    """Seconds of steps up to a time, begun ones in part."""
    k = bisect.bisect_right(self._begun, time) - 1
    return k * self.period + min(time - self._begun[k], self.period)

  def commits(self, time):
    """Checkpoints that are committed at a time."""
    return bisect.bisect_right(self._committed, time)


@functools.lru_cache(16)
def _training(*given):
  """A Training that runs of the same costs share: it only ever grows."""
  return Training(*given)


def expected(costs: Mapping[str, Any], *, interval: int, rate: float) -> float:
  """Goodput of an endless run: the closed form above.

  Args and errors: as for `run`.
  """
  cost = {k: float(v) for k, v in _checked(costs, interval, rate).items()}
  work, save, write = interval * cost['step'], cost['save'], cost['write']
  period = max(work, write) + save
  if not rate:
    return work / period
  first = cost['compile'] + cost['restore'] + work + save + write
  kept = work * math.exp(-rate * first) / -math.expm1(-rate * period)
  return kept / (1 / rate + cost['detect'] + cost['replace'])


def young(costs: Mapping[str, Any], rate: float) -> int:
  """Steps between saves, 1 or more, by Young's formula.

  Args and errors: as for `run`; the rate is above 0.
  """
  cost = _checked(costs, 1, rate)
  if not rate:
    raise errors.UserError('rate=0: without failures a run need not save.')
  seconds = math.sqrt(2 * cost['save'] / rate)
  return max(round(seconds / cost['step']), 1)


def _checked(costs, interval, rate):
  """{of NEEDED and OPTIONAL: seconds as a Fraction}."""
  known = NEEDED | OPTIONAL
  for name in costs:
    if name not in known:
      raise errors.UserError(
        f'costs: {name!r} is not one of {", ".join(known)}.'
        + schema.suggest(str(name), known)
      )
  missing = [name for name in NEEDED if name not in costs]
  if missing:
    raise errors.UserError(
      'costs: without '
      + ', '.join(f'{name} (seconds {NEEDED[name]})' for name in missing)
      + '.'
    )
  found = {
    name: events.duration(f'costs: {name}', costs.get(name, 0))
    for name in known
  }
  if not found['step']:
    raise errors.UserError('costs: step=0: a step takes some time.')
  if interval < 1:
    raise errors.UserError(f'interval={interval}: one step at least.')
  if not 0 <= rate < math.inf:
    raise errors.UserError(f'rate={rate} is no number of failures a second.')
  return found
