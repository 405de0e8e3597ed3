"""Full and block visibility, on one device, on meshes and in decoding.

tests/models/mixers/test_attention.py compares them with a loop over tokens.
Legend: B rows, T tokens, V vocabulary.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import step
from paraxis.models import batch as batch_lib
from paraxis.models import checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import packed as packed_lib
from paraxis.models.mixers import pairs
from paraxis.models.mixers import slots
from paraxis.pallas_kernels.attention import op as attention_op

pytestmark = pytest.mark.usefixtures('float64')

V, MASK = 24, 23
FORMS = {
  'full': dict(visibility='full'),
  'block': dict(visibility='block', block=5),
}
SMALL = dict(
  vocab_size=V, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, num_layers=2,
  pattern='FN', attention_block=4, dtype='float64', param_dtype='float64',
)  # fmt: skip


def certified(form, shift=False, **mesh):
  """Rows of verify under a masked objective: a mesh against one device.

  form: of FORMS, or 'pairs': train.objective=block.
  """
  objective = 'masked'
  if form == 'pairs':
    objective, form, shift = 'block', 'block', True
  config = schema.view(dict(
    model=SMALL | FORMS[form] | dict(mask_id=MASK, mask_shift=shift),
    mesh=mesh,
    data=dict(sequence_length=32),
    optimizer=dict(warmup_steps=0),
    train=dict(batch_size=8, objective=objective),
  ))  # fmt: skip
  return support.certify(config, properties=('loss', 'gradients'))


@pytest.mark.parametrize('form', [*FORMS, 'pairs'])
@pytest.mark.parametrize('mesh', [
  dict(data=2, fsdp=2, tensor=2),
  dict(context=4, data=2),
  dict(
    context=4, data=2, context_form='all_gather', context_order='contiguous'
  ),
  dict(context=4, data=2, context_form='ulysses', context_order='striped'),
  dict(stage=2, data=4),
], ids=lambda mesh: '-'.join(map(str, mesh.values())))  # fmt: skip
def test_a_mesh_is_one_device(form, mesh):
  for row in certified(form, **mesh):
    assert row.passed, row.line()


def test_pairs_in_one_manual_region():
  for row in certified('pairs', data=4, tensor=2, collectives='explicit'):
    assert row.passed, row.line()


def test_shards_ahead_are_read(monkeypatch):
  """Blocks cross the borders of shards: what is ahead must not be skipped."""
  mask_of = attention.mask_of
  monkeypatch.setattr(
    attention, 'mask_of',
    lambda *given: dataclasses.replace(mask_of(*given), ahead=0),
  )  # fmt: skip
  rows = certified('block', context=4, data=2, context_order='contiguous')
  assert not all(row.passed for row in rows)


def _model(form):
  model = decoder.Decoder(schema.view(dict(model=SMALL | FORMS[form])).model)
  return model, module_cases.parameters(model, 0.4)


def _features(model, params, tokens_BT):
  return np.asarray(_traced(model, params, tokens_BT))


def _traced(model, params, tokens_BT):
  ones = np.ones_like(tokens_BT)
  batch = batch_lib.Batch(tokens_BT, None, ones, ones.cumsum(1) - 1, None, None)
  return model.features(params, batch)[0]


@pytest.mark.parametrize('form', FORMS)
def test_who_is_seen(form):
  """A token reaches those of its block, those after it, and no others."""
  model, params = _model(form)
  tokens = np.random.default_rng(0).integers(0, V, (1, 17))
  before = _features(model, params, tokens)
  for at in (0, 4, 5, 11, 16):
    changed = tokens.copy()
    changed[0, at] = (changed[0, at] + 1) % V
    gap = np.abs(_features(model, params, changed) - before).max(-1)[0]
    first = 0 if form == 'full' else at // 5 * 5
    assert (gap[:first] == 0).all() and (gap[first:] > 1e-6).all()


def test_a_block_of_one_is_causal_and_a_long_one_full():
  tokens = np.random.default_rng(0).integers(0, V, (2, 17))
  model, params = _model('full')
  whole = _features(model, params, tokens)
  of = lambda **fields: _features(
    decoder.Decoder(schema.view(dict(model=SMALL | fields)).model),
    params,
    tokens,
  )
  near = lambda a, b: np.abs(a - b).max() < 1e-12
  assert near(of(visibility='block', block=17), whole)
  assert near(of(visibility='block', block=1), of())
  assert not near(of(), whole)


@pytest.mark.parametrize('lengths', [(5, 3), (17, 12)], ids=['few', 'many'])
@pytest.mark.parametrize('form', FORMS)
def test_a_prompt_in_flight_is_the_row(form, lengths):
  model, params = _model(form)
  tokens = np.random.default_rng(0).integers(0, V, (2, max(lengths)))
  held = jax.jit(model.unstack)(params)
  found, _ = step.prefill(model, held, tokens, np.array(lengths), 20)
  for row, n in enumerate(lengths):
    want = _features(model, params, tokens[row : row + 1, :n])[0]
    np.testing.assert_allclose(found[row, :n], want, atol=1e-12)


@pytest.mark.parametrize('width', [5, 10])
def test_blocks_over_slots_are_the_row(width):
  """Committed blocks, then `width` tokens in flight."""
  model, params = _model('block')
  tokens = np.random.default_rng(0).integers(0, V, (2, 20))
  held = jax.jit(model.unstack)(params)
  first = np.array([10, 5])
  _, cache = step.prefill(model, held, tokens[:, :10], first, 20)
  lanes = np.stack(
    [t[n : n + width] for t, n in zip(tokens, first, strict=True)]
  )
  packed = step.rows(lanes, np.full(2, width), first)
  form = (packed_lib.Group(2, width),)
  found, _ = model.step(held, cache, packed, form)
  for row, n in enumerate(first):
    want = _features(model, params, tokens[row : row + 1, : n + width])[0]
    np.testing.assert_allclose(found[row], want[n:], atol=1e-12)


@pytest.mark.parametrize('shift', [False, True], ids=['here', 'shift'])
def test_a_pair_of_rows_is_every_block_behind_clean_ones(shift):
  """Block diffusion: what one pass trains is what decoding computes, block by
  block, and no feature depends on a masked block before it. So for the
  gradient, to which a clean row adds what blocks behind it read of it."""
  fields = SMALL | FORMS['block'] | dict(mask_id=MASK, mask_shift=shift)
  config = schema.view(dict(model=fields)).model
  plain, paired = decoder.Decoder(config), decoder.Decoder(config, pairs=True)
  params, rng = module_cases.parameters(plain, 0.4), np.random.default_rng(2)
  ids, hidden = rng.integers(0, MASK, (2, 18)), rng.random((2, 18)) < 0.5
  noisy = np.where(hidden, MASK, ids)
  c = rng.normal(size=(2, 18, 16))

  def one(params):
    x = _traced(paired, params, np.where(hidden, -1 - ids, ids))
    return (x * c).sum(), x

  def by_blocks(params):
    parts = []
    for first in range(0, 18, 5):
      row = np.concatenate([ids[:, :first], noisy[:, first : first + 5]], 1)
      x = _traced(plain, params, row)[:, first:]
      clean = _traced(plain, params, ids[:, : first + 5])[:, first:]
      if shift and x.shape[1] == 5:  # it predicts the next block's first token
        x = jnp.concatenate([x[:, :-1], clean[:, -1:]], 1)
      parts.append((x, clean))
    x, clean = (jnp.concatenate(p, 1) for p in zip(*parts, strict=True))
    return (x * c).sum(), (x, clean)

  got, found = jax.jit(jax.grad(one, has_aux=True))(params)
  wanted, (want, clean) = jax.jit(jax.grad(by_blocks, has_aux=True))(params)
  for first in range(0, 18, 5):
    assert np.abs(want - clean)[:, first : first + 5].max() > 1e-3
  np.testing.assert_allclose(found, want, atol=1e-12)
  support.close(got, wanted, 1e-12)


def test_terms_of_experts_are_means_over_both_rows_of_a_pair():
  """Without a mask both are the row, and so are their means."""
  experts = dict(count=4, d_ff=8, balance=0.3, router_z=0.2)
  fields = SMALL | FORMS['block'] | dict(mask_id=MASK, experts=experts)
  config = schema.view(dict(model=fields)).model
  plain, paired = decoder.Decoder(config), decoder.Decoder(config, pairs=True)
  params = module_cases.parameters(plain, 0.4)
  ids = np.random.default_rng(2).integers(0, MASK, (2, 18))
  ones, at = np.ones_like(ids), np.broadcast_to(np.arange(18), ids.shape)
  batch = batch_lib.Batch(ids, None, ones, at, None, np.float64(36))

  def terms(model):
    return jax.jit(model.features)(params, batch)[1].terms

  wanted = terms(plain)
  assert wanted.keys() == {'balance', 'z'} and min(wanted.values()) > 1e-3
  support.close(terms(paired), wanted)


def test_rows_of_too_many_blocks_are_refused():
  x, at = np.ones((2, 1, 1, 4)), np.ones((2, 1), np.int32)
  how = slots.How(attention_op.Mask(), 'auto', block=64)
  with support.refused('model.block=64', '1048576 documents of 16384'):
    pairs.attend(how, x, x, x, at, at, types.SimpleNamespace(n=2**20))


def test_a_pair_without_its_clean_row_is_another_one(monkeypatch):
  """Knock-out: earlier blocks are seen with their masks."""
  attend = pairs.attend
  config = schema.view(dict(model=SMALL | FORMS['block'] | dict(mask_id=MASK)))
  model = decoder.Decoder(config.model, pairs=True)
  params = module_cases.parameters(model, 0.4)
  ids = np.random.default_rng(2).integers(0, MASK, (2, 18))
  ids[:, ::3] = -1 - ids[:, ::3]
  before = _features(model, params, ids)

  def blind(how, q, k, v, *more):
    k, v = (pairs.together(*[pairs.apart(x)[0]] * 2) for x in (k, v))
    return attend(how, q, k, v, *more)

  monkeypatch.setattr(pairs, 'attend', blind)
  assert np.abs(_features(model, params, ids) - before).max() > 1e-3


@pytest.mark.parametrize('fields, words', [
  (dict(visibility='full', pattern='FG'), 'kind G'),
  (dict(visibility='block', block=4, pattern='WF', window=3), 'kind W'),
  (dict(visibility='block'), 'block=0'),
  (dict(visibility='full', block=4), 'only visibility=block'),
  (dict(block=4), 'visibility=causal and model.block=4'),
])  # fmt: skip
def test_what_does_not_fit_is_refused(fields, words):
  with support.refused('model.visibility=', words):
    checks.check_fields(schema.view(dict(model=SMALL | fields)).model)
