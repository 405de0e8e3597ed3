"""The context axis shares the slots of a cache, and with them heads of
recurrences: texts as on one device."""

import jax
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import latents
from paraxis.decode import load
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.decode.certify import cases
from paraxis.decode.certify import properties
from paraxis.models import build
from paraxis.models.mixers import packed
from paraxis.models.mixers import slots

pytestmark = pytest.mark.usefixtures('float64')

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 18, [7, 8, 9, 10, 11, 0]]
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
METHODS = {
  'one by one': {},
  'jacobi': dict(method='jacobi', drafts=5),
  'pearl': dict(method='pearl', drafts=3, draft_layers=1),
  'requests': dict(requests=2),
}
# A hybrid's four heads are over both axes.
MESHES = {
  p: 'context=2,tensor=2' if set(p) & set('GS') else 'context=4,tensor=2'
  for p in ('F', 'WFN', 'A', 'GF', 'SA')
}
SLOTS = 40
SPLIT = {'model.latent.groups': 2}  # latents are sharded over tensor, too


def shared(pattern):
  """module_cases.generator, its slots shared."""
  mesh = MESHES[pattern]
  devices = 8 if '4' in mesh else 4
  return module_cases.generator(pattern, mesh=mesh, devices=devices)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
  ('pattern', 'method'),
  [
    (p, m)
    for p in ('F', 'WFN', 'A', 'GF', 'SA')
    for m in METHODS
    if m != 'pearl' or p not in ('GF', 'SA')  # which refuse its rollback
  ],
)
def test_texts_are_those_of_one_device(pattern, method):
  options = SAMPLED | METHODS[method]
  want = module_cases.generator(pattern).generate(PROMPTS, **options)
  found = shared(pattern).generate(PROMPTS, **options)
  for a, b in zip(found, want, strict=True):
    assert a['tokens'] == b['tokens'] and a['lengths'] == b['lengths']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-5)


def features(pattern, mesh, changes=()):
  """properties.Row of prompts and tokens on a mesh."""
  proof = properties.Proof(cases.small(pattern, changes), mesh)
  (row,) = properties.sharded(proof)
  return row


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
  'pattern', ('F', 'W', 'K', 'N', 'A', *(f'{k}F' for k in 'GMSRLVUDC'), 'HF')
)
def test_features_are_those_without_a_cache(pattern):
  row = features(pattern, 'context=4')
  assert row.passed and row.word == 'PASS' and row.measured < 1e-9, row


@pytest.mark.parametrize('scores', ('summed', 'own'))
def test_latents_are_sharded_in_width_and_in_slots(scores):
  changes = SPLIT | {'model.latent.scores': scores}
  row = features('A', 'context=2,tensor=2', changes)
  assert row.passed and row.measured < 1e-9, row


@pytest.mark.parametrize('part', ('the parts are not joined', 'the window'))
def test_it_can_fail(part, monkeypatch):
  """Each shard attends to its own slots alone; slots count from each shard."""
  if part == 'the window':
    monkeypatch.setattr(slots, 'part_of', lambda n: slots.Part(0, n, 4 * n))
  else:
    one = slots._committed
    alone = lambda how, q, k, v, ids, beside: one(
      how, q, k, v, ids, slots.part_of(k.shape[2]), beside
    )
    monkeypatch.setattr(slots, 'committed', alone)
  assert not features('W', 'context=4').passed


def test_latents_can_fail(monkeypatch):
  """Of latents in shards: what shards of slots add up is left out."""
  real = jax.lax.psum
  alone = lambda x, axes: x if axes == ('context',) else real(x, axes)
  monkeypatch.setattr(jax.lax, 'psum', alone)
  assert not features('A', 'context=2,tensor=2', SPLIT).passed


def held(pattern):
  """[(shape, local shapes)] of the states of an empty cache."""
  made = shared(pattern)
  with build.use(made.built):
    cache = jax.jit(made.built.model.init_cache, static_argnums=(0, 1))(
      2, SLOTS
    )
  return [
    (x.shape, {s.data.shape for s in x.addressable_shards})
    for x in jax.tree.leaves(cache.states)
  ]


@pytest.mark.parametrize('pattern', ('F', 'A'))
def test_a_device_holds_its_share_of_the_slots(pattern):
  for shape, local in held(pattern):
    assert shape[2] == SLOTS and {x[2] for x in local} == {SLOTS // 4}


@pytest.mark.parametrize('pattern', ('GF', 'SA'))
def test_a_device_holds_its_share_of_slots_and_states(pattern):
  """Two axes of two: a leaf of slots has half of them, any other a quarter of
  its heads or channels."""
  for shape, local in held(pattern):
    (one,) = local
    parts = [a // b for a, b in zip(shape, one, strict=True)]
    if SLOTS in shape:
      assert parts[shape.index(SLOTS)] == 2, (shape, one)
    else:
      assert sorted(parts)[-1] == 4, (shape, one)


@pytest.mark.parametrize(
  ('pattern', 'rules', 'query'),
  [
    ('GF', 'fsdp_tensor', (None, ('tensor', 'context'), None)),
    # Of training, which had other use for the axis.
    (
      'GF',
      'fsdp_tensor embed=fsdp+context',
      (None, ('tensor', 'context'), None),
    ),
    ('F', 'fsdp_tensor embed=fsdp+context', ('context', 'tensor', None)),
    ('F', 'fsdp_tensor heads=tensor+context length=', (None, 'tensor', None)),
    ('GF', 'data', (None, 'context', None)),
  ],
)
def test_rules_that_name_the_axis(pattern, rules, query):
  model = dict(pattern=pattern, d_model=16, num_heads=4, vocab_size=12, d_ff=16)
  mesh = dict(sequence=False, rules=rules)
  config = schema.view(dict(model=model | dict(num_layers=2), mesh=mesh))
  sizes = dict(tensor='context=2,tensor=2', data='context=2,data=2')
  made = load.built_for(
    config, sizes['data' if rules == 'data' else 'tensor'], jax.devices()[:4]
  )
  (found,) = [
    x for p, x in made.params.items() if p.endswith('/attention/query')
  ]
  assert found.sharding.spec[1:] == query
  assert made.rules.axes('slot_heads') == (
    () if rules == 'data' else ('tensor',)
  )


def test_pca_measures_rows_that_no_shards_divide():
  config = schema.view(
    dict(
      model=dict(
        pattern='A', d_model=16, num_heads=4, num_layers=2, vocab_size=12,
        latent=dict(
          rank=6, nope_dim=4, rope_dim=4, value_dim=6, groups=2,
          rotation='pca',
        ),
      ),
      mesh=dict(sequence=False),
    )
  )  # fmt: skip
  rows, found = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0]], []
  for mesh, devices in (('data=1', 1), ('context=2,tensor=2', 4)):
    built = load.built_for(config, mesh, jax.devices()[:devices])
    params = module_cases.placed(
      built, module_cases.parameters(built.model, 0.4)
    )
    found.append(latents.rotated(params, built, rows, say=lambda line: None))
  for path, x in found[0].items():
    if path.endswith('/shares'):
      np.testing.assert_allclose(x, found[1][path], rtol=1e-6)


def test_a_canvas_has_no_slots_to_share():
  """Of model.visibility=full: whole rows in flight, beside an empty cache."""
  model = dict(
    pattern='F', d_model=16, num_heads=4, num_layers=2, vocab_size=12, d_ff=16,
    visibility='full', mask_id=11, dtype='float64', param_dtype='float64',
  )  # fmt: skip
  config = schema.view(dict(model=model, mesh=dict(sequence=False)))
  texts = []
  for mesh, devices in (('data=1', 1), ('context=2', 2)):
    built = load.built_for(config, mesh, jax.devices()[:devices])
    params = module_cases.placed(
      built, module_cases.parameters(built.model, 0.4)
    )
    made = loop.Generator(
      built, params, module_cases.Numbers(12), schema.Decode(),
      lambda line: None,
    )  # fmt: skip
    (found,) = made.generate([[1, 2, 3]], method='unmask', max_new_tokens=9)
    texts.append(found['tokens'])
  assert texts[0] == texts[1] and len(texts[0]) == 9


def test_parameters_of_a_hybrid_are_shared_too():
  made = shared('GF')
  params = made.built.params
  for path in ('attention/query', 'gated_linear/query', 'mlp/up'):
    (found,) = [x for p, x in params.items() if p.endswith(path)]
    whole, part = found.shape, found.sharding.shard_shape(found.shape)
    assert np.prod(whole) == 4 * np.prod(part), path


def written(made, size, ids, lengths, begin):
  """Slots of two rows after a step of a lane each, which is kept."""
  model, form = made.built.model, (packed.Group(*ids.shape),)

  @jax.jit
  def run(params, cache, tokens):
    _, flight = model.step(params, cache, tokens, form)
    return model.commit(cache, flight, form, tokens.request < 2)

  with build.use(made.built):
    cache = model.init_cache(2, size)
    return jax.device_get(
      run(made.params, cache, step.rows(ids, lengths, begin)).states
    )


@pytest.mark.parametrize('width', (3, 12))
def test_lanes_that_lie_across_shards_are_written(width):
  """From every slot on, token by token and as a block, as in a whole row."""
  made, size = (shared('F'), module_cases.generator('F')), 16
  rng = np.random.default_rng(0)
  for first in range(0, size - width + 1, 2):
    ids = rng.integers(0, 12, (2, width)).astype(np.int32)
    lengths, begin = np.array([width, width - 2]), np.array([first, 0])
    found = [written(m, size, ids, lengths, begin) for m in made]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


def test_what_context_cannot_share_is_refused():
  for pattern, kinds in (('G', 'G'), ('MC', 'C, M')):
    with support.refused('shares the slots', f'kind {kinds} have none'):
      load.check_mesh('context=4', dict(context=4), pattern)
  with support.refused(
    "'heads' has size 4", 'context=8 does not divide', 'with recurrences'
  ):
    features('GF', 'context=8')
  for pattern in ('WF', 'A', 'GF', 'H'):
    assert load.check_mesh('context=4', dict(context=4), pattern) == []
  assert load.check_mesh('', dict(context=4), 'WF') == ['context']
  with support.refused('nothing for stage'):
    load.check_mesh('stage=2', dict(stage=2), 'F')
  mesh = schema.Mesh(context=4, context_form='rsa', zero=1)
  assert load.for_decoding(mesh).context == 4
  assert load.for_decoding(mesh).zero == 0
