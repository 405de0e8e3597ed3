"""The diagonal scan against a loop over tokens: values, gradients, state.

The kernels run in the interpreter here, inside the op and its custom_vjp, and
are compiled ahead of time for TPUs and GPUs.

Legend: B batch, T length, D channels.
"""

import functools

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import linear_gpu as linear_scan_gpu
from paraxis.pallas_kernels.scans import linear_tpu as linear_scan_tpu
from paraxis.sharding.meter import aot

pytestmark = pytest.mark.usefixtures('float64')

NAMES = ('h', 'state', 'da', 'db', 'dstate')
IMPLS = ('loop', 'xla')
KERNELS = {'tpu': linear_scan_tpu, 'gpu': linear_scan_gpu}


def problem(b, t, d, dtype=np.float64, seed=0):
  """(a, b, state), reset, cotangents of (h, last state), padding inside."""
  rng = np.random.default_rng(seed)
  a, x = rng.uniform(-1.1, 1.1, (b, t, d)), rng.normal(size=(b, t, d))
  a[:, t // 2], x[:, t // 2] = 1, 0  # a token of padding
  reset = rng.random((b, t)) < 0.15
  reset[:, 0] = np.arange(b) % 2 == 1
  state, g, dstate = (rng.normal(size=s) for s in ((b, d), (b, t, d), (b, d)))
  a, x, g = (v.astype(dtype) for v in (a, x, g))
  state, dstate = (
    v.astype(jnp.result_type(dtype, 'f4')) for v in (state, dstate)
  )
  return (a, x, state), reset, (g, dstate)


def by_hand(arrays, reset, cotangents):
  """The definition and its derivatives, token by token, in NumPy."""
  (a, x, state), (g, dstate) = arrays, cotangents
  keep = ~reset[..., None]
  h, before = np.empty_like(x), np.empty_like(x)
  now = state
  for t in range(x.shape[1]):
    before[:, t] = np.where(keep[:, t], now, 0)
    h[:, t] = now = a[:, t] * before[:, t] + x[:, t]
  da, db, back = np.empty_like(a), np.empty_like(a), dstate
  for t in reversed(range(x.shape[1])):
    db[:, t] = back + g[:, t]
    da[:, t] = db[:, t] * before[:, t]
    back = np.where(keep[:, t], a[:, t] * db[:, t], 0)
  return h, now, da, db, back


def both(impl, arrays, reset, cotangents):
  """All of NAMES; impl: a name or a registry.Implementation."""

  def run(a, b, state):
    if not isinstance(impl, str):
      return linear_scan._scan(impl, a, b, state)
    return linear_scan.linear_scan(a, b, reset, state, impl=impl)

  def all_of(arrays, cotangents):
    out, back = jax.vjp(run, *arrays)
    return *out, *back(cotangents)

  return jax.jit(all_of)(arrays, cotangents)


wrong = functools.partial(kernel_cases.wrong, NAMES, least=1.0)


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('shape', [(2, 37, 3), (3, 1, 2)])
def test_equals_the_loop(impl, shape):
  args = problem(*shape)
  found = both(impl, *args)
  assert all(x.dtype == np.float64 for x in found)
  assert wrong(found, by_hand(*args), 1e-12) == []


def test_the_comparison_finds_a_lost_reset_and_a_lost_state():
  arrays, reset, cotangents = problem(2, 37, 3)
  wanted = by_hand(arrays, reset, cotangents)
  found = both('loop', arrays, np.zeros_like(reset), cotangents)
  assert wrong(found, wanted, 1e-3) == list(NAMES)
  lost = arrays[0], arrays[1], 0 * arrays[2]
  found = both('loop', lost, reset, cotangents)
  assert wrong(found, wanted, 1e-3) == ['h', 'da']


def test_two_halves_are_one_row():
  (a, b, state), reset, _ = problem(2, 20, 3)
  whole, last = linear_scan.linear_scan(a, b, reset, state)
  first, middle = linear_scan.linear_scan(
    a[:, :7], b[:, :7], reset[:, :7], state
  )
  second, end = linear_scan.linear_scan(
    a[:, 7:], b[:, 7:], reset[:, 7:], middle
  )
  joined = np.concatenate([first, second], 1)
  np.testing.assert_allclose(joined, whole, rtol=0, atol=1e-13)
  np.testing.assert_allclose(end, last, rtol=0, atol=1e-13)


@pytest.mark.parametrize('impl', IMPLS)
def test_bfloat16_sums_in_float32(impl):
  args = problem(2, 64, 4, jnp.bfloat16)
  found = both(impl, *args)
  low, wide = jnp.bfloat16, jnp.float32
  assert [x.dtype for x in found] == [low, wide, low, low, wide]
  exact = jax.tree.map(np.float64, args)
  wanted = by_hand(exact[0], args[1], exact[2])
  # The state is never rounded on its way: only its inputs were.
  assert np.abs(np.float64(found[1]) - wanted[1]).max() < 1e-5


def test_a_dirty_slot_is_cleared_by_a_reset():
  (a, b, state), reset, _ = problem(2, 5, 3)
  reset[:, 0] = True
  h, _ = linear_scan.linear_scan(a, b, reset, np.full_like(state, np.nan))
  clean, _ = linear_scan.linear_scan(a, b, reset, state)
  np.testing.assert_array_equal(h, clean)


def test_no_gradient_crosses_a_document():
  (a, b, state), reset, _ = problem(1, 12, 2)
  reset[:] = np.isin(np.arange(12), [0, 5, 9])
  run = lambda a, b: linear_scan.linear_scan(a, b, reset, state)[0][
    :, 5:9
  ].sum()
  da, db = jax.grad(run, (0, 1))(a, b)
  for x in (da, db):
    assert not np.abs(x[:, :5]).any() and not np.abs(x[:, 9:]).any()
  assert np.abs(db[:, 5:9]).min() > 0


def test_what_does_not_fit_is_an_error():
  (a, b, state), reset, _ = problem(2, 5, 3)
  run = linear_scan.linear_scan
  for args, texts in (
    ((a[:, :4], b), ('(2, 4, 3)', '(2, 5, 3)')),
    ((a, b, reset[:1]), ('(1, 5)', '(2, 5)')),
    ((a, b, reset, state[:, :2]), ('(2, 2)', '(2, 3)', 'another model')),
    ((a[:, :0], b[:, :0]), ('0 tokens',)),
  ):
    with pytest.raises(errors.UserError) as e:
      run(*args)
    assert all(text in str(e.value) for text in texts), e.value


# ------------------------------------------------------------------- kernels --


def interpreted(kernel, how=True):
  less = {'unroll': 3} if kernel == 'gpu' else {}
  return kernel_cases.with_options(
    kernel, KERNELS[kernel], interpret=how, **less
  )


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('shape, dtype', [
  ((2, 37, 3), 'float32'),  # odd sizes: nothing fills a tile
  ((1, 300, 256), 'float32'),  # two blocks of tokens, two of 128 channels
  ((2, 40, 3), 'bfloat16'),
  ((2, 1, 3), 'float32'),
])  # fmt: skip
def test_kernels_equal_the_loop(kernel, shape, dtype):
  arrays, reset, cotangents = problem(*shape, jnp.dtype(dtype))
  reset[:] = False  # the op has put zeros into a by then
  arrays[0][:, shape[1] // 3] = 0
  found = both(interpreted(kernel), arrays, reset, cotangents)
  assert [x.dtype for x in found] == [dtype, 'f4', dtype, dtype, 'f4']
  exact = jax.tree.map(np.float64, (arrays, cotangents))
  wanted = by_hand(exact[0], reset, exact[1])
  small = 1e-2 if dtype == 'bfloat16' else 1e-6
  assert wrong(found, wanted, small) == []
  assert np.abs(found[1] - wanted[1]).max() < 1e-5


def test_a_tile_that_is_not_scanned_is_found(monkeypatch):
  monkeypatch.setattr(
    linear_scan_tpu, '_tile_scan', lambda a, b, reverse: (a, b)
  )
  arrays, reset, cotangents = problem(2, 37, 3, np.float32)
  found = both(interpreted('tpu'), arrays, 0 * reset, cotangents)
  wanted = by_hand(arrays, 0 * reset == 1, cotangents)
  assert wrong(found, wanted, 1e-2) == list(NAMES)


def test_no_race_and_nothing_read_before_it_is_written():
  params = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)
  arrays, reset, cotangents = problem(2, 37, 3, np.float32)
  reset[:] = False
  found = both(interpreted('tpu', params), arrays, reset, cotangents)
  assert wrong(found, by_hand(arrays, reset, cotangents), 1e-5) == []
  assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_in_a_manual_region_with_checked_types(kernel):
  mesh = jax.make_mesh((8,), ('data',))
  module, spec = KERNELS[kernel], jax.P('data')
  run = jax.shard_map(
    lambda a, b, s: module.forward(a, b, s), mesh=mesh, in_specs=spec,
    out_specs=spec,
  )  # fmt: skip
  row, state = (
    jax.ShapeDtypeStruct(s, 'float32', sharding=jax.NamedSharding(mesh, spec))
    for s in ((8, 16, 4), (8, 4))
  )
  h, last = jax.eval_shape(run, row, row, state)
  assert (h.shape, last.shape) == ((8, 16, 4), (8, 4))


def compiled(name, dtype):
  """The op with all gradients, B2 T4096 D2048, for a device of a topology."""
  row = jax.ShapeDtypeStruct((2, 4096, 2048), dtype)
  reset = jax.ShapeDtypeStruct((2, 4096), 'bool')
  state = jax.ShapeDtypeStruct((2, 2048), 'float32')

  def run(a, b, reset, state, g):
    scan = lambda a, b, s: linear_scan.linear_scan(a, b, reset, s)
    out, back = jax.vjp(scan, a, b, state)
    return out, back((g, out[1]))

  with jax.enable_x64(False):
    shapes = row, row, reset, state, row
    return kernel_cases.compile_on(name, run, *shapes)[0]


@kernel_cases.compiles('tpu')
@pytest.mark.parametrize('name', kernel_cases.ONE_TPU)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_compiles_for_tpu(name, dtype):
  found = compiled(name, dtype)
  assert found.as_text().count(kernel_cases.TPU_CALL) == 2
  assert found.cost_analysis()['flops'] >= 2 * 2 * 2 * 4096 * 2048
  # Of float32 nothing is copied; of bfloat16, l is a float32 array.
  size = 4 * 2 * 4096 * 2048
  most = 2**20 if dtype == 'float32' else 2 * size + 2**20
  assert aot.memory(found).temporaries < most


@kernel_cases.compiles('cuda')
@pytest.mark.parametrize('name', kernel_cases.ONE_GPU)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_compiles_for_gpu(name, dtype):
  found = compiled(name, dtype)
  assert found.as_text().count(kernel_cases.GPU_CALL) == 2
  most = 2**20 if dtype == 'float32' else 4 * 2 * 4096 * 2048 + 2**20
  assert aot.memory(found).temporaries < most


def test_which_runs_where():
  def name(dtype, *target, sharded=False):
    spec = linear_scan.LinearScanSpec((1, 8, 128), dtype, sharded)
    where = registry.Target(*target)
    return registry.resolve(linear_scan.OP, spec=spec, target=where).name

  tpu, gpu = ('tpu', 'TPU v5'), ('gpu', 'NVIDIA H200')
  assert name('float32', 'cpu', 'cpu') == 'loop'
  assert name('bfloat16', *tpu) == 'pallas_tpu'
  assert name('float16', *gpu) == name('float32', *gpu) == 'pallas_gpu'
  for args in (('float64', *tpu), ('float64', *gpu), ('float16', *tpu)):
    assert name(*args) == 'xla'
  assert name('float32', *tpu, sharded=True) == 'xla'
  for impl, dtype, text in (
    ('loop', 'float32', 'launch for every token'),
    ('pallas_tpu', 'float32', 'needs a TPU, target is NVIDIA H200'),
    ('pallas_gpu', 'float64', 'takes bfloat16, float16, float32, not float64'),
  ):
    spec = linear_scan.LinearScanSpec((1, 8, 128), dtype)
    with pytest.raises(errors.UserError, match=text):
      registry.resolve(linear_scan.OP, impl, spec, registry.Target(*gpu))
  huge = linear_scan.LinearScanSpec((64, 2**17, 512), 'float32')
  where = registry.Target(*gpu)
  assert registry.resolve(linear_scan.OP, spec=huge, target=where).name == 'xla'
