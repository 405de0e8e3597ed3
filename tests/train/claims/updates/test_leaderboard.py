"""Scores against an integral by small steps; times, orders and verdicts."""

import math

import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.train.claims import experiment
from paraxis.train.claims import harness
from paraxis.train.claims.updates import leaderboard as board

INF = math.inf
SPACE = {'learning_rate': [1e-3, 1e-1], 'weight_decay': [0.01, 0.1]}


def test_a_score_is_the_integral_of_the_profile():
  rng = np.random.default_rng(0)
  times = {n: [*rng.integers(5, 60, 6).astype(float)] for n in 'abc'}
  times['a'][2] = times['b'][3] = times['c'][3] = INF
  taus = np.linspace(1, 4, 300_001)
  least = np.min(list(times.values()), axis=0)
  for rule, found in board.score(times).items():
    r = np.asarray(times[rule]) / least
    profile = (r[:, None] <= taus).mean(0)
    assert found == pytest.approx(profile.mean(), abs=1e-5)


def test_what_nobody_reaches_counts_for_nobody():
  assert board.score({'a': [INF, 5.0], 'b': [INF, 5.0]}) == {'a': 0.5, 'b': 0.5}


def test_points_are_spread_and_another_study_has_others():
  rows = [board._points(SPACE, 4, s) for s in range(3)]
  every = [point for row in rows for point in row]
  assert len({tuple(p.values()) for p in every}) == 12
  for name, (low, high) in SPACE.items():
    at = np.sort([np.log(p[name] / low) / np.log(high / low) for p in every])
    assert 0 < at[0] and at[-1] < 1 and np.diff(at).max() < 0.25


@pytest.mark.parametrize(
  'target, steps', [(3.0, 20), (2.0, 30), (2.5, 20), (1.0, INF)]
)
def test_the_time_is_that_of_the_first_trial_there(target, steps):
  curves = [
    [(10, 4.0), (20, 3.5), (30, 2.0)],
    [(10, 4.0), (20, 2.5), (30, 2.4)],
  ]
  assert board._time(curves, target) == steps


def test_the_work_of_a_step_is_of_its_tokens():
  config = experiment.fields(
    schema.Config(), {'train.batch_size': 4, 'data.sequence_length': 32}
  )
  rows = {8: {board.HELD: 2.0}, 10: {'train/flops': 6e6, 'train/tokens': 256}}
  assert board._work(config, rows) == (128, 3e6)


@pytest.mark.parametrize(
  'studies, last, passed',
  [
    ('aab', 'c', True), ('abc', 'c', False), ('aac', 'c', False),
    ('aaa', 'c', True), ('aaa', 'b', False), ('ccc', 'c', False),
  ],
)  # fmt: skip
def test_an_order_that_two_studies_share(
  monkeypatch, tmp_path, studies, last, passed
):
  """The rule that is soonest: of rules a, b and c, others in other studies."""

  def trials(run, rules, fields, trials, study):
    orders = dict(a='abc', b='bac', c='cab')
    late = {r: 10 * (1 + orders[studies[study]].index(r)) for r in rules}
    curve = lambda r: [(s, 1.0 if s >= late[r] else 2.0) for s in (10, 20, 30)]
    return {r: [curve(r)] for r in rules}, (64.0, 5e6)

  monkeypatch.setattr(board, '_trials', trials)
  run = harness.Run(schema.Config(), tmp_path, lambda line: None)
  found = board.leaderboard(
    run, rules={r: SPACE for r in 'abc'}, workloads={'w': {}}, trials=1,
    studies=[0, 1, 2], baseline=last, at=30, agree=2,
  )  # fmt: skip
  assert found.passed == passed and (tmp_path / 'profiles.png').exists()
  header, *rows = (tmp_path / 'times.csv').read_text().splitlines()
  assert header == 'workload,rule,steps,tokens,flops' and len(rows) == 3
  if studies == 'aab':  # a takes 10, 10 and 20 steps
    assert rows[0] == 'w,a,10,640,5e+07'
  assert 'that are first at a target: a 0.00' in found.caveat


def test_equal_scores_are_no_order(monkeypatch, tmp_path):
  curves = lambda rules: {r: [[(10, 1.0)]] for r in rules}
  same = lambda run, rules, *more: (curves(rules), (64.0, 5e6))
  monkeypatch.setattr(board, '_trials', same)
  run = harness.Run(schema.Config(), tmp_path, lambda line: None)
  found = board.leaderboard(
    run, rules=dict(a=SPACE, b=SPACE), workloads={'w': {}}, trials=1,
    studies=[0, 1, 2], baseline='a', at=10, agree=2,
  )  # fmt: skip
  assert not found.passed


def test_rates_of_the_first_trials_and_those_at_an_end():
  """In three studies that is the trial of least rate, the middle one, none."""
  rates = [
    [p['learning_rate'] for p in board._points(SPACE, 3, s)] for s in (5, 6, 7)
  ]
  soon, late, never = [(10, 1.0), (20, 1.0)], [(10, 2.0), (20, 1.0)], [(9, 2.0)]
  first = sorted(rates[0])[0], sorted(rates[1])[1], None
  found = [
    {'a': [never if one is None else soon if r == one else late for r in row]}
    for row, one in zip(rates, first, strict=True)
  ]
  given = {'a': SPACE}, {'w': found}, {'w': 1.5}, 3, (5, 6, 7)
  low, high = sorted(first[:2])
  text = board._rates(*given)
  assert text == f'a {low:g} to {high:g} of 0.001 to 0.1, 1 of 2 at an end'
  text = board._rates(*given[:2], {'w': 0.5}, *given[3:])
  assert text == 'a none of 0.001 to 0.1, 0 of 0 at an end'
