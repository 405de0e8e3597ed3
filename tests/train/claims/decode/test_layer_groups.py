"""Claims about drafts of layers side by side."""

import fractions

import claim_cases
import numpy as np
import pytest

from paraxis.train.claims import real_model
from paraxis.train.claims.decode import layer_groups

SMALL = {
  'model.d_model': 16, 'model.d_ff': 16, 'model.num_heads': 2,
  'model.vocab_size': 12,
}  # fmt: skip


@pytest.mark.sampled(2)
def test_keys_are_exact_and_are_not_without_calibration():
  right, wrong = claim_cases.falls('easyspec', 'no_calibration', SMALL, calls=3)
  assert right.measured == '0 differ' and wrong.measured != '0 differ'


def test_the_same_keys_for_all_groups_show_nothing():
  """Where groups change no draft, exact keys are no news."""
  found = layer_groups.exact_keys(
    claim_cases.run_of('easyspec', SMALL),
    changes={'model.num_layers': 2}, drafts=2, groups=[1, 1], calls=2,
  )  # fmt: skip
  assert found.measured == '0 differ' and not found.passed


def test_mixers_side_by_side_are_faster_and_waiting_is_not():
  right, _ = claim_cases.falls('easyspec', 'one_by_one')
  assert float(right.measured.removesuffix(' x')) >= 1.5


@pytest.mark.parametrize('layers, group', [(8, 1), (8, 4), (6, 4), (3, 3)])
def test_spans_are_closed_forms(layers, group):
  mixer, mlp, send = 3, 2, fractions.Fraction(1, 4)
  groups = -(-layers // group)
  want = groups * mixer + layers * mlp + (group > 1) * groups * send
  assert layer_groups.span(layers, group, mixer, mlp, send) == float(want)


def test_kept_drafts_are_compared(monkeypatch, tmp_path):
  results = lambda *ids: [dict(tokens=[i], logprobs=[-0.1 * i]) for i in ids]
  each, texts = {1: 2.0, 4: 1.9}, {1: results(1, 2), 4: results(1, 2)}

  def greedy(run, *, method, draft, prompts):
    del run, draft, prompts
    group = method['draft_group']
    return each[group], np.array([0, 1, 1]), texts[group]

  monkeypatch.setattr(real_model, 'greedy', greedy)
  monkeypatch.setattr(real_model, 'one_by_one', lambda prompts: results(1, 2))
  run, said = claim_cases.run_of('easyspec', SMALL, tmp_path), []
  run.say = said.append
  given = dict(
    method=dict(method='easyspec'), group=4, draft={}, prompts=[2, 3, 4],
    loss=0.15,
  )  # fmt: skip
  assert layer_groups.keeps(run, **given).passed
  assert '4 a group          50.0%  50.0%' in said[0]
  assert (tmp_path / 'groups.png').exists()
  each[4] = 1.8
  found = layer_groups.keeps(run, **given)
  assert found.measured == '20.0%' and not found.passed and found.sound
  # Of other texts, and of drafts that are never kept, nothing is admitted.
  for group in texts:
    kept, texts[group] = texts[group], results(1, 3)
    found = layer_groups.keeps(run, **given | dict(loss=0.5))
    assert not (found.passed or found.sound)
    texts[group] = kept
  each[4] = 1.0
  assert not layer_groups.keeps(run, **given).sound
