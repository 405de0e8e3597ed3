"""Text -> documents with a fixed held-out split; the user's cache folder.

Where text comes from: 'fixture' (shipped), 'corpus' (what `paraxis data fetch`
brought), a .jsonl or .txt file, or a folder of them. A line of .jsonl is
{"text": ..., "id": ..., "split": "train" | "held", "domain": ...}, all but
"text" optional; the domain of a line without one is the file's stem. A .txt
file is cut at blank lines into documents of about 8 kB; its domain is its
folder below the given path, else its stem.

Held out, where the data names no split: within each domain the documents with
the lowest sha256 of "domain/id", until they hold `held_out_fraction` of the
domain's bytes, never the domain's last document. The same documents on every
machine; adding a document moves few others.

Cost: the text is read into memory whole.
"""

import hashlib
import json
import os
import pathlib
from typing import NamedTuple

from paraxis.configs.base import errors

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'
_TEXT_DOCUMENT = 8192  # characters; a .txt file is cut at the next blank line


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


def source_folder(path):
  """The file or folder that config.data.path means. UserError if missing."""
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
  if not found.exists():
    raise errors.UserError(
      f'data.path={path!r}: no such file or folder ({found.absolute()}); '
      "use 'fixture', 'corpus', a .jsonl or .txt file or a folder of them."
    )
  return found


def source_files(path):
  """[(file, domain)], sorted by path below the source. UserError if none."""
  root = source_folder(path)
  if root.is_file():
    if root.suffix not in ('.jsonl', '.txt'):
      raise errors.UserError(
        f'data.path={str(path)!r} ends in {root.suffix!r}; '
        'text is read from .jsonl and .txt files.'
      )
    return [(root, root.stem)]
  files = []
  for file in sorted(_below(root)):
    if file.suffix in ('.jsonl', '.txt') and file.is_file():
      inside = file.parent != root and file.suffix == '.txt'
      top = file.relative_to(root).parts[0]
      files.append((file, top if inside else file.stem))
  if not files:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 .jsonl and .txt files in {root}.'
    )
  return files


def _below(root):
  """Every file below a folder, which others may write to meanwhile.

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

  for folder, _, names in os.walk(root, onerror=unread):
    yield from (pathlib.Path(folder, name) for name in names)


def documents(path, held_out_fraction=0.1):
  """All documents of a source, in file order, each with its split.

  Args:
    path: as config.data.path.
    held_out_fraction: share of a domain's bytes to hold out, where its
      documents name no split themselves.

  Returns:
    Non-empty list of Document.

  Raises:
    UserError: missing path, no document with text, or a bad line.
  """
  return split(read(source_files(path), path), held_out_fraction)


def read(files, path):
  """[(domain, id, split or None, text)] of `source_files(path)`."""
  rows = []
  for file, domain in files:
    reader = _read_jsonl if file.suffix == '.jsonl' else _read_txt
    rows.extend(reader(file, domain))
  if not rows:
    raise errors.UserError(
      f'data.path={str(path)!r}: 0 documents in {len(files)} files.'
    )
  # A repeated name gets a number: names decide which documents are held out.
  seen, out = {}, []
  for domain, id_, part, text in rows:
    times = seen[domain, id_] = seen.get((domain, id_), 0) + 1
    name = id_ if times == 1 else f'{id_}#{times}'
    out.append((domain, name, part, text))
  return out


def _read_jsonl(file, domain):
  rows = []
  with open(file, 'rb') as f:
    for number, line in enumerate(f, 1):
      if line.strip():
        rows.append(_parse(line, f'{file}:{number}', domain, number))
  return rows


def _parse(line, where, domain, number):
  try:
    row = json.loads(line)
  except ValueError as error:
    raise errors.UserError(f'{where}: not JSON: {error}.') from error
  if not isinstance(row, dict) or not isinstance(row.get('text'), str):
    raise errors.UserError(f'{where}: needs an object with a string "text".')
  part = row.get('split')
  if part not in (None, 'train', 'held'):
    raise errors.UserError(
      f'{where}: "split" is {part!r}, must be "train" or "held".'
    )
  text = row['text']
  if not text:
    raise errors.UserError(f'{where}: "text" is empty (0 characters).')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise errors.UserError(f'{where}: "text" is not Unicode: {error}.') from (
      error
    )
  return str(row.get('domain', domain)), str(row.get('id', number)), part, text


def _read_txt(file, domain):
  try:
    text = file.read_bytes().decode()
  except UnicodeDecodeError as error:
    raise errors.UserError(f'{file}: not UTF-8: {error}.') from error
  texts, lines, size = [], [], 0
  for line in text.splitlines(keepends=True):
    lines.append(line)
    size += len(line)
    blank = not line.strip()
    if size >= _TEXT_DOCUMENT and (blank or size >= 2 * _TEXT_DOCUMENT):
      texts.append(''.join(lines))
      lines, size = [], 0
  if lines:
    texts.append(''.join(lines))
  return [
    (domain, f'{file.stem}/{n:05d}', None, text) for n, text in enumerate(texts)
  ]


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
