"""Validity of a pipeline schedule, checked on its finished tables.

The executor relies on all of it:
placement    every virtual stage is one chunk of one device
once         a microbatch has one F, one B and, where W is split off, one W in
             each virtual stage of its path, and none in any other
order        F is in a later tick than F of the stage before it, B than B of the
             stage after it, because messages travel between ticks; B of a last
             stage is in the tick of its F or later, W in that of its B or later
together     in a tick at most one microbatch is embedded, at most one reaches
             its loss, at most one its embedding's backward pass: all devices
             work on these together
"""

import collections

import numpy as np


def faults(schedule):
  """[text] of the rules above that a schedules.Schedule breaks."""
  shape = schedule.ticks, schedule.stages, 2
  wrong = [n for n, t in schedule.phases.items() if t.shape != shape]
  if wrong:
    return [f'{", ".join(wrong)}: not of shape {shape}']
  found = _placement(schedule)
  # Each check needs the one before it: it indexes by placement and cells.
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
  expected = {(i, s) for i, path in enumerate(schedule.paths) for s in path}
  found = [
    f'the path {path} of microbatch {i} visits a stage twice, or none'
    for i, path in enumerate(schedule.paths)
    if not path or len(set(path)) < len(path)
  ]
  for phase, table in schedule.phases.items():
    _, device = np.nonzero(table[..., 0] >= 0)
    microbatch, chunk = table[table[..., 0] >= 0].T
    stage = schedule.placement[device, chunk]
    counts = collections.Counter(
      zip(microbatch.tolist(), stage.tolist(), strict=True)
    )
    for i, s in sorted(expected | counts.keys()):
      if counts[i, s] != ((i, s) in expected):
        found.append(
          f'{phase} of microbatch {i} through virtual stage {s}: '
          f'{counts[i, s]} times, not {int((i, s) in expected)}'
        )
  return found


def _order(schedule):
  when = schedule.when
  F, B, W = when['F'], when['B'], when.get('W')
  found = []

  def expect(phase, tick, earliest, i, s):
    if tick < earliest:
      found.append(
        f'{phase} of microbatch {i} through virtual stage {s} is at tick '
        f'{tick}, possible only from tick {earliest}'
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
  words = dict(
    embed='embedded', loss='at the loss', embed_back='back at the embedding'
  )
  return [
    f'{n} microbatches are {words[end]} at tick {tick}'
    for end, ticks in schedule.ends().items()
    for tick, n in sorted(collections.Counter(ticks).items())
    if n > 1
  ]
