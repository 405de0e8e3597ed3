"""The attention kernels against the dense definition, run by interpreters.

Every output and every gradient, in float32 against float64. What only a
compiler finds is in ../test_compiled.py.
"""

import functools

import attention_cases
import chex
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
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
LIMITS = 2e-6, 1e-5  # of outputs and gradients in float32


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


CASES = {
  'odd': dict(T=37, sinks=True),
  'whole_blocks': dict(T=32, S=64, causal=False),  # nothing hides anything
  'two_sided': dict(T=40, S=70, N=6, K=1, causal=False, softcap=2.0),
  'packed': dict(T=70, window=20, packed=True),
  'everything': dict(
    T=45, S=70, V=32, window=9, softcap=3.0, packed=True, ordered=True,
    sinks=True,
  ),
}  # fmt: skip


def problem(name):
  return attention_cases.make('f4', H=16, block=16, **CASES[name])


@functools.cache
def expected(name):
  return attention_cases.exact(problem(name))


def attend(impl):
  return functools.partial(attention.attention, impl=impl)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('impl', [*KERNELS, 'xla'])
def test_equals_the_definition(kernels, impl, name):
  found = attention_cases.results(attend(impl), problem(name))
  attention_cases.compare(found, expected(name), *LIMITS)


@pytest.mark.parametrize('impl', ['tpu/xla', 'gpu/tpu'])
def test_the_passes_of_two_implementations_go_together(kernels, impl):
  found = attention_cases.results(attend(impl), problem('everything'))
  attention_cases.compare(found, expected('everything'), *LIMITS)


def test_the_cases_hold_rows_that_see_nothing():
  for name, floor in (('packed', attention.NEG), ('everything', None)):
    o, lse, dq, *_ = map(np.asarray, expected(name)[:3])
    dead = ~o.any(-1)
    assert dead.any() and not dead.all() and not dq[dead].any()
    if floor:
      assert (lse[dead] == floor).all()
    else:  # only its sink
      sinks = np.broadcast_to(problem(name).sinks, lse.shape)
      np.testing.assert_allclose(lse[dead], sinks[dead], rtol=1e-6)


@pytest.mark.parametrize('broken', ['segments', 'kinds'])
def test_the_comparison_would_catch_a_wrong_kernel(
  kernels, monkeypatch, broken
):
  case = problem('packed')
  if broken == 'segments':
    case = case._replace(segments=None)
  else:  # no block is masked
    right = attention_blocks.block_kinds
    wrong = lambda *args: (right(*args) > 0).astype(np.int32) * 2
    monkeypatch.setattr(attention_blocks, 'block_kinds', wrong)
  forward = jax.jit(lambda *x: attend('tpu')(*x, case.mask, case.segments))
  with pytest.raises(AssertionError):
    attention_cases.compare(forward(*case[:3]), expected('packed')[:2], *LIMITS)


# ------------------------------------------------------------ TPU semantics --


def tiny(interpret, gradients):
  """(o, lse) or (dq, dk, dv), and the same from the XLA form."""
  case = attention_cases.make('f4', B=1, T=16, N=2, K=1)
  segments = np.array([[1] * 6 + [2] * 7 + [0] * 3], np.int32)
  args = *case[:3], (segments, segments), None, case.mask
  launch = attention_blocks.Launch((8, 8), interpret)
  o, lse = attention_xla.forward(*args)
  if not gradients:
    return attention_tpu.forward(*args, launch), (o, lse)
  do, _ = case.cotangents
  rows = attention_blocks.QueryRows(lse, (o * do).sum(-1), do)
  wanted = attention_xla.backward(*args, rows)
  return attention_tpu.backward(*args, rows, launch), wanted


@pytest.mark.parametrize('gradients', [False, True])
def test_no_race_and_nothing_read_before_it_is_written(gradients):
  actual, wanted = tiny(kernel_cases.STRICT, gradients)
  chex.assert_trees_all_close(actual, wanted, rtol=1e-5, atol=1e-5)
  assert not kernel_cases.races()


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


@pytest.mark.parametrize('impl', [*KERNELS, 'xla'])
def test_bfloat16_is_no_worse_than_twice_a_dense_one(kernels, impl):
  case = attention_cases.make(
    jnp.bfloat16, B=1, T=64, N=2, K=1, H=32, scale=32**-0.5, block=16
  )
  do, dlse = case.cotangents
  case = case._replace(cotangents=(do, np.zeros(dlse.shape, 'f4')))
  low, names = jnp.bfloat16, attention_cases.NAMES[:5]
  ours = attention_cases.results(attend(impl), case)[:5]
  assert [x.dtype for x in ours] == [low, jnp.float32, low, low, low]
  dense = attention_cases.results(dense_bfloat16, case)
  wanted = attention_cases.exact(case)
  for name, a, b, x in zip(names, ours, dense, wanted, strict=False):
    error = lambda y, x=x: np.abs(np.asarray(y, 'f8') - np.asarray(x)).max()
    assert error(a) <= 2 * error(b) + 1e-6, name


# ------------------------------------------------------------------- meshes --


@pytest.mark.parametrize('impl', KERNELS)
def test_shards_of_rows_and_heads_equal_one_device(kernels, impl):
  q, k, v, _, mask, segments, _, (do, _) = problem('packed')
  sinks = np.float32([0.1, -1.0, 2.0, 0.5])
  args = q, k, v, do, sinks, segments

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
  with jax.set_mesh(mesh):
    run_local = jax.shard_map(
      local,
      in_specs=specs,
      out_specs=(*[heads] * 5, P('tensor')),
      check_vma=False,  # the interpreter does not pass it
    )
    actual = jax.jit(run_local)(*jax.device_put(args, specs))
  attention_cases.compare(actual, jax.jit(grads)(*args), 1e-6, 2e-6)
