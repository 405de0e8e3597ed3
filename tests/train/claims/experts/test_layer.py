"""Claims about experts: they hold, measure what they say, and can fail."""

import jax
import numpy as np
import pytest

from paraxis.configs import deepspeed_moe
from paraxis.configs import demons_lbl
from paraxis.configs import hecate
from paraxis.configs import moe_parallel_folding
from paraxis.configs import schema
from paraxis.configs import se_moe
from paraxis.sharding.experts import dispatch as expert
from paraxis.train.claims import harness as claims
from paraxis.train.claims import papers
from paraxis.train.claims.experts import layer as claims_experts
from paraxis.train.claims.experts import loads as claims_expert_loads
from paraxis.train.claims.experts import messages as claims_expert_messages
from paraxis.train.claims.experts import training as claims_expert_training

CONFIGS = (
  deepspeed_moe, demons_lbl, hecate, moe_parallel_folding, se_moe
)  # fmt: skip
CUBE = 'data=2,context=2,tensor=2'


def run_of(module, folder='nowhere'):
  return claims.Run(schema.view(module.get_config()), folder, lambda line: None)


def given(module, check, nth=0):
  """Parameters of a config's claim by its check."""
  found = [
    c.parameters for c in papers.claims(module, '') if c.check.__name__ == check
  ]
  return found[nth]


@pytest.mark.parametrize('module', CONFIGS, ids=lambda m: m.__name__)
def test_the_configs_are_well_formed(module):
  found = papers.claims(module, module.__name__)
  assert len(found) >= 4 and found[0].kind == 'EQ'
  schema.view(module.get_config())


def test_a_wrong_exchange_is_found(monkeypatch):
  swap = expert._swap
  wrong = lambda x, plan: jax.numpy.roll(swap(x, plan), 1, 0)
  monkeypatch.setattr(expert, '_swap', wrong)
  with jax.enable_x64(True):
    plan = expert.DispatchPlan(8, ('tensor',))
    y, *_ = claims_experts._dispatched('tensor=2', plan, _drawn())
    w, x, ids, mix = _drawn()
  wanted = np.einsum('NK,ND,NKDF->NF', mix, x, w[ids])
  assert np.abs(y - wanted).max() > 0.1


def _drawn():
  return claims_experts._drawn(8)


def test_axis_by_axis_is_bitwise():
  outcome = claims_experts.axis_by_axis_is_bitwise(
    None, meshes=['data=2,context=2,tensor=2'], tokens=4
  )
  assert outcome.passed


def test_axis_by_axis_that_leaves_one_out_is_found(monkeypatch):
  def swap(x, plan):
    axes = plan.region[:1] if plan.hierarchical else plan.region
    return jax.lax.all_to_all(
      x.reshape(jax.lax.axis_size(axes), -1, *x.shape[1:]), axes, 0, 0,
      tiled=True,
    ).reshape(x.shape)  # fmt: skip

  monkeypatch.setattr(expert, '_swap', swap)
  outcome = claims_experts.axis_by_axis_is_bitwise(
    None, meshes=['context=2,tensor=2'], tokens=4
  )
  assert not outcome.passed and 'NOT equal' in outcome.caveat


def test_drops_are_counted(monkeypatch):
  how = dict(mesh='tensor=2', region='tensor', factors=[0.5], tokens=16)
  assert claims_experts.drops_are_counted(None, **how).passed
  slots = expert.slots
  # A dispatch with another capacity than the one it is told.
  monkeypatch.setattr(claims_experts.expert, 'slots', lambda *a: slots(*a) + 1)
  monkeypatch.setattr(claims_experts, '_served', lambda ids, n: ids >= 0)
  assert not claims_experts.drops_are_counted(None, **how).passed


def test_parameters_are_those_of_the_paper():
  how = given(deepspeed_moe, 'parameter_counts')
  run = run_of(deepspeed_moe)
  outcome = claims_experts.parameter_counts(run, **how)
  assert outcome.passed and '4,115,145,728' in outcome.caveat
  one = {'350M+PR-MoE-32/64': how['cases']['350M+PR-MoE-32/64']}
  fewer = {
    name: case | {'experts': case['experts'] | {'count': 28}}
    for name, case in one.items()
  }
  outcome = claims_experts.parameter_counts(run, cases=fewer, within=0.03)
  assert not outcome.passed and outcome.measured.startswith('equal')


def test_any_hot_set_and_one_program():
  outcome = claims_experts.any_hot_set(
    run_of(hecate), mesh='data=2,tensor=2', hot=2, sets=3, within=1e-9
  )
  assert outcome.passed and outcome.measured.endswith('1 program')


def test_exchanges_are_counted():
  run = run_of(moe_parallel_folding)
  how = dict(mesh=CUBE, regions=['data+tensor'], forward=2)
  outcome = claims_expert_messages.exchanges_per_layer(run, backward=2, **how)
  assert outcome.passed
  outcome = claims_expert_messages.exchanges_per_layer(run, backward=1, **how)
  assert not outcome.passed and outcome.measured == '2 + 2'


def test_folded_experts_receive_fewer_bytes():
  how = dict(mesh=CUBE, regions=['data', 'data+context+tensor'], counts=[16])
  run = run_of(moe_parallel_folding)
  folded = claims_expert_messages.folded_bytes
  assert folded(run, ratios=[[0.32]], within=0.01, **how).passed
  assert not folded(run, ratios=[[0.4]], within=0.01, **how).passed


def test_fewest_devices():
  how = given(moe_parallel_folding, 'least_devices')
  how |= dict(cases=how['cases'][:2], devices=how['devices'][:2])
  run = run_of(moe_parallel_folding)
  assert claims_expert_messages.least_devices(run, **how).passed
  how['devices'] = [[32, 8], [512, 64]]
  outcome = claims_expert_messages.least_devices(run, **how)
  assert not outcome.passed and outcome.measured == '64->8 512->64'


def test_axis_by_axis_sends_what_the_formula_says():
  run = run_of(se_moe)
  outcome = claims_expert_messages.axis_by_axis(
    run, mesh='data=2,tensor=4', region='data+tensor'
  )
  assert outcome.passed and 'peers 7 -> 4' in outcome.caveat


def test_hot_experts_cost_what_the_formula_says(monkeypatch):
  how = dict(mesh='data=2,tensor=4', hots=[0, 1])
  run = run_of(hecate)
  assert claims_expert_messages.hot_bytes(run, **how).passed
  monkeypatch.setattr(claims_expert_messages.moe, 'width', lambda config: 65)
  assert not claims_expert_messages.hot_bytes(run, **how).passed


def test_scopes_agree():
  how = given(demons_lbl, 'scopes_agree') | dict(equal=[['step', 4]])
  outcome = claims_expert_loads.scopes_agree(run_of(demons_lbl), **how)
  assert outcome.passed and 'step of 4' in outcome.caveat


def test_the_busiest_rank():
  loads = [6, 0, 1, 1]
  assert claims_expert_loads.busiest(loads, 2) == 6 / 4
  assert claims_expert_loads.busiest(loads, 2, [0]) == (1 + 1 + 3) / 4
  assert claims_expert_loads.busiest(loads, 2, [0, 2, 3]) == 1


def test_zipf_stragglers():
  how = given(hecate, 'zipf_stragglers')
  assert claims_expert_loads.zipf_stragglers(None, **how).passed
  how |= dict(ranks=4)
  assert not claims_expert_loads.zipf_stragglers(None, **how).passed


def test_devices_of_tasks():
  how = given(se_moe, 'elastic_tasks')
  assert claims_expert_loads.elastic_tasks(None, **how).passed
  with pytest.raises(ValueError, match='2 devices for 3 tasks'):
    claims_expert_loads.share_devices([1, 2, 3], 2)


def test_greedy_shares_that_are_not_best_are_found(monkeypatch):
  first = lambda loads, n: [n - len(loads) + 1] + [1] * (len(loads) - 1)
  monkeypatch.setattr(claims_expert_loads, 'share_devices', first)
  how = given(se_moe, 'elastic_tasks')
  assert not claims_expert_loads.elastic_tasks(None, **how).passed


def test_mutual_information():
  found = claims_expert_training.mutual_information
  apart = {'a': [[4, 0]], 'b': [[0, 9]]}
  assert found(apart) == 1.0  # one bit: a domain has an expert of its own
  assert found({'a': [[1, 3]], 'b': [[2, 6]]}) == 0.0
  p = 0.75
  entropy = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
  both = {'a': [[3, 1], [4, 0]], 'b': [[1, 3], [0, 4]]}
  assert found(both) == pytest.approx((1 - entropy + 1) / 2)
