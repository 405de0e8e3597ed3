"""attention against its dense definition: values, gradients, meshes.

Memory: tests/train/claims/attention/test_kernels.py.
"""

import dataclasses
import functools

import attention_cases
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla

MESH_AXES = ('data', 'fsdp', 'tensor')


make, compare = attention_cases.make, attention_cases.compare
results, exact = attention_cases.results, attention_cases.exact
CASES = {
  'one_block': dict(T=16, block=16),
  'one_token': dict(T=1),
  'odd': dict(T=131, block=16),
  'two_sided': dict(T=131, S=70, causal=False, block=3),
  'window': dict(T=131, window=20, block=16),
  'two_sided_window': dict(causal=False, window=5, block=8),
  'softcap': dict(N=3, K=3, softcap=2.0, block=16),
  'grouped': dict(N=6, K=1, V=4, block=16),
  'packed': dict(T=70, block=16, packed=True),
  'order': dict(T=21, S=45, block=16, ordered=True),
  'everything': dict(
    T=45, S=70, V=16, window=9, softcap=3.0, block=16, packed=True, ordered=True
  ),
  'everything_in_one_block': dict(
    T=45, S=70, window=9, softcap=3.0, block=4096, packed=True, ordered=True
  ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', CASES)
def test_equals_the_definition_in_float64(name):
  with jax.enable_x64(True):
    case = make(**CASES[name])
    actual = results(attention.attention, case)
    assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype('f8')}
    compare(actual, exact(case), 1e-12)


def test_definition_equals_a_loop():
  case = make(**CASES['everything'])
  (q, k, v, *_), mask = case, case.mask
  segments, order = case.segments, case.order
  with jax.enable_x64(True):
    o, lse = reference.attention_ref(q, k, v, mask, segments, order)
  for b, t, n in [(0, 0, 0), (0, 20, 1), (1, 7, 3), (1, 44, 2), (1, 30, 0)]:
    total, out = 0.0, 0.0
    for s in range(k.shape[1]):
      far = order[0][b, t] - order[1][b, s]
      same = 0 < segments[0][b, t] == segments[1][b, s]
      if same and 0 <= far < mask.window:
        z = 0.4 * q[b, t, n] @ k[b, s, n // 2]
        e = np.exp(3.0 * np.tanh(z / 3.0))
        total, out = total + e, out + e * v[b, s, n // 2]
    expected = np.log(total) if total else reference.NEG
    np.testing.assert_allclose(lse[b, t, n], expected, rtol=1e-12)
    np.testing.assert_allclose(o[b, t, n], out / (total or 1), atol=1e-12)


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
  case = make('f4', **CASES['packed'])
  do, dlse = case.cotangents
  dead, no_key = (ids == 0 for ids in case.segments)
  run = lambda *x: attention.attention(*x, case.mask, case.segments)

  def loss(*qkv):  # uses the lse of dead rows too, unmasked
    o, lse = run(*qkv)
    return (o * do).sum() + (lse * dlse).sum() * 1e-3, (o, lse)

  grads = jax.grad(loss, (0, 1, 2), has_aux=True)
  found = jax.jit(grads)(*case[:3])
  (dq, dk, dv), (o, lse) = jax.tree.map(np.asarray, found)
  assert dead.any() and not dead.all()
  assert not o[dead].any() and not dq[dead].any()
  assert (lse[dead] == np.float32(attention.NEG)).all()
  assert not dk[no_key].any() and not dv[no_key].any()
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_static_pairs_are_exactly_those_that_hold_a_visible_entry():
  for causal, window, block in [(1, 0, 8), (1, 11, 8), (0, 9, 8), (1, 8, 8)]:
    mask = attention.Mask(causal=bool(causal), window=window)
    ok = np.asarray(reference.visible(mask, 48, 48)[0])
    some = ok.reshape(6, block, 6, block).any((1, 3))
    pairs = attention_xla.visible_pairs(mask, 6, 6, block, True)
    np.testing.assert_array_equal(np.argwhere(some), pairs)


@pytest.mark.parametrize('bound', [1, 3, 64, 100, 256])
def test_blocks_cover_every_length(bound):
  for length in (*range(1, 40), 63, 64, 65, 255, 256, 257, 1000):
    block, count = attention_xla.block_size(length, bound)
    assert length <= block * count < length + block
    assert block <= -(-bound // 8) * 8


# ------------------------------------------------------------------- parts --


def walk_of(pairs, segments, order):
  """A traced list of pairs of blocks of 8, with two that say nothing."""
  pairs = np.concatenate([pairs, np.full((2, 2), -1)]).astype(np.int32)
  return attention_xla.Walk(jnp.asarray(pairs), 8, 8, segments, order)


def test_blocks_that_share_no_document_are_skipped_at_run_time():
  q, k, v, *_ = make('f4', B=1, T=16)
  segments = np.repeat([[1, 2]], 8, axis=1).reshape(1, 16)
  order = np.arange(16)[None]
  v[:, 8:] = np.nan  # 0 x nan would be nan
  rows = attention_xla.to_rows(q, 2)
  cols = attention_xla.to_cols(k), attention_xla.to_cols(v)

  def outputs(segments):
    walk = walk_of([[0, 0], [0, 1]], (segments,) * 2, (order,) * 2)
    mask = attention.Mask(causal=False)
    return attention_xla.accumulate(rows, *cols, walk, mask)[0][..., :8, :]

  assert np.isfinite(outputs(segments)).all()
  assert np.isnan(outputs(np.ones_like(segments))).any()


@pytest.mark.parametrize('platform, loops', [('cpu', True), ('gpu', False)])
def test_rows_of_a_batch_are_apart_on_a_cpu_alone(monkeypatch, platform, loops):
  target = registry.Target(platform, 'some device')
  monkeypatch.setattr(registry, 'current_target', lambda: target)
  q, k, v, *_ = make('f4', B=2, T=32)
  segments, mask = np.ones((2, 32), int), attention.Mask(block=8)
  run = lambda *x: attention_xla.forward(*x, (segments,) * 2, None, mask)
  assert ('while' in str(jax.make_jaxpr(run)(q, k, v))) == loops


def test_documents_that_a_row_packs_are_computed_apart():
  """Row by row: 0 x nan of a block that is not skipped would be nan."""
  q, k, v, *_ = make('f4', B=2, T=32)
  segments = np.stack([np.repeat([1, 2, 3, 0], 8), np.ones(32, int)])
  v[:, :8] = np.nan

  def loss(q, k, v):
    mask = attention.Mask(block=8)
    o, _ = attention.attention(q, k, v, mask, (segments,) * 2, impl='xla')
    return (o[:, 8:] ** 2).sum(), o

  (dq, dk, _), o = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
  for x in (o[0, 8:], dq[0, 8:], dk[0, 8:]):
    assert np.isfinite(x).all()
  assert np.isnan(o[1]).all()


# ------------------------------------------------------------------ meshes --


@pytest.fixture(scope='module')
def mesh():
  return jax.make_mesh((2, 2, 2), MESH_AXES)


HEADS = P(('data', 'fsdp'), None, 'tensor', None)
ROWS = P(('data', 'fsdp'), None)


close = functools.partial(chex.assert_trees_all_close, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('manual', [False, True])
def test_a_mesh_equals_one_device_without_gathering(mesh, manual):
  case = make(B=4, T=70, block=16, softcap=3.0, window=30)
  do, segments = case.cotangents[0], attention_cases.documents(4, 70)
  order = attention_cases.shuffled(4, 70)
  specs = (HEADS,) * 4 + (ROWS,) * 2
  out = ((HEADS,) * 3, HEADS) if manual else None

  def grads(q, k, v, do, segments, order):
    def loss(q, k, v):
      pair = (segments, segments), (order, order)
      o, lse = attention.attention(q, k, v, case.mask, *pair)
      lse = jnp.where(lse > attention.NEG / 2, lse, 0)
      return (o * do).sum() + jnp.sin(lse).sum(), o

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

  args = *case[:3], do, segments, order
  with jax.enable_x64(True):
    actual = kernel_cases.on_mesh(grads, mesh, args, specs, out)
    close(actual, jax.jit(grads)(*args))
  assert {x.sharding.spec for x in jax.tree.leaves(actual)} == {HEADS}


def test_a_program_that_gathers_is_found(mesh):
  x = np.ones((4, 8, 2, 4))
  with pytest.raises(AssertionError):
    kernel_cases.on_mesh(lambda x: jax.reshard(x, P()), mesh, (x,), (HEADS,))


def test_keys_that_do_not_vary_get_the_sum_of_their_gradients(mesh):
  """In a manual region: queries split over an axis, keys the same on all."""
  with jax.enable_x64(True):
    case = make(T=64, S=20, causal=False, block=16, scale=1.0)

    def loss(q, k, v, do):
      return (attention.attention(q, k, v, case.mask)[0] * do).sum()

    grads, args = jax.grad(loss, (1, 2)), (*case[:3], case.cotangents[0])
    specs = P(None, MESH_AXES), P(), P(), P(None, MESH_AXES)
    wanted = jax.jit(grads)(*args)
    with jax.set_mesh(mesh):
      local = jax.shard_map(grads, in_specs=specs, out_specs=(P(), P()))
      close(jax.jit(local)(*jax.device_put(args, specs)), wanted)


# ------------------------------------------------------------------ errors --


@pytest.mark.parametrize(
  'given, words',
  [
    (dict(N=5), '5 query heads.* 2 kv heads'),
    (dict(T=4, S=6), '4 queries and 6 keys'),
    (dict(window=-1), 'window is -1'),
    (dict(block=0), 'block is 0'),
  ],
)
def test_shapes_that_do_not_fit_are_errors_with_both_numbers(given, words):
  with pytest.raises(errors.UserError, match=words):
    case = make(**given)
    attention.attention(*case[:3], case.mask)


def test_segments_and_sinks_that_do_not_fit():
  q, k, v, _, mask, *_ = make(T=4)
  row = np.ones((2, 5), np.int32)
  with pytest.raises(errors.UserError, match='segments have shapes'):
    attention.attention(q, k, v, mask, (row, row))
  with pytest.raises(errors.UserError, match=r'shape \(3,\).* 4 query heads'):
    attention.attention(q, k, v, mask, sinks_N=jnp.ones(3))


@pytest.mark.parametrize('broken', ['segments', 'causal', 'dlse'])
def test_the_comparison_would_catch_a_wrong_mask_or_gradient(broken):
  with jax.enable_x64(True):
    case = make(**CASES['packed'])
    do, dlse = case.cotangents
    wrong = dict(
      segments=dict(segments=None),
      causal=dict(mask=dataclasses.replace(case.mask, causal=False)),
      dlse=dict(cotangents=(do, 0 * dlse)),
    )[broken]
    actual = results(attention.attention, case._replace(**wrong))
    expected = exact(case)
    with pytest.raises(AssertionError):
      compare(actual, expected, 1e-6)
