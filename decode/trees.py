"""Shapes of drafts: a chain, or a tree whose branches share their beginnings.

Draft c continues its parent: -1, the last token, or an earlier draft. With the
last token as 0 and draft c as c + 1, the drafts of a call are the tokens in
flight of its row (models/mixers/packed.py): node c + 1 stands as many positions
after the last token as it is deep, and sees its ancestors and itself.
"""

import functools
from typing import NamedTuple

import numpy as np

from paraxis.configs.base import errors
from paraxis.models.mixers import packed

NODES = 255  # drafts of a call, at most


class Tree(NamedTuple):
  """parents: of draft c, -1 or below c. ranks: of draft c, which choice it is
  for its place, 0: the likeliest; siblings differ. -1: it is no draft, but fed
  beside them (`probed`)."""

  parents: tuple[int, ...]
  ranks: tuple[int, ...]

  @property
  def width(self):
    """Drafts of a call."""
    return len(self.parents)

  @property
  def is_chain(self):
    ordered = self.parents == tuple(range(-1, self.width - 1))
    return ordered and min(self.ranks, default=0) >= 0

  def depths(self):
    """int32 (width + 1,): of the last token, 0, and of every draft."""
    out = [0]
    for parent in self.parents:
      out.append(out[parent + 1] + 1)
    return np.array(out, np.int32)

  @property
  def depth(self):
    """Drafts of the longest path."""
    drafts = zip(self.depths()[1:], self.ranks, strict=True)
    return int(max((d for d, rank in drafts if rank >= 0), default=0))

  def sees(self):
    """bool (width + 1, width + 1): does a node see another one?"""
    out = np.eye(self.width + 1, dtype=bool)
    for c, parent in enumerate(self.parents):
      out[c + 1] |= out[parent + 1]
    return out

  def ancestors(self):
    """uint32 (width + 1,), bit i: sees node i; with more than 32 nodes (width
    + 1, words), as packed.Packed has them."""
    return packed.words_of(self.sees())


@functools.cache
def chain(width):
  """Tree of `width` drafts, one after the other."""
  return Tree(tuple(range(-1, width - 1)), (0,) * width)


def of_paths(paths):
  """Tree of every path, a tuple of ranks, with the beginnings of all.

  Raises:
    UserError: more drafts than `NODES`.
  """
  every = {path[:n] for path in paths for n in range(1, len(path) + 1)}
  order = sorted(every, key=lambda path: (len(path), path))
  check(len(order))
  place = {path: c for c, path in enumerate(order)} | {(): -1}
  return Tree(
    tuple(place[path[:-1]] for path in order), tuple(path[-1] for path in order)
  )


def probed(tree, count):
  """`tree` with a chain of `count` tokens that are no drafts behind the last
  token and behind every draft.

  Raises:
    UserError: more than `NODES` together.
  """
  parents, ranks = list(tree.parents), list(tree.ranks)
  each = count * (1 + tree.width)
  if tree.width + each > NODES:
    most = max((NODES - count) // (count + 1), 0)
    raise errors.UserError(
      f'{tree.width} drafts (decode.drafts) with {count} prompt tokens behind '
      f'each are {tree.width + each} tokens of a call, which takes {NODES}: '
      f'take at most {most} drafts.'
    )
  for node in range(-1, tree.width):
    for i in range(count):
      parents.append(len(parents) - 1 if i else node)
      ranks.append(-1)
  return Tree(tuple(parents), tuple(ranks))


def check(drafts):
  """UserError if a call has no room for so many drafts."""
  if not 0 < drafts <= NODES:
    raise errors.UserError(
      f'a tree of {drafts} drafts: a call takes 1 to {NODES} (decode.drafts); '
      'take fewer.'
    )


def grown(accuracy_DK, drafts):
  """The tree of so many drafts with the most tokens a call, if places are
  independent (Medusa, arXiv:2401.10774: greedily).

  Args:
    accuracy_DK: how often choice k is the token d + 1 places after the last.
  """
  check(drafts)
  depths, choices = np.shape(accuracy_DK)
  open_: dict[tuple, float] = {
    (k,): float(accuracy_DK[0][k]) for k in range(choices)
  }
  chosen = []
  while open_ and len(chosen) < drafts:
    path = max(open_, key=lambda p: (open_[p], -len(p), [-k for k in p]))
    value = open_.pop(path)
    chosen.append(path)
    if len(path) < depths:
      for k in range(choices):
        open_[*path, k] = value * float(accuracy_DK[len(path)][k])
  return of_paths(chosen)
