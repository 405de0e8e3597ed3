"""What the attention kernels take, which blocks they visit, that they compile.

Compiled ahead of time for TPUs and GPUs that are not there: a kernel that the
interpreter runs may still be refused.
"""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import adapters as attention_adapters
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding.meter import aot

CPU, TPU, GPU = kernel_cases.CPU, kernel_cases.TPU, kernel_cases.GPU


# ------------------------------------------------------------------- choice --


def spec(H=128, dtype='bfloat16', T=1024, mask=None, **given):
  x = (1, T, 2, H)
  mask = mask or attention.Mask()
  options = {'segments': False, 'order': False, **given}
  return attention.AttentionSpec(x, x, dtype, mask, **options)


def names(impl, target, spec=None):
  return tuple(i.name for i in attention.choose(impl, spec, target))


@pytest.mark.parametrize(
  'impl, target, chosen',
  [
    ('auto', CPU, ('xla', 'xla')),
    ('auto', TPU, ('pallas_tpu', 'pallas_tpu')),
    ('auto', GPU, ('pallas_gpu', 'pallas_gpu')),
    ('xla', TPU, ('xla', 'xla')),
    ('pallas_tpu/xla', TPU, ('pallas_tpu', 'xla')),
    ('xla/auto', GPU, ('xla', 'pallas_gpu')),
    ('splash', TPU, ('splash', 'pallas_tpu')),
    ('cudnn/xla', GPU, ('cudnn', 'xla')),
  ],
)
def test_each_pass_is_chosen(impl, target, chosen):
  assert names(impl, target) == names(impl, target, spec()) == chosen


@pytest.mark.parametrize(
  'impl, target, line',
  [
    ('pallas_tpu', CPU, 'needs a TPU, target is cpu'),
    ('xla/pallas_gpu', TPU, 'needs a GPU, target is TPU v5 lite'),
    ('xla/splash', TPU, 'splash has no backward pass'),
    ('xla/other', TPU, "no implementation 'other'"),
  ],
)
def test_what_cannot_run_is_an_error_with_its_reason(impl, target, line):
  with pytest.raises(errors.UserError, match=line):
    attention.choose(impl, spec(), target)


@pytest.mark.parametrize(
  'impl, target, given, reason',
  [
    ('pallas_tpu', TPU, dict(dtype='float64'), 'not float64'),
    ('pallas_tpu', TPU, dict(H=100), 'head size 100'),
    ('pallas_tpu', TPU, dict(H=512), 'head size 512'),
    ('pallas_tpu', TPU, dict(sharded=True), 'manual region'),
    ('pallas_tpu', TPU, dict(T=2**19, order=True), 'blocks to list'),
    ('pallas_gpu', GPU, dict(dtype='float64'), 'not float64'),
    ('pallas_gpu', GPU, dict(H=96), 'head size 96'),
    ('pallas_gpu', GPU, dict(H=256), 'head size 256'),
    ('pallas_gpu', GPU, dict(sharded=True), 'manual region'),
    ('pallas_gpu', GPU, dict(T=2**24), 'more than 2147483647'),
    ('splash', TPU, dict(order=True), 'takes no order'),
    ('splash', TPU, dict(T=100), 'length 100 is not'),
    ('cudnn', GPU, dict(segments=True), 'takes no segments'),
    ('cudnn', GPU, dict(mask=attention.Mask(softcap=2.0)), 'no softcap'),
    (
      'cudnn',
      GPU,
      dict(mask=attention.Mask(causal=False, window=4)),
      'only together with a causal',
    ),
  ],
)
def test_what_a_kernel_does_not_take(impl, target, given, reason):
  rows = registry.explain('attention', target, spec(**given))
  found = {name: (chosen, why) for name, chosen, why in rows}
  assert reason in found[impl][1]
  if impl.startswith('pallas'):  # auto goes on to the XLA form
    assert found['xla'] == (True, '')


def test_sinks_are_one_per_query_head():
  x = jnp.ones((1, 4, 2, 8))
  with pytest.raises(errors.UserError, match=r'shape \(3,\).* 2 query heads'):
    attention.attention(x, x, x, attention.Mask(), sinks_N=jnp.ones(3))


# ------------------------------------------------------------------- blocks --


def plans():
  """(Plan of 100 queries and keys in blocks of 16 x 32, visible_BTS)."""
  rng = np.random.default_rng(0)
  packed = np.sort(rng.integers(0, 4, (2, 100)), 1).astype(np.int32)
  order = np.stack([rng.permutation(100) for _ in range(2)]).astype(np.int32)
  near = np.arange(100, dtype=np.int32)[None] + np.array([[0], [7]], np.int32)
  for causal, window, segments, places in [
    (True, 0, None, None),
    (True, 30, None, None),
    (False, 0, None, None),
    (False, 9, None, None),
    (True, 0, packed, None),
    (False, 0, packed, None),
    (True, 40, packed, near),
    (True, 0, None, order),
  ]:
    mask = attention.Mask(causal=causal, window=window)
    pair = lambda x: None if x is None else (x, x)
    args = pair(segments), pair(places)
    plan = attention_blocks.plan((100, 100), *args, mask, (16, 32))
    ok = np.asarray(reference.visible(mask, 100, 100, *args))
    yield plan, np.broadcast_to(ok, (plan.kinds.shape[0], 100, 100))


def by_blocks(plan, ok, fill):
  """(B, R, C, 16, 32) of visible_BTS; what is past the end is `fill`."""
  (tp, sp), (b, t, s) = plan.padded, ok.shape
  ok = np.pad(ok, [(0, 0), (0, tp - t), (0, sp - s)], constant_values=fill)
  return ok.reshape(b, tp // 16, 16, sp // 32, 32).swapaxes(2, 3)


def test_kinds_are_true_of_every_pair():
  seen = set()
  for plan, ok in plans():
    kinds = np.asarray(plan.kinds)
    some = by_blocks(plan, ok, False).any((-1, -2))
    keys = np.pad(ok, [(0, 0), (0, 0), (0, plan.padded[1] - 100)])
    keys = np.pad(keys, [(0, 0), (0, 12), (0, 0)], mode='edge')
    every = by_blocks(plan, keys, False).all((-1, -2))
    assert not some[kinds == 0].any() and every[kinds == 2].all()
    seen |= set(kinds.flat)
  assert seen == {0, 1, 2}


def test_static_kinds_of_a_causal_mask_are_exact():
  plan, ok = next(plans())
  blocks = by_blocks(plan, ok, False)
  assert plan.static
  np.testing.assert_array_equal(plan.kinds > 0, blocks.any((-1, -2)))


@pytest.mark.parametrize('by_key', [False, True])
def test_lists_hold_every_visible_block_once(by_key):
  at = attention_blocks
  for plan, _ in plans():
    kinds = plan.kinds.swapaxes(1, 2) if by_key else plan.kinds
    entries, steps, size = at.flat(kinds, plan.most_blocks[by_key])
    kinds, columns_of = np.asarray(kinds), np.asarray(at.lists(kinds)[0])
    counts = np.asarray(at.lists(kinds)[1])
    for b, row in enumerate(np.asarray(entries).reshape(-1, size)):
      row = row[: int(steps)]
      live = row[at.KIND(row) > 0]
      places = list(zip(at.ROW(live), at.COLUMN(live), strict=True))
      assert places == [tuple(x) for x in np.argwhere(kinds[b] > 0)]
      np.testing.assert_array_equal(at.KIND(live), kinds[b][kinds[b] > 0])
      for end in (at.FIRST, at.LAST):  # each row begins and ends once
        np.testing.assert_array_equal(
          at.ROW(row[end(row)]), np.arange(kinds.shape[1])
        )
      for r, (full, every) in enumerate(counts[b]):
        listed = columns_of[b, r, :every]
        assert (kinds[b, r, listed[:full]] == 2).all()
        assert (kinds[b, r, listed[full:]] == 1).all()
        assert every == (kinds[b, r] > 0).sum() == len(set(listed))


def test_cost_is_that_of_the_visible_blocks():
  q, v = np.zeros((3, 64, 4, 8), 'f4'), np.zeros((3, 64, 2, 16), 'f4')
  plan = attention_blocks.plan((64, 64), None, None, attention.Mask(), (16, 16))
  pairs = 3 * 4 * 10 * 16 * 16  # 10 of 16 blocks
  found = [
    attention_blocks.cost(which, plan, q, v).flops
    for which in ('forward', 'dq', 'dkv')
  ]
  assert found == [2 * pairs * n for n in (8 + 16, 2 * 8 + 16, 2 * 8 + 2 * 16)]


def test_splash_gives_the_same_output_and_lse():
  rng = np.random.default_rng(0)
  make = lambda n: rng.normal(size=(1, 128, n, 128)).astype('f4')
  q, k, v = make(2), make(1), make(1)
  ids = np.repeat([[0, 1, 2, 0]], 32, axis=1).reshape(1, 128)
  ids = ids.astype(np.int32)
  mask = attention.Mask(scale=0.1, window=20, softcap=3.0)
  launch = attention_blocks.Launch((128, 128), True)
  args = q, k, v, (ids, ids), None, mask
  actual = attention_adapters.splash(*args, launch)
  wanted = attention_xla.forward(*args)
  chex.assert_trees_all_close(actual, wanted, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------- compiled --


def program(topology, impl, packed):
  """Gradients of attention, compiled: (text, Memory, bytes of q)."""
  make = lambda *s, t='bfloat16': jax.ShapeDtypeStruct(s, t)
  T = 1000 if packed else 1024
  q, k, rows = make(2, T, 8, 128), make(2, T, 2, 128), make(2, T, t='int32')
  options = dict(window=300, softcap=5.0) if packed else {}
  mask = attention.Mask(scale=0.1, **options)

  def loss(q, k, v, sinks, rows):
    pair = (rows, rows) if packed else None
    sinks = sinks if packed else None
    o, lse = attention.attention(q, k, v, mask, pair, impl=impl, sinks_N=sinks)
    return o.astype(jnp.float32).sum() + jnp.where(lse > -1e9, lse, 0).sum()

  grads = jax.grad(loss, (0, 1, 2, 3))
  shapes = q, k, k, make(8, t='float32'), rows
  compiled, _ = kernel_cases.compile_on(topology, grads, *shapes)
  return compiled.as_text(), aot.memory(compiled), 2 * T * 8 * 128 * 2


def check(topology, impl, call, packed, calls):
  text, memory, size = program(topology, impl, packed)
  assert text.count(f'custom_call_target="{call}"') == calls
  # The scores alone would be eight times q in bfloat16.
  assert memory.peak <= 8 * size, (memory, size)


TPUS = 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1'


@kernel_cases.compiles('tpu')
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('name', TPUS)
def test_compiles_for_tpu(name, packed):
  check(name, 'auto', 'tpu_custom_call', packed, 3)


@kernel_cases.compiles('tpu')
def test_the_check_would_find_that_no_kernel_is_there():
  with pytest.raises(AssertionError):
    check('v5e:2x2', 'xla', 'tpu_custom_call', False, 3)
  text, *_ = program('v5e:2x2', 'splash/xla', False)
  assert text.count('tpu_custom_call') == 1


@kernel_cases.compiles('tpu')
@pytest.mark.parametrize('manual', [True, False])
def test_on_a_mesh_of_tpus(manual):
  """In a manual region the kernel runs; else XLA, which can be spread."""
  t = aot.topology('v5e:2x2')
  kinds = (jax.sharding.AxisType.Explicit,) * 2
  mesh = jax.sharding.Mesh(
    np.array(t.devices).reshape(2, 2), ('data', 'tensor'), axis_types=kinds
  )
  heads = P('data', None, 'tensor')
  x = jax.ShapeDtypeStruct(
    (2, 256, 4, 128), 'bfloat16', sharding=NamedSharding(mesh, heads)
  )

  def grads(q, k, v):
    loss = lambda *x: attention.attention(*x, attention.Mask())[0].sum()
    return jax.grad(loss, (0, 1, 2))(q, k, v)

  with t.context(), jax.set_mesh(mesh):
    if manual:
      grads = jax.shard_map(grads, in_specs=heads, out_specs=heads)
    traced = jax.jit(grads).trace(x, x, x)
    text = aot.compile_for(t, 'attention', traced).as_text()
  assert text.count('tpu_custom_call') == (3 if manual else 0)


@kernel_cases.compiles('cuda')
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('name', kernel_cases.ONE_GPU)
def test_compiles_for_gpu(name, packed):
  check(name, 'auto', '__gpu$xla.gpu.triton', packed, 3)


@kernel_cases.compiles('cuda')
def test_compiles_with_cudnn():
  text, *_ = program('h200:1', 'cudnn', False)
  assert '__cudnn$fmhaSoftmax' in text
  assert text.count('__gpu$xla.gpu.triton') == 2
