"""A Flax module as functions of a flat {path: array}.

Graph and metadata are split from the values once; what is left is plain jax.
"""

from typing import Any, NamedTuple

from flax import nnx
import jax

from paraxis.configs.base import errors
from paraxis.models import parameter
from paraxis.sharding import rules


class Leaf(NamedTuple):
  """A parameter of a module: its Flax path and variable, and its metadata.

  axes: logical axes. kind: 'matrix', 'embedding', 'vector', or what a layer
  reads and does not learn (models/ffn/moe.py). inputs: contracted dimensions of
  a matrix.
  """

  path: tuple
  variable: nnx.Variable
  axes: tuple
  kind: str
  inputs: int


class Skeleton:
  """A Flax module without values.

  Attributes:
    leaves: path -> `Leaf` of every parameter.
  """

  def __init__(self, make):
    """make: flax.nnx.Rngs -> module.

    UserError: a variable of it is none that parameter.py makes, or its axes are
    not those of its shape.
    """
    self._make = make
    self._graph, state = nnx.split(self.abstract())
    self.leaves = {
      _joined(path): _leaf(path, v) for path, v in nnx.to_flat_state(state)
    }

  def abstract(self) -> Any:
    """The module with shapes in place of arrays."""
    return nnx.eval_shape(lambda: self._make(nnx.Rngs(0)))

  def init(self, key: jax.Array, dtype) -> dict[str, jax.Array]:
    """New parameters: {path: array of `dtype`}."""
    state = nnx.state(self._make(nnx.Rngs(key)), nnx.Param)
    flat = nnx.to_flat_state(state)
    return {_joined(path): v[...].astype(dtype) for path, v in flat}

  def module(self, values, owners=None) -> Any:
    """The module with parameters {path: array}; more may be in `values`.

    owners: {path: who owns it}, for a tape (parameter.operand), or None.
    """
    of = lambda path: dict(owner=owners[path]) if owners else {}
    state = [
      (leaf.path, leaf.variable.replace(values[path], **of(path)))
      for path, leaf in self.leaves.items()
    ]
    return nnx.merge(self._graph, nnx.from_flat_state(state))


def _leaf(path, variable):
  name, shape = f'parameter {_joined(path)}', variable.shape
  axes = variable.get_metadata('axes', None)
  if not isinstance(variable, nnx.Param) or axes is None:
    what = type(variable).__name__
    raise errors.UserError(
      f'{name} is {what} {shape} without logical axes: layers hold what '
      'paraxis.models.parameter makes (matrix, embedding, vector, ..).'
    )
  if len(axes) != len(shape):
    raise errors.UserError(
      f'{name}: {len(axes)} axes {axes} for the {len(shape)} dimensions of '
      f'{shape}; name one, or None, for each.'
    )
  for axis in axes:
    if axis is not None and axis not in rules.LOGICAL:
      raise errors.UserError(
        f'{name}: {axis!r} is no logical axis; there are '
        f'{", ".join(rules.LOGICAL)}, and None.'
      )
  return Leaf(path, variable, *parameter.metadata(variable))


def _joined(path):
  return '/'.join(map(str, path))
