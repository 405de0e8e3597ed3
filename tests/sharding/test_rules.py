"""Logical names -> specs: what each preset shards, and what it refuses."""

import math
import re

from jax.sharding import PartitionSpec as P
import pytest
import support

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules

SIZES = dict(replica=1, stage=1, data=2, fsdp=2, context=1, tensor=2)
ROWS, MATRIX = ('batch', 'length', 'hidden'), ('embed', 'mlp')


@pytest.mark.parametrize(
  'name, rows, matrix, down, table',
  [
    ('replicated', P(None, None, None), P(None, None), P(None, None),
     P(None, None)),
    ('data', P(('data', 'fsdp'), None, None), P(None, None), P(None, None),
     P(None, None)),
    ('fsdp', P(('data', 'fsdp'), None, None), P('fsdp', None), P(None, 'fsdp'),
     P(None, 'fsdp')),
    ('tensor', P(('data', 'fsdp'), None, None), P(None, 'tensor'),
     P('tensor', None), P('tensor', None)),
    ('fsdp_tensor', P(('data', 'fsdp'), None, None), P('fsdp', 'tensor'),
     P('tensor', 'fsdp'), P('tensor', 'fsdp')),
  ],
)  # fmt: skip
def test_presets(name, rows, matrix, down, table):
  table_of = rules.preset(name)
  spec = lambda names: rules.spec(names, None, table_of, SIZES)
  assert spec(ROWS) == rows
  assert spec(MATRIX) == matrix
  assert spec(MATRIX[::-1]) == down
  assert spec(('vocab', 'embed')) == table
  assert spec(('norm',)) == P(None) and spec((None, 'layers')) == P(None, None)


def test_axes_of_size_one_are_dropped():
  spec = rules.spec(ROWS, (4, 3, 5), rules.preset('data'), dict(data=4, fsdp=1))
  assert spec == P('data', None, None)
  assert rules.spec(ROWS, (7, 3, 5), rules.preset('data'), {}) == P(*[None] * 3)


def test_an_unknown_logical_axis_is_an_error():
  with pytest.raises(ValueError, match="'head'.*Did you mean 'heads'"):
    rules.preset('data').axes('head')


def test_slots_are_not_for_rules_to_shard():
  with support.refused("mesh.rules='data slots=tensor'", 'context=N'):
    rules.preset('data slots=tensor')


@pytest.mark.parametrize(
  'names, shape, words',
  [
    (('batch',), (6,), ["'batch' has size 6", 'data=2 x fsdp=2', '4 shards',
                        'nearest that does is 3']),
    (('embed', 'mlp'), (8, 9), ["'mlp' has size 9", 'tensor=2', 'is 1.']),
    (('vocab',), (7,), ["'vocab' has size 7"]),
  ],
)  # fmt: skip
def test_what_does_not_divide_is_an_error(names, shape, words):
  with support.refused('this array: ', *words):
    rules.spec(names, shape, rules.preset('fsdp_tensor'), SIZES, 'this array')
  # The same names fit a shape that divides, and any where nothing is sharded.
  even = tuple(4 * n for n in shape)
  rules.spec(names, even, rules.preset('fsdp_tensor'), SIZES)
  rules.spec(names, shape, rules.preset('replicated'), SIZES)


def test_one_mesh_axis_serves_one_dimension():
  with support.refused("'tensor' serves both 'heads' and 'mlp'"):
    rules.spec(('heads', 'mlp'), None, rules.preset('tensor'), SIZES)
  twice = rules.preset('fsdp_tensor mlp=fsdp')
  with support.refused('layers/mlp/up', "'fsdp' serves both 'embed' and 'mlp'"):
    rules.spec(MATRIX, (8, 8), twice, SIZES, 'layers/mlp/up')
  rules.spec(MATRIX, (8, 8), twice, SIZES | dict(fsdp=1))


def test_an_idle_mesh_axis_is_an_error():
  for name, sizes, axis in (
    ('data', dict(data=4, tensor=2), 'tensor=2'),
    ('fsdp_tensor layers= vocab=tensor', dict(data=4, stage=2), 'stage=2'),
    ('fsdp_tensor batch=data+fsdp', dict(data=4, replica=2), 'replica=2'),
  ):
    with support.refused(f'mesh axis {axis}', repr(name)):
      rules.preset(name).check_used(sizes)
  rules.preset('fsdp_tensor').check_used(SIZES)
  rules.preset('replicated').check_used(dict(data=8))  # asked for by name


def test_a_preset_may_be_changed():
  base = rules.preset('fsdp_tensor')
  assert rules.preset(' fsdp_tensor ') is base
  found = rules.preset('fsdp_tensor vocab=tensor+fsdp mlp=')
  assert found.axes('vocab') == ('tensor', 'fsdp') and found.axes('mlp') == ()
  assert found.name == 'fsdp_tensor vocab=tensor+fsdp mlp='
  others = set(rules.LOGICAL) - {'vocab', 'mlp'}
  assert all(found.axes(a) == base.axes(a) for a in others)
  assert base.axes('mlp') == ('tensor',)  # the preset itself is as it was


def test_the_example_of_a_change_can_be_used():
  (text,) = re.findall("'(.+)'", rules.preset.__doc__)
  made = rules.preset(text)
  for names in (('vocab', 'embed'), MATRIX, ('batch', 'length', 'vocab')):
    rules.spec(names, None, made, SIZES)
  made.check_used(SIZES)


@pytest.mark.parametrize(
  'text, words',
  [
    ('', ['is not one of replicated, data']),
    ('tensr', ['fsdp_tensor', "Did you mean 'tensor'?"]),
    ('fsdp_tensor vocb=tensor',
     ["'vocb' is not a logical axis", 'residual_length', "mean 'vocab'?"]),
    ('fsdp_tensor vocab=tensr',
     ["'tensr' is not a mesh axis", 'context', "mean 'tensor'?"]),
    ('fsdp_tensor mlp', ["'mlp' names no mesh axis", 'or mlp= to']),
    ('fsdp_tensor vocab=tensor,fsdp', ["'tensor,fsdp' is not a mesh axis"]),
    ('fsdp_tensor heads= head_dim=tensor', ['scores sum', 'shard heads']),
  ],
)  # fmt: skip
def test_a_change_that_names_no_axis(text, words):
  with support.refused(f'mesh.rules={text!r}', *words):
    rules.preset(text)


def of(kv_heads=8, sizes=SIZES, **mesh):
  return rules.of(schema.Mesh(**mesh), sizes, kv_heads)


RESIDUAL = ('batch', 'residual_length', 'hidden')


def test_residuals_are_split_along_the_length():
  """Over what splits the mlp; inside a sublayer the length is whole there."""
  sizes = SIZES | dict(context=2)
  spec = lambda names, **mesh: rules.spec(names, None, of(**mesh), sizes)
  rows = ('data', 'fsdp')
  assert spec(RESIDUAL) == P(rows, ('context', 'tensor'), None)
  assert spec(ROWS) == P(rows, 'context', None)
  assert spec(RESIDUAL, sequence=False) == spec(ROWS)
  assert spec(RESIDUAL, rules='data') == spec(ROWS)
  assert spec(RESIDUAL, rules='replicated') == P(None, None, None)


def test_kv_heads_that_do_not_divide_are_on_every_shard():
  four = SIZES | dict(tensor=4)
  for kv_heads, sizes, axes in (
    (8, four, ('tensor',)),
    (4, four, ('tensor',)),
    (2, four, ()),
    (3, SIZES, ()),  # 6 do
    (6, SIZES, ('tensor',)),
    (1, {}, ('tensor',)),  # a mesh axis of size 1 carries nothing anyway
  ):
    made = of(kv_heads, sizes)
    assert made.axes('kv_heads') == axes, (kv_heads, sizes)
    assert made.axes('heads') == ('tensor',)
  assert rules.preset('fsdp_tensor').axes('kv_heads') == ('tensor',)


@pytest.mark.parametrize('zero', [0, 1, 2, 3])
def test_only_stage_3_shards_parameters_over_data(zero):
  made = of(zero=zero)
  assert made.zero == zero
  spec = rules.spec(MATRIX, (8, 8), made, SIZES)
  assert spec == P(('fsdp', 'data') if zero == 3 else 'fsdp', 'tensor')
  # Activations are what they were, and so is the preset.
  assert rules.spec(ROWS, None, made, SIZES) == P(('data', 'fsdp'), None, None)
  assert rules.preset('fsdp_tensor').axes('embed') == ('fsdp',)
  own = of(zero=zero, rules='fsdp embed=data+fsdp')
  assert own.axes('embed') == ('data', 'fsdp')


@pytest.mark.parametrize('name', ['data', 'tensor', 'replicated'])
def test_stage_3_needs_rules_that_shard_the_width(name):
  with support.refused('mesh.zero=3', repr(name)):
    of(rules=name, zero=3)
  assert of(rules=name, zero=2).zero == 2


STACK = ('layers', 'embed', 'mlp')


@pytest.mark.parametrize(
  'names, shape, sizes, rule, want',
  [
    # The first that divides: with the depth, whole matrices.
    (STACK, (4, 8, 12), SIZES, 'fsdp_tensor', P('data', 'fsdp', 'tensor')),
    # Below what splits it already.
    (STACK, (3, 8, 12), SIZES, 'fsdp_tensor',
     P(None, ('fsdp', 'data'), 'tensor')),
    (STACK, (3, 8, 12), dict(data=4), 'data', P(None, 'data', None)),
    (STACK, (3, 6, 12), SIZES, 'fsdp_tensor',
     P(None, 'fsdp', ('tensor', 'data'))),
    (('vocab', 'embed'), (16, 6), SIZES, 'fsdp_tensor',
     P(('tensor', 'data'), 'fsdp')),
    (('heads', 'head_dim', 'norm'), (5, 6, 8), dict(data=2), 'fsdp_tensor',
     P(None, 'data', None)),
    (('heads', 'head_dim', 'norm'), (5, 7, 8), dict(data=2), 'fsdp_tensor',
     P(None, None, 'data')),
    (('norm',), (8,), dict(data=8), 'data', P('data')),
    # Nothing divides: as the parameter. Nothing to divide: likewise.
    (STACK, (3, 6, 10), SIZES, 'fsdp_tensor', None),
    (('norm',), (7,), SIZES, 'fsdp_tensor', None),
    ((), (), SIZES, 'fsdp_tensor', None),
    (STACK, (8, 8, 8), dict(fsdp=2, tensor=2), 'fsdp_tensor', None),
    (STACK, (8, 8, 8), SIZES, 'fsdp embed=data', None),
  ],
)  # fmt: skip
def test_what_mirrors_a_parameter_is_sharded_over_data(
  names, shape, sizes, rule, want
):
  for zero in (0, 1, 2):
    made = of(rules=rule, zero=zero, sizes=sizes)
    own = rules.spec(names, shape, made, sizes)
    for stage in (rules.OPTIMIZER, rules.GRADIENTS, rules.SUMS):
      found = rules.stored(names, shape, made, sizes, stage)
      assert found == (want if want and zero >= stage else own), (zero, stage)
      # It can be laid out: every dimension divides, every axis once.
      axes = [a if isinstance(a, tuple) else (a,) for a in found]
      used = [a for dim in axes for a in dim if a]
      assert len(used) == len(set(used))
      for n, dim in zip(shape, axes, strict=True):
        assert n % math.prod(sizes[a] for a in dim if a) == 0


def test_stage_3_has_nothing_left_to_shard_where_the_width_is():
  made = of(zero=3)
  assert (rules.OPTIMIZER, rules.GRADIENTS, rules.SUMS) == (1, 1, 2)
  matrix = rules.stored(STACK, (4, 8, 12), made, SIZES, rules.OPTIMIZER)
  assert matrix == P(None, ('fsdp', 'data'), 'tensor')
  # A norm has no width that is sharded; its state is.
  norm = rules.stored(('layers', 'norm'), (4, 8), made, SIZES, rules.OPTIMIZER)
  assert norm == P('data', None)
  assert rules.spec(('layers', 'norm'), (4, 8), made, SIZES) == P(None, None)


def test_every_logical_axis_of_a_preset_exists():
  for made in rules.PRESETS.values():
    assert set(made.table) <= set(rules.LOGICAL)
    assert {a for axes in made.table.values() for a in axes} <= set(
      mesh_lib.AXES
    )


def test_the_automatic_rules_take_no_changes():
  with support.refused("mesh.rules='auto vocab='", 'takes no changes'):
    rules.preset('auto vocab=')
