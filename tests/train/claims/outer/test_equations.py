"""Claims that exchanges equal the equations fail where an exchange does not."""

import claim_cases
import pytest

from paraxis.train.claims.outer import equations
from paraxis.train.claims.outer import exchanges

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'data.sequence_length': 16,
}  # fmt: skip
CASES = {
  'diloco': {'outer.period': 2},
  'local_sgd': {'outer.period': 1},
  'streaming_diloco': {'outer.period': 4, 'outer.codec': ''},
  'co2': {'outer.period': 2, 'outer.delay': 2},
}


def found(name):
  """harness.Outcome of a small model on two devices."""
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
  ],
)
def test_an_exchange_of_another_kind_is_seen(name, off):
  right = found(name)
  assert right.passed, right
  with off():
    wrong = found(name)
  assert not wrong.passed and float(wrong.measured) > 1e-3, wrong


@pytest.mark.parametrize('name', ['streaming_diloco', 'co2'])
def test_what_is_late_is_seen(monkeypatch, name):
  """The schedule is of the claim's own: one of outer.due's is not believed."""
  due = type(claim_cases.run_of(name).config.outer).due
  late = lambda loop, done: due(loop, done - 1)
  monkeypatch.setattr(type(claim_cases.run_of(name).config.outer), 'due', late)
  assert not found(name).passed
