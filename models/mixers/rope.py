"""Rotary positions (arXiv:2104.09864, half-rotated layout) and their scaling.

    (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a),  a = position * f_i,
    f_i = theta^(-2i / H)

Scalings of the frequencies for longer contexts:
    linear   f / factor                                     (arXiv:2306.15595)
    llama3   long wavelengths f / factor, short ones f, smooth between
    yarn     the same ramp over dimensions, and scores temperature-corrected
             by 0.1 m ln(factor) + 1, m = rope_mscale       (arXiv:2309.00071)
    longrope a divisor of its own for each frequency, and cos and sin times
             rope_attention_factor                          (arXiv:2402.13753)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import mixers


def frequencies(config, head_dim, local=False):
  """-> (f (head_dim / 2,) float64 NumPy, factor on cos and sin).

  Args:
    config: configs.schema.Model.
    head_dim: width of a head.
    local: of a sliding-window layer, which may have its own base; its
      frequencies are then not scaled (Gemma 3).
  """
  theta = config.rope_theta
  if local and config.rope_local_theta:
    theta = config.rope_local_theta
  f = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  if config.rope_scaling == 'none' or (local and config.rope_local_theta):
    return f, 1.0
  factor, length = config.rope_factor, config.rope_original_length
  if config.rope_scaling == 'linear':
    return f / factor, 1.0
  if config.rope_scaling == 'longrope':
    long = config.rope_long
    text = config.rope_long_factors if long else config.rope_short_factors
    return f / np.array(mixers.factors(text)), config.rope_attention_factor
  low, high = config.rope_low_frequency, config.rope_high_frequency
  turns = length * f / (2 * np.pi)  # rotations over the original context
  if config.rope_scaling == 'llama3':
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return f * keep + f / factor * (1 - keep), 1.0
  scale = 0.1 * config.rope_mscale * math.log(factor) + 1.0
  return _yarn(f, theta, config), scale


def _yarn(f, theta, config):
  """YaRN's ramp runs over dimension indices, between two rotation counts."""
  half = len(f)

  def dimension(rotations):
    wavelength = config.rope_original_length / (2 * math.pi * rotations)
    return half * math.log(wavelength) / math.log(theta)

  first = dimension(config.rope_high_frequency)
  last = dimension(config.rope_low_frequency)
  if config.rope_truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * half - 1)
  last = last if last > first else first + 1e-3
  ramp = np.clip((np.arange(half) - first) / (last - first), 0, 1)
  return f * (1 - ramp) + f / config.rope_factor * ramp


def angles(positions_BT, f, factor, dtype):
  """-> cos, sin (B, T, 1, H / 2) in float32, or in `dtype` if it is wider."""
  wide = jnp.promote_types(dtype, jnp.float32)
  a = positions_BT[..., None, None].astype(wide) * jnp.asarray(f, wide)
  return jnp.cos(a) * factor, jnp.sin(a) * factor


def rotate(x_BTNH, cos, sin):
  """Rotates heads by their positions' angles; computed in cos's dtype.

  Columns beyond those that there are angles for stay as they are.
  """
  width = 2 * cos.shape[-1]
  x1, x2 = jnp.split(x_BTNH[..., :width].astype(cos.dtype), 2, -1)
  y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
  y = y.astype(x_BTNH.dtype)
  if width == x_BTNH.shape[-1]:
    return y
  return jnp.concatenate([y, x_BTNH[..., width:]], -1)


def rotations(config, kinds, positions_BT, dtype):
  """{mixer's letter: (cos, sin)} of all that rotate, computed once a step.

  The barrier keeps XLA from folding the cosines into every layer's loops, where
  they would be computed again for each head, forward and backward.
  """
  if config.position != 'rope':
    return {}
  out = {}
  for letter in sorted({kind[0] for kind in kinds}):
    kind = mixers.TABLE[letter]
    if kind.rotary:
      width = kind.rotary(config)
      f, factor = frequencies(config, width, kind.windowed)
      if kind.scales_scores and config.rope_scaling == 'yarn':
        factor = 1.0
      out[letter] = angles(positions_BT, f, factor, dtype)
  return jax.lax.optimization_barrier(out)
