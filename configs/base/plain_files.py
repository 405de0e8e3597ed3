"""Files that are files: no named pipe, device or folder in place of one.

`open` on a named pipe waits for its other end, perhaps for ever. Here the file
is opened without waiting and looked at before a byte is read. Standard library
only: every folder may import this.
"""

import errno
import os
import stat

_NOW = getattr(os, 'O_NONBLOCK', 0)  # nothing to wait for where it is missing
_KINDS = (
  (stat.S_ISFIFO, 'a named pipe'),
  (stat.S_ISDIR, 'a folder'),
  (stat.S_ISLNK, 'a symbolic link'),
  (stat.S_ISSOCK, 'a socket'),
)


def _check(path, mode):
  """OSError, whose strerror says what it is, unless it is a regular file."""
  if not stat.S_ISREG(mode):
    kind = next((name for is_, name in _KINDS if is_(mode)), 'a device')
    raise OSError(errno.EINVAL, f'it is {kind}, not a file', str(path))


def check(path, follow=True):
  """OSError if something that is no regular file has this name.

  follow: a link stands for what it names; one that names nothing is missing.
  """
  try:
    _check(path, os.stat(path, follow_symlinks=follow).st_mode)
  except FileNotFoundError:
    pass


def stamp(path) -> tuple[int, ...]:
  """Changes when a file does, for keys of caches; (): there is none."""
  try:
    found = os.stat(path)
  except OSError:
    return ()
  return found.st_mtime_ns, found.st_size, found.st_ino


def open_descriptor(path, flags=os.O_RDONLY, follow=True) -> int:
  """os.open of a regular file, which never waits; OSError: it is none.

  follow: whether the file may be a symbolic link to one.
  """
  flags |= _NOW | (0 if follow else getattr(os, 'O_NOFOLLOW', 0))
  try:
    descriptor = os.open(path, flags, 0o666)
  except OSError as e:
    if e.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
      check(path, follow)  # a better word for it
    raise
  try:
    _check(path, os.fstat(descriptor).st_mode)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


def read_bytes(path) -> bytes:
  """Content of a regular file; OSError: it is none, or does not read."""
  with open(open_descriptor(path), 'rb') as file:
    return file.read()


def read_text(path) -> str:
  """`read_bytes` as UTF-8; ValueError: it is not."""
  return read_bytes(path).decode('utf-8')
