"""Claims about a side network fail where states are kept, or have no say."""

import json

import claim_cases
import numpy as np
import pytest

from paraxis.configs import unipt
from paraxis.configs.base import command_line
from paraxis.train.claims import papers
from paraxis.train.claims import tasks
from paraxis.train.claims.layouts import side

SMALL = {
  'model.d_model': 16, 'model.d_ff': 16, 'model.num_layers': 1,
  'data.sequence_length': 16, 'train.batch_size': 4, 'train.side': 2,
}  # fmt: skip
WORDS = {'sea': 'gull sail wind', 'hill': 'rock stone path'}


def test_a_say_before_the_first_step_is_seen():
  right, wrong = claim_cases.falls('unipt', 'loud', SMALL)
  assert right.measured == '0 differ' and wrong.measured != right.measured


@pytest.mark.parametrize('kept, passed', [(0, True), (1, False)])
def test_states_that_are_kept_are_seen(monkeypatch, kept, passed):
  """A gradient whose layers keep 4 arrays of R, or the state besides; both
  programs copy weights."""
  seen = []

  def held(config, topology):
    layers, model = config.model.num_layers, config.model
    seen.append((config.train.remat, topology))
    tokens = config.train.batch_size * config.data.sequence_length // 4
    copy = layers * 100 * model.d_model**2
    if not config.train.side:
      return np.array([copy + layers * tokens * 9_000, copy])
    each = 4 * config.train.side + kept * model.d_model
    return np.array([5 + copy + layers * tokens * 4 * each, copy])

  monkeypatch.setattr(side, '_temporaries', held)
  claim = {
    c.name: c for c in papers.claims(command_line.load_module('unipt'), '')
  }['memory free of the width']
  given = dict(claim.parameters)
  found = side.memory(claim_cases.run_of('unipt'), **given)
  assert found.passed == passed, found
  assert {*seen} == {('full', given['topology'])}
  if passed:
    assert found.measured == '4.00 4.00' and '35.2 at 1024' in found.caveat


@pytest.fixture
def text(tmp_path):
  """A folder of two domains, documents of both splits."""
  rng, folder = np.random.default_rng(0), tmp_path / 'text'
  folder.mkdir()
  for name, words in WORDS.items():
    rows = []
    for i in range(12):
      body = ' '.join([*rng.choice(words.split(), 30), ''])
      split = 'held' if i % 6 == 0 else 'train'
      rows.append(json.dumps(dict(id=f'{name}{i}', text=body, split=split)))
    (folder / f'{name}.jsonl').write_text('\n'.join(rows))
  return folder


def test_a_piece_asks_for_its_domain(text):
  task = tasks.make('labels', path=str(text), size=24, classes=2)
  for held in (False, True):
    batch = tasks.draw(task, 16, 0, held)
    assert batch.tokens.shape == (16, 24)
    assert batch.weights.sum() == batch.weights[:, -1].sum() == 16
    for tokens, answer in zip(batch.tokens, batch.targets[:, -1], strict=True):
      piece = bytes(tokens.tolist()).decode()
      words = [{*w.split()} for w in (WORDS['hill'], WORDS['sea'])]
      whole = {*piece.split()[1:-1]}
      assert whole <= words[answer] and not whole & words[1 - answer], piece
    assert {*batch.targets[:, -1].tolist()} == {0, 1}


def learned(text, folder, **given):
  """harness.Outcome of the claim, of trainings of 2 steps."""
  run = claim_cases.run_of('unipt', SMALL | {'data.path': str(text)}, folder)
  run.results.mkdir(parents=True)
  short = {'train.steps': 2, 'optimizer.warmup_steps': 1}
  return side.learns(
    run, task=dict(path=str(text), size=16, classes=2), base=short,
    fields=short, seeds=[0], better=[['side', 'head only', 0.0]], **given,
  )  # fmt: skip


def test_a_network_without_a_say_is_the_head_alone(text, tmp_path, monkeypatch):
  monkeypatch.setattr(side, 'HELD', 1)
  ways = {name: unipt.WAYS[name] for name in ('head only', 'side')}
  with side.deaf():
    found = learned(text, tmp_path / 'deaf', families=ways)
  assert not found.passed and found.measured == '0.0000', found


def test_ways_to_fine_tune_begin_with_one_base(text, tmp_path, monkeypatch):
  """What a way does not learn is the base's, to the bit."""
  seen = {}
  right = side._wrong

  def wrong(config, params, task):
    seen[config.train.side, config.train.lora.rank] = {
      p: np.asarray(x) for p, x in params.items()
    }
    return right(config, params, task)

  monkeypatch.setattr(side, '_wrong', wrong)
  monkeypatch.setattr(side, 'HELD', 1)
  found = learned(text, tmp_path / 'own', families=unipt.WAYS)
  assert 'numbers learned: head only 4,224, side ' in found.caveat
  base, beside, adapted = (seen[k] for k in ((0, 0), (16, 0), (0, 4)))
  for path, x in base.items():
    for other in (beside, adapted):
      assert np.array_equal(x, other[path]) == (path != 'head'), path
  assert np.any(beside['side/up']) and len(found.measured.split()) == 1


def test_a_rate_beyond_those_that_were_tried_is_beside_each_way():
  """The claim has to hold with it, too."""
  module = command_line.load_module('unipt')
  (claim,) = (c for c in papers.claims(module, '') if c.check is side.learns)
  ways, rate = claim.parameters['families'], 'optimizer.learning_rate'
  for name in ('side', 'head only'):
    assert ways[f'{name}, .03'] == ways[name] | {rate: 2 * ways[name][rate]}
  rows = [(a, b) for a, b, _ in claim.parameters['better']]
  for own, other in (('side', 'head only'), ('lora', 'side')):
    assert {(own, other), (own, f'{other}, .03')} <= {*rows}
