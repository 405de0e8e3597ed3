"""Where shipped text lies, and a file's sha256.

Imports nothing heavy, so that `paraxis data list` answers at once.
"""

import hashlib
import pathlib

FIXTURE = pathlib.Path(__file__).resolve().parent / 'fixture' / 'data'


def sha256(path) -> str:
  """Hexadecimal sha256 of a file."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
