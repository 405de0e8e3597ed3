"""decode_attention against its definition; the cache is read in place."""

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
from paraxis.pallas_kernels.decode_attention import op as decode_attention


def cache(B=2, T=1, S=40, N=4, K=2, H=8, Hv=None, dtype='f8'):
  """q, k, v, and segments and order of a cache with empty slots."""
  rng = np.random.default_rng(0)
  shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
  q, k, v = (rng.normal(size=s).astype(dtype) for s in shapes)
  slots = rng.integers(0, 3, (B, S)).astype(np.int32)  # 0: empty
  queries = rng.integers(1, 3, (B, T)).astype(np.int32)
  order_k = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
  order_q = rng.integers(S // 2, S, (B, T)).astype(np.int32)
  return (q, k, v), (queries, slots), (order_q, order_k)


def decode(mask):
  def run(q, k, v, segments=None, order=None):
    return decode_attention.decode_attention(q, k, v, mask, segments, order)

  return jax.jit(run)


def close(actual, expected, tolerance=1e-12):
  chex.assert_trees_all_close(
    [*actual], [*expected], rtol=tolerance, atol=tolerance
  )


@pytest.mark.parametrize(
  'sizes,options',
  [
    (dict(), dict()),
    (dict(N=3, K=3, T=4), dict(window=9)),
    (dict(N=6, K=1, T=2, Hv=4), dict(softcap=2.0)),
    (dict(B=1, T=40), dict(causal=False, window=7, softcap=3.0)),
  ],
)
def test_equals_the_definition_in_float64(sizes, options):
  mask = attention.Mask(scale=0.3, **options)
  with jax.enable_x64(True):
    arrays, segments, order = cache(**sizes)
    actual = decode(mask)(*arrays, segments, order)
    assert {x.dtype for x in actual} == {np.dtype('f8')}
    expected = reference.attention_ref(*arrays, mask, segments, order)
    close(actual, expected)
    wrong = reference.attention_ref(*arrays, mask, None, order)
    with pytest.raises(AssertionError):  # the masks do matter here
      close(actual, wrong, 1e-6)


def test_no_mask_at_all():
  with jax.enable_x64(True):
    arrays, *_ = cache(T=3)
    mask = attention.Mask(causal=False)
    actual = decode_attention.decode_attention(*arrays, mask)
    close(actual, reference.attention_ref(*arrays, mask))


def test_equals_training_attention_row_by_row():
  """Token t decoded over the first t slots is row t of one full pass."""
  rng = np.random.default_rng(1)
  q, k, v = (rng.normal(size=(1, 12, n, 8)).astype('f4') for n in (4, 2, 2))
  mask = attention.Mask(scale=0.3, window=5)
  o, lse = jax.jit(lambda *x: attention.attention(*x, mask))(q, k, v)
  run = decode(mask)
  slots = np.arange(12, dtype=np.int32)[None]
  for t in range(12):
    segments = np.ones((1, 1), np.int32), (slots <= t).astype(np.int32)
    one = run(q[:, t : t + 1], k, v, segments, (slots[:, t : t + 1], slots))
    close(one, (o[:, t : t + 1], lse[:, t : t + 1]), 1e-5)


def test_a_query_that_sees_nothing():
  arrays, (queries, slots), order = cache(dtype='f4')
  mask = attention.Mask()
  o, lse = decode_attention.decode_attention(
    *arrays, mask, (queries, 0 * slots), order
  )
  assert not o.any() and (lse == np.float32(attention.NEG)).all()


def _temporary(run, *args):
  analysis = jax.jit(run).lower(*args).compile().memory_analysis()
  return analysis.temp_size_in_bytes


def test_the_cache_is_not_copied():
  arrays, segments, order = cache(B=1, S=2048, H=64, dtype='f4')
  mask, size = attention.Mask(), arrays[1].nbytes
  assert _temporary(decode(mask), *arrays, segments, order) < size / 4
  dense = lambda *x: reference.attention_ref(*x[:3], mask, *x[3:])
  assert _temporary(dense, *arrays, segments, order) > size


def test_heads_and_batch_sharded_equal_one_device():
  kinds = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), ('data', 'tensor'), axis_types=kinds)
  mask = attention.Mask(scale=0.3)
  run = decode(mask)
  with jax.enable_x64(True):
    arrays, segments, order = cache(T=2)
    expected = run(*arrays, segments, order)
    heads = NamedSharding(mesh, P('data', None, 'tensor'))
    rows = NamedSharding(mesh, P('data'))
    args = (
      *jax.device_put(arrays, heads),
      *jax.device_put((segments, order), rows),
    )
    with jax.set_mesh(mesh):
      program = run.lower(*args).compile()
      close(program(*args), expected)
  for moved in ('all-gather', 'all-reduce', 'all-to-all'):
    assert moved not in program.as_text()


def test_low_precision_cache():
  arrays, segments, order = cache(T=2, dtype='f4')
  low = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
  mask = attention.Mask(scale=0.3)
  o, lse = decode(mask)(*low, segments, order)
  assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
  expected = reference.attention_ref(*low, mask, segments, order)
  close((o.astype('f4'), lse), expected, 0.03)


def test_a_causal_mask_needs_the_order():
  arrays, segments, _ = cache()
  with pytest.raises(errors.UserError, match='1 queries and 40 keys'):
    decode_attention.decode_attention(*arrays, attention.Mask(), segments)


def rows_of(lengths, t, s):
  """segments and order that say what `ragged` says by lengths."""
  slots = np.arange(s, dtype=np.int32)
  filled = (slots < lengths[:, None]).astype(np.int32)
  last = lengths[:, None] - t + np.arange(t, dtype=np.int32)
  segments = np.ones((len(lengths), t), np.int32), filled
  return segments, (last, np.broadcast_to(slots, filled.shape))


@pytest.mark.parametrize('window', [0, 6])
def test_rows_that_begin_later(window):
  """What is in front of a range is as invisible as what is behind it."""
  begins = np.array([7, 0, 23, 39], np.int32)
  lengths = np.array([0, 40, 9, 1], np.int32)
  mask = attention.Mask(scale=0.3, window=window)
  with jax.enable_x64(True):
    arrays, *_ = cache(B=4)
    run = jax.jit(
      lambda *x: decode_attention.ragged(*x[:3], mask, x[3], begins_B=x[4])
    )

    def wanted(begins):
      segments, order = rows_of(begins + lengths, 1, 40)
      segments[1][order[1] < begins[:, None]] = 0
      return reference.attention_ref(*arrays, mask, segments, order)

    close(run(*arrays, lengths, begins), wanted(begins))
    with pytest.raises(AssertionError):
      one = (lengths == 1).astype(np.int32)  # a slot more in front
      close(run(*arrays, lengths + one, begins - one), wanted(begins))
  with pytest.raises(errors.UserError, match='begins have shape'):
    decode_attention.ragged(*arrays, mask, lengths, begins_B=begins[:1])


@pytest.mark.parametrize('T, window', [(1, 0), (1, 5), (3, 0), (3, 7)])
def test_rows_of_unequal_length(T, window):
  lengths = np.array([0, 3, 17, 40], np.int32)
  mask = attention.Mask(scale=0.3, window=window)
  sinks = np.array([-1.0, 0.0, 1.0, 2.0])
  with jax.enable_x64(True):
    arrays, *_ = cache(B=4, T=T)
    run = lambda *x: decode_attention.ragged(*x[:3], mask, *x[3:])
    expected = reference.attention_ref(*arrays, mask, *rows_of(lengths, T, 40))
    close(jax.jit(run)(*arrays, lengths), expected)
    short = rows_of(np.maximum(lengths - 1, 0), T, 40)
    with pytest.raises(AssertionError):
      close(
        jax.jit(run)(*arrays, lengths),
        reference.attention_ref(*arrays, mask, *short),
      )
    found = decode_attention.ragged(
      *arrays, mask, lengths, sinks_N=jnp.asarray(sinks)
    )
    expected = reference.attention_ref(
      *arrays, mask, *rows_of(lengths, T, 40), jnp.asarray(sinks)
    )
    close(found, expected)


def test_a_shared_prefix_equals_the_whole():
  rng, P, S = np.random.default_rng(0), 24, 40
  lengths = np.array([0, 1, 17, 40], np.int32)
  mask = attention.Mask(scale=0.3, softcap=2.0)
  with jax.enable_x64(True):
    (q, k, v), *_ = cache(B=4, S=S)
    prefix = [rng.normal(size=(P, 2, 8)) for _ in range(2)]
    run = lambda q, *x: decode_attention.shared_prefix(
      q, x[:2], x[2:4], mask, x[4]
    )
    found = jax.jit(run)(q, *prefix, k, v, lengths)
    whole = [
      np.concatenate([np.broadcast_to(a, (4, P, 2, 8)), b], 1)
      for a, b in zip(prefix, (k, v), strict=True)
    ]
    expected = reference.attention_ref(
      q, *whole, mask, *rows_of(lengths + P, 1, P + S)
    )
    close(found, expected)
    with pytest.raises(errors.UserError, match='2 queries, window 0'):
      run(np.concatenate([q, q], 1), *prefix, k, v, lengths)


def test_lengths_of_other_rows_are_refused():
  arrays, *_ = cache()
  with pytest.raises(errors.UserError, match=r'\(3,\).* each of the 2 rows'):
    decode_attention.ragged(*arrays, attention.Mask(), np.zeros(3, np.int32))
