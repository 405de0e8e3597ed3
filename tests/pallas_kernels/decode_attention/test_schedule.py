"""Rows of any lengths over any number of workers: shares, pieces, merges."""

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.decode_attention import schedule as decode_schedule

LENGTHS = np.array([0, 1, 5, 63, 64, 65, 129, 256, 511, 512], np.int32)


def loop(plan, begins, ends, tile):
  """Every (worker, piece, row, column) of a plan, walked one by one."""
  for w in range(len(plan.worker) - 1):
    for t in range(plan.worker[w], plan.worker[w + 1]):
      p = plan.piece[t]
      assert plan.first[p] <= t < plan.end[p]
      assert plan.worker_piece[w] <= p < plan.worker_piece[w + 1]
      column = t - plan.origin[p]
      row = plan.row[p]
      assert begins[row] < (column + 1) * tile and column * tile < ends[row]
      yield w, p, plan.row[p], column


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
  ranges=strategies.lists(
    strategies.tuples(strategies.integers(0, 300), strategies.integers(0, 300)),
    min_size=1,
    max_size=8,
  ),
  tile=strategies.sampled_from([1, 3, 16, 64]),
  workers=strategies.integers(1, 40),
)
def test_every_tile_once_and_shares_differ_by_one(ranges, tile, workers):
  begins, ends = np.sort(np.array(ranges, np.int32), 1).T
  plan = decode_schedule.make(ends, 300, tile, workers, begins)
  walked = list(loop(plan, begins, ends, tile))
  wanted = [
    (b, c)
    for b, (first, end) in enumerate(zip(begins, ends, strict=True))
    for c in range(first // tile, -(-end // tile))
    if first < end
  ]
  assert [item[2:] for item in walked] == wanted
  loads = np.bincount([w for w, *_ in walked], minlength=workers)
  assert loads.max() - loads.min() <= 1
  # A piece is one row of one worker, and its tiles follow each other.
  assert len({item[:2] for item in walked}) == len({p for _, p, *_ in walked})
  owner = {p: (w, b) for w, p, b, _ in walked}
  assert all(owner[p] == (w, b) for w, p, b, _ in walked)
  assert len(plan.first) == len(ends) + workers


def test_a_fixed_division_is_not_even():
  """What the division is compared with: one worker a row."""
  tiles = -(-LENGTHS // 64)
  assert tiles.max() - tiles.min() == 8


def test_shares_of_a_very_long_line():
  """w n does not fit in 32 bits, the shares do."""
  lengths = np.full(3, 2**29, np.int32)
  plan = jax.eval_shape(
    lambda x: decode_schedule.make(x, 2**29, 2**20, 999), lengths
  )
  assert plan.piece.shape == (3 * 2**9,)
  n, workers = 2**31 - 5, 30000
  w = np.arange(workers + 1, dtype=np.int32)
  found = w * np.int32(n // workers) + w * np.int32(n % workers) // workers
  assert found.dtype == np.int32
  assert [int(x) for x in found] == [i * n // workers for i in range(w.size)]


@pytest.mark.parametrize('workers', [1, 7, 33])
def test_numpy_and_traced_agree(workers):
  on_host = decode_schedule.make(LENGTHS, 512, 64, workers)
  make = lambda x: decode_schedule.make(x, 512, 64, workers)
  for a, b in zip(on_host, jax.jit(make)(LENGTHS), strict=True):
    assert a.dtype == b.dtype == np.int32
    np.testing.assert_array_equal(a, b)


def softmax(s_NS, v_SNH):
  """(o_NH, lse_N) by definition; of no key: 0 and NEG."""
  if not s_NS.size:
    return np.zeros(v_SNH.shape[1:]), np.full(len(s_NS), attention.NEG)
  lse = np.logaddexp.reduce(s_NS, 1)
  return np.einsum('NS,SNH->NH', np.exp(s_NS - lse[:, None]), v_SNH), lse


def test_pieces_merge_to_the_whole():
  rng, tile, workers = np.random.default_rng(0), 64, 5
  plan = decode_schedule.make(LENGTHS, 512, tile, workers)
  s = [rng.normal(size=(3, n)) * 5 for n in LENGTHS]
  v = [rng.normal(size=(n, 3, 4)) for n in LENGTHS]
  # What nobody wrote is NaN: it must not count.
  o = np.full((len(plan.row), 3, 4), np.nan)
  lse = np.full((len(plan.row), 3), np.nan)
  for p, b in enumerate(plan.row):
    if plan.end[p] > plan.first[p]:
      at = (np.array([plan.first[p], plan.end[p]]) - plan.origin[p]) * tile
      cut = slice(*at)
      o[p], lse[p] = softmax(s[b][:, cut], v[b][cut])
  wanted = [softmax(*pair) for pair in zip(s, v, strict=True)]
  with jax.enable_x64(True):
    found = decode_schedule.merge_pieces(
      jnp.asarray(o), jnp.asarray(lse), plan, len(LENGTHS)
    )
    for got, parts in zip(found, zip(*wanted, strict=True), strict=True):
      np.testing.assert_allclose(got, np.stack(parts), rtol=1e-12, atol=1e-12)


def test_two_parts_merge_to_the_whole():
  rng = np.random.default_rng(0)
  s, v = rng.normal(size=(3, 9)) * 5, rng.normal(size=(9, 3, 4))
  with jax.enable_x64(True):
    for cut in (0, 4, 9):
      parts = softmax(s[:, :cut], v[:cut]), softmax(s[:, cut:], v[cut:])
      for a, b in zip(
        decode_schedule.merge(*parts), softmax(s, v), strict=True
      ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    none = softmax(s[:, :0], v[:0])
    o, lse = map(np.asarray, decode_schedule.merge(none, none))
  assert not o.any() and (lse == attention.NEG).all()
