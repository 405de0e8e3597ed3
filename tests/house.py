"""Figures of the house: rooms, arrows between them, floors, lines, copies.

    python tests/house.py [ROOT]

A room of a folder is one of its sub-folders, or one of its own files. An arrow
goes from a room to a room of the same folder that it imports; a floor is a
place on the longest chain of arrows. Imports in the bodies of a config's
claims() and knockouts() are left out: a config names its claims as functions,
late, so that reading it never starts jax. Read by ast; standard library only.
"""

import ast
import collections
import graphlib
import pathlib
import re
import sys
from typing import NamedTuple

FOLDERS = (
  'configs', 'pallas_kernels', 'sharding', 'models', 'decode', 'train',
)  # fmt: skip
BODIES = ('claims', 'knockouts')
PREFIX = 'paraxis.'


class Picture(NamedTuple):
  """The rooms of one folder.

  files: {room: number of files}. arrows: {(room, imported room)}. floors: rooms
  on the longest chain. circle: a circle of rooms, or ().
  """

  files: dict
  arrows: set
  floors: int
  circle: tuple


def sources(root, folders=FOLDERS):
  """{'train/data/corpus.py': text} of the Python files in some folders."""
  root = pathlib.Path(root)
  return {
    path.relative_to(root).as_posix(): path.read_text(encoding='utf-8')
    for folder in folders
    for path in sorted((root / folder).rglob('*.py'))
  }


def imports(tree, late=()):
  """Dotted names that a module imports, but for functions named in `late`."""
  queue = collections.deque([tree])
  while queue:
    node = queue.popleft()
    if isinstance(node, ast.FunctionDef) and node.name in late:
      continue
    if isinstance(node, ast.ImportFrom) and node.module:
      yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    queue.extend(ast.iter_child_nodes(node))


def graph(texts):
  """{file: files of ours that it imports}; __init__ files are left out."""
  known = {name[:-3].replace('/', '.'): name for name in texts}
  out = {}
  for name, text in texts.items():
    if name.endswith('__init__.py'):
      continue
    late = BODIES if name.startswith('configs/') else ()
    found = set()
    for dotted in imports(ast.parse(text), late):
      if dotted.startswith(PREFIX):
        module = dotted.removeprefix(PREFIX)
        while module and module not in known:  # a name in a module
          module = module.rpartition('.')[0]
        found.add(known.get(module))
    out[name] = found - {None, name}
  return out


def room(file, folder):
  """'train/data/corpus.py' in 'train' -> 'data/'; 'train/loop.py' -> 'loop'."""
  first, slash, _ = file.removeprefix(f'{folder}/').partition('/')
  return f'{first}/' if slash else first.removesuffix('.py')


def chain(nodes, arrows):
  """(length of the longest chain, a circle or ())."""
  below = {n: sorted(b for a, b in arrows if a == n) for n in nodes}
  depth = {}
  try:
    for node in graphlib.TopologicalSorter(below).static_order():
      depth[node] = 1 + max((depth[b] for b in below[node]), default=0)
  except graphlib.CycleError as e:
    return 0, tuple(e.args[1][1:])
  return max(depth.values(), default=0), ()


def picture(edges, folder):
  """`Picture` of a folder in a `graph`."""
  inside = [f for f in edges if f.startswith(f'{folder}/')]
  files = collections.Counter(room(f, folder) for f in inside)
  arrows = {
    (room(a, folder), room(b, folder))
    for a in inside
    for b in edges[a]
    if b.startswith(f'{folder}/') and not b.endswith('__init__.py')
  }
  arrows = {(a, b) for a, b in arrows if a != b}
  return Picture(dict(files), arrows, *chain(files, arrows))


def copies(texts, least=3):
  """(functions, lines) written again: equal code of `least` lines or more."""
  places = collections.defaultdict(list)
  for text in texts.values():
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.FunctionDef):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if not body or body[-1].end_lineno - body[0].lineno + 2 < least:
          continue
        key = ast.dump(node.args) + ''.join(map(ast.dump, body))
        places[key].append(body[-1].end_lineno - body[0].lineno + 2)
  again = [lines for found in places.values() for lines in found[1:]]
  return len(again), sum(again)


def classes(texts):
  """{name: count} of classes of the code that share their name."""
  found = collections.Counter(
    node.name
    for text in texts.values()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.ClassDef)
  )
  return {name: n for name, n in found.most_common() if n > 1}


def lines(texts, prefix=''):
  """Lines of the files whose name starts with `prefix`."""
  return sum(
    len(t.splitlines()) for n, t in texts.items() if n.startswith(prefix)
  )


def reading_path(root):
  """{file: lines} of the numbered reading in CONTRIBUTING.md, in order."""
  root = pathlib.Path(root)
  text = (root / 'CONTRIBUTING.md').read_text(encoding='utf-8')
  names = re.findall(r'^\d+\. `([\w/]+\.py)`:', text, re.M)
  return {
    name: len((root / name).read_text(encoding='utf-8').splitlines())
    for name in names
  }


def report(root):
  """All figures of the tree at `root` -> lines of text."""
  code, tests = sources(root), sources(root, ('tests',))
  edges = graph(code)
  yield f'{"folder":15} {"files":>5} {"lines":>7} rooms arrows floors'
  seen = {n.rpartition('/')[0] for n in edges}
  for folder in (*FOLDERS, *sorted(seen - set(FOLDERS))):
    drawn = picture(edges, folder)
    within = [n for n in edges if n.startswith(f'{folder}/')]
    row = f'{folder:22} {len(within):4} {lines(code, folder + "/"):7,}'
    row += f'{len(drawn.files):6}{len(drawn.arrows):7}{drawn.floors:7}'
    yield row + (
      f'  a circle: {" -> ".join(drawn.circle)}' if drawn.circle else ''
    )
  written = lines(code), lines(tests), len(tests)
  yield 'code {:,} lines, tests {:,} in {} files'.format(*written)
  again = *copies(code), *copies(code | tests)
  yield (
    'functions written again: {} of the code ({} lines), {} with the tests '
    '({} lines)'.format(*again)
  )
  yield 'classes that share a name: ' + (
    ', '.join(f'{n} {k}' for n, k in classes(code).items()) or 'none'
  )
  path = reading_path(root)
  yield f'reading path of CONTRIBUTING.md, {sum(path.values()):,} lines:'
  yield from (f'  {lines:4} {name}' for name, lines in path.items())


if __name__ == '__main__':
  default = pathlib.Path(__file__).resolve().parent.parent
  print('\n'.join(report(sys.argv[1] if sys.argv[1:] else default)))
