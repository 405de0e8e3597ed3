"""Shipped text, and hashes of files."""

import hashlib

from paraxis.train.data import files


def test_sha256(tmp_path):
  file = tmp_path / 'file'
  file.write_bytes(b'ab' * 2**18)
  assert files.sha256(file) == hashlib.sha256(b'ab' * 2**18).hexdigest()
  assert (files.FIXTURE / 'manifest.json').is_file()
