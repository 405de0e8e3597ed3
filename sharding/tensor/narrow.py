"""A parameter that is cast before it is gathered, and its gradient is not.

    value   in the dtype of the products: half the bytes of a gather, and of
            the gathered parameter
    sink    zeros in the parameter's own dtype, never read: derivatives are
            taken with respect to it, so gradients are summed in that dtype

Differentiating with respect to `value` would round the gradient as well. XLA
drops arrays that nothing reads: sinks take no memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrow:
  """value, sink: of one shape and two dtypes; or lists of such arrays."""

  value: Any
  sink: Any

  def __getitem__(self, index):
    if index is Ellipsis:  # all of it: nothing to compute
      return self
    return Narrow(self.value[index], self.sink[index])

  def __len__(self):
    return len(self.value)


def make(value, dtype):
  """A parameter of `dtype` of which products read `value`: array or Narrow."""
  if value.dtype == dtype:
    return value
  return Narrow(value, jnp.zeros(value.shape, dtype))


def read(w):
  """What products read of a parameter."""
  return w.value if isinstance(w, Narrow) else w


def sink(w):
  """The array with respect to which a parameter is differentiated."""
  return w.sink if isinstance(w, Narrow) else w


def replace(w, sink):
  """The parameter with another `sink`."""
  return Narrow(w.value, sink) if isinstance(w, Narrow) else sink


def own_dtype(w):
  """Dtype in which the gradient of a parameter is summed."""
  return sink(w).dtype


def gradient(value, gradient):
  """A product's gradient of a parameter of which it read `value`."""
  if gradient.dtype == value.dtype:
    return gradient
  return Narrow(jnp.zeros_like(value), gradient)
