"""The invariance test for recurrent mixers: no layout changes the numbers.

Every kind of mixer that is not plain attention, in pairs so that layers of two
kinds share a stage: every two options of meshes, schedules, hand-over forms and
memory meet, on 8 virtual devices against one, in float64: loss, every gradient
and one update agree within 1e-9. Rows are packed, documents cross shards.
"""

import dataclasses
import functools
import inspect
import operator

import covering
import jax
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import build
from paraxis.models import layer
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.sequence import scan
from paraxis.train.certify import verify

FACTORS = dict(
  pattern=('GM', 'SR', 'LC', 'A-V', 'UD', 'H'),
  mesh=(
    'context=8', 'tensor=4,data=2', 'context=2,tensor=2,fsdp=2',
    'stage=2,context=2,tensor=2', 'stage=2,fsdp=2,context=2',
  ),
  scan=('none', 'gather', 'permute'),
  schedule=('none', 'one_f_one_b', 'zero_bubble'),
  collectives=('annotated', 'explicit'),
  sequence=(True, False),
  remat=('none', 'attention', 'full'),
  microbatches=(1, 2),
)  # fmt: skip
RULES = tuple(
  covering.Rule(*rule)
  for rule in (
    (
      ('mesh', 'scan'),
      lambda mesh, form: ('context' in mesh) == (form != 'none'),
    ),
    (
      ('mesh', 'schedule'),
      lambda mesh, schedule: ('stage' in mesh) == (schedule != 'none'),
    ),
    (
      ('schedule', 'collectives'),
      lambda schedule, how: schedule == 'none' or how == 'annotated',
    ),
    # What is refused, with a message of its own.
    (
      ('pattern', 'mesh'),
      lambda pattern, mesh: pattern != 'H' or 'stage' not in mesh,
    ),
    (('sequence', 'collectives'), lambda s, how: s or how == 'annotated'),
    (('mesh', 'sequence'), lambda mesh, s: s or 'stage' not in mesh),
    (('mesh', 'sequence'), lambda mesh, s: s or 'tensor' in mesh),
  )
)


@functools.cache
def cases():
  return covering.cover(covering.Space(FACTORS, RULES), 0)


def model_of(pattern, layers):
  """schema.Model of layers as narrow as eight shards let them be."""
  return schema.Model(
    vocab_size=32, d_model=16, num_heads=8, head_dim=4, d_ff=16,
    num_layers=layers, pattern=pattern, attention_block=16,
    dtype='float64', param_dtype='float64',
    gated_linear=mixer_schema.GatedLinear(
      heads=8, key_expand=1.0, gate_rank=2, conv_width=3
    ),
    mamba=mixer_schema.Mamba(head_dim=4, state=4, dt_rank=2, groups=2),
    hybrid=mixer_schema.Hybrid(attention_rank=2, mlp_rank=3),
    recurrent=mixer_schema.Recurrent(heads=8, tolerance=1e-13),
    tcn=mixer_schema.Tcn(kernel=3, depth=2, chunk=4),
    gated_delta=mixer_schema.GatedDelta(key_dim=3, value_dim=2),
    latent=mixer_schema.Latent(
      rank=8, query_rank=8, nope_dim=2, rope_dim=2, value_dim=2
    ),
  )  # fmt: skip


def config_of(case):
  """schema.Config of a case: 8 rows of 32 tokens, 2 layers a stage."""
  piped = case['schedule'] != 'none'
  form = case['scan'] if case['scan'] != 'none' else 'permute'
  pipeline = schema.Pipeline()
  if piped:
    pipeline = schema.Pipeline(schedule=case['schedule'])
  return schema.Config(
    mesh=schema.Mesh(
      **mesh_lib.parse(case['mesh']), collectives=case['collectives'],
      sequence=case['sequence'], context_scan=form,
    ),
    pipeline=pipeline,
    model=model_of(case['pattern'], 4 if piped else 2),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
    train=schema.Train(
      batch_size=8, microbatches=case['microbatches'], remat=case['remat']
    ),
  )  # fmt: skip


def name_of(case):
  shown = {n: v for n, v in case.items() if v not in (True, 'none')}
  return '.'.join(f'{n}={v}' for n, v in shown.items())


@pytest.mark.array(5, 17)
@pytest.mark.parametrize(
  'case', covering.params(cases(), name_of, operator.itemgetter('pattern'))
)
def test_equals_one_device(case):
  rows = support.certify(config_of(case))
  assert len(rows) == 3 and all(row.passed for row in rows), rows


def test_the_array_covers_every_pair_and_every_kind():
  space = covering.Space(FACTORS, RULES)
  found = set().union(*map(covering.pairs_of, cases()))
  assert found == space.pairs()
  letters = set(''.join(FACTORS['pattern'])) - {'-'}
  # Attention is in tests/train/certify/test_invariance.py.
  assert letters == set(layer.MIXERS) - set('FWKN')


BROKEN = dict(
  pattern='G', mesh='context=4', scan='permute', schedule='none',
  collectives='annotated', sequence=True, remat='none', microbatches=1,
)  # fmt: skip
# Kind -> a line of sharding/sequence/scan.py, and one that hands over what a
# rank has, but not what passes through it.
PASSES_THROUGH = dict.fromkeys(
  'GMSRLUD', ('_permuted', 'jnp.where, me >= by', 'jnp.where, me > by')
)
PASSES_THROUGH['C'] = (
  '_halo',
  'parts.append(_send(x_BTD[:, t - size :], axis, by))',
  'parts.append(_send(x_BTD[:, t - size :] * (by == 1), axis, by))',
)


@pytest.mark.parametrize('pattern', PASSES_THROUGH)
@pytest.mark.xdist_group('broken')
def test_what_passes_through_a_rank_is_seen(pattern, monkeypatch):
  """In packed batches: of each kind alone, as `paraxis verify` shrinks it."""
  name, before, after = PASSES_THROUGH[pattern]
  text = inspect.getsource(getattr(scan, name))
  assert text.count(before) == 1
  space = dict(vars(scan))
  exec(text.replace(before, after), space)  # noqa: S102
  monkeypatch.setattr(scan, name, space[name])
  model = dataclasses.replace(model_of(pattern, 1), tcn=mixer_schema.Tcn())
  config = dataclasses.replace(config_of(BROKEN), model=model)
  case = verify.prepare(config, 'context=4')
  loss, gradients = verify.certify(case, ('loss', 'gradients'))[:2]
  assert not gradients.passed and gradients.measured > 1e-4
  # Newton's method ends at the solution all the same; its gradient does not.
  assert loss.passed == (pattern in 'RL')


@pytest.mark.parametrize(
  'mesh, model, text',
  [
    (dict(context_order='zigzag'), {}, "take 'contiguous' or 'auto'"),
    (
      {},
      dict(pattern='R', recurrent=mixer_schema.Recurrent(solver='sequential')),
      "take 'newton'",
    ),
  ],
)
def test_what_cannot_be_split_is_refused(mesh, model, text):
  config = config_of(BROKEN)
  config = dataclasses.replace(
    config,
    mesh=dataclasses.replace(config.mesh, **mesh),
    model=dataclasses.replace(config.model, **model),
  )
  with jax.enable_x64(True), pytest.raises(errors.UserError, match=text):
    build.build(config, devices=jax.devices()[:4])
