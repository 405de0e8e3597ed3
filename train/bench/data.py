"""Bench of packing: documents -> shuffled rows, against grain's first-fit.

Both begin with tokenized documents in memory and end with batches of rows of
token, segment and position ids; ours also makes targets, weights and the
denominator. grain cannot cut a document, so it gets documents already cut to
the row length, outside its time. 'packing' is train/data/packing.py alone;
'ours' adds the order of rows, which grain's random access makes, row by row.
"""

import functools
import pathlib
import time

import numpy as np

from paraxis.configs import schema
from paraxis.train.bench import measure
from paraxis.train.data import batches as data_lib
from paraxis.train.data import corpus as corpus_lib
from paraxis.train.data import packing as packing_lib
from paraxis.train.data import token_cache

BYTES_A_TOKEN = 3  # of the fixture with bpe2048, about
ROWS = 8  # a batch
BINS = 64  # rows that grain fills at once
FILL = 0.9  # least share of slots that hold a token


def corpus(lengths, vocab_size=2048):
  """A token_cache.Corpus in memory: random tokens, documents of `lengths`."""
  starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
  random = np.random.default_rng(1)
  tokens = random.integers(0, vocab_size, starts[-1]).astype(np.uint16)
  count = len(lengths)
  return token_cache.Corpus(
    tokens=tokens,
    starts=starts,
    domain_ids=np.zeros(count, np.int32),
    n_bytes=np.asarray(lengths, np.int64),
    held=np.zeros(count, bool),
    domains=('synthetic',),
    fingerprint='',
    vocab_size=vocab_size,
    pad_id=0,
    path='synthetic',
    folder=pathlib.Path(),
  )


def lengths(count):
  """(count,) tokens of documents, drawn from the fixture's, longest 10,000."""
  found = [d.n_bytes // BYTES_A_TOKEN for d in corpus_lib.documents('fixture')]
  return np.random.default_rng(0).choice(np.maximum(found, 2), count)


def packed(made, length, packing, now):
  """One epoch of packing alone: plan, rows in a shuffled order.

  -> (seconds, tokens used, fill), as the other candidates.
  """
  pack = getattr(packing_lib, packing)
  before = now()
  random = np.random.default_rng(0)
  order = random.permutation(len(made.lengths))
  plan = pack(made.starts[:-1], made.lengths, length, order)
  rows = random.permutation(plan.rows)
  rows = rows[: plan.rows // ROWS * ROWS].reshape(-1, ROWS)
  used = 0
  for chosen in rows:
    batch = packing_lib.assemble(plan, made.tokens, chosen, made.pad_id)
    used += int(batch.denominator)
  return now() - before, used, used / (rows.size * length)


def ours(made, length, packing, now):
  """One epoch of train/data/batches.py: plan, grain's order, rows."""
  config = schema.view(
    dict(
      data=dict(sequence_length=length, packing=packing),
      train=dict(batch_size=ROWS),
      model=dict(vocab_size=made.vocab_size),
    )
  )
  before = now()
  batches = data_lib.Batches(config, made)
  count = batches.rows // ROWS
  used = sum(int(batches.batch_at(t).denominator) for t in range(count))
  return now() - before, used, used / (count * ROWS * length)


def grains(made, length, now):
  """One epoch of grain's first-fit -> (seconds, tokens used, fill)."""
  import grain
  from grain import experimental

  pieces = [
    made.tokens[a : min(a + length, end)].astype(np.int32)
    for begin, end in zip(made.starts[:-1], made.starts[1:], strict=True)
    for a in range(begin, end, length)
  ]
  before = now()
  source = grain.MapDataset.source(pieces).shuffle(seed=0)
  source = source.map(lambda tokens: {'tokens': tokens})
  packed = experimental.FirstFitPackIterDataset(
    source.to_iter_dataset(grain.ReadOptions(0, 0)),
    length_struct={'tokens': length},
    num_packing_bins=BINS,
    seed=0,
  ).batch(ROWS)
  used = rows = 0
  for batch in packed:
    segments = batch['tokens_segment_ids']
    rows += len(segments)
    used += np.count_nonzero(segments)
  return now() - before, used, used / (rows * length)


def _length(report, made, length, rounds, say):
  """Adds rows, targets and a note of all candidates at one row length."""
  now, found = time.process_time, {}
  forms = {
    'grain first-fit': lambda: grains(made, length, now),
    'ours first_fit': lambda: ours(made, length, 'first_fit', now),
    'ours concat_split': lambda: ours(made, length, 'concat_split', now),
    'packing first_fit': lambda: packed(made, length, 'first_fit', now),
    'packing concat_split': lambda: packed(made, length, 'concat_split', now),
  }

  def run(name):
    seconds, *found[name] = forms[name]()
    return {'': seconds}

  candidates = {name: functools.partial(run, name) for name in forms}
  times = measure.interleave(candidates, rounds, now, say)
  speeds = {k: [found[k][0] / t for t in times[k]] for k in forms}
  fills = {k: fill for k, (_, fill) in found.items()}
  report.add(
    {f'T{length}, {k}': [x / 1e6 for x in v] for k, v in speeds.items()},
    'Mtokens/s',
  )
  grain_name, *names = forms
  for name in names:
    report.check(
      f'T{length}: speed of {name} / {grain_name}',
      measure.ratios(speeds[name], speeds[grain_name]),
      5.0,
    )
  fill = [fills['ours first_fit']]
  report.check(f'T{length}: fill of ours first_fit', fill, FILL)
  report.notes.append(
    f'T{length} fill: ' + ', '.join(f'{k} {v:.1%}' for k, v in fills.items())
  )


def data(rounds, quick, say):
  """Tokens packed per CPU-second, shuffled, rows assembled."""
  made = corpus(lengths(200 if quick else 4000))
  report = measure.begin(
    'data',
    f"{len(made.held)} documents with lengths of the fixture's, "
    f'{len(made.tokens):,} tokens; grain with {BINS} bins',
    measure.CPU,
    not quick,
  )
  for length in (256,) if quick else (1024, 2048):
    if report.lacks(f'T{length}'):
      _length(report, made, length, rounds, say)
      report.finish(f'T{length}')
  return report
