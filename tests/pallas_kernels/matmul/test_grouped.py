"""Grouped products against a loop over rows, by every implementation.

Legend: S rows, E groups, D input width, F output width.
"""

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest

from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import grouped as grouped_matmul

pytestmark = pytest.mark.usefixtures('float64')

S, E, D, F, SIZE = 40, 4, 3, 5, 8
CPU = kernel_cases.CPU
# `ragged` is asked for by its functions: on CPU it must not be chosen. Kernels
# of others are in float32: below, and in test_tokamax_adapter.py.
BY_NAME = {i.name: i for i in registry._OPS[grouped_matmul.OP]}


def arrays(sizes):
  """(x, w, g) and the group of every row; rows after the runs are 0."""
  rng = np.random.default_rng(0)
  used = sum(sizes)
  x, g = rng.normal(size=(S, D)), rng.normal(size=(S, F))
  x[used:] = g[used:] = 0
  return x, rng.normal(size=(E, D, F)), g, np.repeat(np.arange(E), sizes)


@pytest.mark.parametrize('name', ['ragged', 'blocks'])
@pytest.mark.parametrize('sizes', [(8, 0, 24, 8), (16, 8, 0, 8)])
def test_equal_to_a_loop(name, sizes):
  x, w, g, groups = arrays(sizes)
  y, dw = np.zeros((S, F)), np.zeros((E, D, F))
  for s, e in enumerate(groups):
    y[s] = x[s] @ w[e]
    dw[e] += np.outer(x[s], g[s])
  lengths, op = jnp.array(sizes, jnp.int32), BY_NAME[name]
  found = jax.jit(lambda x, w: op.forward(x, w, lengths, SIZE, x.dtype))(x, w)
  np.testing.assert_allclose(found, y, rtol=0, atol=1e-12)
  found = jax.jit(lambda x, g: op.backward(x, g, lengths, SIZE, x.dtype))(x, g)
  np.testing.assert_allclose(found, dw, rtol=0, atol=1e-12)
  wrong = jnp.array((*sizes[1:], sizes[0]), jnp.int32)
  found = op.forward(jnp.asarray(x), jnp.asarray(w), wrong, SIZE, x.dtype)
  assert np.abs(found - y).max() > 0.1


def test_blocks_of_bfloat16_are_summed_in_float32():
  """XLA on a CPU takes 1.5 times as long where a result is bfloat16."""
  x, w, g, groups = arrays((8, 0, 24, 8))
  sizes = jnp.array(np.bincount(groups, minlength=E), jnp.int32)
  rows = [jnp.asarray(a, jnp.bfloat16) for a in (x, w, g)]

  def both(x, w, g):
    common = sizes, SIZE, jnp.bfloat16, 'blocks'
    y = grouped_matmul.product(x, w, *common)
    return y, grouped_matmul.gradient(x, g, *common[:2], E, *common[2:])

  text = str(jax.make_jaxpr(both)(*rows))
  assert text.count('preferred_element_type=float32') == 2
  y, dw = both(*rows)
  assert y.dtype == dw.dtype == jnp.bfloat16
  x, w, g = (np.asarray(a, 'f8') for a in rows)
  want = np.stack([x[s] @ w[e] for s, e in enumerate(groups)])
  np.testing.assert_allclose(np.asarray(y, 'f8'), want, rtol=2**-8, atol=1e-6)
  want = sum(np.eye(E)[e][:, None, None] * np.outer(x[s], g[s])
             for s, e in enumerate(groups))  # fmt: skip
  np.testing.assert_allclose(np.asarray(dw, 'f8'), want, rtol=0.03, atol=0.03)


def test_even_runs():
  x, w, g, groups = arrays((10, 10, 10, 10))
  y = grouped_matmul.product(x, w, None, 1, x.dtype)
  expected = np.einsum('SD,SDF->SF', x, w[groups])
  np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
  dw = grouped_matmul.gradient(x, g, None, 1, E, x.dtype)
  expected = np.einsum('SE,SD,SF->EDF', np.eye(E)[groups], x, g)
  np.testing.assert_allclose(dw, expected, rtol=0, atol=1e-12)


def test_megablox_is_the_same():
  rng = np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
  x, w, g = draw(256, 128), draw(2, 128, 128), draw(256, 128)
  sizes, op = jnp.array([96, 160], jnp.int32), BY_NAME['megablox']
  for call, ours, b in (
    (op.forward, BY_NAME['blocks'].forward, w),
    (op.backward, BY_NAME['blocks'].backward, g),
  ):
    with jax.enable_x64(False):
      found = call(x, b, sizes, 32, jnp.float32, interpret=True)
    expected = ours(x, b, sizes, 32, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
  'rows, groups, size', [(4096, 8, 128), (64, 4, 8), (300, 2, 72), (3, 8, 8)]
)
def test_runs_fit_however_long_they_are(rows, groups, size):
  assert grouped_matmul.block(rows, groups) == size
  total = grouped_matmul.capacity(rows, groups, size)
  assert total % size == 0
  rng = np.random.default_rng(0)
  for _ in range(50):
    lengths = np.bincount(rng.integers(0, groups, rows), minlength=groups)
    assert (-(-lengths // size) * size).sum() <= total
  assert grouped_matmul.capacity(rows, groups, 1) == rows
