"""Size limits: what one reader holds in mind at once.

A file has at most 400 lines (kernels and tests 600), a function 60 without its
docstring (in the training loop 150), 8 arguments without self. A parameter that
the body unpacks, as in `a, b = given`, counts as its elements; of a kernel's
`*refs` Pallas fixes the number, so they count as one.
"""

import ast

import pytest

FILE_LINES = 400
FOLDER_LINES = {'pallas_kernels': 600, 'tests': 600}
FUNCTION_LINES = 60
LOOP_LINES = {'train/loop.py': 150}
ARGUMENTS = 8

# 'file' or 'file:function' -> why it may be larger. Keep it short: an entry
# that is no longer needed fails the test.
EXCEPTIONS = {}


def file_fault(name, text):
  """(key, message) when the file is too long, else None."""
  limit = FOLDER_LINES.get(name.split('/')[0], FILE_LINES)
  lines = len(text.splitlines())
  if lines > limit:
    return name, f'{name}: {lines} lines, the limit is {limit}'
  return None


def function_faults(name, module):
  """Yields (key, message) of every function that is too long or too wide."""
  limit = LOOP_LINES.get(name, FUNCTION_LINES)
  for node in ast.walk(module):
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      continue
    key = f'{name}:{node.name}'
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
      lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    if lines > limit:
      yield key, f'{key}: {lines} lines, the limit is {limit}'
    width = arguments(node)
    if width > ARGUMENTS:
      yield key, f'{key}: {width} arguments, the limit is {ARGUMENTS}'


def arguments(function):
  """How many a function takes, without self, those in a tuple one by one."""
  a = function.args
  each = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
  width = {x.arg: 1 for x in each if x and x.arg not in ('self', 'cls')}
  for node in ast.walk(function):
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)):
      continue
    for target in node.targets:
      name = node.value.id
      if isinstance(target, ast.Tuple) and name in width and name != 'refs':
        width[name] = sum(ast.unparse(e) != '_' for e in target.elts)
  return sum(width.values())


def faults(texts, exceptions):
  """Messages on {name: text} of Python files, exceptions applied both ways."""
  found = []
  for name, text in texts.items():
    fault = file_fault(name, text)
    found += [fault] if fault else []
    found += function_faults(name, ast.parse(text))
  keys = {key for key, _ in found}
  unused = [f'{key}: exception not needed' for key in exceptions.keys() - keys]
  return [text for key, text in found if key not in exceptions] + unused


def test_budgets(tree):
  texts = {
    name: (tree.root / name).read_text(encoding='utf-8')
    for name in tree.files
    if name.endswith('.py')
  }
  assert not faults(texts, EXCEPTIONS)


_LONG = 'def f():\n' + '  g()\n' * 70
_WIDE = 'def f(self, {}): pass'.format(', '.join(f'a{i}' for i in range(9)))
_PACKED = 'def f(a, b, given):\n  c, d, e, g, h, i, j = given\n'


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('models/a.py', 'x = 1\n' * 401, '401 lines, the limit is 400'),
    ('tests/a.py', 'x = 1\n' * 601, '601 lines, the limit is 600'),
    ('models/a.py', _LONG, 'a.py:f: 71 lines, the limit is 60'),
    ('models/a.py', _WIDE, '9 arguments, the limit is 8'),
    ('models/a.py', _PACKED, '9 arguments, the limit is 8'),
  ],
)
def test_too_much_is_found(name, text, message):
  found = faults({name: text}, {})
  assert len(found) == 1 and message in found[0]
  key = 'models/a.py:f' if ':f:' in found[0] else name
  assert not faults({name: text}, {key: 'a reason'})


@pytest.mark.parametrize(
  'name, text',
  [
    ('pallas_kernels/a.py', 'x = 1\n' * 600),
    ('train/loop.py', _LONG),
    ('models/a.py', 'def f():\n  """\n' + '\n' * 70 + '  """\n  g()\n'),
    ('models/a.py', _WIDE.replace(', a8', '')),
    ('models/a.py', _PACKED.replace(', j', '')),
  ],
)
def test_enough_passes(name, text):
  assert not faults({name: text}, {})


def test_a_needless_exception_is_found():
  assert faults({'models/a.py': ''}, {'models/a.py': 'was long once'})
