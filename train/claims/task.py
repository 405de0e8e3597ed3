"""What the tasks of tasks.py have in common."""

from typing import Any, ClassVar


def share(hit_BT, part_BT):
  """() share of hits in a part of the tokens."""
  return (hit_BT & part_BT).sum() / part_BT.sum()


class Task:
  """A task one document of which fills a row."""

  length: Any
  also: ClassVar[Any] = ()

  @property
  def whole(self):
    """Tokens of a held-out row."""
    return self.length

  def right(self, hit_BT, batch):
    """(1,) share of the answers that are right."""
    return share(hit_BT, batch.weights > 0)[None]
