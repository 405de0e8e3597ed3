"""gated_scan against a loop over tokens: outputs, last state, every gradient.

The kernels run in the interpreter, inside the op and its custom_vjp.

Legend: B batch, T tokens, H heads, K key size, V value size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import gated_chunk
from paraxis.pallas_kernels.scans import gated_gpu as gated_scan_gpu
from paraxis.pallas_kernels.scans import gated_tpu as gated_scan_tpu
from paraxis.sharding.meter import flops

NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'd_state')
KERNELS = dict(tpu=gated_scan_tpu, gpu=gated_scan_gpu)


def loop(q, k, v, g, reset, state):
  """The definition, token by token."""
  heads = v.shape[2]

  def token(state, row):
    q, k, v, g, reset = row
    q, k = (jnp.repeat(x, heads // x.shape[1], 1) for x in (q, k))
    decay = jnp.exp(g.reshape(*g.shape[:2], -1))  # per key, or one for all
    decay = jnp.where(reset[:, None, None], 0, decay)
    state = decay[..., None] * state + k[..., None] * v[:, :, None]
    return state, (q[..., None] * state).sum(-2)

  rows = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, reset))
  state, o = jax.lax.scan(token, state, rows)
  return jnp.swapaxes(o, 0, 1), state


def log_sigmoid(x):
  return -np.log1p(np.exp(-x))


DECAYS = dict(
  mild=lambda x: log_sigmoid(x) / 16,
  strong=lambda x: 20 * log_sigmoid(x),
  mixed=lambda x: np.where(x > 0, -60.0, -0.04),
  lost=lambda x: np.where(x > 1, -np.inf, log_sigmoid(x) / 16),
)


def make(T, decay='mild', scalar=False, B=2, H=2, K=4, V=6):
  """(q, k, v, g, reset, state), (do, d_state); resets at 5% of the tokens.

  One decay a head: all heads share one q and k. In the middle is padding, which
  leaves the state as it is.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  G = 1 if scalar else H
  x = normal(B, T, H) if scalar else normal(B, T, H, K)
  reset = rng.random((B, T)) < 0.05
  q, k, v = normal(B, T, G, K), normal(B, T, G, K), normal(B, T, H, V)
  g = DECAYS[decay](x)
  if T > 32:
    k[:, 16:24], g[:, 16:24], reset[:, 16:24] = 0, 0, False
  inputs = q, k, v, g, reset, normal(B, H, K, V)
  return inputs, (normal(B, T, H, V), normal(B, H, K, V))


def cast(arrays, dtype):
  return [x if x.dtype == bool else x.astype(dtype) for x in arrays]


def both(fn, inputs, cotangents):
  """Outputs and gradients of all float inputs, as NAMES."""
  *arrays, reset, state = inputs
  run = lambda q, k, v, g, state: fn(q, k, v, g, reset, state)
  return kernel_cases.with_gradients(run, (*arrays, state), cotangents)


def single(inputs, cotangents):
  return cast(inputs, 'f4'), cast(cotangents, 'f4')


def exact(inputs, cotangents):
  """NAMES by the definition, in float64."""
  with jax.enable_x64(True):
    return both(loop, cast(inputs, 'f8'), cast(cotangents, 'f8'))


faults = functools.partial(kernel_cases.errors_of, NAMES)


def close(actual, expected, tolerance):
  found = faults(actual, expected)
  assert max(found.values()) <= tolerance, found


def op(**options):
  return functools.partial(gated_scan.gated_scan, **options)


# ------------------------------------------------------------------ values --


@pytest.mark.parametrize(
  'T, options, decay, scalar',
  [
    (1, dict(), 'mild', False),
    (63, dict(chunk=16), 'lost', False),
    (130, dict(chunk=32), 'mixed', False),
    (1, dict(chunk=8), 'strong', True),
    (63, dict(chunk=64), 'strong', True),
    (130, dict(chunk=16), 'lost', True),
    (63, dict(impl='loop'), 'lost', False),
    (63, dict(impl='loop'), 'lost', True),
  ],
)
def test_equals_the_loop_in_float64(T, options, decay, scalar):
  with jax.enable_x64(True):
    case = make(T, decay, scalar)
    actual = both(op(**options), *case)
    assert {x.dtype for x in actual} == {np.dtype('f8')}
    close(actual, exact(*case), 1e-13)
    assert not actual[5][np.isneginf(case[0][3])].any()


@pytest.mark.parametrize('name', ['xla', 'loop'])
def test_a_dirty_slot_is_cleared_by_a_reset(name):
  inputs, _ = make(9)
  *arrays, reset, state = cast(inputs, 'f4')
  reset[:, 0] = True
  run = lambda state: gated_scan.gated_scan(*arrays, reset, state, impl=name)
  for dirty, clean in zip(
    run(np.full_like(state, np.nan)), run(state), strict=True
  ):
    np.testing.assert_array_equal(dirty, clean)


def test_no_resets_and_no_state_are_zeros():
  with jax.enable_x64(True):
    (q, k, v, g, reset, state), cotangents = make(40)
    bare = gated_scan.gated_scan(q, k, v, g)
    none = exact((q, k, v, g, 0 * reset == 1, 0 * state), cotangents)
    for a, b in zip(bare, none[:2], strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


def test_the_comparison_would_catch_what_is_missing():
  with jax.enable_x64(True):
    (*x, g, reset, state), (do, d_state) = make(40)
    actual = both(op(), (*x, g, reset, state), (do, d_state))
    for inputs, cotangents, wrong in (
      ((*x, g, reset & False, state), (do, d_state), {*NAMES}),
      ((*x, g, reset, 0 * state), (do, d_state), {'o', 'dq', 'dg'}),
      ((*x, 0.9 * g, reset, state), (do, d_state), {*NAMES}),
      ((*x, g, reset, state), (do, 0 * d_state), {*NAMES[3:]} - {'d_state'}),
    ):
      found = faults(actual, exact(inputs, cotangents))
      assert {n for n, e in found.items() if e > 1e-3} >= wrong, found


# ------------------------------------------------------------ strong decay --


def factored(q, k, v, g, reset, state):
  """The usual form with q e^b and k e^-b, b a running sum over all tokens."""
  del reset
  b = jnp.cumsum(g, 1)
  scores = jnp.einsum('bthk,bshk->bhts', q * jnp.exp(b), k * jnp.exp(-b))
  o = jnp.einsum('bhts,bshv->bthv', jnp.tril(scores), v)
  decay = jnp.exp(b[:, -1:] - b)
  last = jnp.einsum('bthk,bthv->bhkv', k * decay, v)
  last += jnp.exp(b[:, -1])[..., None] * state
  return o + jnp.einsum('bthk,bhkv->bthv', q * jnp.exp(b), state), last


@pytest.mark.parametrize('decay', ['strong', 'mixed'])
@pytest.mark.parametrize('scalar', [False, True])
def test_strong_decay_in_float32(decay, scalar):
  case = make(130, decay, scalar)
  close(both(op(chunk=32), *single(*case)), exact(*case), 1e-6)


def test_the_factored_form_is_right_until_it_overflows():
  (*x, g, reset, state), cotangents = make(16)
  case = (*x, g, reset & False, state), cotangents
  close(both(factored, *single(*case)), exact(*case), 1e-5)
  case = (*x, DECAYS['mixed'](x[0]), reset & False, state), cotangents
  assert not np.isfinite(both(factored, *single(*case))[0]).all()
  close(both(op(), *single(*case)), exact(*case), 1e-6)


# ----------------------------------------------------------------- kernels --


@pytest.fixture
def interpreted(monkeypatch):
  """Registers a module's kernels as implementation 'kernel', interpreted."""

  def use(module):
    kernel = kernel_cases.with_options('kernel', module, interpret=True)
    known = registry._OPS['gated_scan']
    monkeypatch.setitem(registry._OPS, 'gated_scan', (kernel, *known))
    monkeypatch.setitem(gated_scan.CHUNKS, 'kernel', 16)
    return op(impl='kernel')

  return use


@pytest.mark.parametrize('scalar, tokens', [(False, 8), (True, 16)])
def test_a_decay_per_key_has_chunks_of_its_own(
  scalar, tokens, interpreted, monkeypatch
):
  run = interpreted(gated_scan_gpu)
  monkeypatch.setitem(gated_scan.BY_KEY, 'kernel', 8)
  seen = []
  real = gated_scan.chunk_of
  note = lambda chunk, *more: seen.append(chunk) or real(chunk, *more)
  monkeypatch.setattr(gated_scan, 'chunk_of', note)
  case = make(20, 'mild', scalar, K=16, V=16)
  inputs, _ = single(*case)
  jax.eval_shape(run, *inputs)
  assert seen == [tokens]


@pytest.mark.parametrize('name', KERNELS)
@pytest.mark.parametrize(
  'T, decay, scalar', [(37, 'mixed', False), (20, 'mild', True)]
)
def test_kernels_equal_the_loop(
  name, T, decay, scalar, interpreted, monkeypatch
):
  monkeypatch.setattr(gated_scan_gpu, '_COLUMNS', 16)  # two blocks of V
  run = interpreted(KERNELS[name])
  case = make(T, decay, scalar, K=16, V=32)
  close(both(run, *single(*case)), exact(*case), 1e-6)


def test_a_kernel_that_forgets_the_state_is_found(interpreted, monkeypatch):
  whole = gated_scan_tpu.gated_chunk.forward
  forget = lambda x, state, precision: whole(x, 0 * state, precision)
  monkeypatch.setattr(gated_scan_tpu.gated_chunk, 'forward', forget)
  run = interpreted(gated_scan_tpu)
  case = make(37, K=16, V=32)
  found = faults(both(run, *single(*case)), exact(*case))
  assert min(found['o'], found['state']) > 0.1


@pytest.mark.parametrize('name', [*KERNELS, 'xla', 'loop'])
@pytest.mark.parametrize('scalar', [False, True])
def test_what_is_not_finite_passes_a_reset_of_no_other_chunk(
  name, scalar, interpreted
):
  run = op(impl=name, chunk=16 * (name == 'xla'))
  if name in KERNELS:
    run = interpreted(KERNELS[name])
  inputs, cotangents = single(*make(40, scalar=scalar, K=16, V=16))
  _, k, v, g, reset, _ = inputs
  reset[:], reset[:, 24] = False, True
  clean = both(run, inputs, cotangents)
  k[0, 3], v[0, 4], g[1, 5] = np.nan, np.inf, np.nan
  found = both(run, inputs, cotangents)
  assert np.isnan(found[0][:, 16:24]).any((1, 2, 3)).all()
  # What enters a chunk may reach all gradients in it.
  first = dict(o=24, state=0)
  for what, one, other in zip(NAMES[:-1], found, clean, strict=False):
    one, other = (y[:, first.get(what, 32) :] for y in (one, other))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', [*KERNELS, 'xla'])
def test_bfloat16_keeps_its_dtypes_and_sums_wider(name, interpreted):
  run = op() if name == 'xla' else interpreted(KERNELS[name])
  low = lambda arrays: cast(arrays, jnp.bfloat16)
  inputs, (do, d_state) = single(*make(63, K=16, V=32))
  inputs = *low(inputs[:3]), *inputs[3:]
  cotangents = *low([do]), d_state
  actual = both(run, inputs, cotangents)
  half, f4 = jnp.bfloat16, jnp.float32
  dtypes = [half, f4, half, half, half, f4, f4]
  assert [x.dtype for x in actual] == dtypes
  found = faults(actual, exact(inputs, cotangents))
  for name, dtype in zip(NAMES, dtypes, strict=True):  # half an ulp, or f32
    assert found[name] < (2**-8 if dtype == half else 2e-6), found


@pytest.mark.parametrize('name', KERNELS)
def test_a_manual_region_types_the_outputs(name):
  module = KERNELS[name]

  def run(q, k, v, g, reset, state):
    tokens = gated_chunk.GatedTokens(q, k, v, g, reset.astype('i4'))
    o, last, starts = module.forward(tokens, state, 16, True)
    return o, last, *module.backward(tokens, starts, (o, last), 16)

  inputs = cast(make(16, B=4, K=16, V=32)[0], 'f4')
  q, k, v, g, _, state = (x.shape for x in inputs)
  found = kernel_cases.shapes_in_region(run, *inputs)
  assert found == [v, state, q, k, v, g, state]


# ------------------------------------------------------------------- cost --


@pytest.mark.parametrize('scalar', [False, True])
@pytest.mark.parametrize('gradient', [False, True])
def test_the_cost_counts_the_products_of_the_program(scalar, gradient):
  B, T, H, K, V, C = 2, 64, 3, 8, 16, 16
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  x = gated_chunk.GatedTokens(
    shape(C, K), shape(C, K), shape(C, V),
    shape(1, C) if scalar else shape(C, K), shape(1, C),
  )  # fmt: skip
  state, do = shape(K, V), shape(C, V)
  precision = gated_chunk.precision_of('float32')
  if gradient:
    run = lambda x, s, d, t: gated_chunk.backward(x, s, d, t, precision)
    counted = flops.count(run, x, state, do, state)
  else:
    run = lambda x, s: gated_chunk.forward(x, s, precision)
    counted = flops.count(run, x, state)
  whole = gated_chunk.GatedTokens(
    shape(B, T, H, K), shape(B, T, H, K), shape(B, T, H, V),
    shape(B, T, H) if scalar else shape(B, T, H, K), shape(B, T),
  )  # fmt: skip
  stated = gated_chunk.cost(whole, C, gradient)
  assert stated.flops == counted.total * B * H * (T // C)
  assert stated.transcendentals > 0
  least = 4 * B * T * H * (2 * K + 2 * V)
  assert least < stated.bytes_accessed < 8 * least


def test_memory_grows_with_chunks_not_with_tokens():
  """The gradient of the loop keeps T states, that of chunks T / C."""
  K = V = 32
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  x, g = shape(1, 1024, 1, K), shape(1, 1024, 1)

  def temporary(**options):
    loss = lambda *a: gated_scan.gated_scan(*a, **options)[0].sum()
    run = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, g)
    return run.compile().memory_analysis().temp_size_in_bytes

  states = 4 * K * V * 1024
  assert temporary(impl='loop') > states > 2 * temporary(chunk=64)


# ------------------------------------------------------------------ meshes --

AXES = ('data', 'fsdp', 'tensor')
ROWS, HEADS = ('data', 'fsdp'), 'tensor'
SPECS = (
  *[P(ROWS, None, HEADS, None)] * 4, P(ROWS, None), P(ROWS, HEADS, None, None),
  P(ROWS, None, HEADS, None), P(ROWS, HEADS, None, None),
)  # fmt: skip


OUT = (SPECS[2], SPECS[5], *SPECS[:4], SPECS[5])


@pytest.mark.parametrize('manual', [False, True])
def test_a_mesh_equals_one_device_and_sends_nothing(manual):
  mesh, out = jax.make_mesh((2, 2, 2), AXES), OUT if manual else None
  with jax.enable_x64(True):
    inputs, cotangents = make(40, B=4)
    args = *inputs, *cotangents
    run = lambda *args: both(op(chunk=16), args[:6], args[6:])
    actual = kernel_cases.on_mesh(run, mesh, args, SPECS, out)
    close(actual, exact(inputs, cotangents), 1e-13)
  assert [x.sharding.spec for x in actual] == list(OUT)


# ------------------------------------------------------------------ errors --


def test_a_gpu_takes_no_chunk_of_eight_and_no_array_that_is_spread():
  assert gated_scan.chunk_of(32, 8) == 8
  least = gated_scan.LEAST['pallas_gpu']
  assert [gated_scan.chunk_of(c, 8, least) for c in (16, 32)] == [16, 16]
  spec = gated_scan.GatedScanSpec((1, 8, 1, 16), 16, 'float32', 0)
  for spread, name in ((False, 'pallas_gpu'), (True, 'xla')):
    given = dataclasses.replace(spec, sharded=spread)
    found = registry.resolve('gated_scan', spec=given, target=kernel_cases.GPU)
    assert found.name == name


def test_what_does_not_fit_is_an_error_with_both_numbers():
  (q, k, v, g, reset, state), _ = make(20)
  run = gated_scan.gated_scan
  for match, args, options in (
    (r'k \(2, 20, 2, 3\)', (q, k[..., :3], v, g), {}),
    (r'v \(2, 19, 2, 6\)', (q, k, v[:, 1:], g), {}),
    (r'log_decay \(2, 20, 2, 1\) must be', (q, k, v, g[..., :1]), {}),
    (r'reset \(2, 19\) must be \(2, 20\)', (q, k, v, g, reset[:, 1:]), {}),
    ('need .2, 2, 4, 6.; it belongs', (q, k, v, g, reset, state[:1]), {}),
    ('q is int64, must be a float', (q.astype('i8'), k, v, g), {}),
    ('are empty', (q[:, :0], k[:, :0], v[:, :0], g[:, :0]), {}),
    ('chunk is 24, must be a power of two', (q, k, v, g), dict(chunk=24)),
    ('chunk is 4, must be .* at least 8', (q, k, v, g), dict(chunk=4)),
    ("no implementation 'cuda'", (q, k, v, g), dict(impl='cuda')),
    ('token by token', (q, k, v, g), dict(impl='loop', chunk=16)),
  ):
    with pytest.raises(errors.UserError, match=match) as e:
      run(*args, **options)
    assert '\n' not in str(e.value)
