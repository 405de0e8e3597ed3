"""attention against its dense definition: values, gradients, memory, meshes."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla

MESH_AXES = ('data', 'fsdp', 'tensor')


def make(B=2, T=37, S=None, N=4, K=2, H=8, Hv=None, dtype='f8'):
  """q, k, v, a cotangent for o and one for lse."""
  rng, S = np.random.default_rng(0), S or T
  shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
  shapes += (B, T, N, Hv or H), (B, T, N)
  return [rng.normal(size=s).astype(dtype) for s in shapes]


def packed(B, T, seed=1):
  """Two documents and padding per row; row 0 starts with padding."""
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(0, 4, (B, T)), axis=1)
  segments[0, :3], segments[-1, -5:] = 0, 0
  return segments.astype(np.int32)


def shuffled(B, T, seed=2):
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(T) for _ in range(B)]).astype(np.int32)


def both(fn, mask, arrays, segments, order):
  """(o, lse) and the gradients of a loss that uses both outputs."""
  q, k, v, do, dlse = arrays

  def loss(q, k, v):
    o, lse = fn(q, k, v, mask, segments, order)
    seen = lse > attention.NEG / 2
    used = jnp.where(seen, lse, 0)
    return (o * do).sum() + (jnp.sin(used) * dlse).sum(), (o, lse)

  run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
  (_, outputs), grads = jax.jit(run)(q, k, v)
  return *outputs, *grads


def compare(actual, expected, tolerance):
  for name, a, b in zip(
    ('o', 'lse', 'dq', 'dk', 'dv'), actual, expected, strict=True
  ):
    a, b = np.asarray(a, 'f8'), np.asarray(b, 'f8')
    assert np.isfinite(a).all(), name
    scale = max(1, np.abs(np.where(b > -1e29, b, 0)).max())
    np.testing.assert_allclose(a, b, atol=tolerance * scale, rtol=tolerance,
                               err_msg=name)  # fmt: skip


CASES = {
  'one_block': (dict(T=16), dict(block=16), '', ''),
  'one_token': (dict(T=1), dict(), '', ''),
  'odd': (dict(T=131), dict(block=16), '', ''),
  'two_sided': (dict(T=131, S=70), dict(causal=False, block=16), '', ''),
  'window': (dict(T=131), dict(window=20, block=16), '', ''),
  'two_sided_window': (dict(), dict(causal=False, window=5, block=8), '', ''),
  'softcap': (dict(N=3, K=3), dict(softcap=2.0, block=16), '', ''),
  'grouped': (dict(N=6, K=1, Hv=4), dict(block=16), '', ''),
  'packed': (dict(T=70), dict(block=16), 'packed', ''),
  'order': (dict(T=21, S=45), dict(block=16), '', 'order'),
  'everything': (
    dict(T=45, S=70, Hv=16),
    dict(window=9, softcap=3.0, block=16),
    'packed',
    'order',
  ),
}  # fmt: skip


def problem(name, dtype='f8'):
  sizes, options, segments, order = CASES[name]
  arrays = make(**sizes, dtype=dtype)
  B, T, S = *arrays[0].shape[:2], arrays[1].shape[1]
  mask = attention.Mask(scale=0.4, **options)
  segments = (packed(B, T), packed(B, S, 5)) if segments else None
  order = (shuffled(B, T), shuffled(B, S, 3)) if order else None
  return mask, arrays, segments, order


@pytest.mark.parametrize('name', CASES)
def test_equals_the_definition_in_float64(name):
  with jax.enable_x64(True):
    case = problem(name)
    actual = both(attention.attention, *case)
    expected = both(reference.attention_ref, *case)
    assert {x.dtype for x in actual} == {np.dtype('f8')}
    compare(actual, expected, 1e-12)


@pytest.mark.parametrize('name', ['odd', 'everything'])
def test_equals_the_definition_in_float32(name):
  actual = both(attention.attention, *problem(name, 'f4'))
  with jax.enable_x64(True):
    mask, arrays, segments, order = problem(name, 'f4')
    arrays = [x.astype('f8') for x in arrays]
    expected = both(reference.attention_ref, mask, arrays, segments, order)
  compare(actual, expected, 1e-5)


def test_definition_equals_a_loop():
  mask, (q, k, v, *_), segments, order = problem('everything')
  with jax.enable_x64(True):
    o, lse = reference.attention_ref(q, k, v, mask, segments, order)
  B, T, N, _ = q.shape
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
  mask, arrays, segments, order = problem('packed', 'f4')
  q, k, v, do, dlse = arrays
  dead = segments[0] == 0

  def loss(q, k, v):  # uses the lse of dead rows too, unmasked
    o, lse = attention.attention(q, k, v, mask, segments)
    return (o * do).sum() + (lse * dlse).sum() * 1e-3

  o, lse = attention.attention(q, k, v, mask, segments)
  dq, dk, dv = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
  assert dead.any() and not dead.all()
  assert not np.asarray(o)[dead].any() and not np.asarray(dq)[dead].any()
  assert (np.asarray(lse)[dead] == np.float32(attention.NEG)).all()
  no_key = segments[1] == 0
  assert not np.asarray(dk)[no_key].any() and not np.asarray(dv)[no_key].any()
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_bfloat16_keeps_its_dtype_and_accumulates_wider():
  mask, arrays, *_ = problem('odd', 'f4')
  low = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
  run = jax.jit(lambda *x: attention.attention(*x, mask))
  o, lse = run(*low)
  assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
  expected = reference.attention_ref(*low, mask)
  np.testing.assert_allclose(o.astype('f4'), expected[0], atol=0.03)
  np.testing.assert_allclose(lse, expected[1], atol=1e-5)
  grads = jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2))
  assert {g.dtype for g in grads(*low)} == {jnp.dtype(jnp.bfloat16)}


def test_the_block_size_does_not_change_the_result():
  with jax.enable_x64(True):
    _, arrays, segments, order = problem('everything')
    results = [
      both(attention.attention, attention.Mask(window=9, block=b), arrays,
           segments, order)
      for b in (3, 16, 4096)
    ]  # fmt: skip
    for other in results[1:]:
      compare(results[0], other, 1e-12)


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


def in_parts(mask, arrays, segments, order):
  """(o, lse), (dq, dk, dv) from two halves of the keys, merged and added."""
  q, k, v, do, _ = arrays
  kv, half = k.shape[2], k.shape[1] // 2
  rows = lambda x: attention_xla.to_rows(x, kv)
  k, v = attention_xla.to_cols(k), attention_xla.to_cols(v)
  every = np.argwhere(np.ones((q.shape[1] // 8, half // 8)))
  parts = []
  for cut in (slice(0, half), slice(half, None)):
    both = [(x[0], x[1][:, cut]) for x in (segments, order)]
    parts.append((k[:, :, cut], v[:, :, cut], walk_of(every, *both)))
  a, b = (attention_xla.accumulate(rows(q), *part, mask) for part in parts)
  o, lse = attention_xla.finish(*attention_xla.merge(a, b))
  side = lse, (o * rows(do)).sum(-1), rows(do)
  grads = [
    attention_xla.gradients(rows(q), k, v, side, walk, mask)
    for k, v, walk in parts
  ]
  dq = attention_xla.from_rows((grads[0][0] + grads[1][0]) * mask.scale)
  dk, dv = (jnp.concatenate([g[i] for g in grads], 2) for i in (1, 2))
  columns = attention_xla.from_cols
  outputs = attention_xla.from_rows(o), attention_xla.from_rows(lse)
  return *outputs, dq, columns(dk) * mask.scale, columns(dv)


def test_parts_of_the_keys_merge_and_their_gradients_add():
  with jax.enable_x64(True):
    arrays = make(T=24, S=48)
    segments = packed(2, 24), packed(2, 48, 5)
    order = shuffled(2, 24), shuffled(2, 48, 3)
    mask = attention.Mask(window=30, softcap=3.0, scale=0.4)
    actual = jax.jit(in_parts, static_argnums=0)(mask, arrays, segments, order)
    arrays[4] = 0 * arrays[4]  # no cotangent for lse here
    wanted = both(reference.attention_ref, mask, arrays, segments, order)
    compare(actual, wanted, 1e-12)


def test_blocks_that_share_no_document_are_skipped_at_run_time():
  q, k, v, *_ = make(B=1, T=16, dtype='f4')
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


# ------------------------------------------------------------------ memory --


def _grads(fn, length):
  x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
  mask = attention.Mask(block=64)
  loss = lambda q, k, v: sum(y.sum() for y in fn(q, k, v, mask))
  return jax.jit(jax.grad(loss, (0, 1, 2))), (x, x, x)


@functools.cache
def _compiled(fn, length):
  run, args = _grads(fn, length)
  return run.lower(*args).compile()


def _has_square(fn, length):
  """Does any array in the traced or compiled program hold (L, L)?"""
  run, args = _grads(fn, length)
  shapes = re.findall(r'[fs]32\[([\d,]+)\]', str(jax.make_jaxpr(run)(*args)))
  shapes += re.findall(r'[fs]32\[([\d,]+)\]', _compiled(fn, length).as_text())
  return any(s.split(',').count(str(length)) >= 2 for s in shapes)


def _temporary(fn, length):
  return _compiled(fn, length).memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_and_no_square_array_exists():
  ratio = _temporary(attention.attention, 2048) / _temporary(
    attention.attention, 1024
  )
  assert ratio < 2.2
  assert not _has_square(attention.attention, 1024)


def test_the_memory_checks_would_catch_a_dense_implementation():
  dense = reference.attention_ref
  assert _temporary(dense, 2048) / _temporary(dense, 1024) > 3
  assert _has_square(dense, 1024)


# ------------------------------------------------------------------ meshes --


@pytest.fixture(scope='module')
def mesh():
  kinds = (AxisType.Explicit,) * 3
  return jax.make_mesh((2, 2, 2), MESH_AXES, axis_types=kinds)


HEADS = P(('data', 'fsdp'), None, 'tensor', None)
ROWS = P(('data', 'fsdp'), None)


def _sharded_case(mesh):
  mask = attention.Mask(block=16, softcap=3.0, window=30)
  q, k, v, do, _ = make(B=4, T=70, dtype='f8')
  segments, order = packed(4, 70), shuffled(4, 70)
  specs = (HEADS,) * 4 + (ROWS,) * 2

  def grads(q, k, v, do, segments, order):
    def loss(q, k, v):
      pair = (segments, segments), (order, order)
      o, lse = attention.attention(q, k, v, mask, *pair)
      lse = jnp.where(lse > attention.NEG / 2, lse, 0)
      return (o * do).sum() + jnp.sin(lse).sum(), o

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

  args = (q, k, v, do, segments, order)
  placed = [
    jax.device_put(x, NamedSharding(mesh, s))
    for x, s in zip(args, specs, strict=True)
  ]
  return grads, args, placed, specs


close = functools.partial(chex.assert_trees_all_close, rtol=1e-12, atol=1e-12)


def test_explicit_mesh_equals_one_device_without_gathering(mesh):
  with jax.enable_x64(True):
    grads, args, placed, _ = _sharded_case(mesh)
    expected = jax.jit(grads)(*args)
    with jax.set_mesh(mesh):
      program = jax.jit(grads).lower(*placed).compile()
      actual = program(*placed)
      whole = jax.jit(lambda q: jax.reshard(q, P()))
      gathers = whole.lower(placed[0]).compile().as_text()
    close(actual, expected)
  assert 'all-gather' in gathers  # what the check below looks for exists
  assert {x.sharding.spec for x in jax.tree.leaves(actual)} == {HEADS}
  text = program.as_text()
  for moved in ('all-gather', 'all-to-all', 'collective-permute'):
    assert moved not in text


def test_manual_region_equals_one_device(mesh):
  with jax.enable_x64(True):
    grads, args, placed, specs = _sharded_case(mesh)
    expected = jax.jit(grads)(*args)
    out = ((HEADS,) * 3, HEADS)
    with jax.set_mesh(mesh):
      local = jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=out)
      close(jax.jit(local)(*placed), expected)


def test_keys_that_do_not_vary_get_the_sum_of_their_gradients(mesh):
  """In a manual region: queries split over an axis, keys the same on all."""
  with jax.enable_x64(True):
    q, k, v, do, _ = make(B=2, T=64, S=20)
    mask = attention.Mask(causal=False, block=16)

    def loss(q, k, v, do):
      return (attention.attention(q, k, v, mask)[0] * do).sum()

    grads = jax.grad(loss, (1, 2))
    expected = jax.jit(grads)(q, k, v, do)
    specs = P(None, MESH_AXES), P(), P(), P(None, MESH_AXES)
    placed = [
      jax.device_put(x, NamedSharding(mesh, s))
      for x, s in zip((q, k, v, do), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
      local = jax.shard_map(
        grads, mesh=mesh, in_specs=specs, out_specs=(P(), P())
      )
      close(jax.jit(local)(*placed), expected)


# ------------------------------------------------------------------ errors --


def test_shapes_that_do_not_fit_are_errors_with_both_numbers():
  q, k, v, *_ = make(N=5, K=2)
  mask = attention.Mask()
  with pytest.raises(errors.UserError, match='5 query heads.* 2 kv heads'):
    attention.attention(q, k, v, mask)
  q, k, v, *_ = make(T=4, S=6)
  with pytest.raises(errors.UserError, match='4 queries and 6 keys'):
    attention.attention(q, k, v, mask)
  with pytest.raises(errors.UserError, match='segments have shapes'):
    row = np.ones((2, 4), np.int32)
    attention.attention(q, k, v, attention.Mask(causal=False), (row, row))
  with pytest.raises(errors.UserError, match='window is -1'):
    attention.Mask(window=-1)
  with pytest.raises(errors.UserError, match='block is 0'):
    attention.Mask(block=0)


@pytest.mark.parametrize('broken', ['segments', 'causal', 'dlse'])
def test_the_comparison_would_catch_a_wrong_mask_or_gradient(broken):
  with jax.enable_x64(True):
    mask, arrays, segments, _ = problem('packed')
    expected = both(reference.attention_ref, mask, arrays, segments, None)
    if broken == 'segments':
      segments = None
    if broken == 'causal':
      mask = attention.Mask(scale=0.4, block=16, causal=False)
    if broken == 'dlse':
      arrays = [*arrays[:4], 0 * arrays[4]]
    actual = both(attention.attention, mask, arrays, segments, None)
    with pytest.raises(AssertionError):
      compare(actual, expected, 1e-6)
