"""delta_scan against a loop over tokens: outputs, last state, every gradient.

Legend: B batch, T tokens, G groups, H heads, K key size, V value size.
"""

import functools

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.scans import delta
from paraxis.pallas_kernels.scans import delta_batched
from paraxis.pallas_kernels.scans import delta_xla
from paraxis.sharding.meter import flops

NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'db', 'd_state')


def loop(q, k, v, g, beta, reset, state):
  """The definition, token by token."""
  heads = v.shape[2]

  def token(state, row):
    q, k, v, g, beta, reset = row
    q, k = (jnp.repeat(x, heads // x.shape[1], 1) for x in (q, k))
    state = jnp.where(reset[:, None, None, None], 0, state)
    state = state * jnp.exp(g)[..., None, None]
    read = (state * k[..., None]).sum(-2)
    more = beta[..., None] * (v - read)
    state = state + k[..., None] * more[..., None, :]
    return state, (state * q[..., None]).sum(-2)

  rows = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta, reset))
  state, o = jax.lax.scan(token, state, rows)
  return jnp.swapaxes(o, 0, 1), state


DECAYS = dict(
  mild=lambda x: -np.log1p(np.exp(x)) / 16,
  mixed=lambda x: np.where(x > 0, -60.0, -0.04),
  lost=lambda x: np.where(x > 1, -np.inf, -np.log1p(np.exp(x)) / 16),
)


def make(T, decay='mild', B=2, G=2, H=4, K=5, V=3):
  """(q, k, v, g, beta, reset, state), (do, d_state); resets at 5% of tokens.

  Keys have length 1, shares lie within 0 and 2. In the middle is padding, which
  leaves the state as it is.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  q, k = normal(2, B, T, G, K)
  k = k / np.sqrt((k * k).sum(-1, keepdims=True))
  g, beta = DECAYS[decay](normal(B, T, H)), rng.uniform(0, 2, (B, T, H))
  reset = rng.random((B, T)) < 0.05
  if T > 32:
    beta[:, 16:24], g[:, 16:24], reset[:, 16:24] = 0, 0, False
  inputs = q, k, normal(B, T, H, V), g, beta, reset, normal(B, H, K, V)
  return inputs, (normal(B, T, H, V), normal(B, H, K, V))


def cast(arrays, dtype):
  return [x if x.dtype == bool else x.astype(dtype) for x in arrays]


def both(fn, inputs, cotangents):
  """Outputs and gradients of all float inputs, as NAMES."""
  *arrays, reset, state = inputs
  run = lambda *x: fn(*x[:5], reset, x[5])
  return kernel_cases.with_gradients(run, (*arrays, state), cotangents)


def exact(inputs, cotangents):
  """NAMES by the definition, in float64."""
  with jax.enable_x64(True):
    return both(loop, cast(inputs, 'f8'), cast(cotangents, 'f8'))


def op(**options):
  return functools.partial(delta.delta_scan, **options)


wrong = functools.partial(kernel_cases.wrong, NAMES)


@pytest.mark.parametrize(
  'T, options, decay',
  [
    (1, dict(), 'mild'),
    (63, dict(chunk=16), 'lost'),
    (130, dict(chunk=32), 'mixed'),
    (40, dict(chunk=64), 'mild'),
    (63, dict(impl='loop'), 'lost'),
  ],
)
def test_equals_the_loop_in_float64(T, options, decay):
  with jax.enable_x64(True):
    case = make(T, decay)
    found = both(op(**options), *case)
    assert {x.dtype for x in found} == {np.dtype('f8')}
    assert wrong(found, exact(*case), 1e-12) == []
    assert not found[5][np.isneginf(case[0][3])].any()


def test_no_resets_and_no_state_are_zeros():
  with jax.enable_x64(True):
    (*arrays, reset, state), cotangents = make(40)
    bare = delta.delta_scan(*arrays)
    none = exact((*arrays, reset & False, 0 * state), cotangents)
    for a, b in zip(bare, none[:2], strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


def test_narrow_inputs_are_summed_in_float32():
  inputs, cotangents = make(40)
  wide, (do, d_state) = cast(inputs, 'f4'), cast(cotangents, 'f4')
  narrow = *(x.astype(jnp.bfloat16) for x in wide[:3]), *wide[3:]
  found = both(op(), narrow, (do.astype(jnp.bfloat16), d_state))
  dtypes = [x.dtype.name for x in found]
  assert dtypes == ['bfloat16', 'float32'] + ['bfloat16'] * 3 + ['float32'] * 3
  given = *(np.asarray(x, 'f8') for x in narrow[:3]), *inputs[3:]
  assert wrong(found, exact(given, cotangents), 0.02) == []


@pytest.mark.parametrize(
  'name, change, lacks',
  [
    ('reset', lambda x: x & False, {*NAMES}),
    ('state', lambda x: 0 * x, {'o', 'dq', 'dg'}),
    ('beta', lambda x: 0 * x + 1, {*NAMES}),
    ('g', lambda x: 0 * x, {*NAMES}),
  ],
)
def test_the_comparison_would_catch_what_is_missing(name, change, lacks):
  with jax.enable_x64(True):
    inputs, cotangents = make(40)
    at = ('q', 'k', 'v', 'g', 'beta', 'reset', 'state').index(name)
    other = [change(x) if i == at else x for i, x in enumerate(inputs)]
    found = both(op(), other, cotangents)
    assert lacks <= set(wrong(found, exact(inputs, cotangents), 1e-3))


def test_what_passes_through_a_piece():
  """R S adds to outputs, P S to the state, whatever enters."""
  with jax.enable_x64(True):
    (q, k, v, g, beta, reset, state), _ = make(40, 'mild')
    reset[0] = False
    values, first = delta.extended(v, 5, np.float64)
    o, last = delta.delta_scan(q, k, values, g, beta, reset, first)
    want, want_last = loop(q, k, v, g, beta, reset, state)
    more = np.einsum('bthk,bhkv->bthv', o[..., 3:], state)
    np.testing.assert_allclose(o[..., :3] + more, want, atol=1e-12)
    own, through = last[..., :3], last[..., 3:]
    _, left = delta.after((0 * through, state), (through, own))
    np.testing.assert_allclose(left, want_last, atol=1e-12)
    assert np.abs(more[0]).max() > 1e-3


def test_only_states_between_chunks_are_kept():
  """A gradient keeps T / C states; the loop keeps all T."""
  B, T, H, K, V = 1, 1024, 2, 32, 32
  inputs, _ = make(T, B=B, G=H, H=H, K=K, V=V)
  *arrays, reset, state = cast(inputs, 'f4')

  def temporary(run):
    loss = lambda *x: run(*x[:5], reset, x[5])[0].sum()
    grads = jax.grad(loss, tuple(range(6)))
    program = jax.jit(grads).lower(*arrays, state).compile()
    return program.memory_analysis().temp_size_in_bytes

  states = 4 * B * T * H * K * V
  assert temporary(loop) > states > 2 * temporary(op())


def test_flops_are_those_of_the_docstring():
  """Of each head, and of each group of heads."""
  B, T, G, H, K, V, C = 1, 64, 2, 6, 16, 8, 32
  of_head = 6 * K * V + 4 * C * V + 4 * C * C * 5  # 2^5 is C
  (*arrays, reset, state), _ = make(T, B=B, G=G, H=H, K=K, V=V)
  found = flops.count(op(chunk=C), *cast(arrays, 'f4'), reset, state).total
  assert found == B * T * (H * of_head + G * 4 * C * K)


def test_the_inverse_of_equal_keys_is_exact():
  """All pairs 1: each token undoes the one before it, and no other."""
  below = np.tril(np.ones((64, 64), 'f4'), -1)
  found = np.asarray(delta_xla.inverse(below))
  np.testing.assert_array_equal(found, np.eye(64) - np.eye(64, k=-1))
  power, series = np.eye(64, dtype='f4'), np.zeros((64, 64), 'f4')
  for _ in range(64):  # the negative: I - A + A^2 - ...
    series, power = series + power, -power @ below
  assert np.abs(series - found).max() > 1e3


def test_what_does_not_fit_is_an_error_with_both_shapes():
  (q, k, v, g, beta, reset, state), _ = make(16)
  given = cast((q, k, v, g, beta, reset, state), 'f4')
  for at, new, text in (
    (0, q[:, :, :1], 'do not fit'),
    (3, v, r'log_decay \(2, 16, 4, 3\) must be'),
    (4, g[:, :, :2], r'beta \(2, 16, 2\) must be \(2, 16, 4\)'),
    (4, reset[..., None].repeat(4, 2), 'beta is bool'),
    (5, reset[:, 1:], 'one per token'),
    (6, state[:1], 'belongs to another model or batch'),
  ):
    args = [new if i == at else x for i, x in enumerate(given)]
    with pytest.raises(errors.UserError, match=text):
      delta.delta_scan(*args)
  with pytest.raises(errors.UserError, match='chunk is 12'):
    delta.delta_scan(*given, chunk=12)
  with pytest.raises(errors.UserError, match='asked for a chunk of 16'):
    delta.delta_scan(*given, chunk=16, impl='loop')


def test_a_chunk_that_starts_from_nothing_is_found(monkeypatch):
  alone = lambda x, state, dot: delta_xla.chunk(x, 0 * state, dot)
  impl = delta.registry.Implementation(
    'alone',
    functools.partial(delta_xla._forward, alone),
    functools.partial(delta_xla._backward, alone),
  )
  monkeypatch.setattr(delta.registry, 'resolve', lambda *args: impl)
  monkeypatch.setitem(delta_xla.CHUNKS, 'alone', 16)
  with jax.enable_x64(True):
    case = make(40)
    assert wrong(both(op(), *case), exact(*case), 1e-3) == list(NAMES)


def batched(monkeypatch):
  """Lets the op run the form for a GPU, two chunks at once."""
  impl = delta.registry.Implementation(
    'batched', delta_batched.forward, delta_batched.backward
  )
  monkeypatch.setattr(delta.registry, 'resolve', lambda *args: impl)
  monkeypatch.setattr(delta_batched, 'BATCH', 2)


@pytest.mark.parametrize(
  'T, chunk, decay', [(1, 0, 'mild'), (130, 32, 'mixed'), (63, 16, 'lost')]
)
def test_batched_chunks_equal_the_loop(monkeypatch, T, chunk, decay):
  batched(monkeypatch)
  with jax.enable_x64(True):
    case = make(T, decay)
    expected = exact(*case)
    assert wrong(both(op(chunk=chunk), *case), expected, 1e-12) == []
    if T == 130:  # what a chunk passes on does matter
      maps = delta_batched._maps
      lost = lambda dot, x: [y * (i != 2) for i, y in enumerate(maps(dot, x))]
      monkeypatch.setattr(delta_batched, '_maps', lost)
      found = wrong(both(op(chunk=chunk), *case), expected, 1e-3)
      assert {'o', 'state', 'dk', 'dv'} <= set(found)


def test_a_gpu_takes_batched_chunks():
  found = {n: why for n, _, why in delta.registry.explain(delta.OP)}
  assert 'a loop over chunks takes less memory' in found['batched']
  gpu = delta.registry.Target('gpu', 'NVIDIA H200')
  assert delta.registry.resolve(delta.OP, target=gpu).name == 'batched'
