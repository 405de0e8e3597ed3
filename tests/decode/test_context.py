"""The context axis shares the slots of a cache: texts as on one device."""

import jax
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import load
from paraxis.decode import step
from paraxis.decode.certify import cases
from paraxis.decode.certify import properties
from paraxis.models import build
from paraxis.models.mixers import packed
from paraxis.models.mixers import slots

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 18, [7, 8, 9, 10, 11, 0]]
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
METHODS = {
  'one by one': {},
  'jacobi': dict(method='jacobi', drafts=5),
  'pearl': dict(method='pearl', drafts=3, draft_layers=1),
  'requests': dict(requests=2),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def shared(pattern):
  """module_cases.generator, its slots shared."""
  mesh = 'context=4,tensor=2'
  return module_cases.generator(pattern, mesh=mesh, devices=8)


@pytest.mark.sampled(8)
@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('pattern', ('F', 'WFN'))
def test_texts_are_those_of_one_device(pattern, method):
  options = SAMPLED | METHODS[method]
  want = module_cases.generator(pattern).generate(PROMPTS, **options)
  found = shared(pattern).generate(PROMPTS, **options)
  for a, b in zip(found, want, strict=True):
    assert a['tokens'] == b['tokens'] and a['lengths'] == b['lengths']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('pattern', ('F', 'W', 'K', 'N'))
def test_features_are_those_without_a_cache(pattern):
  proof = properties.Proof(cases.small(pattern), 'context=4')
  (row,) = properties.sharded(proof)
  assert row.passed and row.word == 'PASS' and row.measured < 1e-9, row


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
  proof = properties.Proof(cases.small('W'), 'context=4')
  (row,) = properties.sharded(proof)
  assert not row.passed


def test_a_device_holds_its_share_of_the_slots():
  made = shared('F')
  with build.use(made.built):
    cache = jax.jit(made.built.model.init_cache, static_argnums=(0, 1))(2, 32)
  for x in jax.tree.leaves(cache.states):
    assert x.shape[2] == 32
    assert {s.data.shape[2] for s in x.addressable_shards} == {8}


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
  for pattern, kinds in (('GF', 'G'), ('A', 'A'), ('HC', 'C, H')):
    with support.refused('shares the slots', f'kind {kinds} keep'):
      load.check_mesh('context=4', dict(context=4), pattern)
  assert load.check_mesh('context=4', dict(context=4), 'WF') == []
  assert load.check_mesh('', dict(context=4), 'WF') == ['context']
  with support.refused('nothing for stage'):
    load.check_mesh('stage=2', dict(stage=2), 'F')
  mesh = schema.Mesh(context=4, context_form='rsa', zero=1)
  assert load.for_decoding(mesh).context == 4
  assert load.for_decoding(mesh).zero == 0
