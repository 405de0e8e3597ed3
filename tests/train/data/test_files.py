"""Where files are kept, and their hashes."""

import hashlib
import pathlib

import support

from paraxis.train.data import files


def test_cache_root(monkeypatch):
  monkeypatch.setenv('PARAXIS_CACHE', '/a')
  monkeypatch.setenv('XDG_CACHE_HOME', '/b')
  assert files.cache_root() == pathlib.Path('/a')
  monkeypatch.delenv('PARAXIS_CACHE')
  assert files.cache_root() == pathlib.Path('/b/paraxis')
  monkeypatch.delenv('XDG_CACHE_HOME')
  assert files.cache_root() == pathlib.Path.home() / '.cache' / 'paraxis'
  monkeypatch.setenv('HOME', '/')
  assert files.cache_root() == pathlib.Path('/.cache/paraxis')


def test_a_user_without_a_home(monkeypatch):
  """No HOME, and a number that the table of users does not have."""

  def missing(number):
    raise KeyError(number)

  for name in ('PARAXIS_CACHE', 'XDG_CACHE_HOME', 'HOME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr('pwd.getpwuid', missing)
  with support.refused('PARAXIS_CACHE=FOLDER', 'home'):
    files.cache_root()


def test_sha256(tmp_path):
  file = tmp_path / 'file'
  file.write_bytes(b'ab' * 2**18)
  assert files.sha256(file) == hashlib.sha256(b'ab' * 2**18).hexdigest()
  assert (files.FIXTURE / 'manifest.json').is_file()
