"""Rows of any lengths over any number of workers: shares and pieces.

Merges of pieces: tests/train/claims/attention/test_decode.py.
"""

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


def test_shares_of_a_very_long_line():
  """w n does not fit in 32 bits, the shares do."""
  slots, workers = 24000, 30000
  plan = decode_schedule.make(np.full(3, slots, np.int32), slots, 1, workers)
  expected = [w * 3 * slots // workers for w in range(workers + 1)]
  assert plan.worker.dtype == np.int32 and plan.worker.tolist() == expected


@pytest.mark.parametrize('workers', [1, 7, 33])
def test_numpy_and_traced_agree(workers):
  on_host = decode_schedule.make(LENGTHS, 512, 64, workers)
  make = lambda x: decode_schedule.make(x, 512, 64, workers)
  for a, b in zip(on_host, jax.jit(make)(LENGTHS), strict=True):
    assert a.dtype == b.dtype == np.int32
    np.testing.assert_array_equal(a, b)


def test_parts_merge_to_attention_over_the_keys_of_both():
  rng = np.random.default_rng(0)
  z, v = 3 * rng.normal(size=(4, 9)), rng.normal(size=(9, 2))

  def of(keys):
    p = np.exp(z[:, keys])
    o = p @ v[keys] / p.sum(1, keepdims=True)
    return jnp.asarray(o), jnp.asarray(np.log(p.sum(1)))

  found = decode_schedule.merge(of(slice(0, 6)), of(slice(6, 9)))
  for a, b in zip(found, of(slice(0, 9)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_parts_without_a_key_merge_to_nothing():
  none = jnp.zeros((3, 4)), jnp.full(3, attention.NEG)
  o, lse = decode_schedule.merge(none, none)
  assert not o.any() and (lse == np.float32(attention.NEG)).all()


def launches(function, *shapes):
  """What of a program is a loop of launches, or atomics, on a GPU."""
  text = jax.jit(function).lower(*shapes).compile().as_text()
  return [op for op in ('while(', 'scatter(') if f' {op}' in text]


def test_tables_and_the_merge_are_neither_loops_nor_scatters():
  """On an H200 they took longer than the kernel between them."""
  ends = jax.ShapeDtypeStruct((6,), jnp.int32)
  o = jax.ShapeDtypeStruct((6 + 8, 4, 16), jnp.float32)

  def run(ends, o):
    plan = decode_schedule.make(ends, 512, 64, 8)
    merged = decode_schedule.merge_pieces(o, o[..., 0], plan, 6)
    return plan._replace(piece=()), merged  # the kernel for GPUs reads no piece

  assert launches(run, ends, o) == []
  whole = lambda ends: decode_schedule.make(ends, 512, 64, 8)
  assert launches(whole, ends) == ['while(']
