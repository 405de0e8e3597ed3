"""Batch t as a pure function of (seed, t): rows, mixture, held-out evaluation.

The packing plan (train/data/packing.py) is made once from the seed: it fixes
which documents share a row. grain carries the order of the rows: random access,
a new shuffle every epoch, domains mixed by weight, prefetch. Nothing depends on
the number of processes or the mesh: a process asks for its slice of batch t,
and the denominator is that of the whole step. The data cursor is the integer t.

Epochs: without weights one epoch is every row once. With those of
`data.mixture` (of domains) or `data.sources` (of paths) every part has its own
rows and its own epochs, and row n of the run comes from the part that is
furthest behind its weight: small ones repeat.

Cost: a plan takes under a second per million documents, a batch microseconds.

Legend: A microbatches, B rows of a step, T slots of a row.
"""

import contextlib
import math

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.data import batch_ramp
from paraxis.train.data import corpus as corpus_lib
from paraxis.train.data import objectives
from paraxis.train.data import packing
from paraxis.train.data import shape_cycle

_PACKERS = dict(concat_split=packing.concat_split, first_fit=packing.first_fit)
_WHAT = {'domain': 'domain', 'group': 'source'}


class Batches:
  """The training batches of a run. Indexable by any step, in any order.

  Attributes:
    plan: packing.PackingPlan of all rows; a row id is an index into it.
    batch_size, microbatches, sequence_length: B, A, T.
    rows: rows an epoch draws from; with a mixture, of all its domains.
    parts: {domain or source: (weight, its rows)}; {None: ...} without weights.
  """

  def __init__(self, config, corpus):
    """Packs the training documents.

    Args:
      config: schema.Config; reads `data`, `train` and model.vocab_size.
      corpus: token_cache.Corpus.

    Raises:
      UserError: batch_size not a multiple of microbatches, no documents, fewer
        rows than a batch, a mixture of unknown domains, tokens out of range.
    """
    self._corpus, self._config = corpus, config
    self._prefetch = config.data.prefetch
    self.batch_size = config.train.batch_size
    self.microbatches = config.microbatches
    self.sequence_length = config.data.sequence_length
    _check(config, corpus)
    what, weights = 'domain', mixture(config.data.mixture, corpus)
    if corpus.groups:
      what, weights = 'group', corpus_lib.weights(config.data)
    parts = list(weights.items()) or [(None, 1.0)]
    plans = [
      self._pack(config, corpus.select('train', **{what: name}), n)
      for n, (name, _) in enumerate(parts)
    ]
    for (name, _), plan in zip(parts, plans, strict=True):
      if not plan.rows:
        raise errors.UserError(
          f'data.path={corpus.path!r}: 0 of {len(corpus.held)} documents '
          "are in split 'train'"
          + (f' of {_WHAT[what]} {name!r}.' if name else '.')
        )
    self.parts = {
      name: (weight, plan.rows)
      for (name, weight), plan in zip(parts, plans, strict=True)
    }
    self.plan = packing.concatenate(plans)
    self.rows = self.plan.rows
    if self.rows < self.batch_size:
      raise errors.UserError(
        f'data.path={corpus.path!r} packs into {self.rows} rows of '
        f'{self.sequence_length} tokens, fewer than train.batch_size='
        f'{self.batch_size}: use a smaller batch, shorter rows or more text.'
      )
    self.ramp, self._views = batch_ramp.of(config), objectives.views(config)
    self._cycle = shape_cycle.of(config)
    self._order = _order(
      [plan.rows for plan in plans],
      [weight for _, weight in parts],
      config.train.seed,
      1 if self.ramp else self.batch_size,
      self._views,
    )

  def _pack(self, config, chosen, n):
    order = np.random.default_rng([config.train.seed, n]).permutation(chosen)
    corpus = self._corpus
    return _PACKERS[config.data.packing](
      corpus.starts[:-1], corpus.lengths, self.sequence_length, order
    )

  def summary(self):
    """One line: rows, tokens, fill, and how many documents were cut."""
    plan = self.plan
    return (
      f'{plan.rows} rows of {plan.length} tokens, {plan.pairs} targets, '
      f'{plan.fill_fraction:.1%} full; {plan.cut} documents were split over '
      'rows, none was dropped'
    )

  def epochs(self, steps):
    """{domain or source: how often so many steps read it}; to a row each."""
    read = self.ramp.before(steps) if self.ramp else steps * self.batch_size
    total = self._views * sum(weight for weight, _ in self.parts.values())
    return {n: read * w / total / rows for n, (w, rows) in self.parts.items()}

  def size_at(self, t):
    """B of step t: whole rows."""
    return self.ramp.rows(t) if self.ramp else self.batch_size

  def shape_at(self, t):
    """(microbatches, rows of each, tokens of a row) of step t."""
    (parts, rows), k = self.split(self.size_at(t)), self._cycle.pieces(t)
    return parts, rows * k, self.sequence_length // k

  def split(self, rows):
    """(microbatches, rows of each) of a step of so many rows."""
    if self.ramp:
      return self.ramp.split(rows)
    return self.microbatches, rows // self.microbatches

  def rows_at(self, t):
    """(B,) int64 row ids of step t, a pure function of (seed, t)."""
    t = int(t)
    if not self.ramp:
      return np.asarray(self._order[t], np.int64)
    first = self.ramp.before(t)
    at = range(first, first + self.ramp.rows(t))
    return np.concatenate([np.asarray(self._order[i], np.int64) for i in at])

  def batch_at(self, t, lo=0, hi=None):
    """The batch of step t, or the rows lo..hi of it.

    Args:
      t: step, >= 0.
      lo, hi: a process's slice of the batch axis, of the rows of `shape_at(t)`,
        pieces of whole rows; with accumulation, of every microbatch.

    Returns:
      Batch of NumPy arrays (hi - lo, T), or (A, hi - lo, T) if A > 1; what it
      counts is of the whole step, whatever the slice.
    """
    corpus, rows, k = self._corpus, self.rows_at(t), self._cycle.pieces(t)
    total = packing.counted(self.plan, rows, corpus.loss)
    parts, part = self.split(len(rows)), slice(lo // k, hi and hi // k)
    of_share = lambda x: x.reshape(parts)[:, part]
    batch = _text(corpus, self.plan, of_share(rows).ravel())
    # A step of prompts alone has no loss, not 0 / 0.
    batch = batch._replace(denominator=np.float32(max(1, total)))
    if corpus.loss is not None:
      batch = batch._replace(valid=np.float32(self.plan.fill[rows].sum()))
    places = of_share(np.arange(len(rows))).ravel()
    batch = shape_cycle.fold(batch, k)
    places = shape_cycle.places(places, k, self._views)
    batch = objectives.batch(self._config, batch, t, places, k * len(rows))
    if parts[0] == 1:
      return batch
    fold = lambda x: x.reshape(parts[0], -1, x.shape[-1]) if np.ndim(x) else x
    return type(batch)(*map(fold, batch))

  def iterate(self, start=0, share=lambda rows: (0, None)):
    """Yields (t, batch_at(t, lo, hi)) for t = start, start + 1, ... (no end).

    share: rows of a microbatch -> (lo, hi).
    `data.prefetch` batches are prepared ahead, in one thread of grain's, which
    ends when the generator is closed or collected.
    """
    import grain  # imports jax

    options = grain.ReadOptions(min(1, self._prefetch), self._prefetch)

    def assemble(t):
      return self.batch_at(t, *share(self.shape_at(t)[1]))

    # The order of single rows has more than grain can count.
    made = grain.MapDataset.range(2**31 - 1).map(assemble)
    with contextlib.closing(iter(made.to_iter_dataset(options))) as source:
      source.set_state({'next_index': int(start)})
      yield from enumerate(source, int(start))

  def text_at(self, t):
    """Batch (B, T) of the rows of step t, uncut and without an objective."""
    return _text(self._corpus, self.plan, self.rows_at(t))

  def documents_at(self, t):
    """Documents of each row of step t: list of B lists of 'domain/id'."""
    return _documents(self._corpus, self.plan, self.rows_at(t))

  def describe_rows(self, t):
    """One line a row of step t: its id and its documents, for messages."""
    return '\n'.join(
      f'row {row}: {", ".join(names)}'
      for row, names in zip(self.rows_at(t), self.documents_at(t), strict=True)
    )


def _text(corpus, plan, rows):
  """Batch (rows, T) for the next token."""
  batch = packing.assemble(
    plan, corpus.tokens, rows, corpus.pad_id, corpus.loss
  )
  corpus.release()
  _check_ids(batch, corpus, plan, rows)
  return batch


def _check_ids(batch, corpus, plan, rows):
  """IntegrityError: an id that the tokenizer lacks; says where it is.

  Checksums held at the start: the file has changed under the run.
  """
  wrong = np.maximum(batch.tokens, batch.targets).reshape(len(rows), -1)
  worst = wrong.max(1)
  if worst.max() < corpus.vocab_size:
    return
  at = int(worst.argmax())
  (names,) = _documents(corpus, plan, rows[at : at + 1])
  raise errors.IntegrityError(
    f'token cache {corpus.folder} is damaged: id {worst[at]} in row {rows[at]} '
    f'({", ".join(names)}), of {corpus.vocab_size} ids. It changed while the '
    'run read it: start again, and it is built again.'
  )


class HeldOut:
  """Held-out batches of one domain; documents are packed separately.

  bits per byte = sum over batches of (sum of weighted nll) / ln 2 / n_bytes.
  Ends of documents are predicted too and add no byte. A document longer than a
  row continues in another one without its context.

  Attributes:
    domain: its name.
    plan: packing.PackingPlan of all its held-out documents.
    n_bytes: UTF-8 bytes of the text in these batches. Where eval_batches leaves
      rows out, evenly spaced ones are used, the same in any layout, and n_bytes
      is the domain's bytes times the share of its tokens that they hold.
    n_pairs: tokens predicted here.
  """

  def __init__(self, corpus, domain, config):
    chosen = corpus.select('held', domain)
    self._corpus, self._config = corpus, config
    self._width = config.microbatch_rows
    self.domain = domain
    self.plan = packing.first_fit(
      corpus.starts[:-1], corpus.lengths, config.data.sequence_length, chosen
    )
    limit = config.train.eval_batches * config.train.batch_size
    self._rows = np.arange(self.plan.rows)
    if 0 < limit < self.plan.rows:
      self._rows = np.arange(limit) * self.plan.rows // limit
    count = lambda rows: sum(
      packing.counted(self.plan, part, corpus.loss)
      for part in np.array_split(rows, 1 + len(rows) // 1024)
    )
    self.n_pairs = count(self._rows)
    if not self.n_pairs:
      raise errors.UserError(
        f'held-out rows of {domain!r}: none has loss (data.loss_on='
        f'{config.data.loss_on}); raise train.eval_batches='
        f'{config.train.eval_batches} (0: all), or data.sequence_length.'
      )
    every = max(1, count(np.arange(self.plan.rows)))
    total = int(corpus.n_bytes[chosen].sum())
    self.n_bytes = round(total * (self.n_pairs / every))

  def __len__(self):
    return math.ceil(len(self._rows) / self._width)

  def rows_at(self, i):
    """(B / A,) row ids of batch i; -1 where the last batch has none left."""
    rows = self._rows[i * self._width : (i + 1) * self._width]
    return np.pad(rows, (0, self._width - len(rows)), constant_values=-1)

  def batch_at(self, i, lo=0, hi=None):
    """Batch i, (B / A, T), or its rows lo..hi; global denominator."""
    if not 0 <= i < len(self):
      raise IndexError(f'{self.domain} has {len(self)} batches, not {i}')
    rows = self.rows_at(i)
    corpus = self._corpus
    total = max(1, packing.counted(self.plan, rows, corpus.loss))
    batch = _text(corpus, self.plan, rows[lo:hi])
    batch = batch._replace(denominator=np.float32(total))
    places = i * self._width + np.arange(len(rows))[lo:hi]
    every, noise = len(self._rows), objectives.HELD_OUT
    return objectives.batch(self._config, batch, 0, places, every, noise)


def evaluation(config, corpus):
  """Held-out batches per domain: a list of HeldOut, domains in sorted order.

  All batches have the shape of a microbatch, (B / A, T); a domain has the rows
  of at most train.eval_batches steps, (B, T), 0: all. UserError: as Batches;
  nothing is held out.
  """
  _check(config, corpus)
  held = [d for d in corpus.domains if len(corpus.select('held', d))]
  if not held:
    count, share = len(corpus.held), config.data.held_out_fraction
    advice = (
      'raise data.held_out_fraction=0.0'
      if not share
      else 'each domain has one document, which is trained on: put .txt files '
      'of one kind in a sub-folder and name its parent (directly in the folder '
      'each is a domain of its own), give more text, or mark documents of '
      '.jsonl "split": "held"'
    )
    raise errors.UserError(
      f'data.path={corpus.path!r}: 0 of {count} documents are held out; '
      f'{advice}.'
    )
  return [HeldOut(corpus, domain, config) for domain in held]


def mixture(text, corpus):
  """'code=2,drama=1' -> {'code': 2.0, 'drama': 1.0}; '' -> {}.

  Raises:
    UserError: not of this form, a domain the corpus lacks, a weight <= 0.
  """
  weights = {}
  for part in filter(None, (p.strip() for p in text.split(','))):
    name, equals, value = (p.strip() for p in part.partition('='))
    try:
      weight = float(value)
    except ValueError:
      weight = 0.0
    if not equals or not weight > 0 or not math.isfinite(weight):
      raise errors.UserError(
        f"data.mixture={text!r}: {part!r} is not 'domain=weight' with a "
        'weight above 0.'
      )
    if name not in corpus.domains:
      raise errors.UserError(
        f'data.mixture={text!r}: no domain {name!r} in {corpus.path!r}, '
        f'which has {", ".join(corpus.domains)}.'
        + schema.suggest(name, corpus.domains)
      )
    if name in weights:
      raise errors.UserError(f'data.mixture={text!r} names {name!r} twice.')
    weights[name] = weight
  return weights


def _check(config, corpus):
  """UserError: rows or the vocabulary do not fit, whatever the packing."""
  _ = config.microbatch_rows  # a UserError where rows do not divide
  if corpus.vocab_size > config.model.vocab_size:
    raise errors.UserError(
      f'{corpus.path!r} is tokenized with ids up to {corpus.vocab_size - 1}, '
      f'model.vocab_size is {config.model.vocab_size}: set it to at least '
      f'{corpus.vocab_size}.'
    )


def _order(rows, weights, seed, batch_size, views):
  """grain dataset: step -> (B,) row ids, every epoch in another order; `views`
  neighbours are the same one."""
  import grain  # imports jax

  first = 0
  parts = []
  for n, count in enumerate(rows):
    # grain reseeds an epoch by adding 1: hashing keeps runs with seeds 0 and 1
    # from sharing their orders.
    hashed = np.random.SeedSequence([seed, n, 1]).generate_state(1)[0]
    part = grain.MapDataset.range(first, first + count)
    parts.append(part.shuffle(seed=int(hashed)).repeat())
    first += count
  mixed = parts[0]
  if len(parts) > 1:
    mixed = grain.MapDataset.mix(parts, weights)
  mixed = mixed.batch(batch_size // views)
  return mixed.map(lambda ids: np.repeat(ids, views)) if views > 1 else mixed


def _documents(corpus, plan, rows):
  """Names of the documents in each of `rows`."""
  out = []
  for row in rows:
    pieces = slice(plan.row_starts[row], plan.row_starts[row + 1])
    found = np.searchsorted(corpus.starts, plan.tokens[pieces], 'right') - 1
    out.append([corpus.name(document) for document in found])
  return out
