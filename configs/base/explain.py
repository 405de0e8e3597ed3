"""Failures that no line of paraxis is to blame for, each in one line.

The user's own file, a full disk, a backend that cannot start. Whatever else is
raised is a crash of ours.
"""

import contextlib
import importlib.metadata
import io
import os
import re
import sys
import traceback

from paraxis.configs.base import errors
from paraxis.configs.base import field
from paraxis.configs.base import user_file

PLATFORMS = 'cpu', 'gpu', 'cuda', 'rocm', 'tpu'  # of jax's own
MOST_VIRTUAL = 4096  # devices of a CPU
_OF_THEM = 'cuda', 'rocm', 'libtpu'  # in the names of plugins for these


def line_by_line():
  """Every printed line appears at once, in a pipe or a log too.

  Results are UTF-8 in any locale, as what is read: an encoding that lacks a
  character would lose all of them. (stderr escapes it.)
  """
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(line_buffering=True)
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(encoding='utf-8', errors=sys.stdout.errors)


def tell(text):
  """A line on stderr; where nobody reads it the exit code still counts."""
  with contextlib.suppress(OSError):
    print(text, file=sys.stderr)


def check_platforms(text):
  """UserError unless JAX_PLATFORMS=text names platforms that jax may know.

  Another package's plugin may have brought any name: then jax is asked.
  """
  plugins = importlib.metadata.entry_points(group='jax_plugins')
  known = lambda plugin: any(name in plugin.value for name in _OF_THEM)
  if not text or not all(map(known, plugins)):
    return
  for name in text.split(','):
    if name not in PLATFORMS:
      raise errors.UserError(
        f'JAX_PLATFORMS={text}: {name!r} is no platform of jax '
        f'({", ".join(PLATFORMS)}).'
        + field.suggest(name, PLATFORMS)
        + ' Unset it for what this machine has.'
      )


def check_virtual(count, text):
  """UserError if JAX_PLATFORMS=text excludes the --devices=count asked for, or
  they are more than XLA starts: it would end the process."""
  if count > MOST_VIRTUAL:
    raise errors.UserError(
      f'--devices={count} asks for more than {MOST_VIRTUAL} virtual CPU '
      'devices: take fewer.'
    )
  if text and 'cpu' not in text.split(','):
    raise errors.UserError(
      f'--devices={count} asks for virtual CPU devices, JAX_PLATFORMS={text} '
      'for others: leave one of them out.'
    )


def outside(error):
  """What outside of paraxis made a command fail, in one line; '': nothing."""
  if place := user_file.place(error):
    return f'{place}: {user_file.one_line(error)}'
  if isinstance(error, OSError) and _is_full(sys.stdout):
    return f'stdout cannot be written: {error.strerror}.'
  asked = os.environ.get('JAX_PLATFORMS')
  frames = traceback.extract_tb(error.__traceback__)
  starting = any(f.name == 'backends' and 'jax' in f.filename for f in frames)
  if asked and starting:
    why = 'it is not installed, or no such device is here'
    if str(error):  # without jax's own advice, another than ours
      why = re.sub(r' \(set JAX_PLATFORMS=.*', '', user_file.one_line(error))
    return (
      f'JAX_PLATFORMS={asked}: jax cannot start it here ({why}). '
      'Unset it for what this machine has, or set it to cpu.'
    )
  return ''


def _is_full(stream):
  """Whether a stream refuses what is printed, as a full disk does."""
  try:
    stream.write('\n')
    stream.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True
  return False
