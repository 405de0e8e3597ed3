"""Topologies without devices, and what a compile that fails says."""

import importlib.metadata
import importlib.util

import jax
from jax.experimental import pallas as pl
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import target
from paraxis.train.claims import experiment


@pytest.mark.parametrize(
  'name, line',
  [
    ('v5e:2x2', "libtpu is not installed: pip install 'paraxis[aot]'"),
    ('h200:8', "not installed: pip install 'paraxis[cuda]'"),
    ('v9:2x2', 'not CHIP:SIZES'),  # names are checked before anything else
  ],
)
def test_what_is_missing(monkeypatch, name, line):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with support.refused(line):
    aot.topology(name)


def test_libtpu_of_another_release(monkeypatch):
  """A claim is skipped, with both versions, instead of a crash of XLA's."""
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  listed = ['numpy>=2.0', 'libtpu==0.0.42.*; extra == "tpu"']
  monkeypatch.setattr(importlib.metadata, 'requires', lambda name: listed)
  cases = {'0.0.42.1': None, '0.0.42': None, '0.0.52': 1, '0.0.4': 1}
  for found, refused in cases.items():
    monkeypatch.setattr(importlib.metadata, 'version', lambda name, v=found: v)
    lacking = aot.missing('tpu')
    assert bool(lacking) == bool(refused), (found, lacking)
  assert lacking == (
    f'libtpu is 0.0.4, but jax {jax.__version__} was released with libtpu '
    "0.0.42.*: pip install 'libtpu==0.0.42.*'"
  )


def traced(f, *args):
  return jax.jit(f).trace(*args)


def test_largest_array():
  f = lambda x: jax.lax.scan(
    lambda x, _: (jnp.sin(x @ x.T).sum(1)[:, None] + x, None), x, length=3
  )[0]
  x = jnp.ones((64, 2))
  assert aot.largest(traced(f, x).jaxpr) == ('float32[64,64]', 64 * 64 * 4)


def test_largest_array_of_a_device():
  """A shard counts, also inside a manual region."""
  devices = jax.devices()[:4]
  mesh = jax.make_mesh((4,), ('data',), devices=devices)
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((8, 16)), jax.P('data'))
    g = jax.shard_map(lambda x: x @ x.T, out_specs=jax.P('data'))
    f = lambda x: (x * 2).sum() + g(x).sum()
    assert aot.largest(traced(f, x).jaxpr)[1] == 2 * 16 * 4


VMEM = (
  'RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory '
  "(size=134217728) :: #allocation2 [shape = 'u8[268435456]{0}', space=vmem, "
  "size = 0x10000000, scoped, tag = 'input window allocation for operator "
  'input 0. The window shape is f32[8192,8192], while the full shape is '
  "f32[8192,8192]. This allocation is single buffered.'] :: kernel.1"
)
STACK = (
  'RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in '
  'memory space vmem while allocating on stack for %flash.1 = '
  'f32[8192,64]{1,0:T(8,128)} custom-call(%x.1), metadata={}. Scoped '
  'allocation with size 64.00M and limit 16.00M exceeded scoped vmem limit by '
  '48.00M. It should not be possible - \nSee more details.'
)
HBM = (
  'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for '
  'HLO temporaries (22.55G) exceeds available HBM (15.75G).'
)


def test_out_of_memory_is_one_line_with_array_and_sizes():
  jaxpr = traced(lambda x: x * 2, jnp.ones((3, 5))).jaxpr
  for text, parts in (
    (VMEM, ('f32[8192,8192]', 'input window', '256.0M of 128.0M')),
    (STACK, ('flash.1', 'f32[8192,64]', '64.00M of 16.00M')),
    (HBM, ('(22.55G) exceeds', '(15.75G)', 'float32[3,5], takes')),
  ):
    line = aot.out_of_memory(text, jaxpr)
    assert all(part in line for part in parts), line
    assert '\n' not in line and 'RESOURCE_EXHAUSTED' not in line


def test_memory_of_a_program_without_a_peak():
  compiled = jax.jit(lambda a, b: a @ b).lower(
    jnp.ones((32, 64)), jnp.ones((64, 16))
  )
  found = aot.memory(compiled.compile())
  assert found.arguments == 4 * (32 * 64 + 64 * 16)
  assert found.results == 4 * 32 * 16
  assert found.peak >= found.arguments + found.results


@support.compiles('tpu')
@pytest.mark.parametrize(
  'name, slices, count, cores, kind',
  [
    ('v5e:4x4', 1, 16, 1, 'TPU v5 lite'),
    ('v5e:1x1', 1, 1, 1, 'TPU v5 lite'),
    ('v5e:2x2', 2, 8, 1, 'TPU v5 lite'),
    ('v5p:16x16x16', 1, 4096, 1, 'TPU v5'),
    ('v6e:16x16', 1, 256, 1, 'TPU v6 lite'),
    ('v4:2x2x2', 1, 16, 2, 'TPU v4'),
    ('tpu7x:2x2x1', 1, 8, 2, 'TPU7x'),
  ],
)
def test_tpu_topologies(name, slices, count, cores, kind):
  t = aot.topology(name, slices)
  assert (len(t.devices), t.cores) == (count, cores)
  assert t.devices[0].device_kind == kind
  assert t.hbm * cores == target.CHIPS[t.kind].hbm
  with t.context():
    assert registry.current_target() == registry.Target('tpu', kind)


@support.compiles('tpu')
def test_sizes_that_no_slice_has():
  with pytest.raises(errors.UserError, match='not divisible .*known are'):
    aot.topology('v5p:3x3x3')


def compile_on_tpu(f, *shapes):
  args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return experiment.for_chip('v5e:2x2', 'kernel', f, args)


@support.compiles('tpu')
def test_compile_for_tpu():
  found = aot.memory(compile_on_tpu(jnp.dot, (256, 512), (512, 128)))
  assert found.arguments == 4 * (256 * 512 + 512 * 128)
  assert found.peak >= found.arguments + found.results and found.code > 0


@support.compiles('tpu')
def test_too_large_for_hbm():
  words = 'kernel on v5e:2x2', '(32.00G)', 'float32[65536,65536]'
  with support.refused(*words):
    compile_on_tpu(lambda x: x * 2, (65536, 65536))


@support.compiles('tpu')
@pytest.mark.parametrize(
  'block, parts',
  [
    (8192, ('f32[8192,8192] (input window', '256.0M', 'smaller blocks')),
    (2048, ('blocks of doubled.1', 'f32[8192,8192]', '64.00M of 16.00M')),
  ],
)
def test_too_large_for_the_chip(block, parts):
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  def double(x):
    n = 8192 // block
    tile = pl.BlockSpec((block, block), lambda i, j: (i, j))
    return pl.pallas_call(
      body, out_shape=x, grid=(n, n), in_specs=[tile], out_specs=tile,
      name='doubled',
    )(x)  # fmt: skip

  with support.refused('on-chip memory', *parts):
    compile_on_tpu(double, (8192, 8192))


@support.compiles('cuda')
def test_cuda_topology():
  t = aot.topology('h200:256')
  assert len(t.devices) == 256 and t.cores == 1
  assert len({d.process_index for d in t.devices}) == 32
  with t.context():
    assert registry.current_target().platform == 'gpu'


def test_no_program_for_a_topology_is_cached(tmp_path):
  """Also in a process that has used the cache, which is used again after."""
  written = lambda: len(list(tmp_path.glob('*-cache')))
  compiled = lambda n: jax.jit(lambda x: x * n).lower(1.0).compile()
  here = dict(
    jax_compilation_cache_dir=str(tmp_path),
    jax_persistent_cache_min_compile_time_secs=0,
  )
  before = {name: getattr(jax.config, name) for name in here}

  def use(settings):
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()

  use(here)
  try:
    compiled(2)
    assert written() == 1
    with aot.uncached():
      compiled(3)
    assert written() == 1
    compiled(4)
    assert written() == 2
  finally:
    use(before)
