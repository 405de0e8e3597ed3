"""What goes from one phase to another: all that is read, no parameter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.sharding.pipeline import residuals

VALUES = dict(w=np.arange(12.0).reshape(2, 2, 3), b=np.ones(2))
X = np.linspace(-1, 1, 10).reshape(5, 2)


def chunk(values, x):
  """Two products with slices of one stack, so that vjp keeps the slices."""
  scale = jnp.exp(values['b'])  # follows from the parameters alone
  h = jnp.tanh(x @ values['w'][0]) * scale.sum()
  return h @ values['w'][1].T * scale


def phase(values, x):
  y, back = jax.vjp(chunk, values, x)
  return y, back


@jax.jit
def forward(values, x):
  y, kept = residuals.keep(phase, values, x)
  back = kept.again(values)
  return y, kept.arrays, back(jnp.ones_like(y)), phase(values, x)[1](y * 0 + 1)


def test_the_other_phase_reads_what_the_first_made():
  with jax.enable_x64(True):
    y, arrays, found, wanted = forward(VALUES, X)
    np.testing.assert_array_equal(y, chunk(VALUES, X))
  for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-14)
  # Rows of x alone: jax.vjp keeps the slices of the stack and the scale too.
  assert {a.shape[0] for a in arrays} == {5}
  plain = jax.tree.leaves(jax.eval_shape(phase, VALUES, X)[1])
  assert any(p.shape == (2, 3) for p in plain) and len(plain) > len(arrays)


def test_an_array_is_kept_once():
  def twice(values, x):
    h = jnp.sin(x)
    return h, (h, values['b'] * 2, h, 3.0, x)

  y, kept = residuals.keep(twice, VALUES, X)
  assert len(kept.arrays) == 2
  read = kept.again(VALUES)
  for a, b in zip(read, (y, VALUES['b'] * 2, y, 3.0, X), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_is_closed_over_is_kept_if_it_is_traced():
  """A constant is known in both phases, a tracer of one trace only there."""
  table = jnp.arange(5.0)[:, None]

  def phases(outer):
    def first(values, x):
      run = lambda values, x: (x, (x * outer, table * 2, values['b'] + outer))
      return residuals.keep(run, values, x)[1]

    kept = jax.jit(first)(VALUES, X)
    assert len(kept.arrays) == 2  # not the table
    return jax.jit(lambda kept, values: kept.again(values))(kept, VALUES)

  read = jax.jit(phases)(2.0)
  wanted = X * 2, table * 2, VALUES['b'] + 2
  for a, b in zip(read, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_collective_is_kept_and_not_repeated():
  """What it gives may not be the same, or not be there, in another branch."""
  mesh = jax.make_mesh(
    (2,), ('a',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
  )
  P = jax.sharding.PartitionSpec

  def local(b):
    run = lambda values, x: (x, jax.lax.psum(values, 'a') * x)
    _, kept = residuals.keep(run, b, b)
    assert len(kept.arrays) == 1
    assert 'psum' not in str(jax.make_jaxpr(kept.again)(b))
    return kept.again(b)

  run = jax.shard_map(
    local, mesh=mesh, in_specs=P('a'), out_specs=P('a'), check_vma=False
  )
  np.testing.assert_allclose(jax.jit(run)(jnp.arange(4.0)), [0, 4, 4, 12])


@pytest.mark.parametrize('wrong', ['fewer', 'more'])
def test_other_arrays_than_those_kept_are_seen(wrong):
  _, kept = residuals.keep(phase, VALUES, X)
  arrays = kept.arrays
  arrays = arrays[:-1] if wrong == 'fewer' else [*arrays, arrays[0]]
  with pytest.raises(ValueError, match='kept'):
    dataclasses.replace(kept, arrays=arrays).again(VALUES)
