"""Data never runs code, and the repository names no package registry.

The linter refuses what turns data into code: pickle and its relatives, eval,
exec, yaml.load, torch.load, shells, archives extracted without a look at their
names (pyproject.toml). Here are the calls that it does not know: compile,
__import__, np.load(allow_pickle=True), trust_remote_code. And a scan of all
text for addresses of package registries and for paths of one machine.
"""

import ast
import json
import re
import subprocess
import sys

import pytest

BUILTINS = {'compile', '__import__'}
KEYWORDS = {'allow_pickle', 'trust_remote_code'}

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


def code_faults(module):
  """Yields (line, what) of every call that turns data into code."""
  for node in ast.walk(module):
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func).removeprefix('builtins.')
      if name in BUILTINS:
        yield node.lineno, name
      for k in node.keywords:
        off = isinstance(k.value, ast.Constant) and not k.value.value
        if k.arg in KEYWORDS and not off:
          yield node.lineno, k.arg


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


def test_outputs_of_notebooks_are_text_and_pictures(tree):
  """What a viewer renders is data: no HTML, no script, no widget."""
  kinds = set()
  for file in tree.files:
    if file.endswith('.ipynb'):
      cells = json.loads((tree.root / file).read_text())['cells']
      for output in (o for c in cells for o in c.get('outputs', ())):
        kinds |= set(output.get('data', ()))
  assert kinds <= {'text/plain', 'image/png'}


UNSAFE = """\
import pickle
import dill as d
from cloudpickle import dumps
import marshal
import shelve
import joblib
from os import system
from builtins import eval
eval("1")
exec(text)
os.system("ls")
os.popen("ls")
subprocess.getoutput("ls")
subprocess.run(command, shell=True)
tarfile.open(path).extractall(folder)
torch.load(path)
yaml.load(text)
yaml.full_load(text)
"""


def test_the_linter_finds_unsafe_code(tree, tmp_path):
  code = tmp_path / 'unsafe.py'
  imports = 'import os, subprocess, tarfile, torch, yaml\n'
  code.write_text(imports + UNSAFE)
  rules = ['--select=TID251,S', '--output-format=json', '--no-cache']
  config = f'--config={tree.root / "pyproject.toml"}'
  done = subprocess.run(
    [sys.executable, '-m', 'ruff', 'check', config, *rules, str(code)],
    capture_output=True, text=True,
  )  # fmt: skip
  found = {fault['location']['row'] for fault in json.loads(done.stdout)}
  assert found == set(range(2, 2 + len(UNSAFE.splitlines())))


def unsafe(text):
  return list(code_faults(ast.parse(text)))


def test_unsafe_calls_are_found():
  for text in (
    'compile(text, "f", "exec")',
    '__import__(name)',
    'builtins.compile(text, "f", "exec")',
    'np.load(path, allow_pickle=True)',
    'numpy.load(path, allow_pickle=flag)',
    'Auto.from_pretrained(name, trust_remote_code=True)',
  ):
    assert len(unsafe(text)) == 1, text
  for text in (
    'jax.jit(f).lower(x).compile()',
    're.compile("a")',
    'np.load(path)',
    'np.load(path, allow_pickle=False)',
  ):
    assert not unsafe(text), text


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
