"""Documents -> tokens on disk, memory-mapped, checked against their source.

Every document is stored as [bos(domain)] + encode(text) + [end], one after the
other. The cache is a folder: tokens.bin, four .npy arrays, ids.json and
meta.json with a fingerprint of the text and the tokenizer and a checksum of
every file (with data.sources also groups.npy; with data.loss_on loss.bin, a
byte a token). How it is built: train/data/cache_build.py. A cache that does not
match its checksums or its source is rebuilt, with a message.

Cost: tokenizing once; then text and tokens are hashed at every start, about
one second per GB.
"""

import dataclasses
import functools
import glob
import hashlib
import json
import logging
import math
import mmap
import os
import pathlib
import shutil

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import cache
from paraxis.configs.base import errors
from paraxis.train.data import cache_build
from paraxis.train.data import chat
from paraxis.train.data import corpus
from paraxis.train.data import files
from paraxis.train.data import readers
from paraxis.train.data import rows
from paraxis.train.data import tables

_ARRAYS = ('starts', 'domain_ids', 'n_bytes', 'held')
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Tokenized documents: D documents, N tokens, memory-mapped.

  Document d is tokens[starts[d] : starts[d + 1]] = bos, text, end.

  tokens:      (N,) uint16 or uint32.
  starts:      (D + 1,) int64.
  domain_ids:  (D,) int32 into `domains`, which is sorted.
  n_bytes:     (D,) int64, UTF-8 bytes of the text.
  held:        (D,) bool, held out.
  fingerprint: sha256 of the text, the splits' rule, the tokenizer, the format.
  vocab_size:  of the tokenizer; every token is below it.
  path:        config.data.path, for messages.
  folder:      of the cache.
  loss:        (N,) uint8, tokens that are predicted with loss; None: all are.
  talks:       whether conversations are among the documents.
  groups:      (names, (D,) indices into them) of data.sources; None without.
  """

  tokens: np.ndarray
  starts: np.ndarray
  domain_ids: np.ndarray
  n_bytes: np.ndarray
  held: np.ndarray
  domains: tuple
  fingerprint: str
  vocab_size: int
  pad_id: int
  path: str
  folder: pathlib.Path
  groups: tuple | None = None
  loss: np.ndarray | None = None
  talks: bool = False

  def release(self):
    """Gives the pages read so far back; the system keeps the file cached.

    Else the resident memory of a run grows to the size of its corpus: a page
    that is touched maps up to 2 MiB around it. Costs 50 microseconds a batch.
    """
    for array in (self.tokens, self.loss):
      held = getattr(array, 'base', None)
      if isinstance(held, mmap.mmap) and hasattr(mmap, 'MADV_DONTNEED'):
        held.madvise(mmap.MADV_DONTNEED)

  @property
  def lengths(self):
    """(D,) int64 tokens of each document, bos and end included."""
    return np.diff(self.starts)

  def select(self, split, domain=None, group=None):
    """Indices of the documents of 'train' or 'held' (of one domain, or of one
    part of data.sources)."""
    chosen = self.held if split == 'held' else ~self.held
    if group is not None and self.groups:
      chosen = chosen & (self.groups[1] == self.groups[0].index(group))
    if domain is not None:
      if domain not in self.domains:
        raise errors.UserError(
          f'data.path={self.path!r} has no domain {domain!r}; it has '
          f'{", ".join(self.domains)}.' + schema.suggest(domain, self.domains)
        )
      chosen = chosen & (self.domain_ids == self.domains.index(domain))
    return np.flatnonzero(chosen)

  @functools.cached_property
  def ids(self):
    """Ids of all documents, in order."""
    try:
      return json.loads((self.folder / 'ids.json').read_text(encoding='utf-8'))
    except OSError:  # another run has replaced the cache; the tokens stay
      return [f'document {n}' for n in range(len(self.held))]

  def name(self, document):
    """'domain/id' of document number `document`."""
    return f'{self.domains[self.domain_ids[document]]}/{self.ids[document]}'


def tokens(config, tokenizer, say=log.warning):
  """The tokens of config.data, from the cache or built now.

  Args:
    config: schema.Config; reads `data` and `model.vocab_size`.
    tokenizer: what models/tokenizer.load gave.
    say: called with one line when a cache is rebuilt.

  Returns:
    Corpus.

  Raises:
    UserError: as `corpus.documents`; a tokenizer larger than the model's
      vocabulary; text that changes meanwhile; a cache folder that cannot be
      written.
  """
  own = tokenizer.name != 'ids'
  if own and tokenizer.vocab_size > config.model.vocab_size:
    raise errors.UserError(
      f'tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, '
      f'model.vocab_size is {config.model.vocab_size}: set it to at least '
      f'{tokenizer.vocab_size}.'
    )
  data = config.data
  try:
    sources = corpus.sources(data)
    before = files.states(f for s in sources for f in tables.files_of(s.file))
    _check_ids(sources, data.tokenizer)
    options = _options(data, tokenizer, sources)
    path = data.sources or data.path
    most = corpus.most_held(path, sources, data.held_out_fraction)
    print_ = _fingerprint(sources, tokenizer, data, options, most)
  except OSError as error:
    raise errors.UserError(
      f'data.path: {error.filename} cannot be read: {error.strerror}.'
    ) from error
  for line in _named_splits(sources):
    say(line)
  folder, stem = _place(data, tokenizer, options, print_)
  problem = cache_build.problem(folder, print_) if folder.exists() else None
  talks = bool(options.template)
  if folder.exists() and not problem:
    return _open(folder, path, talks)
  old = _others(folder.parent, stem, folder)
  if problem:
    say(f'token cache {folder} is damaged ({problem}): building it again.')
  elif old:
    say(f'the text of {path} changed: tokenizing it again.')
  meta = dict(
    fingerprint=print_,
    path=path,
    held_out_fraction=data.held_out_fraction,
    most_held=most,
    groups=list(corpus.weights(data)),
    states=before,
  )
  try:
    cache_build.build(
      folder, sources, tokenizer, options, meta, data.workers, say
    )
  except OSError as error:
    raise errors.UserError(
      f'token cache {folder} cannot be written ({error.strerror}): '
      'set data.cache_dir to a folder with room.'
    ) from error
  for stale in old:
    shutil.rmtree(stale, ignore_errors=True)
  return _open(folder, path, talks)


def _named_splits(sources):
  """Yields a line on each folder whose files' names say the split."""
  found: dict[pathlib.Path, set] = {}
  for source in sources:
    if source.split:
      name = readers.stem(source.file)
      found.setdefault(source.file.parent, set()).add(name)
  for folder, names in found.items():
    held = [name for name in corpus.HELD if name in names]
    verb = 'are' if held[1:] else 'is'
    yield (
      f'data: {folder}: by the names of files, train is trained on, '
      f'{" and ".join(held)} {verb} held out.'
    )


def _check_ids(sources, name):
  """UserError: files of ids need a tokenizer that is named, text one at all."""
  for source in sources:
    ids = readers.kind(source.file) == 'bin'
    if ids and name == schema.Data().tokenizer:
      raise errors.UserError(
        f'{source.file} holds tokens: name the tokenizer.json that made them '
        "in data.tokenizer, or data.tokenizer='ids' to use them as they are."
      )
    if not ids and name == 'ids':
      raise errors.UserError(
        f"data.tokenizer='ids' is for .bin files of tokens, {source.file} is "
        'text: name a tokenizer.'
      )


def _options(data, tokenizer, sources):
  try:
    end = tokenizer.end_id
  except errors.UserError:
    end = -1
  plain = rows.Options(data.text_key, end)
  if not any(readers.is_chat(s, data.text_key) for s in sources):
    if data.loss_on != 'all':
      raise errors.UserError(
        f'data.loss_on={data.loss_on!r} is for conversations, .jsonl with '
        f'"messages" and no "{data.text_key}" in its first line: '
        f'{data.sources or data.path!r} has none.'
      )
    return plain
  try:
    bos = tokenizer.name_of(tokenizer.bos_id())
  except errors.UserError:
    bos = ''
  return plain._replace(
    template=chat.template(data),
    loss_on=data.loss_on,
    specials=tokenizer.specials,
    bos=bos,
    end='' if end < 0 else tokenizer.name_of(end),
  )


def _place(data, tokenizer, options, print_):
  """(folder of the cache, how the caches of this source begin).

  A tokenizer counts by what it makes of text, not by its path: workdirs have a
  copy each. What differs in it has a name of its own, so that none removes what
  is of use to another.
  """
  if data.sources:
    name, where = 'sources', ','.join(corpus.weights(data))
  else:
    found = corpus.source_folder(data.path)
    name, where = found.stem.replace('*', '_'), found.resolve()
  where = f'{where}|{data.held_out_fraction}|{data.text_key}|{data.loss_on}'
  where += f'|{data.chat_template}'
  content = (
    tokenizer.fingerprint, tokenizer.first, tokenizer.prefix, tokenizer.last,
    tokenizer.vocab_size, tokenizer.pad_id,
    '' if data.chat_template else options.template,
  )  # fmt: skip
  key = hashlib.sha256(f'{where}|{content}'.encode()).hexdigest()[:8]
  own = os.path.expanduser(data.cache_dir)
  root = pathlib.Path(own or cache.root() / 'tokens')
  # A name has 255 bytes at most, with all that is put around this one.
  stem = f'{name.encode()[:100].decode(errors="ignore")}-{key}'
  return root / f'{stem}-{print_[:16]}', stem


def _fingerprint(sources, tokenizer, data, options, most):
  """sha256 over everything that decides the tokens and the splits."""
  digest = hashlib.sha256(
    f'{cache_build.FORMAT}|{data.held_out_fraction!r}'.encode()
  )
  if most < math.inf:
    digest.update(f'|at most {most}'.encode())
  digest.update(tokenizer.fingerprint.encode())
  if tokenizer.first is not None:
    digest.update(f'|first={tokenizer.first}'.encode())
  if tokenizer.prefix:
    digest.update(f'|prefix={tokenizer.prefix}'.encode())
  if tokenizer.last is not None:
    digest.update(f'|last={tokenizer.last}'.encode())
  if data.text_key != schema.Data().text_key:
    digest.update(f'|text_key={data.text_key}'.encode())
  if options.template:
    digest.update(f'|{data.loss_on}|{options.template}'.encode())
  if 'strftime_now' in options.template:
    digest.update(f'|{chat.NOW}'.encode())
  shipped = data.path in ('fixture', 'corpus') and not data.sources
  for source in sources:
    name, content = source.file.name, corpus.fingerprint(source)
    digest.update(f'|{source.domain}|{name}|{content}'.encode())
    digest.update(f'|{source.split}'.encode() if source.split else b'')
    if not shipped:
      digest.update(corpus.BY_TEXT)
    if source.group:
      digest.update(
        f'|{list(corpus.weights(data)).index(source.group)}'.encode()
      )
  return digest.hexdigest()


def _others(root, stem, folder):
  """Caches of the same source and tokenizer with other contents."""
  if not root.is_dir():
    return []
  begins = f'{stem}-', f'{cache_build.BUILDING}{stem}-'
  named = [p for p in root.iterdir() if p.name.startswith(begins[0])]
  found = [p for p in named if p != folder and (p / 'meta.json').is_file()]
  # Pieces of a killed build of other text are of no more use.
  for path in root.glob(f'{glob.escape(begins[1])}*'):
    work = path.with_name(path.name.removesuffix(cache_build.LOCK))
    if work.name.removeprefix(cache_build.BUILDING) != folder.name:
      cache_build.remove(work)
  return found


def _loss(folder):
  path = folder / 'loss.bin'
  return np.memmap(path, dtype=np.uint8, mode='r') if path.exists() else None


def _open(folder, path, talks):
  """The Corpus in a cache whose checksums hold."""
  meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
  arrays = {
    name: np.load(folder / f'{name}.npy', allow_pickle=False)
    for name in _ARRAYS
  }
  groups = None
  if 'groups' in meta:
    ids = np.load(folder / 'groups.npy', allow_pickle=False)
    groups = tuple(meta['groups']), ids
  return Corpus(
    tokens=np.memmap(folder / 'tokens.bin', dtype=meta['dtype'], mode='r'),
    **arrays,
    groups=groups,
    loss=_loss(folder),
    talks=talks,
    domains=tuple(meta['domains']),
    fingerprint=meta['fingerprint'],
    vocab_size=meta['vocab_size'],
    pad_id=meta['pad_id'],
    path=str(path),
    folder=folder,
  )
