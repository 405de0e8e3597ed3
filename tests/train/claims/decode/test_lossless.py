"""Claims of lossless methods hold, and fail when a judge is wrong."""

import claim_cases
import numpy as np
import pytest

from paraxis.configs.base import command_line
from paraxis.decode import judges
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.claims.decode import lossless

SMALL = {
  'model.d_model': 16, 'model.d_ff': 16, 'model.num_heads': 2,
  'model.vocab_size': 12,
}  # fmt: skip
QUICK = dict(prompts=4, new=10, changes=[{}])
# Names of configs that claim it, each with a knock-out of its own.
CONFIGS = {
  'speculative_decoding': 'keeps_one_more', 'prompt_lookup': 'keeps_one_more',
  'speculative_jacobi': 'keeps_one_more', 'pearl': 'keeps_one_more',
  'medusa': 'first_child', 'eagle': 'keeps_one_more',
  'ppd': 'first_child', 'falcon': 'keeps_one_more',
  'easyspec': 'keeps_one_more',
}  # fmt: skip


@pytest.mark.sampled(160)
@pytest.mark.parametrize('name', CONFIGS)
def test_texts_are_those_of_one_by_one(name):
  right, _ = claim_cases.falls(name, CONFIGS[name], SMALL, prompts=4, new=10)
  assert right.measured.startswith('0 of ')


def test_the_source_is_a_draft():
  found = lossless.same_text(
    claim_cases.run_of('aggressive_decoding', SMALL),
    method=dict(method='aggressive', drafts=5), random_draft='', **QUICK,
  )  # fmt: skip
  assert found.measured == '0 of 8 differ'


def test_a_method_without_drafts_shows_nothing():
  found = lossless.same_text(
    claim_cases.run_of('pearl', SMALL),
    method=dict(method='autoregressive'), random_draft='', **QUICK,
  )  # fmt: skip
  assert found.measured == '0 of 8 differ' and not found.passed


@pytest.mark.parametrize('name', ('from_p', 'raw_residual'))
def test_a_broken_judge_has_another_joint(name):
  right, wrong = claim_cases.falls(
    'speculative_decoding', name, SMALL, samples=20_000, length=3
  )
  assert float(wrong.measured.removeprefix('p = ')) < lossless.MOST
  assert 'of 20,000 texts of 3 tokens of 4' in right.caveat


# Whose texts can be drawn with rejection, beside the one above.
REJECTING = (
  'prompt_lookup', 'speculative_jacobi', 'eagle', 'falcon', 'easyspec'
)  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.parametrize('name', ('from_p', 'raw_residual'))
@pytest.mark.parametrize('config', REJECTING)
def test_a_broken_judge_of_every_method_is_far_away(config, name):
  module = command_line.load_module(config)
  claim, = (
    c for c in papers.claims(module, config) if c.name == 'joint of 4 tokens'
  )  # fmt: skip
  few = dict(samples=4_000, length=3)
  with getattr(lossless, name)():
    found = lossless.same_distribution(
      claim_cases.run_of(config, SMALL), **claim.parameters | few
    )
  assert float(found.measured.removeprefix('p = ')) < lossless.MOST


def test_a_judge_filters_p_and_q():
  right, wrong = claim_cases.falls(
    'speculative_decoding', 'q_of_temperature_1', SMALL, samples=20_000,
    length=3,
  )  # fmt: skip
  assert float(wrong.measured.removeprefix('p = ')) < lossless.MOST
  p = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
  found = lossless._filtered(p, 0.5, 2)
  np.testing.assert_allclose(found, [[0, 0, 0.36, 0.64], [0.64, 0.36, 0, 0]])
  assert 'saved 0%' not in right.caveat


@pytest.mark.parametrize('name', ('says_lossless', 'all_typical'))
def test_typical_acceptance_is_its_rule_and_not_lossless(name):
  right, wrong = claim_cases.falls('medusa', name, samples=4_000, length=3)
  found = wrong.measured.removeprefix('p = ').split(', ')
  rule, model = map(float, found)
  assert (rule > lossless.LEAST) == (name == 'says_lossless')
  assert model < lossless.MOST and 'not called lossless' in right.caveat


def test_a_typical_judge_with_another_threshold_is_seen():
  """0.05 in place of 0.09: another joint than the model's as before."""
  with knockouts.patched(judges, 'MOST', 0.05):
    found = lossless.typical_distribution(
      claim_cases.run_of('medusa'), changes={}, letters=4, length=3,
      samples=4_000, method=dict(method='medusa', drafts=11, judge='typical'),
    )  # fmt: skip
  assert not found.passed, found


def test_every_cell_has_enough():
  p = np.random.default_rng(0).dirichlet(np.full(256, 0.3))
  for n in (400, 4000, 40_000):
    cells = lossless.joined(p, n)
    assert sorted(i for cell in cells for i in cell) == list(range(256))
    assert min(n * p[cell].sum() for cell in cells) >= lossless.FEW
  # What is left over is no cell of its own.
  assert [len(c) for c in lossless.joined(np.full(5, 0.2), 50)] == [2, 3]
  assert lossless.joined(np.array([0.5, 0.5]), 4) == [[0, 1]]
  value, statistic, freedom = lossless._chi_square(
    np.array([25, 5, 20, 50]), np.array([0.1, 0.1, 0.3, 0.5])
  )
  assert (round(statistic, 9), freedom) == (
    round(10**2 / 20 + 10**2 / 30, 9),
    2,
  )
  assert value == pytest.approx(np.exp(-statistic / 2))


def test_what_cannot_be_drawn_is_not_by_chance():
  p = np.array([0.5, 0.5, 0.0])
  assert lossless._chi_square(np.array([500, 500, 0]), p)[0] > 0.9
  assert lossless._chi_square(np.array([500, 499, 1]), p)[0] == 0
