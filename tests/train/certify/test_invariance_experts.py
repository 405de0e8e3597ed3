"""The invariance test for mixtures of experts: no layout changes the numbers.

Every pair of options of meshes, regions, routers, balancing and schedules, on 8
virtual devices against one, in float64: loss and its terms, every gradient,
counts of the experts and one update agree within 1e-9.
"""

import functools

import covering
import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.sharding import mesh as mesh_lib

ROUTERS = {
  'olmoe': dict(
    normalise=False, router_z=0.01, mlp_bias=True, router_bias=True
  ),
  'deepseek': dict(
    scores='sigmoid', groups=4, top_groups=2, bias_rate=0.01, scale=1.5
  ),
}
BESIDE = {
  'nothing': {},
  'shared': dict(shared=1, shared_gate=True),
  'residual': dict(residual=True),
}
FACTORS = dict(
  mesh=(
    'data=2,tensor=4', 'fsdp=2,context=2,tensor=2', 'data=2,context=2,tensor=2',
    'stage=2,context=2,tensor=2', 'stage=2,data=2,tensor=2',
  ),
  region=('', 'tensor', 'context+tensor', 'data+tensor'),
  schedule=('none', 'gpipe', 'interleaved', 'zero_bubble'),
  router=tuple(ROUTERS),
  beside=tuple(BESIDE),
  pattern=('E', 'DE', 'EP'),
  scope=('step', 'sequence', 'microbatch', 'running'),
  hierarchical=(False, True),
  hot=(0, 2),
  collectives=('annotated', 'explicit'),
  microbatches=(1, 2),
)  # fmt: skip
# Of these four options, which one device needs too, every two meet in twelve
# models: fewer runs on one device, and no pair fewer (tested below).
MODEL = ('pattern', 'scope', 'beside', 'router')
MODELS = {
  (pattern, scope, FACTORS['beside'][(i + j) % 3], tuple(ROUTERS)[(i + j) % 2])
  for i, pattern in enumerate(FACTORS['pattern'])
  for j, scope in enumerate(FACTORS['scope'])
}
RULES = tuple(
  covering.Rule(*rule)
  for rule in (
    (
      ('mesh', 'region'),
      lambda mesh, region: all(f'{a}=' in mesh for a in region.split('+')),
    ),
    (
      ('mesh', 'schedule'),
      lambda mesh, schedule: ('stage' in mesh) == (schedule != 'none'),
    ),
    # On stages there is one way.
    (
      ('schedule', 'collectives'),
      lambda schedule, how: schedule == 'none' or how == 'annotated',
    ),
    (('region', 'hierarchical'), lambda region, h: '+' in region or not h),
    (('region', 'hot'), lambda region, hot: region or not hot),
    (MODEL, lambda *values: values in MODELS),
    # Of several microbatches each counts its own loads: other numbers, which
    # verify says (test_verify.py).
    (
      ('scope', 'schedule', 'microbatches'),
      lambda scope, schedule, n: (
        scope != 'microbatch' or (schedule == 'none' and n == 1)
      ),
    ),
  )
)


@functools.cache
def cases():
  return covering.cover(covering.Space(FACTORS, RULES), 2)


def config_of(case):
  """schema.Config of a case: 8 experts of width 16, 16 rows of 32 tokens."""
  interleaved = case['schedule'] == 'interleaved'
  pipeline = schema.Pipeline()
  if case['schedule'] != 'none':
    pipeline = schema.Pipeline(
      schedule=case['schedule'], chunks=1 + interleaved
    )
  # At most 4 chunks of a unit of the pattern: few depths, few references.
  units = 4 if interleaved or case['pattern'] == 'E' else 2
  experts = model_schema.Experts(
    count=8, d_ff=16, region=case['region'], pattern=case['pattern'],
    balance_scope=case['scope'], balance=0.1, hot=case['hot'],
    hierarchical=case['hierarchical'], **ROUTERS[case['router']],
    **BESIDE[case['beside']],
  )  # fmt: skip
  return schema.Config(
    mesh=schema.Mesh(
      **mesh_lib.parse(case['mesh']), collectives=case['collectives']
    ),
    pipeline=pipeline,
    model=schema.Model(
      vocab_size=64, d_model=16, num_heads=4, head_dim=4, d_ff=32,
      num_layers=units * len(case['pattern']), attention_block=16,
      dtype='float64', param_dtype='float64', experts=experts,
    ),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
    train=schema.Train(batch_size=16, microbatches=case['microbatches']),
  )  # fmt: skip


def name_of(case):
  shown = {n: v for n, v in case.items() if v not in (False, 0, '', 'none')}
  return '.'.join(f'{n}={v}' for n, v in shown.items())


def model_of(case):
  return '.'.join(case[name] for name in MODEL)


@pytest.mark.array(5, 20)
@pytest.mark.parametrize('case', covering.params(cases(), name_of, model_of))
def test_equals_one_device(case):
  rows = support.certify(config_of(case))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


def test_the_array_covers_every_pair():
  space = covering.Space(FACTORS, RULES)
  found = set().union(*map(covering.pairs_of, cases()))
  assert found == space.pairs() and len(cases()) <= 30
  assert len(set(map(model_of, cases()))) <= 12
  any_model = [rule for rule in RULES if rule.names != MODEL]
  assert space.pairs() == covering.Space(FACTORS, any_model).pairs()
  for name, values in FACTORS.items():
    assert {case[name] for case in cases()} == set(values), name


def test_counts_that_are_not_summed_are_seen(monkeypatch):
  case = next(
    c for c in cases()
    if c['scope'] == 'microbatch' and c['mesh'].startswith('data')
  )  # fmt: skip
  monkeypatch.setattr(jax.lax, 'psum', lambda x, *a, **k: x)
  _, gradients, *_ = support.certify(config_of(case))
  assert not gradients.passed
