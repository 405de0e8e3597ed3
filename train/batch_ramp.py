"""Batches that grow over the first steps: which rows each step reads.

    '32:32:100'   steps 0-99 take 32 rows, 100-199 64, ... to train.batch_size

Megatron-Turing NLG 530B (arXiv:2201.11990, section 4.2) grows its batch from 32
to 1,920 rows by 32. The rows of a step, and how many came before it, are pure
functions of its number: a resumed run reads what the uninterrupted one reads.
Every size of batch is a program of its own. Learning rates go by steps.
"""

from typing import NamedTuple

from paraxis.configs import errors


class Ramp(NamedTuple):
  """start, increment, final: rows. every: steps between increments."""

  start: int
  increment: int
  every: int
  final: int

  def rows(self, step):
    """Rows of a step, counted from 0."""
    return min(self.final, self.start + self.increment * (step // self.every))

  def before(self, step):
    """Rows of all steps before a step."""
    full = -(-(self.final - self.start) // self.increment)  # sizes below final
    done = min(step // self.every, full)
    grown = done * self.start + self.increment * done * (done - 1) // 2
    return self.every * grown + (step - done * self.every) * self.rows(
      done * self.every
    )

  def sizes(self, steps):
    """Every size of batch in a run of `steps`, rising."""
    last = range(0, min(steps, self.every * self.final) + 1, self.every)
    return sorted({self.rows(s) for s in last if s < steps})


def of(config):
  """`Ramp` of a schema.Config, or None.

  Raises:
    UserError: train.batch_ramp is no 'start:increment:steps', or its sizes do
      not divide into the microbatches of a step.
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
  for name, n in (('start', start), ('increment', increment)):
    if n % parts:
      raise errors.UserError(
        f'{what}: its {name} of {n} rows is not divisible by the {parts} '
        'microbatches of a step.'
      )
  return Ramp(start, increment, every, train.batch_size)
