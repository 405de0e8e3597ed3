"""Puts documents into rows of one length: a plan, then rows on demand.

A document of n tokens holds n - 1 (input, target) pairs; a row has S pair
slots. A *piece* is a run of pairs of one document inside one row: its inputs
are tokens[a : a + p], its targets tokens[a + 1 : a + p + 1]. Both packers place
every pair of every document exactly once:

  concat_split  documents end to end, cut every S pairs. Only the last row has
                padding; most rows begin in the middle of a document.
  first_fit     first-fit decreasing (Johnson 1974): longest piece first, each
                into the first row with room. Only documents longer than S are
                cut. At most 11/9 of the fewest rows possible, plus 6/9
                (Dosa 2007).

First-fit decreasing sees only lengths, so it runs on their histogram: rows with
equal contents are one group with a count. Its cost depends on S, not on the
number of documents; a shuffled order then decides which document of a length
goes where. NumPy only, no loop over documents or pieces.

Legend: B rows of a batch, S pair slots of a row, P pieces, R rows of the plan.
"""

import dataclasses

import numpy as np

from paraxis.models import batch as batch_lib


@dataclasses.dataclass(frozen=True)
class PackingPlan:
  """Where every piece is. Pieces are sorted by row, then by slot.

  length:      S, pair slots of a row.
  row_starts:  (R + 1,) int64; row r has pieces row_starts[r]:row_starts[r+1].
  tokens:      (P,) int64, index of a piece's first input in the token array.
  lengths:     (P,) int32, pairs of a piece, >= 1.
  segments:    (P,) int32, 1 + number of pieces before it in the row.
  fill:        (R,) int32, slots of the row that hold a pair.
  cut:         documents that are in more than one piece.
  """

  length: int
  row_starts: np.ndarray
  tokens: np.ndarray
  lengths: np.ndarray
  segments: np.ndarray
  fill: np.ndarray
  cut: int

  @property
  def rows(self):
    return len(self.fill)

  @property
  def pairs(self):
    return int(self.fill.sum(dtype=np.int64))

  @property
  def fill_fraction(self):
    """Share of the slots that hold a pair; 0 for an empty plan."""
    return self.pairs / max(1, self.rows * self.length)


def concat_split(starts, lengths, S, order):
  """Documents in `order`, end to end, cut every S pairs.

  Args:
    starts: (D,) index of each document's first token in the token array.
    lengths: (D,) tokens of each document.
    S: pair slots of a row.
    order: permutation of (a part of) range(D).

  Returns:
    A PackingPlan. All rows are full except the last.
  """
  order = np.asarray(order, np.int64)
  first = np.asarray(starts, np.int64)[order]
  pairs = np.maximum(np.asarray(lengths, np.int64)[order] - 1, 0)
  first, pairs = first[pairs > 0], pairs[pairs > 0]
  ends = np.cumsum(pairs)
  total = int(pairs.sum())
  cuts = np.arange(0, total, S)
  # A piece begins where a document or a row begins.
  begin = np.sort(np.concatenate([ends - pairs, cuts]), kind='stable')
  begin = begin[np.append(True, begin[1:] != begin[:-1])[: len(begin)]]
  document = np.searchsorted(ends, begin, side='right')
  piece_lengths = np.diff(begin, append=total)
  return _plan(
    S,
    row=begin // S,
    tokens=first[document] + begin - (ends - pairs)[document],
    lengths=piece_lengths,
    cut=int((np.bincount(document) > 1).sum()),
  )


def first_fit(starts, lengths, S, order):
  """First-fit decreasing; documents longer than S are cut every S pairs.

  Arguments and result as `concat_split`; `order` decides which documents of
  equal length meet in a row.
  """
  order = np.asarray(order, np.int64)
  first = np.asarray(starts, np.int64)[order]
  pairs = np.maximum(np.asarray(lengths, np.int64)[order] - 1, 0)
  pieces = -(-pairs // S)
  document = np.repeat(np.arange(len(order)), pieces)
  within = _ranges(pieces)
  tokens = first[document] + within * S
  piece_lengths = np.minimum(pairs[document] - within * S, S)
  by_length = np.argsort(-piece_lengths, kind='stable')
  row_of = _first_fit_rows(np.bincount(piece_lengths, minlength=S + 1), S)
  row = np.empty(len(document), np.int64)
  row[by_length] = row_of
  return _plan(
    S,
    row=row,
    tokens=tokens,
    lengths=piece_lengths,
    cut=int((pieces > 1).sum()),
  )


def _first_fit_rows(histogram, S):
  """Rows of the pieces, longest first: first-fit decreasing on a histogram.

  Args:
    histogram: (S + 1,) pieces of each length; entry 0 is ignored.
    S: slots of a row.

  Returns:
    (P,) int64 row of each piece, pieces sorted by decreasing length.
  """
  # Groups of rows with equal contents, in the order of their first row. The
  # last group is the rows not opened yet: as many as there could ever be.
  room = np.asarray([S], np.int64)
  count = np.asarray([histogram.sum()], np.int64)
  first = np.zeros(1, np.int64)
  placed = []  # (first row, rows, pieces a row), in the order of placement
  for length in np.flatnonzero(histogram[1:])[::-1] + 1:
    fits = np.flatnonzero(room >= length)
    per_row = room[fits] // length
    placeable = np.cumsum(per_row * count[fits])
    left = int(histogram[length])
    whole = int(np.searchsorted(placeable, left, side='right'))
    if whole:
      filled, per_row = fits[:whole], per_row[:whole]
      placed.append((first[filled], count[filled], per_row))
      room[filled] -= per_row * length
      left -= int(placeable[whole - 1])
    if left:
      room, count, first = _place_in_part(
        (room, count, first), int(fits[whole]), int(length), left, placed
      )
  return _expand(placed)


def _place_in_part(groups, at, length, left, placed):
  """Puts the last `left` pieces into a prefix of the rows of group `at`.

  Rows are filled one after the other, so the group falls into full rows, one
  row with what remains, and untouched rows.
  """
  room, count, first = groups
  per_row = int(room[at]) // length
  full, part = divmod(left, per_row)
  pieces = np.asarray([per_row, part, 0], np.int64)
  sizes = np.asarray([full, part > 0, count[at] - full - (part > 0)], np.int64)
  begins = first[at] + np.cumsum(sizes) - sizes
  placed.append((begins[:2], sizes[:2], pieces[:2]))
  keep = sizes > 0
  new = room[at] - pieces * length, sizes, begins
  return tuple(
    np.concatenate([old[:at], values[keep], old[at + 1 :]])
    for old, values in zip(groups, new, strict=True)
  )


def _expand(placed):
  """Placements in order -> the row of every piece."""
  if not placed:
    return np.zeros(0, np.int64)
  parts = zip(*placed, strict=True)
  name, count, per_row = (np.concatenate(part) for part in parts)
  rows = np.repeat(name, count) + _ranges(count)
  return np.repeat(rows, np.repeat(per_row, count))


def _ranges(counts):
  """[3, 2] -> [0, 1, 2, 0, 1]."""
  begins = np.cumsum(counts) - counts
  return np.arange(counts.sum()) - np.repeat(begins, counts)


def _plan(S, row, tokens, lengths, cut):
  """Sorts pieces by row (keeping their order) and completes the PackingPlan."""
  if np.any(row[1:] < row[:-1]):
    by_row = np.argsort(row, kind='stable')
    row, tokens, lengths = row[by_row], tokens[by_row], lengths[by_row]
  rows = int(row[-1]) + 1 if len(row) else 0
  per_row = np.bincount(row, minlength=rows)
  row_starts = np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64)
  fill = np.bincount(row, weights=lengths, minlength=rows)
  return PackingPlan(
    length=S,
    row_starts=row_starts,
    tokens=tokens.astype(np.int64),
    lengths=lengths.astype(np.int32),
    segments=(_ranges(per_row) + 1).astype(np.int32),
    fill=fill.astype(np.int32),
    cut=cut,
  )


def concatenate(plans):
  """One plan with the rows of all `plans`, in order; same S."""
  if len({plan.length for plan in plans}) != 1:
    raise ValueError('plans have rows of different lengths')
  join = lambda name: np.concatenate([getattr(p, name) for p in plans])
  per_row = np.concatenate([np.diff(p.row_starts) for p in plans])
  return PackingPlan(
    length=plans[0].length,
    row_starts=np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64),
    tokens=join('tokens'),
    lengths=join('lengths'),
    segments=join('segments'),
    fill=join('fill'),
    cut=sum(p.cut for p in plans),
  )


def counted(plan, rows, loss=None):
  """Targets with loss in some rows (-1: none), int.

  loss: (N,) uint8 of all documents, 1 where a token is predicted with loss;
  None: every one is.
  """
  rows = np.asarray(rows, np.int64)
  rows = rows[rows >= 0]
  if loss is None:
    return int(plan.fill[rows].sum(dtype=np.int64))
  begin = plan.row_starts[rows]
  piece = np.repeat(begin, plan.row_starts[rows + 1] - begin)
  piece = piece + _ranges(plan.row_starts[rows + 1] - begin)
  first, lengths = plan.tokens[piece] + 1, plan.lengths[piece]
  targets = np.repeat(first, lengths) + _ranges(lengths)
  return int(loss.take(targets).sum(dtype=np.int64))


def assemble(plan, tokens, rows, pad_id=0, loss=None):
  """The arrays of some rows.

  Args:
    plan: PackingPlan with S slots a row.
    tokens: (N,) unsigned integers, all documents; may be memory-mapped.
    rows: (B,) row ids; -1 gives an empty row.
    pad_id: token and target of slots without a pair.
    loss: as of `counted`.

  Returns:
    Batch of (B, S) arrays: positions restart at 0 in every piece; weights are
    1 in slots that hold a pair with loss; denominator is the sum of weights of
    these rows.
  """
  S = plan.length
  rows = np.asarray(rows, np.int64)
  safe = np.maximum(rows, 0)
  begin = plan.row_starts[safe]
  per_row = np.where(rows < 0, 0, plan.row_starts[safe + 1] - begin)
  fill = np.where(rows < 0, 0, plan.fill[safe])
  piece = np.repeat(begin, per_row) + _ranges(per_row)
  first, lengths = plan.tokens[piece], plan.lengths[piece]
  segment = plan.segments[piece]
  full = int(fill.sum(dtype=np.int64)) == S * len(rows)
  if not full:  # the rest of a row is one more piece, of segment 0
    at = np.cumsum(per_row)
    lengths = np.insert(lengths, at, S - fill)
    first, segment = np.insert(first, at, 0), np.insert(segment, at, 0)
  ends = np.cumsum(lengths, dtype=np.int32)
  begins = ends - lengths.astype(np.int32)
  slot = np.arange(S * len(rows), dtype=np.int32)
  where = np.repeat(first - begins, lengths) + slot
  inputs = tokens.take(where, mode='clip')
  inputs = inputs.astype(np.int32)
  # A slot's target is the next slot's input, but for the last of a piece.
  targets = np.empty_like(inputs)
  targets[:-1] = inputs[1:]
  some = lengths > 0
  targets[ends[some] - 1] = tokens.take((first + lengths)[some], mode='clip')
  segments = np.repeat(segment, lengths)
  positions = slot - np.repeat(begins, lengths)
  if full:
    weights = np.ones(len(slot), np.float32)
  else:
    held = segments > 0
    weights, empty = held.astype(np.float32), ~held
    inputs[empty] = targets[empty] = pad_id
    positions[empty] = 0
  total = fill.sum(dtype=np.int64)
  if loss is not None:
    weights *= loss.take(where + 1, mode='clip')
    total = weights.sum(dtype=np.float64)
  arrays = inputs, targets, segments, positions, weights
  shaped = (x.reshape(len(rows), S) for x in arrays)
  ids, targets, segments, positions, weights = shaped
  return batch_lib.Batch(
    ids, targets, segments, positions, weights, np.float32(total)
  )
