"""Claims about Redco's rules hold, and fail when a rule is another."""

import types

import claim_cases
import jax
from jax.sharding import PartitionSpec as P
import pytest

from paraxis.sharding.planner import auto_rules
from paraxis.train.claims.layouts import auto_rules as claims_auto_rules

DOWN = 'layers/mlp/down'


@pytest.fixture
def run(monkeypatch):
  quick = {'xla_backend_optimization_level': 0}  # to compile
  monkeypatch.setattr(claims_auto_rules.compiling, 'options', lambda: quick)
  return claim_cases.small('redco', num_layers=1)


def test_specs_are_megatrons_until_one_is_another(run):
  """The second of the mlp's pair by columns too."""
  specs = auto_rules.specs
  wrong = lambda *given: specs(*given) | {DOWN: P(None, None, 'tensor')}
  right, found = claim_cases.holds_until(
    auto_rules,
    'specs',
    wrong,
    claims_auto_rules.specs_are_megatrons,
    run,
    size=2,
    families=dict(plain={}, gpt2=dict(position='learned', max_positions=8)),
  )
  assert right.measured == 'all but 1 of 19'
  assert '(gpt2 positions)' in right.caveat
  assert found.measured == 'all but 3 of 19' and f'plain {DOWN}' in found.caveat


def test_one_device(run):
  check = lambda within: claims_auto_rules.specs_equal_one_device(
    run, mesh='data=2,tensor=2', within=within
  )
  found = check(0.0)
  assert not found.passed and 0 < float(found.measured) < 1e-9
  assert not jax.config.jax_enable_x64


def test_reductions(run):
  check = lambda forward: claims_auto_rules.reductions_per_layer(
    run, size=2, forward=forward, step=4
  )
  right = check(2)
  assert right.passed and 'sum 7 arrays' in right.caveat
  assert right.caveat.endswith('other collectives: none')
  assert not check(1).passed


def test_fewest_bytes(run, monkeypatch):
  """With a price for each way to split instead of compiled programs."""
  price, tried = {'mlp/down': 3, 'attention/output': 1}, []

  def sent(config, specs, mesh_text, gradients):
    assert config.model.num_layers == 1 and gradients
    tried.append(specs)
    turned = [n for n in price if dict(specs)[f'layers/{n}'][-1] == 'tensor']
    total = 100 + sum(price[n] for n in turned)
    return [types.SimpleNamespace(total=total)]

  monkeypatch.setattr(claims_auto_rules, '_sent', sent)
  found = claims_auto_rules.fewest_bytes(run, size=4)
  assert len(set(tried)) == 16 + 1  # the last splits heads within
  # 100 bytes in four rules: those that turn neither of the two.
  assert found.passed and found.measured == 'rank 1, 1.04x'
  assert 'next 100, worst 104' in found.caveat
  price['mlp/down'] = -3
  found = claims_auto_rules.fewest_bytes(run, size=4)
  assert not found.passed and found.measured.startswith('rank 9')
  price.clear()  # all as many: the rules say nothing
  found = claims_auto_rules.fewest_bytes(run, size=4)
  assert not found.passed and found.measured == 'rank 1, 1.00x'


def test_every_mixer_is_as_by_hand_until_pairs_follow_the_alphabet(run):
  right, found = claim_cases.holds_until(
    auto_rules,
    'follow',
    lambda shapes, size, _: auto_rules.decide(shapes, size),
    claims_auto_rules.as_by_hand,
    run,
    size=2,
    models=dict(
      S=dict(pattern='S'),
      experts=dict(experts=dict(count=4)),
      gpt2=dict(position='learned', max_positions=8),
    ),
  )
  assert right.measured == 'all but 1 of 32'
  assert right.caveat.endswith('S 2, experts 3, gpt2 1')
  assert found.measured == 'all but 6 of 32'
