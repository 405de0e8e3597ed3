"""Schedules: closed forms, memory, what is refused."""

import numpy as np
import pytest
import schedule_cases
import support

from paraxis.sharding.pipeline import schedules

STAGES, MICROBATCHES = (1, 2, 3, 4, 5), (1, 2, 3, 5, 8, 12)


def test_all_are_right():
  names = set()
  for arguments in schedule_cases.admissible(STAGES, MICROBATCHES):
    schedule = schedules.make(*arguments)
    assert not schedule.faults(), arguments
    names.add(arguments[0])
  assert names == set(schedules.NAMES)


@pytest.mark.parametrize(
  'p, m, v', [(4, 8, 1), (4, 8, 2), (3, 6, 3), (2, 5, 1)]
)
def test_closed_form(p, m, v):
  """Against the sentence: groups of p microbatches pass chunk after chunk."""
  name = 'one_f_one_b' if v == 1 else 'interleaved'
  schedule = schedules.make(name, p, m, v)
  order = [
    (i, c)
    for g in range(0, m, p)
    for c in range(v)
    for i in range(g, min(g + p, m))
  ]
  for device in range(p):
    for k, (i, c) in enumerate(order):
      assert schedule.forward[device + k, device].tolist() == [i, c]
      turn = p * v - 1 + p - 1 - device
      assert schedule.backward[turn + k, device].tolist() == [i, v - 1 - c]
  assert schedule.ticks == m * v + p - 1 + p * v - 1


@pytest.mark.parametrize('v', [1, 2, 3])
@pytest.mark.parametrize('p', [1, 2, 4, 6])
def test_inputs_held(p, v):
  """Megatron's count on device 0, two fewer on each device after it."""
  name = 'one_f_one_b' if v == 1 else 'interleaved'
  held = schedules.make(name, p, 3 * p, v).in_flight()
  most = 2 * (p - 1) + (v - 1) * p + 1
  assert held == tuple(most - 2 * d for d in range(p))


def test_inputs_held_by_gpipe_and_v_half():
  for p, m in [(1, 3), (3, 8), (4, 4), (4, 12)]:
    assert schedules.make('gpipe', p, m).in_flight() == (m,) * p
  for p in (1, 2, 3, 4, 5):
    # 2 p halves of a stage's input, p of a whole one: phased 1F1B has 2 p - 1.
    assert schedules.make('v_half', p, 4 * p, 2).in_flight() == (2 * p,) * p


def test_gpipe_turns_round_once():
  for p, m, v in [(4, 8, 1), (3, 6, 2), (1, 4, 3)]:
    schedule = schedules.make('gpipe', p, m, v)
    forward = max(schedule.when['F'].values())
    assert forward < min(schedule.when['B'].values())
    assert schedule.ticks == 2 * (forward + 1) == 2 * (m * v + p - 1)


def test_the_weight_phase_is_uniform_and_free():
  """All devices have W in the same ticks, and no tick is added."""
  for arguments in schedule_cases.admissible(STAGES, MICROBATCHES):
    schedule = schedules.make(*arguments)
    if schedule.weight is None:
      assert arguments[0] not in ('zero_bubble', 'v_half')
      continue
    on = schedule.weight[..., 0] >= 0
    assert (on == on[:, :1]).all(), arguments
    assert on[:, 0].sum() == schedule.microbatches * schedule.chunks
    assert (schedule.backward[-1, :, 0] >= 0).any()
    if arguments[0] == 'zero_bubble':
      name = 'one_f_one_b' if schedule.chunks == 1 else 'interleaved'
      base = schedules.make(name, *arguments[1:])
      np.testing.assert_array_equal(schedule.forward, base.forward)
      np.testing.assert_array_equal(schedule.backward, base.backward)


def test_text():
  schedule = schedules.make('zero_bubble', 4, 8)
  lines = schedule.text().splitlines()
  assert len(lines) == 1 + schedule.ticks
  assert max(map(len, lines)) <= 80
  assert lines[0].split() == 'tick device 0 device 1 device 2 device 3'.split()
  assert lines[1].split() == ['0', 'F0', *11 * '.']
  assert lines[8].split()[1:4] == ['F7', 'B1', 'W1']
  chunks = schedules.make('interleaved', 4, 8, 2).text().splitlines()
  assert max(map(len, chunks)) <= 80 and '   4 F0.1 .' in chunks[5]
  cut = schedules.make('zero_bubble', 16, 32, 2).text(rows=10).splitlines()
  assert max(map(len, cut)) <= 80
  assert cut[-1] == '(not shown: 13 more devices, 100 more ticks)'


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('interleved', 4, 8), "Did you mean 'interleaved'"),
    (
      ('interleaved', 4, 10, 2),
      'microbatches=10 is not a multiple of stages=4',
    ),
    (('interleaved', 4, 10, 2), 'the nearest that are: 8, 12'),
    (('zero_bubble', 4, 3, 2), 'the nearest that are: 4.'),
    (
      ('interleaved', 4, 8, 1),
      'runs at least 2 chunks on each stage, got chunks=1, or',
    ),
    (
      ('one_f_one_b', 4, 8, 2),
      'runs 1 chunk on each stage, got chunks=2, or take inter',
    ),
    (('v_half', 4, 8, 1), 'runs 2 chunks on each stage, got chunks=1'),
    (('skip', 4, 8, 2), 'runs 1 chunk'),
    (('gpipe', 0, 8), 'stages=0, but at least 1'),
    (('gpipe', 4, 0), 'microbatches=0, but at least 1'),
    (('one_f_one_b', 2, 2**17), '(microbatches=131072 + stages)'),
    (('one_f_one_b', 2**9, 1), 'a table of 262,656 operations, more than'),
    (('gpipe', 4, 8, 1, 0.5), 'is for the schedule skip'),
    (('skip', 4, 8, 1, 0.9), 'at most 3. The nearest that are: 0.5, 0.75.'),
    (
      ('skip', 4, 8, 1, 0.3),
      'leaves out 1.2 of 4 stages; it must be a whole number',
    ),
  ],
)
def test_what_does_not_fit_is_refused(arguments, message):
  with support.refused(message):
    schedules.make(*arguments)
