"""The GPU kernel of decode attention: interpreted, and compiled for GPUs."""

import jax
import numpy as np
import pytest

from paraxis.pallas_kernels import attention
from paraxis.pallas_kernels import decode_attention
from paraxis.pallas_kernels import decode_attention_gpu
from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels import registry
from paraxis.sharding import aot

LENGTHS = np.array([0, 1, 5, 63, 64, 65, 129, 256, 511, 512], np.int32)
FIRST = 0 * LENGTHS, LENGTHS  # ranges of slots
# Within a tile, at its borders, over some, and an empty one.
LATER = np.array([0, 0, 3, 62, 64, 0, 64, 65, 300, 511], np.int32), LENGTHS


def filled(ranges, s):
  """(B, S) bool of (begins, ends)."""
  slots = np.arange(s)
  return (slots >= ranges[0][:, None]) & (slots < ranges[1][:, None])


def arrays(ranges, S, N, K, H, Hv=None):
  """q_BNH and a cache whose slots outside of a row's range are NaN."""
  rng, B = np.random.default_rng(0), len(ranges[0])
  shapes = (B, N, H), (B, S, K, H), (B, S, K, Hv or H)
  q, k, v = (rng.normal(size=s).astype('f4') for s in shapes)
  k[~filled(ranges, S)] = np.nan
  v[~filled(ranges, S)] = np.nan
  return q, k, v


def wanted(q, k, v, ranges, mask):
  """(o_BNH, lse_BN) by definition, in float64."""
  b, s = k.shape[:2]
  segments = np.ones((b, 1), np.int32), filled(ranges, s).astype(np.int32)
  order = np.zeros((b, 1), np.int32), np.zeros((b, s), np.int32)
  with jax.enable_x64(True):
    wide = [np.nan_to_num(x.astype('f8')) for x in (q[:, None], k, v)]
    found = reference.attention_ref(*wide, mask, segments, order)
    return [np.asarray(x[:, 0]) for x in found]


def check(found, expected, ranges, tolerance=2e-6):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
  o, lse = (np.asarray(x)[ranges[0] == ranges[1]] for x in found)
  assert not o.any() and (lse == np.float32(attention.NEG)).all()


def run(q, k, v, ranges, mask, **options):
  forward = lambda *x: decode_attention_gpu.forward(
    *x, mask, interpret=True, **options
  )
  return jax.jit(forward)(q, k, v, *ranges)


@pytest.mark.parametrize(
  'ranges, workers, softcap, sizes, tile',
  [
    (FIRST, 1, 0.0, dict(S=512, N=8, K=2, H=32), 64),
    (LATER, 5, 3.0, dict(S=513, N=3, K=3, H=16, Hv=32), 64),
    (LATER, 33, 0.0, dict(S=512, N=4, K=1, H=16), 128),
  ],
)
def test_equals_the_definition(ranges, workers, softcap, sizes, tile):
  mask = attention.Mask(scale=0.3, softcap=softcap)
  x = arrays(ranges, **sizes)
  found = run(*x, ranges, mask, tile=tile, workers=workers)
  check(found, wanted(*x, ranges, mask), ranges)
  begins, ends = ranges  # a slot more or less does matter, on both sides
  off = [(begins, np.maximum(ends - 1, begins))]
  off += [(np.minimum(begins + 1, ends), ends)]
  for wrong in off:
    with pytest.raises(AssertionError):
      check(found, wanted(*x, wrong, mask), ranges)


def test_rows_without_slots():
  ranges, mask = (np.zeros(3, np.int32),) * 2, attention.Mask(scale=0.3)
  x = arrays(ranges, S=100, N=2, K=1, H=16)
  found = run(*x, ranges, mask, workers=2)
  check(found, wanted(*x, ranges, mask), ranges)


def test_what_it_takes():
  gpu = registry.Target('gpu', 'NVIDIA H200')

  def reason(k=(1, 64, 2, 16), q=(1, 1, 2, 16), dtype='float32', target=gpu):
    spec = decode_attention.Spec(
      q, k, dtype, attention.Mask(), False, False, k, cache=(dtype, dtype)
    )
    rows = registry.explain('decode_attention', target, spec)
    return {name: reason for name, _, reason in rows}['pallas_gpu']

  assert reason() == '' and reason(dtype='float16') == ''
  assert reason(q=(1, 2, 2, 16)) == 'takes one query a row, these are 2'
  assert 'head size 48' in reason(k=(1, 64, 2, 48))
  assert 'not float64' in reason(dtype='float64')
  assert 'addresses fewer' in reason(k=(64, 2**17, 8, 128))
  assert 'needs a GPU' in reason(target=registry.Target('cpu', 'cpu'))
  assert decode_attention_gpu.workers(8) * 8 <= decode_attention_gpu.PROGRAMS
  assert decode_attention_gpu.workers(1000) == 1


@pytest.mark.skipif(aot.missing('cuda') is not None, reason='no CUDA wheels')
@pytest.mark.parametrize('name', ['h100:1', 'h200:1'])
@pytest.mark.parametrize('softcap', [0.0, 5.0])
def test_compiles_and_reads_the_cache_in_place(name, softcap):
  """`auto` picks it; the program holds no copy of the cache."""
  t = aot.topology(name)
  one = jax.sharding.SingleDeviceSharding(t.devices[0])
  mask = attention.Mask(scale=0.1, softcap=softcap)
  shapes = (4, 1, 32, 128), (4, 4000, 8, 128), (4, 4000, 8, 128)
  args = [jax.ShapeDtypeStruct(s, 'bfloat16', sharding=one) for s in shapes]
  args.append(jax.ShapeDtypeStruct((4,), 'int32', sharding=one))
  decode = lambda q, k, v, n: decode_attention.ragged(q, k, v, mask, n)
  with t.context():
    traced = jax.jit(decode).trace(*args)
  compiled = aot.compile_for(t, 'decode', traced)
  memory = aot.memory(compiled)
  assert compiled.as_text().count('__gpu$xla.gpu.triton') == 1
  assert memory.arguments > 60 * 2**20 and memory.temporaries < 4 * 2**20
