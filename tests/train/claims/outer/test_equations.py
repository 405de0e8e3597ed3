"""Claims that exchanges equal the equations fail where an exchange does not."""

import claim_cases
import pytest

from paraxis.configs import presets
from paraxis.configs import schema
from paraxis.train.claims.outer import equations
from paraxis.train.claims.outer import exchanges
from paraxis.train.steps import pairs

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'data.sequence_length': 16,
}  # fmt: skip
CASES = {
  'diloco': {'outer.period': 2},
  'local_sgd': {'outer.period': 1},
  'streaming_diloco': {'outer.period': 4, 'outer.codec': ''},
  'co2': {'outer.period': 2, 'outer.delay': 2, 'outer.clip': 4e-3},
  'noloco': {'mesh': 'replica=3', 'train.batch_size': 12, 'outer.period': 2},
}


def found(name):
  """harness.Outcome of a small model on two devices or three."""
  run = claim_cases.run_of(name, SMALL)
  case = {'mesh': 'replica=2'} | CASES[name]
  return equations.by_numpy(run, cases=[case], within=1e-9)


@pytest.mark.parametrize(
  'name, off',
  [
    ('diloco', equations.without_momentum),
    ('local_sgd', equations.idle),
    ('streaming_diloco', equations.without_ends),
    ('co2', equations.uphill),
    ('co2', exchanges.without_penalty),
    ('co2', exchanges.without_clip),
    ('noloco', equations.without_momentum),
    ('noloco', equations.unpulled),
  ],
)
def test_an_exchange_of_another_kind_is_seen(name, off):
  right = found(name)
  assert right.passed, right
  with off():
    wrong = found(name)
  assert not wrong.passed and float(wrong.measured) > 1e-3, wrong


@pytest.mark.parametrize('name', ['streaming_diloco', 'co2', 'noloco'])
def test_what_is_late_is_seen(monkeypatch, name):
  """The schedule is of the claim's own: one of outer.due's is not believed."""
  due = type(claim_cases.run_of(name).config.outer).due
  late = lambda loop, done: due(loop, done - 1)
  monkeypatch.setattr(type(claim_cases.run_of(name).config.outer), 'due', late)
  assert not found(name).passed


def test_what_the_knock_out_of_pairs_leaves():
  """Each meets itself."""
  with equations.unpaired():
    assert pairs.matchings(4).tolist() == [[0, 1, 2, 3]]
  assert pairs.matchings(4)[0].tolist() != [0, 1, 2, 3]


def test_replicas_that_never_met_are_averaged_at_the_end():
  (loop,) = (schema.Outer(**own) for own in presets.NEVER.values())
  steps = presets.replicas('mean').train.steps
  due = [step for step in range(1, steps + 1) if loop.due(step)]
  assert due == [steps] and not loop.missed(steps)
