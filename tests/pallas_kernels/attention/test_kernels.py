"""The attention kernels against the dense definition, run by interpreters.

Every output and every gradient, in float32 against float64. What only a
compiler finds is in test_attention_compiled.py.
"""

import functools

import chex
import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.pallas_kernels.attention import xla as attention_xla

KERNELS = {'tpu': attention_tpu, 'gpu': attention_gpu}
NAMES = 'o', 'lse', 'dq', 'dk', 'dv', 'dsinks'


def interpreted(block=(16, 32), interpret=True):
  """Implementations 'tpu' and 'gpu' that run here, in small blocks."""
  launch = attention_blocks.Launch(block, interpret)
  return [
    kernel_cases.with_options(name, module, launch=launch)
    for name, module in KERNELS.items()
  ]


@pytest.fixture
def kernels(monkeypatch):
  """impl='tpu' and impl='gpu' are the interpreted kernels."""
  (xla,) = (i for i in registry._OPS['attention'] if i.name == 'xla')
  ops = {'attention': (*interpreted(), xla)}
  monkeypatch.setattr(registry, '_OPS', ops)


CASES = {  # sizes, mask, segments, order, sinks
  'odd': (dict(T=37), dict(), 0, 0, 1),
  'two_sided': (
    dict(T=40, S=70, N=6, K=1),
    dict(causal=False, softcap=2.0),
    0,
    0,
    0,
  ),
  'packed': (dict(T=70), dict(window=20), 1, 0, 0),
  'everything': (
    dict(T=45, S=70, Hv=32),
    dict(window=9, softcap=3.0),
    1,
    1,
    1,
  ),
}


def packed(T, seed):
  """Documents and padding (0) of two rows."""
  ids = np.random.default_rng(seed).integers(0, 4, (2, T))
  return np.sort(ids, axis=1).astype(np.int32)


def shuffled(T, seed):
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(T) for _ in range(2)]).astype(np.int32)


def problem(name):
  """(q, k, v, sinks), cotangents of o and lse, mask, segments, order."""
  sizes, options, segments, order, sinks = CASES[name]
  T, N, K = sizes['T'], sizes.get('N', 4), sizes.get('K', 2)
  S, H = sizes.get('S', T), 16
  width, rng = sizes.get('Hv', H), np.random.default_rng(0)
  make = lambda *shape: rng.normal(size=shape).astype('f4')
  arrays = make(2, T, N, H), make(2, S, K, H), make(2, S, K, width)
  arrays += (make(N) if sinks else None,)
  cotangents = make(2, T, N, width), make(2, T, N)
  same = S == T
  segments = (packed(T, 1), packed(S, 1 if same else 5)) if segments else None
  order = (shuffled(T, 2), shuffled(S, 3)) if order else None
  return (
    arrays,
    cotangents,
    attention.Mask(scale=0.4, **options),
    segments,
    order,
  )


def run(attend, case):
  """(o, lse, dq, dk, dv, dsinks) of attend(q, k, v, mask, ..., sinks)."""
  arrays, (do, dlse), mask, segments, order = case

  def loss(arrays):
    *qkv, sinks = arrays
    o, lse = attend(*qkv, mask, segments, order, sinks_N=sinks)
    used = jnp.where(lse > attention.NEG / 2, lse, 0)
    return (o * do).sum() + (jnp.sin(used) * dlse).sum(), (o, lse)

  (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
  return *out, *grads


@functools.cache
def expected(name):
  with jax.enable_x64(True):
    arrays, cotangents, *rest = problem(name)
    wide = lambda tree: jax.tree.map(lambda x: x.astype('f8'), tree)
    case = wide(arrays), wide(cotangents), *rest
    return run(reference.attention_ref, case)


def compare(actual, wanted, limits=(2e-6, 1e-5)):
  """Largest error: of outputs and of gradients, beside the largest value."""
  for name, a, b in zip(NAMES, actual, wanted, strict=True):
    if b is None:
      continue
    a, b = np.asarray(a, 'f8'), np.asarray(b, 'f8')
    dead = b <= attention.NEG / 2
    assert np.isfinite(a).all(), name
    np.testing.assert_array_equal(a <= attention.NEG / 2, dead, err_msg=name)
    scale = max(1, np.abs(np.where(dead, 0, b)).max())
    error = np.abs(np.where(dead, 0, a - b)).max() / scale
    assert error <= limits[name not in ('o', 'lse')], (name, error)


def attend(impl):
  return functools.partial(attention.attention, impl=impl)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('impl', KERNELS)
def test_equals_the_definition(kernels, impl, name):
  compare(run(attend(impl), problem(name)), expected(name))


@pytest.mark.parametrize('impl', ['tpu/xla', 'gpu/tpu'])
def test_the_passes_of_two_implementations_go_together(kernels, impl):
  compare(run(attend(impl), problem('everything')), expected('everything'))


def test_sinks_need_no_kernel(kernels):
  compare(run(attend('xla'), problem('everything')), expected('everything'))


def test_the_cases_hold_rows_that_see_nothing():
  for name, floor in (('packed', attention.NEG), ('everything', None)):
    o, lse, dq, *_ = map(np.asarray, expected(name)[:3])
    dead = ~o.any(-1)
    assert dead.any() and not dead.all() and not dq[dead].any()
    if floor:
      assert (lse[dead] == floor).all()
    else:  # only its sink
      sinks = np.broadcast_to(problem(name)[0][3], lse.shape)
      np.testing.assert_allclose(lse[dead], sinks[dead], rtol=1e-6)


@pytest.mark.parametrize('broken', ['segments', 'kinds'])
def test_the_comparison_would_catch_a_wrong_kernel(
  kernels, monkeypatch, broken
):
  (q, k, v, _), _, mask, segments, _ = problem('packed')
  if broken == 'segments':
    segments = None
  else:  # no block is masked
    right = attention_blocks.block_kinds
    wrong = lambda *args: (right(*args) > 0).astype(np.int32) * 2
    monkeypatch.setattr(attention_blocks, 'block_kinds', wrong)
  forward = jax.jit(lambda *x: attend('tpu')(*x, mask, segments))
  with pytest.raises(AssertionError):
    compare(forward(q, k, v), expected('packed')[:2])


# ------------------------------------------------------------ TPU semantics --


def tiny(interpret, gradients):
  """(o, lse) or (dq, dk, dv), and the same from the XLA form."""
  rng = np.random.default_rng(0)
  q, do = (rng.normal(size=(1, 16, 2, 8)).astype('f4') for _ in range(2))
  k, v = (rng.normal(size=(1, 16, 1, 8)).astype('f4') for _ in range(2))
  segments = np.array([[1] * 6 + [2] * 7 + [0] * 3], np.int32)
  args = q, k, v, (segments, segments), None, attention.Mask()
  launch = attention_blocks.Launch((8, 8), interpret)
  if not gradients:
    wanted = attention_xla.forward(*args)
    return attention_tpu.forward(*args, launch), wanted
  o, lse = attention_xla.forward(*args)
  rows = lse, (o * do).sum(-1), do
  wanted = attention_xla.backward(*args, rows)
  return attention_tpu.backward(*args, rows, launch), wanted


@pytest.mark.parametrize('gradients', [False, True])
def test_no_race_and_nothing_read_before_it_is_written(gradients):
  params = pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True)
  actual, wanted = tiny(params, gradients)
  chex.assert_trees_all_close(actual, wanted, rtol=1e-5, atol=1e-5)
  assert not interpret_pallas_call.races.races_found


def test_memory_that_is_not_set_would_be_found(monkeypatch):
  monkeypatch.setattr(attention_blocks, 'FIRST', lambda entry: entry < 0)
  params = pltpu.InterpretParams(uninitialized_memory='nan')
  actual, _ = tiny(params, False)
  assert np.isnan(actual[0]).any()


# ------------------------------------------------------------ low precision --


def dense_bfloat16(q, k, v, mask, segments, order, sinks_N):
  """What a plain model does: products of bfloat16, softmax in float32."""
  t, s = q.shape[1], k.shape[1]
  k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  z = mask.scale * dot('btnh,bsnh->bnts', q, k)
  ok = reference.visible(mask, t, s, segments, order)[:, None]
  z = jnp.where(ok, z, attention.NEG)
  p = jax.nn.softmax(z, -1).astype(q.dtype)
  o = dot('bnts,bsnh->btnh', p, v).astype(q.dtype)
  return o, jax.nn.logsumexp(z, -1).swapaxes(1, 2)


@pytest.mark.parametrize('impl', KERNELS)
def test_bfloat16_is_no_worse_than_twice_a_dense_one(kernels, impl):
  rng = np.random.default_rng(0)
  make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  arrays = *(make(1, 64, n, 32) for n in (2, 1, 1)), None
  cotangents = make(1, 64, 2, 32), np.zeros((1, 64, 2), 'f4')
  case = arrays, cotangents, attention.Mask(scale=32**-0.5), None, None
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: np.asarray(x, 'f8'), case[:2])
    exact = run(reference.attention_ref, (*wide, *case[2:]))
  ours, dense = run(attend(impl), case), run(dense_bfloat16, case)
  assert ours[0].dtype == jnp.bfloat16 and ours[1].dtype == jnp.float32
  for name, a, b, x in zip(NAMES[:5], ours, dense, exact, strict=False):
    error = lambda y, x=x: np.abs(np.asarray(y, 'f8') - np.asarray(x)).max()
    assert error(a) <= 2 * error(b) + 1e-6, name


# ------------------------------------------------------------------- meshes --


@pytest.mark.parametrize('impl', KERNELS)
def test_shards_of_rows_and_heads_equal_one_device(kernels, impl):
  arrays, (do, _), mask, segments, _ = problem('packed')
  sinks = np.float32([0.1, -1.0, 2.0, 0.5])
  args = *arrays[:3], do, sinks, segments

  def grads(q, k, v, do, sinks, segments):
    def loss(q, k, v, sinks):
      o, lse = attend(impl)(q, k, v, mask, segments, sinks_N=sinks)
      return (o * do).sum(), (o, lse)

    g, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, sinks)
    return *out, *g

  def local(*args):
    *rest, dsinks = grads(*args)
    return *rest, jax.lax.psum(dsinks, 'data')

  mesh = jax.make_mesh((2, 2), ('data', 'tensor'), devices=jax.devices()[:4])
  heads, rows = P('data', None, 'tensor'), P('data')
  specs = *[heads] * 4, P('tensor'), (rows, rows)
  placed = jax.device_put(
    args, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  )
  with jax.set_mesh(mesh):
    run_local = jax.shard_map(
      local,
      in_specs=specs,
      out_specs=(*[heads] * 5, P('tensor')),
      check_vma=False,  # the interpreter does not pass it
    )
    actual = jax.jit(run_local)(*placed)
  compare(actual, jax.jit(grads)(*args), (1e-6, 2e-6))
