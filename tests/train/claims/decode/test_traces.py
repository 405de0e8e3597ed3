"""Claims about what learns from decodings, on models that learned little."""

import numpy as np
import pytest
import unmask_cases

from paraxis.configs import ascending_steps
from paraxis.configs import dparallel
from paraxis.configs import presets
from paraxis.configs import schema
from paraxis.decode.unmask import tuning
from paraxis.train.claims import ablation
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import lists
from paraxis.train.claims.decode import traces

ON = dict(task=unmask_cases.TASK, fields=unmask_cases.FIELDS, seeds=[0])


def _run(tmp_path):
  return harness.Run(schema.Config(), tmp_path / 'own', lambda line: None)


SLOW = 'more than 1,800, for a training'


@pytest.fixture
def limit(monkeypatch):
  """Models have taken all the CPU-seconds that a training may take."""
  monkeypatch.setattr(ablation, 'cpu_seconds', lambda rows: ablation.LIMIT)


def test_a_filter_has_its_file_and_its_oracle(tmp_path, limit):
  found = traces.filtered(
    _run(tmp_path), on=ON, operations=['copy'], chosen=[0.3, 0.9], against=[],
    bounds=[1.1, 1.0], lists_of=[4, 4], steps=3,
  )  # fmt: skip
  assert (tmp_path / 'own' / 'filter-0.npz').exists()
  assert not found.passed and found.measured.endswith('-0.8500'), found
  assert SLOW in found.caveat
  beside = traces.filtered(
    _run(tmp_path), on=ON, operations=['copy'], chosen=[0.0], against=[1.0],
    bounds=[0.5, 1.1], lists_of=[4, 4], steps=3,
  )  # fmt: skip
  # All at once, a quarter of the calls of one by one; nothing was learned.
  assert beside.measured == '0.2500, 1.1000, -0.8500' and not beside.passed


def test_tuned_models_are_asked_anew(tmp_path, limit):
  found = traces.surer(
    _run(tmp_path), on=ON, operations=['copy'],
    tuned=dict(texts=16, steps=2, rate=1e-3, weight=2.0),
    policies=[dict(count='threshold', threshold=0.0)], bounds=[3.9, 1.1],
    lists_of=[4, 4],
  )  # fmt: skip
  # Above nothing: all at once, four times fewer calls.
  assert found.measured == '0.1000, 1.1000, -0.8500' and not found.passed
  assert SLOW in found.caveat


def test_what_is_right_alone_becomes_sure(tmp_path):
  config = schema.view(dparallel.get_config())
  run = harness.Run(config, tmp_path, lambda line: None)
  given = dict(dparallel.claims()[0][2])
  check = given.pop('check')
  found = check(run, **given)
  assert found.passed, found
  with traces.sure_of_all():
    assert not check(run, **given).passed


def test_one_update_by_rewards_is_not_enough(tmp_path, limit):
  found = traces.rewarded(
    _run(tmp_path), on=ON, operations=['sort', 'sort'], policy=dict(tokens=2),
    learned=dict(updates=1, prompts=2, group=2, rate=1e-3), by=0.1,
    lists_of=[4, 4],
  )  # fmt: skip
  assert not found.passed and 'ratios are 1 but for' in found.caveat
  assert SLOW in found.caveat
  assert float(found.measured.split(', ')[1]) > 0  # below FIRST_RATIO


def test_a_reward_is_the_share_that_is_right():
  share = lambda *given: lists.share_right(
    lists.Lists(**unmask_cases.TASK), *given
  )
  assert share('sort', [3, 1, 2], [1, 2, 2]) == 2 / 3
  assert share('reverse', [3, 1, 2], [2, 1, 3]) == 1
  gains = tuning.advantages([1, 0, 0, 0], 4)
  with traces.of_others():
    assert (
      tuning.advantages([1, 0, 0, 0], 4).tolist() == np.roll(gains, 1).tolist()
    )


def test_a_record_is_of_its_own_canvases(tmp_path):
  config = schema.view(ascending_steps.get_config())
  run = harness.Run(config, tmp_path, lambda line: None)
  given = dict(
    changes=presets.SMALL_MASKED, prompts=2, new=5,
    policy=dict(count='ascending', block=3), within=1e-5,
  )  # fmt: skip
  assert traces.on_policy(run, **given).passed
  with traces.any_call():
    assert not traces.on_policy(run, **given).passed
  assert knockouts.sentence('x', traces.on_policy(run, **given)).startswith(
    'STILL'
  )
