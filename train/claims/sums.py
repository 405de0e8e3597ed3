"""Two numbers, then their sum, the most significant digit first.

    3 0 5 + 1 1 6 = 0 4 2 1

A digit depends on all digits to its right by the carry, and on none of those
that are written before it: depth, not length, is what it takes.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from paraxis.train.claims import task as task_lib


@dataclasses.dataclass(frozen=True)
class Addition(task_lib.Task):
  """Tokens 0 to 9, 10: plus, 11: equals. digits: of each number; a sum has one
  more, and leading zeros stay."""

  digits: int
  mix: tuple = ()
  also: ClassVar[tuple] = ('digits',)
  vocabulary: ClassVar[int] = 12
  guess: ClassVar[tuple] = (0.0, 'none')

  @property
  def length(self):
    """T."""
    return 3 * self.digits + 2

  @property
  def about(self):
    """What is asked, as a text."""
    return f'sums of numbers of {self.digits} digits'

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n tokens."""
    del held_out
    a, b = rng.integers(0, 10**self.digits, (2, count))
    parts = [(a, self.digits), (b, self.digits), (a + b, self.digits + 1)]
    a, b, c = (
      x[:, None] // 10 ** np.arange(size)[::-1] % 10 for x, size in parts
    )
    sign = np.full((count, 1), 10)
    full = np.concatenate([a, sign, b, sign + 1, c], 1)
    weights = np.tile(np.arange(n) > 2 * self.digits, (count, 1))
    return full[:, :-1], full[:, 1:], weights

  def right(self, hit_BT, batch):
    """(2,) share of the sums that are right, and of their digits."""
    asked = batch.weights[0] > 0
    hit = jnp.where(asked, hit_BT, True).all(-1).mean()
    return jnp.stack([hit, task_lib.share(hit_BT, batch.weights > 0)])
