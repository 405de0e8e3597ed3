"""Where paraxis keeps what it reads again: texts, tokens, compiled programs.

Imports nothing heavy.
"""

import os
import pathlib

from paraxis.configs.base import errors


def root() -> pathlib.Path:
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
