"""A matrix that products read in 4 bits: packed integers, a scale a group.

    w ~ s q,  in groups along what is contracted (pallas_kernels/matmul/
    quantized.py, the uint8 form): D F / 2 bytes and 2 D F / C of bfloat16
    scales, where bfloat16 takes 2 D F

Contracted dimensions are one here, and so are the others: (N, H, D) of an
output projection is (N H / 2, D). On one device a product multiplies with the
integers; on a mesh they are gathered, and XLA multiplies with floats that each
shard makes of its own groups. No gradient: it is read, not
trained.

Legend: D inputs, F outputs, C inputs of a group.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.pallas_kernels.matmul import quantized
from paraxis.sharding import annotate

SCALE = jnp.bfloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4:
  """A parameter of another storage.

  q: uint8 (D / 2, F). scale: (D / C, F). shape: of the whole matrix. inputs:
  how many of its leading dimensions are contracted. dtype: that it had.
  """

  q: Any
  scale: Any
  shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
  inputs: int = dataclasses.field(metadata=dict(static=True))
  dtype: Any = dataclasses.field(metadata=dict(static=True))

  def __getitem__(self, index):
    if index is Ellipsis:  # all of it, as a variable reads it
      return self
    return jax.tree.map(lambda x: x[index], self)  # a layer of a stack

  @property
  def nbytes(self) -> int:
    """Bytes in memory."""
    return self.q.nbytes + self.scale.nbytes

  def sides(self):
    """(contracted dimensions, the others) of this shard's part."""
    ins, outs = self.shape[: self.inputs], self.shape[self.inputs :]
    rows, columns = 2 * self.q.shape[0], self.q.shape[1]
    first, second = rows // math.prod(ins[1:]), columns // math.prod(outs[1:])
    return (first, *ins[1:]), (second, *outs[1:])

  def astype(self, dtype):
    """The matrix in floats, or this shard's part of it."""
    ins, outs = self.sides()
    w = quantized.dequantize(self.q, self.scale, dtype)
    return w.reshape(*ins, w.shape[1]).reshape(*ins, *outs)


def among(weights) -> bool:
  """Whether one of them is an Int4: no ring moves it."""
  return any(isinstance(w, Int4) for w in weights)


def gathered(gather, w, dtype, split, whole):
  """A parameter after a world's gather: in `dtype`, or an Int4's integers.

  split, whole: mesh axes of every dimension, before and after.
  """
  if not isinstance(w, Int4):
    return gather(w.astype(dtype), split, whole)
  ends = lambda axes: (axes[0], axes[w.inputs])
  move = lambda x: gather(x, ends(split), ends(whole))
  return dataclasses.replace(w, q=move(w.q), scale=move(w.scale))


def make(w, axes, inputs, group, name=''):
  """Int4 of a matrix, rounded to nearest.

  Args:
    w: float, its first `inputs` dimensions contracted. axes: its logical names.
    group: C, one of quantized.GROUPS. name: what a message calls it.

  Raises:
    errors.UserError: groups do not divide what is contracted, or a shard of it.
  """
  shards, rows = annotate.shards(axes[0]), math.prod(w.shape[:inputs])
  if rows % (group * shards):
    each = (
      f', {rows // shards} on each of {shards} shards' if shards > 1 else ''
    )
    raise errors.UserError(
      f'{name} has {rows} inputs{each}: no multiple of the {group} that share '
      'a scale.'
    )
  flat = w.reshape(rows, *w.shape[inputs:]).reshape(rows, -1)
  q, scale = quantized.quantize(flat, SCALE, group)
  return Int4(quantized.pack(q, group), scale, w.shape, inputs, w.dtype)


def floats(w, x):
  """A parameter as an array that x is multiplied by: itself, if it is one.

  On Explicit axes every shard makes its own part, in a region: nothing moves.
  """
  if not isinstance(w, Int4):
    return w

  def read(q, scale, x):
    part = dataclasses.replace(w, q=quantized.tied(q, x), scale=scale)
    return part.astype(x.dtype)

  arrays = w.q, w.scale, x
  if annotate.mode() != 'explicit' or not annotate.sizes():
    return read(*arrays)
  specs = tuple(jax.typeof(a).sharding.spec for a in arrays)
  rows, columns = specs[0]
  none = lambda sides: (None,) * (len(sides) - 1)
  ins, outs = w.shape[: w.inputs], w.shape[w.inputs :]
  out = jax.P(rows, *none(ins), columns, *none(outs))
  run = jax.shard_map(read, in_specs=specs, out_specs=out, check_vma=False)
  return run(*arrays)


def multiply(equation, x, w, dtype):
  """einsum(x, w) of whole or local arrays, with the integers -> `dtype`.

  None: of another equation than of a matrix, such as its transpose's.
  """
  ins, out = equation.split('->')
  of_x, of_w = ins.split(',')
  summed, kept = of_w[: w.inputs], of_w[w.inputs :]
  rows = of_x.removesuffix(summed)
  if of_x != rows + summed or out != rows + kept:
    return None
  tokens = x.shape[: len(rows)]
  y = quantized.quantized_matmul(x.reshape(*tokens, -1), w.q, w.scale)
  return y.reshape(*tokens, *w.sides()[1]).astype(dtype)
