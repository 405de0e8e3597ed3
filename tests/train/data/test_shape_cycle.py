"""Steps of other shapes: rows that are cut, by a plain loop, and whole runs."""

import collections
import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.models.text import tokenizer
from paraxis.train import program as job_lib
from paraxis.train.certify import trial
from paraxis.train.certify import verify
from paraxis.train.data import batch_ramp
from paraxis.train.data import batches as data
from paraxis.train.data import shape_cycle
from paraxis.train.data import token_cache

FIELDS = ('tokens', 'targets', 'segments', 'positions', 'weights')


def config_of(text, length=32, **train):
  return schema.Config(
    data=schema.Data(sequence_length=length),
    train=schema.Train(shape_cycle=text, **train),
  )


@pytest.mark.parametrize(
  'text, wanted',
  [
    ('4:2,2:1,1:3', [4, 4, 2, 1, 1, 1, 4, 4, 2, 1, 1, 1, 4]),
    ('4:2, 2:1, 1', [4, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ('2:1,1:1', [2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]),
    ('8:3', [8] * 13),
    ('', [1] * 13),
  ],
)
def test_pieces_of_a_step(text, wanted):
  cycle = shape_cycle.of(config_of(text))
  assert [cycle.pieces(t) for t in range(13)] == wanted
  for steps in (1, 3, 13):
    assert cycle.all(steps) == sorted(set(wanted[:steps]))


@pytest.mark.parametrize('text', ['4:2,2:1,1:3', '4:2,2:1,1', '2:1,1:1', '8:3'])
@pytest.mark.parametrize('ramp', ['', '2:2:1', '1:3:4'])
def test_shares_are_of_rows_read(text, ramp):
  for steps in (1, 3, 6, 13, 40):
    config = config_of(text, steps=steps, batch_ramp=ramp, batch_size=8)
    cycle, grown = shape_cycle.of(config), batch_ramp.of(config)
    found = collections.Counter()
    for t in range(steps):
      found[32 // cycle.pieces(t)] += grown.rows(t) if grown else 8
    wanted = {k: n / found.total() for k, n in found.items()}
    assert shape_cycle.shares(config) == pytest.approx(wanted)
  config = config_of(text, steps=2**31 - 1, batch_ramp=ramp, batch_size=8)
  with support.within(5):  # no loop over steps
    assert sum(shape_cycle.shares(config).values()) == pytest.approx(1)


@pytest.mark.parametrize(
  'text, words',
  [
    ('4', "'4' is not 'pieces:steps'"),
    ('4:2,x:1', "'x:1' is not"),
    ('4:2,1:', "'1:' is not"),
    ('0:2,1:1', "'0:2' is not"),
    ('4:0,1:1', "'4:0' is not"),
    ('4,2:1', "'4' is not"),
    ('3:2,1', 'sequence_length=32 tokens do not divide into 3 equal pieces; 2'),
  ],
)
def test_a_cycle_that_cannot_be(text, words):
  with support.refused('train.shape_cycle=', words):
    shape_cycle.of(config_of(text))


def test_pieces_that_a_mesh_cannot_share():
  """32 tokens in 4 pieces of 8, on 8 shards of zigzag: 16 runs."""
  config = dataclasses.replace(
    support.piped(shape_cycle='4:1,1:1'), mesh=schema.Mesh(context=8)
  )
  narrow = {'model.dtype': 'float32', 'model.param_dtype': 'float32'}
  config = schema.with_values(config, narrow | {'data.sequence_length': 32})
  with support.refused('train.shape_cycle=', '8 tokens a row', '16 equal runs'):
    job_lib.of_shapes(config, devices=jax.devices())


def packed(rows=3, length=24, seed=0):
  """Rows of documents of random lengths, the last tokens of each padding."""
  rng = np.random.default_rng(seed)
  out = {name: np.zeros((rows, length), np.int32) for name in FIELDS}
  for row in range(rows):
    end, number = 0, 0
    while end < length - 4 and (row < rows - 1 or number < 1):
      n, number = int(rng.integers(2, 15)), number + 1
      n = min(n, length - end)
      here = np.s_[row, end : end + n]
      out['segments'][here], out['positions'][here] = number, np.arange(n)
      out['tokens'][here] = rng.integers(1, 50, n)
      out['targets'][here] = rng.integers(1, 50, n)
      out['weights'][here] = 1
      end += n
  out['weights'] = out['weights'].astype(np.float32)
  return batch_lib.Batch(**out, denominator=np.float32(out['weights'].sum()))


@pytest.mark.parametrize('pieces', [1, 2, 3, 6])
def test_a_cut_row_by_a_loop(pieces):
  batch = packed()
  found = shape_cycle.fold(batch, pieces)
  rows, length = batch.tokens.shape
  short, at = length // pieces, 0
  for row in range(rows):
    for piece in range(pieces):
      before, number, position = None, 0, 0
      for slot in range(short):
        old = row, piece * short + slot
        new = at, slot
        segment = batch.segments[old]
        if segment != before:
          number, position = number + 1, 0
        before = segment
        wanted = (number, position) if segment else (0, 0)
        assert (found.segments[new], found.positions[new]) == wanted
        for name in ('tokens', 'targets', 'weights'):
          assert getattr(found, name)[new] == getattr(batch, name)[old]
        position += 1
      at += 1
  assert at == len(found.tokens) and found.denominator == batch.denominator
  assert all(
    a.dtype == b.dtype for a, b in zip(found[:6], batch[:6], strict=True)
  )


def test_loss_and_gradients_are_of_documents_that_end_where_a_row_is_cut():
  """The same rows, whole, each piece a document of its own; and on a mesh.

  As it was, the whole row is another loss: its tokens see more.
  """
  with jax.enable_x64(True):
    config = support.piped(batch_size=8)
    one = trial.reference(config, True, jax.devices()[0])
    runner = trial.Runner(trial.plain(config), jax.devices()[:1])
    batch, pieces = one.batches[0], 4
    length = batch.tokens.shape[1]
    piece = np.arange(length) // (length // pieces)
    number = batch.segments * pieces + piece  # another one in every piece
    segments, positions = np.zeros((2, *batch.tokens.shape), np.int32)
    for row, names in enumerate(number):
      for n, name in enumerate(dict.fromkeys(names[batch.segments[row] > 0])):
        here = (names == name) & (batch.segments[row] > 0)
        segments[row, here], positions[row, here] = n + 1, range(here.sum())
    apart = batch._replace(segments=segments, positions=positions)
    run = lambda side, rows: side.gradients(side.start(one.params), rows)
    cut = shape_cycle.fold(batch, pieces)
    loss, gradients, _ = run(runner, cut)
    wanted, reference, _ = run(runner, apart)
    assert abs(float(loss) / float(wanted) - 1) < 1e-12
    assert trial.worst(*map(jax.device_get, (gradients, reference)))[0] < 1e-9
    whole = run(runner, batch)[0]
    assert abs(float(whole) / float(wanted) - 1) > 1e-4
    mesh = schema.Mesh(stage=2, context=2, tensor=2)
    sharded = dataclasses.replace(config, mesh=mesh)
    side = trial.Runner(sharded, jax.devices())
    found = run(side, cut)
    assert abs(float(found[0]) / float(loss) - 1) < 1e-12
    ordered = side.job.in_order(found[1])
    assert trial.worst(ordered, jax.device_get(reference))[0] < 1e-9


# ------------------------------------------------------------------ batches


@pytest.fixture(scope='module')
def made(tiny):
  """(fields of train and model) -> batches.Batches of 8 rows of 64 tokens."""

  def make(text='', model=(), **train):
    fields = {f'train.{k}': v for k, v in train.items()}
    fields |= {f'model.{k}': v for k, v in dict(model).items()}
    fields = {'train.batch_size': 8} | fields
    config = tiny.config(fields | {'train.shape_cycle': text})
    words = tokenizer.load(config.data.tokenizer)
    return data.Batches(config, token_cache.tokens(config, words))

  return make


def test_steps_read_the_rows_of_whole_steps(made):
  whole, cut = made(), made('4:1,2:1,1:1')
  for t, pieces in enumerate((4, 2, 1, 4)):
    assert cut.shape_at(t) == (1, 8 * pieces, 64 // pieces)
    batch, wanted = cut.batch_at(t), shape_cycle.fold(whole.batch_at(t), pieces)
    for a, b in zip(batch[:6], wanted[:6], strict=True):
      np.testing.assert_array_equal(a, b)
    rows = 8 * pieces // 2
    halves = cut.batch_at(t, 0, rows), cut.batch_at(t, rows, 2 * rows)
    joined = np.concatenate([half.tokens for half in halves])
    np.testing.assert_array_equal(joined, batch.tokens)
  with contextlib.closing(cut.iterate(1)) as running:
    for t, pieces in ((1, 2), (2, 1), (3, 4)):
      step, batch = next(running)
      assert step == t and batch.tokens.shape == (8 * pieces, 64 // pieces)
      np.testing.assert_array_equal(batch.tokens, cut.batch_at(t).tokens)


def test_steps_of_a_single_row(made):
  """An order of single rows has more than grain can count."""
  for text, shape in (('', (1, 64)), ('2:1', (2, 32))):
    single = made(text, batch_size=1)
    with contextlib.closing(single.iterate(3)) as running:
      step, batch = next(running)
    assert step == 3 and batch.tokens.shape == shape
    np.testing.assert_array_equal(batch.tokens, single.batch_at(3).tokens)


def test_with_microbatches_and_a_ramp(made):
  """4 and 8 rows, in microbatches of 2: their number grows, their rows too."""
  whole = made(batch_ramp='4:4:2', microbatches=4)
  cut = made('1:1,2:1', batch_ramp='4:4:2', microbatches=4)
  shapes = [cut.shape_at(t) for t in range(4)]
  assert shapes == [(2, 2, 64), (2, 4, 32), (4, 2, 64), (4, 4, 32)]
  for t, shape in enumerate(shapes):
    batch, wanted = cut.batch_at(t), whole.batch_at(t)
    assert batch.tokens.shape == shape
    assert batch.denominator == wanted.denominator
    np.testing.assert_array_equal(batch.tokens.ravel(), wanted.tokens.ravel())
    half = cut.batch_at(t, shape[1] // 2, shape[1])
    last = batch.tokens[:, shape[1] // 2 :]
    np.testing.assert_array_equal(half.tokens, last)


def test_two_views_of_a_text_are_cut_alike(made):
  """Every token is masked in one of the two; slices see the same."""
  model = dict(visibility='full', mask_id=260)
  cut = made('2:1', model, objective='masked', complementary=True)
  batch = cut.batch_at(0)
  assert batch.tokens.shape == (16, 32)
  by_view = lambda x: np.moveaxis(x.reshape(4, 2, 2, 32), 1, 0)
  one, two = by_view(batch.tokens == 260)
  counts = by_view(batch.weights > 0)
  np.testing.assert_array_equal(one, counts[0])
  assert not (one & two).any() and (one | two).mean() > 0.95
  np.testing.assert_array_equal(*by_view(batch.targets))
  half = cut.batch_at(0, 8, 16)
  np.testing.assert_array_equal(half.tokens, batch.tokens[8:])
  for views, pieces in ((1, 3), (2, 3)):  # each number once, pairs by pieces
    found = shape_cycle.places(range(4), pieces, views)
    assert sorted(found) == list(range(4 * pieces))
    by_row = found.reshape(4 // views, views, pieces)
    assert (by_row - by_row[:, :1] == np.arange(views)[:, None]).all()
    assert (by_row[:, 0] % views == 0).all()


# --------------------------------------------------------------- whole runs


CHANGES = {
  'train.steps': 4, 'train.shape_cycle': '2:1,1:1', 'checkpoint.every': 1,
  'checkpoint.keep': 5,
}  # fmt: skip


def test_a_run_equals_one_device_and_is_resumed(tiny, tmp_path):
  """Every shape is compiled once, whatever the number of its steps."""
  run = functools.partial(tiny.run, changes=CHANGES)
  one, straight, stopped = (tmp_path / n for n in ('one', 'straight', 'part'))
  run(one, mesh='data=1')
  mesh = 'data=2,context=2,tensor=2'
  _, said = run(straight, mesh=mesh)
  assert sum('gradient: ' in line for line in said) == 2, said
  wanted, found = support.losses(one), support.losses(straight)
  assert list(wanted) == list(found) == [1, 2, 3, 4]
  for step, loss in wanted.items():
    assert abs(found[step] / loss - 1) < 1e-5
  with pytest.raises(support.KilledError):
    run(stopped, mesh=mesh, callbacks=[support.crash_at(3)])
  run(stopped, mesh=mesh)
  assert support.fingerprints(straight, 4) == support.fingerprints(stopped, 4)


def test_whole_rows_are_the_run_without_a_cycle(tiny, tmp_path):
  """The reduction: pieces of 1, to the last bit; pieces of 2 are another."""
  short = {'train.steps': 2}
  for name, text in (('plain', ''), ('whole', '1:5'), ('cut', '2:5')):
    changes = short | {'train.shape_cycle': text}
    tiny.run(tmp_path / name, changes=changes, mesh='data=1')
  plain, whole, cut = (
    support.losses(tmp_path / name) for name in ('plain', 'whole', 'cut')
  )
  assert plain == whole and plain[1] != cut[1]


def test_it_is_certified():
  config = schema.view(
    {
      'model': dict(vocab_size=64, d_model=16, num_heads=4, num_layers=1),
      'data': dict(sequence_length=512),
      'train': dict(shape_cycle='8:100,4:100,1'),
    }
  )
  case = verify.prepare(config, 'data=2,context=2')
  assert case.config.train.shape_cycle == '1:1,2:1'
  (row,) = verify.certify(case, ('shapes',))
  assert row.passed and row.name == 'a step of other shape: 16 rows of 32'
