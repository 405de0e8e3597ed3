"""Numbers in four bits, for a message between replicas (train/steps/outer.py).

    x ~ scale sign {0, 1/4, 1/2, 1, 2, 4, 8, 16},    scale = max |x| / 16

E3M0, a sign and three bits of an exponent, none of a mantissa, as Streaming
DiLoCo sends differences of parameters (arXiv:2501.18512, section 2.3). Rounded
to the nearest; one scale for an array, in float32. What is not finite makes the
whole array NaN, for nothing is lost in silence.

Two codes are a byte. Codes cannot be added: sums are of decoded numbers.
"""

import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors

MAGNITUDES = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16], np.float32)
BORDERS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
NEGATIVE = 8


def encode(x):
  """Array of n floats -> (scale () float32, (ceil(n / 2),) uint8).

  Raises:
    UserError: an array of other numbers.
  """
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise errors.UserError(
      f'outer.codec=e3m0 and an array {x.shape} of {x.dtype}: codes are of '
      'floating-point numbers. Leave the codec out, or do not learn the array '
      '(train.freeze).'
    )
  flat = x.reshape(-1).astype(jnp.float32)
  top = jnp.abs(flat).max()
  scale = jnp.where(top == 0, 1, top / MAGNITUDES[-1])
  size = jnp.abs(flat)[:, None] / scale
  codes = (size > BORDERS).sum(-1, dtype=jnp.uint8)
  codes = codes | jnp.where(flat < 0, NEGATIVE, 0).astype(jnp.uint8)
  pairs = jnp.pad(codes, (0, codes.size % 2)).reshape(-1, 2)
  return scale, pairs[:, 0] | pairs[:, 1] << 4


def decode(scale, packed, shape):
  """The inverse: float32 of a shape."""
  codes = jnp.stack([packed & 15, packed >> 4], -1).reshape(-1)
  codes = codes[: int(np.prod(shape))]
  size = jnp.asarray(MAGNITUDES)[codes & 7]
  return (scale * jnp.where(codes < NEGATIVE, size, -size)).reshape(shape)
