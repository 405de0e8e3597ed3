"""How a tensor becomes a slice of a parameter: each change with its inverse.

Every change moves numbers and computes none, so a round trip is bitwise. A
matrix of torch is (outputs, inputs); ours is (inputs, outputs), with heads as
dimensions of their own.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import numpy as np


class Transform(NamedTuple):
  """ours: a tensor -> our array; theirs: its inverse."""

  ours: Callable[[Any], Any]
  theirs: Callable[[Any], Any]


class Cut(NamedTuple):
  """A part of a tensor that several parameters share.

  shape: of the whole tensor. view: the shape in which the part is `index`.
  """

  shape: tuple
  view: tuple
  index: tuple

  def read(self, whole):
    return np.reshape(whole, self.view)[self.index]

  def write(self, whole, part):
    into = whole.reshape(self.view)
    into[self.index] = np.reshape(part, into[self.index].shape)


def matrix(shape, inputs=1):
  """(outputs, inputs) -> `shape`, whose first `inputs` dimensions contract."""
  width = math.prod(shape[:inputs])
  return Transform(
    lambda a: a.reshape(-1, width).T.reshape(shape),
    lambda a: a.reshape(width, -1).T,
  )


def kept(shape, theirs=None):
  """The same numbers in the same order; theirs: shape of the tensor."""
  theirs = shape if theirs is None else theirs
  return Transform(lambda a: a.reshape(shape), lambda a: a.reshape(theirs))


# Matrices (..., outputs, inputs).
turned = Transform(lambda a: a.swapaxes(-1, -2), lambda a: a.swapaxes(-1, -2))


def taps(shape):
  """(channels, 1, W) of a causal convolution -> (W, ...), the own token first.

  shape: of ours.
  """
  width = shape[0]
  return Transform(
    lambda a: a.reshape(-1, width).T[::-1].reshape(shape),
    lambda a: a.reshape(width, -1)[::-1].T[:, None],
  )


def halves(first, end=None):
  """Rotary pairs (0, 1), (2, 3), ... of the last axis -> two halves.

  first, end: the columns that are rotated; None: to the last.
  """

  def apart(a):
    still, x = a[..., :first], a[..., first:end]
    rest = a[..., a.shape[-1] if end is None else end :]
    return np.concatenate([still, x[..., 0::2], x[..., 1::2], rest], -1)

  def together(a):
    last = a.shape[-1] if end is None else end
    out, half = a.copy(), first + (last - first) // 2
    out[..., first:last:2], out[..., first + 1 : last : 2] = (
      a[..., first:half], a[..., half:last],
    )  # fmt: skip
    return out

  return Transform(apart, together)


def swapped(half):
  """The two halves of the last axis change places, each `half` wide.

  A rotation by the negative angle becomes one by the angle.
  """
  both = lambda a: np.concatenate([a[..., half:], a[..., :half]], -1)
  return Transform(both, both)


def chain(*steps):
  """One transform after the other."""

  def ours(a):
    for step in steps:
      a = step.ours(a)
    return a

  def theirs(a):
    for step in reversed(steps):
      a = step.theirs(a)
    return a

  return Transform(ours, theirs)
