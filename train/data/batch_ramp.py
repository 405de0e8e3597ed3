"""Batches that grow over the first steps: which rows each step reads.

    '32:32:100'   steps 0-99 take 32 rows, 100-199 64, ... to train.batch_size

Megatron-Turing NLG 530B (arXiv:2201.11990, section 4.2) grows its batch from 32
to 1,920 rows by 32. The rows of a step, and how many came before it, are pure
functions of its number: a resumed run reads what the uninterrupted one reads.
With microbatches (of a pipeline or accumulation) their size is fixed and their
number grows; a single microbatch grows itself. Every batch size is a program of
its own, on stages with its own schedule, compiled when a step first needs it.
Learning rates depend on the step.
"""

from typing import NamedTuple

from paraxis.configs.base import errors


class Ramp(NamedTuple):
  """start, increment, final: rows. every: steps between increments.

  width: rows of a microbatch at every size; 0: a step has one microbatch.
  """

  start: int
  increment: int
  every: int
  final: int
  width: int = 0

  def rows(self, step):
    """Rows of a step, counted from 0."""
    return min(self.final, self.start + self.increment * (step // self.every))

  @property
  def grown(self):
    """The first step of `final` rows."""
    return self.every * -(-(self.final - self.start) // self.increment)

  def split(self, rows):
    """(microbatches, rows of each) of a step of so many rows."""
    width = self.width or rows
    return rows // width, width

  def before(self, step):
    """Rows of all steps before a step."""
    done = min(step // self.every, self.grown // self.every)
    grown = done * self.start + self.increment * done * (done - 1) // 2
    return self.every * grown + (step - done * self.every) * self.rows(
      done * self.every
    )

  def sizes(self, steps):
    """Every size of batch in a run of `steps`, rising."""
    last = range(0, min(steps, self.every * self.final) + 1, self.every)
    return sorted({self.rows(s) for s in last if s < steps})


def of(config) -> 'Ramp | None':
  """`Ramp` of a schema.Config, or None.

  Raises:
    UserError: train.batch_ramp is no 'start:increment:steps', or its sizes do
      not divide into microbatches of as many rows as those of batch_size.
  """
  train, parts = config.train, config.microbatches
  text = train.batch_ramp
  if not text:
    return None
  try:
    start, increment, every = map(int, text.split(':'))
  except ValueError:
    raise errors.UserError(
      f'train.batch_ramp={text!r} is not three numbers, '
      "'start:increment:steps'."
    ) from None
  what = f'train.batch_ramp={text!r}'
  if min(start, increment, every) < 1 or start > train.batch_size:
    raise errors.UserError(
      f'{what}: rows grow from {start} by {increment} every {every} steps to '
      f'train.batch_size={train.batch_size}: all must be at least 1, and the '
      'first at most the last.'
    )
  width = config.microbatch_rows if parts > 1 else 0
  for name, n in (('start', start), ('increment', increment)):
    if width and n % width:
      raise errors.UserError(
        f'{what}: its {name} of {n} rows is not divisible by the {width} rows '
        f'of a microbatch, of which train.batch_size={train.batch_size} has '
        f'{parts}: take multiples of {width}, or more microbatches.'
      )
  return Ramp(start, increment, every, train.batch_size, width)
