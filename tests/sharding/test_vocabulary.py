"""The loss of a sharded vocabulary without logits, against one device.

(nll of logits and the embedding are tested in test_tensor.py, with the products
around them.) Legend: B rows, T tokens, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import vocabulary

B, T, D, V, RANKS = 2, 8, 5, 20, 4


def dense(x, w, targets, softcap, size):
  z = jnp.einsum('BTD,VD->BTV', jnp.sin(x), w[:size])
  z = softcap * jnp.tanh(z / softcap) if softcap else z
  picked = jnp.take_along_axis(z, targets[..., None], 2)[..., 0]
  return jax.nn.logsumexp(z, -1) - picked


def sharded(scatter, options):
  """[loss, nll, dx, dw] of functions of (x, w, targets, weights) on a mesh."""
  rows = P(None, 'tensor')

  def local(x, w, targets, weights):
    def loss(x, w):
      # As in a model: its transpose adds up what the ranks find.
      whole = jax.lax.all_gather(jnp.sin(x), 'tensor', axis=1, tiled=True)
      nll = vocabulary.linear_nll(whole, w, targets, 'tensor', scatter, options)
      return (nll * weights).sum(), nll

    (value, nll), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return (
      (value if scatter is None else jax.lax.psum(value, 'tensor')),
      nll,
      *grads,
    )

  per = {None: P(), 0: P('tensor'), 1: rows}[scatter]
  specs = rows, P('tensor'), P(), per
  run = jax.shard_map(
    local,
    in_specs=specs,
    out_specs=(P(), per, rows, P('tensor')),
    check_vma=False,
  )
  return lambda *arrays: run(*map(jax.sharding.reshard, arrays, specs))


@pytest.mark.parametrize(
  'scatter, options, size',
  [
    (None, (0.0, 0), V),
    (1, (1.5, 2), V),
    (1, (0.0, 3, 13), 13),  # the last rank holds only padding
  ],
)
def test_equals_one_device(scatter, options, size):
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
  targets, weights = rng.integers(0, size, (B, T)), rng.normal(size=(B, T))
  mesh = mesh_lib.make(f'tensor={RANKS}', jax.devices()[:RANKS])
  with jax.enable_x64(True):
    nll = dense(x, w, targets, options[0], size)
    loss = lambda x, w: (dense(x, w, targets, options[0], size) * weights).sum()
    value, grads = jax.value_and_grad(loss, (0, 1))(x, w)
    with jax.set_mesh(mesh):
      run = jax.jit(sharded(scatter, options))
      found = run(x, w, targets, weights)
      for a, b in zip(found, (value, nll, *grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
      # One target more of another word is seen.
      moved = (targets + (np.arange(T) == 3)) % size
      assert abs(run(x, w, moved, weights)[0] - value) > 1e-3


def test_ranks_must_divide_what_is_scattered():
  mesh = mesh_lib.make(f'tensor={RANKS}', jax.devices()[:RANKS])
  x, w = np.ones((B, RANKS, D)), np.ones((V, D))
  with jax.set_mesh(mesh), pytest.raises(ValueError, match='size 2, which 4'):
    sharded(0, (0.0, 0))(x, w, np.zeros((B, RANKS), int), np.ones((4, RANKS)))
