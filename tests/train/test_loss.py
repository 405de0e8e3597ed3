"""The loss against plain numpy: weights, denominator, sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.models import batch as batch_lib
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import project
from paraxis.sharding import rules as rules_lib
from paraxis.train import loss as loss_lib

B, T, D, V = 4, 6, 8, 16


def _logits(seed=0):
  return np.random.default_rng(seed).normal(size=(B, T, V)) * 3


def _batch(seed=0):
  rng = np.random.default_rng(seed)
  weights = rng.integers(0, 2, (B, T)).astype(np.float32)
  ids = rng.integers(0, V, (2, B, T)).astype(np.int32)
  return batch_lib.Batch(
    ids[0], ids[1], None, None, weights, np.float32(weights.sum())
  )


def _plain(z_BTV, batch):
  """Nats and their gradient, token by token."""
  nll, gradient = np.zeros((B, T)), np.zeros((B, T, V))
  for b in range(B):
    for t in range(T):
      z = z_BTV[b, t]
      p = np.exp(z - z.max())
      p /= p.sum()
      target = batch.targets[b, t]
      nll[b, t] = -np.log(p[target])
      p[target] -= 1
      gradient[b, t] = p * batch.weights[b, t] / batch.denominator
  return nll, gradient


class _Table:
  """A model whose logits are its parameter."""

  def __call__(self, params, batch):
    return params, None

  def logits(self, params, x):
    return x


def test_equals_numpy():
  z, batch = _logits(), _batch()
  nll, gradient = _plain(z, batch)
  with jax.enable_x64(True):
    params = jnp.asarray(z)
    got = loss_lib.negative_log_likelihood(params, batch.targets)
    np.testing.assert_allclose(got, nll, atol=1e-13)
    total = loss_lib.total(_Table(), params, batch)
    np.testing.assert_allclose(total, (nll * batch.weights).sum(), atol=1e-12)
    value, grad = jax.value_and_grad(
      lambda p: loss_lib.next_token(_Table(), p, batch)
    )(params)
    value, grad = np.asarray(value), np.asarray(grad)
    total = np.asarray(total)
  np.testing.assert_allclose(value, total / batch.denominator, atol=1e-13)
  np.testing.assert_allclose(grad, gradient, atol=1e-14)
  assert not np.any(grad[batch.weights == 0])


def test_the_denominator_is_the_batchs():
  """Not the number of weights: a share of a step has the step's."""
  z, batch = jnp.asarray(_logits()), _batch()
  half = batch._replace(denominator=batch.denominator * 2)
  one, two = (loss_lib.next_token(_Table(), z, b) for b in (batch, half))
  np.testing.assert_allclose(one, 2 * two, rtol=1e-6)


@pytest.mark.parametrize('mesh', ['data=2,fsdp=2,tensor=2', 'tensor=8'])
def test_a_sharded_vocabulary_changes_nothing(mesh):
  rng = np.random.default_rng(1)
  x, w = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
  batch = _batch()
  names = ('batch', 'length', 'hidden'), ('vocab', 'embed')

  class Head:
    def __call__(self, params, batch):
      return annotate.put(jnp.asarray(x), names[0]), None

    def logits(self, params, x):
      out = ('batch', 'length', 'vocab')
      held = ('vocab', 'hidden')
      table = annotate.put(params, held)
      return project.einsum('BTD,VD->BTV', x, names[0], table, held, out)

  def run(w, batch):
    return jax.value_and_grad(lambda p: loss_lib.next_token(Head(), p, batch))(
      w
    )

  with jax.enable_x64(True):
    want = jax.jit(run)(jnp.asarray(w), batch._replace(segments=0, positions=0))
    want = jax.tree.map(np.asarray, want)
    with (
      annotate.use(rules_lib.preset('fsdp_tensor')),
      jax.set_mesh(mesh_lib.make(mesh)),
    ):
      rows = lambda a: annotate.put(jnp.asarray(a), ('batch', 'length'))
      placed = batch._replace(
        tokens=rows(batch.tokens),
        targets=rows(batch.targets),
        weights=rows(batch.weights),
        segments=0,
        positions=0,
      )
      table = annotate.put(jnp.asarray(w), names[1])
      got = jax.tree.map(np.asarray, jax.jit(run)(table, placed))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
  np.testing.assert_allclose(got[1], want[1], atol=1e-13)


@pytest.mark.parametrize('mesh', ['data=2,fsdp=2,tensor=2', 'tensor=8'])
def test_a_sharded_vocabulary_in_a_region(mesh):
  """Each shard has its columns; every one of them seeds the same cotangent."""
  z, batch = _logits(), _batch()
  nll, gradient = _plain(z, batch)
  scale = batch.weights.astype('f8') / batch.denominator
  rows, logits = ('batch', 'length'), ('batch', 'length', 'vocab')

  def run(z, targets, scale):
    f = lambda z: loss_lib.negative_log_likelihood(z, targets)
    nll, vjp = jax.vjp(f, z)
    return nll, vjp(scale)[0]

  with (
    jax.enable_x64(True),
    annotate.use(rules_lib.preset('fsdp_tensor')),
    jax.set_mesh(mesh_lib.make(mesh)),
  ):
    made = jax.sharding.get_mesh()
    specs = tuple(map(annotate.spec, (logits, rows, rows)))
    args = [
      jax.device_put(x, jax.NamedSharding(made, s))
      for x, s in zip((z, batch.targets, scale), specs, strict=True)
    ]
    region = jax.shard_map(
      run, in_specs=specs, out_specs=(specs[1], specs[0]), check_vma=False
    )
    found = [np.asarray(x) for x in jax.jit(region)(*args)]
  np.testing.assert_allclose(found[0], nll, atol=1e-12)
  np.testing.assert_allclose(found[1], gradient, atol=1e-12)
