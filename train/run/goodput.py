"""The account of a run's time, over all its starts, from events.jsonl.

Time between the first line and the last is cut into spans without gaps, so the
parts add up to the whole. Goodput is the share of it in which steps were done
for the first time (the runtime goodput of arXiv:2502.06982):

    productive  steps that no earlier start had done
    replay      steps done again, because what was done was not saved
    save, restore, compile, evaluation, stall: as the run's phases say
    other       of a start, in none of them: imports, building the model
    idle        no process ran, as far as the lines show: from the last line of
                one that was killed, or its end, to the next start

A step between two lines took an equal part of the time between them.
"""

import json
import os
import pathlib
from typing import Any, NamedTuple

from paraxis.configs.base import errors
from paraxis.train.run import ledger

PARTS = (
  'productive', 'replay', 'save', 'restore', 'compile', 'evaluation', 'stall',
  'other', 'idle',
)  # fmt: skip
COSTS = 'step', 'save', 'restore', 'compile', 'replace'
OF_PHASE = {'evaluate': 'evaluation'}  # others have the part's name
LATEST = 1e11  # unix seconds
SECOND = 10**6  # times are whole microseconds, so that sums are exact


class Line(NamedTuple):
  """time: microseconds. step: or None."""

  time: int
  event: str
  name: str
  step: int | None
  why: str


class Span(NamedTuple):
  """part: of `PARTS`. start, end: microseconds. attempt: counts from 1; 0: no
  start was seen yet."""

  part: str
  start: int
  end: int
  attempt: int


class History(NamedTuple):
  """What `read` found.

  spans: [Span], from the first line to the last without gaps. attempts: [dict],
  the starts: began, seconds (both in microseconds), first and last step, the
  newest committed one (None: none was), how many were committed, why it ended
  ('': it was killed, or runs). damaged: lines that are left out.
  """

  spans: list
  attempts: list
  damaged: int


def read(workdir):
  """History of a run.

  Raises:
    UserError: there are no events, or they cannot be read.
  """
  path = pathlib.Path(workdir) / ledger.FILE
  reader, damaged = _Reader(), 0
  try:
    with open(ledger.open_plain(path, os.O_RDONLY), 'rb') as file:
      for raw in ledger.lines(file):
        if line := _parse(raw):
          reader.line(line)
        else:
          damaged += bool(raw.strip())
  except FileNotFoundError as e:
    raise errors.UserError(
      f'--workdir={workdir}: {path} does not exist: a workdir without events, '
      'of no run or of an older version; train in it first.'
    ) from e
  except OSError as e:
    raise errors.UserError(f'{path}: cannot be read ({e.strerror}).') from e
  reader.close()
  if not reader.spans:
    raise errors.UserError(
      f'{path}: between its {reader.count} events ({damaged} damaged lines) no '
      'time goes by; there is nothing to account for yet.'
    )
  return History(reader.spans, reader.attempts, damaged)


def _parse(raw):
  """Line of bytes; None: it is damaged."""
  try:
    row = json.loads(raw)
    when, event = row['time'], row['event']
    name, why, step = row.get('name', ''), row.get('why', ''), row.get('step')
  except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
    return None
  plain = type(when) in (int, float) and 0 <= when <= LATEST
  plain &= all(isinstance(text, str) for text in (event, name, why))
  plain &= step is None or (type(step) is int and 0 <= step < 2**63)
  return Line(round(when * SECOND), event, name, step, why) if plain else None


class _Reader:
  """Goes through the lines of a run once.

  Attributes:
    spans, attempts: as of a History.
    count: of lines.
  """

  def __init__(self):
    self.spans, self.attempts, self.count = [], [], 0
    self._part, self._since, self._step = 'idle', 0, None
    self._before = 0  # time of the last line
    self._most = 0  # steps done by any start
    self._launched = False
    self._held = []

  def line(self, line):
    """Takes one more line.

    A launch beside a start that did not end follows its kill, or is refused,
    and the start runs on: that is known by the next line of any start. Until
    then the launch, and what its supervisor says, are held back.
    """
    if not self.count:
      self._since = line.time
    self.count += 1
    if line.why or line.event in ('phase', 'commit'):  # of the start itself
      self._held = []
    elif line.event == 'start':
      self._release()
    elif self._held or (line.event == 'launch' and self._part != 'idle'):
      self._held.append(line)
      return
    self._take(line)

  def _release(self):
    held, self._held = self._held, []
    for line in held:
      self._take(line)

  def _take(self, line):
    # A clock may have been set back: no line is before an earlier one.
    line = line._replace(time=max(line.time, self._before))
    if line.event in ('start', 'launch', 'restart'):
      self._begins(line)
    elif line.event in ('end', 'exit'):
      self._steps_are(line.step)
      self._to(line.time, 'idle', line.step)
      if self.attempts and line.why:  # a supervisor's has none
        self.attempts[-1]['ended'] = line.why
    elif line.event == 'phase':
      self._steps_are(line.step, line.name == ledger.STEPS)
      part = OF_PHASE.get(line.name, line.name)
      part = part if part in PARTS or part == ledger.STEPS else 'other'
      self._to(line.time, part, line.step)
    elif line.event == 'commit' and self.attempts and line.step is not None:
      mine = self.attempts[-1]
      mine['committed'] = max(mine['committed'] or 0, line.step)
      mine['commits'] += 1
    self._before = line.time
    if self.attempts and line.event not in ('launch', 'restart'):
      self.attempts[-1]['seconds'] = line.time - self.attempts[-1]['began']

  def _begins(self, line):
    """A process begins: what ran before and did not end was killed."""
    if self._part != 'idle' and not self._launched:
      self._to(self._before, 'idle', None)
    self._to(line.time, 'idle' if line.event == 'restart' else 'other', None)
    self._launched = line.event == 'launch'
    if line.event == 'start':
      self.attempts.append(
        dict(
          began=line.time, seconds=0, first=None, last=None, committed=None,
          commits=0, ended='',
        )
      )  # fmt: skip

  def _steps_are(self, step, begin=False):
    """The newest start has done so many; begin: it may begin with them."""
    if step is None or not self.attempts:
      return
    mine = self.attempts[-1]
    if begin and mine['first'] is None:
      mine['first'] = step
    if mine['first'] is not None:
      mine['last'] = step

  def _to(self, time, part, step):
    """Closes the span that is open, and opens another."""
    self._close(time, step)
    self._part, self._since, self._step = part, time, step
    self._launched = False

  def _close(self, end, step):
    """Ends the open span; one of steps is cut where the old ones end."""
    part, start = self._part, self._since
    if part != ledger.STEPS:
      self._add(part, start, end)
      return
    first = self._step or 0
    last = first if step is None else step
    count = last - first
    again = min(last, self._most) - first
    if count > 0:
      cut = start + (end - start) * min(max(again, 0), count) // count
    else:  # not one whole step: of the next one
      cut = end if first < self._most else start
    self._add('replay', start, cut)
    self._add('productive', cut, end)
    self._most = max(self._most, last)

  def _add(self, part, start, end):
    """A span, if it is one; it may go on with the one before."""
    if start == end:
      return
    attempt = len(self.attempts)
    if self.spans and self.spans[-1][::3] == (part, attempt):
      self.spans[-1] = self.spans[-1]._replace(end=end)
    else:
      self.spans.append(Span(part, start, end, attempt))

  def close(self):
    """After the last line."""
    self._release()
    self._close(self._before, None)


def account(workdir):
  """The account of a run.

  Returns:
    dict: wall, seconds; goodput, the productive share; seconds, {part: n},
    which add up to wall; costs, those of `costs` that were seen; lost_steps,
    done and not committed by starts that another one followed; attempts,
    [dict(began, seconds, first, last, committed, commits, lost, ended)];
    damaged_lines.

  Raises:
    UserError: see `read`.
  """
  spans, attempts, damaged = read(workdir)
  sums = dict.fromkeys(PARTS, 0)
  for span in spans:
    sums[span.part] += span.end - span.start
  wall = spans[-1].end - spans[0].start
  for one in attempts:
    one['began'], one['seconds'] = (
      one[name] / SECOND for name in ('began', 'seconds')
    )
    # A start stands on the step it restored, until it commits one.
    stands = max(one['committed'] or 0, one['first'] or 0)
    one['lost'] = max((one['last'] or 0) - stands, 0)
  seconds = {part: n / SECOND for part, n in sums.items()}
  return dict(
    wall=wall / SECOND,
    goodput=sums['productive'] / wall,
    seconds=seconds,
    costs=_costs(seconds, attempts),
    lost_steps=sum(one['lost'] for one in attempts[:-1]),
    attempts=attempts,
    damaged_lines=damaged,
  )


def _costs(sums, attempts):
  """{name: seconds of one} of what `costs` gives, as far as it was seen."""
  reached = lambda end: [a[end] for a in attempts if a[end] is not None] or [0]
  starts = len(attempts)
  each = dict(
    step=(sums['productive'], max(reached('last')) - min(reached('first'))),
    save=(sums['save'], sum(one['commits'] for one in attempts)),
    restore=(sums['restore'], starts - 1),
    compile=(sums['compile'] + sums['other'], starts),
    replace=(sums['idle'], starts - 1),
  )
  return {name: spent / count for name, (spent, count) in each.items() if count}


def costs(workdir):
  """What a failure and its absence cost a run, for planner/failures.run.

  Returns:
    {'step', 'save', 'restore', 'compile', 'replace': seconds}: of a step that
    counts; for which a save blocks the steps; to read a checkpoint; of all else
    that a start takes; between a start's last line and the next start. The
    last lines do not say when a failure began: 'detect' is for the caller.

  Raises:
    UserError: see `read`; the run did not do, or not yet, one of these.
  """
  account_: Any = account(workdir)
  found, starts = account_['costs'], len(account_['attempts'])
  if missing := [name for name in COSTS if name not in found]:
    raise errors.UserError(
      f'{workdir}: no cost of {", ".join(missing)} in {starts} starts: a run '
      'that saved, was started again and did steps has all.'
    )
  return found
