"""gated_scan against a loop over tokens: outputs, last state, every gradient.

Legend: B batch, T tokens, H heads, K key size, V value size.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import gated_chunk
from paraxis.sharding.meter import flops

NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'd_state')


def by_hand(inputs, cotangents):
  """The definition and its derivatives, token by token, in NumPy."""
  (q, k, v, g, reset, now), (do, back) = inputs, cotangents
  groups = q.shape[2]
  q, k = (np.repeat(x, v.shape[2] // groups, 2) for x in (q, k))
  each = g.reshape(*q.shape[:3], -1)  # a decay per key, or one for all
  f = np.where(reset[..., None, None], 0, np.exp(each))[..., None]
  o, before = np.empty_like(v), []
  for t in range(q.shape[1]):
    before.append(now)
    now = f[:, t] * now + k[:, t, ..., None] * v[:, t, :, None]
    o[:, t] = (q[:, t, ..., None] * now).sum(-2)
  last = now
  dq, dk, dv, dg = (np.empty_like(x) for x in (q, k, v, each))
  for t in reversed(range(q.shape[1])):
    dq[:, t] = (now * do[:, t, :, None]).sum(-1)
    back = back + q[:, t, ..., None] * do[:, t, :, None]
    dk[:, t] = (back * v[:, t, :, None]).sum(-1)
    dv[:, t] = (back * k[:, t, ..., None]).sum(-2)
    now = before[t]
    kept = (back * f[:, t] * now).sum(-1)
    dg[:, t] = kept if g.ndim == 4 else kept.sum(-1, keepdims=True)
    back = f[:, t] * back
  dq, dk = (
    x.reshape(*x.shape[:2], groups, -1, x.shape[3]).sum(3) for x in (dq, dk)
  )
  return o, last, dq, dk, dv, dg.reshape(g.shape), back


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

  One decay a head: all heads share one q and k.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  G = 1 if scalar else H
  x = normal(B, T, H) if scalar else normal(B, T, H, K)
  reset = rng.random((B, T)) < 0.05
  inputs = normal(B, T, G, K), normal(B, T, G, K), normal(B, T, H, V)
  inputs += DECAYS[decay](x), reset, normal(B, H, K, V)
  return inputs, (normal(B, T, H, V), normal(B, H, K, V))


def cast(arrays, dtype):
  return [x if x.dtype == bool else x.astype(dtype) for x in arrays]


def both(fn, inputs, cotangents, dtype='f8'):
  """Outputs and gradients of all float inputs, as NAMES."""

  @jax.jit
  def run(q, k, v, g, state, reset, cotangents):
    outputs, back = jax.vjp(
      lambda q, k, v, g, state: fn(q, k, v, g, reset, state), q, k, v, g, state
    )
    return *outputs, *back(cotangents)

  *arrays, reset, state = cast(inputs, dtype)
  return run(*arrays, state, reset, tuple(cast(cotangents, dtype)))


faults = functools.partial(kernel_cases.errors_of, NAMES)


def close(actual, expected, tolerance):
  found = faults(actual, expected)
  assert max(found.values()) <= tolerance, found


def op(**options):
  return functools.partial(gated_scan.gated_scan, **options)


# ------------------------------------------------------------------ values --


@pytest.mark.parametrize(
  'T, chunk, decay, scalar',
  [
    (1, 0, 'mild', False),
    (63, 16, 'lost', False),
    (130, 32, 'mixed', False),
    (1, 8, 'strong', True),
    (63, 64, 'strong', True),
    (130, 16, 'lost', True),
  ],
)
def test_chunks_equal_the_loop_in_float64(T, chunk, decay, scalar):
  with jax.enable_x64(True):
    case = make(T, decay, scalar)
    actual = both(op(chunk=chunk), *case)
    assert {x.dtype for x in actual} == {np.dtype('f8')}
    close(actual, by_hand(*case), 1e-13)
    assert not actual[5][np.isneginf(case[0][3])].any()


@pytest.mark.parametrize('scalar', [False, True])
def test_token_by_token_equals_the_loop_in_float64(scalar):
  with jax.enable_x64(True):
    case = make(63, 'lost', scalar)
    close(both(op(impl='loop'), *case), by_hand(*case), 1e-13)


def test_no_resets_and_no_state_are_zeros():
  with jax.enable_x64(True):
    (q, k, v, g, reset, state), cotangents = make(40)
    bare = gated_scan.gated_scan(q, k, v, g)
    none = by_hand((q, k, v, g, 0 * reset == 1, 0 * state), cotangents)
    for a, b in zip(bare, none[:2], strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize('impl', ['xla', 'loop'])
def test_padding_changes_nothing(impl):
  """Tokens with k 0 and g 0 in the middle of a row leave the state alone."""
  with jax.enable_x64(True):
    (q, k, v, g, reset, state), _ = make(40)
    reset[:, 16:24] = False
    k[:, 16:24], g[:, 16:24] = 0, 0
    kept = np.r_[0:16, 24:40]
    short = [x[:, kept] for x in (q, k, v, g, reset)]
    o, last = gated_scan.gated_scan(q, k, v, g, reset, state, impl=impl)
    expected = gated_scan.gated_scan(*short, state, impl=impl)
    np.testing.assert_allclose(o[:, kept], expected[0], atol=1e-12)
    np.testing.assert_allclose(last, expected[1], atol=1e-12)


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
      found = faults(actual, by_hand(inputs, cotangents))
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
  close(both(op(chunk=32), *case, 'f4'), by_hand(*case), 1e-6)


def test_the_factored_form_is_right_until_it_overflows():
  (*x, g, reset, state), cotangents = make(16)
  case = (*x, g, reset & False, state), cotangents
  close(both(factored, *case, 'f4'), by_hand(*case), 1e-5)
  case = (*x, DECAYS['mixed'](x[0]), reset & False, state), cotangents
  assert not np.isfinite(both(factored, *case, 'f4')[0]).all()
  close(both(op(), *case, 'f4'), by_hand(*case), 1e-6)


def test_bfloat16_keeps_its_dtypes_and_sums_wider():
  inputs, cotangents = make(63)
  *low, _ = cast(inputs[:4], jnp.bfloat16)
  g, reset, state = inputs[3].astype('f4'), *cast(inputs[4:], 'f4')

  @jax.jit
  def run(q, k, v, g, state, do, d_state):
    fn = lambda *x: gated_scan.gated_scan(*x[:4], reset, x[4])
    outputs, back = jax.vjp(fn, q, k, v, g, state)
    return *outputs, *back((do, d_state))

  do, d_state = cast(cotangents[:1], jnp.bfloat16) + cast(cotangents[1:], 'f4')
  actual = run(*low, g, state, do, d_state)
  names = [str(x.dtype) for x in actual]
  half, single = 'bfloat16', 'float32'
  assert names == [half, single, half, half, half, single, single]
  exact = [*cast(low, 'f8'), *cast((g, reset, state), 'f8')]
  found = faults(actual, by_hand(exact, cast((do, d_state), 'f8')))
  for name, kind in zip(NAMES, names, strict=True):  # half an ulp, or f32
    assert found[name] < (2**-8 if kind == half else 2e-6), found


# ---------------------------------------------------- length over devices --


@pytest.mark.parametrize('scalar', [False, True])
def test_pieces_of_the_length_compose(scalar):
  """Each piece from zero, the states composed, the outputs corrected."""

  def pieces(q, k, v, g, reset, state):
    out = []
    for at in (slice(0, 20), slice(20, 40), slice(40, 60)):
      part = [x[:, at] for x in (q, k, v, g, reset)]
      o, own = gated_scan.gated_scan(*part)
      q_, g_, reset_ = part[0], part[3], part[4]
      out.append(o + gated_scan.correction(q_, g_, reset_, state))
      state = gated_scan.decay(g_, reset_)[..., None] * state + own
    return jnp.concatenate(out, 1), state

  with jax.enable_x64(True):
    inputs, cotangents = make(60, 'mild', scalar)
    inputs[4][0, 20:40] = False  # a piece that lets the state through
    inputs[4][1, 25] = True
    case = inputs, cotangents
    close(both(pieces, *case), by_hand(*case), 1e-13)
    whole = [np.asarray(x) for x in (inputs[3][:, :20], inputs[4][:, :20])]
    free = gated_scan.decay(whole[0])
    total = whole[0].sum(1)[..., None] if scalar else whole[0].sum(1)
    np.testing.assert_allclose(free, np.exp(total), rtol=1e-12)


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


def _grads(q, k, v, g, reset, state, do, d_state):
  fn = lambda *x: gated_scan.gated_scan(*x[:4], reset, x[4], chunk=16)
  outputs, back = jax.vjp(fn, q, k, v, g, state)
  return *outputs, *back((do, d_state))


OUT = (SPECS[2], SPECS[5], *SPECS[:4], SPECS[5])


@pytest.mark.parametrize('manual', [False, True])
def test_a_mesh_equals_one_device_and_sends_nothing(manual):
  mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
  with jax.enable_x64(True):
    inputs, cotangents = make(40, B=4)
    args = *inputs, *cotangents
    placed = [
      jax.device_put(x, NamedSharding(mesh, s))
      for x, s in zip(args, SPECS, strict=True)
    ]
    run = _grads
    with jax.set_mesh(mesh):
      if manual:
        run = jax.shard_map(run, in_specs=SPECS, out_specs=OUT)
      program = jax.jit(run).lower(*placed).compile()
      actual = program(*placed)
    close(actual, by_hand(inputs, cotangents), 1e-13)
  assert [x.sharding.spec for x in actual] == list(OUT)
  text = program.as_text()
  for moved in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'):
    assert moved not in text


# ------------------------------------------------------------------ errors --


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


def test_what_runs_where():
  cpu = registry.explain('gated_scan', registry.Target('cpu', 'cpu'))
  assert [name for name, chosen, _ in cpu if chosen] == ['xla']
