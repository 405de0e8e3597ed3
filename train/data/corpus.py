"""Text -> documents with a fixed held-out split.

Where text comes from: 'fixture' (shipped), 'corpus' (what `paraxis data fetch`
brought), a file of a format of train/data/readers.py, a folder of them, or a
glob ('web/**/*.parquet'). A row's domain is its own; else of a .txt or .md file
its folder below the given path, else the file's name without suffix and shard.

Of files and datasets in one folder, whatever their formats, 'train' is trained
on and 'validation', 'valid', 'val', 'dev', 'eval' and 'test' are held out,
where both kinds are there; their domain is the folder. A file that is named
itself has no such split.

Held out, where the data names no split: within each domain the documents with
the lowest sha256 of "domain/id", until they hold `held_out_fraction` of the
domain's bytes, or of large files MOST_HELD, never the domain's last document.
Of a row without an id of its own, and of a document cut from plain text or
tokens, the id is the sha256 of the text: equal texts are on the same side. The
same documents on every machine; adding a document, wherever it stands, moves
few others.

Cost: `documents` has the text in memory whole, train/data/token_cache.py not.
"""

import dataclasses
import glob
import hashlib
import logging
import math
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import cache
from paraxis.configs.base import errors
from paraxis.configs.base import plain_files
from paraxis.train.data import files
from paraxis.train.data import folders
from paraxis.train.data import readers
from paraxis.train.data import rows as rows_lib
from paraxis.train.data import tables

FORMATS = (
  '.txt, .md and .jsonl (also .gz, .zst), .parquet, .bin, datasets folders'
)
HELD = ('validation', 'valid', 'val', 'dev', 'eval', 'test')
MOST_HELD = 5_000_000  # bytes of a domain: more costs time and tells no more
_NULL = re.compile(rb'"(?:id|domain)"\s*:\s*null')
# In fingerprints of text whose rows may have no ids, as what we bring all have:
# a cache of the time when their place decided is not taken for one of today.
BY_TEXT = b'|split by text'
log = logging.getLogger(__name__)


class Document(NamedTuple):
  """One text. `name` is 'domain/id'; n_bytes counts its UTF-8."""

  domain: str
  id: str
  held: bool
  text: str
  n_bytes: int

  @property
  def name(self):
    return f'{self.domain}/{self.id}'


def fingerprint(source) -> str:
  """Hexadecimal sha256 of what decides the rows of a rows_lib.Source."""
  if source.file.is_dir():
    each = map(files.sha256, tables.files_of(source.file))
    return hashlib.sha256('|'.join(each).encode()).hexdigest()
  if source.file.suffix not in ('.txt', '.md'):
    # An id that is null is none; it was once read as 'None'.
    content = files.sha256(source.file)
    return content + ('|null is none' if _has_null(source.file) else '')
  digest, long = hashlib.sha256(), False
  window = readers.LONG_LINE // 2
  with open(source.file, 'rb') as file:
    while chunk := file.read(32 * window):
      digest.update(chunk)
      # A line of two windows has one window of its own without an end.
      starts = range(0, len(chunk) - window + 1, window)
      long = long or any(chunk.find(b'\n', a, a + window) < 0 for a in starts)
  # Text whose long lines are cut is other text than before that rule.
  return digest.hexdigest() + ('|long lines are cut' if long else '')


def _has_null(path):
  """Whether rows of a .jsonl that is not packed have an id or domain null.

  A packed file is not unpacked for this at every start, which would take as
  long as reading it: its cache of the time of 'None' is taken.
  """
  if path.suffix.lower() != '.jsonl':
    return False
  with open(plain_files.open_descriptor(path), 'rb') as file:
    whole_lines = iter(lambda: file.read(1 << 20) + file.readline(), b'')
    return any(b'null' in x and _NULL.search(x) for x in whole_lines)


def is_glob(path) -> bool:
  """Whether config.data.path is a pattern, not the name of something there."""
  return glob.has_magic(str(path)) and not os.path.exists(path)


def source_folder(path):
  """File, folder or glob that config.data.path means. UserError: missing."""
  if path == 'fixture':
    return files.FIXTURE
  if path == 'corpus':
    folder = cache.root() / 'corpus'
    if not folder.is_dir():
      raise errors.UserError(
        f"data.path='corpus': {folder} does not exist; "
        'run `paraxis data fetch` first.'
      )
    return folder
  if not str(path):
    raise errors.UserError(
      "data.path is empty: name a file, a folder ('.': this one), 'fixture' or "
      "'corpus', or give data.sources."
    )
  found = pathlib.Path(path)
  if not os.path.exists(found) and not is_glob(path):
    raise errors.UserError(
      f'data.path={path!r}: no such file or folder ({found.absolute()}); '
      f"use 'fixture', 'corpus', a file ({FORMATS}), a folder or a glob."
    )
  return found


def weights(data) -> dict[str, float]:
  """'a.txt:0.7,b/*.jsonl:0.3' of data.sources -> {path: weight}; '': {}.

  UserError: not of this form, a weight that is not above 0, a path twice.
  """
  found = {}
  for part in filter(None, (p.strip() for p in data.sources.split(','))):
    path, _, value = part.rpartition(':')
    try:
      weight = float(value)
    except ValueError:
      weight = 0.0
    if not path or not 0 < weight < math.inf:
      raise errors.UserError(
        f"data.sources={data.sources!r}: {part!r} is not 'PATH:WEIGHT' with a "
        'weight above 0.'
      )
    if path in found:
      raise errors.UserError(f'data.sources names {path!r} twice.')
    found[path] = weight
  return found


def sources(data) -> list[rows_lib.Source]:
  """What config.data reads: the sources of its path, or of its sources."""
  if not data.sources:
    return source_files(data.path)
  if data.path not in ('fixture', ''):
    raise errors.UserError(
      f'data.path={data.path!r} and data.sources={data.sources!r}: the sources '
      'replace the path; give one of them (--config.data.path= empties it).'
    )
  if data.mixture:
    raise errors.UserError(
      f'data.mixture={data.mixture!r} weighs domains, data.sources weighs '
      'sources: give one of them.'
    )
  found = {}
  for path in weights(data):
    for source in source_files(path):
      before = found.setdefault(
        source.file.resolve(), source._replace(group=path)
      )
      if before.group != path:
        raise errors.UserError(
          f'data.sources: {source.file} is in {before.group!r} and in {path!r}.'
        )
  return list(found.values())


def absolute(path) -> str:
  """config.data.path as an absolute one; names of what is shipped stay."""
  if path in ('fixture', 'corpus'):
    return path
  found = pathlib.Path(os.path.expanduser(path))
  return str(found.absolute()) if is_glob(found) else _resolved(path)


def _resolved(path) -> str:
  """The absolute name of what is there; else the name as it is."""
  found = os.path.expanduser(path)
  return str(pathlib.Path(found).resolve()) if os.path.exists(found) else path


def with_places(config):
  """The schema.Config with absolute names of files and folders in `data`."""
  data = config.data
  own = data.tokenizer not in ('bytes', 'bpe2048', 'ids')
  data = dataclasses.replace(
    data,
    path=absolute(data.path),
    chat_template=_resolved(data.chat_template),
    tokenizer=_resolved(data.tokenizer) if own else data.tokenizer,
    sources=','.join(f'{absolute(p)}:{w:g}' for p, w in weights(data).items()),
  )
  return dataclasses.replace(config, data=data)


def source_files(path) -> list[rows_lib.Source]:
  """The sources of config.data.path, sorted by path. UserError if none."""
  root = source_folder(path)
  if is_glob(path):
    parts = root.parts
    fixed = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    matched = sorted(map(pathlib.Path, glob.glob(str(path), recursive=True)))
    root = pathlib.Path(*parts[:fixed])
    found = [file for match in matched for file in folders.sources(match)]
  elif root.is_dir():
    found = folders.sources(root)
  else:
    _check_file(root)
    plain = readers.is_plain(root)
    if not readers.kind(root) and not (plain and readers.is_utf8(root)):
      what = f'ends in {root.suffix!r}'
      if plain:
        what = 'has no suffix, and its beginning is not UTF-8 text'
      raise errors.UserError(
        f'data.path={str(path)!r} {what}; text is read from {FORMATS}.'
      )
    return [rows_lib.Source(root, readers.stem(root))]
  if not found:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 sources of text in {root}, of {FORMATS}.'
    )
  found = _once(found, root)
  for file in found:
    _check_file(file)
  return _named(found, root)


def _once(found, root):
  """One name of each file below `root`, that of no link where there is one."""
  whole, names = os.path.realpath(root), {}
  for file in found:
    real = os.path.realpath(file)
    if os.path.join(whole, file.relative_to(root)) == real:
      names[real] = file
    names.setdefault(real, file)
  kept = {*names.values()}
  return [file for file in dict.fromkeys(found) if file in kept]


def _check_file(file):
  """UserError: it is a named pipe, whose text could be read once at most."""
  try:
    if not file.is_dir():
      plain_files.check(file)
  except OSError as error:
    raise errors.UserError(
      f'data.path: {file} cannot be read: {error.strerror}.'
    ) from error


def _named(files, root):
  """Sources with their domains, and splits where names of files say them."""
  sibling: dict[pathlib.Path, set] = {}
  for file in files:
    sibling.setdefault(file.parent, set()).add(readers.stem(file))
  out = []
  for file in files:
    name, beside = readers.stem(file), sibling[file.parent]
    domain, part = name, None
    splits = 'train' in beside and beside & {*HELD}
    if splits and name in ('train', *HELD):
      part = 'train' if name == 'train' else 'held'
      domain = file.resolve().parent.name
    elif readers.kind(file) == 'text' and file.parent != root:
      domain = file.relative_to(root).parts[0]
    out.append(rows_lib.Source(file, domain, part))
  return out


def documents(path, held_out_fraction=0.1, options=rows_lib.PLAIN):
  """All documents of a source, in file order, each with its split.

  Args:
    path: as config.data.path.
    held_out_fraction: share of a domain's bytes to hold out, where its
      documents name no split themselves.
    options: rows.Options.

  Returns:
    Non-empty list of Document.

  Raises:
    UserError: missing path, no document with text, or a bad line.
  """
  sources = source_files(path)
  rows = read(sources, path, options)
  most = most_held(path, sources, held_out_fraction)
  return split(rows, held_out_fraction, most)


def most_held(path, sources, fraction) -> float:
  """Bytes that the rule holds out of a domain at most.

  inf: of what we bring, and of files so small that the splits and fingerprints
  of before there was a bound stay.
  """
  if path in ('fixture', 'corpus'):
    return math.inf
  each = (file for source in sources for file in tables.files_of(source.file))
  size = sum(file.stat().st_size for file in each)
  return MOST_HELD if fraction * size > MOST_HELD else math.inf


def read(sources, path, options=rows_lib.PLAIN, say=log.warning):
  """[rows.Row] of `source_files(path)`, no name twice."""
  found = [r for s in sources for r in readers.read(s, options, say)]
  if not found:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 documents in {len(sources)} files.'
    )
  digests = np.asarray([name_digest(r.domain, r.id) for r in found], np.uint64)
  return [
    row if times == 1 else row._replace(id=f'{row.id}#{times}')
    for row, times in zip(found, occurrences(digests).tolist(), strict=True)
  ]


def split(rows, held_out_fraction, most=math.inf):
  """Documents of `rows`, held out by name where no split is given."""
  names = sorted({row.domain for row in rows})
  index = {name: i for i, name in enumerate(names)}
  parts = {None: 0, 'train': 1, 'held': 2}
  sizes = np.asarray([len(row.text.encode()) for row in rows], np.int64)
  held = held_out(
    np.asarray([index[row.domain] for row in rows]),
    np.asarray(
      [name_digest(row.domain, row.key or row.id) for row in rows], np.uint64
    ),
    sizes,
    np.asarray([parts[row.split] for row in rows]),
    held_out_fraction,
    most,
  )
  return [
    Document(row.domain, row.id, bool(h), row.text, int(size))
    for row, h, size in zip(rows, held, sizes, strict=True)
  ]


def name_digest(domain, id_) -> int:
  """The first 8 bytes of the sha256 that orders a domain's documents."""
  digest = hashlib.sha256(f'paraxis/{domain}/{id_}'.encode()).digest()
  return int.from_bytes(digest[:8], 'big')


def occurrences(digests):
  """(D,) how often each has come up to here: a repeated name gets a number."""
  order = np.argsort(digests, kind='stable')
  ranked = digests[order]
  new = np.append(True, ranked[1:] != ranked[:-1])[: len(order)]
  begins = np.flatnonzero(new)
  times = np.empty(len(order), np.int64)
  counts = np.diff(np.append(begins, len(order)))
  times[order] = np.arange(len(order)) - np.repeat(begins, counts) + 1
  return times


def held_out(domain_ids, digests, n_bytes, parts, fraction, most=math.inf):
  """(D,) bool: which documents are held out, by the rule above.

  Args:
    domain_ids, digests, n_bytes: (D,) domain, name_digest and size of each;
      those of one digest stay together.
    parts: (D,) 1: train, 2: held, 0: the rule decides.
    fraction: of a domain's bytes. most: bytes of a domain.
  """
  held = parts == 2
  for domain in np.unique(domain_ids):
    free = np.flatnonzero((domain_ids == domain) & (parts == 0))
    order = free[np.argsort(digests[free], kind='stable')]
    before = np.cumsum(n_bytes[order]) - n_bytes[order]
    wanted = min(fraction * n_bytes[free].sum(), most)
    _, first, group = np.unique(
      digests[order], return_index=True, return_inverse=True
    )
    chosen = before[first] < wanted
    chosen[-1:] = False
    held[order] = chosen[group]
  return held
