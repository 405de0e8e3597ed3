"""Claims about experts fail where the text moves no belief, or splits do not
matter; experts of tiny trainings, and what is made of their numbers."""

import json
import math

import claim_cases
import jax
import numpy as np
import pytest
import support

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.claims import ablation
from paraxis.train.claims import knockouts
from paraxis.train.claims import papers
from paraxis.train.claims.outer import domains
from paraxis.train.data import corpus
from paraxis.train.program import make

WORDS = {'sea': 'gull sail wind', 'hill': 'rock stone path'}


def test_an_ensemble_whose_text_moves_no_belief_is_seen():
  right, _ = claim_cases.falls('branch_train_merge', 'belief')
  assert 'the copy, to the bit' in right.caveat


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """A folder of two domains, documents of both splits."""
  folder = tmp_path_factory.mktemp('text')
  rng = np.random.default_rng(0)
  for name, words in WORDS.items():
    rows = []
    for i in range(24):
      body = ' '.join(rng.choice(words.split(), 30 + i))
      split = 'held' if i % 6 == 0 else 'train'
      rows.append(json.dumps(dict(id=f'{name}{i}', text=body, split=split)))
    (folder / f'{name}.jsonl').write_text('\n'.join(rows))
  return folder


ONE = {'rates': [0.01], 'tuning': 0}  # that of the config


def run_of(text, folder):
  changes = {
    'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 264,
    'data.tokenizer': 'bytes', 'data.sequence_length': 32,
    'data.path': str(text), 'data.cache_dir': str(folder / 'tokens'),
    'train.steps': 4, 'train.batch_size': 4, 'model.num_layers': 1,
  }  # fmt: skip
  run = claim_cases.run_of('branch_train_merge', changes, folder / 'own')
  run.results.mkdir()
  return run


def test_a_random_split_has_the_same_documents(text, tmp_path):
  names = domains._split(str(text), tmp_path / 'split', 2, seed=5)
  assert names == ['part0', 'part1']
  before = corpus.documents(str(text))
  after = corpus.documents(str(tmp_path / 'split'))
  texts = lambda found, held: sorted(d.text for d in found if d.held == held)
  for held in (False, True):
    assert texts(before, held) == texts(after, held)
  own = {d.text: d.domain for d in before}
  sizes = dict.fromkeys(names, 0)
  for d in after:
    assert d.held == (d.domain == own[d.text])
    if not d.held:
      sizes[d.domain] += d.n_bytes
  assert max(sizes.values()) < 1.1 * min(sizes.values())
  mixed = {(d.domain, own[d.text]) for d in after if not d.held}
  assert len(mixed) == 4  # every part has text of every domain
  again = domains._split(str(text), tmp_path / 'again', 2, seed=5)
  assert (
    again == names
    and (tmp_path / 'again/text.jsonl').read_text()
    == (tmp_path / 'split/text.jsonl').read_text()
  )


def killed(runs, out, say):
  out.mkdir()
  raise SystemExit(errors.EXIT_PREEMPTED)


def test_experts_of_a_seed(text, tmp_path, monkeypatch):
  """Whole trainings; the numbers are those of the runs, read again alone."""
  run = run_of(text, tmp_path)
  sets = {'half': ['domains', 0.5]}
  train = lambda: domains._trained(
    run, sets, [0], {'optimizer.warmup_steps': 1}, ONE
  )
  with monkeypatch.context() as patch:
    patch.setattr(domains.merge, 'write', killed)
    with pytest.raises(SystemExit):
      train()
  found, *_ = train()  # the folder of the average is there, and is empty
  assert list(found) == ['dense', 'half, ensemble', 'half, average']
  folder = run.results / 'domains_0.5-0'
  made = {p.name for p in folder.iterdir() if p.is_dir()}
  assert made == {'hill', 'sea', 'average'}
  steps = support.losses(folder / 'sea')
  assert list(steps) == [1]  # half of 4 steps, of two experts
  assert list(support.losses(run.results / 'seed_0.5-0')) == [1, 2]
  kept = [
    json.loads((run.results / name / ablation.RECORD).read_text())
    for name in ('seed_0.5-0', 'domains_0.5-0')
  ]
  assert kept[1]['parts']['task']['seed'] == kept[0]['key']
  one = kept[1]['numbers']
  assert len(one['experts']) == 2
  bits = -sum(one['average']) / math.log(2) / one['bytes']
  assert found['half, average'] == [pytest.approx(bits)]
  wanted = np.log(np.exp(np.array(one['experts'])).mean(0)).sum()
  wanted /= -math.log(2) * one['bytes']
  assert found['half, ensemble'] == [pytest.approx(wanted)]
  best = np.array(one['experts']).max(0).sum() / -math.log(2) / one['bytes']
  assert best <= found['half, ensemble'][0]


def test_a_knock_out_reads_the_trainings_of_the_claim(
  text, tmp_path, monkeypatch
):
  made = []

  def experts(parts, source, config, folder, say):
    made.append(folder.name)
    return dict(experts=[[-1.0, -9.0], [-9.0, -1.0]], average=[-3], bytes=5)

  monkeypatch.setattr(domains, '_experts', experts)
  bits = {'dense-0': 1.0, 'seed_0.5-0': 2.0}
  seen = claim_cases.trains_to(monkeypatch, bits)
  module = command_line.load_module('branch_train_merge')
  off = {k.name: k for k in knockouts.of(module, '')}['posterior']
  run = run_of(text, tmp_path)
  given = dict(
    sets={'half': ['domains', 0.5]}, seeds=[0], fields={}, dense=ONE,
    better=[['half, ensemble', 'dense', 0.0]],
  )  # fmt: skip
  claim = papers.Claim('a', 'LEARN', domains.learn, given, None)
  assert domains.learn(run, **given).passed
  assert not knockouts.without(run, off, claim).passed
  assert len(seen) == 2 and made == ['domains_0.5-0']


def test_a_domain_without_text(text, tmp_path):
  run = run_of(text, tmp_path)
  read = lambda config: make(config, '', jax.devices()[:1], lambda line: None)
  ask = lambda mixture: read(
    domains.experiment.fields(run.config, {'data.mixture': mixture})
  )
  with support.refused("no domain 'lake'"):
    ask('lake=1')
  lines = [json.dumps(dict(text='x y z', split='held', domain='empty'))]
  (text / 'more.jsonl').write_text('\n'.join(lines))
  with support.refused('0 of 49 documents', "of domain 'empty'"):
    ask('empty=1')
  assert ask('sea=1').batches.rows < read(run.config).batches.rows


def test_bits_are_judged_seed_by_seed(monkeypatch, tmp_path):
  """Experts of which one is drawn lose, and those of random splits."""
  module = command_line.load_module('branch_train_merge')
  rng = np.random.default_rng(0)

  def trained(run, variants, seeds, learn=None, task=None):
    del learn
    (name,) = variants
    rows = []
    for seed in seeds:
      own = rng.gamma(4, 5, (6, 60))  # nats of experts for pieces
      right = np.arange(60) % 6
      if task and task['parts'] == 'domains':  # at a loss in the others
        own *= 3
        own[right, np.arange(60)] = 1 + 0.1 * rng.random(60)
      numbers = dict(
        experts=(-own).tolist(), average=[-12.0] * 60, bytes=1000,
        bits_per_byte=0.5 + 0.01 * seed,
      )  # fmt: skip
      record = dict(numbers=numbers, cpu_seconds=1.0, key='')
      one = type('One', (), dict(record=record, folder=tmp_path))
      rows.append(one())
    return {name: rows}

  monkeypatch.setattr(ablation, 'trained', trained)
  run = claim_cases.run_of('branch_train_merge', {}, tmp_path)
  split, together, average = (c[2] for c in module.claims()[1:])
  call = lambda given: domains.learn(
    run, **{k: v for k, v in given.items() if k not in ('check', 'admits')}
  )
  assert call(split).passed and call(together).passed
  with domains.unmoved():
    assert not call(split).passed
  assert not call(average).passed
  rows = knockouts.of(module, 'branch_train_merge')
  off = {k.name: k for k in rows}['domains']
  found = call(together | off.change)
  assert (
    not found.passed and 'random 0.5, ensemble below dense' == found.expected
  )
  assert (tmp_path / domains.PICTURE).exists()


def test_the_dense_model_has_the_best_of_its_rates(monkeypatch, tmp_path):
  """By a seed of its own; at the config's rate it is what `dense` was."""
  run = claim_cases.run_of('branch_train_merge', {}, tmp_path / 'own')
  seen, of = [], {'dense': 2.4, 'dense 0.005': 2.3, 'dense 0.02': 2.5}

  def trained(run, variants, seeds):
    ((name, config),) = variants.items()
    seen.append((name, config.optimizer.learning_rate, tuple(seeds)))
    bits = lambda seed: {'bits_per_byte': of[name] + 0.01 * seed}
    record = lambda seed: dict(numbers=bits(seed), cpu_seconds=10.0 + seed)
    one = lambda seed: type('One', (), dict(record=record(seed)))
    return {name: [one(seed) for seed in seeds]}

  monkeypatch.setattr(ablation, 'trained', trained)
  ask = lambda: domains._dense(run, [0, 1], [0.005, 0.01, 0.02], 3)
  assert ask() == (pytest.approx([2.3, 2.31]), 13.0, 0.005)
  assert seen[0] == ('dense 0.005', 0.005, (3,))
  assert seen[1:3] == [('dense', 0.01, (3,)), ('dense 0.02', 0.02, (3,))]
  assert seen[3] == ('dense 0.005', 0.005, (0, 1))
  of['dense'] = 2.2
  assert ask()[2] == 0.01 and seen[-1] == ('dense', 0.01, (0, 1))
