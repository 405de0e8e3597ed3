"""Every property of a schedule, broken once, is found."""

import dataclasses

import numpy as np

from paraxis.sharding.pipeline import schedules


def _changed(schedule, phase, tick, device, cell):
  table = getattr(schedule, phase).copy()
  table[tick, device] = cell
  return dataclasses.replace(schedule, **{phase: table})


def test_faults_are_found():
  good = schedules.make('zero_bubble', 3, 6, 2)
  (f0, b0, w0) = (good.when[k][0, 0] for k in 'FBW')
  two_starts = schedules.from_paths(2, [(0, 1), (1, 0)])
  last = two_starts.when['F'][0, 0]
  forward = np.full_like(two_starts.forward, -1)
  forward[last], forward[last + 1] = [[0, 0], [1, 0]], [[1, 0], [0, 0]]
  cases = {
    'placement': dataclasses.replace(good, placement=good.placement * 0),
    'F of microbatch 0 through virtual stage 0: 0 times, not 1': _changed(
      good, 'forward', f0, 0, (-1, -1)
    ),
    'F of microbatch 5 through virtual stage 0: 2 times, not 1': _changed(
      good, 'forward', f0, 0, (5, 0)
    ),
    '(microbatch, chunk) = (6, 0)': _changed(good, 'backward', b0, 0, (6, 0)),
    '(microbatch, chunk) = (0, -1)': _changed(good, 'weight', w0, 0, (0, -1)),
    'B: not of shape': dataclasses.replace(good, backward=good.backward[1:]),
    '5 paths, 6 microbatches': dataclasses.replace(good, paths=good.paths[1:]),
    'F of microbatch 0 through virtual stage 1 is at tick 0, possible only '
    'from tick 1': dataclasses.replace(good, forward=_early(good.forward, 1)),
    'B of microbatch 0 through virtual stage 5 is at tick': dataclasses.replace(
      good, backward=_early(good.backward, 2)
    ),
    'W of microbatch 0 through virtual stage 0 is at tick': dataclasses.replace(
      good, weight=_early(good.weight, 0)
    ),
    '2 microbatches are embedded at tick': dataclasses.replace(
      two_starts, forward=forward
    ),
    'visits a stage twice, or none': dataclasses.replace(
      good, paths=((0, 0), *good.paths[1:])
    ),
  }
  for text, bad in cases.items():
    assert any(text in fault for fault in bad.faults()), (text, bad.faults())


def _early(table, device):
  """The table with what one device does moved ahead by a tick."""
  out = table.copy()
  out[:, device] = np.roll(out[:, device], -1, 0)
  return out
