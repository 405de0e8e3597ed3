"""Rows of a batch as text: borders of segments, and what carries loss.

A segment begins with its first input, which nothing predicts; then come its
targets. On a terminal targets with loss are green and the others dim. Elsewhere
they stand between guillemets, in rows where some targets carry none. Rows are
shown whole and as text: before train.shape_cycle cuts them and an objective
masks some of their tokens.
"""

import itertools
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
  """name: 'domain/id'. parts: [(text, whether it carries loss)].

  targets, counted: how many, and how many of them with loss.
  """

  name: str
  parts: list
  targets: int
  counted: int


def segments(batch, row, names, tokenizer) -> list[Segment]:
  """The segments of one row.

  Args:
    batch: Batch of NumPy arrays (B, T), as batches.Batches.text_at gives.
    row: index into B.
    names: of the documents of its segments.
    tokenizer: what models/text/tokenizer.load gave.
  """
  out, numbers = [], batch.segments[row]
  for number, name in enumerate(names, 1):
    slots = np.flatnonzero(numbers == number)
    ids = [batch.tokens[row, slots[0]], *batch.targets[row, slots]]
    counts = [False, *(batch.weights[row, slots] > 0)]
    parts = [
      (text(tokenizer, [i for i, _ in run]), bool(counted))
      for counted, run in itertools.groupby(
        zip(ids, counts, strict=True), lambda pair: pair[1]
      )
    ]
    out.append(Segment(name, parts, len(slots), sum(map(int, counts))))
  return out


def text(tokenizer, ids) -> str:
  """Text of ids; special tokens by their names."""
  special, out = tokenizer.special_ids, b''
  for i in map(int, ids):
    out += special[i].encode() if i in special else tokenizer.decode_bytes([i])
  return out.decode('utf-8', 'replace')


def row_lines(number, found, length):
  """Yields (text, style) of a row, lines with their ends; '': no style."""
  used = sum(s.targets for s in found)
  counted = sum(s.counted for s in found)
  yield (
    f'row {number}: {len(found)} segments, {used} of {length} slots filled, '
    f'{counted} targets carry loss\n',
    'bold',
  )
  marks = counted < used
  for n, segment in enumerate(found, 1):
    yield (
      f'---- {n}: {segment.name}, {segment.targets} targets, '
      f'{segment.counted} with loss\n',
      'cyan',
    )
    for part, carries in segment.parts:
      yield (
        f'«{part}»' if carries and marks else part,
        'green' if carries else 'dim',
      )
    yield '\n', ''
