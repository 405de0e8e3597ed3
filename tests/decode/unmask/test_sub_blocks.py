"""Sub-blocks are a loop in NumPy that keeps what a block's tokens saw first."""

import functools

import decode_cases
import jax
import module_cases
import numpy as np
import pytest
import support
import unmask_cases

from paraxis.configs import schema
from paraxis.configs.base import decode as fields
from paraxis.decode import load
from paraxis.decode import loop

pytestmark = pytest.mark.usefixtures('float64')

V, MASK, BLOCK = 12, 11, 6
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5] * 4, [7]]
POLICIES = {
  'one': {},
  'threshold': dict(count='threshold', threshold=0.4),
  'ascending': dict(count='ascending', score='margin'),
  'credit': dict(count='threshold', threshold=0.4, credit_weight=1.5),
}
NEW = 16


@functools.cache
def generator(layers=2, shift=False, mesh='', devices=1, **model):
  """loop.Generator of a small model of blocks with random parameters."""
  made = dict(
    vocab_size=V, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16,
    pattern='F', num_layers=layers, attention_block=8, dtype='float64',
    param_dtype='float64', tied_embedding=False, mask_id=MASK,
    mask_shift=shift, visibility='block', block=BLOCK, position='learned',
    max_positions=64, norm_epsilon=1e-6,
  ) | model  # fmt: skip
  config = schema.view(dict(model=made, mesh=dict(sequence=False)))
  built = load.built_for(config, mesh, jax.devices()[:devices])
  values = module_cases.parameters(built.model, 0.7)
  params = module_cases.placed(built, values)
  decode = schema.Decode(max_new_tokens=NEW, temperature=0.0, method='unmask')
  return loop.Generator(
    built, params, module_cases.Numbers(V, -1), decode, lambda line: None
  )


def texts(made, policy='one', sub=2, cached=True, prompts=PROMPTS, **options):
  unmask = POLICIES[policy] | dict(sub_block=sub, sub_cache=cached)
  return made.generate(prompts, trace=True, unmask=unmask, **options)


# ------------------------------------------------------ against a plain loop


def rms(x, scale):
  return x / np.sqrt((x * x).mean(-1) + 1e-6) * scale


class Row:
  """Keys and values of each place and layer of a row, as they were written."""

  def __init__(self, shift, block, layers=2):
    model, self.block = generator(layers, shift).built.model, block
    self.params = {
      p: np.asarray(x) for p, x in module_cases.parameters(model, 0.7).items()
    }
    self.kept = [{} for _ in range(layers)]

  def read(self, ids, places, keep):
    """{place: logits} of tokens that see each other and what is kept."""
    p = self.params
    x = {c: p['embedding'][ids[c]] + p['positions'][c] for c in places}
    for i, kept in enumerate(self.kept):
      w = {
        k.removeprefix('layers/'): z[i]
        for k, z in p.items() if k.startswith('layers/')
      }  # fmt: skip
      seen, queries = dict(kept), {}
      for c in places:
        h = rms(x[c], w['attention_norm/scale'])
        q, k, v = (
          np.einsum('d,dnh->nh', h, w[f'attention/{name}'])
          for name in ('query', 'key', 'value')
        )
        queries[c], seen[c] = q, (k, v)
      for c, q in queries.items():
        here = [kv for at, kv in seen.items() if at < self.end(c)]
        for n in range(len(q)):
          z = np.array([k[n // 2] @ q[n] for k, _ in here]) / q.shape[1] ** 0.5
          z = np.exp(z - z.max())
          o = sum(a * v[n // 2] for a, (_, v) in zip(z, here, strict=True))
          x[c] = x[c] + o / z.sum() @ w['attention/output'][n]
        h = rms(x[c], w['mlp_norm/scale'])
        gate = h @ w['mlp/gate']
        gate /= 1 + np.exp(-gate)
        x[c] = x[c] + (gate * (h @ w['mlp/up'])) @ w['mlp/down']
      if keep:
        kept.update((c, seen[c]) for c in places)
    return {c: p['head'] @ rms(x[c], p['norm/scale']) for c in places}

  def end(self, place):
    return place // self.block * self.block + self.block


def plain(shift, prompt, policy, sub, cached=True, block=BLOCK, new=NEW):
  """(tokens, logprobs, [tokens of each call], [tokens in flight of each])."""
  row, ids = Row(shift, block), [*prompt, *[MASK] * new]
  end, at = len(ids), len(prompt) // block * block
  clean = row.read(ids, range(at), True) if at else {}
  before = clean.get(at - 1, row.params['head'][:, 0] * 0)
  found, counts, flown = {}, [], []
  while at < end:
    stop = min(at + block, end)
    for first in range(at, stop, sub):
      last, call = min(first + sub, stop), 0
      credit, edge = np.zeros((sub, V)), None
      while masks := [c for c in range(first, last) if ids[c] == MASK]:
        whole = not cached or not call
        read = range(at, stop) if whole else range(first, last)
        z = row.read(ids, read, cached and whole)
        flown.append(len(read))
        if edge is None or not cached:
          edge = before if first == at else z[first - 1]
        if shift:
          z = {first: edge} | {c + 1: z[c] for c in range(first, last)}
        z = {c: z[c] - np.delete(z[c], MASK).max() for c in masks}
        for c in masks:
          z[c][MASK] = -np.inf
          z[c] -= np.log(np.exp(z[c]).sum())
        said = z if not policy.credit_weight else {
          c: unmask_cases.credited(policy, z[c], credit[c - first])
          for c in masks
        }  # fmt: skip
        token = {c: int(said[c].argmax()) for c in masks}
        score = {
          c: unmask_cases.score(policy.score, said[c], token[c]) for c in masks
        }
        taken = unmask_cases.chosen(policy, score, masks, call)
        for c in taken:
          ids[c], found[c] = token[c], z[c][token[c]]
        counts.append(len(taken))
        call += 1
    if stop < end:
      clean = row.read(ids, range(at, stop), True)
      before = clean[stop - 1]
      counts.append(0)
      flown.append(stop - at)
    at = stop
  places = range(len(prompt), end)
  return ids[len(prompt) :], [found[c] for c in places], counts, flown


@pytest.mark.parametrize('policy, block, sub, shift, cached', [
  ('one', 6, 2, True, True),
  ('one', 6, 3, False, False),
  ('threshold', 6, 3, True, True),
  ('threshold', 6, 2, True, False),
  ('ascending', 6, 2, False, True),
  ('credit', 6, 3, True, True),
  ('credit', 6, 2, False, False),
  # More tokens in flight than attention takes at once, in one width or both.
  ('threshold', 12, 4, True, True),
  ('threshold', 24, 12, False, True),
])  # fmt: skip
def test_texts_are_those_of_a_plain_loop(policy, block, sub, shift, cached):
  found = texts(generator(shift=shift, block=block), policy, sub, cached)
  narrow = []
  for prompt, result in zip(PROMPTS, found, strict=True):
    tokens, logprobs, counts, flown = plain(
      shift, prompt, fields.Unmask(**POLICIES[policy]), sub, cached, block
    )
    assert result['tokens'] == tokens
    np.testing.assert_allclose(result['logprobs'], logprobs, atol=1e-5)
    assert result['trace'].final.sum(1).tolist() == counts
    narrow += flown
  assert not cached or sub in narrow


def test_a_block_may_be_longer_than_a_text():
  """And than what 16 slots for the prompt and 16 for the text would hold."""
  (found,) = texts(generator(block=48), sub=4, prompts=[[3]], max_new_tokens=2)
  tokens, logprobs, *_ = plain(False, [3], fields.Unmask(), 4, True, 48, 2)
  assert found['tokens'] == tokens
  np.testing.assert_allclose(found['logprobs'], logprobs, atol=1e-5)


def test_an_end_ends_a_row():
  """In the middle of a block, at the canvas that has it."""
  made = generator(shift=True)
  options = dict(prompts=PROMPTS[:1], temperature=0.9, seed=5)
  (free,) = texts(made, **options)
  cut = next(i for i, t in enumerate(free['tokens'])
             if i > 3 and t not in free['tokens'][:i])  # fmt: skip
  other = loop.Generator(
    made.built, module_cases.parameters(made.built.model, 0.7),
    module_cases.Numbers(V, free['tokens'][cut]), made.config,
    lambda line: None,
  )  # fmt: skip
  (found,) = texts(other, **options)
  assert found['tokens'] == free['tokens'][:cut]
  assert found['calls'] < free['calls']


@pytest.mark.parametrize('shift', [False, True], ids=['here', 'shift'])
def test_what_the_cache_of_a_block_changes(shift):
  """The text or its numbers: no comparison above holds for both."""
  made = generator(shift=shift)
  exact, near = texts(made, cached=False), texts(made)
  assert [r['calls'] for r in exact] == [r['calls'] for r in near]
  gaps = [
    abs(np.subtract(a['logprobs'], b['logprobs'])).max()
    for a, b in zip(exact, near, strict=True)
  ]
  assert min(gaps) > 1e-3


def test_keys_of_one_layer_depend_on_their_token_alone():
  """So that the cache is exact; with two layers it is not (above)."""
  made = generator(layers=1)
  exact, near = texts(made, 'threshold', cached=False), texts(made, 'threshold')
  for a, b in zip(exact, near, strict=True):
    assert a['tokens'] == b['tokens'] and a['calls'] == b['calls']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-6)


def test_a_sub_block_as_long_as_the_block_is_the_block():
  made = generator(shift=True)
  whole = made.generate(PROMPTS, trace=True)
  for sub, cached in ((BLOCK, False), (0, False)):
    found = texts(made, sub=sub, cached=cached)
    for a, b in zip(whole, found, strict=True):
      assert (a['tokens'], a['logprobs']) == (b['tokens'], b['logprobs'])


@pytest.mark.parametrize('cached', [True, False], ids=['cached', 'exact'])
def test_a_row_does_not_depend_on_others(cached):
  """Other rows are at their first calls while it is at further ones."""
  made = generator(shift=True)
  options = dict(policy='threshold', cached=cached, temperature=0.9, seed=5)
  every = texts(made, **options)
  alone = texts(made, prompts=PROMPTS[:1], **options)
  more = texts(made, prompts=[*PROMPTS, [1] * 30], **options)
  for other in (alone, more):
    assert other[0]['tokens'] == every[0]['tokens']
    np.testing.assert_allclose(
      other[0]['logprobs'], every[0]['logprobs'], atol=1e-6
    )


@pytest.mark.parametrize('mesh, block, sub', [
  ('data=2,fsdp=2,tensor=2', 6, 2), ('context=4,data=2', 12, 4),
])  # fmt: skip
def test_a_mesh_changes_nothing(mesh, block, sub):
  options = dict(policy='threshold', sub=sub, temperature=0.9, seed=5)
  own = dict(shift=True, block=block)
  one = texts(generator(**own), **options)
  many = texts(generator(**own, mesh=mesh, devices=8), **options)
  for a, b in zip(one, many, strict=True):
    assert a['tokens'] == b['tokens']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], atol=1e-6)


@pytest.mark.parametrize('cached', [True, False])
def test_a_call_copies_no_cache(cached):
  """Neither of two widths, of which one is run, writes the cache."""
  unmask = fields.Unmask(sub_block=3, sub_cache=cached)
  decode = schema.Decode(temperature=0.0, method='unmask', unmask=unmask)
  sizes = decode_cases.copies(generator(), decode, V)
  assert sizes and 2 * 96 * 4 not in sizes  # heads, slots, head dimension


@pytest.mark.parametrize('fields_, visibility, words', [
  (dict(sub_cache=True), 'block', 'name their length'),
  (dict(sub_block=4), 'block', 'does not divide model.block=6'),
  (dict(sub_block=2), 'full', 'take decode.unmask.block=2'),
  (dict(sub_block=2, score='filter'), 'block', 'trained on whole blocks'),
])  # fmt: skip
def test_what_has_no_sub_blocks_is_refused(fields_, visibility, words):
  model = {} if visibility == 'block' else dict(visibility='full', block=0)
  made = generator(**model)
  with support.refused('decode.unmask.sub_', words):
    made.generate(PROMPTS, unmask=fields_)


def test_numbers_that_are_not_finite_end_a_row():
  made = generator()
  values = module_cases.parameters(made.built.model, 0.7)
  made.replace({p: x * np.nan for p, x in values.items()})
  try:
    with pytest.raises(loop.errors.IntegrityError, match='row 0 at step 0'):
      texts(made)
  finally:
    made.replace(values)
