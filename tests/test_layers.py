"""One-way imports: between folders, and between the rooms of a folder.

pallas_kernels -> sharding -> models -> decode -> train. The schema and the
files in configs/base/ are leaves that everybody may import; the other configs
are loaded by name, so only train/cli.py, tests and notebooks name them, and
only the bodies of their claims() and knockouts() may import: the claims.

ROOMS orders the rooms (sub-packages) of a folder: a module imports from its own
entry of the table and from those to its left. An entry is a room, a file
('norm' is models/norm.py), or '' for all other files of the folder itself.
"""

import ast
import sys

import pytest

ROOMS = {
  'configs': ('base', 'schema', 'base/meant', 'base/command_line', ''),
  'pallas_kernels': (
    'registry', 'reference', '', 'attention', 'decode_attention', 'scans',
    'matmul',
  ),
  'sharding': (
    '', 'tensor', 'sequence', 'experts', 'meter', 'pipeline', 'checkpoint',
    'planner',
  ),
  'models': (
    'parameter', 'aux', 'batch', 'norm', 'depth', 'memory', 'ffn', 'mixers',
    'text', '', 'huggingface/families', 'huggingface',
  ),
  'decode': (
    'sampling', 'judges', 'trees', 'proposal', 'step', 'cache', 'trace',
    'drafts', 'unmask', '', 'certify', '__main__', 'evaluate',
  ),
  'train': (
    'data', 'run', 'launch', 'expert_counts', 'state', 'loss', 'updates',
    'steps', '',
    'plot', 'certify', 'bench', 'claims', 'cli', '__main__',
  ),
}  # fmt: skip
# The claims, by mechanism. They import what claims share, which is in the files
# of train/claims itself, and no claim imports a claim.
CLAIMS = 'train/claims/'
CLAIM_ROOMS = (
  'layouts', 'pipeline', 'experts', 'attention', 'scans', 'decode',
  'reliability', 'checkpoint', 'outer', 'updates',
)  # fmt: skip
BASE = ('schema', 'base')
PURE = {*sys.stdlib_module_names, 'absl', 'ml_collections'}
BODIES = ('claims', 'knockouts')  # of configs: what may import claims
NO_FILES = ('utils.py', 'common.py', 'helpers.py', 'misc.py')
ROOM_FILES = 24


def imports(module):
  """Yields (line, dotted name, function it stands in or '') of every import."""
  outer = {
    inside: node.name
    for node in module.body
    if isinstance(node, ast.FunctionDef)
    for inside in ast.walk(node)
  }
  for node in ast.walk(module):
    where = outer.get(node, '')
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name, where
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      for alias in node.names:
        yield node.lineno, f'{base}.{alias.name}', where


def rank(path, order):
  """Where 'room/file' or 'file' of a folder stands in its order of rooms."""
  for entry in (path, path.split('/')[0]):
    if entry in order:
      return order.index(entry)
  return order.index('') if '/' not in path and '' in order else None


def room_fault(importer, target):
  """importer: 'models/mixers/rope.py'; target: ['models', 'norm', ...]."""
  folder, _, file = importer.removesuffix('.py').partition('/')
  order = ROOMS[folder]
  here, there = rank(file, order), rank('/'.join(target[1:3]), order)
  if there is None:
    there = rank(target[1], order)  # a name in a file: models.norm.Norm
  if here is None or there is None:
    return f'{file} or {".".join(target[1:])}: no entry of ROOMS has it'
  if there > here:
    return f'{order[there] or folder} is above {order[here] or folder}'
  if importer.startswith(CLAIMS) and target[1] == 'claims':
    if target[2:] and target[2] in CLAIM_ROOMS:
      return 'a claim imports no claim; what they share is in train/claims/'
  return None


def config_fault(parts, where):
  """What a config may import; `where` is the function it does so in."""
  if parts[0] in PURE or parts[:2] == ['paraxis', 'configs']:
    return None
  if parts[:3] == ['paraxis', 'train', 'claims']:
    if where in BODIES:
      return None
    return f'claims are imported in the bodies of {" and ".join(BODIES)} only'
  return 'configs/ imports only the standard library, absl, ml_collections'


def fault(importer, name, where, folders):
  """What is wrong with file `importer` importing `name`; None: nothing."""
  parts = name.split('.')
  if not parts[0]:
    return 'relative import'
  if parts[-1] == '*':
    return 'star import'
  if parts[0] in (*folders, 'configs'):
    return f'unprefixed import; write paraxis.{name}'
  home = importer.split('/')[0]
  if home == 'configs' and (found := config_fault(parts, where)):
    return found
  if parts[0] != 'paraxis' or home not in (*folders, 'configs'):
    return None
  target = parts[1] if len(parts) > 1 else ''
  if target == home:
    return room_fault(importer, parts[1:])
  if home == 'configs':
    return None
  if target == 'configs':
    if parts[2:3] and parts[2] in BASE or importer == 'train/cli.py':
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
    for line, name, where in imports(module)
    if (message := fault(file, name, where, folders))
  ]


def test_imports_go_one_way(tree):
  assert any(file.startswith('sharding/') for file in tree.code)
  assert not faults(tree.code, tree.folders)


def room_faults(files, folders):
  """Messages on rooms with too many files, and on leaf names in `files`."""
  rooms = {}
  for name in files:
    room, _, file = name.rpartition('/')
    if name.endswith('.py') and room.split('/')[0] in (*folders, 'configs'):
      rooms.setdefault(room, []).append(file.removesuffix('.py'))
  for room, leaves in sorted(rooms.items()):
    if len(leaves) > ROOM_FILES and room != 'configs':
      yield f'{room}: {len(leaves)} files, the limit is {ROOM_FILES}'
    last = room.split('/')[-1]
    for leaf in leaves:
      if '/' in room and leaf.startswith(f'{last}_'):
        yield f'{room}/{leaf}.py repeats its folder'


def test_rooms_are_small_and_names_do_not_repeat(tree):
  assert not list(room_faults(tree.files, tree.folders))
  many = [f'train/data/f{i}.py' for i in range(25)]
  assert 'train/data: 25 files' in next(room_faults(many, tree.folders))
  again = ['train/bench/bench_decode.py']
  assert 'repeats' in next(room_faults(again, tree.folders))


def test_every_room_is_introduced(tree):
  """An __init__.py says what lives there and which file to read first."""
  for name, module in tree.code.items():
    if name.endswith('__init__.py') and name.count('/') > 1:
      text = ast.get_docstring(module) or ''
      assert len(text.splitlines()) >= 3 and 'Read first:' in text, name


def test_no_file_for_leftovers(tree):
  assert not [f for f in tree.files if f.split('/')[-1] in NO_FILES]


_LATE = 'def claims():\n  from paraxis.train.claims.pipeline import step'


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
    (
      'configs/mine.py',
      'from paraxis.train.claims.pipeline import step',
      'in the bodies of claims',
    ),
    (
      'configs/mine.py',
      _LATE.replace('claims():', 'get_config():'),
      'in the bodies of claims',
    ),
    (
      'configs/mine.py',
      'def claims():\n  from paraxis.train import loop',
      'only the standard library',
    ),
    ('configs/base/errors.py', 'from paraxis.configs import schema', 'above'),
    ('configs/schema.py', 'from paraxis.configs import quickstart', 'above'),
    ('train/loop.py', 'from paraxis.tests import conftest', 'no folder'),
    ('train/loop.py', 'from paraxis.train.claims import harness', 'above'),
    ('train/data/corpus.py', 'from paraxis.train import loop', 'above'),
    ('models/norm.py', 'from paraxis.models.mixers import rope', 'above'),
    ('models/mixers/rope.py', 'from paraxis.models import layer', 'above'),
    (
      'sharding/tensor/tape.py',
      'from paraxis.sharding.pipeline import ticks',
      'above',
    ),
    ('sharding/serve/a.py', 'from paraxis.sharding import mesh', 'no entry'),
    (
      'train/claims/scans/tcn.py',
      'from paraxis.train.claims.attention import latent',
      'no claim',
    ),
    (
      'train/claims/scans/tcn.py',
      'from paraxis.train.claims.scans import recall',
      'no claim',
    ),
    (
      'train/claims/harness.py',
      'from paraxis.train.claims.scans import recall',
      'no claim',
    ),
  ],
)
def test_a_wrong_import_is_found(tree, file, line, word):
  found = faults({file: ast.parse(line)}, tree.folders)
  assert len(found) == 1 and word in found[0], found


@pytest.mark.parametrize(
  'file, line',
  [
    ('train/loop.py', 'from paraxis.decode import sampling'),
    ('pallas_kernels/registry.py', 'from paraxis.configs.base import errors'),
    ('pallas_kernels/block.py', 'from paraxis.pallas_kernels import registry'),
    ('train/cli.py', 'from paraxis.configs import quickstart'),
    ('train/cli.py', 'from paraxis.train.claims import harness'),
    ('configs/mine.py', 'from paraxis.configs import quickstart'),
    ('configs/mine.py', _LATE),
    ('configs/base/command_line.py', 'from paraxis.configs import schema'),
    ('models/mixers/rope.py', 'from paraxis.models import norm'),
    ('models/layer.py', 'from paraxis.models.norm import Norm'),
    ('models/layer.py', 'from paraxis.models.mixers import rope'),
    (
      'train/claims/scans/tcn.py',
      'from paraxis.train.claims import experiment',
    ),
    (
      'train/claims/scans/tcn.py',
      'from paraxis.train.claims.harness import Outcome',
    ),
    ('tests/test_norm.py', 'from paraxis.configs import quickstart'),
  ],
)
def test_a_right_import_passes(tree, file, line):
  assert not faults({file: ast.parse(line)}, tree.folders)
