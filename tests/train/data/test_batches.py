"""Batch t: pure in (seed, t), sliced anywhere, mixed by weight; evaluation."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models.text import tokenizer
from paraxis.train.data import batches as data
from paraxis.train.data import token_cache

SIZES = {'alpha': 60, 'beta': 30, 'gamma': 10}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Three domains of documents of 20 to 200 letters."""
  path = tmp_path_factory.mktemp('text')
  rng = np.random.default_rng(0)
  for name, count in SIZES.items():
    lines = []
    for i in range(count):
      letters = rng.integers(97, 123, rng.integers(20, 200)).astype(np.uint8)
      text = letters.tobytes().decode()
      lines.append(json.dumps({'id': f'{name[0]}{i}', 'text': text}) + '\n')
    (path / f'{name}.jsonl').write_text(''.join(lines))
  return path


def make_config(folder, train=(), **fields):
  base = dict(
    path=str(folder),
    tokenizer='bytes',
    sequence_length=32,
    cache_dir=str(folder / 'cache'),
  )
  return schema.Config(
    data=schema.Data(**(base | fields)),
    train=schema.Train(**{'batch_size': 8, 'seed': 3, **dict(train)}),
  )


def load(config):
  return token_cache.tokens(config, tokenizer.load(config.data.tokenizer))


def make(folder, train=(), **fields):
  config = make_config(folder, train, **fields)
  return data.Batches(config, load(config))


def assert_equal(a, b):
  for x, y in zip(a[:6], b[:6], strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('mixture', ['', 'alpha=2,gamma=1'])
@pytest.mark.parametrize('packing', ['concat_split', 'first_fit'])
def test_pure_in_seed_and_step(folder, mixture, packing):
  fields = dict(mixture=mixture, packing=packing)
  one, two = make(folder, **fields), make(folder, **fields)
  for t in (0, 5, 1, 1000, 5):
    assert_equal(one.batch_at(t), two.batch_at(t))
  other = make(folder, {'seed': 4}, **fields)
  assert not np.array_equal(one.batch_at(0).tokens, other.batch_at(0).tokens)
  assert not np.array_equal(one.batch_at(0).tokens, one.batch_at(1).tokens)


def _resident():
  """MiB of files that are mapped and in the memory of this process."""
  text = pathlib.Path('/proc/self/status').read_text()
  return int(text.partition('RssFile:')[2].split()[0]) / 1024


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_memory_does_not_grow_with_what_is_read(tmp_path, monkeypatch):
  """Every page of 64 MiB of tokens is read; without release they all stay."""
  ids = np.arange(2**25, dtype=np.uint32).astype(np.uint16)
  ids.tofile(tmp_path / 'a.bin')
  config = make_config(tmp_path, tokenizer='ids', sequence_length=2**14)
  config = schema.with_value(config, 'model.vocab_size', 2**16)
  corpus = load(config)
  batches = data.Batches(config, corpus)
  steps = batches.rows // batches.batch_size
  assert steps * batches.batch_size * 2**15 > 50 * 2**20

  def growth():
    before = _resident()
    for t in range(steps):
      batches.batch_at(t)
    return _resident() - before

  kept = growth()
  corpus.release()
  monkeypatch.setattr(token_cache.Corpus, 'release', lambda self: None)
  assert kept < 16 and growth() > 40


def test_slices_are_the_whole(folder):
  batches = make(folder, packing='first_fit')
  for t in (0, 17):
    whole = batches.batch_at(t)
    for parts in (2, 8):
      step = 8 // parts
      slices = [batches.batch_at(t, lo, lo + step) for lo in range(0, 8, step)]
      for name in whole._fields[:5]:
        np.testing.assert_array_equal(
          np.concatenate([getattr(s, name) for s in slices]),
          getattr(whole, name),
        )
      # The denominator is global, not the slice's own.
      assert all(s.denominator == whole.weights.sum() for s in slices)
      assert slices[0].weights.sum() < whole.denominator


def test_microbatches_hold_the_same_rows(folder):
  whole = make(folder).batch_at(4)
  batches = make(folder, {'microbatches': 4})
  batch = batches.batch_at(4)
  assert batch.tokens.shape == (4, 2, 32)
  assert_equal(whole[:5], [x.reshape(8, 32) for x in batch[:5]])
  assert batch.denominator == whole.denominator
  part = batches.batch_at(4, 1, 2)
  np.testing.assert_array_equal(part.tokens, batch.tokens[:, 1:2])
  assert part.denominator == whole.denominator


@pytest.mark.parametrize('prefetch', [0, 3])
def test_iterating_from_a_step_continues_it(folder, prefetch):
  batches = make(folder, prefetch=prefetch, mixture='alpha=1,beta=1')
  whole = batches.iterate()
  straight = [next(whole) for _ in range(12)]
  whole.close()
  resumed = batches.iterate(7)
  for t, batch in straight[7:]:
    again, other = next(resumed)
    assert again == t
    assert_equal(batch, other)
    assert_equal(batch, batches.batch_at(t))
  resumed.close()
  part = batches.iterate(2, lambda rows: (0, 3))
  t, batch = next(part)
  part.close()
  assert t == 2 and batch.tokens.shape == (3, 32)


def test_prefetch_thread_ends(folder):
  before = set(threading.enumerate())
  running = make(folder, prefetch=2).iterate()
  next(running)
  started = set(threading.enumerate()) - before
  assert len(started) == 1
  running.close()
  for thread in started:
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.parametrize('packing', ['concat_split', 'first_fit'])
def test_an_epoch_is_every_training_document_once(folder, packing):
  batches = make(folder, {'batch_size': 1}, packing=packing)
  corpus = load(make_config(folder))
  epochs = [
    np.concatenate([batches.rows_at(t) for t in range(n, n + batches.rows)])
    for n in (0, batches.rows)
  ]
  for rows in epochs:
    assert sorted(rows) == list(range(batches.rows))
  assert not np.array_equal(*epochs)  # a new order
  train = corpus.select('train')
  pairs = corpus.lengths[train].sum() - len(train)
  total = sum(batches.batch_at(t).weights.sum() for t in range(batches.rows))
  assert total == batches.plan.pairs == pairs
  seen = {
    name for t in range(batches.rows) for name in batches.documents_at(t)[0]
  }
  assert seen == {corpus.name(d) for d in train}
  assert 'none was dropped' in batches.summary()


def test_mixture_proportions(folder):
  batches = make(folder, mixture='alpha=1, gamma=3')
  boundary = make(folder, mixture='alpha=1').rows
  rows = np.concatenate([batches.rows_at(t) for t in range(50)])
  assert (rows >= boundary).mean() == pytest.approx(0.75, abs=0.01)
  # gamma repeats, evenly; beta is absent.
  _, counts = np.unique(rows[rows >= boundary], return_counts=True)
  assert counts.min() >= 2 and counts.max() - counts.min() <= 1
  names = {n[0] for t in range(20) for r in batches.documents_at(t) for n in r}
  assert names == {'a', 'g'}


def test_describe_rows_names_the_documents(folder):
  batches = make(folder, packing='first_fit')
  corpus = load(make_config(folder))
  lines = batches.describe_rows(2).splitlines()
  assert len(lines) == 8
  names = {corpus.name(d) for d in corpus.select('train')}
  text = {corpus.name(d): corpus.starts[d] for d in corpus.select('train')}
  batch = batches.batch_at(2)
  for i, found in enumerate(batches.documents_at(2)):
    assert set(found) <= names and len(found) == batch.segments[i].max()
    assert lines[i] == f'row {batches.rows_at(2)[i]}: {", ".join(found)}'
    start = text[found[0]]
    around = corpus.tokens[start : start + 300]
    first = batch.tokens[i][batch.segments[i] == 1]
    assert bytes(first.astype(np.uint16)) in bytes(around)


# Evaluation


def test_evaluation_covers_the_held_out_text(folder):
  config = make_config(folder, {'microbatches': 2})
  corpus = load(config)
  found = data.evaluation(config, corpus)
  assert [h.domain for h in found] == sorted(SIZES)
  for held in found:
    documents = corpus.select('held', held.domain)
    assert held.n_bytes == corpus.n_bytes[documents].sum()
    batches = [held.batch_at(i) for i in range(len(held))]
    assert all(b.tokens.shape == (4, 32) for b in batches)
    assert [b.denominator for b in batches] == [
      b.weights.sum() for b in batches
    ]
    # Letters and the end token of every document, each once.
    wanted = np.concatenate(
      [
        corpus.tokens[corpus.starts[d] + 1 : corpus.starts[d + 1]]
        for d in documents
      ]
    )
    targets = [b.targets[b.weights > 0] for b in batches]
    np.testing.assert_array_equal(
      np.sort(np.concatenate(targets)), np.sort(wanted)
    )
    assert held.n_pairs == len(wanted) == held.n_bytes + len(documents)
    last = held.batch_at(len(held) - 1)
    halves = [held.batch_at(len(held) - 1, *s) for s in ((0, 2), (2, 4))]
    np.testing.assert_array_equal(
      np.concatenate([h.tokens for h in halves]), last.tokens
    )
    assert halves[1].denominator == last.denominator
    with pytest.raises(IndexError):
      held.batch_at(len(held))
  assert any((h.batch_at(len(h) - 1).weights.sum(1) == 0).any() for h in found)


def test_evaluation_of_a_few_batches(folder):
  config = make_config(folder, {'eval_batches': 1, 'batch_size': 4})
  alpha = data.evaluation(config, load(config))[0]
  assert len(alpha) == 1
  share = alpha.n_pairs / alpha.plan.pairs
  whole = data.evaluation(make_config(folder), load(config))[0]
  assert alpha.n_bytes == round(whole.n_bytes * share) < whole.n_bytes
  assert len(set(alpha.rows_at(0))) == 4


@pytest.mark.parametrize(
  'stage, microbatches, width', [(1, 1, 4), (1, 2, 2), (4, 1, 1)]
)
def test_a_few_batches_are_the_same_text_in_any_layout(
  folder, stage, microbatches, width
):
  """One batch of 4 rows, whatever a microbatch holds."""
  few = {'eval_batches': 1, 'batch_size': 4}
  one = data.evaluation(make_config(folder, few), load(make_config(folder)))
  config = make_config(folder, few | {'microbatches': microbatches})
  config = dataclasses.replace(config, mesh=schema.Mesh(stage=stage))
  for held, wanted in zip(
    data.evaluation(config, load(config)), one, strict=True
  ):
    batches = [held.batch_at(i) for i in range(len(held))]
    assert all(len(b.tokens) == width for b in batches)
    rows = np.concatenate([held.rows_at(i) for i in range(len(held))])
    same = wanted.rows_at(0)
    assert rows[rows >= 0].tolist() == same[same >= 0].tolist()
    assert (held.n_pairs, held.n_bytes) == (wanted.n_pairs, wanted.n_bytes)


# Bad input


@pytest.mark.parametrize(
  'mixture, words',
  [
    ('alpha', ["'alpha' is not 'domain=weight'"]),
    ('alpha=-1', ['weight above 0']),
    ('alpha=nan', ['weight above 0']),
    ('alpha=1,alpha=2', ["names 'alpha' twice"]),
  ],
)
def test_bad_mixtures(folder, mixture, words):
  with support.refused(*words):
    make(folder, mixture=mixture)


def test_no_documents_to_train_on(tmp_path):
  row = json.dumps({'text': 'abc', 'split': 'held'})
  (tmp_path / 'x.jsonl').write_text(row + '\n')
  config = make_config(tmp_path)
  with support.refused('0 of 1 ', "in split 'train'"):
    data.Batches(config, load(config))


def test_tokens_beyond_the_model(folder):
  config = make_config(folder)
  corpus = load(config)
  small = dataclasses.replace(config, model=schema.Model(vocab_size=200))
  for call in (data.Batches, data.evaluation):
    with support.refused('up to 258, ', ' is 200'):
      call(small, corpus)


@pytest.mark.smoke
def test_data_modules_do_not_start_jax():
  code = (
    'import sys\n'
    'from paraxis.models.text import tokenizer\n'
    'from paraxis.train.data import baselines, batches, token_cache\n'
    "sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


# --- batches that grow


def test_a_ramp_reads_the_rows_of_the_order_one_after_the_other(folder):
  """2, 2, 4, 4, 6, 6, 8, 8, ... rows: each once, in the order of size 1."""
  grown = make(folder, dict(batch_size=8, batch_ramp='2:2:2'))
  single = make(folder, dict(batch_size=1))
  sizes = [grown.size_at(t) for t in range(10)]
  assert sizes == [2, 2, 4, 4, 6, 6, 8, 8, 8, 8]
  assert grown.epochs(7) == {None: 32 / grown.rows}
  with support.within(5):  # no loop over steps
    assert single.epochs(2**31 - 1) == {None: (2**31 - 1) / single.rows}
  read = np.concatenate([grown.rows_at(t) for t in range(10)])
  wanted = [single.rows_at(t)[0] for t in range(sum(sizes))]
  np.testing.assert_array_equal(read, wanted)
  with contextlib.closing(grown.iterate(3)) as running:
    for t in (3, 4, 5):
      step, batch = next(running)
      assert step == t and len(batch.tokens) == sizes[t]
      np.testing.assert_array_equal(batch.tokens, grown.batch_at(t).tokens)


def test_a_ramp_of_microbatches_of_equal_rows(folder):
  """One of 2 rows, then 2 of them, 3, 4; slices are of every one."""
  whole = make(folder, dict(batch_size=8, batch_ramp='2:2:1'))
  parts = make(folder, dict(batch_size=8, batch_ramp='2:2:1', microbatches=4))
  for t, shape in enumerate([(2, 32), (2, 2, 32), (3, 2, 32), (4, 2, 32)]):
    batch, rows = parts.batch_at(t), whole.batch_at(t)
    assert batch.tokens.shape == shape
    assert batch.denominator == rows.denominator
    np.testing.assert_array_equal(batch.tokens.reshape(-1, 32), rows.tokens)
    half = parts.batch_at(t, 1, 2)
    np.testing.assert_array_equal(half.tokens, batch.tokens[..., 1:, :])
    assert half.denominator == batch.denominator
