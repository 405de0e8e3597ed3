"""The update of a step: clipping, and numbers that are not finite.

Loss, gradients and accumulation: certify/test_invariance.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import aux
from paraxis.models import build
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.updates import optimizers

SMALL = {'model.num_layers': 1, 'model.d_model': 16, 'model.num_heads': 2}
LIMIT = 0.5  # of the gradient norm; 1 is the default
SMALL |= {'model.d_ff': 32, 'mesh.data': 1, 'mesh.fsdp': 1, 'mesh.tensor': 1}


def of_loss(loss, grads):
  """What Step.grads gives for a loss without terms of layers."""
  loss = jnp.float32(loss)
  return loss, grads, aux.of_loss(loss)


@pytest.fixture(scope='module')
def made(tiny):
  """(Optimizer, compiled updates by clip norm, state, gradients)."""
  built = build.build(tiny.config(SMALL), devices=jax.devices()[:1])
  settings = schema.Optimizer(name='muon', warmup_steps=2)
  optimizer = optimizers.Optimizer(settings, 10, built.model)
  state = state_lib.init(built.model, optimizer, jax.random.key(0))
  grads = {
    p: 0.3 * jax.random.normal(jax.random.key(i), x.shape)
    for i, (p, x) in enumerate(state.params.items())
  }
  updates = {
    c: jax.jit(step_lib.make(built, optimizer, c).update) for c in (0.0, LIMIT)
  }
  state, _ = updates[LIMIT](state, *of_loss(1, grads))
  return optimizer, updates, state, grads


def _raw(tree):
  return {
    k: np.asarray(v).tobytes() for k, v in state_lib.flatten(tree).items()
  }


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('where', ['loss', 'norm/scale', 'layers/mlp/up'])
def test_what_is_not_finite_changes_no_bit(made, bad, where):
  _, updates, state, grads = made
  loss = bad if where == 'loss' else 1.0
  poisoned = dict(grads)
  if where != 'loss':
    spot = (0,) * poisoned[where].ndim
    poisoned[where] = poisoned[where].at[spot].set(bad)
  new, numbers = updates[LIMIT](state, *of_loss(loss, poisoned))
  counters = {'step', 'skipped', 'skipped_in_a_row'}
  before, after = _raw(state), _raw(new)
  assert {k for k in before if before[k] != after[k]} == counters
  assert int(new.step) == 2  # the batch is consumed
  assert int(new.skipped) == int(new.skipped_in_a_row) == 1
  paths = sorted(grads)
  found = [
    p
    for p, s in zip(paths, numbers['squares'], strict=True)
    if not np.isfinite(s)
  ]
  assert found == ([] if where == 'loss' else [where])
  again, _ = updates[LIMIT](new, *of_loss(loss, poisoned))
  assert int(again.skipped) == int(again.skipped_in_a_row) == 2
  good, numbers = updates[LIMIT](again, *of_loss(1, grads))
  assert int(good.skipped) == int(numbers['skipped']) == 2
  assert int(good.skipped_in_a_row) == int(numbers['skipped_in_a_row']) == 0
  assert _raw(good)['params/embedding'] != before['params/embedding']


def test_clipping_by_global_norm(made):
  optimizer, updates, state, grads = made
  norm = np.sqrt(
    sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values())
  )
  assert norm > 2
  scaled = {p: g * np.float32(LIMIT / norm) for p, g in grads.items()}
  new, numbers = updates[LIMIT](state, *of_loss(1, grads))
  np.testing.assert_allclose(numbers['grad_norm'], norm, rtol=1e-6)
  want, _ = updates[0.0](state, *of_loss(1, scaled))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
  jax.tree.map(near, new, want)
  # Without a limit the second moment is another; below it nothing changes.
  free, _ = updates[0.0](state, *of_loss(1, grads))
  nu = lambda s: np.asarray(
    state_lib.flatten(s)['optimizer/adamw/nu/embedding']
  )
  assert np.abs(nu(free) - nu(want)).max() > 10 * np.abs(nu(want)).max()
  small = {p: g * np.float32(0.5 * LIMIT / norm) for p, g in grads.items()}
  one, two = (updates[c](state, *of_loss(1, small))[0] for c in (0.0, LIMIT))
  jax.tree.map(near, one, two)


def test_gradients_of_zero_are_not_divided_by(made):
  _, updates, state, grads = made
  zero = jax.tree.map(jnp.zeros_like, grads)
  new, numbers = updates[LIMIT](state, *of_loss(1, zero))
  assert int(new.skipped) == 0 and float(numbers['grad_norm']) == 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(new))


def test_the_rates_of_the_step_are_reported(made):
  optimizer, updates, state, grads = made
  _, numbers = updates[LIMIT](state, *of_loss(1, grads))
  rates = dataclasses.asdict(optimizer.config)
  assert float(numbers['learning_rate_adamw']) == np.float32(
    rates['learning_rate']
  )
  assert float(numbers['learning_rate_muon']) == np.float32(
    rates['matrix_learning_rate']
  )
