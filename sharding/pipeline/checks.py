"""What makes a pipeline schedule right, checked on the finished table.

Every schedule, whoever made it, must hold all of it; the executor relies on it:
placement    the virtual stages, each once
once         each microbatch passes each stage of its path once in F, once in B,
             once in W, and no other stage
order        F after the F before it, B after the B behind it, in later ticks
             because messages travel between ticks; B of the last stage with its
             F or later; W with its B or later
together     in a tick at most one microbatch is embedded, at most one reaches
             its loss, at most one comes back to its embedding: all devices work
             on these
"""

import collections

import numpy as np


def faults(schedule):
  """[text] of what a schedules.Schedule breaks."""
  shape = schedule.ticks, schedule.stages, 2
  wrong = [n for n, t in schedule.phases.items() if t.shape != shape]
  if wrong:
    return [f'{", ".join(wrong)}: not of shape {shape}']
  found = _placement(schedule)
  # With a wrong placement or a cell out of range nothing has a meaning.
  found = found or _cells(schedule)
  found = found or _once(schedule)
  return found or [*_order(schedule), *_together(schedule)]


def _placement(schedule):
  shape = schedule.stages, schedule.chunks
  held = sorted(schedule.placement.ravel().tolist())
  if schedule.placement.shape != shape or held != list(range(len(held))):
    return [
      f'placement {schedule.placement.tolist()} is not the virtual stages '
      f'0..{schedule.stages * schedule.chunks - 1}, each once'
    ]
  if len(schedule.paths) != schedule.microbatches:
    return [
      f'{len(schedule.paths)} paths, {schedule.microbatches} microbatches'
    ]
  return []


def _cells(schedule):
  limit = np.array([schedule.microbatches, schedule.chunks])
  found = []
  for phase, table in schedule.phases.items():
    idle = (table == -1).all(-1)
    fits = ((table >= 0) & (table < limit)).all(-1)
    for tick, device in np.argwhere(~(idle | fits)):
      found.append(
        f'{phase} at tick {tick} on device {device}: (microbatch, chunk) = '
        f'{tuple(table[tick, device].tolist())}'
      )
  return found


def _once(schedule):
  wanted = {(i, s) for i, path in enumerate(schedule.paths) for s in path}
  found = [
    f'the path {path} of microbatch {i} visits a stage twice, or none'
    for i, path in enumerate(schedule.paths)
    if not path or len(set(path)) < len(path)
  ]
  for phase, table in schedule.phases.items():
    on = table[..., 0] >= 0
    device = np.broadcast_to(np.arange(schedule.stages), on.shape)[on]
    stage = schedule.placement[device, table[on][:, 1]]
    seen = zip(table[on][:, 0].tolist(), stage.tolist(), strict=True)
    counts = collections.Counter(seen)
    for i, s in sorted(wanted | counts.keys()):
      if counts[i, s] != ((i, s) in wanted):
        found.append(
          f'{phase} of microbatch {i} through virtual stage {s}: '
          f'{counts[i, s]} times, not {int((i, s) in wanted)}'
        )
  return found


def _order(schedule):
  when = schedule.when
  F, B, W = when['F'], when['B'], when.get('W')
  found = []

  def expect(what, at, earliest, i, s):
    if at < earliest:
      found.append(
        f'{what} of microbatch {i} through virtual stage {s} is at tick {at}, '
        f'possible only from tick {earliest}'
      )

  for i, before, s, after in schedule.visits():
    if before is not None:
      expect('F', F[i, s], F[i, before] + 1, i, s)
    earliest = F[i, s] if after is None else B[i, after] + 1
    expect('B', B[i, s], earliest, i, s)
    if W is not None:
      expect('W', W[i, s], B[i, s], i, s)
  return found


def _together(schedule):
  F, B = schedule.when['F'], schedule.when['B']
  ends = {
    'embedded': [F[i, p[0]] for i, p in enumerate(schedule.paths)],
    'at the loss': [F[i, p[-1]] for i, p in enumerate(schedule.paths)],
    'back at the embedding': [B[i, p[0]] for i, p in enumerate(schedule.paths)],
  }
  return [
    f'{n} microbatches are {what} at tick {tick}'
    for what, ticks in ends.items()
    for tick, n in sorted(collections.Counter(ticks).items())
    if n > 1
  ]
