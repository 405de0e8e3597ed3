"""Checks of hybrids and of recall hold, and fail where things are broken."""

import collections
import dataclasses
import json
import math

import claim_cases
import jax
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.models.mixers import mamba
from paraxis.train.claims import experiment
from paraxis.train.claims import families as claims_families
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks
from paraxis.train.claims import papers
from paraxis.train.claims import tasks
from paraxis.train.claims.scans import hybrid as claims_hybrid
from paraxis.train.claims.scans import recall as claims_recall
from paraxis.train.run import metrics

TASK = tasks.Recall(
  pairs=4, words=2, digits=2, choices=4, values=5, unseen=4, mix=(2, 4)
)


@pytest.fixture
def run(tmp_path):
  return claim_cases.run_of('', {'model.position': 'none'}, tmp_path)


def test_decoded_equals_alone_until_a_state_is_lost(run):
  real = mamba.Mamba2.commit
  lost = lambda *given: jax.tree.map(lambda x: 0 * x, real(*given))
  _, wrong = claim_cases.holds_until(
    mamba.Mamba2, 'commit', lost, claims_hybrid.decoding_equals_one_pass, run,
    cases={'hybrid': dict(pattern='M*', num_layers=2, mlp='none')},
    lengths=[7, 5, 9], prompts=[3, 5, 2], within=1e-9,
  )  # fmt: skip
  assert float(wrong.measured) > 1e-3


def test_bytes_of_a_cache_are_those_of_the_formula(run):
  sizes = dict(d_model=32, num_heads=4, num_kv_heads=2, num_layers=2)
  mixed = sizes | dict(pattern='M*', mamba=dict(head_dim=16, state=8, groups=2))
  ask = lambda ratios: claims_hybrid.cache_bytes(
    run, models={'attention': sizes, 'hybrid': mixed}, lengths=[64, 256],
    rows=4, over=['attention', 'hybrid'], ratios=ratios, within=1e-6,
  )  # fmt: skip
  slots = [2 * 2 * 8 * 2 * n for n in (64, 256)]  # K H, 2 bytes a number
  state = 64 * 8 * 4 + 3 * (64 + 2 * 2 * 8) * 2
  right = [2 * n / (n + state) for n in slots]
  assert ask(right).passed
  assert not ask([2.0, 2.0]).passed


def test_bands_save_work_where_rows_are_long(run):
  run.config = experiment.fields(run.config, {'model.pattern': 'FW'})
  ask = lambda at_most: claims_hybrid.banded_work(
    run, lengths=[512, 64], window=32, block=32, head=[2, 8], at_most=at_most
  )
  found = ask([0.7, 1.0])
  long, short = map(float, found.measured.split())
  assert found.passed and 0.5 < long < short <= 1
  assert not ask([0.5, 1.0]).passed
  with claims_hybrid.no_windows():
    assert ask([0.7, 1.0]).measured == '1.000 1.000'


def test_layers_see_their_band(run):
  changes = {'model.pattern': 'WF', 'model.window': 5}
  run.config = experiment.fields(run.config, changes)
  ask = lambda *sees: claims_hybrid.layers_see(run, length=12, sees=sees)
  assert ask(5, 12).passed and not ask(6, 12).passed
  with claims_hybrid.no_windows():
    found = ask(5, 12)
  assert not found.passed and found.measured == '12 12'
  # One token more, and not the last: that is no band.
  real = claims_hybrid._seen
  hole = lambda *given: real(*given) & ~np.eye(12, k=-2, dtype=bool)
  with knockouts.patched(claims_hybrid, '_seen', hole):
    found = ask(5, 12)
  assert not found.passed and 'NOT in the band' in found.caveat


def answers(batch, row):
  """[(name, number), ...] as they are bound, and as they are asked."""
  entries = batch.tokens[row].reshape(-1, 4)
  entries = [(tuple(e[:2]), tuple(e[2:])) for e in entries]
  return entries[: len(entries) // 2], entries[len(entries) // 2 :]


def test_what_is_asked_was_bound_once(run):
  held = tasks.draw(TASK, 6, 0, held_out=True)
  seen = tasks.draw(TASK, 6, 0)
  kept = {tuple(n) for n in TASK.names(True)}
  for row in range(6):
    bound, asked = answers(held, row)
    assert len(dict(bound)) == 4 and sorted(bound) == sorted(asked)
    assert set(dict(bound)) <= kept
    if row >= 3:  # the other half are two documents of two bindings
      bound, asked = answers(seen, row)
      assert sorted(bound) == sorted(asked) and not set(dict(bound)) & kept
  assert seen.segments[0].tolist() == [1] * 16 + [2] * 16
  assert seen.positions[0].tolist() == 2 * list(range(16))
  assert held.weights.sum() == held.denominator == 6 * 4 * 2
  where = np.flatnonzero(held.weights[0])
  assert (held.targets[0][where] == held.tokens[0][where + 1]).all()
  assert where.tolist() == [16 + 4 * n + i for n in range(4) for i in (1, 2)]
  again = tasks.draw(TASK, 6, 0, held_out=True)
  assert (again.tokens == held.tokens).all()
  other = tasks.draw(TASK, 6, 1, held_out=True)
  assert (other.tokens != held.tokens).any()


def recalled(run, models, more, seeds=(0, 1, 2), learned=()):
  return claims_recall.recall(
    run, task=dataclasses.asdict(TASK), models=models,
    seeds=seeds, more=more, learned=dict(learned), picture='recall.png',
    fields={'model.d_model': 32, 'train.steps': 2, 'train.batch_size': 4},
  )  # fmt: skip


def test_recall_trains_measures_and_draws(run, monkeypatch):
  own, again = run.other(run.config, 'own'), []
  own.say = again.append
  for _ in range(2):
    found = recalled(own, {'a': ['F', 1]}, [['a', 'a', -0.1]], [0])
    assert found.passed and 'chance 4.0%' in found.caveat
    assert (own.results / 'recall.png').exists()
  assert again.count('recall_a-0: training') == 1
  assert again.count('recall_a-0: kept') == 1

  def curve(config, *rest):
    attends = config.model.pattern == 'F'
    assert config.model.position == ('rope' if attends else 'none')
    assert config.model.d_model == 32 and config.train.steps == 2
    return [[2, (0.1 if attends else 0.9) + config.train.seed / 100]]

  monkeypatch.setattr(on_tasks, 'train', curve)
  both = {'a': ['F', 1], 'b': ['M', 1]}
  assert recalled(run, both, [['a', 'b', 0.0]]).verdict == 'opposite'
  assert not recalled(run, both, [['a', 'a', 0.0]]).passed
  found = recalled(run, both, [['b', 'a', 0.7]], learned={'b': 0.5})
  assert found.passed and found.verdict == 'reproduced'
  assert '; 2 steps of 4 rows' in found.caveat


@pytest.mark.parametrize('seeds', ([0], [0, 1, 2]))
def test_as_good_as_what_has_not_learned_is_nothing(run, monkeypatch, seeds):
  """Attention that is broken, a hybrid that is hardly better."""
  shares = {'F': 0.0, 'M': 0.01, 'MF': 0.02}
  curve = lambda config, *rest: [[2, shares[config.model.pattern]]]
  monkeypatch.setattr(on_tasks, 'train', curve)
  models = {'a': ['F', 1], 'm': ['M', 1], 'h': ['MF', 2]}
  both = [['h', 'm', 0.0], ['h', 'a', -0.02]]
  assert recalled(run, models, both, seeds).passed
  found = recalled(run, models, both, seeds, {'a': 0.95})
  assert not found.passed and found.verdict == 'not reproduced'
  assert 'a below 95%: not learned' in found.caveat


def test_steps_that_differ_are_told(run, monkeypatch):
  curve = lambda config, *rest: [[config.train.steps, 0.5]]
  monkeypatch.setattr(on_tasks, 'train', curve)
  longer = {'a': ['F', 1], 'b': ['F', 1, {'train.steps': 1500}]}
  found = recalled(run, longer, [['a', 'b', -0.1]])
  assert '; a 2, b 1,500 steps of 4 rows' in found.caveat


def test_a_model_has_fields_of_its_own_and_states_are_trained(run):
  task = dict(kind='parity', length=16, mix=[4, 8])
  found = claims_recall.recall(
    run, task=task, seeds=[0], more=[['a', 'b', -1.0]], learned={},
    models={'a': ['R', 1, {'model.recurrent.conv_width': 1}], 'b': ['M', 1]},
    picture='parity.png',
    fields={'model.d_model': 32, 'train.steps': 1, 'train.batch_size': 4},
  )  # fmt: skip
  assert found.passed and found.verdict == 'direction only'
  assert 'after 9 to 16 bits' in found.caveat
  assert 'up to 8 bits, the longest in training: a 0.' in found.caveat
  names = [p.name for p in run.results.iterdir()]
  assert {'parity_a-0', 'parity_b-0', 'parity.png'} <= set(names)
  width = lambda *own: (
    claims_recall._config(
      run, tasks.make(**task), {}, 'R', 1, *own
    ).model.recurrent.conv_width
  )
  assert width({'model.recurrent.conv_width': 1}) == 1
  assert width() == run.config.model.recurrent.conv_width


def test_seeds_share_no_batch(run):
  seeds = ({'train.seed': s, 'train.steps': 4} for s in range(3))
  configs = [claims_recall._config(run, TASK, own, 'F', 1) for own in seeds]
  made = [on_tasks.trained_on(c, TASK, t) for c in configs for t in range(4)]
  assert len({batch.tokens.tobytes() for batch in made}) == 12


def test_recall_resumes_where_it_stopped(run, tmp_path):
  fields = {'model.d_model': 32, 'train.steps': 4, 'train.batch_size': 4}
  config = claims_recall._config(run, TASK, fields, 'F', 1)
  train = lambda folder, say: on_tasks.train(config, TASK, 2, folder, say)
  whole, said = train(tmp_path / 'whole', lambda line: None), []

  def stop(line):
    if line.startswith('step 2'):
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train(tmp_path / 'half', stop)
  assert train(tmp_path / 'half', said.append) == whole
  assert [step for step, _ in whole] == [2, 4]
  assert said[0] == 'resumed from step 2' and said[1].startswith('step 4')


def test_an_answer_is_right_when_all_its_digits_are():
  batch = tasks.draw(TASK, 2, 0, held_out=True)

  class Model:
    """Says the target, but for the last digit of the first answer."""

    config = schema.Model()

    def features(self, params, batch):
      return batch.targets, None

    def logits(self, params, x):
      z = jax.nn.one_hot(x, TASK.vocabulary)
      return z.at[0, 18].set(-z[0, 18])

  found = on_tasks.right(Model(), TASK, {}, batch)
  assert found.tolist() == pytest.approx([7 / 8])


def test_frequencies_alone_are_the_entropy_of_the_held_out_text(run, tmp_path):
  held = 'a dog, a dot, a gate'
  rows = dict(text=held, split='held'), dict(text='zzz' * 9, split='train')
  path = tmp_path / 'text.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  config = experiment.fields(
    run.config, {'data.path': str(path), 'data.tokenizer': 'bytes'}
  )
  count = collections.Counter(held)
  count['end of the document'] = 1
  n = sum(count.values())
  bits = sum(k * math.log2(n / k) for k in count.values()) / len(held)
  assert claims_families.unigram(config) == pytest.approx(bits)
  masked = {'train.objective': 'masked', 'model.visibility': 'full',
            'model.vocab_size': 264, 'model.mask_id': 263}  # fmt: skip
  masked = experiment.fields(config, masked)
  assert claims_families.unigram(masked) == pytest.approx(bits)


def test_a_growing_batch_reads_as_much_as_the_constant_one():
  config = claim_cases.run_of('megatron_turing').config
  module = command_line.load_module('megatron_turing')
  (claim,) = (c for c in papers.claims(module, '') if 'growing batch' in c.name)
  assert claim.parameters['families'] == module.RAMPS
  ramp, constant, even = (
    experiment.fields(config, module.SMALL, f) for f in module.RAMPS.values()
  )
  read, steps = claims_families.tokens, ramp.train.steps
  assert not even.train.batch_ramp
  assert abs(even.train.steps / steps - 1) < 0.02
  sizes = [min(16, 2 + 2 * (t // 20)) for t in range(steps)]
  for each in (ramp, constant, even):
    assert read(each) == sum(sizes) * 256
  shorter = experiment.fields(ramp, {'train.steps': steps - 1})
  assert read(shorter) == read(ramp) - 16 * 256


def test_families_are_trained_alike(run, monkeypatch):
  bits = {'full-0': 2.0, 'full-1': 2.1, 'full-2': 2.2}
  bits |= {'band-0': 2.5, 'band-1': 2.6, 'band-2': 2.7}
  seen = claim_cases.trains_to(monkeypatch, bits)
  rows = {step: {'train/loss': 7 / step} for step in (1, 2, 3)}
  monkeypatch.setattr(metrics, 'read', lambda folder: rows)

  def ask(bound, *better, claim='learn', what='better'):
    bounds = {'F': bound, 'W': 9.0}
    known = lambda config: bounds[config.model.pattern]
    monkeypatch.setattr(claims_families, 'unigram', known)
    return getattr(claims_families, claim)(
      run, families={'full': {}, 'band': {'model.pattern': 'W'}},
      fields={'train.steps': 2, 'train.batch_size': 8}, seeds=[0, 1, 2],
      **{what: better},
    )  # fmt: skip

  found = ask(2.3)  # 2.1 +-0.058
  length = run.config.data.sequence_length
  assert found.passed and f'after {2 * 8 * length:,} tokens' in found.caveat
  assert found.verdict == 'reproduced' and 'band 2.6000' in found.caveat
  assert [c.train.steps for c in seen] == [2] * 6
  assert [c.train.seed for c in seen] == [0, 0, 1, 1, 2, 2]
  assert (run.results / claims_families.PICTURE).exists()
  assert ask(2.1).verdict == 'not reproduced' and not ask(2.1).passed
  assert ask(9.0, ['full', 'band', 0.4]).passed
  assert not ask(9.0, ['full', 'band', 0.6]).passed
  share = 2.5 / 2.0 - 1  # the largest of three
  near = dict(claim='near', what='within')
  assert ask(9.0, ['band', 'full', share + 0.01], **near).passed
  assert not ask(9.0, ['band', 'full', 0.99 * 0.5 / 2.1], **near).passed
  assert ask(9.0, ['band', 'full', 0.0]).verdict == 'opposite'
