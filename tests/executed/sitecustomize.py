"""Which modules of paraxis run code: recorded in every process that has this
folder on PYTHONPATH, so in those that tests start, too.

Every function body of paraxis begins with a call that notes its module; that a
module is imported says nothing, for nearly all of them always are. Modules are
read from their source, past __pycache__, and no code of theirs is changed on
disk. What has run goes, line by line, to a file named by the process in the
folder $PARAXIS_EXECUTED; no such variable, nothing happens. `make test-all`
uses it (tests/sampling.py); standard library only, for it runs before anything
else.
"""

import ast
import builtins
import importlib.machinery
import os

VARIABLE = 'PARAXIS_EXECUTED'
seen = set()


def ran(module):
  """Notes that a function of `module` was called."""
  if module in seen:
    return
  seen.add(module)
  folder = os.environ.get(VARIABLE, '')
  if os.path.isdir(folder):  # `make test-all` begins with none
    with open(os.path.join(folder, str(os.getpid())), 'a') as file:
      file.write(module + '\n')


class _Noting(ast.NodeTransformer):
  """Begins every function body with `__paraxis_ran__(module)`."""

  def __init__(self, module):
    self.module = module

  def visit_FunctionDef(self, node):  # noqa: N802
    self.generic_visit(node)
    has_text = ast.get_docstring(node, clean=False) is not None
    name = ast.Name('__paraxis_ran__', ast.Load())
    call = ast.Expr(ast.Call(name, [ast.Constant(self.module)], []))
    place = node.body[-1] if has_text and len(node.body) == 1 else None
    place = place or node.body[int(has_text)]
    for part in ast.walk(call):
      ast.copy_location(part, place)
    node.body.insert(int(has_text), call)
    return node

  visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


def install():
  """From now on modules of paraxis note when they run."""
  loader = importlib.machinery.SourceFileLoader
  plain = loader.get_code

  def get_code(self, fullname):
    if not fullname.startswith('paraxis.'):
      return plain(self, fullname)
    path = self.get_filename(fullname)
    tree = ast.parse(self.get_data(path), path)
    return self.source_to_code(_Noting(fullname).visit(tree), path)

  builtins.__paraxis_ran__ = ran
  loader.get_code = get_code


if os.environ.get(VARIABLE):
  install()
