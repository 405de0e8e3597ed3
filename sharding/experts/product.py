"""Products of rows with the matrices of their experts, and their gradients."""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from paraxis.pallas_kernels.matmul import grouped as grouped_matmul
from paraxis.sharding.tensor import narrow


def multiplier(gather, sizes_E, block):
  """multiply(x_SD, w_EDF, dim, bias_EF) -> y_SF: rows with their expert's own.

  Args:
    gather: mesh axes that shard `dim` of w, an array or narrow.Narrow.
    sizes_E: rows of each expert, sorted by expert; None: as many of each.
    block: rows of a block, all of one expert.

  bias_EF, None: none, is whole on every device.
  """
  how = lambda w, dim: _Product(gather, dim, block, narrow.own_dtype(w))

  def multiply(x_SD, w_EDF, dim, bias_EF=None):
    y: Any = _multiply(how(w_EDF, dim), x_SD, w_EDF, sizes_E)
    if bias_EF is None:
      return y
    return y + _of_rows(bias_EF, sizes_E, len(y)).astype(y.dtype)

  return multiply


def _of_rows(bias_EF, sizes_E, rows):
  """The bias of each row's expert; rows behind the last run have none.

  Their cotangent may be anything, too: a select keeps it out of the gradient.
  """
  if sizes_E is None:
    return jnp.repeat(bias_EF, rows // len(bias_EF), 0)
  bias_SF = jnp.repeat(bias_EF, sizes_E, 0, total_repeat_length=rows)
  used_S = jnp.arange(rows) < sizes_E.sum()
  return jnp.where(used_S[:, None], bias_SF, 0)


class _Product(NamedTuple):
  """Static: w is gathered along dim; dtype: of its gradient."""

  gather: tuple
  dim: int
  block: int
  dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(how, x_SD, w_EDF, sizes_E):
  """Row by row; w is gathered (ZeRO stage 3), its gradient scattered."""
  return _multiply_forward(how, x_SD, w_EDF, sizes_E)[0]


def _whole(how, w, dtype):
  w = w.astype(dtype)
  if not how.gather:
    return w
  return lax.all_gather(w, how.gather, axis=how.dim, tiled=True)


def _multiply_forward(how, x_SD, w_EDF, sizes_E):
  w_EDF = narrow.read(w_EDF)
  w = _whole(how, w_EDF, x_SD.dtype)
  y_SF = grouped_matmul.product(x_SD, w, sizes_E, how.block, x_SD.dtype)
  return y_SF, (x_SD, w_EDF, sizes_E)


def _multiply_backward(how, kept, g_SF):
  """dw is summed in w's own dtype, over rows and over devices."""
  x_SD, w_EDF, sizes_E = kept
  w = _whole(how, w_EDF, x_SD.dtype).swapaxes(1, 2)
  dx = grouped_matmul.product(g_SF, w, sizes_E, how.block, x_SD.dtype)
  dw = grouped_matmul.gradient(
    x_SD, g_SF, sizes_E, how.block, len(w), how.dtype
  )
  if how.gather:
    dw = lax.psum_scatter(dw, how.gather, scatter_dimension=how.dim, tiled=True)
  return dx, narrow.gradient(w_EDF, dw), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
