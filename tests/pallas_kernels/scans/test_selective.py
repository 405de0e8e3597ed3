"""The scan of Mamba against a loop over tokens, and the memory that it takes.

Legend: B rows, T tokens, F channels, S numbers of the state.
"""

import functools

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels import varying
from paraxis.pallas_kernels.scans import selective
from paraxis.pallas_kernels.scans import selective_gpu
from paraxis.pallas_kernels.scans import selective_tpu

KERNELS = {'tpu': selective_tpu, 'gpu': selective_gpu}
NAMES = ('y', 'state', 'dx', 'ddt', 'dshared', 'drate', 'dstate')


def loop(x, dt, shared, rate, reset, state):
  """The definition."""

  def token(h, row):
    x, dt, (b, c), reset = row
    h = jnp.where(reset[:, None, None], 0, h) * jnp.exp(dt[..., None] * rate)
    h = h + (dt * x)[..., None] * b[:, None]
    return h, (h * c[:, None]).sum(-1)

  time = lambda x: jnp.swapaxes(x, 0, 1)
  shared = jnp.moveaxis(shared, (1, 2), (0, 1))
  last, y = jax.lax.scan(token, state, (*map(time, (x, dt)), shared, reset.T))
  return time(y), last


def problem(T, B=2, F=3, S=4, dtype='f8'):
  """(x, dt, shared, rate, state), reset, cotangents of (y, last state)."""
  rng = np.random.default_rng(0)
  normal = lambda *s: rng.normal(size=s).astype(dtype)
  dt, rate = np.abs(normal(B, T, F)), -np.exp(normal(F, S))
  dt[:, 1::3] = 0  # padding
  arrays = normal(B, T, F), dt, normal(B, T, 2, S), rate, normal(B, F, S)
  return arrays, rng.random((B, T)) < 0.1, (normal(B, T, F), normal(B, F, S))


def both(run, arrays, reset, cotangents):
  given = lambda *a: run(*a[:4], reset, a[4])
  return kernel_cases.with_gradients(given, arrays, cotangents)


wrong = functools.partial(kernel_cases.wrong, NAMES)


@pytest.mark.parametrize(
  'T, B, options',
  [
    (37, 2, {}), (37, 1, {}), (1, 2, {}), (1, 1, {}),
    (21, 2, dict(impl='xla')), (21, 1, dict(impl='xla')),
  ],
)  # fmt: skip
def test_equals_a_loop_over_tokens(T, B, options):
  with jax.enable_x64(True):
    case = problem(T, B)
    run = functools.partial(selective.selective_scan, **options)
    found = both(run, *case)
    assert {x.dtype for x in found} == {np.dtype('f8')}
    assert wrong(found, both(loop, *case), 1e-12) == []


@pytest.mark.parametrize('impl', ['auto', 'xla'])
def test_a_chunk_that_starts_from_nothing_is_found(monkeypatch, impl):
  whole = selective._chunk
  alone = lambda *args: whole(*args[:-1], 0 * args[-1])
  monkeypatch.setattr(selective, '_chunk', alone)
  with jax.enable_x64(True):
    case = problem(37)
    found = both(functools.partial(selective.selective_scan, impl=impl), *case)
    assert wrong(found, both(loop, *case), 1e-3) == list(NAMES)


def test_states_of_all_tokens_never_exist():
  """With gradients it takes a fourth of the decays alone; the loop does not."""
  B, T, F, S = 1, 2048, 256, 16
  arrays, reset, _ = problem(T, B, F, S, 'f4')

  def temporary(run):
    loss = lambda *a: run(*a[:4], reset, a[4])[0].sum()
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes

  states = 4 * B * T * F * S
  assert temporary(loop) > states > 4 * temporary(selective.selective_scan)


@pytest.fixture
def interpreted(monkeypatch):
  """interpreted(platform): the op by that kernel."""

  # Fewer copies of a token in a program, more chunks.
  monkeypatch.setattr(selective_gpu, 'GROUP', 2)
  monkeypatch.setattr(selective_gpu, 'CHUNK', 8)

  def run(kernel):
    chosen = kernel_cases.with_options(kernel, KERNELS[kernel], interpret=True)
    monkeypatch.setattr(registry, 'resolve', lambda *_: chosen)
    return selective.selective_scan

  return run


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize(
  'T, F, S',
  [(37, 3, 4), (1, 3, 4), (150, 40, 4), (16, 130, 16)],  # chunks; channels
)
def test_kernels_equal_the_loop(interpreted, kernel, T, F, S):
  case = problem(T, 2, F, S, 'f4')
  found = both(interpreted(kernel), *case)
  assert {x.dtype for x in found} == {np.dtype('f4')}
  with jax.enable_x64(True):
    arrays, reset, cotangents = case
    exact = jax.tree.map(np.float64, (arrays, cotangents))
    wanted = both(loop, exact[0], reset, exact[1])
  assert wrong(found, wanted, 2e-6) == []


def test_the_gpu_kernel_is_traced_where_64_bits_are_on(interpreted):
  arrays, reset, cotangents = problem(37, dtype='f4')
  with jax.enable_x64(True):
    run = lambda *a: both(interpreted('gpu'), a, reset, cotangents)
    found = jax.eval_shape(run, *arrays)
  assert {x.dtype for x in found} == {np.dtype('f4')}


# Rows without a reset; at the first token; at the first of a segment, and its
# last; within one, twice.
RESETS = (), (0,), (24, 47), (30, 33), (149,)


def segmented(T, dirty):
  """A problem whose states reach over segments; a state before a reset: NaN."""
  arrays, _, cotangents = problem(T, len(RESETS), dtype='f4')
  x, dt, shared, rate, state = arrays
  state[1] = np.nan if dirty else 1
  reset = np.zeros((len(RESETS), T), bool)
  for row, at in zip(reset, RESETS, strict=True):
    row[[t for t in at if t < T]] = True
  return (x, dt, shared, 0.03 * rate, state), reset, cotangents


def segments(programs, T):
  return selective_gpu._sizes((len(RESETS), T, 3), 4, programs).segments


@pytest.mark.parametrize(
  'T, programs, count',
  [(151, 99, 7), (144, 15, 3), (151, 14, 1)],  # filled up; 3 are worth it
)
def test_segments_equal_the_loop(interpreted, monkeypatch, T, programs, count):
  assert segments(programs, T) == count
  for name in ('FORWARD', 'BACKWARD'):
    monkeypatch.setattr(selective_gpu, name, programs)
  case = segmented(T, dirty=True)
  found = both(interpreted('gpu'), *case)
  with jax.enable_x64(True):
    arrays, reset, cotangents = case
    exact = jax.tree.map(np.float64, (arrays, cotangents))
    wanted = both(loop, exact[0], reset, exact[1])
  assert wrong(found, wanted, 2e-6) == []


def test_a_reset_that_a_segment_forgets_is_found(interpreted, monkeypatch):
  whole = selective_gpu._maps

  def deaf(sizes, arrays, interpret):
    kept = *arrays[:3], jnp.ones_like(arrays[3]), *arrays[4:]
    left, _ = whole(sizes, kept, interpret)
    return left, whole(sizes, arrays, interpret)[1]

  monkeypatch.setattr(selective_gpu, '_maps', deaf)
  case = segmented(151, dirty=False)
  found = both(interpreted('gpu'), *case)
  assert wrong(found, both(loop, *case), 1e-3) == list(NAMES)


@pytest.mark.parametrize(
  'shape, forward, backward',
  [
    ((2, 4096, 2048), (16, 256), (8, 512)),
    ((2, 4100, 2048), (13, 320), (8, 576)),
    ((1, 1, 2048), (1, 1), (1, 1)),
    ((8, 4096, 4096), (1, 4096), (1, 4096)),  # programs enough
    ((1, 300, 32), (1, 300), (1, 300)),  # too few tokens
    ((1, 65536, 32), (256, 256), (256, 256)),  # no more than tokens of one
  ],
)
def test_how_many_segments(shape, forward, backward):
  for wanted, programs in ((forward, 'FORWARD'), (backward, 'BACKWARD')):
    most = getattr(selective_gpu, programs)
    assert selective_gpu._sizes(shape, 16, most)[3:] == wanted


@pytest.mark.parametrize('kernel', KERNELS)
def test_a_state_that_is_not_carried_between_chunks_is_found(
  interpreted, monkeypatch, kernel
):
  forward = KERNELS[kernel].forward

  def lost(*args, **options):
    y, last, starts = forward(*args, **options)
    return y, last, 0 * starts

  monkeypatch.setattr(KERNELS[kernel], 'forward', lost)
  case = problem(150, dtype='f4')
  found = both(interpreted(kernel), *case)
  gradients = ['dx', 'ddt', 'dshared', 'drate']
  assert set(wrong(found, both(loop, *case), 1e-3)) & set(gradients)


@pytest.mark.parametrize('kernel', [None, *KERNELS])
def test_a_dirty_slot_is_cleared_by_a_reset(interpreted, kernel):
  arrays, reset, _ = problem(9, dtype='f4')
  reset[:, 0] = True
  run = interpreted(kernel) if kernel else selective.selective_scan
  dirty = run(*arrays[:4], reset, np.full_like(arrays[4], np.nan))
  clean = run(*arrays[:4], reset, arrays[4])
  assert all(np.array_equal(*pair) for pair in zip(dirty, clean, strict=True))


@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_in_a_manual_region_with_checked_types(kernel):
  row, state = np.zeros((8, 16, 4), 'f4'), np.zeros((8, 4, 4), 'f4')
  shared, reset = np.zeros((8, 16, 2, 4), 'f4'), np.zeros((8, 16), bool)

  def run(x, dt, shared, reset, state):
    tokens = selective.SelectiveTokens(x, dt, shared, reset)
    rate = varying.same((state, np.zeros((4, 4), 'f4')))[1]
    return KERNELS[kernel].forward(tokens, rate, state)[:2]

  given = row, row, shared, reset, state
  found = kernel_cases.shapes_in_region(run, *given)
  assert found == [row.shape, state.shape]


def test_chunks_grow_as_the_root_of_the_length():
  lengths = 1, 256, 257, 1024, 2048, 65536
  chunks = [selective.chunk_of(t) for t in lengths]
  assert chunks == [16, 16, 32, 32, 64, 256]


def test_what_does_not_fit_is_an_error_with_both_shapes():
  (x, dt, shared, rate, state), reset, _ = problem(5, dtype='f4')
  for args, text in (
    ((x, dt[:, 1:], shared, rate), r'dt \(2, 4, 3\)'),
    ((x, dt, shared, rate.T), r'rate \(4, 3\)'),
    ((x, dt, shared, rate, reset[:, 1:]), r'reset is \(2, 4\)'),
    ((x, dt, shared, rate, reset, state[:1]), r'state is \(1, 3, 4\)'),
    ((x[:, :0], dt[:, :0], shared[:, :0], rate), '0 tokens'),
  ):
    with pytest.raises(errors.UserError, match=text):
      selective.selective_scan(*args)
  with pytest.raises(errors.UserError, match='needs a TPU'):
    selective.selective_scan(x, dt, shared, rate, impl='pallas_tpu')
