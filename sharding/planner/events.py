"""Event simulator: tasks, what they wait for, what serves them. Exact.

A task is ready when all tasks in its `after` have ended. Without a resource it
starts then and ends `duration` later. A resource serves the tasks that are
ready in one of two ways:

    'one'      one task at a time, in the order in which they became ready;
               those that became ready at the same time, by name (one that a
               task of no duration on a resource released comes after them)
    'shared'   all at once, each of n at 1 / n of the speed, so that a task of
               duration d alone takes d, and two of d side by side 2 d
               (processor sharing, the usual model of flows on one link)

Times are fractions.Fraction, so equal times are equal, ties are ties, and a
run is the same on every machine. A float counts as the binary number that it
is; an int, a Fraction or a text ('1/3', '0.1') as what it says.

    run([Task('a', 2, on='link'), Task('b', 1, on='link')], {'link': 'shared'})
    -> {'a': Span(0, 3), 'b': Span(0, 2)}

Cost: O((tasks + dependencies) log tasks). Shared resources need no update per
task: served work W grows at 1 / n, a task that joins at W ends at W + d, and
only the next end is kept as a time.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import fractions
import graphlib
import heapq
import itertools
import math
from typing import Any, NamedTuple

from paraxis.configs import schema
from paraxis.configs.base import errors

KINDS = ('one', 'shared')
Fraction = fractions.Fraction


@dataclasses.dataclass(frozen=True)
class Task:
  """One piece of work.

  Attributes:
    name: of this task alone; texts, or tuples that can be sorted.
    duration: time that it takes alone, >= 0.
    after: names of the tasks that it waits for.
    on: name of the resource that serves it; '': none, it never waits its turn.
  """

  name: Any
  duration: Any
  after: tuple = ()
  on: str = ''


class Span(NamedTuple):
  """When a task began to be served, and when it ended."""

  start: Fraction
  end: Fraction


def run(
  tasks: Iterable[Task], resources: Mapping[str, str] | None = None
) -> dict[Any, Span]:
  """{task's name: Span} of all tasks, from time 0, in the order given.

  Args:
    resources: {name: of KINDS}.

  Raises:
    UserError: a cycle, which is named; a task, dependency, resource or kind of
      resource that is not there, or a task that is there twice; a duration that
      is negative or no number.
  """
  tasks = list(tasks)
  resources = dict(resources or {})
  work = _checked(tasks, resources)
  waits = {t.name: len(set(t.after)) for t in tasks}
  then = {t.name: [] for t in tasks}  # name -> tasks that wait for it
  for task in tasks:
    for name in set(task.after):
      then[name].append(task)
  served = {name: _SERVERS[kind]() for name, kind in resources.items()}
  alone = _Alone()
  start, end, now = {}, {}, Fraction(0)
  places = alone, *served.values()
  released = [t for t in tasks if not t.after]
  while now < math.inf:
    # What needs no resource and lasts nothing is over before resources choose.
    while released:
      for task in released:
        place = served[task.on] if task.on else alone
        place.add(now, task.name, work[task.name])
      released = _ended((alone,), now, end, waits, then)
    for place in places:
      place.serve(now)
    now = min(place.next_end() for place in places)
    released = _ended(places, now, end, waits, then)
  for place in places:
    start |= place.started
  return {t.name: Span(start[t.name], end[t.name]) for t in tasks}


def _ended(places, now, end, waits, then):
  """[Task] released by the tasks that end now, which are noted in `end`."""
  released = []
  for name in itertools.chain.from_iterable(p.pop(now) for p in places):
    end[name] = now
    for task in then[name]:
      waits[task.name] -= 1
      if not waits[task.name]:
        released.append(task)
  return released


class _Alone:
  """Tasks without a resource: each starts when it is ready."""

  def __init__(self):
    self.started, self._ends = {}, []

  def add(self, now, name, work):
    self.started[name] = now
    heapq.heappush(self._ends, (now + work, name))

  def serve(self, now):
    """Nothing waits here."""

  def next_end(self):
    return self._ends[0][0] if self._ends else math.inf

  def pop(self, now):
    """Names of the tasks that end now; they leave."""
    out = []
    while self._ends and self._ends[0][0] == now:
      out.append(heapq.heappop(self._ends)[1])
    return out


class _One:
  """One task at a time, by (time at which it became ready, name)."""

  def __init__(self):
    self.started, self._queue, self._end = {}, [], None

  def add(self, now, name, work):
    heapq.heappush(self._queue, (now, name, work))

  def serve(self, now):
    if self._end is None and self._queue:
      _, name, work = heapq.heappop(self._queue)
      self.started[name] = now
      self._end = now + work, name

  def next_end(self):
    return math.inf if self._end is None else self._end[0]

  def pop(self, now):
    if self._end is None or self._end[0] != now:
      return []
    name, self._end = self._end[1], None
    return [name]


class _Shared:
  """All at once. `_served`: work that one who was always there has had."""

  def __init__(self):
    self.started, self._ends = {}, []  # of (served work at the end, name)
    self._served = self._at = Fraction(0)

  def _advance(self, now):
    if self._ends:
      self._served += (now - self._at) / len(self._ends)
    self._at = now

  def add(self, now, name, work):
    self._advance(now)
    self.started[name] = now
    heapq.heappush(self._ends, (self._served + work, name))

  def serve(self, now):
    """Nothing waits here."""

  def next_end(self):
    if not self._ends:
      return math.inf
    return self._at + (self._ends[0][0] - self._served) * len(self._ends)

  def pop(self, now):
    self._advance(now)
    out = []
    while self._ends and self._ends[0][0] == self._served:
      out.append(heapq.heappop(self._ends)[1])
    return out


_SERVERS: dict[str, Any] = {'one': _One, 'shared': _Shared}


def _checked(tasks, resources):
  """{name: duration as a Fraction}."""
  for name, kind in resources.items():
    if kind not in KINDS:
      raise errors.UserError(
        f'resource {name!r}: {kind!r} is not one of {", ".join(KINDS)}.'
        + schema.suggest(str(kind), KINDS)
      )
  work = {}
  for task in tasks:
    if task.name in work:
      raise errors.UserError(f'task {task.name!r} is there twice.')
    work[task.name] = duration(f'task {task.name!r}', task.duration)
    if task.on and task.on not in resources:
      raise errors.UserError(
        f'task {task.name!r}: there is no resource {task.on!r}, only '
        f'{", ".join(resources) or "none"}.'
        + schema.suggest(task.on, resources)
      )
  texts = {str(name): name for name in work}
  for task in tasks:
    for name in task.after:
      if name not in work:
        raise errors.UserError(
          f'task {task.name!r} waits for {name!r}, which is no task.'
          + schema.suggest(str(name), texts)
        )
  try:
    graphlib.TopologicalSorter({t.name: t.after for t in tasks}).prepare()
  except graphlib.CycleError as e:
    circle = ' -> '.join(map(str, e.args[1]))
    raise errors.UserError(
      f'tasks wait in a circle, each for the one before it: {circle}.'
    ) from e
  return work


def duration(what: str, value: Any) -> Fraction:
  """A time >= 0 as a Fraction; UserError that names `what`: it is none."""
  try:
    found = Fraction(value)
  except (TypeError, ValueError, OverflowError, ZeroDivisionError) as e:
    raise errors.UserError(f'{what}: {value!r} is no duration.') from e
  if found < 0:
    raise errors.UserError(f'{what}: a duration of {value} is below 0.')
  return found
