"""Which files a training runs: those that its loop imports, all the way down.

    executed    repository paths, in order
    of_claims   those of a claim's own training
    hashes      {path: sha256}

Imports are read as text, those in the bodies of functions too, so that what a
run imports late is there. What no number depends on is left out (`LEFT_OUT`),
and what is imported from there alone. Cost: about 120 files are parsed once.
"""

import ast
from collections.abc import Iterable, Iterator
import functools
import inspect
import pathlib

from paraxis.configs.base import command_line
from paraxis.train.data import files

ROOT = command_line.FOLDER.parent
START = 'train/loop.py'
# Values of a config are no files; others read and write checkpoints of other
# programs, count, draw, print, measure, verify or judge.
LEFT_OUT = (
  'configs', 'models/huggingface', 'sharding/meter', 'train/bench',
  'train/certify', 'train/claims', 'train/plot', 'train/run/header.py',
  'train/run/profile.py', 'train/run/rates.py',
)  # fmt: skip


CLAIMS = 'train/claims/'
# Of claims, these judge, and train nothing.
_JUDGES = {
  f'{CLAIMS}{n}.py' for n in 'ablation harness knockouts sources'.split()
}


def _imported(path: pathlib.Path) -> Iterator[str]:
  """Dotted names that a file imports, wherever in it."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.ImportFrom) and node.module:
      yield node.module
      yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)


def _left_out(name: str) -> bool:
  return any(name == out or name.startswith(f'{out}/') for out in LEFT_OUT)


@functools.lru_cache(maxsize=8)
def executed(start: str = START, root: pathlib.Path = ROOT) -> tuple[str, ...]:
  """Paths of the files that a file below the root runs, itself included."""
  found, waiting = set(), [start]
  while waiting:
    path = waiting.pop()
    if path in found:
      continue
    found.add(path)
    for name in _imported(root / path):
      package, _, rest = name.partition('.')
      file = f'{rest.replace(".", "/")}.py'
      if package == 'paraxis' and (root / file).is_file():
        waiting += [] if _left_out(file) else [file]
  return tuple(sorted(found))


def of_claims(*objects) -> tuple[str, ...]:
  """Paths of the files of claims that define functions or classes, and of those
  that these import; of the objects of other files nothing."""
  found, waiting = set(), []
  for x in objects:
    while isinstance(x, functools.partial):
      x = x.func
    x = x if inspect.isroutine(x) or isinstance(x, type) else type(x)
    # As ROOT is; the package may be reached by a link.
    file = pathlib.Path(inspect.getsourcefile(x) or '/').resolve()
    if file.is_relative_to(ROOT):
      waiting.append(file.relative_to(ROOT).as_posix())
  while waiting:
    path = waiting.pop()
    if path in found or path in _JUDGES or not path.startswith(CLAIMS):
      continue
    found.add(path)
    for name in _imported(ROOT / path):
      file = f'{name.partition(".")[2].replace(".", "/")}.py'
      waiting += [file] if (ROOT / file).is_file() else []
  return tuple(sorted(found))


def hashes(names: Iterable[str]) -> dict[str, str]:
  """{file: sha256} of Python files, and of all in folders, below `ROOT`."""
  found = {}
  for name in names:
    path = ROOT / name
    for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
      if file.is_file():
        found[file.relative_to(ROOT).as_posix()] = files.sha256(file)
  return found
