"""Numbers that do not fit together: one line, before anything is compiled.

Those that need no more than a flag: tests/train/test_bad_input.py.
"""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers
from paraxis.configs.base import model as model_schema
from paraxis.models import build
from paraxis.models import checks as model_checks

SMALL = dict(
  vocab_size=32, d_model=16, num_heads=8, num_kv_heads=4, head_dim=2, d_ff=24,
  num_layers=2,
)  # fmt: skip


def config(rules='fsdp_tensor', mesh=(), length=256, memory='', **fields):
  return schema.Config(
    train=schema.Train(memory=memory),
    mesh=schema.Mesh(rules=rules, **dict(mesh)),
    model=schema.Model(**SMALL | fields),
    data=schema.Data(sequence_length=length),
  )


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(head_dim=3), ['model.head_dim=3 is odd']),
    (dict(d_model=24, head_dim=0, num_kv_heads=0), ['head_dim=3 is odd']),
    (dict(pattern=''), ['model.pattern is empty']),
    (dict(pattern='FX'), ["model.pattern='FX'", "'X' is no mixer", 'F, W, K',
                           'and * for F']),
    (dict(position='learned'), ['model.max_positions']),
    (dict(dtype='float64'), ['JAX_ENABLE_X64']),
    (dict(attention='flash9'), ['flash9']),
    (dict(rope_scaling='llama3', rope_low_frequency=4.0),
     ['rope_low_frequency=4.0 < model.rope_high_frequency=4.0']),
    (dict(rope_scaling='yarn', rope_theta=1.0), ['rope_theta=1.0']),
    (dict(rope_factor=4.0), ['rope_factor=4.0', "rope_scaling='none'"]),
    (dict(rope_scaling='longrope', rope_short_factors='1,2,3'),
     ['rope_short_factors has 3 factors', 'pairs']),
    (dict(rope_scaling='longrope', rope_short_factors='1,0'),
     ["factors '1,0' are no numbers above 0"]),
  ],
)  # fmt: skip
def test_a_model_that_contradicts_itself(fields, words):
  with support.refused(*words):
    build.build(config(**fields))


def test_a_position_table_bounds_the_length():
  model = schema.Model(**SMALL, position='learned', max_positions=16)
  model_checks.check_length(model, 16, 'data.sequence_length')
  with support.refused('data.sequence_length is 17', 'model.max_positions=16'):
    model_checks.check_length(model, 17, 'data.sequence_length')
  model_checks.check_length(schema.Model(**SMALL), 10**6, 'anything')


def test_longrope_bounds_the_length():
  fields = dict(rope_scaling='longrope', rope_original_length=16)
  model = schema.Model(**SMALL, **fields)
  model_checks.check_length(model, 16, 'data.sequence_length')
  with support.refused('data.sequence_length is 17', 'model.rope_long=True'):
    model_checks.check_length(model, 17, 'data.sequence_length')
  long = schema.Model(**SMALL, **fields, rope_long=True)
  model_checks.check_length(long, 17, 'data.sequence_length')


def test_tokens_are_spread_over_the_length_shards():
  """Between sublayers over context and tensor, unless mesh.sequence=False."""
  mesh = 'data=2,context=2,tensor=2'
  built = build.build(config(), mesh)
  build.check_tokens(8, built, 'data.sequence_length=8')
  with support.refused(
    'data.sequence_length=6', 'context=2 x tensor=2', '4 shards'
  ):
    build.check_tokens(6, built, 'data.sequence_length=6')
  whole = build.build(config(mesh=dict(sequence=False)), mesh)
  build.check_tokens(6, whole, 'data.sequence_length=6')
  with pytest.raises(errors.UserError, match="'length' has size 7"):
    build.check_tokens(7, whole, 'data.sequence_length=7')


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


def test_stage_3_and_few_kv_heads_in_the_layouts():
  built = build.build(
    config(num_kv_heads=2, mesh=dict(zero=3)), 'data=2,fsdp=1,tensor=4'
  )
  spec = lambda p: built.params[p].sharding.spec
  assert spec('layers/attention/query') == P(None, 'data', 'tensor', None)
  assert spec('layers/attention/key') == P(None, 'data', None, None)
  assert spec('embedding') == P('tensor', 'data')
  assert built.choices.zero == built.rules.zero == 3


def test_a_layout_reaches_the_model():
  rings = lambda text, mesh='tensor=8', **fields: (
    build.build(
      config(mesh=dict(collective_matmul=text), num_kv_heads=8, **fields), mesh
    ).model.layout
  )
  assert rings('') == build.build(config(), 'data=8').model.layout
  assert rings('down, qkv').rings == ('down', 'qkv')
  assert rings('qkv,all').rings == build.RINGS
  plan = build.build(
    config(mesh=dict(context_form='usp'), pattern='FW', window=8),
    'context=4,tensor=2',
  ).model.layout.context
  assert (plan.form, plan.axis, plan.n) == ('usp', 'context', 4)
  assert plan.layout == 'zigzag'
  windows = build.build(config(pattern='W', window=8), 'context=8')
  assert windows.model.layout.context.layout == 'contiguous'


def test_a_mesh_without_devices():
  """512 places: the layout of every parameter, and of what a step gives."""
  built = build.build(
    config(num_heads=64, num_kv_heads=64, d_ff=128, vocab_size=128),
    'data=8,tensor=64',
    abstract=True,
  )
  assert built.mesh.size == 512
  up = built.params['layers/mlp/up'].sharding
  assert up.spec == P(None, None, 'tensor') and up.mesh.size == 512
  with build.use(built):
    shapes = jax.eval_shape(lambda: built.model.init(jax.random.key(0)))
    assert jax.sharding.get_abstract_mesh().size == 512
  assert shapes['layers/mlp/up'].sharding.spec == up.spec
  with pytest.raises(errors.UserError, match='every size must be given'):
    build.build(config(), 'data=-1', abstract=True)


EXPLICIT = dict(collectives='explicit')


@pytest.mark.parametrize(
  'mesh, rules, choices, words',
  [
    # A mesh axis twice in activations.
    ('data=8', 'data mlp=data', dict(sequence=False), ["'data' serves both"]),
    ('data=8', 'data vocab=data', dict(sequence=False), ["'data' serves both"]),
    ('data=4,context=2', 'fsdp_tensor length=data+context', {}, ['length']),
    ('replica=2,data=2,context=2',
     'fsdp_tensor batch=data length=replica+context', {}, ['length']),
    # Rings.
    ('data=2,tensor=4', 'fsdp_tensor', dict(collective_matmul='qkv,dwn'),
     ["mesh.collective_matmul='qkv,dwn'", "'dwn'", "mean 'down'?", 'gate_up']),
    ('tensor=8', 'fsdp_tensor', dict(collective_matmul='all', sequence=False),
     ["mesh.collective_matmul='all'", 'mesh.sequence=True']),
    # Collectives of our own: every axis splits tokens.
    ('data=8', 'replicated', EXPLICIT, ["mesh.collectives='explicit'"]),
    ('data=2,fsdp=4', 'fsdp batch=data', EXPLICIT,
     ["mesh.collectives='explicit'", 'fsdp']),
    # Sequence shards scatter what heads and mlp sum.
    ('data=4,tensor=2', 'fsdp_tensor heads= kv_heads=', {}, ['mesh.sequence']),
    # Layers, which no axis but stage shares out.
    ('data=2,fsdp=4', 'fsdp layers=data', {},
     ['layers are over data', 'mesh.stage=1']),
    # Context.
    ('context=8', 'data', dict(context_inner=2), ['mesh.context_inner=2']),
    ('context=8', 'data', dict(context_form='usp', context_inner=3),
     ['mesh.context_inner=3', 'mesh.context=8']),
  ],
)  # fmt: skip
def test_a_layout_that_cannot_be(mesh, rules, choices, words):
  given = config(
    rules, choices, num_heads=4, num_kv_heads=4, d_model=20, head_dim=2,
    d_ff=24,
  )  # fmt: skip
  with support.refused(*words):
    build.build(given, mesh)


@pytest.mark.parametrize(
  'order, length, words',
  [
    ('zigzag', 24, ['24', 'context']),
    ('contiguous', 20, ['20', 'context']),
    ('striped', 20, ['20', 'context']),
  ],
)
def test_a_row_that_the_context_does_not_divide(order, length, words):
  choices = dict(context_order=order)
  with support.refused(*words):
    build.build(config('data', choices, length), 'context=8')
  build.build(config('data', choices, 32), 'context=8')


def test_the_command_line_mesh_replaces_the_whole_section():
  given = schema.Config(mesh=schema.Mesh(data=8, rules='fsdp'))
  assert build.mesh_sizes(given)['data'] == 8
  assert build.mesh_sizes(given, 'fsdp=8') == {'fsdp': 8}
  # What is not an axis stays.
  kept = build.build(config('fsdp', dict(zero=1)), 'data=2,fsdp=4')
  assert kept.rules.name == 'fsdp' and kept.rules.zero == 1
  one = build.build(config(), 'data=1', devices=jax.devices()[:1])
  assert one.mesh.size == 1
  assert all(
    v.sharding.spec == P(*[None] * len(v.shape)) for v in one.params.values()
  )


@pytest.mark.parametrize(
  'mesh, pipeline, fields, words',
  [
    ('stage=2,data=4', dict(schedule='interleaved', chunks=3, microbatches=5),
     dict(num_layers=6), ['interleaved', '5', '2']),
    ('stage=2,data=4', dict(schedule='one_f_one_b', chunks=2), {},
     ['one_f_one_b', 'chunks=2', 'interleaved']),
    ('stage=2,tensor=4', {}, dict(mesh=dict(sequence=False)),
     ['A pipeline (mesh.stage=2)', 'mesh.sequence=True']),
    ('stage=2,tensor=4', dict(schedule='zero_bubble'),
     dict(mesh=dict(collective_matmul='all')),
     ["mesh.collective_matmul='all'", 'zero_bubble']),
    ('stage=2,data=4', {}, dict(vocab_size=31), ["'vocab' has size 31"]),
    ('stage=2,data=4', {}, dict(rules='fsdp_tensor layers='),
     ['layers are over no axis', 'mesh.stage=2']),
    ('stage=2,data=4', {}, dict(rules='replicated'), ['over no axis']),
    ('stage=2,data=4', dict(skip_fraction=0.5), {},
     ['pipeline.skip_fraction=0.5', "pipeline.schedule='one_f_one_b'"]),
    ('stage=2,data=4', dict(schedule='skip', skip_fraction=0.5),
     dict(experts=model_schema.Experts(count=4)),
     ['pipeline.skip_fraction=0.5', 'model.experts.balance=0.01']),
    ('stage=2,data=4', dict(activations='store'),
     dict(memory='residual=offload'), ['offload', "'recompute'"]),
  ],
)  # fmt: skip
def test_a_pipeline_that_does_not_fit(mesh, pipeline, fields, words):
  made = config(**fields)
  made = dataclasses.replace(made, pipeline=schema.Pipeline(**pipeline))
  with support.refused(*words):
    build.build(made, mesh)


@pytest.mark.parametrize(
  'mesh, fields, words',
  [
    ('data=8', dict(count=4, top_k=5),
     ['model.experts.top_k=5', 'model.experts.count=4']),
    ('data=2,tensor=4', dict(count=6),
     ['model.experts.count=6', 'tensor=4 (4 ranks)', 'is 3.']),
    ('data=2,tensor=4', dict(count=8, region='tensr'),
     ["model.experts.region='tensr'", "Did you mean 'tensor'?"]),
    ('data=2,tensor=4', dict(count=8, region='tensor+tensor'), ['each once']),
    ('data=8', dict(count=8, groups=3), ['model.experts.groups=3']),
    ('data=8', dict(count=8, groups=4, top_groups=1, top_k=3),
     ['model.experts.top_groups=1', 'leave 2 experts']),
    ('data=8', dict(count=8, hot=9), ['model.experts.hot=9']),
    ('data=8', dict(count=8, shared=1, residual=True),
     ['model.experts.residual', 'model.experts.shared=1']),
    ('data=8', dict(count=8, shared_gate=True), ['model.experts.shared=0']),
    ('data=8', dict(count=8, pattern='EX'), ["'X' is not one of"]),
  ],
)  # fmt: skip
def test_experts_that_do_not_fit(mesh, fields, words):
  with support.refused(*words):
    build.build(config(experts=model_schema.Experts(**fields)), mesh)


def test_automatic_rules_are_those_by_hand():
  """In every mesh, for every name that the model has."""
  for mesh in (dict(data=2, tensor=4), dict(stage=2, tensor=2, data=2)):
    auto, hand = (
      build.build(config(rules, mesh, pattern='FS', num_layers=4))
      for rules in ('auto', 'tensor')
    )
    assert {p: x.sharding.spec for p, x in auto.params.items()} == {
      p: x.sharding.spec for p, x in hand.params.items()
    }


def test_automatic_rules_see_through_kernels_of_another_machine():
  """Which hide products from the trace."""
  fields = config(pattern='FG', gated_linear=mixers.GatedLinear(heads=4)).model
  named = dataclasses.replace(fields, attention='pallas_tpu', scan='pallas_tpu')
  found = [build.program_axes_of(model)[2] for model in (fields, named)]
  assert found[0] == found[1]


def test_automatic_rules_refuse_before_anything_is_compiled():
  with support.refused('mesh.rules=auto', 'by its 6', 'tensor=4'):
    build.build(
      config('auto', dict(data=2, tensor=4), num_heads=6, num_kv_heads=6)
    )


def test_automatic_rules_read_no_copies_of_a_row():
  given = config(
    'auto', dict(data=2, tensor=4), num_kv_heads=8, wiring='streams', streams=2
  )
  with support.refused('mesh.rules=auto', 'model.streams=2', 'name the rules'):
    build.build(given)
