"""Where shipped text lies, what paraxis keeps between runs, a file's sha256.

Imports nothing heavy, so that `paraxis data list` answers at once.
"""

import hashlib
import os
import pathlib

from paraxis.configs.base import errors

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'


def cache_root() -> pathlib.Path:
  """Folder of everything paraxis keeps between runs (not created here).

  UserError: no environment variable says where, and the user has no home.
  """
  if os.environ.get('PARAXIS_CACHE'):
    return pathlib.Path(os.environ['PARAXIS_CACHE'])
  base = os.environ.get('XDG_CACHE_HOME')
  try:
    base = base or pathlib.Path.home() / '.cache'
  except RuntimeError as error:  # no HOME, and a user that no table names
    raise errors.UserError(
      f'PARAXIS_CACHE=FOLDER is needed, for caches: {error}'
    ) from error
  return pathlib.Path(base, 'paraxis')


def sha256(path) -> str:
  """Hexadecimal sha256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
