"""The diagonal scan against a loop over tokens: values, gradients, state.

The kernels run in the interpreter here, inside the op and its custom_vjp, and
are compiled ahead of time for TPUs and GPUs.

Legend: B batch, T length, D channels.
"""

import functools

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import linear as linear_scan
from paraxis.pallas_kernels.scans import linear_gpu as linear_scan_gpu
from paraxis.pallas_kernels.scans import linear_tpu as linear_scan_tpu

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

  return kernel_cases.with_gradients(run, arrays, cotangents)


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


@pytest.mark.parametrize('impl', ['loop', 'xla'])
def test_second_derivatives_where_a_gate_is_zero(impl):
  """h_3 = a_3 (a_2 h_1 + b_2) + b_3, so d2 h_3 / da_2 da_3 = h_1."""
  b = jnp.array([1.0, 2.0, 3.0, 4.0])[None, :, None]
  none, state = np.zeros((1, 4), bool), jnp.zeros((1, 1))

  def last(a):
    rows = a[None, :, None]
    return linear_scan.linear_scan(rows, b, none, state, impl=impl)[0][0, -1, 0]

  found = jax.hessian(last)(jnp.array([0.5, 0.5, 0.0, 0.7]))
  np.testing.assert_allclose(found, found.T, atol=1e-6)
  np.testing.assert_allclose(found[2, 3], 2.5, rtol=1e-6)


@pytest.mark.parametrize('impl', ['loop', 'tpu'])
def test_what_is_not_finite_passes_no_reset(impl):
  (a, x, state), reset, cotangents = problem(2, 37, 3, np.float32)
  reset[:] = False
  a[:, 20] = 0  # what the op makes of a reset
  run = interpreted(impl) if impl in KERNELS else impl
  clean = both(run, (a, x, state), reset, cotangents)
  a[0, 5], x[1, 12] = np.nan, np.inf
  found = both(run, (a, x, state), reset, cotangents)
  assert not np.isfinite(found[0][:, 12:20]).any()
  for one, other, first in zip(found, clean, (20, 0, 21, 20), strict=False):
    one, other = (y[:, first:] for y in (one, other))
    np.testing.assert_array_equal(one, other)


def test_two_narrow_dtypes_are_no_kernel_of_a_tpu():
  (a, x, state), reset, cotangents = problem(2, 5, 3, np.float32)
  a, x = a.astype('f2'), x.astype(jnp.bfloat16)
  g = cotangents[0].astype(jnp.bfloat16), cotangents[1]
  dtypes = [y.dtype for y in both('loop', (a, x, state), reset, g)]
  assert dtypes == [jnp.bfloat16, 'f4', 'f2', jnp.bfloat16, 'f4']
  find = functools.partial(
    registry.resolve, 'linear_scan', target=kernel_cases.TPU
  )
  assert find(spec=linear_scan.spec_of(a, x)).name == 'xla'
  with support.refused('bfloat16 and float32', 'float16 with bfloat16'):
    find('pallas_tpu', linear_scan.spec_of(a, x))


def test_what_does_not_fit_is_an_error():
  (a, b, state), reset, _ = problem(2, 5, 3)
  run = linear_scan.linear_scan
  for args, texts in (
    ((a[:, :4], b), ('(2, 4, 3)', '(2, 5, 3)')),
    ((a, b, reset[:1]), ('(1, 5)', '(2, 5)')),
    ((a, b, reset, state[:, :2]), ('(2, 2)', '(2, 3)', 'another model')),
    ((a[:, :0], b[:, :0]), ('0 tokens',)),
  ):
    with support.refused(*texts):
      run(*args)


# ------------------------------------------------------------------- kernels --


def interpreted(kernel):
  less = {'unroll': 3} if kernel == 'gpu' else {}
  return kernel_cases.with_options(
    kernel, KERNELS[kernel], interpret=True, **less
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


@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_in_a_manual_region_with_checked_types(kernel):
  row, state = np.zeros((8, 16, 4), 'f4'), np.zeros((8, 4), 'f4')
  run = lambda a, b, s: KERNELS[kernel].forward(a, b, s)
  found = kernel_cases.shapes_in_region(run, row, row, state)
  assert found == [row.shape, state.shape]
