"""The kernels of decode attention against the definition, interpreted."""

import chex
import jax
import kernel_cases
import numpy as np
import pytest

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import gpu as decode_attention_gpu
from paraxis.pallas_kernels.decode_attention import op as decode_attention
from paraxis.pallas_kernels.decode_attention import tpu as decode_attention_tpu

TPU, GPU = decode_attention_tpu, decode_attention_gpu
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
  shapes = (B, N, H), (B, K, S, H), (B, K, S, Hv or H)
  q, k, v = (rng.normal(size=s).astype('f4') for s in shapes)
  for x in (k, v):
    x.swapaxes(1, 2)[~filled(ranges, S)] = np.nan
  return q, k, v


def wanted(q, k, v, ranges, mask):
  """(o_BNH, lse_BN) by definition, in float64."""
  b, _, s, _ = k.shape
  segments = np.ones((b, 1), np.int32), filled(ranges, s).astype(np.int32)
  order = np.zeros((b, 1), np.int32), np.zeros((b, s), np.int32)
  with jax.enable_x64(True):
    by_slots = (x.swapaxes(1, 2) for x in (k, v))
    wide = [np.nan_to_num(x.astype('f8')) for x in (q[:, None], *by_slots)]
    found = reference.attention_ref(*wide, mask, segments, order)
    return [np.asarray(x[:, 0]) for x in found]


def check(found, expected, ranges, tolerance=2e-6):
  chex.assert_trees_all_close(
    [*found], [*expected], rtol=tolerance, atol=tolerance
  )
  o, lse = (np.asarray(x)[ranges[0] == ranges[1]] for x in found)
  assert not o.any() and (lse == np.float32(attention.NEG)).all()


def run(kernel, q, k, v, ranges, mask, **options):
  options = dict(interpret=True) | options
  forward = lambda *x: kernel.forward(*x, mask, **options)
  return jax.jit(forward)(q, k, v, *ranges)


@pytest.mark.parametrize(
  'kernel, ranges, workers, softcap, sizes, tile',
  [
    (TPU, FIRST, 1, 0.0, dict(S=512, N=8, K=2, H=32), 64),
    (TPU, LATER, 2, 3.0, dict(S=512, N=3, K=3, H=16, Hv=8), 128),
    (TPU, LATER, 5, 0.0, dict(S=513, N=4, K=1, H=16), 64),
    (TPU, FIRST, 33, 0.0, dict(S=512, N=6, K=3, H=8), 512),
    (GPU, FIRST, 1, 0.0, dict(S=512, N=8, K=2, H=32), 64),
    (GPU, LATER, 5, 3.0, dict(S=513, N=3, K=3, H=16, Hv=32), 64),
    (GPU, LATER, 33, 0.0, dict(S=512, N=4, K=1, H=16), 128),
  ],
)
def test_equals_the_definition(kernel, ranges, workers, softcap, sizes, tile):
  mask = attention.Mask(scale=0.3, softcap=softcap)
  x = arrays(ranges, **sizes)
  found = run(kernel, *x, ranges, mask, tile=tile, workers=workers)
  check(found, wanted(*x, ranges, mask), ranges)
  begins, ends = ranges  # a slot more or less does matter, on both sides
  off = [(begins, np.maximum(ends - 1, begins))]
  off += [(np.minimum(begins + 1, ends), ends)]
  for wrong in off:
    with pytest.raises(AssertionError):
      check(found, wanted(*x, wrong, mask), ranges)


def with_own(q, k, v, ranges, own, mask):
  """`wanted` where a row also sees a key that is no slot: put before slot 0."""
  first = lambda x, more: np.concatenate([more[:, :, None], x], 2)
  n, begins, ends = len(q), *ranges
  found = []
  for i in range(n):  # a row's slots, behind its own if it is seen
    here = slice(begins[i], ends[i])
    row = [x[i : i + 1, :, here] for x in (k, v)]
    if own[2][i]:
      row = [first(x, y[i : i + 1]) for x, y in zip(row, own[:2], strict=True)]
    length = np.array([row[0].shape[2]], np.int32)
    if not length[0]:
      row = [np.zeros((1, *x.shape[1:2], 1, x.shape[3])) for x in row]
    found.append(wanted(q[i : i + 1], *row, (0 * length, length), mask))
  return [np.concatenate(x) for x in zip(*found, strict=True)]


@pytest.mark.parametrize('softcap, workers', [(0.0, 5), (2.0, 40)])
def test_a_query_also_sees_its_own_key(softcap, workers, monkeypatch):
  monkeypatch.setattr(GPU, 'JOINED', 2)  # so that a row takes several steps
  mask = attention.Mask(scale=0.3, softcap=softcap)
  q, k, v = arrays(LATER, S=512, N=6, K=3, H=16, Hv=32)
  rng, b = np.random.default_rng(1), len(q)
  own = [rng.normal(size=(b, 3, n)).astype('f4') for n in (16, 32)]
  seen = np.arange(b) % 3 > 0
  own[1][2, 1, 5] = np.nan  # counts as 0
  own = (*own, seen)

  def run_own(own):
    forward = lambda *x: GPU.forward(
      *x[:5], mask, x[5:], tile=64, workers=workers, interpret=True
    )
    return jax.jit(forward)(q, k, v, *LATER, *own)

  close = lambda found, expected: chex.assert_trees_all_close(
    [*found], [*expected], rtol=2e-6, atol=2e-6
  )
  expected = with_own(q, k, v, LATER, tuple(map(np.nan_to_num, own)), mask)
  close(run_own(own), expected)
  with pytest.raises(AssertionError):  # who sees itself does matter
    close(run_own((*own[:2], ~seen)), expected)
  own[0][1, 2, 0] = np.nan  # of its heads all that it is seen by are NaN
  lost = np.stack([np.isnan(x).reshape(b, 6, -1).any(-1) for x in run_own(own)])
  assert lost[:, 1, 4:].all() and lost.sum() == 4


@pytest.mark.parametrize(
  'kernel, lengths', [(TPU, [0, 0, 0]), (TPU, [0, 200, 0]), (GPU, [0, 0, 0])]
)
def test_rows_without_slots(kernel, lengths):
  lengths, mask = np.array(lengths, np.int32), attention.Mask(scale=0.3)
  ranges = 0 * lengths, lengths
  x = arrays(ranges, S=200, N=2, K=1, H=16)
  found = run(kernel, *x, ranges, mask, tile=64, workers=3)
  check(found, wanted(*x, ranges, mask), ranges)


def test_many_heads_take_a_tile_in_steps(monkeypatch):
  monkeypatch.setattr(TPU, 'SCORES', 3 * 8 * 32)
  ranges, mask = np.array([[70, 0], [100, 30]]), attention.Mask(scale=0.3)
  ranges = tuple(ranges.astype(np.int32))
  x = arrays(ranges, S=100, N=6, K=3, H=8)
  found = run(TPU, *x, ranges, mask, tile=100)
  check(found, wanted(*x, ranges, mask), ranges)


def test_no_race_and_nothing_read_before_it_is_written(monkeypatch):
  """TPU semantics: memory starts as NaN; four workers of seven are idle."""
  ranges, mask = np.array([[0, 9], [70, 9]]), attention.Mask(scale=0.3)
  ranges = tuple(ranges.astype(np.int32))
  x = arrays(ranges, S=80, N=4, K=2, H=8)
  options = dict(tile=32, workers=7, interpret=kernel_cases.STRICT)
  expected = wanted(*x, ranges, mask)
  check(run(TPU, *x, ranges, mask, **options), expected, ranges)
  assert not kernel_cases.races()
  blocks = TPU._blocks
  # Without a slot of their own the idle ones write over that of piece 3.
  shared = lambda sizes, rows, _: blocks(sizes, rows, lambda w: 3)
  monkeypatch.setattr(TPU, '_blocks', shared)
  with pytest.raises(jax.errors.JaxRuntimeError, match='Revisited block'):
    jax.block_until_ready(run(TPU, *x, ranges, mask, **options))


def test_a_tile_is_about_a_mebibyte():
  of = TPU.tile_of
  assert of(8192, 8, 128, 2) == 512 and of(8192, 1, 128, 4) == 2048
  assert of(300, 8, 128, 2) == 300 and of(8192, 512, 256, 4) == 16


def test_workers_fill_a_gpu():
  assert GPU.workers(8) * 8 <= GPU.PROGRAMS
  assert GPU.workers(1000) == 1


def test_tiles_fit_the_memory_of_a_program():
  def sizes(B, N, K, S, H=128, dtype='bfloat16'):
    shapes = (B, N, H), (B, K, S, H)
    return GPU.sizes(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))

  # 9 small tiles of 16 workers; a whole row of tiles for each; one of 4 slots.
  assert sizes(1, 16, 16, 272) == (GPU.SMALL, 9)
  assert sizes(64, 16, 16, 4096) == (GPU.TILE, 16)
  assert sizes(1, 1, 1, 4) == (GPU.SMALL, 1)
  # What ran out of the 232,448 bytes of a program of Hopper.
  assert sizes(64, 16, 2, 4096, 256, 'float32')[0] == 32
  assert sizes(64, 16, 2, 4096, 512)[0] == 32
  assert sizes(1, 16, 2, 4096, 1024)[0] == 16


def test_heads_that_fit_no_tile_are_refused():
  gpu = decode_attention.registry.Target('gpu', 'NVIDIA H200')
  find = lambda spec: (
    decode_attention.registry.resolve(
      decode_attention.OP, spec=spec, target=gpu
    ).name
  )
  assert find(spec_of(1024, 'bfloat16')) == 'pallas_gpu'
  assert find(spec_of(2048, 'float32')) == 'xla'


def spec_of(H, dtype):
  """What one query a row of 64 says of itself to the registry."""
  shape = jax.ShapeDtypeStruct
  q, k = shape((64, 1, 16, H), dtype), shape((64, 512, 2, H), dtype)
  mask = attention.Mask(causal=False)
  return attention.spec_of(q, k, mask, None, None, k)
