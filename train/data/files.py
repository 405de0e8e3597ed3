"""Where shipped text lies; a file's sha256, and whether it changes.

Imports nothing heavy, so that `paraxis data list` answers at once.
"""

import hashlib
import pathlib

from paraxis.configs.base import errors
from paraxis.configs.base import plain_files

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'


def sha256(path) -> str:
  """Hexadecimal sha256 of a file."""
  with open(plain_files.open_descriptor(path), 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def states(paths):
  """{path: (its size, time of change, inode)}; OSError: it cannot be read."""
  return {path: _state(path) for path in paths}


def _state(path):
  about = path.stat()
  return about.st_size, about.st_mtime_ns, about.st_ino


def check_same(before):
  """UserError: a file has changed since `states` of it."""
  for path, state in before.items():
    try:
      now = _state(path)
    except OSError:
      now = (0, 0, 0)  # it is gone
    if now != state:
      raise errors.UserError(
        f'{path} changed while it was read ({state[0]:,} bytes before, '
        f'{now[0]:,} now): start again when nothing writes to it.'
      )
