"""Claims about canvases: the ceiling is a bound that can be broken."""

import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.train.claims import harness
from paraxis.train.claims import lists
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.claims.decode import canvases

TASK = dict(least=4, most=4, items=6)
FIELDS = {
  'model.d_model': 32, 'model.num_layers': 2, 'model.num_heads': 4,
  'model.d_ff': 32, 'model.visibility': 'full',
  'model.mask_id': tasks.make('lists', **TASK).mask,
  'train.objective': 'masked', 'train.steps': 2, 'train.batch_size': 8,
  'optimizer.warmup_steps': 1,
}  # fmt: skip
POLICIES = {'one by one': {}, 'all at once': dict(tokens=4)}


def _run(tmp_path):
  return harness.Run(schema.Config(), tmp_path / 'own', lambda line: None)


def _found(share, counts, rows=400):
  return [(i < share * rows, counts) for i in range(rows)]


def test_errors_are_those_of_a_share_at_the_ceiling():
  most = lists.ceiling('shuffle', [4])
  error = (most * (1 - most) / 400) ** 0.5
  share, found, errors, calls = canvases.judged('shuffle', _found(0.2, [4]))
  assert (found, calls) == (most, 1) and share == 0.2
  assert abs(errors - (0.2 - most) / error) < 1e-9 and errors > 3
  assert canvases.judged('shuffle', _found(0.09, [4]))[2] < 0
  # Mixed counts have the mean of their ceilings.
  mixed = _found(0.5, [1, 1, 1, 1]) + _found(0.09, [4])
  assert abs(canvases.judged('shuffle', mixed)[1] - (1 + most) / 2) < 1e-12


@pytest.fixture
def knows_all(monkeypatch):
  """Models that answer as one that draws from the true probabilities would.

  Returns a function: tokens of a call that answers are in truth made with.
  """

  def use(truly=None):
    def answers(
      made, task, operation, n, policy, rows, seed=0, temperature=1.0
    ):
      del made, task, temperature
      k = policy.get('tokens', 1)
      counts = [k] * (n // k)
      rng = np.random.default_rng([seed, n, k])
      p = lists.ceiling(operation, [truly] * (n // truly) if truly else counts)
      return [(bool(x < p), counts) for x in rng.random(rows)]

    models = lambda run, task, fields, seeds: (
      [(None, 1.0) for _ in seeds],
      9.0,
    )
    monkeypatch.setattr(canvases, 'answers', answers)
    monkeypatch.setattr(on_tasks, 'models', models)

  return use


def _ceilings(tmp_path, **more):
  given = dict(
    task=TASK, fields=FIELDS, policies=POLICIES, sizes=[4], rows=300,
    learned=[0.9, 0.2], seeds=[0, 1, 2],
  ) | more  # fmt: skip
  return canvases.ceilings(_run(tmp_path), **given)


def test_a_model_that_knows_all_is_at_its_ceilings(knows_all, tmp_path):
  knows_all()
  found = _ceilings(tmp_path)
  assert found.passed and found.seeds == 3, found
  assert (tmp_path / 'own' / 'ceilings.png').stat().st_size > 10_000


def test_tokens_that_saw_each_other_are_above_them(knows_all, tmp_path):
  """Drawn one by one, and said to be drawn together."""
  knows_all(truly=1)
  found = _ceilings(tmp_path)
  assert not found.passed and 'ABOVE' in found.caveat


def test_a_model_that_has_not_learned_shows_nothing(tmp_path):
  found = _ceilings(tmp_path, rows=8, seeds=[0])
  assert not found.passed and 'ABOVE' not in found.caveat
  fewer = canvases.calls(
    _run(tmp_path), task=TASK, fields=FIELDS, policies=list(POLICIES.values()),
    operations=['copy'], bounds=[3.0, 1.0], lists_of=[4, 8], seeds=[0],
  )  # fmt: skip
  assert fewer.passed and fewer.measured == '1.0000, 1.0000'
