"""Where shipped text lies, and a file's sha256.

Imports nothing heavy, so that `paraxis data list` answers at once.
"""

import hashlib
import pathlib

from paraxis.configs.base import plain_files

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'


def sha256(path) -> str:
  """Hexadecimal sha256 of a file."""
  with open(plain_files.open_descriptor(path), 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
