"""Requests that share rows: every method makes the texts of one batch."""

import functools

import jax
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.decode import shared_rows
from paraxis.decode.drafts import distill
from paraxis.decode.drafts import heads

V, NEW = 12, 9
GREEDY = dict(temperature=0.0)
SAMPLED = dict(temperature=0.8, top_k=6, seed=3)
SERVED = dict(requests=3, budget=64)
LOOKUP = dict(method='prompt_lookup', drafts=3)
DRAFT = dict(method='speculative', drafts=2, draft_layers=1)
CASES = {
  'lookup': ('GF', LOOKUP),
  'aggressive': ('WF', dict(method='aggressive', drafts=4)),
  'jacobi': ('H', dict(method='jacobi', drafts=3)),
  'speculative': ('GF', DRAFT),
  'pearl': ('A', dict(method='pearl', drafts=2, draft_layers=1)),
  'easyspec': (
    'WFN', dict(method='easyspec', drafts=2, draft_layers=2, draft_group=2)
  ),
  'medusa': ('F', {}), 'eagle': ('F', {}), 'falcon': ('WF', {}),
  'ppd': ('F', {}),
}  # fmt: skip
STREAMS = dict(wiring='streams', streams=3, stream_prefix=2)
generator = module_cases.generator


def prompts(count, most=60):
  rng = np.random.default_rng(0)
  return [
    rng.integers(0, V, int(rng.integers(1, most))).tolist()
    for _ in range(count)
  ]


def method_of(name, folder):
  """Options of a case; of a trained draft, one that nobody trained."""
  pattern, options = CASES[name]
  if options:
    return options
  made = generator(pattern)
  model = made.built.model
  params = model.unstack(module_cases.parameters(model, 0.4))
  path = str(folder / f'{name}.npz')
  heads.save(path, *distill.untrained(model, params, name, 'numbers'))
  made._draft.cache_clear()
  return dict(method=name, draft=path, drafts=4)


def said(results):
  """Calls, too, but where the host ends a row: behind it they go on a while."""
  return [
    (r['tokens'], r['text'], r['finish'], r['finish'] == 'stop' or r['lengths'])
    for r in results
  ]


@pytest.mark.sampled(4)
@pytest.mark.usefixtures('double')
@pytest.mark.parametrize('options', (GREEDY, SAMPLED), ids=('greedy', 'drawn'))
@pytest.mark.parametrize('name', CASES)
def test_texts_are_those_of_one_batch(name, options, tmp_path):
  """With stop strings and streams; two prompts are read at once."""
  made, texts = generator(CASES[name][0]), prompts(7, 32)
  given = options | method_of(name, tmp_path) | dict(max_new_tokens=NEW)
  stop = made.generate(texts, **given)[2]['text'][3:5]
  want = made.generate(texts, stop=[stop], **given)
  pieces, ended = [''] * 7, []

  def show(row, piece):
    pieces[row] += piece

  found = made.generate(
    texts, stop=[stop], on_text=show, on_end=lambda i, _: ended.append(i),
    **given, **SERVED,
  )  # fmt: skip
  assert said(found) == said(want)
  assert pieces == [r['text'] for r in found] and sorted(ended) == [*range(7)]
  assert 'stop' in {r['finish'] for r in found}


@pytest.mark.usefixtures('double')
def test_a_look_of_the_host_changes_no_text():
  """Draws of rejection depend on where a call begins: it keeps what it may,
  whatever the host waits for."""
  made, texts = generator('WF'), prompts(5, 32)
  given = DRAFT | dict(drafts=3, judge='rejection', max_new_tokens=45, seed=3)
  want = made.generate(texts, temperature=1.0, **given)
  assert any(sum(r['lengths'][2:]) for r in want)  # drafts are kept
  pieces = [''] * 5

  def show(row, piece):
    pieces[row] += piece

  for more in ({}, dict(requests=2, budget=64)):
    pieces[:] = [''] * 5
    found = made.generate(texts, temperature=1.0, on_text=show, **given, **more)
    assert said(found) == said(want) and pieces == [r['text'] for r in want]


@pytest.mark.parametrize('method', (LOOKUP, DRAFT), ids=lambda m: m['method'])
def test_requests_are_bitwise_what_they_are_alone(method):
  made = generator('GF', dtype='float32')
  texts = prompts(9, 32)  # two are read at once
  given = dict(max_new_tokens=NEW, **GREEDY, **method, **SERVED)

  def of(order):
    # With one that is longer: all prompts are padded alike.
    order = [*order, 9]
    found = made.generate([(*texts, [1] * 31)[i] for i in order], **given)
    return {
      i: (r['tokens'], [x.hex() for x in r['logprobs']])
      for i, r in zip(order, found, strict=True)
    }

  with jax.enable_x64(False):
    want = {}
    for i in range(9):
      want |= of([i])
    assert of(range(9)) == want and of([*reversed(range(9))]) == want


@pytest.mark.usefixtures('double')
def test_rows_take_requests_as_they_end(monkeypatch):
  """What is on the device: at most 3 rows, and none idle while one waits."""
  held, made, run = [], generator('WF'), shared_rows.Served.until

  def seen(self):
    held.append((len(self.free), len(self.waiting)))
    return run(self)

  monkeypatch.setattr(shared_rows.Served, 'until', seen)
  made.generate(prompts(8), max_new_tokens=NEW, **LOOKUP, **GREEDY, **SERVED)
  assert all(not waiting or not free for free, waiting in held)
  # Three batches of three would be three looks: here a row that ends is one.
  assert held[0] == (0, 5) and len(held) > 3


@pytest.mark.usefixtures('double')
def test_a_row_that_keeps_what_it_had_is_seen(monkeypatch):
  made, texts = generator('GF'), prompts(5)
  given = dict(max_new_tokens=NEW, **SAMPLED, **LOOKUP)
  want = made.generate(texts, **given)

  copied = jax.jit(shared_rows.admit.__wrapped__)
  monkeypatch.setattr(shared_rows, 'admit', copied)
  assert said(made.generate(texts, **given, **SERVED)) == said(want)

  def stale(state, fresh, index, new):
    after, seen = copied(state, fresh, index, new)
    return (after if state is None else after._replace(own=state.own)), seen

  monkeypatch.setattr(shared_rows, 'admit', stale)
  assert said(made.generate(texts, **given, **SERVED)) != said(want)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures('double')
@pytest.mark.parametrize(
  'pattern, mesh, name',
  [
    ('F', 'data=2,tensor=2', 'speculative'), ('F', 'fsdp=2,context=2', 'ppd'),
    ('GF', 'tensor=2', 'lookup'), ('GF', 'data=2,tensor=2', 'jacobi'),
  ],
)  # fmt: skip
def test_a_mesh_serves_as_one_device(pattern, mesh, name, tmp_path):
  given = dict(max_new_tokens=NEW, **SAMPLED, **method_of(name, tmp_path))
  want = generator(pattern).generate(prompts(6, 32), **given)
  devices = 2 if mesh == 'tensor=2' else 4
  many = generator(pattern, mesh=mesh, devices=devices)
  many._draft.cache_clear()
  found = many.generate(prompts(6, 32), **given, requests=4, budget=64)
  assert said(found) == said(want)
  if devices == 4:
    with support.refused('decode.requests=3', '2 batch shards'):
      many.generate(prompts(6), **given, **SERVED)


@pytest.mark.usefixtures('double')
@pytest.mark.parametrize('mesh', ('', 'data=2,tensor=2'))
def test_copies_of_a_request_move_with_it(mesh):
  """A request of a model of streams has a row of the cache for each."""
  given = dict(max_new_tokens=NEW, **SAMPLED, **LOOKUP)
  texts = prompts(6, 32)
  want = generator('WF', **STREAMS).generate(texts, **given)
  many = generator('WF', mesh=mesh, devices=4 if mesh else 1, **STREAMS)
  found = many.generate(texts, **given, requests=4, budget=64)
  assert said(found) == said(want)


@pytest.mark.usefixtures('double')
@pytest.mark.parametrize('new', (1, NEW))
def test_a_prompt_that_ends_at_once_frees_its_row(new):
  """Its first token is an end, or all that was asked for."""
  texts = prompts(7, 32)
  given = dict(max_new_tokens=new, **SAMPLED, **LOOKUP)
  first = generator('WF').generate(texts, **given)[4]['tokens'][0]
  made = generator('WF', end_id=first)
  want = made.generate(texts, **given)
  assert want[4]['finish'] == 'end' and not want[4]['tokens']
  assert said(made.generate(texts, **given, **SERVED)) == said(want)


@pytest.mark.usefixtures('double')
def test_logits_that_are_not_finite_end_one_request(monkeypatch):
  made, texts = generator('WF'), [[1, 2, 3], [4, 5], [6, 7], [8]]
  given = dict(max_new_tokens=3, **GREEDY, **LOOKUP)
  want = made.generate(texts, **given)
  table = made._params['embedding'].at[5].set(np.nan)
  monkeypatch.setattr(made, '_params', made._params | {'embedding': table})
  pieces = [''] * 4

  def show(row, piece):
    pieces[row] += piece

  broken = 'request 1 at step 0 .*[12] of 4 requests'
  with pytest.raises(errors.IntegrityError, match=broken):
    made.generate(texts, on_text=show, **given, requests=2, budget=64)
  others = [i for i in (0, 2, 3) if 5 not in want[i]['tokens']]
  assert [pieces[i] for i in others] == [want[i]['text'] for i in others]
  assert len(others) >= 2


def test_prompts_are_read_as_the_budget_says():
  sizes = functools.partial(shared_rows.Sizes, limit=9, chunk=9)
  assert sizes(rows=8, budget=128, length=32).lanes == 4
  assert sizes(rows=3, budget=128, length=32).lanes == 3
  assert sizes(rows=8, budget=64, length=512).lanes == 1
