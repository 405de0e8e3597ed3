"""Rotary positions: hand values, a complex-number loop, published scalings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models.mixers import rope


def config(**fields):
  return schema.Model(**dict(rope_theta=100.0) | fields)


def test_frequencies_by_hand():
  f, factor = rope.frequencies(config(), 4)
  np.testing.assert_allclose(f, [1, 0.1])
  assert factor == 1.0
  f, _ = rope.frequencies(config(rope_scaling='linear', rope_factor=4.0), 4)
  np.testing.assert_allclose(f, [0.25, 0.025])


def test_rotation_is_a_complex_product():
  """Dimensions i and i + H / 2 are one complex number, rotated by m f_i."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 4))
  positions = rng.integers(0, 1000, (2, 5)).astype(np.int32)
  with jax.enable_x64(True):
    f, factor = rope.frequencies(config(), 4)
    cos, sin = rope.angles(jnp.asarray(positions), f, factor, jnp.float64)
    y = np.asarray(rope.rotate(jnp.asarray(x), cos, sin))
  for b, t, n, i in np.ndindex(2, 5, 3, 2):
    angle = positions[b, t] * 100.0 ** (-2 * i / 4)
    z = complex(x[b, t, n, i], x[b, t, n, i + 2])
    z *= complex(math.cos(angle), math.sin(angle))
    np.testing.assert_allclose(y[b, t, n, i], z.real, atol=1e-12)
    np.testing.assert_allclose(y[b, t, n, i + 2], z.imag, atol=1e-12)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
  c = config(
    rope_theta=1e4, rope_scaling='llama3', rope_factor=8.0,
    rope_original_length=64, rope_low_frequency=2.0, rope_high_frequency=8.0,
  )  # fmt: skip
  plain, _ = rope.frequencies(config(rope_theta=1e4), 16)
  f, factor = rope.frequencies(c, 16)
  assert factor == 1.0
  kinds = set()
  for got, base in zip(f, plain, strict=True):
    wave = 2 * math.pi / base
    if wave < 64 / 8:
      want, kind = base, 'short'
    elif wave > 64 / 2:
      want, kind = base / 8, 'long'
    else:
      smooth = (64 / wave - 2) / (8 - 2)
      want, kind = (1 - smooth) * base / 8 + smooth * base, 'between'
    kinds.add(kind)
    np.testing.assert_allclose(got, want, rtol=1e-12)
  assert kinds == {'short', 'between', 'long'}


# No dimension turns 128 times within 512 tokens: the ramp begins at the first.
@pytest.mark.parametrize('whole', [True, False])
@pytest.mark.parametrize('fast', [8.0, 128.0])
def test_yarn_ramps_over_dimensions_and_scales_the_scores(fast, whole):
  c = config(
    rope_theta=50.0, rope_scaling='yarn', rope_factor=4.0,
    rope_original_length=512, rope_high_frequency=fast, rope_low_frequency=2.0,
    rope_truncate=whole, rope_mscale=0.5 if whole else 0.0,
  )  # fmt: skip
  plain, _ = rope.frequencies(config(rope_theta=50.0), 16)
  f, factor = rope.frequencies(c, 16)
  np.testing.assert_allclose(factor, 0.05 * math.log(4) + 1 if whole else 1)
  # Dimensions that turn so often and twice within 512 tokens, rounded outward.
  down, up = (math.floor, math.ceil) if whole else (float, float)
  first = down(8 * math.log(512 / (fast * 2 * math.pi)) / math.log(50))
  assert (first < 0) == (fast > 8)
  first = max(first, 0)
  last = up(8 * math.log(512 / (2 * 2 * math.pi)) / math.log(50))
  assert first + 2 < last
  for i in range(8):
    ramp = min(max((i - first) / (last - first), 0), 1)
    want = plain[i] * (1 - ramp) + plain[i] / 4 * ramp
    np.testing.assert_allclose(f[i], want, rtol=1e-12)


@pytest.mark.parametrize('long', [False, True])
def test_longrope_divides_each_frequency(long):
  lists = [1.0, 1.25, 2.0, 3.5], [1.5, 4.0, 9.0, 20.0]
  c = config(
    rope_scaling='longrope', rope_long=long, rope_attention_factor=1.19,
    rope_short_factors='1,1.25,2.0,3.5', rope_long_factors='1.5,4,9,2e1',
  )  # fmt: skip
  f, factor = rope.frequencies(c, 8)
  assert factor == 1.19
  for i, by in enumerate(lists[long]):
    np.testing.assert_allclose(f[i], 100.0 ** (-2 * i / 8) / by, rtol=1e-15)
  other = rope.frequencies(dataclasses.replace(c, rope_long=not long), 8)[0]
  assert (f != other).all()


@pytest.mark.parametrize('scaling', ['linear', 'llama3', 'yarn'])
def test_a_local_base_is_never_scaled(scaling):
  fields = dict(rope_scaling=scaling, rope_factor=8.0, rope_original_length=64)
  c = config(rope_local_theta=10.0, **fields)
  f, factor = rope.frequencies(c, 4, local=True)
  np.testing.assert_allclose(f, [1, 10**-0.5])
  assert factor == 1.0
  wide, _ = rope.frequencies(c, 4)
  assert abs(wide[1] - 0.1) > 1e-3
  # Other layers do not see it.
  others, _ = rope.frequencies(config(**fields), 4)
  np.testing.assert_array_equal(wide, others)
  # Without a base of its own a window layer is like the others.
  same, _ = rope.frequencies(config(**fields), 4, local=True)
  np.testing.assert_array_equal(same, rope.frequencies(config(**fields), 4)[0])


def test_angles_of_bfloat16_are_float32():
  """Position 1001 is 1000 or 1004 in bfloat16."""
  cos, _ = rope.angles(jnp.array([[1001]]), np.array([1.0]), 1.0, jnp.bfloat16)
  assert cos.dtype == jnp.float32 and cos.shape == (1, 1, 1, 1)
  np.testing.assert_allclose(cos[0, 0, 0, 0], math.cos(1001), atol=1e-4)
  x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
  assert rope.rotate(x, cos, cos).dtype == jnp.bfloat16
