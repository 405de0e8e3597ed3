"""A parameter of a part of a model, and the tensors it is made of."""

import math
from typing import Any, NamedTuple

from paraxis.models.huggingface import transforms


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


def within(prefix, rows):
  """The rows with `prefix/` before their paths."""
  return [r._replace(path=f'{prefix}/{r.path}') for r in rows]


def norm(path, name, model):
  """Scale, and bias, of a norm over the width of the model."""
  keep = transforms.kept((model.d_model,))
  if model.norm in ('layernorm_bare', 'rmsnorm_bare'):
    return []
  out = [row(f'{path}/scale', f'{name}.weight', keep)]
  if model.norm == 'layernorm':
    out.append(row(f'{path}/bias', f'{name}.bias', keep))
  return out


def linear(names, shape, inputs=1):
  """A matrix of torch.nn.Linear, or of GPT-2's Conv1D: (inputs, outputs)."""
  if not names.get('conv1d'):
    return transforms.matrix(shape, inputs)
  flat = math.prod(shape[:inputs]), math.prod(shape[inputs:])
  return transforms.kept(shape, flat)
