"""Masks are drawn by (seed, step, row); their sums are unbiased.

Legend: B rows, T slots of a row.
"""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.models.text import tokenizer
from paraxis.train.data import batches as data
from paraxis.train.data import objectives
from paraxis.train.data import token_cache

MASK = 300
MODEL = dict(vocab_size=301, visibility='full', mask_id=MASK)


def config_of(path='', model=(), train=(), **fields):
  return schema.view(dict(
    model=MODEL | dict(model),
    train=dict(batch_size=8, seed=3, objective='masked') | dict(train),
    data=dict(path=path, tokenizer='bytes', sequence_length=32,
              held_out_fraction=0.3) | fields,
  ))  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Documents of 5 to 80 letters."""
  path = tmp_path_factory.mktemp('text')
  rng, lines = np.random.default_rng(0), []
  for _ in range(120):
    letters = rng.integers(97, 123, rng.integers(5, 80)).astype(np.uint8)
    lines.append(json.dumps({'text': letters.tobytes().decode()}))
  (path / 'letters.jsonl').write_text('\n'.join(lines))
  return path


def load(folder, **changes):
  config = config_of(str(folder), cache_dir=str(folder / 'cache'), **changes)
  corpus = token_cache.tokens(config, tokenizer.load('bytes'))
  return config, corpus


def same(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('shift', [False, True])
def test_masks_replace_what_is_predicted(folder, shift):
  config, corpus = load(folder, model=dict(mask_shift=shift))
  plain = dataclasses.replace(config, train=schema.Train(batch_size=8, seed=3))
  found = data.Batches(config, corpus).batch_at(5)
  clean = data.Batches(plain, corpus).batch_at(5)
  same(found[1:4], clean[1:4])
  assert found.denominator == clean.denominator
  masked = found.weights > 0
  assert 0.2 < masked.mean() < 0.8 and not (masked & (clean.weights == 0)).any()
  for row, slot in itertools.product(range(8), range(32)):
    hidden = masked[row, slot]
    held, source = found.tokens[row], clean.targets[row]
    if not shift:
      assert held[slot] == (MASK if hidden else source[slot])
    elif clean.positions[row, slot] == 0:
      assert held[slot] == clean.tokens[row, slot]
    else:
      before = masked[row, slot - 1]
      assert held[slot] == (MASK if before else source[slot - 1])


@pytest.mark.parametrize('shift', [False, True])
def test_blocks_have_a_share_of_their_own(folder, shift):
  """Ids that a mask stands for can be read back, and are those of the text."""
  block = dict(visibility='block', block=8, mask_shift=shift)
  config, corpus = load(folder, model=block, train=dict(objective='block'))
  plain = dataclasses.replace(config, train=schema.Train(batch_size=8, seed=3))
  shares, text = [], data.Batches(plain, corpus)
  made = data.Batches(config, corpus)
  for t in range(40):
    found, clean = made.batch_at(t), text.batch_at(t)
    ids = clean.tokens if shift else clean.targets
    back = np.where(found.tokens < 0, -1 - found.tokens, found.tokens)
    np.testing.assert_array_equal(back, ids)
    hidden = found.weights > 0
    if not shift:
      np.testing.assert_array_equal(found.tokens < 0, hidden)
    assert not (found.tokens[clean.positions == 0] < 0).any() or not shift
    # Slots of one block of one document, whole ones: with a shift, those that
    # predict it.
    for row, slot in np.argwhere((clean.positions + shift) % 8 == 0):
      part = slice(slot, slot + 8)
      if (np.diff(clean.positions[row, part]) == 1).sum() == 7:
        shares.append(hidden[row, part].mean())
        weights = found.weights[row, part][hidden[row, part]]
        assert len(set(weights.tolist())) <= 1, 'one share for a block'
  assert 0.45 < np.mean(shares) < 0.55 and np.std(shares) > 0.3


@pytest.mark.parametrize('shift', [False, True])
def test_a_perfect_model_of_blocks_reaches_the_entropy(shift):
  """Three equal fair bits a block: ln 2 nats, of the last one that is seen."""
  size, T, rows, ln2 = 3, 12, 20_000, np.log(2)
  config = config_of(
    model=dict(visibility='block', block=size, mask_shift=shift),
    train=dict(objective='block'),
  )
  ids = np.tile(np.arange(1, T + 1, dtype=np.int32), (rows, 1))
  ones, at = np.ones_like(ids), np.tile(np.arange(T, dtype=np.int32), (rows, 1))
  clean = batch_lib.Batch(
    ids - 1 if shift else ids, ids, ones, at, ones.astype(np.float32), ids.size
  )
  found = objectives.batch(config, clean, 0, range(rows), rows)
  for first in (3, 6, 9):  # what attention sees as a block
    hidden = found.tokens[:, first : first + size] < 0
    weights = found.weights[:, first - shift : first - shift + size]
    alone = hidden.sum(1, keepdims=True) == size
    nats = (weights * (alone & hidden) * ln2).sum(1)
    error = nats.std() / rows**0.5
    assert abs(nats.mean() - ln2) < 4 * error < 0.1


def test_noise_is_of_seed_step_and_row(folder):
  config, corpus = load(folder)
  batches = data.Batches(config, corpus)
  whole = batches.batch_at(4)
  for lo in (0, 2, 6):
    same(
      batches.batch_at(4, lo, lo + 2)[:5], [x[lo : lo + 2] for x in whole[:5]]
    )
  parts, _ = load(folder, train=dict(microbatches=4))
  split = data.Batches(parts, corpus).batch_at(4)
  same([np.reshape(x, (8, 32)) for x in split[:5]], whole[:5])
  again = next(itertools.islice(batches.iterate(4), 1))
  assert again[0] == 4
  same(again[1], whole)
  hidden = lambda b: b.weights > 0
  other, _ = load(folder, train=dict(seed=4))
  for t, made in ((5, batches), (4, data.Batches(other, corpus))):
    assert (hidden(made.batch_at(t)) != hidden(whole)).any()
  rows = hidden(whole)
  assert not (rows[0] == rows[1]).all()


def test_held_out_noise_is_that_of_any_layout(folder):
  config, corpus = load(folder)
  parts, _ = load(folder, train=dict(microbatches=4, seed=9))
  one, two = (data.evaluation(c, corpus)[0] for c in (config, parts))
  rows = [
    np.concatenate([held.batch_at(i).tokens for i in range(len(held))])
    for held in (one, two)
  ]
  count = one.plan.rows
  assert (rows[0] == MASK).any() and count > 3
  np.testing.assert_array_equal(*[x[:count] for x in rows])


def _drawn(config, steps, weights=1.0):
  """Batches of clean rows of two documents, the second one a third."""
  shape = 8, 24
  rng = np.random.default_rng(1)
  ids = rng.integers(0, MASK, shape).astype(np.int32)
  positions = np.tile(np.r_[:16, :8], (8, 1)).astype(np.int32)
  segments = np.tile(np.repeat([1, 2], [16, 8]), (8, 1)).astype(np.int32)
  given = batch_lib.Batch(
    ids, ids, segments, positions, np.full(shape, weights, np.float32),
    np.float32(192),
  )  # fmt: skip
  return [objectives.batch(config, given, t, range(8), 8) for t in range(steps)]


@pytest.mark.parametrize('objective', ('masked', 'block'))
@pytest.mark.parametrize('shift', (False, True))
def test_two_rows_of_a_text_mask_each_token_once(folder, objective, shift):
  block = dict(visibility='block', block=8) if objective == 'block' else {}
  model, train = dict(mask_shift=shift) | block, dict(objective=objective)
  config, corpus = load(
    folder, model=model, train=train | dict(complementary=True)
  )
  plain = dataclasses.replace(config, train=schema.Train(batch_size=4, seed=3))
  made = data.Batches(config, corpus)
  alone, _ = load(folder, model=model, train=train)
  steps = dict(itertools.islice(made.iterate(2), 3))
  for t, found in steps.items():
    same(found, made.batch_at(t))
    clean = data.Batches(plain, corpus).batch_at(t)
    assert found.denominator == 2 * clean.denominator
    one, two = found.weights[::2] > 0, found.weights[1::2] > 0
    np.testing.assert_array_equal(one | two, clean.weights > 0)
    assert not (one & two).any() and one.any() and two.any()
    for view in (0, 1):  # the same text
      np.testing.assert_array_equal(found.targets[view::2], clean.targets)
    # 1 / p and 1 / (1 - p) of one p.
    for a, b in zip(found.weights[::2], found.weights[1::2], strict=True):
      if objective == 'masked' and a.any() and b.any():
        assert np.isclose(1 / a.max() + 1 / b.max(), 1)
    # Without a second view rows 2i and 2i + 1 hide what they have in common.
    single = data.Batches(alone, corpus).batch_at(t).weights > 0
    assert (single[::2] & single[1::2]).any()
  held, single = (data.evaluation(c, corpus)[0] for c in (config, alone))
  same(held.batch_at(0), single.batch_at(0))
  assert made.epochs(8) == {None: 32 / made.rows}


@pytest.mark.parametrize('complementary', (False, True))
def test_weights_are_one_in_expectation(complementary):
  """So the loss is that of a uniform time, of every token alike."""
  config = config_of(train=dict(complementary=complementary))
  made = np.stack([b.weights for b in _drawn(config, 4000)])
  means = made.mean((0, 1))
  # The variance of 1 / p over a uniform p is E[1 / p] - 1 = -ln LEAST - 1.
  error = ((-np.log(objectives.LEAST) - 1) / (4000 * 8)) ** 0.5
  error *= 2**0.5 if complementary else 1  # two rows share a p
  assert np.abs(means - 1).max() < 5 * error
  assert abs((made > 0).mean() - 0.5) < 0.01  # what weights of 1 would give
  shares = (made > 0).mean(2)
  assert shares.std(1).mean() > 0.25, 'rows of a step have their own share'


@pytest.mark.parametrize('noise', (0.0, 1 - 2**-53))
@pytest.mark.parametrize('complementary', (False, True))
def test_weights_are_bounded(monkeypatch, complementary, noise):
  """At the ends of what a generator draws."""
  drawn = types.SimpleNamespace(random=lambda size=(): np.full(size, noise))
  monkeypatch.setattr(objectives, '_stream', lambda *counter: drawn)
  train = dict(complementary=complementary)
  for model in (dict(), dict(visibility='block', block=8)):
    train['objective'] = 'block' if model else 'masked'
    (made,) = _drawn(config_of(model=model, train=train), 1)
    most, bound = made.weights.max(), 1 / objectives.LEAST
    assert most <= bound * (1 + 1e-6)
    if noise == 0 or complementary:  # the last mask of a view, or of the other
      np.testing.assert_allclose(most, bound)


@pytest.mark.parametrize('changed, words', [
  (dict(objective='next_token'), 'masks nothing'),
  (dict(batch_size=7), 'train.batch_size=7'),
  (dict(batch_ramp='2:2:10'), "train.batch_ramp='2:2:10'"),
])  # fmt: skip
def test_two_views_that_do_not_fit_are_refused(changed, words):
  config = config_of(train=dict(complementary=True) | changed)
  with support.refused('train.complementary=true', words):
    objectives.check(config)


def test_prompts_are_never_masked():
  config = config_of()
  ids = np.arange(24, dtype=np.int32)[None]
  weights = (ids >= 9).astype(np.float32)
  given = batch_lib.Batch(ids, ids, ids * 0 + 1, ids, weights, np.float32(15))
  for t in range(50):
    made = objectives.batch(config, given, t, [0], 1)
    assert (made.tokens[0, :9] == ids[0, :9]).all()
    assert (made.weights[0, :9] == 0).all()


@pytest.mark.parametrize('name, ordinary, free, rows', [
  ('bytes', 255, 259, 264), ('bpe2048', 2047, 2048, 2056),
])  # fmt: skip
def test_a_mask_is_no_token_of_text(name, ordinary, free, rows):
  words, model = tokenizer.load(name), dict(vocab_size=free)
  way = f'--config.model.vocab_size={rows} --config.model.mask_id={free}'
  for objective in ('masked', 'block'):
    config = config_of(model=model | dict(mask_id=ordinary))
    config = schema.with_value(config, 'train.objective', objective)
    with support.refused(f'model.mask_id={ordinary} is an ordinary', way):
      objectives.check_mask(config, words)
  objectives.check_mask(config, tokenizer.load('ids'))  # whose text is unknown
  for own in (free, words.end_id):
    given = dict(vocab_size=rows, mask_id=own)
    objectives.check_mask(config_of(model=given), words)
  plain = schema.with_value(config, 'train.objective', 'next_token')
  objectives.check_mask(plain, words)


def test_a_run_refuses_a_mask_of_text(tiny):
  changes = {'model.visibility': 'full', 'train.objective': 'masked'}
  with support.refused('model.mask_id=97 is an ordinary token', 'mask_id=259'):
    tiny.job(changes | {'model.mask_id': 97})


@pytest.mark.parametrize('train, model, words', [
  ('next_token', dict(visibility='full'), 'the one that it predicts'),
  ('next_token', dict(visibility='block', block=4), 'visibility=block'),
  ('masked', dict(visibility='causal', mask_id=3), 'shows one'),
  ('masked', dict(visibility='full'), 'model.mask_id=-1 is no id'),
  ('masked', dict(visibility='full', mask_id=301), 'vocab_size=301'),
  ('block', dict(visibility='full', mask_id=3), 'wants model.visibility=block'),
  ('block', dict(visibility='block', block=257, mask_id=3),
   'model.block=257 is more than data.sequence_length=256'),
])  # fmt: skip
def test_what_does_not_fit_is_refused(train, model, words):
  config = schema.view(
    dict(model=dict(vocab_size=301) | model, train=dict(objective=train))
  )
  with support.refused(f'train.objective={train}', words):
    objectives.check(config)
