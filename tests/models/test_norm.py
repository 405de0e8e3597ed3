"""Norms: plain formulas, precision. Shards: tests/models/mixers/."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import norm


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm'])
@pytest.mark.parametrize('centered', [False, True])
def test_norm_equals_a_loop(kind, centered):
  config = schema.Model(
    d_model=6, norm=kind, norm_epsilon=0.1, norm_zero_centered=centered
  )
  rng = np.random.default_rng(0)
  x, scale, bias = rng.normal(1, 2, (2, 3, 6)), rng.normal(size=6), [0.5] * 6
  with jax.enable_x64(True):
    module = norm.Norm(config)
    assert float(module.scale[...][0]) == (0.0 if centered else 1.0)
    module.scale[...] = jnp.asarray(scale)
    assert hasattr(module, 'bias') == (kind == 'layernorm')
    if kind == 'layernorm':
      module.bias[...] = jnp.asarray(bias)
    found = module(jnp.asarray(x))
  assert found.dtype == np.float64
  for i in np.ndindex(2, 3):
    v = x[i]
    if kind == 'layernorm':
      v = v - sum(v) / 6
    y = v / (sum(v * v) / 6 + 0.1) ** 0.5 * (scale + centered)
    y = y + bias if kind == 'layernorm' else y
    np.testing.assert_allclose(found[i], y, rtol=1e-12)


def test_a_bare_norm_has_no_scale():
  module = norm.Norm(schema.Model(d_model=2, norm='rmsnorm_bare'))
  assert not hasattr(module, 'scale')
  found = module(jnp.array([3.0, -4.0]))
  np.testing.assert_allclose(found, np.array([3, -4]) / 12.5**0.5, rtol=1e-6)


def test_bfloat16_input_is_squared_in_float32():
  """A sum of 300 squares, one of them large, keeps the small ones."""
  x = jnp.full((1, 300), 3.0, jnp.bfloat16).at[0, 0].set(100)
  y = norm.rms(x, jnp.ones(300), 0.0)
  assert y.dtype == jnp.bfloat16
  mean = (299 * 9 + 1e4) / 300
  np.testing.assert_allclose(float(y[0, 1]), 3 / mean**0.5, rtol=2**-8)
  # Accumulated in bfloat16 the nines would be lost.
  coarse = 0.0
  for v in np.asarray(x[0], 'f4') ** 2:
    coarse = float(jnp.bfloat16(coarse + v))
  assert abs(coarse / 300 - mean) > 0.05 * mean


def test_layernorm_of_bfloat16_is_computed_in_float32():
  """Far from zero, where bfloat16 has no digits for what the mean leaves."""
  module = norm.Norm(schema.Model(d_model=300, norm='layernorm'))
  x = jnp.arange(300, dtype=jnp.bfloat16) / 64 + 16  # steps of 1/64 round
  y = module(x[None])
  assert y.dtype == jnp.bfloat16
  v = np.asarray(x, float)
  v = (v - v.mean()) / np.sqrt(v.var() + module.config.norm_epsilon)
  np.testing.assert_allclose(np.asarray(y[0], float), v, rtol=2**-8, atol=1e-6)
  # In bfloat16 the mean alone is off by more than that.
  mean = np.asarray(jnp.mean(x), float)
  assert abs(mean - np.asarray(x, float).mean()) > 2**-8
