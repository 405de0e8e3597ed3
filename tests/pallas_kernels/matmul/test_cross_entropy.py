"""Cross-entropy without logits against its definition, with every gradient."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.matmul import cross_entropy


def arrays(T=7, D=5, V=37, vocab=None, dtype='f8'):
  """(x_TD, w_VD), targets_T, weights_T and cotangents of (nll, lse)."""
  rng = np.random.default_rng(0)
  x, w = 2 * rng.normal(size=(T, D)), rng.normal(size=(V, D))
  targets = rng.integers(0, vocab or V, T).astype(np.int32)
  weights, g, h = rng.normal(size=(3, T))
  cast = lambda *a: [np.asarray(b, dtype) for b in a]
  return cast(x, w), targets, *cast(weights), cast(g, h)


def dense(x, w, targets, weights, softcap=0.0, vocab=None):
  """The definition, with all logits."""
  z = x @ w[:vocab].T
  z = softcap * jnp.tanh(z / softcap) if softcap else z
  lse = jax.nn.logsumexp(z, -1)
  nll = lse - jnp.take_along_axis(z, targets[:, None], 1)[:, 0]
  return nll * weights, lse


def both(run, x, w, weights, cotangents):
  """((nll, lse), gradients of x, w and weights)."""
  out, back = jax.vjp(run, x, w, weights)
  return jax.tree.leaves((out, back(tuple(cotangents))))


def close(actual, expected, tolerance):
  chex.assert_trees_all_close(
    [*actual], [*expected], rtol=tolerance, atol=tolerance
  )


@pytest.mark.parametrize(
  'chunk, options',
  [
    (0, dict()),  # all at once
    (37, dict(softcap=1.5)),
    (8, dict()),  # four chunks and a shorter one
    (12, dict(softcap=1.5, vocab=30)),
    (5, dict(vocab=9)),  # chunks of padding alone
  ],
)
def test_equals_the_definition_in_float64(chunk, options):
  with jax.enable_x64(True):
    (x, w), targets, weights, cotangents = arrays(vocab=options.get('vocab'))
    op = lambda x, w, weights: cross_entropy.linear_cross_entropy(
      x, w, targets, weights, chunk=chunk, **options
    )
    ref = lambda x, w, weights: dense(x, w, targets, weights, **options)
    run = jax.jit(lambda *a: both(op, *a))
    actual = run(x, w, weights, cotangents)
    close(actual, both(ref, x, w, weights, cotangents), 1e-12)
    assert {a.dtype for a in actual} == {np.dtype('f8')}
    wrong = lambda x, w, weights: dense(x, w, targets, weights, 0.7)
    with pytest.raises(AssertionError):
      close(actual, both(wrong, x, w, weights, cotangents), 1e-3)


def test_shapes_of_batches_and_no_weights():
  with jax.enable_x64(True):
    (x, w), targets, _, _ = arrays(T=6)
    found = cross_entropy.linear_cross_entropy(
      x.reshape(2, 3, 5), w, targets.reshape(2, 3), chunk=10
    )
    assert [a.shape for a in found] == [(2, 3), (2, 3)]
    expected = dense(x, w, targets, 1.0)
    close([a.ravel() for a in found], expected, 1e-12)


def test_a_target_outside_finds_no_logit():
  (x, w), targets, _, _ = arrays(dtype='f4')
  nll, lse = cross_entropy.linear_cross_entropy(x, w, targets + 1000, chunk=8)
  np.testing.assert_array_equal(nll, lse)


def test_large_logits_do_not_overflow():
  (x, w), targets, weights, cotangents = arrays(dtype='f4')
  op = lambda x, w, weights: cross_entropy.linear_cross_entropy(
    1000 * x, w, targets, weights, chunk=8
  )
  actual = both(op, x, w, weights, cotangents)
  assert all(np.isfinite(a).all() for a in actual)


def test_low_precision():
  (x, w), targets, weights, cotangents = arrays(dtype='f4')
  low = lambda a: jnp.asarray(a, jnp.bfloat16)
  op = lambda x, w, weights: cross_entropy.linear_cross_entropy(
    x, w, targets, weights, chunk=8
  )
  actual = both(op, low(x), low(w), weights, cotangents)
  names = [a.dtype.name for a in actual]
  assert names == ['float32'] * 2 + ['bfloat16'] * 2 + ['float32']
  exact = [np.asarray(low(a), 'f4') for a in (x, w)]
  ref = lambda x, w, weights: dense(x, w, targets, weights)
  expected = both(ref, *exact, weights, cotangents)
  close([np.asarray(a, 'f4') for a in actual], expected, 0.05)


def temporary(V, run):
  """Bytes of temporaries of loss and gradients, of 256 tokens."""
  shapes = (256, 16), (V, 16), (256,)
  x, w, targets = (jax.ShapeDtypeStruct(s, 'f4') for s in shapes)
  targets = jax.ShapeDtypeStruct((256,), 'i4')
  loss = lambda x, w, targets: run(x, w, targets)[0].sum()
  program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w, targets)
  return program.compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_vocabulary():
  op = lambda x, w, targets: cross_entropy.linear_cross_entropy(
    x, w, targets, chunk=128
  )
  small, large = temporary(1024, op), temporary(8192, op)
  logits = 256 * 8192 * 4
  assert large <= small + 4096 and large < logits / 8
  plain = lambda x, w, targets: dense(x, w, targets, 1.0)
  assert temporary(8192, plain) >= logits


def test_how_many_rows_at_a_time():
  of = cross_entropy.chunk_of
  assert of(8192, 50000) == 2048 and of(10**9, 50000) == 128
  assert of(16, 1000) == 1000
  assert registry.resolve('cross_entropy').name == 'xla'


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(x=np.ones((7, 4))), r'x \(7, 4\), w \(37, 5\)'),
    (dict(targets=np.ones(6, int)), r'targets \(6,\) do not fit'),
    (dict(weights=np.ones(6)), r'\(6,\), targets \(7,\)'),
    (dict(softcap=-1.0), 'softcap is -1.0'),
  ],
)
def test_what_does_not_fit(change, words):
  (x, w), targets, _, _ = arrays()
  given = dict(x=x, w_VD=w, targets=targets) | change
  with pytest.raises(errors.UserError, match=words):
    cross_entropy.linear_cross_entropy(**given)
