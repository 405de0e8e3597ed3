"""Bench of packing: documents -> shuffled rows, against grain's first-fit.

Both begin with tokenized documents in memory and end with batches of rows of
token, segment and position ids; ours also makes targets, weights and the
denominator. grain cannot cut a document, so it gets documents already cut to
the row length, outside its time. 'packing' is train/data/packing.py alone;
'ours' adds the order of rows, which grain's random access makes, row by row.
"""

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
  """One epoch of packing alone: plan, rows in a shuffled order."""
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
  """One epoch of train/data/batches.py: plan, grain's order, rows.

  -> (seconds, tokens used, fill), as the other candidates.
  """
  config = schema.view(
    dict(
      data=dict(sequence_length=length, packing=packing),
      train=dict(batch_size=ROWS),
      model=dict(vocab_size=made.vocab_size),
    )
  )
  before = now()
  batches = data_lib.Batches(config, made)
  used = rows = 0
  for t in range(batches.rows // ROWS):
    batch = batches.batch_at(t)
    used += int(batch.denominator)
    rows += ROWS
  return now() - before, used, used / (rows * length)


def grains(made, length, now):
  """One epoch of grain's first-fit -> (seconds, fill)."""
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


def data(rounds, quick, say):
  """Tokens packed per CPU-second, shuffled, rows assembled."""
  now = time.process_time
  made = corpus(lengths(200 if quick else 4000))
  report = measure.BenchReport(
    'data',
    f"{len(made.held)} documents with lengths of the fixture's, "
    f'{len(made.tokens):,} tokens; grain with {BINS} bins',
    measure.CPU,
    not quick,
  )
  for length in (256,) if quick else (1024, 2048):
    speeds, fills = {}, {}
    forms = {
      'grain first-fit': lambda n=length: grains(made, n, now),
      'ours first_fit': lambda n=length: ours(made, n, 'first_fit', now),
      'ours concat_split': lambda n=length: ours(made, n, 'concat_split', now),
      'packing first_fit': lambda n=length: packed(made, n, 'first_fit', now),
      'packing concat_split': lambda n=length: packed(
        made, n, 'concat_split', now
      ),
    }

    def candidate(name, form, speeds=speeds, fills=fills):
      def run():
        seconds, used, fill = form()
        speeds.setdefault(name, []).append(used / seconds)
        fills[name] = fill
        return {'': seconds}

      return run

    measure.interleave(
      {k: candidate(k, f) for k, f in forms.items()}, rounds, now, say
    )
    speeds = {k: v[1:] for k, v in speeds.items()}  # the first is the warm-up
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
    report.check(
      f'T{length}: fill of ours first_fit',
      [fills['ours first_fit']],
      FILL,
    )
    report.notes.append(
      f'T{length} fill: ' + ', '.join(f'{k} {v:.1%}' for k, v in fills.items())
    )
  return report
