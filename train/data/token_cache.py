"""Documents -> tokens on disk, memory-mapped, checked against their source.

Every document is stored as [bos(domain)] + encode(text) + [end], one after the
other. The cache is a folder: tokens.bin, four .npy arrays, ids.json and
meta.json with a fingerprint of the text and the tokenizer and a checksum of
every file. It is built beside its place and renamed into it, so a reader never
sees half a cache and builders may race. A cache that does not match its
checksums or its source is rebuilt, with a message.

Cost: tokenizing once; then text and tokens are hashed at every start, about
one second per GB.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil
import tempfile

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.data import corpus

FORMAT = 1  # of the files in the folder
_ARRAYS = ('starts', 'domain_ids', 'n_bytes', 'held')
_CHUNK = 256  # documents tokenized at once
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

  @property
  def lengths(self):
    """(D,) int64 tokens of each document, bos and end included."""
    return np.diff(self.starts)

  def select(self, split, domain=None):
    """Indices of the documents of 'train' or 'held' (of one domain)."""
    chosen = self.held if split == 'held' else ~self.held
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
      vocabulary; a cache folder that cannot be written.
  """
  if tokenizer.vocab_size > config.model.vocab_size:
    raise errors.UserError(
      f'tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, '
      f'model.vocab_size is {config.model.vocab_size}: set it to at least '
      f'{tokenizer.vocab_size}.'
    )
  data = config.data
  files = corpus.source_files(data.path)
  print_ = _fingerprint(files, tokenizer, data)
  where = (
    f'{corpus.source_folder(data.path).resolve()}|{data.held_out_fraction}'
  )
  key = hashlib.sha256(f'{where}|{tokenizer.name}'.encode()).hexdigest()[:8]
  root = pathlib.Path(data.cache_dir or corpus.cache_root() / 'tokens')
  stem = f'{corpus.source_folder(data.path).stem}-{key}'
  folder = root / f'{stem}-{print_[:16]}'
  problem = _problem(folder, print_) if folder.exists() else None
  if folder.exists() and not problem:
    return _open(folder, data.path)
  old = _others(root, stem, folder)
  if problem:
    say(f'token cache {folder} is damaged ({problem}): building it again.')
  elif old:
    say(f'the text or tokenizer of {data.path} changed: tokenizing it again.')
  rows = corpus.read(files, data.path, data.text_key, say)
  docs = corpus.split(rows, data.held_out_fraction)
  try:
    _build(folder, docs, print_, tokenizer)
  except OSError as error:
    raise errors.UserError(
      f'token cache {folder} cannot be written ({error.strerror}): '
      'set data.cache_dir to a folder with room.'
    ) from error
  for stale in old:
    shutil.rmtree(stale, ignore_errors=True)
  return _open(folder, data.path)


def _fingerprint(sources, tokenizer, data):
  """sha256 over everything that decides the tokens and the splits."""
  digest = hashlib.sha256(f'{FORMAT}|{data.held_out_fraction!r}'.encode())
  digest.update(tokenizer.fingerprint.encode())
  if data.text_key != schema.Data().text_key:
    digest.update(f'|text_key={data.text_key}'.encode())
  for source in sources:
    name, content = source.file.name, corpus.fingerprint(source)
    digest.update(f'|{source.domain}|{name}|{content}'.encode())
    digest.update(f'|{source.split}'.encode() if source.split else b'')
  return digest.hexdigest()


def _others(root, stem, folder):
  """Caches of the same source and tokenizer with other contents."""
  if not root.is_dir():
    return []
  named = [p for p in root.iterdir() if p.name.startswith(f'{stem}-')]
  return [p for p in named if p != folder and (p / 'meta.json').is_file()]


def _seal(meta):
  """Checksum of meta.json's own content."""
  rest = {k: v for k, v in meta.items() if k != 'seal'}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _problem(folder, print_):
  """What is wrong with a cache, in a few words; None if nothing is."""
  try:
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    if meta['seal'] != _seal(meta):
      return 'meta.json does not match its checksum'
    if meta['fingerprint'] != print_:
      return 'another fingerprint'
    for name, checksum in meta['files'].items():
      if corpus.sha256(folder / name) != checksum:
        return f'{name} does not match its checksum'
  except (OSError, ValueError, KeyError, TypeError) as error:
    return f'{type(error).__name__}: {error}'
  return None


def _build(folder, docs, print_, tokenizer):
  """Writes the cache beside `folder`, then renames it into place."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  made = pathlib.Path(tempfile.mkdtemp(prefix='building-', dir=folder.parent))
  try:
    _write(made, docs, print_, tokenizer)
    if folder.exists() and _problem(folder, print_):
      # Away by renaming: a reader that has the files open keeps them.
      os.rename(folder, made.with_name(made.name + '-damaged'))
    try:
      os.rename(made, folder)
    except OSError:
      if _problem(folder, print_):  # else another builder was first: same bytes
        raise
  finally:
    shutil.rmtree(made, ignore_errors=True)
    shutil.rmtree(made.with_name(made.name + '-damaged'), ignore_errors=True)


def _write(folder, docs, print_, tokenizer):
  """All files of a cache; meta.json last."""
  domains = sorted({d.domain for d in docs})
  bos = {domain: tokenizer.bos_id(domain) for domain in domains}
  kind = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
  lengths = []
  with open(folder / 'tokens.bin', 'wb') as f:
    for at in range(0, len(docs), _CHUNK):
      chunk = docs[at : at + _CHUNK]
      encoded = tokenizer.encode_batch([d.text for d in chunk])
      for document, ids in zip(chunk, encoded, strict=True):
        ids = [bos[document.domain], *ids, tokenizer.end_id]
        lengths.append(len(ids))
        f.write(np.asarray(ids, kind).tobytes())
  index = {domain: i for i, domain in enumerate(domains)}
  arrays = dict(
    starts=np.cumsum([0, *lengths], dtype=np.int64),
    domain_ids=np.asarray([index[d.domain] for d in docs], np.int32),
    n_bytes=np.asarray([d.n_bytes for d in docs], np.int64),
    held=np.asarray([d.held for d in docs], bool),
  )
  for name, array in arrays.items():
    np.save(folder / f'{name}.npy', array)
  (folder / 'ids.json').write_text(
    json.dumps([d.id for d in docs]), encoding='utf-8'
  )
  meta = dict(
    format=FORMAT,
    fingerprint=print_,
    domains=domains,
    vocab_size=tokenizer.vocab_size,
    pad_id=tokenizer.pad_id,
    dtype=np.dtype(kind).name,
    files={p.name: corpus.sha256(p) for p in sorted(folder.iterdir())},
  )
  meta['seal'] = _seal(meta)
  (folder / 'meta.json').write_text(json.dumps(meta, indent=1), 'utf-8')


def _open(folder, path):
  """The Corpus in a cache whose checksums hold."""
  meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
  arrays = {
    name: np.load(folder / f'{name}.npy', allow_pickle=False)
    for name in _ARRAYS
  }
  return Corpus(
    tokens=np.memmap(folder / 'tokens.bin', dtype=meta['dtype'], mode='r'),
    **arrays,
    domains=tuple(meta['domains']),
    fingerprint=meta['fingerprint'],
    vocab_size=meta['vocab_size'],
    pad_id=meta['pad_id'],
    path=str(path),
    folder=folder,
  )
