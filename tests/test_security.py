"""Data never runs code, and the repository names no package registry.

A scan of every Python file and notebook for what turns data into code: pickle
and its relatives, eval, exec, compile, np.load(allow_pickle=True), yaml.load,
torch.load, trust_remote_code, shells, archives extracted without a look at
their names. And a scan of all text for addresses of package registries and for
paths of one machine.
"""

import ast
import json
import re

import pytest

MODULES = {'pickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib'}
BUILTINS = {'eval', 'exec', 'compile', '__import__'}
CALLS = {
  ('os', 'system'),
  ('os', 'popen'),
  ('subprocess', 'getoutput'),
  ('subprocess', 'getstatusoutput'),
  ('torch', 'load'),
  ('yaml', 'load'),
  ('yaml', 'load_all'),
  ('yaml', 'full_load'),
  ('yaml', 'unsafe_load'),
}
KEYWORDS = {'allow_pickle', 'trust_remote_code', 'shell'}

# 'file: what' -> why it is safe there.
EXCEPTIONS = {}

# The words are split so that this file does not find itself.
REGISTRY = re.compile(
  r'//[\w.@:-]*(py' + r'pi|python' + r'hosted|conda|jfrog|nexus|artifactory)'
  r'|//(?![^/\s]*(?:127\.0\.0\.1|localhost))[^\s"\']*/simple\b'
  r'|(?<!no-emit-)(index-url|find-links|trusted-host)[= ]+["\']?(/|\w+[:.])'
  r'|\b(PIP|UV)_[A-Z_]*(URL|LINKS|INDEX)=',
  re.IGNORECASE,
)
MACHINE = re.compile(r'(?<![\w.)}~/-])/(?:root|home|work|Users)/\w')
PIPE = re.compile(r'(curl|wget)[^\n|]*\|\s*(sudo\s+)?(ba|z)?sh\b')


def dotted(node):
  """'a.b.c' of a name or an attribute, '' of anything else."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute) and dotted(node.value):
    return f'{dotted(node.value)}.{node.attr}'
  return ''


def call_faults(node):
  """Yields what is unsafe in one call."""
  name = dotted(node.func)
  last = tuple(name.split('.')[-2:])
  if name in BUILTINS or (last[0] == 'builtins' and last[-1] in BUILTINS):
    yield f'{last[-1]}()'
  if last in CALLS:
    yield name
  if isinstance(node.func, ast.Attribute) and node.func.attr == 'extractall':
    yield 'extractall'
  for k in node.keywords:
    off = isinstance(k.value, ast.Constant) and k.value.value in (False, None)
    if k.arg in KEYWORDS and not off:
      yield k.arg


def code_faults(module):
  """Yields (line, what) of everything unsafe in a module."""
  for node in ast.walk(module):
    found = ()
    if isinstance(node, ast.Import):
      found = {a.name.split('.')[0] for a in node.names} & MODULES
    elif isinstance(node, ast.ImportFrom):
      base = (node.module or '').split('.')[0]
      pairs = {(base, a.name) for a in node.names}
      found = [b for b in {base} & MODULES]
      found += ['.'.join(p) for p in pairs & CALLS]
      found += ['.'.join(p) for p in pairs if p[0] == 'builtins']
    elif isinstance(node, ast.Call):
      found = call_faults(node)
    for what in found:
      yield node.lineno, what


def text_faults(text):
  """Yields (line, what) of every address that must not be in a file."""
  for number, line in enumerate(text.splitlines(), 1):
    for pattern in (REGISTRY, MACHINE, PIPE):
      if match := pattern.search(line):
        yield number, match.group()


def test_no_code_out_of_data(tree):
  assert not [
    f'{file}:{line}: {what}'
    for file, module in tree.code.items()
    for line, what in code_faults(module)
    if f'{file}: {what}' not in EXCEPTIONS
  ]


def test_no_registry_and_no_machine_path(tree):
  found = []
  for file in tree.files:
    # The fixture's documents are other people's prose; its hashes are tested.
    if file.startswith('train/data/fixture/'):
      continue
    try:
      text = (tree.root / file).read_text(encoding='utf-8')
    except UnicodeDecodeError:
      continue
    found += [f'{file}:{line}: {what}' for line, what in text_faults(text)]
  assert not found


def test_notebooks_carry_no_outputs(tree):
  """Outputs are data that a viewer renders, and they make diffs unreadable."""
  found = []
  for file in tree.files:
    if file.endswith('.ipynb'):
      cells = json.loads((tree.root / file).read_text())['cells']
      found += [file for c in cells if c.get('outputs')]
  assert not found


@pytest.mark.parametrize(
  'text',
  [
    'import pickle',
    'import dill as d',
    'from cloudpickle import dumps',
    'def f():\n  import marshal',
    'eval("1")',
    'exec(text)',
    'compile(text, "f", "exec")',
    'import builtins\nbuiltins.eval(text)',
    '__import__(name)',
    'np.load(path, allow_pickle=True)',
    'numpy.load(path, allow_pickle=flag)',
    'yaml.load(text)',
    'torch.load(path)',
    'from os import system',
    'Auto.from_pretrained(name, trust_remote_code=True)',
    'import os\nos.system("ls")',
    'subprocess.run(command, shell=True)',
    'tarfile.open(path).extractall(folder)',
  ],
)
def test_unsafe_code_is_found(text):
  assert len(list(code_faults(ast.parse(text)))) == 1


@pytest.mark.parametrize(
  'text',
  [
    'jax.jit(f).lower(x).compile()',
    're.compile("a")',
    'model.eval()',
    'np.load(path)',
    'np.load(path, allow_pickle=False)',
    'json.load(file)',
    'yaml.safe_load(text)',
    'subprocess.run(["git", "status"], check=True)',
  ],
)
def test_safe_code_passes(text):
  assert not list(code_faults(ast.parse(text)))


@pytest.mark.parametrize(
  'text',
  [
    'see https' + '://py' + 'pi.org/project/jax',
    'https' + '://files.python' + 'hosted.org/a.whl',
    'http' + '://mirror.example/sim' + 'ple/',
    'pip install --index' + '-url https://mirror.example jax',
    'pip install --find' + '-links /opt/wheels',
    'PIP_INDEX' + '_URL=a make test',
    'cd ' + '/ho' + 'me/me/paraxis',
    'curl a.example/install | ' + 'sh',
  ],
)
def test_an_address_is_found(text):
  assert list(text_faults(text))


@pytest.mark.parametrize(
  'text',
  [
    'uv pip compile --no-emit-index-url',
    'https://arxiv.org/abs/2105.13120',
    'gs://bucket/home/run1',
    'pip asks the index it is configured with',
    'runs/wo' + 'rk/a',
    'http' + '://me:secret@127.0.0.1:80/simple',
  ],
)
def test_harmless_text_passes(text):
  assert not list(text_faults(text))
