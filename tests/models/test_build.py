"""Numbers that do not fit together: one line, before anything is compiled."""

import jax
from jax.sharding import PartitionSpec as P
import pytest

from paraxis.configs import errors
from paraxis.configs import schema
from paraxis.models import build

SMALL = dict(
  vocab_size=32, d_model=16, num_heads=8, num_kv_heads=4, head_dim=2, d_ff=24,
  num_layers=2,
)  # fmt: skip


def config(rules='fsdp_tensor', **fields):
  return schema.Config(
    mesh=schema.Mesh(rules=rules), model=schema.Model(**SMALL | fields)
  )


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(d_model=15, head_dim=0),
     ['model.d_model=15', 'model.num_heads=8', 'model.head_dim']),
    (dict(num_kv_heads=3), ['model.num_heads=8', 'model.num_kv_heads=3']),
    (dict(head_dim=3), ['model.head_dim=3 is odd']),
    (dict(d_model=24, head_dim=0, num_kv_heads=0), ['head_dim=3 is odd']),
    (dict(pattern=''), ['model.pattern is empty']),
    (dict(pattern='FX'), ["model.pattern='FX'", "'X' is not", 'F, W, N']),
    (dict(pattern='FW'), ["model.pattern='FW'", 'model.window=0']),
    (dict(position='learned'), ['model.max_positions']),
  ],
)  # fmt: skip
def test_a_model_that_contradicts_itself(fields, words):
  with pytest.raises(errors.UserError) as e:
    build.build(config(**fields))
  assert '\n' not in str(e.value)
  for word in words:
    assert word in str(e.value)


def test_a_position_table_bounds_the_length():
  model = schema.Model(**SMALL, position='learned', max_positions=16)
  build.check_length(model, 16, 'data.sequence_length')
  with pytest.raises(errors.UserError) as e:
    build.check_length(model, 17, 'data.sequence_length')
  for word in ('data.sequence_length is 17', 'model.max_positions=16'):
    assert word in str(e.value)
  build.check_length(schema.Model(**SMALL), 10**6, 'anything')


@pytest.mark.parametrize(
  'mesh, fields, words',
  [
    ('tensor=8', dict(num_kv_heads=2),
     ['layers/attention/key', "'kv_heads' has size 2", 'tensor=8',
      '8 shards', 'nearest that does is 2']),
    ('tensor=8', dict(num_heads=6, num_kv_heads=6),
     ["'kv_heads' has size 6", 'tensor=8', 'nearest that does is 6']),
    ('fsdp=8', dict(d_model=20), ["'embed' has size 20", 'fsdp=8', 'is 5.']),
    ('tensor=8', dict(num_kv_heads=8, d_ff=36),
     ["layers/mlp/", "'mlp' has size 36", 'is 6.']),
    ('data=2,tensor=4', dict(vocab_size=31),
     ["embedding: 'vocab' has size 31", 'tensor=4', 'is 1.']),
  ],
)  # fmt: skip
def test_a_size_that_its_mesh_axes_do_not_divide(mesh, fields, words):
  with pytest.raises(errors.UserError) as e:
    build.build(config(**fields), mesh)
  assert '\n' not in str(e.value)
  for word in words:
    assert word in str(e.value)


@pytest.mark.parametrize(
  'mesh, rules, words',
  [
    ('data=2', 'data', ['2 places for 8 devices', 'data=8']),
    ('tensr=8', 'data', ["Did you mean 'tensor'?"]),
    ('data=2,tensor=4', 'data', ['mesh axis tensor=4', "'data'"]),
    ('stage=8', 'fsdp_tensor', ['mesh axis stage=8']),
    ('data=8', 'dat', ["mesh.rules='dat'", "Did you mean 'data'?"]),
  ],
)
def test_a_mesh_that_does_not_fit(mesh, rules, words):
  with pytest.raises(errors.UserError) as e:
    build.build(config(rules), mesh)
  for word in words:
    assert word in str(e.value)


def test_rows_are_spread_over_the_batch_shards():
  built = build.build(config(), 'data=2,fsdp=2,tensor=2')
  build.check_rows(8, built, 'train.batch_size')
  with pytest.raises(errors.UserError) as e:
    build.check_rows(6, built, 'train.batch_size')
  for word in ('train.batch_size', "'batch' has size 6", 'data=2 x fsdp=2'):
    assert word in str(e.value)


def test_built_names_every_layout():
  built = build.build(
    config(num_kv_heads=8, tied_embedding=False), 'fsdp=2,tensor=4'
  )
  spec = lambda p: built.params[p].sharding.spec
  assert built.params['layers/attention/query'].shape == (2, 16, 8, 2)
  assert spec('layers/attention/query') == P(None, 'fsdp', 'tensor', None)
  assert spec('layers/attention/output') == P(None, 'tensor', None, 'fsdp')
  assert spec('layers/mlp/down') == P(None, 'tensor', 'fsdp')
  assert spec('embedding') == spec('head') == P('tensor', 'fsdp')
  assert spec('norm/scale') == P(None)
  assert set(built.params) == set(built.model.axes)
  assert all(v.dtype == 'float32' for v in built.params.values())


def test_the_command_line_mesh_replaces_the_whole_section():
  given = schema.Config(mesh=schema.Mesh(data=8, rules='fsdp'))
  assert build.mesh_sizes(given)['data'] == 8
  assert build.mesh_sizes(given, 'fsdp=8') == {'fsdp': 8}
  one = build.build(config(), 'data=1', devices=jax.devices()[:1])
  assert one.mesh.size == 1
  assert all(
    v.sharding.spec == P(*[None] * len(v.shape)) for v in one.params.values()
  )


@pytest.mark.parametrize(
  'fields, text',
  [
    (dict(dtype='float64'), 'JAX_ENABLE_X64'),
    (dict(attention='flash9'), 'flash9'),
    (
      dict(rope_scaling='llama3', rope_low_frequency=4.0),
      'rope_low_frequency=4.0 < model.rope_high_frequency=4.0',
    ),
    (
      dict(rope_scaling='yarn', rope_theta=1.0),
      'rope_theta=1.0',
    ),
  ],
)
def test_what_would_fail_later(fields, text):
  with pytest.raises(errors.UserError) as e:
    build.check_model(schema.Model(**fields))
  assert text in str(e.value)
