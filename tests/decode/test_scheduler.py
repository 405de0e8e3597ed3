"""Continuous batching: a request is what it is alone, bit for bit."""

import dataclasses
import functools

import jax
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import sampling
from paraxis.decode import scheduler
from paraxis.decode import transcript
from paraxis.models import build

V, NEW = 12, 12
GREEDY = dict(temperature=0.0)
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
SERVED = dict(requests=3, budget=128)


def prompts(count, seed=0):
  """Of 1 to 140 tokens: some are read in three chunks."""
  rng = np.random.default_rng(seed)
  return [
    rng.integers(0, V, int(rng.integers(1, 140))).tolist() for _ in range(count)
  ]


@pytest.fixture(autouse=True)
def float32():
  with jax.enable_x64(False):
    yield


@functools.cache
def made(pattern, **more):
  return module_cases.generator(pattern, dtype='float32', **more)


def row_of(generator):
  return transcript.Transcript(generator.tokenizer, generator._ends, NEW)


def sampled(options):
  config = dataclasses.replace(schema.Decode(), **options)
  return sampling.check(config, V)


def hexes(results):
  return [(r['tokens'], [x.hex() for x in r['logprobs']]) for r in results]


def alone(texts, order, pattern, options):
  """Each request in a session of its own, under its own number."""
  out = {}
  for i in order:
    generator = made(pattern)
    served = generator._scheduler(SERVED['requests'], 2)
    row = row_of(generator)
    form, values = sampled(options)
    with build.use(generator.built):
      request = scheduler.Request(i, texts[i], row)
      served.serve(generator.params, [request], 160, form, values)
    out[i] = row.tokens, [x.hex() for x in row.logprobs]
  return [out[i] for i in range(len(texts))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize('options', (GREEDY, SAMPLED), ids=('greedy', 'drawn'))
@pytest.mark.parametrize('pattern', ('WF', 'GF', 'A', 'H'))
def test_mixed_requests_are_bitwise_what_they_are_alone(pattern, options):
  """32 of them through 3 rows, and in reverse order."""
  texts, generator = prompts(32), made(pattern)
  form, values = sampled(options)
  want = alone(texts, range(32), pattern, options)
  for order in (range(32), reversed(range(32))):
    rows = [row_of(generator) for _ in texts]
    requests = [scheduler.Request(i, texts[i], rows[i]) for i in order]
    served = generator._scheduler(SERVED['requests'], 2)
    with build.use(generator.built):
      given = generator.params, requests, 160
      steps = served.serve(*given, form, values)
    found = [(r.tokens, [x.hex() for x in r.logprobs]) for r in rows]
    assert found == want
    assert steps < sum(r.steps for r in requests)  # rows are shared
    assert {r.row for r in requests} == {0, 1, 2}


def test_a_neighbour_that_leaks_shows(monkeypatch):
  """A row that is not evicted: the next request reads what was there."""
  texts = prompts(6)
  want = hexes(made('GF').generate(texts, max_new_tokens=4, **GREEDY, **SERVED))
  monkeypatch.setattr(
    scheduler.cache_lib, 'evict', lambda model, cache, _: cache
  )
  module_cases.generator.cache_clear()
  made.cache_clear()
  found = made('GF').generate(texts, max_new_tokens=4, **GREEDY, **SERVED)
  assert hexes(found) != want
  module_cases.generator.cache_clear()
  made.cache_clear()


@pytest.mark.sampled(8)
@pytest.mark.parametrize('options', (GREEDY, SAMPLED), ids=('greedy', 'drawn'))
@pytest.mark.parametrize('pattern', ('WF', 'A', 'H', 'C'))
def test_served_texts_are_those_of_one_batch(pattern, options):
  """Another program, so compared in float64; with stops, streams and ends."""
  with jax.enable_x64(True):
    plain, texts = module_cases.generator(pattern), prompts(7)
    want = plain.generate(texts, max_new_tokens=9, **options)
    stop = want[2]['text'][3:5]
    pieces = [''] * 7

    def show(row, piece):
      pieces[row] += piece

    want = plain.generate(texts, stop=[stop], max_new_tokens=9, **options)
    found = plain.generate(
      texts, stop=[stop], on_text=show, max_new_tokens=9, **options, **SERVED
    )
    budget = SERVED | dict(budget=64)  # one chunk a step, not two
    other = plain.generate(
      texts, stop=[stop], max_new_tokens=9, **options, **budget
    )
  keys = ('tokens', 'text', 'finish')
  for a, b, c in zip(found, want, other, strict=True):
    assert [a[k] for k in keys] == [b[k] for k in keys] == [c[k] for k in keys]
    np.testing.assert_allclose(a['logprobs'], c['logprobs'], rtol=0, atol=1e-12)
  assert pieces == [r['text'] for r in found]


def test_a_judge_that_is_given_no_drafts_draws_as_one_by_one():
  """Rows of their own have a judge, shared ones have none."""
  given = dict(max_new_tokens=9, **SAMPLED)
  with jax.enable_x64(True):
    generator, texts = module_cases.generator('WF'), prompts(4)
    want = [r['tokens'] for r in generator.generate(texts, **given)]
    for more in ({}, SERVED):
      found = generator.generate(texts, judge='rejection', **given, **more)
      assert [r['tokens'] for r in found] == want


def test_rows_that_are_too_few_are_reported():
  said, generator = [], made('WF')
  generator._say, before = said.append, generator._say
  generator.generate(prompts(5), max_new_tokens=2, **GREEDY, **SERVED)
  generator._say = before
  assert said == ['5 prompts for 3 rows (decode.requests): 2 wait']


def test_other_parameters_are_served_by_the_same_program():
  generator, texts = module_cases.generator('W', dtype='float32'), prompts(4)
  given = dict(max_new_tokens=4, **GREEDY)
  before = generator.generate(texts, **given, **SERVED)
  compiled = generator._scheduler(SERVED['requests'], 2)._step
  count = compiled._cache_size()
  values = module_cases.parameters(generator.built.model, 0.8)
  places = {p: leaf.sharding for p, leaf in generator.built.params.items()}
  generator.replace(jax.device_put(values, places))
  found = generator.generate(texts, **given, **SERVED)
  assert generator._scheduler(SERVED['requests'], 2)._step is compiled
  assert compiled._cache_size() == count
  want = generator.generate(texts, **given)
  tokens = lambda rows: [r['tokens'] for r in rows]
  assert tokens(found) == tokens(want) != tokens(before)
  module_cases.generator.cache_clear()


def test_short_rows_are_of_slots_that_their_shards_divide():
  """A chunk of 64 slots is no multiple of 3."""
  given = dict(max_new_tokens=5, **GREEDY)
  texts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
  with jax.enable_x64(True):
    want = module_cases.generator('F').generate(texts, **given)
    many = module_cases.generator('F', mesh='context=3', devices=3)
    found = many.generate(texts, **given, requests=2, budget=64)
  tokens = lambda rows: [r['tokens'] for r in rows]
  assert tokens(found) == tokens(want)


def test_logits_that_are_not_finite_end_one_request(monkeypatch):
  texts, generator = [[1, 2, 3], [4, 5], [6, 7]], made('WF')
  short = dict(max_new_tokens=3, **GREEDY, **SERVED)
  want = generator.generate(texts, **short)
  table = generator._params['embedding'].at[5].set(np.nan)
  params = generator._params | {'embedding': table}
  monkeypatch.setattr(generator, '_params', params)
  pieces = [''] * 3

  def show(row, piece):
    pieces[row] += piece

  with pytest.raises(
    errors.IntegrityError, match='request 1 at step 0 .*1 of 3'
  ):
    generator.generate(texts, on_text=show, **short)
  assert 5 not in {t for i in (0, 2) for t in want[i]['tokens']}
  assert [pieces[i] for i in (0, 2)] == [want[i]['text'] for i in (0, 2)]


@pytest.mark.parametrize('served', ({}, SERVED), ids=('alone', 'served'))
def test_a_broken_request_shows_what_a_stop_held_back(monkeypatch, served):
  generator, given = made('WF'), dict(max_new_tokens=3, **GREEDY, **served)
  (first,) = generator.generate([[1, 2, 3]], **given)
  token = first['tokens'][0]
  assert token not in (1, 2, 3)
  text = generator.tokenizer.decode_bytes([token]).decode()
  table = generator._params['embedding'].at[token].set(np.nan)
  params = generator._params | {'embedding': table}
  monkeypatch.setattr(generator, '_params', params)
  pieces = []
  show = lambda row, piece: pieces.append(piece)
  with pytest.raises(errors.IntegrityError, match='0 at step 1'):
    generator.generate([[1, 2, 3]], stop=[text + '?'], on_text=show, **given)
  assert pieces == [text]


def test_requests_are_refused_as_rows_of_their_own():
  for served in ({}, SERVED):
    with support.refused('nowhere', 'no trained draft'):
      made('WF').generate([[1]], draft='nowhere', **served)
