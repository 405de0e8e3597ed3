"""A parameter of a part of a model, and the tensors it is made of."""

from typing import Any, NamedTuple


class Row(NamedTuple):
  """A parameter and its tensors.

  names: tensors. change: transforms.Transform of each. cut: the part of the
  tensor that is read first. stack: axis on which the changed tensors are
  stacked; None: there is one tensor. shape: of ours, if there is no tensor.
  """

  path: str
  names: tuple
  change: Any = None
  cut: Any = None
  stack: int | None = None
  shape: tuple = ()


def row(path, name, change, cut=None):
  """A parameter of one tensor."""
  return Row(path, (name,), change, cut)
