"""Depthwise causal convolution over packed rows.

  y_t = sum_j w_j x_{t - j dilation}      over taps j dilation <= positions_t

positions count from 0 in every document, so a tap never reads another document
and a document's start needs no clearing. What a row needs of the tokens before
it is its tail: the last (W - 1) dilation inputs.

Source: the short convolution of Mamba (arXiv:2312.00752) and, dilated, temporal
convolution networks (arXiv:1803.01271): the receptive field of layers with
dilations s_i is 1 + (W - 1) sum s_i. Cost: 2 W flops per element; W shifted
reads, which XLA fuses into one pass. Plain jax, so gradients are its own.

Legend: B batch, T length, W taps, D channels, R = (W - 1) dilation.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors


def reach(w_WD, dilation=1):
  """R: inputs before a token that its convolution can read."""
  return (w_WD.shape[0] - 1) * dilation


def check(x_BTD, w_WD, tail_BRD, dilation):
  """Raises errors.UserError, with both numbers, if shapes do not fit."""
  if dilation < 1 or w_WD.shape[0] < 1:
    raise errors.UserError(
      f'causal_conv: {w_WD.shape[0]} taps at dilation {dilation}; both must be '
      f'at least 1'
    )
  if x_BTD.shape[2] != w_WD.shape[1]:
    raise errors.UserError(
      f'causal_conv: x has {x_BTD.shape[2]} channels, w has {w_WD.shape[1]}'
    )
  want = len(x_BTD), reach(w_WD, dilation), x_BTD.shape[2]
  if tail_BRD is not None and tail_BRD.shape != want:
    raise errors.UserError(
      f'causal_conv: the tail is {tail_BRD.shape}, expected {want} for '
      f'{w_WD.shape[0]} taps at dilation {dilation}: is it the state of '
      f'another model?'
    )


def causal_conv(
  x_BTD: jax.Array,
  w_WD: jax.Array,
  positions_BT: jax.Array,
  tail_BRD: jax.Array | None = None,
  *,
  valid_BT: jax.Array | None = None,
  dilation: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Convolution of every token with its document's past -> (y_BTD, tail_BRD).

  Args:
    x_BTD: inputs, any float dtype.
    w_WD: taps; w_0 multiplies the token itself.
    positions_BT: int, from 0 in every document.
    tail_BRD: None (zeros) or the R inputs before the row, oldest first.
    valid_BT: None or bool: padding is False and leaves no trace in the tail.
      Where a tail is carried on, valid tokens are a prefix of the row.
    dilation: tokens between taps.

  Returns:
    y in x's dtype, summed in promote_types(dtype, float32), and the last R
    valid inputs, in x's dtype.

  Raises:
    errors.UserError: shapes that do not fit.
  """
  check(x_BTD, w_WD, tail_BRD, dilation)
  t, r = x_BTD.shape[1], reach(w_WD, dilation)
  if tail_BRD is None:
    longer = jnp.pad(x_BTD, ((0, 0), (r, 0), (0, 0)))
  else:
    longer = jnp.concatenate([tail_BRD.astype(x_BTD.dtype), x_BTD], 1)
  y: Any = 0
  for j, w_D in enumerate(w_WD.astype(jnp.result_type(w_WD, jnp.float32))):
    far = j * dilation
    past = longer[:, r - far : r - far + t]
    y += w_D * jnp.where((positions_BT >= far)[..., None], past, 0)
  return y.astype(x_BTD.dtype), last(longer, r, valid_BT)


def last(longer_BSD, r, valid_BT=None):
  """The last r inputs of (tail, row); of the row those that `valid` marks."""
  if valid_BT is None:
    return longer_BSD[:, longer_BSD.shape[1] - r :]
  at = valid_BT.sum(1)[:, None] + jnp.arange(r)
  return jnp.take_along_axis(longer_BSD, at[..., None], 1)
