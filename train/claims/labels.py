"""Pieces of real text and the domain that each is of, a task of tasks.py."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from paraxis.train.claims import task as task_lib
from paraxis.train.data import corpus

BYTES = 264  # rows of a vocabulary of bytes, as presets.tiny has it


@functools.lru_cache(maxsize=4)
def _texts(path, held):
  """[bytes of the training or the held-out part of each domain, in order]."""
  texts: dict = {}
  for document in corpus.documents(path):
    if document.held == held:
      texts.setdefault(document.domain, []).append(document.text.encode())
  return [np.frombuffer(b''.join(texts[d]), np.uint8) for d in sorted(texts)]


@dataclasses.dataclass(frozen=True)
class Labels(task_lib.Task):
  """`size` bytes of a text; the last asks for its domain: answer d is byte d.

  No text has these bytes, control characters. Domains are as frequent as one
  another; held-out pieces are of documents that no training reads.

  path: as data.path. classes: domains of it.
  """

  path: str
  size: int
  classes: int
  vocabulary: ClassVar[int] = BYTES
  mix: ClassVar[tuple] = ()

  @property
  def length(self):
    """T."""
    return self.size

  @property
  def guess(self):
    """(share of answers right, who has it)."""
    return 1 / self.classes, 'chance'

  @property
  def about(self):
    """What is asked, as a text."""
    return (
      f'which of {self.classes} domains new pieces of {self.size} bytes are'
    )

  def document(self, n, count, rng, held_out):
    """(tokens, targets, weights) of n tokens."""
    texts = _texts(self.path, held_out)
    assert len(texts) == self.classes, [len(t) for t in texts]
    labels = rng.integers(0, self.classes, count)
    tokens = np.stack([_piece(texts[d], n, rng) for d in labels])
    targets = np.roll(tokens, -1, 1)
    targets[:, -1] = labels
    weights = np.zeros((count, n))
    weights[:, -1] = 1
    return tokens, targets, weights

  def right(self, hit_BT, batch):
    """(1,) share of the answers that are right."""
    del batch
    return hit_BT[:, -1].mean()[None]


def _piece(text, n, rng):
  """(n,) bytes of a text, from any place."""
  first = rng.integers(0, len(text) - n + 1)
  return text[first : first + n].astype(np.int64)
