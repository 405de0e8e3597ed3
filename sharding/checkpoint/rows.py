"""A leaf of a checkpoint that is read while it is saved, block by block.

Where a state comes from files and not from a training step, no device and no
host need hold it: `store.Store.save` takes such leaves beside arrays, with the
same manifest, fingerprints and commit. Their blocks are read twice, first for
fingerprints and finiteness, when nothing is written yet.
"""

from collections.abc import Callable, Iterator
import math

import numpy as np


class Rows:
  """A leaf by blocks of its first axis.

  Attributes:
    shape, dtype, ndim, size, nbytes: of the whole leaf, as of an array.
    block: shape of the first block; the others have no more rows.
  """

  def __init__(
    self,
    shape: tuple[int, ...],
    dtype,
    blocks: Callable[[], Iterator[np.ndarray]],
    block: int = 0,
  ):
    """blocks: gives NumPy arrays of the dtype, one after the other along the
    first axis, the same each time. block: rows of each; 0: one has them all."""
    self.shape, self.dtype, self._blocks = tuple(shape), np.dtype(dtype), blocks
    self.ndim, self.size = len(self.shape), math.prod(self.shape)
    self.nbytes = self.size * self.dtype.itemsize
    self.block = (block, *self.shape[1:]) if block else self.shape

  def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (its first row, a block); ValueError: they are not the leaf."""
    first = 0
    for x in self._blocks():
      if x.dtype != self.dtype or x.shape[1:] != self.shape[1:]:
        raise ValueError(
          f'a block of {x.dtype} {x.shape} of a leaf of {self.dtype} '
          f'{self.shape}'
        )
      yield first, x
      first += x.shape[0] if self.ndim else 1
    if first != (self.shape[0] if self.ndim else 1):
      raise ValueError(f'{first} rows of a leaf of {self.shape}')
