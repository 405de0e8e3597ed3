"""Steps of several shapes: the rows of some are cut into shorter ones.

    '4:100,2:100,1:200'   steps 0-99 read every row as 4 rows of a quarter of
                          its tokens, 100-199 as 2 of half of them, 200-399
                          whole; then from the start again
    '4:100,2:100,1'       the same up to step 200, and whole from there on

A step of B rows of T tokens has B k rows of T / k: as many tokens, of the same
text. Attention costs less, a token sees less. Shapes that alternate, from small
and many to whole and few, are the multigrid schedule of video training
(arXiv:1912.00998, sections 3.1 and 3.2; here a clip is a row, whose length is
all that is scaled); a list that ends whole trains on growing lengths.

What a step reads is a pure function of its number, as its rows are
(batch_ramp.py, which goes with it): a resumed run reads what the uninterrupted
one reads. Every shape is a program of its own, compiled when a step first needs
it. Learning rates depend on the step; tokens of a step stay as many, so nothing
scales them. Held-out text is read in whole rows.

Legend: B rows, T tokens of a row, k pieces of it.
"""

import collections
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.train.data import batch_ramp


class Cycle(NamedTuple):
  """phases: ((pieces, steps), ...); 0 steps, of the last: all that follow."""

  phases: tuple

  def pieces(self, step):
    """k of a step, counted from 0."""
    total = sum(steps for _, steps in self.phases)
    (last, stays) = self.phases[-1]
    if not stays and step >= total:
      return last
    step %= total
    ends = np.cumsum([steps for _, steps in self.phases])
    return self.phases[int(np.searchsorted(ends, step, 'right'))][0]

  def all(self, steps):
    """Every k of a run of so many steps, the smallest first."""
    found, first = set(), 0
    for pieces, each in self.phases:
      if first < steps:
        found.add(pieces)
      first += each
    return sorted(found)


WHOLE = Cycle(((1, 1),))


def of(config) -> Cycle:
  """`Cycle` of a schema.Config; `WHOLE` without one.

  Raises:
    UserError: train.shape_cycle is no list of 'pieces:steps', or a row does
      not divide into so many pieces.
  """
  text, length = config.train.shape_cycle, config.data.sequence_length
  if not text:
    return WHOLE
  parts, phases = text.split(','), []
  for i, part in enumerate(parts):
    pieces, colon, steps = part.strip().partition(':')
    last = i + 1 == len(parts) > 1 and not colon
    good = pieces.isdecimal() and (last or steps.isdecimal())
    phase = (int(pieces), int(steps or 0)) if good else (0, 0)
    if min(phase[0], phase[1] + last) < 1:
      raise errors.UserError(
        f"train.shape_cycle={text!r}: {part.strip()!r} is not 'pieces:steps', "
        'each at least 1; the last of several may leave out its steps.'
      )
    if length % phase[0]:
      near = max(k for k in range(1, phase[0]) if length % k == 0)
      raise errors.UserError(
        f'train.shape_cycle={text!r}: rows of data.sequence_length={length} '
        f'tokens do not divide into {phase[0]} equal pieces; {near} would do.'
      )
    phases.append(phase)
  return Cycle(tuple(phases))


def shares(config) -> dict[int, float]:
  """{tokens of a row: share of a run's tokens that are in such rows}."""
  cycle, ramp = of(config), batch_ramp.of(config)
  length, found = config.data.sequence_length, collections.Counter()
  if cycle is WHOLE:
    return {length: 1.0}
  steps = config.train.steps
  before = ramp.before if ramp else int  # rows, or steps, before a step
  phases = [(k, each or steps) for k, each in cycle.phases]
  period = sum(each for _, each in phases)

  def add(first, times=1):
    for k, each in phases:
      last = min(first + each, steps)
      found[length // k] += times * (before(last) - before(first))
      first = last

  rounds = steps // period
  growing = min(-(-ramp.grown // period) if ramp else 0, rounds)
  for i in range(growing):
    add(i * period)
  add(growing * period, rounds - growing)  # all alike
  add(rounds * period)  # what is left
  return {size: n / found.total() for size, n in found.items() if n}


def fold(batch, pieces):
  """A batch (B, T) with every row cut -> (B k, T / k).

  Documents are numbered from 1 and their positions begin at 0 in every row
  again, also of one that goes on in the next row. No target is lost: that of a
  piece's last token is the first token of the next.

  Args:
    batch: models.batch.Batch of NumPy arrays, padding behind the text.
  """
  if pieces == 1:
    return batch
  cut = lambda x: x.reshape(-1, x.shape[-1] // pieces)
  made = batch._replace(
    **{name: cut(x) for name, x in batch._asdict().items() if np.ndim(x)}
  )
  segments, positions = made.segments, made.positions
  goes_on = segments == segments[:, :1]
  return made._replace(
    segments=np.where(segments, segments - segments[:, :1] + 1, 0),
    positions=positions - np.where(goes_on, positions[:, :1], 0),
  )


def places(rows, pieces, views):
  """Numbers of the cut rows of a step, of those of its rows.

  Two rows that show one text (`views`) have numbers 2 i and 2 i + 1, and so
  have their pieces, one by one.
  """
  rows = np.asarray(rows)[:, None]
  group = rows // views * pieces + np.arange(pieces)
  return (group * views + rows % views).ravel()
