"""The checks of soak.py pass on a good run, and each fails on a doctored one.

The soak takes minutes: `python tests/soak/soak.py`.
"""

import collections
import json
import math

import pytest
import soak
import soak_checks
import soak_run

from paraxis.train.run import goodput

STEPS = 8
WANTED = {t: [(5 - t / 10).hex()] for t in range(1, STEPS + 1)}
# Killed after step 6, step 4 committed: steps 5 and 6 are replayed.
FOUND = {t: x * (2 if t in (5, 6) else 1) for t, x in WANTED.items()}
EVENTS = (
  (0, 'launch', ''), (0, 'start', ''), (5, 'phase', 'compile', 0),
  (10, 'phase', 'steps', 0), (22, 'phase', 'steps', 6), (23, 'restart', ''),
  (25, 'start', ''), (30, 'phase', 'restore'), (33, 'phase', 'compile', 4),
  (35, 'phase', 'steps', 4), (43, 'end', '', 8), (44, 'end', ''),
)  # fmt: skip
FLIPPED = """\
checkpoint /a/checkpoints/8 is damaged: fingerprint. Trying an older one.
resumed from step 4, every leaf verified
damaged checkpoint /a/checkpoints/8 is now in /a/checkpoints/damaged-8-x
"""
HITS = ['compile', 'save', 'steps', 'compile', 'restore', 'save']


@pytest.fixture(scope='module')
def account(tmp_path_factory):
  """goodput.account of EVENTS, in which seconds are exact."""
  folder = tmp_path_factory.mktemp('run')
  rows = [
    dict(
      zip(('time', 'event', 'name', 'step'), (1000 + at, *rest), strict=False)
    )
    for at, *rest in EVENTS
  ]
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  (folder / 'events.jsonl').write_text(lines)
  return goodput.account(folder)


def metrics(losses):
  """The metrics.jsonl of losses as hex, one line cut short by a kill."""
  rows = [
    json.dumps({'step': step, 'train/loss': float.fromhex(x)})
    for step, records in losses.items()
    for x in records
  ]
  rows += [json.dumps({'step': STEPS, 'eval/loss': 4.0}), '{"step": 7, "tr']
  return '\n'.join(rows)


def test_losses_that_are_equal():
  found = soak_checks.losses(metrics(FOUND))
  assert found == FOUND
  holds, text = soak_checks.check_losses(WANTED, found, STEPS)
  assert holds and '2 records more of 2' in text


def _last_bit(x):
  return math.nextafter(float.fromhex(x), 9).hex()


@pytest.mark.parametrize(
  'step, records, words',
  [
    (3, lambda x: [_last_bit(x[0])], 'step 3: 0x1.2cc'),
    (5, lambda x: [x[0], _last_bit(x[0])], 'step 5: '),
    (5, lambda x: [_last_bit(x[0])] * 2, 'step 5: '),
    (6, None, 'steps [6] are not those of 1 to 8'),
    (9, lambda x: ['0x1p0'], 'steps [9] are not'),
  ],
)
def test_a_loss_that_differs_is_seen(step, records, words):
  found = dict(FOUND)
  last = found.pop(step, None)
  found |= {step: records(last)} if records else {}
  found = soak_checks.losses(metrics(found))
  holds, text = soak_checks.check_losses(WANTED, found, STEPS)
  assert not holds and words in text


def test_a_replayed_step_of_the_first_run_is_compared_too():
  wanted = WANTED | {2: [WANTED[2][0], _last_bit(WANTED[2][0])]}
  assert not soak_checks.check_losses(wanted, FOUND, STEPS)[0]


def test_steps_are_counted_once(account):
  found = soak_checks.check_steps(account['attempts'], STEPS)
  assert found == (True, '8 productive of 8, 2 replayed, in 2 starts')


@pytest.mark.parametrize(
  'change, steps',
  [({'last': 7}, 8), ({}, 9), ({}, 7), ({'first': 7}, 8), ({'last': 9}, 8)],
)
def test_a_step_that_is_missing_or_one_too_many_is_seen(account, change, steps):
  first, second = account['attempts']
  assert not soak_checks.check_steps([first, second | change], steps)[0]


def test_the_account_is_the_time(account):
  assert sum(account['seconds'].values()) == 44
  for seconds in (44, 44.4, 43.6):
    assert soak_checks.check_time(account, seconds)[0]


@pytest.mark.parametrize('share', [0.95, 1.02])
def test_an_account_that_is_short_is_seen(account, share):
  seconds = {part: share * n for part, n in account['seconds'].items()}
  assert not soak_checks.check_time(account | dict(seconds=seconds), 44)[0]


def test_kills_are_counted_by_phase():
  holds, text = soak_checks.check_kills(HITS, 6, 6)
  phases = '2 in compile, 1 in restore, 2 in save, 1 in steps'
  assert holds and text == f'6 kills, 6 restarts: {phases}'
  assert not soak_checks.check_kills(HITS, 7, 6)[0]
  assert not soak_checks.check_kills(HITS, 6, 7)[0]
  for i, phase in enumerate(HITS):
    other = [*HITS[:i], 'steps', *HITS[i + 1 :]]
    assert soak_checks.check_kills(other, 6, 6)[0] == (phase == 'steps')


def test_a_flipped_bit_is_found_and_set_aside():
  assert soak_checks.check_flip(FLIPPED, 8)[0]
  for i in range(3):
    lines = FLIPPED.splitlines()
    del lines[i]
    assert not soak_checks.check_flip('\n'.join(lines), 8)[0]
  assert not soak_checks.check_flip(FLIPPED, 12)[0]
  assert not soak_checks.check_flip(FLIPPED.replace('step 4', 'step 8'), 8)[0]


def test_a_full_disk_is_reported_and_passes():
  assert soak_checks.check_disk(2.0, 5.0)[0]
  assert not soak_checks.check_disk(math.inf, 5.0)[0]
  assert not soak_checks.check_disk(2.0, math.inf)[0]
  assert soak_checks.reported('not written: the disk is full, 0 bytes free of ')
  assert soak_checks.reported('a checkpoint needs 9 free bytes, it has 0')
  assert not soak_checks.reported('not written: DEADLINE_EXCEEDED')


@pytest.mark.parametrize('seed', range(5))
def test_a_plan_has_every_fault_and_is_drawn_from_the_seed(seed):
  acts = soak.plan(seed, 60, 8)
  assert acts == soak.plan(seed, 60, 8) != soak.plan(seed + 1, 60, 8)
  kinds = collections.Counter(act.kind for act in acts)
  assert kinds == collections.Counter([
    *soak.FIXED, 'steps', 'steps', *soak_run.DISKS
  ])  # fmt: skip
  timed = [act.step for act in acts if act.step]
  assert timed == sorted(timed) and timed[-1] < 60 - soak.EVERY
  ranks = [act.rank for act in acts if act.kind in ('save', 'compile')]
  assert sum(ranks) == 2
  without = soak.plan(seed, 60, 8, disk=False)
  assert not {act.kind for act in without} & {*soak_run.DISKS}


@pytest.mark.parametrize('steps, kills', [(60, 5), (20, 8), (60, 40)])
def test_too_few_steps_or_kills(steps, kills, capsys):
  with pytest.raises(SystemExit) as ended:
    soak.main([f'--steps={steps}', f'--kills={kills}'])
  assert ended.value.code == 2 and 'at least' in capsys.readouterr().err
