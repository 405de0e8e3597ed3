"""The router's choices, terms and counts against plain loops.

Legend: B rows, T tokens, E experts, K choices.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import module_cases
import numpy as np
import pytest

from paraxis.configs.base import model as model_schema
from paraxis.models.ffn import router

pytestmark = pytest.mark.usefixtures('float64')

B, T, E = 2, 8, 12


def logits():
  return np.random.default_rng(0).normal(size=(B, T, E))


def by_hand(s, bias, c):
  """(ids, mix) of one token."""
  ids = module_cases.routed(s + bias, c)
  mix = s[ids]
  return ids, c.scale * (mix / mix.sum() if c.normalise else mix)


CASES = [
  dict(),
  dict(scores='sigmoid', normalise=False, scale=2.5),
  dict(top_k=3, groups=4, top_groups=2),
  dict(top_k=3, groups=4, top_groups=2, group_best=1),
  dict(top_k=1, groups=12, top_groups=5, scores='sigmoid'),
]


@pytest.mark.parametrize('fields', CASES)
@pytest.mark.parametrize('biased', [False, True])
def test_choices(fields, biased):
  c = model_schema.Experts(count=E, **fields)
  bias = np.random.default_rng(1).normal(size=E) if biased else None
  s = router.scores(logits(), c.scores)
  ids, mix = jax.jit(lambda s: router.choose(s, c, bias))(s)
  for b, t in np.ndindex(B, T):
    one, weights = by_hand(np.asarray(s[b, t]), 0 if bias is None else bias, c)
    assert list(ids[b, t]) == one
    np.testing.assert_allclose(mix[b, t], weights, rtol=1e-14)


def test_a_bias_moves_choices_and_not_weights():
  """Nor has it a gradient: it is balanced by counts."""
  c = model_schema.Experts(count=E, normalise=False)
  s = router.scores(logits(), 'softmax')
  everyone = jnp.zeros(E).at[3].set(9.0)
  ids, mix = router.choose(s, c, everyone)
  assert (ids[..., 0] == 3).all()
  np.testing.assert_array_equal(mix[..., 0], s[..., 3])
  grad = jax.grad(lambda bias: router.choose(s, c, bias)[1].sum())
  assert (grad(everyone) == 0).all()


def test_sigmoids_that_are_all_zero_are_no_nan():
  c = model_schema.Experts(count=E)
  _, mix = router.choose(jnp.zeros((1, 1, E)), c)
  assert (mix == 0).all()


def weighed(z, epsilon):
  """(weights of two of four experts, all probabilities) of sigmoids."""
  c = model_schema.Experts(count=4, sum_epsilon=epsilon)
  s = router.scores(z, 'sigmoid')
  return router.choose(s, c)[1], router.probabilities(s, 'sigmoid')


@pytest.mark.parametrize('epsilon', [0.0, 1e-20])
@pytest.mark.parametrize('level', [-45, -60, -90])
def test_tiny_sigmoids_have_the_gradients_of_float64(level, epsilon):
  """Squares of their sums are 0 in float32; at -90 so are they."""

  def value(z):
    return sum(
      (x * jnp.arange(1, 1 + x.size)).sum() for x in weighed(z, epsilon)
    )

  run = jax.jit(jax.value_and_grad(value))
  z = level + np.array([[[0.5, 0, 1.5, 1]]])
  found, wanted = run(z.astype('f4')), run(z)
  if level == -90:
    wanted = jax.tree.map(np.zeros_like, wanted)
  else:
    assert np.abs(wanted[1]).max() > 1e-8
  for a, b in zip(found, wanted, strict=True):
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-12)


def test_quotients_of_other_sigmoids_are_bitwise_plain():
  z = 4 * np.random.default_rng(0).normal(size=(64, 8, 4)).astype('f4')
  s = np.asarray(router.scores(z, 'sigmoid'))
  top = np.sort(s, -1)[..., :1:-1]
  plain = lambda x: x / x.sum(-1, keepdims=True)
  for x, want in zip(weighed(z, 0.0), (top, s), strict=True):
    np.testing.assert_array_equal(x, jax.jit(plain)(want))


def example():
  """(logits, probabilities, valid, ids)."""
  z = logits()
  p = np.asarray(jax.nn.softmax(z))
  valid = np.arange(B * T).reshape(B, T) % 5 > 0
  return z, p, valid, np.argsort(-p)[..., :2]


def test_terms_and_counts():
  z, p, valid, ids = example()
  count = np.zeros((B, E), int)
  balance = squares = entropy = 0.0
  f = np.random.default_rng(2).random((B, E))
  for b, t in zip(*np.nonzero(valid), strict=True):
    count[b, ids[b, t]] += 1
    balance += E * f[b] @ p[b, t]
    squares += np.log(np.exp(z[b, t]).sum()) ** 2
    entropy -= p[b, t] @ np.log(p[b, t])
  found = router.counts(ids, valid, E)
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, count)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-13)
  close(router.balance(p, f, valid), balance)
  close(router.z(z, valid), squares)
  close(router.entropy(p, valid), entropy)
  close(router.probabilities(2 * p, 'sigmoid'), p)


@pytest.mark.parametrize('scope', ['sequence', 'device', 'microbatch', 'step'])
def test_scopes_on_a_mesh(scope):
  """Rows over data, tokens over context and tensor."""
  _, _, valid, ids = example()
  axes = ('context', 'tensor'), ('data', 'context', 'tensor')
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), axes[1])

  def run(ids, valid):
    count = router.counts(ids, valid, E)
    f = router.shares(count, scope, axes, jnp.arange(E) * 1.0)
    return jnp.broadcast_to(f, (1, 1, 1, 1, E))

  rows = P('data', ('context', 'tensor'))
  run = jax.shard_map(
    run, mesh=mesh, in_specs=(rows, rows), out_specs=P('data', *axes[0]),
    check_vma=False,
  )  # fmt: skip
  f = np.asarray(jax.jit(run)(ids, valid)).reshape(
    2, 4, E
  )  # row, chunk of its tokens
  chunks = np.where(valid[..., None, None], np.eye(E)[ids], 0).sum(2)
  chunks = chunks.reshape(2, 4, 2, E).sum(2)  # what each device counts
  total = {
    'sequence': chunks.sum(1, keepdims=True),
    'device': chunks,
    'microbatch': chunks.sum((0, 1), keepdims=True),
    'step': np.arange(E)[None, None],
  }[scope]
  expected = total / total.sum(-1, keepdims=True)
  np.testing.assert_allclose(f, np.broadcast_to(expected, f.shape), rtol=1e-14)


def test_nothing_valid_is_no_nan():
  f = router.shares(jnp.zeros((B, E), jnp.int32), 'sequence', ((), ()))
  assert (f == 0).all()
