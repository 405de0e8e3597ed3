"""Where shipped text lies, what paraxis keeps between runs, a file's sha256.

Imports nothing heavy, so that `paraxis data list` answers at once.
"""

import hashlib
import os
import pathlib

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'


def cache_root() -> pathlib.Path:
  """Folder of everything paraxis keeps between runs (not created here)."""
  if os.environ.get('PARAXIS_CACHE'):
    return pathlib.Path(os.environ['PARAXIS_CACHE'])
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base, 'paraxis')


def sha256(path) -> str:
  """Hexadecimal sha256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
