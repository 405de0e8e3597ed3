"""Claims about moved states hold, and fail when the move is broken."""

import claim_cases
import jax
import pytest

from paraxis.sharding import reallocate
from paraxis.train.bench import measure as bench_measure
from paraxis.train.claims.layouts import reallocate as claims_reallocate

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.num_layers': 2,
  'model.vocab_size': 64, 'data.tokenizer': 'bytes',
}  # fmt: skip
on = lambda mesh, first=0: dict(mesh=mesh, first=first)
PAIRS = [
  [on('fsdp=2,tensor=2'), on('fsdp=4', 4)],
  [on('fsdp=2'), on('data=2', 1)],
]


@pytest.fixture
def run():
  return claim_cases.run_of('realhf', SMALL)


@pytest.mark.parametrize('name, wrong', [
  ('travel', '0 of'), ('parts', '1 +-'), ('held', 'x'),
])  # fmt: skip
def test_a_claim_falls(name, wrong):
  given = {} if name == 'held' else {'pairs': PAIRS}
  right, found = claim_cases.falls('realhf', name, SMALL, **given)
  assert wrong in right.expected and found.measured != right.measured


def test_every_device_and_the_formula_are_compared(run, monkeypatch):
  check = lambda: claims_reallocate.bytes_are_least(
    run, pairs=PAIRS, within=0.01
  )
  assert check().measured == '1 +-0'
  real = reallocate.received

  def one_more(tree, shardings):
    found = real(tree, shardings)
    first = min(found, key=lambda d: d.id)
    return found | {first: int(found[first] * 1.02)}

  with monkeypatch.context() as patch:
    patch.setattr(reallocate, 'received', one_more)
    assert not check().passed
  # What passes `send` by is refused.
  around = reallocate._new_shards

  def unseen(plan, there):
    jax.device_put(next(iter(there.values())), jax.devices()[7])
    return around(plan, there)

  monkeypatch.setattr(reallocate, '_new_shards', unseen)
  with pytest.raises(jax.errors.JaxRuntimeError, match='Disallowed'):
    check()


def test_cost_is_a_ratio(run, monkeypatch):
  def times(ways, *given):
    assert [ways[name]() for name in ('disk', 'memory')] == [None, None]
    return {'disk': [2.0, 9.0, 5.0], 'memory': [1.0, 1.0, 2.0]}

  monkeypatch.setattr(bench_measure, 'interleave', times)
  check = lambda at_least: claims_reallocate.cost(
    run, pairs=PAIRS[:1], rounds=3, at_least=at_least
  )
  assert check(2.5).passed and '2.0 2.5 9.0' in check(2.5).caveat
  assert not check(2.6).passed
