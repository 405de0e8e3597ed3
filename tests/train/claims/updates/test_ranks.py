"""Verdicts on given curves: what is first, what changes its order."""

import claim_cases
import pytest

from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims.updates import ranks

RULES = {'adamw': [{}], 'lion': [{}], 'muon': [{}]}
SIZES = {'small': {}, 'large': {}}
SHIFT = (0.0, 0.1, 0.2)  # of seeds, all rules alike but for a little
NOISE = {
  'adamw': (0, 0.002, 0.001),
  'lion': (0.001, 0, 0.002),
  'muon': (0, 0, 0),
}


def _curves(small, large):
  """{size: {rule: {step: [..]}}} of {rule: (value early, at the end)}."""
  row = lambda rule, x: [
    x + s + e for s, e in zip(SHIFT, NOISE[rule], strict=True)
  ]
  return {
    size: {r: {10: row(r, a), 20: row(r, b)} for r, (a, b) in given.items()}
    for size, given in (('small', small), ('large', large))
  }


def _judge(monkeypatch, tmp_path, check, small, large, **more):
  curves = _curves(small, large)
  given = lambda run, rules, sizes, seeds: (curves, 1.0, 'large: muon 0.1')
  monkeypatch.setattr(ranks, '_both', given)
  run = harness.Run(schema.Config(), tmp_path, lambda line: None)
  return check(run, rules=RULES, sizes=SIZES, seeds=[0, 1, 2], **more)


WON = {'adamw': (2.0, 1.5), 'lion': (1.9, 1.6), 'muon': (2.2, 1.3)}
LOST = WON | {'muon': (2.2, 1.55)}


@pytest.mark.parametrize('large, passed', [(WON, True), (LOST, False)])
def test_a_matrix_rule_is_first_at_both_sizes(
  monkeypatch, tmp_path, large, passed
):
  found = _judge(monkeypatch, tmp_path, ranks.first, WON, large)
  assert found.passed == passed
  assert found.caveat.endswith('the first seed, best of them large: muon 0.1')


@pytest.mark.parametrize(
  'muon, passed', [((2.2, 1.3), True), ((1.8, 1.3), True)]
)
def test_an_order_that_changes(monkeypatch, tmp_path, muon, passed):
  """adamw and lion change places, whatever muon does."""
  given = WON | {'muon': muon}
  found = _judge(monkeypatch, tmp_path, ranks.reordered, given, given, early=10)
  assert found.passed == passed


def test_an_order_that_stays(monkeypatch, tmp_path):
  stays = {'adamw': (2.0, 1.5), 'lion': (2.1, 1.6), 'muon': (1.9, 1.3)}
  found = _judge(monkeypatch, tmp_path, ranks.reordered, WON, stays, early=10)
  assert not found.passed


@pytest.mark.parametrize('end, passed', [(1.45, True), (1.2, False)])
def test_a_gain_that_is_smaller(monkeypatch, tmp_path, end, passed):
  large = WON | {'muon': (2.2, end)}
  found = _judge(monkeypatch, tmp_path, ranks.gains, WON, large)
  assert found.passed == passed


def test_a_knock_out_reads_the_trainings_of_its_own_rates(
  monkeypatch, tmp_path
):
  """They lie in one folder, and other rates than theirs are refused there."""
  bits = {'32-adamw-0.005-0': 2.1, '32-adamw-0.01-0': 2.0}
  seen = claim_cases.trains_to(monkeypatch, bits)
  run = claim_cases.run_of('fantastic_optimizers', {}, tmp_path / 'own')
  trials = [{'learning_rate': r} for r in (5e-3, 1e-2)]
  train = lambda run, trials: ranks._trained(
    run, {'adamw': trials}, 'small', {}, [0]
  )
  (best,) = train(run, trials)[0]['adamw']
  assert best.config.optimizer.learning_rate == 1e-2 and len(seen) == 2
  (same,) = train(run.other(run.config, 'off'), trials[1:])[0]['adamw']
  assert same.folder == best.folder and len(seen) == 2


@pytest.mark.parametrize(
  'best, text',
  [
    (5e-3, '0.005 (end of its grid)'), (1e-2, '0.01'),
    (2e-2, '0.02 (end of its grid)'),
  ],
)  # fmt: skip
def test_the_best_trial_is_told_and_whether_it_is_at_an_end(
  monkeypatch, tmp_path, best, text
):
  """Of what differs between the trials; one alone has no end."""
  rates = 5e-3, 1e-2, 2e-2
  bits = {f'32-soap-0.01-{r:g}-0': 2.0 + (r != best) for r in rates}
  claim_cases.trains_to(monkeypatch, bits | {'32-lion-0.003-0': 3.0})
  run = claim_cases.run_of('fantastic_optimizers', {}, tmp_path / 'own')
  rules = {
    'soap': [{'learning_rate': 1e-2, 'matrix_learning_rate': r} for r in rates],
    'lion': [{'learning_rate': 3e-3}],
  }
  _, found = ranks._trained(run, rules, '90K', {}, [0])
  assert found == f'90K: soap {text}, lion 0.003'
