"""Builds a token cache as a stream: blocks -> pieces -> one folder.

Blocks are read in order and tokenized by several processes, each into a piece
of its own in `building-NAME` beside the cache. A killed build resumes from the
pieces that are there and match their checksums. At the end they are joined, in
order, into a folder that is renamed into its place: a reader never sees half a
cache. One process builds at a time, which holds a lock file beside that folder;
others wait for it.

Which documents are held out is decided at the end (train/data/corpus.py), from
a hash and a size of each.

Cost: memory for the blocks in flight, and 40 bytes a document.
"""

import collections
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
import sys
import time
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.train.data import corpus
from paraxis.train.data import files
from paraxis.train.data import pieces
from paraxis.train.data import readers
from paraxis.train.data import token_worker

FORMAT = 1  # of the files in the folder
BUILDING = 'building-'
LOCK = '.lock'  # ends the name of the file beside a building- folder
_WORKERS = 16  # at most, by default
_EVERY = (1.0, 30.0)  # seconds between progress lines: terminal, else


def seal(meta):
  """Checksum of meta.json's own content."""
  rest = {k: v for k, v in meta.items() if k != 'seal'}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def problem(folder, print_):
  """What is wrong with a cache, in a few words; None if nothing is."""
  try:
    meta = json.loads(plain_files.read_text(folder / 'meta.json'))
    if meta['seal'] != seal(meta):
      return 'meta.json does not match its checksum'
    if meta['fingerprint'] != print_:
      return 'another fingerprint'
    for name, checksum in meta['files'].items():
      if files.sha256(folder / name) != checksum:
        return f'{name} does not match its checksum'
  except (OSError, ValueError, KeyError, TypeError) as error:
    return f'{type(error).__name__}: {error}'
  return None


def build(folder, sources, tokenizer, options, meta, workers, say):
  """Writes the cache `folder`, unless another process did meanwhile.

  Args:
    folder: of the cache.
    sources: [rows.Source], non-empty.
    tokenizer, options: what decides the pieces.
    meta: dict of fingerprint, path (for messages), held_out_fraction,
      most_held (corpus.most_held), groups, states (files.states of the sources
      before the fingerprint was taken).
    workers: config.data.workers.
    say: called with one line.

  Raises:
    UserError: bad text, no document, a worker that ended. OSError: no room.
  """
  folder.parent.mkdir(parents=True, exist_ok=True)
  with _alone(folder.with_name(BUILDING + folder.name), say) as work:
    if folder.exists() and not problem(folder, meta['fingerprint']):
      shutil.rmtree(work, ignore_errors=True)
      return
    try:
      count = _tokenize(work, sources, tokenizer, options, workers, say)
      whole = work / 'whole'
      shutil.rmtree(whole, ignore_errors=True)
      whole.mkdir()
      if not _join(work, whole, count, tokenizer, meta):
        raise errors.UserError(
          f'data.path={meta["path"]!r}: 0 documents in {len(sources)} files.'
        )
      files.check_same(meta['states'])
      # Where there are no locks, another may have been faster: runs read it.
      if problem(folder, meta['fingerprint']):
        if folder.exists():
          # Away by renaming: a reader that has the files open keeps them.
          os.rename(folder, work / 'damaged')
        os.rename(whole, folder)
    except token_worker.Ended:
      raise
    except Exception:
      shutil.rmtree(work, ignore_errors=True)
      raise
    shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _alone(work, say):
  """The folder of a build, which no other process works in."""
  said, lock = False, work.with_name(work.name + LOCK)
  while True:
    try:
      work.mkdir(parents=True, exist_ok=True)
      opened = _opened(lock)
    except (FileExistsError, FileNotFoundError):
      if work.is_file() or work.is_symlink():
        raise
      continue  # between two of these calls it was removed by who had it
    try:
      fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      if not said:
        said = True
        say(f'another process is writing {work.name}: waiting for it.')
      fcntl.flock(opened, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: builders do not share
      os.close(opened)
      lock.unlink(missing_ok=True)
      with contextlib.suppress(OSError):
        work.rmdir()
      # No process number: the first of every container is 1.
      work = work.with_name(f'{work.name}-{secrets.token_hex(8)}')
      work.mkdir()
      yield work
      return
    if _is_there(opened, lock) and work.is_dir():
      break
    os.close(opened)  # it was removed by who had it
  try:
    yield work
  finally:
    lock.unlink(missing_ok=True)
    os.close(opened)


def _opened(lock):
  """Descriptor of a lock file: NFS locks files for all hosts, no folders."""
  flags = os.O_RDWR | os.O_CREAT
  return plain_files.open_descriptor(lock, flags, follow=False)


def _is_there(opened, lock):
  """Whether the name is still that of the open file."""
  with contextlib.suppress(FileNotFoundError):
    return os.path.samestat(os.fstat(opened), os.stat(lock))
  return False


def remove(work):
  """Removes what a killed build left, unless it is at work."""
  lock = work.with_name(work.name + LOCK)
  with contextlib.suppress(OSError):
    opened = _opened(lock)
    try:
      fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if _is_there(opened, lock):
        shutil.rmtree(work, ignore_errors=True)
        lock.unlink()
    except BlockingIOError:
      pass  # it is at work
    except OSError:
      lock.unlink()  # a file system without locks
    finally:
      os.close(opened)


def _cores():
  affinity = getattr(os, 'sched_getaffinity', None)
  return len(affinity(0)) if affinity else os.cpu_count() or 1


def _tokenize(work, sources, tokenizer, options, workers, say):
  """Writes every piece that is not there yet -> how many there are."""
  blocks = _placed(sources, options, say)
  first = list(itertools.islice(blocks, 2))
  count = (workers or min(_cores(), _WORKERS)) if len(first) > 1 else 1
  own = type(tokenizer).__module__ == token_worker.tokenizer_lib.__name__
  count = count if own and count > 1 else 0  # processes beside this one
  waiting, number = collections.deque(), 0
  progress = _Progress(sum(_size(s) for s in sources), say)
  with token_worker.pool(count, work, tokenizer, options) as tokenize:
    for at, block in itertools.chain(first, blocks):
      done = pieces.is_done(work, number, block)
      waiting.append((at, None if done else tokenize(number, block)))
      number += 1
      if len(waiting) > 2 * count:
        progress.add(*waiting.popleft())
    while waiting:
      progress.add(*waiting.popleft())
  progress.end()
  return number


def _size(source):
  if source.file.is_dir():
    return sum(f.stat().st_size for f in source.file.iterdir())
  return source.file.stat().st_size


def _placed(sources, options, say):
  """(bytes of all files read so far, block) of every block."""
  before = 0
  for source in sources:
    for block in readers.blocks(source, options, say):
      yield before + block.done, block
    before += _size(source)


class _Progress:
  """One line that is written over on a terminal, else one now and then."""

  def __init__(self, total, say):
    self._total, self._say = max(1, total), say
    self._began = self._shown = time.monotonic()
    self._tokens = self._kept = self._kept_at = self._at = 0
    self._terminal = sys.stderr.isatty()
    self._open = False

  def add(self, at, future):
    """A piece that ends at byte `at`; future: of its tokens, None: kept."""
    self._at = at
    if future is None:
      self._kept, self._kept_at = self._kept + 1, at
      return
    if self._kept and not self._tokens:
      self._say(
        f'token cache: {self._kept} finished pieces of an earlier build are '
        'kept.'
      )
    self._tokens += future.result()
    now = time.monotonic()
    if now - self._shown >= _EVERY[not self._terminal]:
      self._shown = now
      self._show(now - self._began)

  def _show(self, seconds):
    new = self._at - self._kept_at
    left = seconds * (self._total - self._at) / max(1, new)
    line = (
      f'tokenizing: {self._at / self._total:4.0%}, '
      f'{self._tokens / seconds / 1e6:.2f} M tokens/s, {left:,.0f} s left'
    )
    self._open = self._terminal
    end = '\r' if self._terminal else '\n'
    print(f'{line:60}', end=end, file=sys.stderr, flush=True)

  def end(self):
    if self._open:
      print(' ' * 60, end='\r', file=sys.stderr, flush=True)


def _join_loss(work, whole, count, total):
  """loss.bin, where a piece says which of its tokens carry loss."""
  files = [work / f'{number:06d}.loss' for number in range(count)]
  if not any(file.exists() for file in files):
    return
  with open(whole / 'loss.bin', 'wb') as joined:
    for file in files:
      # Of a piece without documents there is none.
      joined.write(file.read_bytes() if file.exists() else b'')
  if (whole / 'loss.bin').stat().st_size != total:
    raise RuntimeError('pieces with and without a mask of loss')


class _Documents(NamedTuple):
  """What the pieces say of their D documents, but their names.

  domains: names, in the order met. domain_ids: (D,) into it. digests: (D,) of
  the names, keys: (D,) what the split sorts by, 0: the name.
  lengths, n_bytes: (D,). parts: (D,) 1 train, 2 held, 0 neither.
  groups: (D,) part of data.sources.
  """

  domains: list
  domain_ids: np.ndarray
  digests: np.ndarray
  keys: np.ndarray
  lengths: np.ndarray
  n_bytes: np.ndarray
  parts: np.ndarray
  groups: np.ndarray


def _documents(work, count, groups):
  known: dict[str, int] = {}
  parts = {None: 0, 'train': 1, 'held': 2}
  columns = []
  for number in range(count):
    piece = pieces.index(work, number)
    names = piece['names']
    group = groups.index(piece['group']) if groups else 0
    ids = [known.setdefault(domain, len(known)) for domain, *_ in names]
    columns.append((
      np.asarray(ids, np.int32),
      np.asarray([corpus.name_digest(d, i) for d, i, *_ in names], np.uint64),
      np.asarray(
        [corpus.name_digest(d, k) if k else 0 for d, _, _, k in names],
        np.uint64,
      ),
      np.asarray(piece['lengths'], np.int64),
      np.asarray(piece['n_bytes'], np.int64),
      np.asarray([parts[part] for _, _, part, _ in names], np.int8),
      np.full(len(names), group, np.int16),
    ))  # fmt: skip
  if not known:
    return None
  arrays = [np.concatenate(c) for c in zip(*columns, strict=True)]
  return _Documents(list(known), *arrays)


def _join(work, whole, count, tokenizer, meta):
  """All files of a cache from its pieces, meta.json last -> documents."""
  found = _documents(work, count, meta['groups'])
  if found is None:
    return 0
  domains, n_bytes = found.domains, found.n_bytes
  sorted_ = {domain: i for i, domain in enumerate(sorted(domains))}
  index = np.asarray([sorted_[domain] for domain in domains], np.int32)
  times = corpus.occurrences(found.digests)
  kind, largest = np.dtype(pieces.dtype(tokenizer)), 0
  digests, at = found.digests, 0
  with (
    open(whole / 'tokens.bin', 'wb') as tokens,
    open(whole / 'ids.json', 'w', encoding='utf-8') as ids,
  ):
    ids.write('[')
    for number in range(count):
      body = (work / f'{number:06d}.tokens').read_bytes()
      tokens.write(body)
      largest = max(largest, int(np.frombuffer(body, kind).max(initial=0)))
      for domain, id_, *_ in pieces.index(work, number)['names']:
        if times[at] > 1:
          id_ = f'{id_}#{times[at]}'
          digests[at] = corpus.name_digest(domain, id_)
        ids.write((', ' if at else '') + json.dumps(id_))
        at += 1
    ids.write(']')
  _join_loss(work, whole, count, found.lengths.sum())
  held = corpus.held_out(
    found.domain_ids,
    np.where(found.keys > 0, found.keys, digests),
    n_bytes,
    found.parts,
    meta['held_out_fraction'],
    meta['most_held'],
  )
  arrays = dict(
    starts=np.concatenate([[0], np.cumsum(found.lengths)]).astype(np.int64),
    domain_ids=index[found.domain_ids],
    n_bytes=n_bytes,
    held=held,
  )
  if meta['groups']:
    arrays['groups'] = found.groups
  for name, array in arrays.items():
    np.save(whole / f'{name}.npy', array)
  own = tokenizer.name != 'ids'
  about = dict(
    format=FORMAT,
    fingerprint=meta['fingerprint'],
    domains=sorted(domains),
    vocab_size=tokenizer.vocab_size if own else largest + 1,
    pad_id=tokenizer.pad_id,
    dtype=kind.name,
    files={p.name: files.sha256(p) for p in sorted(whole.iterdir())},
  )
  about |= {'groups': meta['groups']} if meta['groups'] else {}
  about['seal'] = seal(about)
  (whole / 'meta.json').write_text(json.dumps(about, indent=1), 'utf-8')
  return at
