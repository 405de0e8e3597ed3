"""Only files are read, nothing is waited for, links are followed if asked."""

import os
import socket

import pytest
import support

from paraxis.configs.base import plain_files


@pytest.fixture
def odd(tmp_path, monkeypatch):
  """{kind: path} of what is no file."""
  monkeypatch.chdir(tmp_path)  # names of sockets are short
  paths = dict(pipe='pipe', folder='folder', socket='socket', link='dangling')
  os.mkfifo('pipe')
  os.mkdir('folder')
  os.symlink('nowhere', 'dangling')
  with socket.socket(socket.AF_UNIX) as listening:
    listening.bind('socket')
    yield paths


@pytest.mark.parametrize('kind', ['pipe', 'folder', 'socket'])
def test_what_is_no_file(odd, kind):
  words = f'it is a.* {kind}, not a file|it is a {kind}, not a file'
  for act in (plain_files.read_bytes, plain_files.check):
    with support.within(20), pytest.raises(OSError, match=words):
      act(odd[kind])
  for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_CREAT):
    with support.within(20), pytest.raises(OSError, match=words):
      plain_files.open_descriptor(odd[kind], flags)


def test_files_and_links(tmp_path):
  file, link = tmp_path / 'file', tmp_path / 'link'
  file.write_text('é')
  link.symlink_to(file)
  assert plain_files.read_text(link) == 'é'
  plain_files.check(link)
  plain_files.check(tmp_path / 'missing')
  with pytest.raises(FileNotFoundError):
    plain_files.read_bytes(tmp_path / 'missing')
  with pytest.raises(OSError, match='it is a symbolic link'):
    plain_files.check(link, follow=False)
  with pytest.raises(OSError, match='it is a symbolic link'):
    plain_files.open_descriptor(link, os.O_RDWR | os.O_CREAT, follow=False)


def test_a_link_to_nothing_makes_no_file_elsewhere(odd, tmp_path):
  flags = os.O_RDWR | os.O_CREAT
  with pytest.raises(OSError, match='it is a symbolic link'):
    plain_files.open_descriptor(odd['link'], flags, follow=False)
  assert not (tmp_path / 'nowhere').exists()
  os.close(plain_files.open_descriptor(odd['link'], flags))
  assert (tmp_path / 'nowhere').exists()  # where it is followed
