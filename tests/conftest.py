"""What every test runs under, and the tree that the guard tests read.

Eight virtual devices, set before jax starts; no network; no display. Tests
marked as in `NEEDED` skip where packages are missing. sampling.py says which
tests a session runs; what XLA compiled is kept between sessions.
"""

import ast
import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import types

import pytest
import sampling

os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # before it is loaded

from paraxis.sharding.meter import compile_store

os.environ['JAX_PLATFORMS'] = 'cpu'
_FLAGS = [
  '--xla_force_host_platform_device_count=8',
  # Every program runs once or twice: less work on its code takes a third of the
  # time to compile. Training keeps a level that is named here (compiling.py).
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_parallel_codegen_split_count=1',
]
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  # Newer ones do not know it, and stop at a flag that they do not know.
  _FLAGS.append('--xla_cpu_use_fusion_emitters=false')
for _flag in _FLAGS:
  if _flag.partition('=')[0] not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_flag}'
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ['HF_HUB_OFFLINE'] = '1'
# Tracing makes many objects and few cycles: looking for them took a fifth.
gc.set_threshold(100_000, 50, 50)

ROOT = pathlib.Path(__file__).resolve().parent.parent
# In import order: a folder may import those to its left.
FOLDERS = ('pallas_kernels', 'sharding', 'models', 'decode', 'train')


_OVERLAY = pytest.StashKey()


@pytest.fixture(autouse=True)
def environment():
  """Commands that run in this process set variables: gone when a test ends.

  jax starts before, so that none of them can change its number of devices.
  """
  import jax

  jax.devices()
  before = dict(os.environ)
  yield
  for name in set(os.environ) - set(before) - {'PYTEST_CURRENT_TEST'}:
    del os.environ[name]
  changed = {n: x for n, x in before.items() if os.environ.get(n) != x}
  os.environ.update(changed)


def pytest_addoption(parser, pluginmanager):
  del parser
  pluginmanager.register(sampling)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
  """Programs compiled in one session are read in the next.

  In the processes that run tests, and in those that tests start: the workers,
  or the only process. A cache that the environment names is used as it is.
  SIGINT counts, which a shell has ignored in what it starts in the background.
  """
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  runs = hasattr(config, 'workerinput') or not config.getoption(
    'numprocesses', None
  )
  if not runs or 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  root = os.environ.get('PARAXIS_CACHE') or '~/.cache/paraxis'
  root = pathlib.Path(root).expanduser() / 'compiled_tests'
  overlay = config.stash[_OVERLAY] = compile_store.Overlay(root)
  settings = overlay.settings(seconds=0.05)
  os.environ.update({k.upper(): str(v) for k, v in settings.items()})
  import jax  # a conftest of a file that was named may have, before

  for name, value in settings.items():
    jax.config.update(name, value)
  compile_store.guard(overlay.folder)


def pytest_unconfigure(config):
  overlay = config.stash.get(_OVERLAY, None)
  if overlay:
    overlay.close()


# Mark -> packages that its tests need, of the extra in setup.cfg.
NEEDED = {
  'hf': ('torch', 'transformers'),
  'lm_eval': ('lm_eval',),
  'extras': ('pyarrow', 'datasets'),
}


def pytest_collection_modifyitems(items):
  """Skips tests with a mark of NEEDED, and a reason, where that is missing."""
  for mark, packages in NEEDED.items():
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if not missing:
      continue
    skip = pytest.mark.skip(reason=f'not installed: {", ".join(missing)}')
    for item in items:
      if item.get_closest_marker(mark):  # keywords hold folders' names too
        item.add_marker(skip)


def _tracked_files():
  """Paths that git tracks or would track; without git, all but dot-folders."""
  command = ['git', 'ls-files', '-z', '-co', '--exclude-standard']
  try:
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = [n for n in out.stdout.decode().split('\0') if n]
  except (OSError, subprocess.CalledProcessError):
    names = [
      str(path.relative_to(ROOT))
      for path in ROOT.rglob('*')
      if not any(
        part.startswith('.') or part in ('runs', 'build', '__pycache__')
        for part in path.relative_to(ROOT).parts
      )
    ]
  return sorted(n for n in names if (ROOT / n).is_file())


def notebook_source(text):
  """A notebook's code cells as one module; shell and magic lines -> pass."""
  lines = []
  for cell in json.loads(text)['cells']:
    source = ''.join(cell['source'])
    if cell['cell_type'] != 'code' or source.startswith('%%'):
      continue
    for line in source.splitlines():
      start = len(line) - len(line.lstrip())
      magic = line[start : start + 1] in ('!', '%')
      lines.append(line[:start] + 'pass' if magic else line)
  return '\n'.join(lines) + '\n'


@pytest.fixture(scope='session')
def tree():
  """The repository as the guard tests see it.

  root: its path; folders: in import order; files: names of tracked files;
  code: {name: ast.Module} of every .py file and every notebook.
  """
  files = _tracked_files()
  code = {}
  for name in files:
    if name.endswith(('.py', '.ipynb')):
      text = (ROOT / name).read_text(encoding='utf-8')
      text = notebook_source(text) if name.endswith('.ipynb') else text
      code[name] = ast.parse(text, name)
  return types.SimpleNamespace(
    root=ROOT, folders=FOLDERS, files=files, code=code
  )


@pytest.fixture
def own_file(tmp_path):
  """own_file(old, new): a user's config with a mixer Q (models/own_ema.py), a
  text replaced; at the end nothing of it is registered."""
  from paraxis.configs.base import extra
  from paraxis.configs.base import mixers
  from paraxis.configs.base import user_file
  from paraxis.models import layer

  tables = [
    mixers.TABLE, mixers.OWN, layer.MIXERS, extra._own, extra._sections,
    user_file._NAMES,
  ]  # fmt: skip
  before = [dict(table) for table in tables]

  def write(old='', new=''):
    text = (ROOT / 'tests/models/own_ema.py').read_text()
    assert old in text
    file = tmp_path / 'mine.py'
    file.write_text(text.replace(old, new, 1) if old else text)
    return file

  yield write
  for table, kept in zip(tables, before, strict=True):
    table.clear()
    table.update(kept)


@pytest.fixture(scope='module')
def float64():
  """A module's tests, and its fixtures, compute in float64."""
  import jax

  with jax.enable_x64(True):
    yield


@pytest.fixture
def double():
  """A test computes in float64; others of its module do not."""
  import jax

  with jax.enable_x64(True):
    yield


@pytest.fixture
def said():
  """Lines: their `append` is a `say`."""
  return []
