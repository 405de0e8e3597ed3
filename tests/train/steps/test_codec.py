"""Numbers in four bits: the nearest of fifteen, packed in pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.train.steps import codec

SIZES = (0, 0.25, 0.5, 1, 2, 4, 8, 16)
VALUES = sorted({s * sign for s in SIZES for sign in (1, -1)})


def through(x):
  scale, packed = jax.jit(codec.encode)(x)
  assert packed.dtype == jnp.uint8 and packed.size == (x.size + 1) // 2
  return np.asarray(codec.decode(scale, packed, x.shape))


@pytest.mark.parametrize('shape', [(7,), (3, 5, 2), (1,), (64, 33)])
def test_every_number_becomes_the_nearest_value(shape):
  x = np.random.default_rng(0).standard_t(2, shape).astype(np.float32)
  scale = np.abs(x).max() / 16
  near = [min(VALUES, key=lambda v: abs(v * scale - y)) for y in x.flat]
  wanted = (np.array(near, np.float32) * scale).reshape(shape)
  np.testing.assert_allclose(through(jnp.asarray(x)), wanted, rtol=1e-6)


def test_what_can_be_written_stays():
  x = jnp.asarray(VALUES, jnp.float32) * 0.03
  np.testing.assert_allclose(through(x), x, rtol=1e-6)
  np.testing.assert_array_equal(through(jnp.zeros((3, 3))), 0)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_lost(bad):
  assert not np.isfinite(through(jnp.array([1.0, bad, 2.0]))).any()


@pytest.mark.parametrize('dtype', ['int32', 'uint8', 'bool'])
def test_whole_numbers_have_no_codes(dtype):
  with support.refused('outer.codec=e3m0', f'(3, 2) of {dtype}', 'freeze'):
    jax.jit(codec.encode)(jnp.ones((3, 2), dtype))
