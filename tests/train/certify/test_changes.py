"""What a layout changes is said, with the field, the reason and how much."""

import dataclasses
import json

import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import model as model_schema
from paraxis.train.certify import certification
from paraxis.train.certify import changes
from paraxis.train.certify import trial
from paraxis.train.certify import verify
from paraxis.train.run import workdir

MODEL = schema.Model(
  vocab_size=64, d_model=16, num_layers=2, num_heads=2, d_ff=16
)


def config_of(experts=(), **sections):
  """schema.Config with 4 experts in every layer; or none, with count=0."""
  experts = model_schema.Experts(**dict(count=4, d_ff=8) | dict(experts))
  model = dataclasses.replace(MODEL, experts=experts)
  return schema.Config(
    model=model, data=schema.Data(sequence_length=32), **sections
  )


@pytest.mark.parametrize(
  'experts, microbatches, instead, tried',
  [
    (dict(balance_scope='microbatch'), 1, 'step', ('microbatch', 2)),
    (dict(balance_scope='microbatch'), 4, 'step', ('microbatch', 4)),
    (dict(balance_scope='device'), 1, 'step', ('device', 2)),
    # Later steps have loads, which no layout changes: it stays in the rest.
    (dict(balance_scope='running'), 1, 'running', ('microbatch', 2)),
    (dict(balance_scope='microbatch', balance=0.0), 4, None, None),
    (dict(balance_scope='microbatch', count=0), 4, None, None),
    (dict(balance_scope='step'), 4, None, None),
    (dict(balance_scope='sequence'), 4, None, None),
  ],
)
def test_loads_of_less_than_a_step(experts, microbatches, instead, tried):
  config = config_of(experts, train=schema.Train(microbatches=microbatches))
  certified, found = changes.find(config, config)
  if instead is None:
    assert not found and certified is config
    return
  (change,) = found
  assert change.field == 'model.experts.balance_scope'
  assert change.value == experts['balance_scope']
  assert certified == schema.with_value(config, change.field, instead)
  shown = schema.with_values(certified, change.tried)
  scope = shown.model.experts.balance_scope
  assert (scope, shown.microbatches) == tried


@pytest.mark.parametrize(
  'scope, mesh', [('microbatch', 'stage=4'), ('device', 'data=2')]
)
def test_a_scope_that_the_layout_changes(scope, mesh):
  """That nothing else does: tests/train/certify/test_invariance_experts.py."""
  config = config_of(dict(balance_scope=scope))
  deep = dataclasses.replace(config.model, num_layers=4)
  case = verify.prepare(dataclasses.replace(config, model=deep), mesh)
  (row,) = verify.certify(case, ())
  assert row.word == certification.CHANGES
  assert row.name == f'model.experts.balance_scope={scope}'
  assert 1e-4 < row.measured < 1 and 'microbatch' in row.why


def test_run_says_it_and_ends_with_1(monkeypatch):
  row = certification.Verdict('f=1', 1e-9, 0.25, False, 'norm', 'because')
  monkeypatch.setattr(
    verify, 'certify', lambda case, report: report(row) or [row]
  )
  lines = []
  config = config_of(dict(balance_scope='device'))
  code = verify.run(config, 'data=2', dtype='float32', say=lines.append)
  assert code == errors.EXIT_DIFFERENT
  assert lines[-2:] == [
    'CHANGES THE NUMBERS: f=1, because; off by 2.5e-01, most in norm',
    'CHANGES THE NUMBERS: 1',
  ]
  assert 'balance_scope' not in ' '.join(lines[:-2])  # no size that shrank


def test_the_reference_has_one_microbatch_whatever_the_scope():
  for scope in ('microbatch', 'step'):
    config = config_of(
      dict(balance_scope=scope),
      mesh=schema.Mesh(stage=2),
      train=schema.Train(microbatches=2),
    )
    assert config.microbatches == 4 and trial.plain(config).microbatches == 1


# ------------------------------------------------------------- not certified


@pytest.mark.parametrize(
  'factor, pattern, certified',
  [
    (1.0, 'E', False),
    (1.9, 'E', False),
    (2.0, 'E', True),  # 4 experts, 2 a token: a slot for every token
    (2.0, 'EP', False),  # 8 of them in every second layer
    (4.0, 'EP', True),
    (0.0, 'E', True),
  ],
)
def test_slots_that_may_not_suffice(factor, pattern, certified):
  config = config_of(dict(capacity_factor=factor, pattern=pattern))
  without, found = changes.find(config, config)
  if certified:
    assert not found and without is config
    return
  (change,) = found
  assert (change.field, change.value) == (changes.CAPACITY, factor)
  assert without.model.experts.capacity_factor == 0 and not change.tried


@pytest.mark.parametrize(
  'count, factor, limit',
  [
    (64, 10.0, 32),  # they may drop; 16 of them, which verify runs, would not
    (12, 6.0, None),  # they may not; 16 of them would
  ],
)
def test_slots_are_judged_as_written(count, factor, limit):
  config = config_of(dict(count=count, capacity_factor=factor))
  case = verify.prepare(config, 'data=8')
  experts = case.config.model.experts
  assert experts.count == 16
  if limit is None:
    assert not case.changes and experts.capacity_factor == factor * 16 / count
    return
  (change,) = case.changes
  assert (change.field, change.value) == (changes.CAPACITY, factor)
  assert f'from {limit} on' in change.why and experts.capacity_factor == 0


CASES = {
  'model.experts.capacity_factor': (
    config_of(dict(capacity_factor=1.0)), 'data=2', 1.0,
  ),
  'pipeline.skip_fraction': (
    config_of(
      dict(count=0), pipeline=schema.Pipeline('skip', 1, 2, skip_fraction=0.5)
    ),
    'stage=2', 0.5,
  ),
}  # fmt: skip


@pytest.mark.parametrize('field', CASES)
def test_what_is_replaced_is_not_certified(field):
  """Whatever else holds; nothing is compiled for it."""
  config, mesh, value = CASES[field]
  lines = []
  case = verify.prepare(config, mesh)
  assert schema.value(case.config, field) == 0
  assert not any(field in note for note in case.notes)
  (row,) = verify.certify(case, (), lines.append)
  assert lines == [row] and not row.passed
  assert (
    row.word == certification.NOT_CERTIFIED and row.name == f'{field}={value}'
  )
  text = row.line().replace('\n     ', '')
  assert (
    text.startswith(f'NOT CERTIFIED: {field}={value}, ') and row.why in text
  )
  assert 'off by' not in text


def test_json_carries_what_is_not_certified(monkeypatch):
  right = verify.certify
  monkeypatch.setattr(
    verify, 'certify', lambda case, report: right(case, (), report)
  )
  config, mesh, value = CASES['model.experts.capacity_factor']
  lines = []
  code = verify.run(config, mesh, True, say=lines.append)
  assert code == errors.EXIT_DIFFERENT
  found = json.loads(lines[0])
  assert not found['passed'] and len(lines) == 1
  (row,) = found['rows']
  assert row['word'] == 'NOT CERTIFIED' and 'layout' in row['why']
  assert row['name'] == f'model.experts.capacity_factor={value}'


def test_sizes_alone_are_silent():
  config = config_of(dict(count=64, hot=1), train=schema.Train(batch_size=512))
  case = verify.prepare(config, 'data=2')
  assert not case.changes and 'model.experts.count 64 -> 16' in case.notes
  assert case.config.model.experts.hot == 1
  assert not any('warmup' in note for note in case.notes)


@pytest.mark.parametrize(
  'balance, fraction, of',
  [(0.0, 0.5, 'pipeline.skip_fraction'), (0.01, 0.0, changes.SCOPE)],
)
def test_every_replaced_field_is_a_size_or_is_said(balance, fraction, of):
  """All that verify sets, on a config with nothing at its default; stages that
  are left out serve no experts with a balance loss."""
  experts = dict(
    count=64,
    hot=1,
    capacity_factor=1.0,
    balance_scope='device',
    d_ff=128,
    balance=balance,
  )
  config = config_of(
    experts,
    optimizer=schema.Optimizer(warmup_steps=7),
    pipeline=schema.Pipeline('skip', 1, 8, skip_fraction=fraction),
    train=schema.Train(
      batch_size=512, batch_ramp='256:256:9', shape_cycle='4:9,1'
    ),
  )
  mixed = dataclasses.replace(config.model, pattern='L')
  config = dataclasses.replace(config, model=mixed)
  case = verify.prepare(config, 'stage=2,data=2')
  changed = {name for name, *_ in workdir.differences(config, case.config)}
  said = {change.field for change in case.changes}
  sizes = {
    'mesh.stage', 'mesh.data', 'model.dtype', 'model.param_dtype',
    'model.experts.count', 'model.experts.d_ff', 'model.head_dim',
    'model.attention_block', 'model.recurrent.heads', 'pipeline.microbatches',
    'train.batch_size', 'train.batch_ramp', 'train.shape_cycle',
    'model.num_layers', 'model.d_model', 'model.d_ff',
  }  # fmt: skip
  assert changed - said <= sizes, changed - said - sizes
  assert said == {of, changes.CAPACITY, changes.TOLERANCE}


# Sizes of shipped configs that verify shrinks: none has another meaning then.
SIZES = set(
  """
  data.sequence_length mesh.data mesh.fsdp mesh.tensor mesh.stage
  model.attention_block model.mask_id model.d_ff model.d_model model.dtype
  model.experts.count model.experts.d_ff model.gated_linear.gate_rank
  model.gated_linear.heads model.head_dim model.latent.nope_dim
  model.latent.rank model.latent.rope_dim model.latent.value_dim
  model.mamba.head_dim model.mamba.state model.max_positions model.num_heads
  model.num_kv_heads model.num_layers model.param_dtype
  model.recurrence.core model.recurrence.gradients model.recurrence.iterations
  model.recurrence.prelude model.tcn.chunk
  model.tcn.depth model.tcn.kernel model.vocab_size model.window
  pipeline.microbatches train.batch_ramp train.batch_size train.eval_batches
  train.shape_cycle
  """.split()
)


@pytest.mark.parametrize(
  'path', command_line.papers(), ids=lambda path: path.stem
)
def test_of_a_shipped_config_sizes_alone_are_replaced(path):
  config = schema.view(command_line.load(str(path)))
  config = schema.with_value(config, 'outer', schema.Outer())  # else refused
  try:
    case = verify.prepare(config, '')
  except errors.UserError as e:  # more devices than here
    assert 'there are 8' in str(e)
    case = verify.prepare(config, 'stage=2,data=2,tensor=2')
  changed = {name for name, *_ in workdir.differences(config, case.config)}
  said = {change.field for change in case.changes}
  assert changed - said <= SIZES, changed - said - SIZES


def test_a_tolerance_is_certified_to_itself(monkeypatch):
  """Shards of L solve apart, each to 1e-6; at 1e-13 they would not differ."""
  model = dataclasses.replace(MODEL, pattern='L', num_layers=1)
  config = schema.Config(model=model, data=schema.Data(sequence_length=32))
  case = verify.prepare(config, 'data=2')
  (row,) = verify.certify(case, ())
  assert row.passed and row.bound == config.model.recurrent.tolerance == 1e-6
  assert row.name == 'model.recurrent.tolerance=1e-06'
  assert not verify.prepare(config, 'data=2', 'float32').changes


def test_a_batch_that_grows_is_tried_small():
  train = schema.Train(batch_size=64, batch_ramp='16:16:5', microbatches=4)
  case = verify.prepare(config_of(dict(count=0), train=train), 'data=2')
  assert case.config.train.batch_ramp == '4:4:1'
  (row,) = verify.certify(case, ('ramp',))
  assert row.passed and row.name == 'a smaller step: 1 x 4 rows of 8'
