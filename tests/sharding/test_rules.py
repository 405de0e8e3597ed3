"""Logical names -> specs: what each preset shards, and what it refuses."""

from jax.sharding import PartitionSpec as P
import pytest

from paraxis.configs import errors
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


def test_an_unknown_preset_is_an_error():
  with pytest.raises(errors.UserError) as e:
    rules.preset('tensr')
  assert 'fsdp_tensor' in str(e.value)
  assert "Did you mean 'tensor'?" in str(e.value)


def test_an_unknown_logical_axis_is_an_error():
  with pytest.raises(ValueError, match="'head'.*Did you mean 'heads'"):
    rules.preset('data').axes('head')


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
  with pytest.raises(errors.UserError) as e:
    rules.spec(names, shape, rules.preset('fsdp_tensor'), SIZES, 'this array')
  assert str(e.value).startswith('this array: ')
  for word in words:
    assert word in str(e.value)
  # The same names fit a shape that divides, and any where nothing is sharded.
  even = tuple(4 * n for n in shape)
  rules.spec(names, even, rules.preset('fsdp_tensor'), SIZES)
  rules.spec(names, shape, rules.preset('replicated'), SIZES)


def test_one_mesh_axis_serves_one_dimension():
  with pytest.raises(
    ValueError, match="'tensor' serves both 'heads' and 'mlp'"
  ):
    rules.spec(('heads', 'mlp'), None, rules.preset('tensor'), SIZES)


def test_an_idle_mesh_axis_is_an_error():
  for name, sizes, axis in (
    ('data', dict(data=4, tensor=2), 'tensor=2'),
    ('fsdp_tensor', dict(data=4, stage=2), 'stage=2'),
  ):
    with pytest.raises(errors.UserError) as e:
      rules.preset(name).check_used(sizes)
    assert f'mesh axis {axis}' in str(e.value) and repr(name) in str(e.value)
  rules.preset('fsdp_tensor').check_used(SIZES)
  rules.preset('replicated').check_used(dict(data=8))  # asked for by name
