"""`paraxis doctor`: versions, devices, mesh, kernels, incompatible versions.

Prints versions, devices, the mesh, which implementation of every op runs here
and why the others do not, the cache folders, and known incompatible versions.
Exit code 2 if such versions are installed or the mesh is impossible.
"""

import contextlib
import importlib
import importlib.metadata
import math
import operator
import os
import pathlib
import pkgutil
import platform
import re
from typing import NamedTuple

import jax

from paraxis import pallas_kernels
from paraxis.configs.base import cache
from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.meter import aot
from paraxis.train import program

PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'tensorstore',
  'grain',
  'numpy',
  'tokenizers',
)
_ORDER = {
  '<': operator.lt,
  '<=': operator.le,
  '==': operator.eq,
  '>=': operator.ge,
  '>': operator.gt,
}


class Incompatibility(NamedTuple):
  """Versions that fail together. where: {package: '>=1.2,<2'}."""

  where: dict
  reason: str


BAD = (
  Incompatibility(
    {'jax': '<0.10.2'}, 'paraxis needs jax 0.10.2: sharding in types'
  ),
  Incompatibility(
    {'python': '<3.12', 'jax': '>=0.11'},
    'jax 0.11 dropped Python 3.11, which ends at jax 0.10.2 and flax 0.12.8',
  ),
  Incompatibility(
    {'python': '<3.12', 'flax': '>=0.12.12'},
    'flax 0.12.12 needs Python 3.12: take flax 0.12.8',
  ),
  Incompatibility(
    {'flax': '>=0.12.12', 'jax': '<0.11.1'},
    'flax 0.12.12 needs jax 0.11.1: take flax 0.12.8',
  ),
)
# Known problems of these versions that paraxis avoids.
NOTES = (
  Incompatibility(
    {'jax': '<0.12'},
    'a partial-manual shard_map replicates the Explicit axes at its boundary: '
    'results are right, every shard is gathered; paraxis uses fully manual '
    'regions',
  ),
  Incompatibility(
    {'orbax-checkpoint': '>=0', 'tensorstore': '>=0'},
    'checkpoints on disk have no checksum of the data: paraxis writes and '
    'checks its own fingerprints',
  ),
  Incompatibility(
    {'clu': '>=0'},
    'clu needs TensorFlow: paraxis does not use it',
  ),
  Incompatibility(
    {'jax': '>=0.10.2', 'ringattention': '<=0.1.2'},
    'ringattention 0.1.2 does not import on this jax (jax.lib.xla_bridge)',
  ),
)


def numbers(version):
  """'0.12.0.1rc2' -> (0, 12, 0, 1): the release, for comparison."""
  match = re.match(r'\d+(\.\d+)*', version)
  found = tuple(int(n) for n in match[0].split('.')) if match else ()
  while found and found[-1] == 0:
    found = found[:-1]
  return found


def fits(version, condition):
  """Whether '0.10.2' meets '>=0.10,<0.11'."""
  parts = re.findall('([<>=]+)([^,]+)', condition)
  return all(_ORDER[s](numbers(version), numbers(bound)) for s, bound in parts)


def found(pairs, versions):
  """The pairs whose every condition the versions meet.

  Args:
    pairs: `Incompatibility`s.
    versions: {package: version}; no condition holds for a missing package.
  """
  return [
    pair
    for pair in pairs
    if all(
      n in versions and fits(versions[n], c) for n, c in pair.where.items()
    )
  ]


def versions():
  """{package: version} of Python and of the installed packages named here."""
  out = {'python': platform.python_version()}
  named = {n for pair in BAD + NOTES for n in pair.where} - {'python'}
  for name in (*PACKAGES, *sorted(named - set(PACKAGES))):
    try:
      out[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return out


def _size(count):
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if count < 1024 or unit == 'GiB':
      return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.1f} {unit}'
    count /= 1024


def _devices():
  """Lines on the devices of all processes."""
  kinds = {}
  for device in jax.devices():
    kinds.setdefault((device.platform, device.device_kind), []).append(device)
  for (name, kind), devices in kinds.items():
    own = devices[0].process_index == jax.process_index()
    stats = devices[0].memory_stats() if own else None
    limit = (stats or {}).get('bytes_limit')
    memory = f', {_size(limit)} each' if limit else ''
    yield f'{len(devices)} x {kind} ({name}){memory}'
  yield f'process {jax.process_index()} of {jax.process_count()}'
  yield 'a checkpoint ' + (
    'is copied to host memory beside the next gradient'
    if all(map(snapshot.has_host_memory, jax.local_devices()))
    else 'blocks training until it is written: no pinned host memory'
  )


def _mesh(config, mesh_text):
  """Lines on the mesh, and with a config on its parameters."""
  if config is None:
    mesh = mesh_lib.make(mesh_text or 'data=-1')
    yield mesh_lib.describe(dict(mesh.shape))
    return
  built = program.of_shapes(config, mesh_text).built
  sizes = dict(built.mesh.shape)
  yield f'{mesh_lib.describe(sizes)}, rules {built.rules.name}'
  leaves = built.params.values()
  whole = sum(math.prod(p.shape) for p in leaves)
  one = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in leaves)
  size = _size(sum(math.prod(p.shape) * p.dtype.itemsize for p in leaves))
  yield f'{whole:,} parameters ({size}), {one:,} on each device'


def _kernels():
  """Lines on every registered op: what runs here, why the others do not."""
  prefix = f'{pallas_kernels.__name__}.'
  for module in pkgutil.walk_packages(pallas_kernels.__path__, prefix):
    importlib.import_module(module.name)
  for op in sorted(registry.ops()):
    for name, chosen, reason in registry.explain(op):
      state = 'runs' if chosen else f'not: {reason}' if reason else 'could run'
      yield f'{op:18} {name:10} {state}'


def _compilers():
  """Lines on what `paraxis compile` and AOT claims can compile for here."""
  for platform_name in aot.COMPILERS:
    yield f'{platform_name:18} {aot.missing(platform_name) or "can compile"}'


def _caches():
  """Lines on what paraxis keeps between runs."""
  root = pathlib.Path(cache.root())
  found = sorted(p for p in root.glob('*') if p.is_dir())
  yield f'{root}{"" if found else " (empty)"}'
  for folder in found:
    yield f'  {folder.name:18} {_size(_bytes_below(folder))}'


def _bytes_below(folder):
  """Bytes of all files below a folder that other runs may be writing to."""
  size = 0
  for at, _, names in os.walk(folder):
    for name in names:
      with contextlib.suppress(FileNotFoundError):  # gone since it was listed
        size += os.stat(os.path.join(at, name)).st_size
  return size


def _print(title, lines):
  print(title)
  for line in lines:
    print(f'  {line}')


def run(config=None, mesh_text=''):
  """Prints the report -> exit code: 2 if incompatible versions are installed.

  Args:
    config: schema.Config whose model and mesh are tried, or None.
    mesh_text: --mesh=; default the config's mesh, else all devices on data.

  Raises:
    UserError: the mesh (or the config on it) is impossible on these devices.
    RuntimeError, AssertionError: jax cannot start what JAX_PLATFORMS names.
  """
  have, devices = versions(), list(_devices())  # what fails, fails first
  _print('versions', [f'{n:18} {v}' for n, v in have.items()])
  _print('devices', devices)
  _print('kernels', _kernels())
  _print('ahead of time', _compilers())
  _print('cache', _caches())
  lines = lambda pairs: [
    f'{", ".join(f"{n} {have[n]}" for n in p.where)}: {p.reason}' for p in pairs
  ]
  _print('known and avoided', lines(found(NOTES, have)) or ['none'])
  bad = found(BAD, have)
  title = 'INCOMPATIBLE VERSIONS' if bad else 'incompatible versions'
  _print(title, lines(bad) or ['none'])
  _print('mesh', _mesh(config, mesh_text))
  return errors.EXIT_USER if bad else errors.EXIT_OK
