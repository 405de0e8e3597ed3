"""The folder of what is kept between runs."""

import pathlib

import support

from paraxis.configs.base import cache


def test_cache_root(monkeypatch):
  monkeypatch.setenv('PARAXIS_CACHE', '/a')
  monkeypatch.setenv('XDG_CACHE_HOME', '/b')
  assert cache.root() == pathlib.Path('/a')
  monkeypatch.delenv('PARAXIS_CACHE')
  assert cache.root() == pathlib.Path('/b/paraxis')
  monkeypatch.delenv('XDG_CACHE_HOME')
  assert cache.root() == pathlib.Path.home() / '.cache' / 'paraxis'
  monkeypatch.setenv('HOME', '/')
  assert cache.root() == pathlib.Path('/.cache/paraxis')


def test_a_user_without_a_home(monkeypatch):
  """No HOME, and a number that the table of users does not have."""

  def missing(number):
    raise KeyError(number)

  for name in ('PARAXIS_CACHE', 'XDG_CACHE_HOME', 'HOME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr('pwd.getpwuid', missing)
  with support.refused('PARAXIS_CACHE=FOLDER', 'home'):
    cache.root()
