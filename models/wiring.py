"""How layers are joined: what a run over the depth carries between them.

With f_1, f_2, .. the parts of all layers, mixer and mlp in turn, norms within:

    standard    x_k = x_k-1 + f_k(x_k-1)
    parallel    mixer and mlp of a layer read the same x (as model.residual)
    ladder      x_k = x_k-1 + f_k(x_k-2), f_1 and f_2 read the embeddings
                (Ladder-Residual, arXiv:2501.06589, section 3)
    groups      the layers F_i of a group read the same x, each by itself:
                x' = x + sum_i (F_i(x) - x)
                (Make Deep Networks Shallow Again, arXiv:2309.08414: the first
                order of a product of I + f_i); groups of one layer are the
                standard row

What a part gives is a sum over the devices of a tensor axis. In a ladder the
next part does not read it, so that the sum travels while that part computes.
The carry is a pytree: x itself, a `Ladder`, or within a group a `Group`.
`begin` makes it of the embeddings, `finish` gives what the final norm reads,
`enter` and `leave` are around a layer; scans, recomputation, messages between
stages and steps of decoding carry it as it is. A unit of the pattern has whole
groups (layer.kinds_of), and so has a stage: between them there is x alone.

A ladder's carry has two arrays, not three: what the mixer gave is added at the
end of its layer, where the next mixer reads it first, so that one part is
pending whatever a layer consists of. Cost: messages between stages, and what
recomputation keeps of a layer, are twice as large.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Ladder(NamedTuple):
  """x_BTD, and what the last part gave, which x lacks."""

  x: Any
  pending: Any


class Group(NamedTuple):
  """x_BTD that a layer reads; that of the group, and what its layers gave."""

  x: Any
  total: Any


def begin(model, x_BTD) -> Any:
  """The carry before the first layer; model: schema.Model."""
  if model.wiring == 'ladder':
    return Ladder(x_BTD, jnp.zeros_like(x_BTD))
  return x_BTD


def finish(carry) -> Any:
  """x_BTD behind the last layer."""
  return carry.x + carry.pending if isinstance(carry, Ladder) else carry


def read(carry) -> Any:
  """x_BTD that the next part reads."""
  return carry.x if isinstance(carry, (Ladder, Group)) else carry


def add(carry, y_BTD) -> Any:
  """The carry behind a part that gave y_BTD."""
  if isinstance(carry, Ladder):
    return Ladder(carry.x + carry.pending, y_BTD)
  if isinstance(carry, Group):
    return Group(carry.x + y_BTD, carry.total + y_BTD)
  return carry + y_BTD


def enter(model, carry, i) -> Any:
  """The carry as layer i, counted from the begin of a group, takes it."""
  if model.wiring == 'groups' and i % model.group_layers == 0:
    return Group(carry, carry)
  return carry


def leave(model, given, carry, i) -> Any:
  """The carry behind layer i, which took `given`, as it is handed on."""
  if model.wiring != 'groups':
    return carry
  last = (i + 1) % model.group_layers == 0
  return carry.total if last else Group(given.x, carry.total)
