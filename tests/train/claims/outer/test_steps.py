"""Claims about replicas fail where a step of one sees another, or sends too
much, and where data parallel learns more."""

import contextlib

import claim_cases
import pytest

from paraxis.sharding import annotate
from paraxis.train.claims import families
from paraxis.train.claims.outer import learning
from paraxis.train.claims.outer import steps

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'data.sequence_length': 16,
}  # fmt: skip


def test_a_sum_over_replicas_is_seen():
  run = claim_cases.run_of('diloco', SMALL)
  cases = [{'mesh': 'replica=2,fsdp=2'}]
  claim_cases.holds_until(
    annotate, 'hide', lambda axis: contextlib.nullcontext(), steps.alone, run,
    cases=cases, within=1e-9,
  )  # fmt: skip


def test_bytes_are_those_of_a_period():
  run = claim_cases.run_of('diloco', SMALL)
  check = lambda fewer: steps.messages(
    run, meshes=['replica=2,tensor=2'], fewer=fewer
  )
  right = check(50)
  assert right.passed and right.measured.startswith('0 in a step, 50.')
  assert not check(60).passed
  often = claim_cases.run_of('diloco', SMALL | {'outer.period': 5})
  found = steps.messages(often, meshes=['replica=2,tensor=2'], fewer=50)
  assert not found.passed and found.measured.startswith('0 in a step, 5.')


FAMILIES = {
  'plain': {'outer.exchange': 'none', 'outer.period': 0},
  'fast': {},
  'slow': {'outer.rate': 0.1},
}


@pytest.mark.parametrize('warm', [{}, FAMILIES['plain'] | {'train.steps': 5}])
def test_the_best_family_is_compared_seed_by_seed(monkeypatch, tmp_path, warm):
  """By 1% in the mean, but not by two standard errors: not reproduced."""
  more = ',_warm' if warm else ''
  bits = {f'warm-{seed}': 9.0 for seed in range(3)}
  for seed in range(3):
    bits |= {
      f'plain{more}-{seed}': 2.0,
      f'fast{more}-{seed}': 2.010,
      f'slow{more}-{seed}': 2.1,
    }
  bits = {
    name.replace(',', '_').replace('__', '_'): n for name, n in bits.items()
  }
  seen = claim_cases.trains_to(monkeypatch, bits)
  monkeypatch.setattr(families, '_draw', lambda found, rows, path: path)
  monkeypatch.setattr(families.metrics, 'read', lambda folder: {})
  monkeypatch.setattr(learning.origin, 'Run', lambda text: text)
  run = claim_cases.run_of('diloco', {}, tmp_path)
  check = lambda within: learning.gap(
    run, families=FAMILIES, fields={}, seeds=[0, 1, 2], plain='plain',
    within=within, warm=warm,
  )  # fmt: skip
  right = check(0.01)
  assert right.passed and 'fast' in right.expected, right
  assert len(seen) == (12 if warm else 9)
  wrong = check(0.004)
  assert not wrong.passed and wrong.verdict == 'not reproduced'
