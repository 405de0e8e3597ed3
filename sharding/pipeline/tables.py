"""A schedule as the arrays that an executor reads, tick by tick.

Each device keeps three buffers: inputs of chunks, cotangents of their outputs,
and what a weight gradient needs. An entry lives in one row ("slot") from when
it arrives until it is last read. Rows are given out by interval colouring:
by arrival, the row that was freed last; that takes as many rows as entries
ever live at once, which is the least there can be. One more row, index n of a
buffer of n rows, is the trash: idle devices read and write it. No slot is ever
-1, which would mean the last row.

Order within a tick: embed, F, loss, B, embed_back, W, then the messages. So a
row that B read may take a message of the same tick, a row that B read may not
take the loss of the same tick.

A message of F goes from device a to device b over the link (b - a) mod p, that
of B back over the opposite one. An SPMD program sends on every link in every
tick; the tables say where what arrives is kept, and most of it is trash.

Legend: T ticks, P devices, L links.
"""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import numpy as np


class Rows(NamedTuple):
  """What each device does, tick by tick; int32, flags bool.

  f_on, f_microbatch, f_chunk, f_slot: (T, P). The slot is the row of inputs
    that F reads; where f_first, F writes the embedded microbatch there.
  f_first, f_last: (T, P), the chunk is the first, last of the path.
  f_receive: (T, P, L), row of inputs for what arrives after this tick.
  b_on, b_microbatch, b_chunk, b_slot: (T, P), as for F; B only reads.
  b_first: (T, P), the chunk is the first of the path.
  b_cotangent: (T, P), row of cotangents that B reads.
  b_store: (T, P), row of stores that B writes; trash where W is not apart.
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
  f_last: Any
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
    visited: (P, chunks), microbatches that pass each chunk.
    rows: NumPy arrays.
  """

  links: tuple
  inputs: int
  cotangents: int
  stores: int
  visited: np.ndarray
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
  rows = Rows(
    **_forward(schedule, links, slots, sizes),
    **_backward(schedule, links, slots, sizes),
    **_weight(schedule, slots, sizes),
    **_shared(schedule, slots, sizes),
  )
  return Tables(links=links, visited=_visited(schedule), rows=rows, **sizes)


def colour(spans, device):
  """Rows for entries that live over spans of ticks.

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


def _visited(schedule):
  count = np.zeros((schedule.stages, schedule.chunks), np.int32)
  for _, _, stage, _ in schedule.visits():
    count[schedule.device_of(stage)] += 1
  return count


def _phase(table):
  """(on, microbatch, chunk) of a phase; 0 where idle."""
  return table[..., 0] >= 0, *np.maximum(table, 0).transpose(2, 0, 1)


def _fill(schedule, shape=(), fill=0, dtype: type = np.int32):
  return np.full((schedule.ticks, schedule.stages, *shape), fill, dtype)


def _at(schedule, phase, slots, trash):
  """(T, P) rows of each (microbatch, stage) at its tick in a phase."""
  out = _fill(schedule, fill=trash)
  for (i, stage), tick in schedule.when[phase].items():
    out[tick, schedule.device_of(stage)[0]] = slots[i, stage]
  return out


def _forward(schedule, links, slots, sizes):
  F = schedule.when['F']
  first, last = _fill(schedule, dtype=bool), _fill(schedule, dtype=bool)
  receive = _fill(schedule, (len(links),), sizes['inputs'])
  for i, before, stage, after in schedule.visits():
    device, _ = schedule.device_of(stage)
    first[F[i, stage], device] = before is None
    last[F[i, stage], device] = after is None
    if before is not None:
      link = links.index(_shift(schedule, before, stage))
      receive[F[i, before], device, link] = slots['inputs'][i, stage]
  on, microbatch, chunk = _phase(schedule.forward)
  return dict(
    f_on=on,
    f_microbatch=microbatch,
    f_chunk=chunk,
    f_slot=_at(schedule, 'F', slots['inputs'], sizes['inputs']),
    f_first=first,
    f_last=last,
    f_receive=receive,
  )


def _backward(schedule, links, slots, sizes):
  B = schedule.when['B']
  first = _fill(schedule, dtype=bool)
  receive = _fill(schedule, (len(links),), sizes['cotangents'])
  for i, before, stage, after in schedule.visits():
    device, _ = schedule.device_of(stage)
    first[B[i, stage], device] = before is None
    if after is not None:
      link = links.index(_shift(schedule, stage, after))
      receive[B[i, after], device, link] = slots['cotangents'][i, stage]
  at = functools.partial(_at, schedule, 'B')
  on, microbatch, chunk = _phase(schedule.backward)
  store = _fill(schedule, fill=sizes['stores'])
  if schedule.weight is not None:
    store = at(slots['stores'], sizes['stores'])
  return dict(
    b_on=on,
    b_microbatch=microbatch,
    b_chunk=chunk,
    b_slot=at(slots['inputs'], sizes['inputs']),
    b_first=first,
    b_cotangent=at(slots['cotangents'], sizes['cotangents']),
    b_store=store,
    b_receive=receive,
  )


def _weight(schedule, slots, sizes):
  if schedule.weight is None:
    off = _fill(schedule)
    return dict(w_on=off.astype(bool), w_chunk=off, w_slot=off)
  on, _, chunk = _phase(schedule.weight)
  slot = _at(schedule, 'W', slots['stores'], sizes['stores'])
  return dict(w_on=on, w_chunk=chunk, w_slot=slot)


def _shared(schedule, slots, sizes):
  """What is the same on all devices."""
  F, B = schedule.when['F'], schedule.when['B']
  rows = lambda fill: np.full(schedule.ticks, fill, np.int32)
  embed, loss, back, device = rows(-1), rows(-1), rows(-1), rows(0)
  slot = rows(sizes['cotangents'])
  for i, path in enumerate(schedule.paths):
    embed[F[i, path[0]]] = back[B[i, path[0]]] = i
    tick = F[i, path[-1]]
    loss[tick] = i
    device[tick], _ = schedule.device_of(path[-1])
    slot[tick] = slots['cotangents'][i, path[-1]]
  active = {
    f'any_{phase.lower()}': (table[..., 0] >= 0).any(1)
    for phase, table in schedule.phases.items()
  }
  return dict(
    embed=embed,
    loss=loss,
    loss_device=device,
    loss_slot=slot,
    embed_back=back,
    **{'any_w': rows(0).astype(bool)} | active,
  )
