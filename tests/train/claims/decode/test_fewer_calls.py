"""Claims about calls that a method saves, on tasks that are learned at once."""

import claim_cases
import numpy as np
import pytest

from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks
from paraxis.train.claims.decode import fewer_calls


@pytest.fixture
def oracle(monkeypatch):
  """Models that know the answer: `fewer_calls._calls` of a plain loop."""

  def use(correct):
    monkeypatch.setattr(
      on_tasks, 'models', lambda *given: ([(correct, 1.0)], 1.0)
    )

  return use


class Corrector:
  """Says the words as they should be; copies `drafts` at a time."""

  def __init__(self, words):
    self.words = words

  def generate(self, ids, max_new_tokens, method, drafts=0, **how):
    out = []
    for row in ids:
      source = row[1:-1]
      text = [w % self.words for w in source]
      made, calls = 1, 0  # the first token comes with the prompt
      while made < max_new_tokens:
        calls, n = calls + 1, 0
        while (
          method == 'aggressive'
          and n < drafts
          and made + n < max_new_tokens
          and source[made + n] == text[made + n]
        ):
          n += 1
        made += n + 1
      out.append(dict(tokens=text[:max_new_tokens], calls=calls))
    return out


def test_fewer_calls_where_less_is_wrong(oracle, tmp_path):
  given = dict(
    task=dict(count=24, words=8, noise=0.05), fields={}, rows=8,
    expected=[0.05, 5.0], noises=[0.0, 0.05, 0.5, 1.0], seeds=[0, 1, 2],
  )  # fmt: skip
  oracle(Corrector(8))
  run = claim_cases.run_of('aggressive_decoding', folder=tmp_path)
  long = dict(method='aggressive', drafts=24)
  found = fewer_calls.corrections(run, method=long, **given)
  assert found.passed and '1: 1.00' in found.caveat
  assert (tmp_path / 'corrections.png').exists()
  short = dict(method='aggressive', drafts=2)
  assert not fewer_calls.corrections(run, method=short, **given).passed


def test_another_text_fails(oracle, tmp_path):
  class Wrong(Corrector):
    def generate(self, ids, max_new_tokens, method, **how):
      found = super().generate(ids, max_new_tokens, method, **how)
      if method == 'aggressive':
        found[0]['tokens'][-1] += 1
      return found

  oracle(Wrong(8))
  found = fewer_calls.corrections(
    claim_cases.run_of('aggressive_decoding', folder=tmp_path),
    task=dict(count=24, words=8, noise=0.05), fields={}, rows=4,
    expected=[0.0, 2.0], noises=[0.0, 1.0], seeds=[0],
    method=dict(method='aggressive', drafts=24),
  )  # fmt: skip
  assert not found.passed and 'NOT the same' in found.caveat


def test_words_are_a_source_and_its_correction():
  task = tasks.make('words', count=5, words=7, noise=0.5)
  tokens, targets, weights = task.document(
    12, 50, np.random.default_rng(0), True
  )
  source, right = tokens[:, 1:6], tokens[:, 7:]
  assert (tokens[:, 0] == 14).all() and (tokens[:, 6] == 15).all()
  assert (source % 7 == right).all() and (right < 7).all()
  assert 0.35 < (source >= 7).mean() < 0.65
  assert (weights[0] == [0] * 6 + [1] * 5 + [0]).all()
  assert (targets[:, 6:11] == right).all()


def test_pictures_are_rectangles():
  task = tasks.make('picture', side=8, colours=4, shapes=2, noise=0.0)
  tokens, pixels, weights = task.document(
    64, 30, np.random.default_rng(0), True
  )
  assert (tokens[:, 0] == 4).all() and (tokens[:, 1:] == pixels[:, :-1]).all()
  assert weights.all() and set(np.unique(pixels)) == {0, 1, 2, 3}
  rows = pixels.reshape(-1, 8, 8)
  edges = (rows[:, :, 1:] != rows[:, :, :-1]).sum(2).max()
  assert edges <= 4  # two rectangles have four edges in a row


@pytest.mark.sampled(3)
def test_a_small_training_and_its_decoding(tmp_path):
  """Not learned in so few steps: the texts still are those of one by one."""
  small = {
    'model.d_model': 32, 'model.d_ff': 64, 'model.num_layers': 1,
    'train.steps': 4, 'train.batch_size': 4,
  }  # fmt: skip
  found = fewer_calls.pictures(
    claim_cases.run_of('speculative_jacobi', folder=tmp_path),
    task=dict(side=4, colours=4, shapes=2, noise=0.0), fields=small,
    methods={'replay': dict(method='jacobi', drafts=4)}, at_most=1.0, rows=4,
    seeds=[0],
  )  # fmt: skip
  assert 'the same pictures' in found.caveat and 'NOT' not in found.caveat
  assert on_tasks.Numbers(5).decode_bytes([0, 1]) == b'ab'
