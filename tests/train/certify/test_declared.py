"""What the README says of sizes equals what the rules make of every preset."""

import dataclasses
import math

import pytest

from paraxis.configs import schema
from paraxis.configs.base import model as model_schema
from paraxis.sharding import rules
from paraxis.train.certify import declared

EXPERTS = model_schema.Experts(count=8, region='data+tensor')
LEAVES = {
  'embedding': (('vocab', 'embed'), (64, 32)),
  'query': (('layers', 'embed', 'heads', 'head_dim'), (4, 32, 8, 4)),
  'key': (('layers', 'embed', 'kv_heads', 'head_dim'), (4, 32, 2, 4)),
  'up': (('layers', 'embed', 'mlp'), (4, 32, 64)),
  'norm': (('layers', 'norm'), (4, 32)),
  'odd': (('norm',), (33,)),
  'expert': (
    ('layers', 'experts', 'expert_embed', 'expert_mlp'), (4, 8, 32, 16),
  ),
  'step': ((), ()),
}  # fmt: skip
MESHES = [
  dict(tensor=2),
  dict(tensor=4),  # more than the kv heads
  dict(data=2, fsdp=2, tensor=2, zero=1),
  dict(data=2, fsdp=2, tensor=2, zero=2),
  dict(data=4, fsdp=2, zero=3),
  dict(data=2, stage=2, tensor=2, zero=2),
  dict(data=2, tensor=2, rules='tensor'),
  dict(data=2, fsdp=2, rules='fsdp', zero=1),
  dict(data=2, tensor=2, rules='replicated'),
  dict(data=2, stage=2, tensor=2, rules='auto', zero=1),
  dict(data=2, tensor=2, rules='fsdp_tensor vocab=tensor+data kv_heads='),
]


def by_rules(names, shape, config, zero):
  """Elements on a device as sharding/rules.py says."""
  mesh = config.mesh
  sizes = {a: getattr(mesh, a) for a in ('stage', 'data', 'fsdp', 'tensor')}
  found = rules.of(mesh, sizes, 2, config.model.experts.region)
  spec = rules.stored(names, shape, found, sizes, zero)
  axes = [a if isinstance(a, tuple) else (a,) for a in spec if a]
  shards = math.prod(sizes[a] for names in axes for a in names)
  return math.prod(shape) // shards


@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_equals_the_rules(mesh):
  config = schema.Config(
    mesh=schema.Mesh(**mesh),
    model=schema.Model(num_heads=8, num_kv_heads=2, experts=EXPERTS),
  )
  for name, (names, shape) in LEAVES.items():
    for zero in (1, 2, math.inf):
      found = declared.elements(names, shape, config, zero)
      assert found == by_rules(names, shape, config, zero), (name, zero)


def test_it_does_not_ask_the_rules(monkeypatch):
  """A rule that replicates kv heads, or anything, is not followed."""
  config = schema.Config(
    mesh=schema.Mesh(tensor=2),
    model=schema.Model(num_heads=8, num_kv_heads=2),
  )
  names, shape = LEAVES['key']
  wanted = declared.elements(names, shape, config, math.inf)
  assert wanted == math.prod(shape) // 2
  nothing = dataclasses.replace(rules.PRESETS['fsdp_tensor'], table={})
  monkeypatch.setitem(rules.PRESETS, 'fsdp_tensor', nothing)
  assert by_rules(names, shape, config, math.inf) == math.prod(shape)
  assert declared.elements(names, shape, config, math.inf) == wanted


def test_positions_of_the_automatic_rules_are_split_by_rows():
  axes = lambda rules: declared.axes(
    schema.Config(mesh=schema.Mesh(tensor=4, rules=rules))
  )
  assert axes('auto') == axes('tensor') | {'positions': ('tensor',)}
