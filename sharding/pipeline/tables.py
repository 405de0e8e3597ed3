"""A schedule as the arrays that an executor reads, tick by tick.

Each device keeps three buffers: inputs of chunks, cotangents of their outputs,
and what a weight gradient needs. An entry occupies one row ("slot") from when
it arrives until it is last read. Rows are assigned by interval colouring: in
order of arrival, the row that was freed last; that takes as many rows as the
most entries alive at once, the minimum. One more row, index n of a buffer of n
rows, is the trash: idle devices read and write it. No slot is ever -1, which
would mean the last row.

Order within a tick: embed, F, loss, B, embed_back, W, then the messages. So a
row that B read may take a message of the same tick, a row that B read may not
take the loss of the same tick.

A message of F goes from device a to device b over the link (b - a) mod p, that
of B back over the opposite one. An SPMD program sends on every link in every
tick; the tables say in which row each message is kept, most in the trash.

Legend: T ticks, P devices, L links.
"""

import dataclasses
import heapq
from typing import Any, NamedTuple

import numpy as np


class Rows(NamedTuple):
  """What each device does, tick by tick; int32, flags bool.

  f_on, f_microbatch, f_chunk, f_slot: (T, P). The slot is the row of inputs
    that F reads; where f_first, F writes the embedded microbatch there.
  f_first: (T, P), the chunk is the first of the path.
  f_receive: (T, P, L), row of inputs for what arrives after this tick.
  b_on, b_microbatch, b_chunk, b_slot: (T, P), as for F; B only reads.
  b_first: (T, P), the chunk is the first of the path.
  b_cotangent: (T, P), row of cotangents that B reads.
  b_store: (T, P), row of stores that B writes; trash where W is not split off.
  b_receive: (T, P, L), row of cotangents for what arrives after this tick.
  w_on, w_chunk, w_slot: (T, P). The slot is the row of stores that W reads.

  embed: (T,), microbatch whose first F is in this tick, or -1.
  loss: (T,), microbatch whose last F is in this tick, or -1.
  loss_device: (T,), its device, 0 if none. loss_slot: (T,), row of cotangents
    on that device into which the loss's gradient goes, trash if none.
  embed_back: (T,), microbatch whose last B is in this tick, or -1.
  any_f, any_b, any_w: (T,), some device has that phase.
  """

  f_on: Any
  f_microbatch: Any
  f_chunk: Any
  f_slot: Any
  f_first: Any
  f_receive: Any
  b_on: Any
  b_microbatch: Any
  b_chunk: Any
  b_slot: Any
  b_first: Any
  b_cotangent: Any
  b_store: Any
  b_receive: Any
  w_on: Any
  w_chunk: Any
  w_slot: Any
  embed: Any
  loss: Any
  loss_device: Any
  loss_slot: Any
  embed_back: Any
  any_f: Any
  any_b: Any
  any_w: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
  """What the executor reads.

  Attributes:
    links: shifts of the device number, mod P, that messages of F take; those of
      B take -shift, in the same order. () where no message is ever sent.
    inputs, cotangents, stores: rows of the three buffers, without the trash.
    rows: NumPy arrays.
  """

  links: tuple
  inputs: int
  cotangents: int
  stores: int
  rows: Rows


def tables(schedule):
  """`Tables` of a schedules.Schedule.

  Raises:
    ValueError: the schedule has faults; the message names the first.
  """
  found = schedule.faults()
  if found:
    raise ValueError(f'{schedule.name}: {found[0]}, {len(found)} faults in all')
  slots, sizes = _all_slots(schedule)
  links = _links(schedule)
  rows = _rows(schedule, links, slots, sizes)
  return Tables(links=links, rows=rows, **sizes)


def colour(spans, device):
  """Rows for entries that are alive over spans of ticks.

  Args:
    spans: {(microbatch, stage): (first, last tick)}, both included.
    device: stage -> device; each device has rows of its own.

  Returns:
    {(microbatch, stage): row}, and how many rows the fullest device needs.
  """
  rows, free, living = {}, {}, {}
  most = 0
  for key, (first, last) in sorted(spans.items(), key=lambda x: (x[1], x[0])):
    d = device(key[1])
    held = living.setdefault(d, [])
    unused = free.setdefault(d, [])
    while held and held[0][0] < first:
      unused.append(heapq.heappop(held)[1])
    rows[key] = unused.pop() if unused else len(held)
    heapq.heappush(held, (last, rows[key]))
    most = max(most, len(held))
  return rows, most


def _all_slots(schedule):
  """({buffer: {(microbatch, stage): row}}, {buffer: rows})."""
  F, B, W = (schedule.when.get(phase, {}) for phase in 'FBW')
  device = lambda stage: schedule.device_of(stage)[0]
  # The loss writes its gradient in the tick of the last F, before B; any other
  # cotangent arrives at the end of the tick of the B behind it.
  spans = {
    'inputs': schedule.spans(),
    'cotangents': {
      (i, s): (F[i, s] if after is None else B[i, after] + 1, B[i, s])
      for i, _, s, after in schedule.visits()
    },
    'stores': {key: (B[key], W[key]) for key in W},
  }
  coloured = {name: colour(held, device) for name, held in spans.items()}
  slots = {name: rows for name, (rows, _) in coloured.items()}
  return slots, {name: most for name, (_, most) in coloured.items()}


def _shift(schedule, a, b):
  """Link from virtual stage a to b."""
  there, here = (schedule.device_of(s)[0] for s in (b, a))
  return (there - here) % schedule.stages


def _links(schedule):
  """Shifts in use, the nearest first, staying where one is last."""
  p = schedule.stages
  found = {
    _shift(schedule, s, after)
    for _, _, s, after in schedule.visits()
    if after is not None
  }
  return tuple(sorted(found, key=lambda k: (k == 0, min(k, p - k), k)))


def _rows(schedule, links, slots, sizes):
  """`Rows` of a schedule."""
  at = lambda phase, buffer: _at(schedule, phase, slots[buffer], sizes[buffer])
  moving = lambda phase, buffer: _moving(
    schedule, phase, links, slots[buffer], sizes[buffer]
  )
  idle = np.full_like(schedule.forward, -1)
  w_on, _, w_chunk = _phase(schedule.phases.get('W', idle))
  return Rows(
    **moving('F', 'inputs'),
    f_slot=at('F', 'inputs'),
    **moving('B', 'cotangents'),
    b_slot=at('B', 'inputs'),
    b_cotangent=at('B', 'cotangents'),
    b_store=at('B', 'stores'),
    w_on=w_on,
    w_chunk=w_chunk,
    w_slot=at('W', 'stores'),
    any_w=w_on.any(1),
    **_ends(schedule, slots['cotangents'], sizes['cotangents']),
  )


def _phase(table):
  """(on, microbatch, chunk) of a phase; 0 where idle."""
  return table[..., 0] >= 0, *np.maximum(table, 0).transpose(2, 0, 1)


def _fill(schedule, shape=(), fill=0, dtype: type = np.int32):
  return np.full((schedule.ticks, schedule.stages, *shape), fill, dtype)


def _at(schedule, phase, slots, trash):
  """(T, P) rows of each (microbatch, stage) at its tick in a phase."""
  out = _fill(schedule, fill=trash)
  for key, tick in schedule.when.get(phase, {}).items():
    out[tick, schedule.device_of(key[1])[0]] = slots.get(key, trash)
  return out


def _moving(schedule, phase, links, slots, trash):
  """{name: array} of what F and B have in common.

  slots, trash: of the buffer into which the phase's messages go.
  """
  when = schedule.when[phase]
  first = _fill(schedule, dtype=bool)
  receive = _fill(schedule, (len(links),), trash)
  for i, before, stage, after in schedule.visits():
    device, _ = schedule.device_of(stage)
    first[when[i, stage], device] = before is None
    sender, link = before, (before, stage)
    if phase == 'B':
      sender, link = after, (stage, after)
    if sender is not None:
      k = links.index(_shift(schedule, *link))
      receive[when[i, sender], device, k] = slots[i, stage]
  on, microbatch, chunk = _phase(schedule.phases[phase])
  p = phase.lower()
  return {
    f'{p}_on': on,
    f'{p}_microbatch': microbatch,
    f'{p}_chunk': chunk,
    f'{p}_first': first,
    f'{p}_receive': receive,
    f'any_{p}': on.any(1),
  }


def _ends(schedule, slots, trash):
  """What all devices do together; slots, trash: of cotangents."""
  rows = lambda fill: np.full(schedule.ticks, fill, np.int32)
  found = {}
  for end, ticks in schedule.ends().items():
    found[end] = rows(-1)
    found[end][ticks] = np.arange(schedule.microbatches)
  device, slot = rows(0), rows(trash)
  for i, tick in enumerate(schedule.ends()['loss']):
    stage = schedule.paths[i][-1]
    device[tick], _ = schedule.device_of(stage)
    slot[tick] = slots[i, stage]
  return dict(loss_device=device, loss_slot=slot, **found)
