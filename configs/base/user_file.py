"""A user's own files: their names, and of config files what is in them.

A config file is executed, hashed, and named when it is wrong.

An error names the line of the file that it comes from, also deep within jax, as
when `paraxis verify` traces a mixer that the file defines. Only a file that the
user names with --config= is ever executed; no checkpoint names one.
"""

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from typing import Any

from absl import flags

from paraxis.configs.base import errors

SHIPPED = pathlib.Path(__file__).resolve().parents[1]
_PREFIX = 'paraxis_config_'
_NAMES: dict[str, str] = {}  # absolute path -> as the user wrote it
_executing: list[str] = []


class Path(flags.ArgumentParser):
  """The value of a flag that names a file: ~, which bash leaves in --flag=~/x,
  is home."""

  def parse(self, argument):
    found = os.path.expanduser(argument)
    if found.startswith('~'):
      user = found.partition('/')[0]
      raise ValueError(f'{user} is no home; a name that begins so is ./{user}.')
    return found


class _Fresh(importlib.machinery.SourceFileLoader):
  """Compiles the text as it is: a .pyc counts as its own by size and second."""

  def get_code(self, fullname):
    return self.source_to_code(self.get_data(self.path), self.path)


def execute(path) -> Any:
  """The module of a Python file; whatever it raises is raised."""
  name, whole = f'{_PREFIX}{path.stem}', path.resolve()
  if whole.suffix != '.py':
    raise errors.UserError(f'{path} is not a Python file.')
  spec: Any = importlib.util.spec_from_file_location(
    name, whole, loader=_Fresh(name, str(whole))
  )
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look their annotations up
  watch(path)
  _executing.append(str(path.resolve()))
  try:
    spec.loader.exec_module(module)
  finally:
    _executing.pop()
  return module


def watch(path):
  """Errors from a file name its lines from now on; not one of ours."""
  whole = pathlib.Path(path).resolve()
  if whole.suffix == '.py' and whole.parent != SHIPPED:
    _NAMES.setdefault(str(whole), str(path))


def executing():
  """Absolute path of the file that is being executed; '': none."""
  return _executing[-1] if _executing else ''


def sha256(*paths):
  """Of the bytes of files, one after the other, each file once."""
  whole = hashlib.sha256()
  for path in dict.fromkeys(map(str, paths)):
    whole.update(pathlib.Path(path).read_bytes())
  return whole.hexdigest()


def one_line(error):
  """'TypeError: what', the first paragraph of the message."""
  if isinstance(error, SyntaxError):
    return f'{type(error).__name__}: {error.msg}'
  text = str(error)
  if isinstance(error, KeyError) and error.args:
    text = str(error.args[0])
  with contextlib.suppress(SyntaxError, ValueError):
    text = str(ast.literal_eval(text))  # ml_collections gives the repr of one
  # ml_collections lists every field that there is, then suggests one.
  text = re.sub(r'(?s)Other fields present:.*?(?=Did you mean|$)', '', text)
  text = re.sub(r' and cannot be added since the config is locked', '', text)
  text = re.sub(r' instead of "\w+"\?', '?', text)
  text = ' '.join(text.split('\n\n')[0].split())
  return f'{type(error).__name__}: {text}'.removesuffix(': ')


def place(error):
  """'mine.py:12', the innermost line of a user's file; '': there is none."""
  if isinstance(error, SyntaxError) and error.filename in _NAMES:
    return f'{_NAMES[error.filename]}:{error.lineno}'
  for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
    if name := _NAMES.get(frame.f_code.co_filename):
      return f'{name}:{line}'
  return ''


def refusal(name, place, text):
  """The UserError of a config at a place, which may begin with its name."""
  if str(place).startswith(name):
    return errors.UserError(f'--config={place}: {text}')
  return errors.UserError(f'--config={name}: {place}: {text}')


def assigned(path, name):
  """'mine.py:12', the only line that sets a dotted field; else 'mine.py'."""
  last = re.escape(name.split('.')[-1])
  rule = re.compile(rf'\b{last}\b[\'"]?\]?\s*[=:](?!=)')
  try:
    lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError):
    return str(path)
  found = [i for i, line in enumerate(lines, 1) if rule.search(line)]
  return f'{path}:{found[0]}' if len(found) == 1 else str(path)


def caller():
  """Absolute path of the file whose line called paraxis; '': an interpreter."""
  frame: Any = sys._getframe(1)
  while frame and frame.f_globals.get('__name__', '').startswith('paraxis.'):
    frame = frame.f_back
  path = pathlib.Path(frame.f_code.co_filename if frame else '')
  return str(path.resolve()) if path.is_file() else ''
