"""Sources of text at or below a path, which others may write to meanwhile."""

import os
import pathlib
import re

from paraxis.configs.base import errors
from paraxis.train.data import readers
from paraxis.train.data import tables

# In a cache, or in the folder of its build, where data.cache_dir is below the
# text (train/data/token_cache.py names both).
_OF_CACHES = re.compile(
  r'-[0-9a-f]{8}-[0-9a-f]{16}(-\d+|-[0-9a-f]{16})?(/whole|/damaged)?'
  r'/(tokens|loss)\.bin$'
)


def sources(path) -> list[pathlib.Path]:
  """Files and datasets folders at or below a path, sorted.

  Linked folders are followed, and none is read twice. UserError: a folder that
  cannot be read, for its text would be missing without a word.
  """
  if not path.is_dir():
    return [path] if _is_text(path) else []
  if tables.is_dataset(path):
    return [path]
  return sorted(_below(path))


def _is_text(file):
  return bool(readers.kind(file)) and not _OF_CACHES.search(
    file.absolute().as_posix()
  )


def _below(root):
  """Every source below a folder.

  Linked folders come after all others, so that a link to one of these moves
  nothing. A folder that goes while we walk is passed over (a cache below the
  text, built by another process: Path.rglob would fail).
  """
  starts, seen = [root], set()
  while starts:
    links = []
    for folder, inner, names in _walked(starts):
      real = os.path.realpath(folder)
      if real in seen:
        inner.clear()
        continue
      seen.add(real)
      here = pathlib.Path(folder)
      data = {name for name in inner if tables.is_dataset(here / name)}
      inner[:] = [name for name in inner if name not in data]
      links += [here / name for name in inner if (here / name).is_symlink()]
      yield from (here / name for name in data)
      for file in (here / name for name in names):
        if _is_text(file) and file.exists():
          yield file
    starts = sorted(links)


def _walked(starts):
  """os.walk of one folder after the other."""

  def unread(error):
    if not isinstance(error, FileNotFoundError):
      raise errors.UserError(
        f'data.path: {error.filename} cannot be read: {error.strerror}; '
        'let this user read it, or name a folder without it.'
      ) from error

  for start in starts:
    yield from os.walk(start, onerror=unread)
