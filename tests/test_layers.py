"""One-way imports: a folder imports only what is to its left.

pallas_kernels -> sharding -> models -> decode -> train. The schema, errors.py
and command_line.py in configs/ are leaves that everybody may import; the other
configs are loaded by name, so only train/cli.py, tests and notebooks name them.
"""

import ast
import sys

import pytest

LEAVES = (
  'schema', 'model_schema', 'mixer_schema', 'declare', 'errors', 'command_line',
)  # fmt: skip
PURE = {*sys.stdlib_module_names, 'absl', 'ml_collections'}
NO_FILES = ('utils.py', 'common.py', 'helpers.py', 'misc.py')


def imports(module):
  """Yields (line, dotted name) of every import, wherever it stands."""
  for node in ast.walk(module):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      for alias in node.names:
        yield node.lineno, f'{base}.{alias.name}'


def fault(importer, name, folders):
  """What is wrong with file `importer` importing `name`; None: nothing."""
  parts = name.split('.')
  if not parts[0]:
    return 'relative import'
  if parts[-1] == '*':
    return 'star import'
  if parts[0] in (*folders, 'configs'):
    return f'unprefixed import; write paraxis.{name}'
  home = importer.split('/')[0]
  if home == 'configs':
    if parts[0] not in PURE and parts[:2] != ['paraxis', 'configs']:
      return 'configs/ imports only the standard library, absl, ml_collections'
  if parts[0] != 'paraxis' or home not in folders:
    return None
  target = parts[1] if len(parts) > 1 else ''
  if target == 'configs':
    if parts[2:3] and parts[2] in LEAVES or importer == 'train/cli.py':
      return None
    return 'configs are data, loaded by name'
  if target not in folders:
    return f'no folder {target!r}'
  if folders.index(target) > folders.index(home):
    return f'{home} must not import {target}'
  return None


def faults(code, folders):
  return [
    f'{file}:{line}: {name}: {message}'
    for file, module in code.items()
    for line, name in imports(module)
    if (message := fault(file, name, folders))
  ]


def test_imports_go_one_way(tree):
  assert any(file.startswith('sharding/') for file in tree.code)
  assert not faults(tree.code, tree.folders)


def test_no_file_for_leftovers(tree):
  assert not [f for f in tree.files if f.split('/')[-1] in NO_FILES]


@pytest.mark.parametrize(
  'file, line, word',
  [
    ('sharding/mesh.py', 'from paraxis.models import decoder', 'must not'),
    ('models/norm.py', 'import paraxis.train.loop', 'must not'),
    (
      'decode/step.py',
      'def f():\n  from paraxis.train import loop',
      'must not',
    ),
    ('models/norm.py', 'from paraxis.configs import quickstart', 'by name'),
    ('models/norm.py', 'from . import rope', 'relative'),
    ('models/norm.py', 'from paraxis.models.rope import *', 'star'),
    ('tests/test_norm.py', 'from models import norm', 'unprefixed'),
    ('notebooks/00.ipynb', 'import train', 'unprefixed'),
    ('configs/mine.py', 'import jax', 'only the standard library'),
    ('configs/mine.py', 'from paraxis.train import loop', 'only the standard'),
    ('train/loop.py', 'from paraxis.tests import conftest', 'no folder'),
  ],
)
def test_a_wrong_import_is_found(tree, file, line, word):
  found = faults({file: ast.parse(line)}, tree.folders)
  assert len(found) == 1 and word in found[0]


@pytest.mark.parametrize(
  'file, line',
  [
    ('train/loop.py', 'from paraxis.decode import sampling'),
    ('pallas_kernels/registry.py', 'from paraxis.configs import errors'),
    ('pallas_kernels/registry.py', 'from paraxis.pallas_kernels import api'),
    ('train/cli.py', 'from paraxis.configs import quickstart'),
    ('configs/mine.py', 'from paraxis.configs import quickstart'),
    ('tests/test_norm.py', 'from paraxis.configs import quickstart'),
  ],
)
def test_a_right_import_passes(tree, file, line):
  assert not faults({file: ast.parse(line)}, tree.folders)
