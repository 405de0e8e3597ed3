"""Small configurations keep the structure of the full ones."""

import dataclasses
import math

import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mamba_fields
from paraxis.configs.base import model as model_schema
from paraxis.models import checks
from paraxis.models import depth
from paraxis.models import layer
from paraxis.train.certify import shrink

ONES = dict(replica=1, stage=1, data=1, fsdp=1, context=1, tensor=1)
# The shape of a llama of 70 billion parameters.
LARGE = dict(
  vocab_size=128256, d_model=8192, num_layers=80, num_heads=64,
  num_kv_heads=8, d_ff=28672,
)  # fmt: skip


def config_of(mesh=None, length=4096, **model):
  return schema.Config(
    mesh=schema.Mesh(**mesh or {}),
    model=schema.Model(**LARGE | model),
    data=schema.Data(sequence_length=length),
    train=schema.Train(batch_size=512, microbatches=4),
  )


def small(full, asked, devices=8):
  asked = ONES | asked
  sizes = shrink.mesh(asked, devices)
  return shrink.config(full, sizes, asked, 'float64')


@pytest.mark.parametrize(
  'asked, devices, wanted',
  [
    (dict(data=64, tensor=64), 8, dict(data=2, tensor=4)),
    (dict(data=64, fsdp=8, tensor=8), 8, dict(data=2, fsdp=2, tensor=2)),
    (dict(fsdp=512), 8, dict(fsdp=8)),
    (dict(data=3, tensor=6), 8, dict(data=3, tensor=2)),
    (dict(data=9, tensor=2), 8, dict(data=3, tensor=2)),
    (dict(data=2, tensor=3), 8, dict(data=2, tensor=3)),  # it fits
    (dict(data=8, fsdp=8, context=8, tensor=8), 16,
     dict(data=2, fsdp=2, context=2, tensor=2)),
  ],
)  # fmt: skip
def test_a_mesh_keeps_its_axes(asked, devices, wanted):
  assert shrink.mesh(ONES | asked, devices) == ONES | wanted


def test_a_mesh_of_too_many_axes():
  asked = ONES | dict(data=4, fsdp=4, context=4, tensor=4)
  with pytest.raises(errors.UserError, match='4 axes.*16 devices.*are 8'):
    shrink.mesh(asked, 8)


def test_sizes_shrink_and_divide():
  asked = dict(data=16, fsdp=8, tensor=8)
  shrink.check_fits(config_of(), ONES | asked)
  config = small(config_of(), asked)
  model = config.model
  assert (model.vocab_size, model.d_model, model.d_ff) == (64, 32, 64)
  assert (model.num_layers, config.data.sequence_length) == (2, 64)
  assert model.dtype == model.param_dtype == 'float64'
  assert config.train.batch_size == 16 and config.train.microbatches == 2
  assert config.optimizer == schema.Optimizer()
  assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (2, 2, 2)


def test_few_experts_are_enough_of_the_groups_that_are_chosen():
  own = model_schema.Experts(count=64, d_ff=64, groups=4, top_groups=1, top_k=6)
  config = small(config_of(experts=own), {})
  found = config.model.experts
  assert found.count // found.groups * found.top_groups >= found.top_k
  wide = dict(dtype='float32', param_dtype='float32')
  checks.check_model(dataclasses.replace(config.model, **wide))


def test_six_devices_divide_too():
  config = small(config_of(), dict(data=2, tensor=3), 6)
  model, train = config.model, config.train
  for size in (model.vocab_size, model.d_model, model.d_ff, train.batch_size):
    assert size % 6 == 0
  assert config.data.sequence_length % 12 == 0  # two runs a context shard


@pytest.mark.parametrize(
  'model, mesh, choices, wanted',
  [
    # Grouped queries: the same number of query heads per kv head.
    ({}, dict(data=8), {}, (16, 2)),
    # As many kv heads as shards stay that, and fewer stay fewer.
    ({}, dict(tensor=8), {}, (64, 8)),
    ({}, dict(tensor=64), {}, (16, 2)),
    (dict(num_kv_heads=4), dict(tensor=8), {}, (32, 2)),
    (dict(num_kv_heads=0), dict(tensor=2), {}, (4, 4)),
    # One kv head, and heads too few to lose any.
    (dict(num_heads=8, num_kv_heads=1), dict(data=8), {}, (8, 1)),
    (dict(num_heads=2, num_kv_heads=2), dict(data=8), {}, (2, 2)),
    # Heads that the context axis divides.
    (dict(num_kv_heads=0), dict(context=8), dict(context_form='ulysses'),
     (8, 8)),
    (dict(num_heads=4, num_kv_heads=0), dict(context=8),
     dict(context_form='usp'), (4, 4)),
  ],
)  # fmt: skip
def test_heads_keep_their_relations(model, mesh, choices, wanted):
  found = small(config_of(choices, **model), mesh).model
  assert (found.num_heads, found.num_kv_heads or found.num_heads) == wanted


def test_structure_is_kept():
  full = config_of(
    length=8192, pattern='WWF', num_layers=61, window=1024, position='learned',
    max_positions=8192, norm_placement='sandwich', tied_embedding=False,
    mlp_bias=True,
  )  # fmt: skip
  found = small(full, dict(data=8)).model
  # Two units and one layer after them, as 61 = 20 x 3 + 1.
  assert found.num_layers == 7 and found.pattern == 'WWF'
  assert 1 < found.window < 64 and found.max_positions == 64
  same = dataclasses.replace(
    full.model,
    **{
      name: getattr(found, name)
      for name in (
        'vocab_size', 'd_model', 'num_layers', 'num_heads', 'num_kv_heads',
        'head_dim', 'd_ff', 'window', 'max_positions', 'dtype', 'param_dtype',
        'attention_block',
      )
    },
  )  # fmt: skip
  assert found == same
  wide = dataclasses.replace(full.model, window=10_000)
  wide = dataclasses.replace(full, model=wide)
  assert small(wide, dict(data=8)).model.window >= 64  # as if there were none


@pytest.mark.parametrize('block, wanted', [(4096, 64), (512, 24), (0, 0)])
def test_a_block_is_the_row_or_less(block, wanted):
  found = small(config_of(visibility='block', block=block), dict(data=8))
  assert found.data.sequence_length == 64 and found.model.block == wanted


@pytest.mark.parametrize(
  'changes, mesh, choices, text',
  [
    (dict(num_heads=4, num_kv_heads=4), dict(tensor=8), {},
     "'heads' has size 4, which tensor=8 .* 8 divides: 8"),
    (dict(num_heads=12, num_kv_heads=4, head_dim=64), dict(context=8),
     dict(context_form='ulysses'), '12 .*context=8'),
    (dict(d_ff=433), dict(tensor=2), {}, "'mlp' has size 433, .* 432, 434"),
    (dict(d_model=100, head_dim=64), dict(fsdp=8), {},
     "'embed' has size 100, which fsdp=8 .* 96, 104"),
    (dict(vocab_size=50257), dict(tensor=8), {},
     "'vocab' has size 50257, which tensor=8 .* 50256, 50264"),
    (dict(length=100), dict(context=8), {},
     'data.sequence_length=100 .*mesh.context=8,.* 96 and 112'),
    (dict(d_model=96, head_dim=64), dict(data=64, fsdp=2), dict(zero=3),
     "'embed' has size 96, which fsdp=2 x data=64 .*: 128"),
    # What has no field of its own: heads of a mixer, experts, rows.
    (dict(pattern='M', mamba=mamba_fields.Mamba(heads=12)), dict(tensor=8), {},
     "'heads' has size 12, which tensor=8 "),
    (dict(experts=model_schema.Experts(count=12)), dict(tensor=8), {},
     r'model.experts.count=12 .* tensor=8 \(8 ranks'),
    ({}, dict(data=256), {}, "train.batch_size=512 .* size 128, .* data=256 "),
  ],
)  # fmt: skip
def test_a_full_configuration_that_does_not_fit(changes, mesh, choices, text):
  with pytest.raises(errors.UserError, match=text):
    shrink.check_fits(config_of(choices, **changes), ONES | mesh)


def test_a_field_that_no_layer_reads_may_have_any_size():
  heads = dict(num_heads=4, num_kv_heads=4, head_dim=64)
  full = config_of(pattern='M', mamba=mamba_fields.Mamba(heads=16), **heads)
  shrink.check_fits(full, ONES | dict(tensor=8))


def test_small_configurations_stay():
  full = schema.Config(
    model=schema.Model(vocab_size=48, d_model=16, num_layers=1, d_ff=24),
    data=schema.Data(sequence_length=32),
  )
  found = small(full, dict(data=8))
  assert (found.model.vocab_size, found.model.d_model) == (48, 16)
  assert (found.model.d_ff, found.model.num_layers) == (24, 1)
  assert found.data.sequence_length == 32
  assert math.prod(dataclasses.astuple(found.mesh)[:6]) == 8


def test_longrope_has_as_many_factors_as_a_small_head():
  factors = ','.join(map(str, range(1, 33)))
  model = schema.Model(
    head_dim=64, rope_scaling='longrope', rope_short_factors=factors,
    rope_long_factors=factors,
  )  # fmt: skip
  found = small(schema.Config(model=model), dict(data=8))
  assert found.model.rope_long_factors == '1,2'
  checks.check_fields(found.model)


def test_queries_grow_and_positions_are_offset_in_small_models_too():
  model = schema.Model(query_growth=0.1, rope_original_length=8192)
  found = small(schema.Config(model=model), dict(data=8))
  assert found.model.rope_original_length < found.data.sequence_length // 2
  model = schema.Model(
    position='learned', max_positions=2050, position_offset=2
  )
  found = small(schema.Config(model=model), dict(data=8))
  length = found.data.sequence_length
  checks.check_length(found.model, length, 'a row')
  assert found.model.max_positions == length + 2


def pipeline_of(layers, stage, chunks=1, microbatches=0, **model):
  """schema.Config and mesh sizes of a pipeline."""
  name = 'interleaved' if chunks > 1 else 'one_f_one_b'
  full = dataclasses.replace(
    config_of(num_layers=layers, **model),
    pipeline=schema.Pipeline(name, chunks, microbatches),
  )
  return full, ONES | dict(stage=stage)


@pytest.mark.parametrize(
  'layers, stage, chunks, pattern, wanted',
  [
    (80, 8, 1, 'F', (8, 8)),
    (80, 64, 1, 'F', (8, 9)),  # 80 layers on 64 stages are uneven
    (80, 16, 2, 'F', (8, 17)),
    (64, 16, 2, 'F', (8, 16)),
    (12, 8, 1, 'F', (8, 9)),
    (9, 8, 1, 'F', (8, 9)),
    (80, 4, 1, 'WF', (4, 8)),
    (84, 8, 1, 'WF', (8, 17)),  # 42 units on 8 stages
    (8, 2, 2, 'F', (2, 4)),
    (6, 2, 1, 'F', (2, 2)),
    (3, 2, 1, 'F', (2, 3)),
    # Uneven on the stages asked for, not on those there are.
    (12, 40, 1, 'F', None),
  ],
)
def test_layers_of_a_pipeline(layers, stage, chunks, pattern, wanted):
  """Every stage keeps a whole unit of each chunk; uneven stays uneven."""
  more = dict(window=1024) if 'W' in pattern else {}
  full, asked = pipeline_of(layers, stage, chunks, pattern=pattern, **more)
  if wanted is None:
    with pytest.raises(errors.UserError, match='num_layers=12 .*stage=40'):
      shrink.check_fits(full, asked)
    return
  shrink.check_fits(full, asked)
  sizes = shrink.mesh(asked, 8)
  found = shrink.config(full, sizes, asked, 'float64')
  assert (found.mesh.stage, found.model.num_layers) == wanted
  runs = lambda layers, stage: layers % (len(pattern) * stage * chunks) > 0
  assert runs(layers, stage) == runs(found.model.num_layers, found.mesh.stage)
  assert found.pipeline == full.pipeline


def test_uneven_on_the_stages_asked_for_alone():
  """12 layers are uneven on 8 stages, and would not be on the 2 there are."""
  full, asked = pipeline_of(12, 8)
  sizes = shrink.mesh(asked, 2)
  found = shrink.config(full, sizes, asked, 'float64')
  assert (found.mesh.stage, found.model.num_layers) == (2, 3)


@pytest.mark.parametrize(
  'layers, stage, pattern, experts, wanted',
  [
    (6, 4, 'WF', '', 6),
    (24, 16, 'MMMF', '', 12),
    (61, 8, 'F', 'DDD' + 58 * 'E', 12),  # 4 to have all kinds, and 8 chunks
  ],
)
def test_kinds_that_differ_from_stage_to_stage(
  layers, stage, pattern, experts, wanted
):
  """Few layers of all kinds, that differ from stage to stage as well."""
  more = dict(window=1024) if 'W' in pattern else {}
  if experts:
    more['experts'] = model_schema.Experts(count=8, pattern=experts)
  full, asked = pipeline_of(layers, stage, pattern=pattern, **more)
  shrink.check_fits(full, asked)
  sizes = shrink.mesh(asked, 8)
  found = shrink.config(full, sizes, asked, 'float64')
  assert found.model.num_layers == wanted
  kinds = layer.kinds_of(found.model)
  assert not depth.repeats(kinds[1], found.mesh.stage, len(kinds[0]))
  assert set(kinds[1]) == set(layer.kinds_of(full.model)[1])


@pytest.mark.parametrize(
  'stage, microbatches, wanted',
  [
    (8, 0, 0),  # as many as stages
    (8, 8, 8),
    (8, 64, 16),
    (8, 4, 4),  # fewer
    (16, 64, 16),
    (16, 16, 8),
    (16, 15, 7),
    (16, 1, 1),
    (1, 0, 0),
    (1, 4, 2),  # accumulation
  ],
)
def test_microbatches_of_a_pipeline(stage, microbatches, wanted):
  """More than stages, as many, or fewer; rows for each, and for two slices."""
  full, asked = pipeline_of(16, stage, 1, microbatches)
  sizes = shrink.mesh(asked, 8)
  found = shrink.config(full, sizes, asked, 'float64')
  assert found.pipeline.microbatches == wanted
  for slices in (1, 2):
    train = dataclasses.replace(found.train, microbatches=slices)
    rows = dataclasses.replace(found, train=train).microbatch_rows
    assert rows >= 1
