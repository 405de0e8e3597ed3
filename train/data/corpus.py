"""Text -> documents with a fixed held-out split; the user's cache folder.

Where text comes from: 'fixture' (shipped), 'corpus' (what `paraxis data fetch`
brought), a file of a format of train/data/readers.py, a folder of them, or a
glob ('web/**/*.parquet'). A row's domain is its own; else of a .txt or .md file
its folder below the given path, else the file's name without suffix and shard.

Of .parquet files and datasets in one folder, 'train' is trained on and
'validation', 'valid', 'val', 'dev', 'eval' and 'test' are held out, where both
kinds are there; their domain is the folder.

Held out, where the data names no split: within each domain the documents with
the lowest sha256 of "domain/id", until they hold `held_out_fraction` of the
domain's bytes, never the domain's last document. The same documents on every
machine; adding a document moves few others.

Cost: `documents` has the text in memory whole, train/data/token_cache.py not.
"""

import glob
import hashlib
import logging
import os
import pathlib
from typing import NamedTuple

from paraxis.configs.base import errors
from paraxis.train.data import readers
from paraxis.train.data import rows as rows_lib
from paraxis.train.data import tables

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'
FORMATS = '.txt, .md and .jsonl (also .gz, .zst), .parquet, datasets folders'
HELD = ('validation', 'valid', 'val', 'dev', 'eval', 'test')
_SPLITS = ('.parquet',)  # formats whose file names may say the split
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


def cache_root():
  """Folder of everything paraxis keeps between runs (not created here)."""
  if os.environ.get('PARAXIS_CACHE'):
    return pathlib.Path(os.environ['PARAXIS_CACHE'])
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base, 'paraxis')


def sha256(path):
  """Hexadecimal sha256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def fingerprint(source) -> str:
  """Hexadecimal sha256 of what decides the rows of a rows_lib.Source."""
  if source.file.is_dir():
    state = [source.file / tables.STATE, *tables.dataset_files(source.file)]
    return hashlib.sha256('|'.join(map(sha256, state)).encode()).hexdigest()
  if source.file.suffix not in ('.txt', '.md'):
    return sha256(source.file)
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


def is_glob(path) -> bool:
  """Whether config.data.path is a pattern, not the name of something there."""
  return glob.has_magic(str(path)) and not pathlib.Path(path).exists()


def source_folder(path):
  """File, folder or glob that config.data.path means. UserError: missing."""
  if path == 'fixture':
    return FIXTURE
  if path == 'corpus':
    folder = cache_root() / 'corpus'
    if not folder.is_dir():
      raise errors.UserError(
        f"data.path='corpus': {folder} does not exist; "
        'run `paraxis data fetch` first.'
      )
    return folder
  found = pathlib.Path(path)
  if not found.exists() and not is_glob(path):
    raise errors.UserError(
      f'data.path={path!r}: no such file or folder ({found.absolute()}); '
      f"use 'fixture', 'corpus', a file ({FORMATS}), a folder or a glob."
    )
  return found


def source_files(path) -> list[rows_lib.Source]:
  """The sources of config.data.path, sorted by path. UserError if none."""
  root = source_folder(path)
  if is_glob(path):
    parts = root.parts
    fixed = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    matched = sorted(map(pathlib.Path, glob.glob(str(path), recursive=True)))
    root = pathlib.Path(*parts[:fixed])
    found = [file for match in matched for file in _sources(match)]
    found = list(dict.fromkeys(found))
  elif root.is_dir():
    found = _sources(root)
  else:
    if not readers.kind(root):
      raise errors.UserError(
        f'data.path={str(path)!r} ends in {root.suffix!r}; '
        f'text is read from {FORMATS}.'
      )
    return [rows_lib.Source(root, readers.stem(root))]
  if not found:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 sources of text in {root}, of {FORMATS}.'
    )
  return _named(found, root)


def _named(files, root):
  """Sources with their domains, and splits where names of files say them."""
  sibling: dict[pathlib.Path, set] = {}
  for file in files:
    if _may_split(file):
      sibling.setdefault(file.parent, set()).add(readers.stem(file))
  out = []
  for file in files:
    name, beside = readers.stem(file), sibling.get(file.parent, set())
    domain, part = name, None
    splits = _may_split(file) and 'train' in beside and beside & {*HELD}
    if splits and name in ('train', *HELD):
      part = 'train' if name == 'train' else 'held'
      domain = file.resolve().parent.name
    elif readers.kind(file) == 'text' and file.parent != root:
      domain = file.relative_to(root).parts[0]
    out.append(rows_lib.Source(file, domain, part))
  return out


def _may_split(file):
  return file.suffix in _SPLITS or file.is_dir()


def _sources(path):
  """Files and datasets folders at or below a path, sorted."""
  if not path.is_dir():
    return [path] if readers.kind(path) else []
  if tables.is_dataset(path):
    return [path]
  return sorted(_below(path))


def _below(root):
  """Every source below a folder, which others may write to meanwhile.

  A folder that goes while we walk is passed over (a cache below the text,
  built by another process: Path.rglob would fail); one that cannot be read
  is an error, for its text would be missing without a word.
  """

  def unread(error):
    if not isinstance(error, FileNotFoundError):
      raise errors.UserError(
        f'data.path: {error.filename} cannot be read: {error.strerror}; '
        'let this user read it, or name a folder without it.'
      ) from error

  for folder, inner, names in os.walk(root, onerror=unread):
    here = pathlib.Path(folder)
    data = {name for name in inner if tables.is_dataset(here / name)}
    inner[:] = [name for name in inner if name not in data]
    yield from (here / name for name in data)
    for name in names:
      if readers.kind(name) and (here / name).is_file():
        yield here / name


def documents(path, held_out_fraction=0.1, text_key='text'):
  """All documents of a source, in file order, each with its split.

  Args:
    path: as config.data.path.
    held_out_fraction: share of a domain's bytes to hold out, where its
      documents name no split themselves.
    text_key: as config.data.text_key.

  Returns:
    Non-empty list of Document.

  Raises:
    UserError: missing path, no document with text, or a bad line.
  """
  return split(read(source_files(path), path, text_key), held_out_fraction)


def read(sources, path, text_key='text', say=log.warning):
  """[rows_lib.Row] of `source_files(path)`, no name twice."""
  rows = [r for s in sources for r in readers.read(s, text_key, say)]
  if not rows:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 documents in {len(sources)} files.'
    )
  # A repeated name gets a number: names decide which documents are held out.
  seen, out = {}, []
  for row in rows:
    key = row.domain, row.id
    times = seen[key] = seen.get(key, 0) + 1
    out.append(row if times == 1 else row._replace(id=f'{row.id}#{times}'))
  return out


def split(rows, held_out_fraction):
  """Documents of `rows`, held out by name where no split is given."""
  sizes = [len(text.encode()) for _, _, _, text in rows]
  free = {}
  for i, (domain, _, part, _) in enumerate(rows):
    if part is None:
      free.setdefault(domain, []).append(i)
  held = {i for i, row in enumerate(rows) if row[2] == 'held'}
  for members in free.values():
    wanted = held_out_fraction * sum(sizes[i] for i in members)
    digest = lambda i: hashlib.sha256(
      f'paraxis/{rows[i][0]}/{rows[i][1]}'.encode()
    ).digest()
    got = 0
    for i in sorted(members, key=digest)[:-1]:
      if got >= wanted:
        break
      held.add(i)
      got += sizes[i]
  return [
    Document(domain, id_, i in held, text, sizes[i])
    for i, (domain, id_, _, text) in enumerate(rows)
  ]
