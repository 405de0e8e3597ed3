"""A cast parameter whose gradient is as wide as the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.sharding.tensor import narrow
from paraxis.sharding.tensor import project

NAMES = (None, None)


def products(x, w):
  """Sum of x w, from the product's float32, so that gradients are long."""
  y = project.einsum('BD,DF->BF', x, NAMES, w, NAMES, NAMES, jnp.float32)
  return (y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()


@pytest.fixture
def arrays():
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (16, 8), jnp.bfloat16)
  return x, jax.random.normal(keys[1], (8, 4))


def of_sink(run, w):
  """Gradient of run(parameter), Narrow or not, by what `sink` says."""
  return jax.grad(lambda s: run(narrow.replace(w, s)))(narrow.sink(w))


def test_gradients_are_those_of_the_wide_parameter(arrays):
  x, w = arrays
  run = lambda w: products(x, w)
  cast = narrow.make(w.astype(x.dtype), w.dtype)
  assert isinstance(cast, narrow.Narrow)
  assert run(cast) == run(w)
  expected, found = jax.grad(run)(w), of_sink(run, cast)
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found, expected)
  # What a plain cast would give, as a check that the above is no accident.
  rounded = jax.grad(run)(w.astype(x.dtype))
  assert rounded.dtype == x.dtype
  assert (rounded.astype(jnp.float32) != expected).any()


def test_the_value_has_no_gradient_and_the_sink_is_never_read(arrays):
  x, w = arrays
  cast = narrow.make(w.astype(x.dtype), w.dtype)
  g = jax.grad(lambda w: products(x, w))(cast)
  assert not g.value.any()
  poisoned = narrow.replace(cast, jnp.full_like(cast.sink, jnp.nan))
  assert products(x, poisoned) == products(x, cast)
  run = lambda w: products(x, w)
  np.testing.assert_array_equal(of_sink(run, poisoned), of_sink(run, cast))


def test_layers_of_a_stack(arrays):
  """Indexed, sliced and scanned as an array is."""
  x, w = arrays
  stack = jnp.stack([w, 2 * w, 3 * w])
  cast = narrow.make(stack.astype(x.dtype), stack.dtype)

  def scanned(stack):
    body = lambda total, w: (total + products(x, w), None)
    return jax.lax.scan(body, jnp.float32(0), stack)[0]

  def indexed(stack):
    return sum(products(x, stack[i]) for i in range(len(stack)))

  expected = jax.grad(indexed)(stack)
  for run in (scanned, indexed):
    np.testing.assert_array_equal(of_sink(run, cast), expected)
  assert cast[...] is cast and cast[1:].sink.shape == (2, 8, 4)


def test_an_array_of_that_dtype_stays_an_array(arrays):
  _, w = arrays
  assert narrow.make(w, jnp.float32) is w
  assert narrow.read(w) is w and narrow.sink(w) is w
  assert narrow.own_dtype(w) == jnp.float32
