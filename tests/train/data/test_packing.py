"""Every pair of every document exactly once; first fit against a plain loop."""

import numpy as np
import pytest

from paraxis.train.data import packing

PACKERS = (packing.concat_split, packing.first_fit)


def documents(seed, count=40, longest=60):
  """(starts, lengths, tokens): token n of the corpus is the number n."""
  lengths = np.random.default_rng(seed).integers(1, longest, count)
  return np.cumsum(lengths) - lengths, lengths, np.arange(lengths.sum())


def first_fit_loop(lengths, S):
  """First-fit decreasing as in the books; row of each piece."""
  room, rows = [], []
  for length in lengths:
    row = next((r for r, left in enumerate(room) if left >= length), None)
    if row is None:
      row = len(room)
      room.append(S)
    room[row] -= length
    rows.append(row)
  return rows


@pytest.mark.parametrize('seed', range(40))
def test_first_fit_is_first_fit(seed):
  rng = np.random.default_rng(seed)
  S = int(rng.integers(1, 40))
  lengths = np.sort(rng.integers(1, S + 1, rng.integers(0, 120)))[::-1]
  histogram = np.bincount(lengths, minlength=S + 1)
  rows = packing._first_fit_rows(histogram, S)
  assert rows.tolist() == first_fit_loop(lengths.tolist(), S)


def check_every_pair_once(batch, starts, lengths):
  held = batch.weights > 0
  assert (batch.targets[held] == batch.tokens[held] + 1).all()
  wanted = [
    np.arange(a, a + n - 1) for a, n in zip(starts, lengths, strict=True)
  ]
  np.testing.assert_array_equal(
    np.sort(batch.tokens[held]), np.concatenate(wanted)
  )


@pytest.mark.parametrize('packer', PACKERS)
@pytest.mark.parametrize('S', [1, 7, 32, 500])
def test_every_pair_exactly_once(packer, S):
  starts, lengths, tokens = documents(S)
  order = np.random.default_rng(1).permutation(len(starts))
  plan = packer(starts, lengths, S, order)
  batch = packing.assemble(plan, tokens, np.arange(plan.rows))
  check_every_pair_once(batch, starts, lengths)
  assert batch.denominator == plan.pairs == (lengths - 1).sum()
  # The negative: a plan with one piece moved by a token fails the check.
  plan.tokens[0] += 1
  with pytest.raises(AssertionError):
    check_every_pair_once(
      packing.assemble(plan, tokens, np.arange(plan.rows)), starts, lengths
    )


@pytest.mark.parametrize('packer', PACKERS)
def test_rows_against_a_loop_over_pieces(packer):
  starts, lengths, tokens = documents(3)
  S = 24
  plan = packer(starts, lengths, S, np.arange(len(starts)))
  rows = [3, 0, -1, plan.rows - 1]
  batch = packing.assemble(plan, tokens, rows, pad_id=9)
  for i, row in enumerate(rows):
    want = np.full((4, S), [[9], [9], [0], [0]])
    slot = 0
    pieces = range(*plan.row_starts[row : row + 2]) if row >= 0 else ()
    for number, piece in enumerate(pieces, 1):
      a, n = plan.tokens[piece], plan.lengths[piece]
      want[0, slot : slot + n] = tokens[a : a + n]
      want[1, slot : slot + n] = tokens[a + 1 : a + n + 1]
      want[2, slot : slot + n] = number
      want[3, slot : slot + n] = np.arange(n)
      slot += n
    got = batch.tokens, batch.targets, batch.segments, batch.positions
    np.testing.assert_array_equal([g[i] for g in got], want)
    np.testing.assert_array_equal(batch.weights[i], np.arange(S) < slot)
  assert {g.dtype for g in got} == {np.dtype('int32')}
  assert batch.weights.dtype == np.float32


def test_concat_split_fills_every_row_but_the_last():
  starts, lengths, tokens = documents(5)
  order = np.random.default_rng(2).permutation(len(starts))
  plan = packing.concat_split(starts, lengths, 16, order)
  assert (plan.fill[:-1] == 16).all()
  assert plan.rows == -(-(lengths - 1).sum() // 16)
  # End to end in the shuffled order.
  batch = packing.assemble(plan, tokens, np.arange(plan.rows))
  stream = np.concatenate(
    [np.arange(starts[d], starts[d] + lengths[d] - 1) for d in order]
  )
  np.testing.assert_array_equal(batch.tokens[batch.weights > 0], stream)
  pairs = lengths[order] - 1
  ends = np.cumsum(pairs)
  in_one_row = (ends - pairs) // 16 == (ends - 1) // 16
  assert plan.cut == (~in_one_row & (pairs > 0)).sum() > 0


def test_first_fit_cuts_only_what_is_longer_than_a_row():
  starts, lengths, _ = documents(6)
  plan = packing.first_fit(starts, lengths, 20, np.arange(len(starts)))
  assert plan.cut == (lengths - 1 > 20).sum() > 0
  whole = np.isin(starts, plan.tokens) & (lengths - 1 <= 20) & (lengths > 1)
  piece = {t: n for t, n in zip(plan.tokens, plan.lengths, strict=True)}
  for start, length in zip(starts[whole], lengths[whole], strict=True):
    assert piece[start] == length - 1
  assert plan.fill.max() <= 20
  assert plan.fill_fraction >= 0.9


def test_first_fit_shuffles_who_shares_a_row():
  lengths = np.full(60, 6)
  starts = np.arange(60) * 6
  plans = [
    packing.first_fit(
      starts, lengths, 10, np.random.default_rng(seed).permutation(60)
    )
    for seed in (0, 0, 1)
  ]
  mates = [
    {tuple(sorted(p.tokens[i : i + 2])) for i in p.row_starts[:-1]}
    for p in plans
  ]
  assert mates[0] == mates[1] != mates[2]


@pytest.mark.parametrize('packer', PACKERS)
def test_documents_without_a_pair(packer):
  plan = packer(np.arange(3), np.ones(3, int), 4, np.arange(3))
  assert (plan.rows, plan.pairs, plan.fill_fraction) == (0, 0, 0)
  plan = packer(np.array([0, 1]), np.array([1, 3]), 4, np.arange(2))
  assert (plan.rows, plan.pairs, plan.cut) == (1, 2, 0)


def test_concatenate():
  starts, lengths, tokens = documents(7)
  halves = [np.arange(20), np.arange(20, 40)]
  plans = [packing.first_fit(starts, lengths, 16, half) for half in halves]
  both = packing.concatenate(plans)
  batch = packing.assemble(both, tokens, np.arange(both.rows))
  check_every_pair_once(batch, starts, lengths)
  alone = packing.assemble(plans[1], tokens, [0])
  joined = packing.assemble(both, tokens, [plans[0].rows])
  for a, b in zip(alone, joined, strict=True):
    np.testing.assert_array_equal(a, b)
