"""The kernels of gated_scan, interpreted and compiled ahead of time.

Values are compared with the XLA form in float64, which test_gated_scan.py
compares with the definition.

Legend: B batch, T tokens, H heads, K key size, V value size.
"""

import re

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import gated_gpu as gated_scan_gpu
from paraxis.pallas_kernels.scans import gated_tpu as gated_scan_tpu
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import flops

NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'd_state')
KERNELS = dict(tpu=gated_scan_tpu, gpu=gated_scan_gpu)


@pytest.fixture
def interpreted(monkeypatch):
  """Registers a module's kernels as implementation 'kernel', interpreted."""

  def use(module, how=True):
    kernel = kernel_cases.with_options('kernel', module, interpret=how)
    known = registry._OPS['gated_scan']
    monkeypatch.setitem(registry._OPS, 'gated_scan', (kernel, *known))
    monkeypatch.setitem(gated_scan.CHUNKS, 'kernel', 16)

  return use


def make(T, strong=False, scalar=False, B=2, H=2, K=16, V=32):
  """(q, k, v, g, reset, state), (do, d_state) in float32.

  One decay a head: all heads share one q and k.
  """
  rng = np.random.default_rng(0)
  G = 1 if scalar else H
  normal = lambda *s: rng.normal(size=s).astype('f4')
  x = normal(B, T, H) if scalar else normal(B, T, H, K)
  g = np.where(x > 0, -60, -0.04) if strong else -np.log1p(np.exp(-x)) / 16
  reset = rng.random((B, T)) < 0.05
  inputs = normal(B, T, G, K), normal(B, T, G, K), normal(B, T, H, V)
  inputs += g.astype('f4'), reset, normal(B, H, K, V)
  return inputs, (normal(B, T, H, V), normal(B, H, K, V))


def both(inputs, cotangents, **options):
  """Outputs and gradients, as NAMES."""

  @jax.jit
  def run(q, k, v, g, reset, state, cotangents):
    fn = lambda *x: gated_scan.gated_scan(*x[:4], reset, x[4], **options)
    outputs, back = jax.vjp(fn, q, k, v, g, state)
    return *outputs, *back(cotangents)

  return run(*inputs, cotangents)


def faults(actual, inputs, cotangents):
  """{name: largest error over the largest entry} against float64."""
  with jax.enable_x64(True):
    wide = lambda x: x if x.dtype == bool else np.asarray(x, 'f8')
    inputs, cotangents = (tuple(map(wide, x)) for x in (inputs, cotangents))
    expected = both(inputs, cotangents, impl='xla', chunk=16)
  return kernel_cases.errors_of(NAMES, actual, expected)


@pytest.mark.parametrize('name', KERNELS)
@pytest.mark.parametrize(
  'T, strong, scalar', [(37, True, False), (20, False, True)]
)
def test_kernels_equal_the_xla_form(
  name, T, strong, scalar, interpreted, monkeypatch
):
  monkeypatch.setattr(gated_scan_gpu, '_COLUMNS', 16)  # two blocks of V
  interpreted(KERNELS[name])
  case = make(T, strong, scalar)
  found = faults(both(*case, impl='kernel'), *case)
  assert max(found.values()) < 1e-6, found


def test_a_kernel_that_forgets_the_state_is_found(interpreted, monkeypatch):
  whole = gated_scan_tpu.gated_chunk.forward
  forget = lambda x, state, precision: whole(x, 0 * state, precision)
  monkeypatch.setattr(gated_scan_tpu.gated_chunk, 'forward', forget)
  interpreted(gated_scan_tpu)
  inputs, cotangents = make(37)
  found = gated_scan.gated_scan(*inputs, impl='kernel')
  monkeypatch.undo()
  for a, b in zip(found, gated_scan.gated_scan(*inputs), strict=True):
    assert jnp.abs(a - b).max() > 0.1


@pytest.mark.parametrize('name', KERNELS)
def test_bfloat16_in_bfloat16_out(name, interpreted):
  interpreted(KERNELS[name])
  (q, k, v, g, reset, state), (do, d_state) = make(20, B=1, H=1)
  q, k, v, do = (x.astype(jnp.bfloat16) for x in (q, k, v, do))
  case = (q, k, v, g, reset, state), (do, d_state)
  actual = both(*case, impl='kernel')
  names = [str(x.dtype) for x in actual]
  half, single = 'bfloat16', 'float32'
  assert names == [half, single, half, half, half, single, single]
  found = faults(actual, *case)
  for name, kind in zip(NAMES, names, strict=True):
    assert found[name] < (2**-8 if kind == half else 2e-6), found


# ------------------------------------------------------- semantics of a TPU --

STRICT = dict(uninitialized_memory='nan', detect_races=True)


def test_tpu_semantics_on_one_device(interpreted):
  """Memory starts as NaN, reads and writes of memory must not race."""
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call

  interpreted(gated_scan_tpu, pltpu.InterpretParams(**STRICT))
  case = make(20, strong=True, B=1, K=8, V=8)
  actual = both(*case, impl='kernel', chunk=8)
  assert max(faults(actual, *case).values()) < 1e-6
  assert not interpret_pallas_call.races.races_found


# ------------------------------------------------------------------- types --


@pytest.mark.parametrize('name', KERNELS)
def test_a_manual_region_types_the_outputs(name):
  """Traced with check_vma: every output varies as the inputs do."""
  module = KERNELS[name]
  mesh = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
  rows = jax.P('data')

  def run(q, k, v, g, reset, state):
    tokens = gated_scan.gated_chunk.GatedTokens(q, k, v, g, reset.astype('i4'))
    o, last, starts = module.forward(tokens, state, 16, True)
    return o, last, *module.backward(tokens, starts, (o, last), 16)

  inputs, _ = make(16, B=4)
  with jax.set_mesh(mesh):
    local = jax.shard_map(run, in_specs=(rows,) * 6, out_specs=(rows,) * 7)
    place = jax.NamedSharding(mesh, rows)
    out = jax.eval_shape(local, *(jax.device_put(x, place) for x in inputs))
  q, k, v, g, _, state = (x.shape for x in inputs)
  assert [x.shape for x in out] == [v, state, q, k, v, g, state]


# ---------------------------------------------------------------- choosing --

TPU, GPU = kernel_cases.TPU, kernel_cases.GPU


def chosen(target, K=64, V=64, dtype='bfloat16', chunk=0):
  spec = gated_scan.GatedScanSpec((1, 256, 2, K), V, dtype, False, chunk)
  rows = registry.explain('gated_scan', target, spec)
  (name,) = (name for name, yes, _ in rows if yes)
  return name, {name: reason for name, _, reason in rows}


def test_which_runs_where_and_why_not():
  assert chosen(TPU)[0] == 'pallas_tpu' and chosen(GPU)[0] == 'pallas_gpu'
  for target, options, reason in (
    (TPU, dict(dtype='float64'), 'computes in float32, takes'),
    (TPU, dict(K=512), 'key size 512 is above 256'),
    (TPU, dict(chunk=512), 'chunk 512 is above 256'),
    (GPU, dict(dtype='float64'), 'computes in float32, takes'),
    (GPU, dict(V=96), 'value size 96 is not one of'),
    (GPU, dict(chunk=64), 'chunk 64 is not one of .*shared memory'),
  ):
    name, reasons = chosen(target, **options)
    own = 'pallas_' + target.platform
    assert name == 'xla' and re.search(reason, reasons[own])
  x = np.ones((1, 8, 1, 16), 'f4')
  with pytest.raises(errors.UserError, match='needs a TPU, target is cpu'):
    gated_scan.gated_scan(x, x, x, -x, impl='pallas_tpu')


# ------------------------------------------------------------ ahead of time --

B, T, H, K, V = 2, 4096, 8, 128, 128
MIB = 2**20


def compiled(name, scalar=False, dtype=jnp.bfloat16, **options):
  """(program, its FLOPs) of value and gradients on a device of a topology."""
  shape = lambda *s, d=dtype: jax.ShapeDtypeStruct(s, d)
  g = shape(B, T, H, *[K] * (not scalar), d=jnp.float32)
  args = (
    shape(B, T, H, K), shape(B, T, H, K), shape(B, T, H, V), g,
    shape(B, T, d=jnp.bool_), shape(B, H, K, V, d=jnp.float32),
  )  # fmt: skip

  def run(q, k, v, g, reset, state):
    fn = lambda *x: gated_scan.gated_scan(*x[:4], reset, x[4], **options)
    (o, last), back = jax.vjp(fn, q, k, v, g, state)
    return o, last, *back((o, last))

  program, traced = kernel_cases.compile_on(name, run, *args)
  return program, flops.of_jaxpr(traced.jaxpr)


# Without a kernel's own temporaries: inputs and outputs, gradients, their
# copies with heads before tokens, and the states between chunks.
BUDGET = 500 * MIB


@kernel_cases.compiles('tpu')
@pytest.mark.parametrize(
  'name, options',
  [
    ('v5e:2x2', dict()),
    ('v5p:2x2x1', dict(scalar=True)),
    ('v6e:2x2', dict(scalar=True, chunk=128)),
    ('tpu7x:2x2x1', dict()),
  ],
)
def test_tpu_compiles(name, options):
  program, work = compiled(name, **options)
  text = program.as_text()
  assert text.count(kernel_cases.TPU_CALL) == 2
  for kernel in ('gated_scan_forward_chunks', 'gated_scan_backward_chunks'):
    assert kernel in text
  assert aot.memory(program).peak < BUDGET
  assert work.total > 4 * 2 * B * T * H * K * V


@kernel_cases.compiles('tpu')
def test_the_tpu_check_would_find_a_fallback():
  program, _ = compiled('v5e:2x2', impl='xla', scalar=True)
  assert 'tpu_custom_call' not in program.as_text()


@kernel_cases.compiles('cuda')
@pytest.mark.parametrize('name', kernel_cases.ONE_GPU)
@pytest.mark.parametrize('scalar', [False, True])
def test_gpu_compiles(name, scalar):
  program, work = compiled(name, scalar)
  assert program.as_text().count(kernel_cases.GPU_CALL) == 2
  assert aot.memory(program).peak < 2 * BUDGET
  assert work.total > 4 * 2 * B * T * H * K * V
