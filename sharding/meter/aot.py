"""Ahead-of-time compilation for a TPU or GPU topology you do not have.

libtpu and XLA's CUDA compiler work without a device: a topology gives devices
to make a mesh of, shapes with shardings on that mesh are traced and compiled,
and the program gives its memory, collectives and work. Code that asks for the
current device must see the topology's: use `Topology.context` around tracing
(`trace_on` does, for one device).
Nothing is run, so no time can be measured.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core

from paraxis.configs.base import errors
from paraxis.sharding.meter import target
from paraxis.sharding.meter import traced as traced_lib

# platform -> (modules, one of which compiles for it; how to get one)
COMPILERS = {
  'tpu': (('libtpu',), "libtpu is not installed: pip install 'paraxis[aot]'"),
  'cuda': (
    ('jax_cuda13_plugin', 'jax_cuda12_plugin'),
    "the CUDA wheels of jax are not installed: pip install 'paraxis[cuda]'",
  ),
}
# Set before libtpu is loaded: it neither locks nor queries the host's TPU.
_ENVIRONMENT = dict(
  ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  TPU_SKIP_MDS_QUERY='1',
  TPU_WORKER_HOSTNAMES='localhost',
  TPU_ACCELERATOR_TYPE='v5p-8',
)


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices to compile for.

  Attributes:
    name: as given. kind, chip: of target.CHIPS. slices: of the mesh.
    devices: jax devices; they compile and never run.
    cores: devices that share one chip (2 on v4 and tpu7x).
  """

  name: str
  kind: str
  chip: Any
  slices: int
  devices: tuple
  cores: int

  @property
  def hbm(self):
    """Bytes of memory of one device."""
    return self.chip.hbm // self.cores

  def context(self):
    """Context in which programs are traced for these devices."""
    return jax.default_device(self.devices[0])


def missing(platform: str) -> str | None:
  """What to install to compile for a platform, in one line, or None."""
  modules, line = COMPILERS[platform]
  if not any(map(importlib.util.find_spec, modules)):
    return line
  return _another_libtpu() if platform == 'tpu' else None


def _another_libtpu():
  """What to say if jax was released with another libtpu, else None.

  Programs of another release compile, and jaxlib may not be able to read them.
  """
  try:
    found = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    return None  # built by its user
  listed = '\n'.join(importlib.metadata.requires('jax') or ())
  wanted = re.search(r'^libtpu==([\d.]+)\.\*', listed, re.M)
  if wanted is None or f'{found}.'.startswith(f'{wanted[1]}.'):
    return None
  release = f'{jax.__version__} was released with libtpu {wanted[1]}.*'
  return (
    f"libtpu is {found}, but jax {release}: pip install 'libtpu=={wanted[1]}.*'"
  )


def topology(name: str, num_slices: int = 1) -> Topology:
  """`Topology` of a name such as 'v5p:8x8x8' or 'h200:256' (target.py).

  Raises:
    UserError: no such topology.
    errors.MissingError: its compiler is not installed.
  """
  kind, chip, sizes = target.parse(name, num_slices)
  lacking = missing(chip.platform)
  if lacking:
    raise errors.MissingError(f'--topology={name}: {lacking}')
  options: dict[str, Any] = {}
  if chip.platform == 'cuda':
    options = dict(
      target_config=target.cuda_text(kind), topology='x'.join(map(str, sizes))
    )
  else:
    for key, value in _ENVIRONMENT.items():
      os.environ.setdefault(key, value)
    options = dict(topology_name=name)
    if math.prod(sizes) < 4:  # less than a host
      options['chips_per_host_bounds'] = [*sizes, 1, 1][:3]
    if num_slices > 1:
      options['num_slices'] = num_slices
  try:
    described = topologies.get_topology_desc(platform=chip.platform, **options)
    devices = tuple(described.devices)
  except (jax.errors.JaxRuntimeError, NotImplementedError) as e:
    raise errors.UserError(
      f'--topology={name}: {_line(e)}; known are, for example, '
      f'{", ".join(target.EXAMPLES)}.'
    ) from e
  cores = len(devices) // (num_slices * math.prod(sizes))
  return Topology(name, kind, chip, num_slices, devices, cores)


def trace_on(topology: Topology, function, *shapes) -> jax.stages.Traced:
  """Traces a function for one device of a topology.

  Args:
    shapes: pytrees of jax.ShapeDtypeStruct, without sharding.
  """
  one = jax.sharding.SingleDeviceSharding(topology.devices[0])
  placed = jax.tree.map(lambda x: x.update(sharding=one), shapes)
  with topology.context():
    return jax.jit(function).trace(*placed)


class TooLargeError(errors.UserError):
  """A program does not fit into the memory of a chip."""


def compile_for(topology, name, traced, options=None):
  """Compiles a traced program (`jax.jit(f).trace(*shapes)`).

  Args:
    topology: the `Topology` it was traced for.
    name: of the program, for the error.
    traced: jax.stages.Traced.
    options: {name: value} of the compiler.

  Raises:
    TooLargeError: it does not fit on the chip; names the array and the sizes.
  """
  try:
    with topology.context(), uncached():
      return traced.lower().compile(options)
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    text = out_of_memory(str(e), traced.jaxpr)
    raise TooLargeError(f'{name} on {topology.name}: {text}') from e


@contextlib.contextmanager
def uncached():
  """No compile cache, which cannot load a program for devices of a topology."""
  config: Any = jax.config  # type checkers do not know its options
  before = config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  # jax asks once in a process whether there is a cache, and again after this.
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()


# How the compiler reports on-chip memory: one array, or all of a kernel's.
_WINDOW = re.compile(
  r'Allocation \(size=(?P<need>\d+)\) would exceed memory '
  r"\(size=(?P<have>\d+)\)[\s\S]*?shape = '(?P<array>\w+\[[\d,]*\])"
  r"[\s\S]*?tag = '(?P<use>[^.']*)"
)
_STACK = re.compile(
  r'allocating on stack for %(?P<use>[\w.\-]+) = (?P<array>\w+\[[\d,]*\])'
  r'[\s\S]*?size (?P<need>[\d.]+\w) and limit (?P<have>[\d.]+\w)'
)


def out_of_memory(text, jaxpr):
  """The compiler's report on an allocation that did not fit, as one line.

  On-chip memory: the array, or the kernel and its result, and both sizes. HBM:
  what the program needs and what there is; the compiler names no array, so the
  largest of the traced program is named.
  """
  if found := _STACK.search(text):
    return (
      f'the blocks of {found["use"]}, which makes {found["array"]}, take '
      f'{found["need"]} of {found["have"]} of on-chip memory; use smaller '
      'blocks.'
    )
  if found := _WINDOW.search(text):
    window = re.search(r'window shape is (\w+\[[\d,]*\])', text)
    need, have = (int(found[k]) / 2**20 for k in ('need', 'have'))
    return (
      f'{window[1] if window else found["array"]} ({found["use"]}) takes '
      f'{need:.1f}M of {have:.1f}M of on-chip memory; use smaller blocks.'
    )
  array, size = largest(jaxpr)
  return (
    f'{_line(text)}; the largest array of the program, {array}, takes '
    f'{size / 2**30:.2f}G on each device.'
  )


def largest(jaxpr):
  """(type of the array that takes most of a device's memory, its bytes).

  Of all values of a jaxpr and of those inside it, but for what kernels keep on
  the chip; the compiler may keep fewer.
  """
  best = ('none', 0)
  for e in jaxpr.eqns:
    found = [
      (v.aval.str_short(), traced_lib.shard(v.aval).bytes) for v in e.outvars
    ]
    if e.primitive.name not in traced_lib.KERNELS:
      found += map(largest, core.jaxprs_in_params(e.params))
    best = max([best, *found], key=lambda item: item[1])
  return best


def _line(error):
  """The first sentence of a compiler's error, without its status code."""
  text = ' '.join(str(error).split())
  return re.sub(r'^[A-Z_]+: ', '', text)[:300].rstrip('.')


class Memory(NamedTuple):
  """Bytes of a compiled program on one device.

  peak: the most in use at any time, arguments and results included, without
  the program's own code.
  """

  arguments: int
  results: int
  aliased: int
  temporaries: int
  code: int
  peak: int


def memory(compiled: jax.stages.Compiled) -> Memory:
  """`Memory` of a jax.stages.Compiled.

  Where the compiler reports no peak (CUDA), all temporaries count at once.
  """
  m: Any = compiled.memory_analysis()
  parts = (
    m.argument_size_in_bytes,
    m.output_size_in_bytes,
    m.alias_size_in_bytes,
    m.temp_size_in_bytes,
    m.generated_code_size_in_bytes,
  )
  arguments, results, aliased, temporaries, _ = parts
  peak = getattr(m, 'peak_memory_in_bytes', 0)
  return Memory(*parts, peak or arguments + results - aliased + temporaries)
