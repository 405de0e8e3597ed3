"""Time of a pipeline schedule under given costs: exact, deterministic.

Used by the pipeline report of certify and by claims. Two models of execution:

lock_step      what a phased SPMD program does. Devices wait for each other at
               every message, so a tick takes the sum over its phases of the
               dearest device in each, and then its dearest message.
asynchronous   what papers count: each device runs its own operations in the
               schedule's order as soon as what they need has arrived; sending
               takes time on the link, not on the device.

With equal stages, messages that cost nothing and no head

    time / ideal = 1 + (p - 1) / (v m)         gpipe, 1F1B, interleaved, both
                   1 + 2 (p - 1) / (3 v m)     zero_bubble, F = B = W, lock_step
                   1 +   (p - 1) / (3 v m)     the same, asynchronous

The first is the formula of GPipe and of arXiv:2104.04473 (section 2.2), the
last that of ZB-H1, (p - 1) (F + B - W), in arXiv:2401.10241. Ideal is all work
divided by all devices.

The head (projection to the vocabulary and loss) either stands on the device of
the last stage, or is split over all devices (vocabulary parallelism,
arXiv:2411.05288); then it is a phase of its own between F and B, which starts
on a device when the last F has ended and which B of the last stage awaits.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors

MODELS = ('lock_step', 'asynchronous')
HEADS = ('last', 'spread')


@dataclasses.dataclass(frozen=True)
class Costs:
  """What one microbatch costs, in any unit; fractions stay exact.

  Attributes:
    forward, backward, weight: of F, of B for its input alone, of the weight
      gradient; a number is a whole stage, of which each chunk has 1 / v, a
      sequence is each virtual stage's own. Where a schedule does not split W
      off, B costs backward + weight.
    head: projection and loss, forward; their backward costs twice as much.
    vocabulary: 'last', head on the device of the last stage; 'spread', on all
      devices, 1 / p on each.
    send: a message between two devices.
  """

  forward: Any = 1
  backward: Any = 1
  weight: Any = 1
  head: float = 0
  vocabulary: str = 'last'
  send: float = 0


class SimulationResult(NamedTuple):
  """What a run took.

  time: of the whole. ideal: all work / devices. bubble: time / ideal - 1.
  busy: for each device, time at work. peak: for each, most chunk inputs held.
  """

  time: float
  ideal: float
  bubble: float
  busy: tuple
  peak: tuple


def run(schedule, model: str = 'asynchronous', **costs) -> SimulationResult:
  """Simulates a schedules.Schedule.

  Args:
    model: of MODELS.
    **costs: the fields of `Costs`.

  Raises:
    UserError: no such model, or costs that do not fit the schedule.
  """
  when = timeline(schedule, model, **costs)
  time = max(end for _, end in when.values())
  busy = _Work(schedule, Costs(**costs)).busy()
  ideal = sum(busy) / schedule.stages
  return SimulationResult(
    time, ideal, time / ideal - 1, busy, schedule.in_flight()
  )


def timeline(schedule, model='asynchronous', **costs):
  """{operation: (start, end)} of the same run.

  An operation is (phase, microbatch, virtual stage), or with the vocabulary
  spread also ('loss', microbatch, device).
  """
  if model not in MODELS:
    raise errors.UserError(
      f'{model!r} is not a machine; there are {", ".join(MODELS)}.'
      + schema.suggest(model, MODELS)
    )
  work = _Work(schedule, Costs(**costs))
  return (_lock_step if model == 'lock_step' else _asynchronous)(work)


class _Work:
  """Costs of each operation and message of a schedule."""

  def __init__(self, schedule, costs):
    self.schedule, self.costs = schedule, costs
    if costs.vocabulary not in HEADS:
      raise errors.UserError(
        f'vocabulary={costs.vocabulary!r} is not one of {", ".join(HEADS)}.'
      )
    self.stage = {
      phase: self._per_stage(name)
      for phase, name in (('F', 'forward'), ('B', 'backward'), ('W', 'weight'))
    }
    self.spread = costs.vocabulary == 'spread'
    # Forward and backward of a spread head are one phase, 'loss'; its cost on
    # each device, 0: there is no such phase.
    self.loss = 3 * costs.head / schedule.stages if self.spread else 0

  def _per_stage(self, name):
    given, S = getattr(self.costs, name), self.schedule.virtual_stages
    if np.ndim(given) == 0:
      return [given / self.schedule.chunks] * S
    if len(given) != S:
      raise errors.UserError(
        f'{name}: {len(given)} costs for {S} virtual stages.'
      )
    return list(given)

  def of(self, phase, i, stage):
    """Cost of a phase of microbatch i in a virtual stage."""
    cost = self.stage[phase][stage]
    if phase == 'B' and self.schedule.weight is None:
      cost += self.stage['W'][stage]
    if self.spread or phase == 'W' or stage != self.schedule.paths[i][-1]:
      return cost
    return cost + self.costs.head * (1 if phase == 'F' else 2)

  def link(self, a, b):
    """Time of a message from device a to b."""
    return 0 if a == b else self.costs.send

  def message(self, a, b):
    """Time from virtual stage a to b."""
    homes = (self.schedule.device_of(s)[0] for s in (a, b))
    return self.link(*homes)

  def busy(self):
    """Time at work of each device."""
    total = [0] * self.schedule.stages
    for phase, ticks in self.schedule.when.items():
      for i, stage in ticks:
        total[self.schedule.device_of(stage)[0]] += self.of(phase, i, stage)
    return tuple(t + self.loss * self.schedule.microbatches for t in total)


def _lock_step(work):
  """A phase starts on all devices when the one before has ended on all."""
  schedule = work.schedule
  F, B = schedule.when['F'], schedule.when['B']
  send = {}  # (tick, 'F' | 'B') -> the dearest message
  for i, _, stage, after in schedule.visits():
    if after is None:
      continue
    for key, a, b in (
      ((F[i, stage], 'F'), stage, after),
      ((B[i, after], 'B'), after, stage),
    ):
      send[key] = max(send.get(key, 0), work.message(a, b))
  phases = {}  # (tick, rank of the phase) -> [(operation, cost)]
  for order in _orders(work):
    for tick, rank, (operation, cost) in order:
      phases.setdefault((tick, rank), []).append((operation, cost))
  out, clock, now = {}, 0, 0
  for (tick, _), operations in sorted(phases.items()):
    while now < tick:  # messages travel at the end of a tick
      clock += send.get((now, 'F'), 0) + send.get((now, 'B'), 0)
      now += 1
    out |= {operation: (clock, clock + c) for operation, c in operations}
    clock += max(cost for _, cost in operations)
  return out


def _asynchronous(work):
  """The longest path through the dependencies of operations."""
  schedule = work.schedule
  neighbours = {(i, s): (a, b) for i, a, s, b in schedule.visits()}
  todo = _orders(work)
  at = [0] * schedule.stages  # each device's place in its order
  clock = [0] * schedule.stages
  done = {}  # operation -> (start, end)

  def needs(operation, device):
    """[(operation, its message's time)] to wait for."""
    phase, i, stage = operation
    if phase == 'loss':
      last = schedule.paths[i][-1]
      return [(('F', i, last), work.link(schedule.device_of(last)[0], device))]
    if phase == 'W':
      return []
    before, after = neighbours[i, stage]
    if phase == 'F':
      if before is None:
        return []
      return [(('F', i, before), work.message(before, stage))]
    if after is not None:
      return [(('B', i, after), work.message(after, stage))]
    devices = range(schedule.stages) if work.loss else ()
    return [(('loss', i, d), work.link(d, device)) for d in devices]

  while any(at[d] < len(todo[d]) for d in range(schedule.stages)):
    moved = False
    for d in range(schedule.stages):
      while at[d] < len(todo[d]):
        *_, (operation, cost) = todo[d][at[d]]
        waits = needs(operation, d)
        if any(other not in done for other, _ in waits):
          break
        start = max([clock[d], *(done[o][1] + delay for o, delay in waits)])
        clock[d] = start + cost
        done[operation] = start, clock[d]
        at[d] += 1
        moved = True
    if not moved:
      raise AssertionError(f'{schedule.name}: operations wait in a circle')
  return done


def _orders(work):
  """For each device, in order: [(tick, phase rank, (operation, cost))]."""
  schedule = work.schedule
  rank = {phase: k for k, phase in enumerate(('F', 'loss', 'B', 'W'))}
  rows = [[] for _ in range(schedule.stages)]
  for phase, ticks in schedule.when.items():
    for (i, stage), tick in ticks.items():
      device = schedule.device_of(stage)[0]
      entry = (phase, i, stage), work.of(phase, i, stage)
      rows[device].append((tick, rank[phase], entry))
  if work.loss:
    for i, tick in enumerate(schedule.ends()['loss']):
      for device, row in enumerate(rows):
        row.append((tick, rank['loss'], (('loss', i, device), work.loss)))
  return [sorted(row) for row in rows]
