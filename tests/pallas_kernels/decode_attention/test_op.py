"""decode_attention against its definition; the cache is read in place.

The cache is (B, K, S, H), the definition's keys are (B, S, K, H): `by_slots`.
"""

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import op as decode_attention


def cache(B=2, T=1, S=40, N=4, K=2, H=8, Hv=None, dtype='f8'):
  """q, k, v, and segments and order of a cache with empty slots."""
  rng = np.random.default_rng(0)
  shapes = (B, T, N, H), (B, K, S, H), (B, K, S, Hv or H)
  q, k, v = (rng.normal(size=s).astype(dtype) for s in shapes)
  slots = rng.integers(0, 3, (B, S)).astype(np.int32)  # 0: empty
  queries = rng.integers(1, 3, (B, T)).astype(np.int32)
  order_k = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
  order_q = rng.integers(S // 2, S, (B, T)).astype(np.int32)
  return (q, k, v), (queries, slots), (order_q, order_k)


def by_slots(q, k, v):
  return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


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
    plain = by_slots(*arrays)
    close(actual, reference.attention_ref(*plain, mask, segments, order))
    wrong = reference.attention_ref(*plain, mask, None, order)
    with pytest.raises(AssertionError):  # the masks do matter here
      close(actual, wrong, 1e-6)
    free = attention.Mask(causal=False)  # no mask at all
    close(decode(free)(*arrays), reference.attention_ref(*plain, free))


@pytest.mark.parametrize('softcap', [0.0, 2.0])
def test_a_query_also_sees_its_own_key(softcap):
  """As if it were a slot more; of two rows one does not see it."""
  mask = attention.Mask(scale=0.3, softcap=softcap)
  with jax.enable_x64(True):
    (q, k, v), *_ = cache(B=3, Hv=4)
    rng, lengths = np.random.default_rng(1), np.array([5, 0, 39], np.int32)
    own = [rng.normal(size=(3, 1, 2, n)) for n in (8, 4)]
    seen = np.array([[True], [True], [False]])
    longer, more = lengths + seen[:, 0], [x.copy() for x in (k, v)]
    for i, n in enumerate(lengths):
      for x, y in zip(more, own, strict=True):
        x[i, :, n] = y[i, 0]
    whole = jax.jit(lambda *x: decode_attention.ragged(*x[:3], mask, x[3]))
    run = lambda own, seen: decode_attention.ragged(
      q, k, v, mask, lengths, own=decode_attention.Own(*own, seen)
    )
    expected = whole(q, *more, longer)
    close(run(own, seen), expected)
    spoilt = own[0], own[1].copy()
    spoilt[1][2] = np.nan  # is not seen; and where it is, counts as 0
    close(run(spoilt, seen), expected)
    with pytest.raises(AssertionError):
      close(run(own, ~seen), expected)
    own[0][1, 0, 0, 0] = np.nan  # seen alone: it must not become a 0
    assert np.isnan(run(own, seen)[0][1, 0, :2]).all()
  with pytest.raises(ValueError, match='a key of its own; q is'):
    run([x[:2] for x in own], seen)


def _temporary(run, *args):
  analysis = jax.jit(run).lower(*args).compile().memory_analysis()
  return analysis.temp_size_in_bytes


def test_the_cache_is_not_copied():
  arrays, segments, order = cache(B=1, S=2048, H=64, dtype='f4')
  mask, size = attention.Mask(), arrays[1].nbytes
  assert _temporary(decode(mask), *arrays, segments, order) < size / 4
  dense = lambda *x: reference.attention_ref(*by_slots(*x[:3]), mask, *x[3:])
  assert _temporary(dense, *arrays, segments, order) > size


def test_heads_and_batch_sharded_equal_one_device():
  mesh = jax.make_mesh((2, 2), ('data', 'tensor'))
  run = decode(attention.Mask(scale=0.3))
  queries, rows = P('data', None, 'tensor'), P('data')
  heads = P('data', 'tensor')
  with jax.enable_x64(True):
    arrays, segments, order = cache(T=2)
    args = *arrays, segments, order
    specs = queries, heads, heads, rows, rows
    close(kernel_cases.on_mesh(run, mesh, args, specs), run(*args))


def test_low_precision_cache():
  arrays, segments, order = cache(T=2, dtype='f4')
  low = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
  mask = attention.Mask(scale=0.3)
  o, lse = decode(mask)(*low, segments, order)
  assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
  expected = reference.attention_ref(*by_slots(*low), mask, segments, order)
  close((o.astype('f4'), lse), expected, 0.03)


def rows_of(begins, lengths, t, s):
  """segments and order that say what `ragged` says by ranges of slots."""
  slots, ends = np.arange(s, dtype=np.int32), (begins + lengths)[:, None]
  filled = (slots >= begins[:, None]) & (slots < ends)
  last = ends - t + np.arange(t, dtype=np.int32)
  segments = np.ones((len(lengths), t), np.int32), filled.astype(np.int32)
  return segments, (last, np.broadcast_to(slots, filled.shape))


LENGTHS = np.array([0, 40, 9, 3], np.int32)


@pytest.mark.parametrize('T, window', [(1, 0), (1, 5), (3, 0), (3, 7)])
@pytest.mark.parametrize('begins', [(0, 0, 0, 1), (7, 0, 23, 37)])
def test_rows_of_unequal_length(begins, T, window):
  begins, lengths = np.array(begins, np.int32), LENGTHS
  mask = attention.Mask(scale=0.3, window=window)
  with jax.enable_x64(True):
    arrays, *_ = cache(B=4, T=T)

    def wanted(begins, lengths):
      rows = rows_of(begins, lengths, T, 40)
      return reference.attention_ref(*by_slots(*arrays), mask, *rows)

    run = lambda *x: decode_attention.ragged(*x[:3], mask, x[3], begins_B=x[4])
    found = jax.jit(run)(*arrays, lengths, begins)
    close(found, wanted(begins, lengths))
    # A slot less behind, or one more in front, matters.
    one = (lengths == 3).astype(np.int32)
    for wrong in ((begins, lengths - one), (begins - one, lengths + one)):
      with pytest.raises(AssertionError):
        close(found, wanted(*wrong))


def windowed(arrays, begins, lengths, window):
  mask = attention.Mask(scale=0.3, window=window)
  run = lambda q, k, v, n, b: decode_attention.ragged(
    q, k, v, mask, n, begins_B=b
  )
  return jax.jit(run)(*arrays, lengths, begins)


@pytest.mark.parametrize('window, cut', [(10, True), (1, True), (11, False)])
def test_a_window_reads_only_its_own_slots(window, cut, monkeypatch):
  """What is NaN outside of the ranges does not reach the result."""
  begins = np.array([0, 0, 23, 37], np.int32)
  mask = attention.Mask(scale=0.3, window=window)
  with jax.enable_x64(True):
    arrays, *_ = cache(B=4)
    rows = rows_of(begins, LENGTHS, 1, 40)
    wanted = reference.attention_ref(*by_slots(*arrays), mask, *rows)
    close(windowed(arrays, begins, LENGTHS, window), wanted)
    # The ends are 0, 40, 32, 40: all slots that are cut out lie before them.
    ends = begins + LENGTHS
    first = np.clip(ends - window, 0, 40 - window)[:, None]
    slots = np.arange(40)
    outside = (slots < first) | (slots >= first + window)
    q, *kept = arrays
    broken = [np.where(outside[:, None, :, None], np.nan, x) for x in kept]
    o, lse = windowed((q, *broken), begins, LENGTHS, window)
    if cut:
      close((o, lse), wanted)
    else:
      assert np.isnan(o).any()
    monkeypatch.setattr(decode_attention, 'CUT', 100)
    assert np.isnan(windowed((q, *broken), begins, LENGTHS, window)[0]).any()


def test_a_window_is_cut_out_on_every_shard():
  mesh = jax.make_mesh((2, 2), ('data', 'tensor'))
  heads, rows = P('data', 'tensor'), P('data')
  specs = P('data', None, 'tensor'), heads, heads, rows, rows
  run = lambda q, k, v, n, b: windowed((q, k, v), b, n, 9)
  with jax.enable_x64(True):
    arrays, *_ = cache(B=4)
    args = *arrays, LENGTHS, np.array([0, 0, 23, 37], np.int32)
    close(kernel_cases.on_mesh(run, mesh, args, specs), run(*args))


def test_what_does_not_fit_is_refused():
  arrays, segments, _ = cache()
  mask = attention.Mask()
  with support.refused('1 queries and 40 keys'):
    decode_attention.decode_attention(*arrays, mask, segments)
  with support.refused('(3,)', 'each of the 2 rows'):
    decode_attention.ragged(*arrays, mask, np.zeros(3, np.int32))
  with support.refused('begins have shape'):
    decode_attention.ragged(*arrays, mask, np.ones(2), begins_B=np.ones(3))
  (q, k, v), *_ = cache(T=2)
  with support.refused('2 queries, window 0'):
    prefix = k[0].swapaxes(0, 1), v[0].swapaxes(0, 1)
    decode_attention.shared_prefix(q, prefix, (k, v), mask, np.ones(2, int))
