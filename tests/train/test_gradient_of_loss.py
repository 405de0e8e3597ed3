"""The gradient of a step is the gradient of the loss that it returns.

With experts, whose balance and z terms are part of the loss: scaled by any
cotangent, against central differences of the whole loss, and the terms against
a closed form. Three identities hold without a denominator, too; the closed form
does not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs.base import model as model_schema
from paraxis.models import aux as aux_lib
from paraxis.models import depth
from paraxis.models.ffn import router
from paraxis.train import expert_counts
from paraxis.train import loss as loss_lib
from paraxis.train.certify import trial
from paraxis.train.claims import experiment

BALANCE, Z, E = 0.3, 0.02, 4
EXPERTS = {
  'model.experts.count': E, 'model.experts.top_k': 2, 'model.experts.d_ff': 8,
  'model.experts.balance': BALANCE, 'model.experts.router_z': Z,
  'model.experts.balance_scope': 'microbatch',
}  # fmt: skip
STEP = {'model.experts.balance_scope': 'step'}
UNBALANCED = {'model.experts.balance': 0.0, 'model.experts.router_z': 0.0}
REGION = {'model.experts.region': 'context+tensor', 'model.experts.hot': 1}


def staged(schedule, layers=2, chunks=1, **fields):
  pipeline = {'schedule': schedule, 'microbatches': 2, 'chunks': chunks}
  return experiment.under('pipeline', pipeline | fields) | {
    'model.num_layers': layers
  }


CASES = {
  'one device': ('data=1', STEP | {'train.microbatches': 2}),
  'annotated': ('data=2,fsdp=2', {'train.remat': 'full'}),
  'region': ('context=2,tensor=2', REGION | {'mesh.collectives': 'explicit'}),
  'tokens held twice': ('tensor=2', {'mesh.sequence': False}),
  '1f1b': ('stage=2,data=2', staged('one_f_one_b', 3)),
  'stored': ('stage=2,fsdp=2', staged('gpipe', activations='store')),
  'zero bubble': ('stage=2,context=2', STEP | staged('zero_bubble')),
  'zero bubble, stored': (
    'stage=2,tensor=2', staged('zero_bubble', activations='store')
  ),
  'interleaved': ('stage=2,data=2', staged('interleaved', 4, 2)),
  'v_half': ('stage=2,data=2', staged('v_half', 4, 2)),
  'skip': (  # which experts' terms are refused with
    'stage=2,data=2', UNBALANCED | staged('skip', skip_fraction=0.5,
                                          microbatches=4)
  ),
}  # fmt: skip


def made(case):
  """(trial.Runner, {path: NumPy parameter, layers in order}, batch)."""
  mesh, change = CASES[case]
  config = experiment.fields(support.piped(), EXPERTS)
  runner = trial.Runner(*experiment.on(config, mesh, change))
  rng, params = np.random.default_rng(0), {}
  for path, leaf in sorted(runner.job.built.params.items()):
    rows, _ = runner.job.model.held.get(path, depth.IN_ORDER)
    layers = leaf.shape if rows is None else (max(rows) + 1, *leaf.shape[1:])
    draw = rng.integers(1, 9, layers) if path.endswith('load') else None
    params[path] = rng.normal(0, 0.3, layers) if draw is None else draw * 1.0
  batch = trial.batches(config, True)[0]
  weights = batch.weights * rng.integers(0, 3, batch.weights.shape)
  batch = batch._replace(weights=weights.astype(np.float32))
  # Neither the number of valid tokens nor that of a device.
  whole = dict(denominator=np.float32(77.0), valid=np.float32(91.0))
  return runner, params, batch._replace(**whole)


def found(runner, params, batch, cotangent=1.0):
  """(loss, {path: gradient, layers in order}, aux.Aux) in NumPy."""
  state = runner.start(params)
  with runner.job.context():
    out = runner._grads(state.variables, runner.put(batch), cotangent)
  loss, gradients, aux = jax.device_get(out)
  return loss, runner.job.in_order(gradients), aux


def direction(gradients, seed):
  rng = np.random.default_rng(seed)
  return {p: rng.normal(size=g.shape) for p, g in gradients.items()}


def slope(run, params, along, size=1e-6):
  """Central difference of run(params)[0]; the choices of experts must stay."""
  moved = [
    run(params | {p: params[p] + sign * size * d for p, d in along.items()})
    for sign in (1, -1)
  ]
  (high, _, a), (low, _, b) = moved
  for path, count in a.counts.items():
    np.testing.assert_array_equal(count[:, :E], b.counts[path][:, :E])
  return (high - low) / (2 * size)


@pytest.mark.parametrize('case', CASES)
def test_it_is(case):
  with jax.enable_x64(True):
    runner, params, batch = made(case)
    run = functools.partial(found, runner, batch=batch)
    loss, gradients, aux = run(params)
    learned = expert_counts.without(runner.job.model, params)
    assert gradients.keys() == learned.keys() != params.keys()
    np.testing.assert_allclose(loss, sum(aux.terms.values()), rtol=1e-14)
    terms = set() if case == 'skip' else {'balance', 'z'}
    assert set(aux.terms) == {'nats'} | terms

    # 0 f and 0.5 f: exactly, for products with 0 and 0.5 do not round.
    _, none, _ = run(params, cotangent=0.0)
    assert not any(g.any() for g in none.values())
    _, half, _ = run(params, cotangent=0.5)
    for path, g in gradients.items():
      np.testing.assert_array_equal(2 * half[path], g, err_msg=path)

    along = direction(gradients, 1)
    wanted = sum((g * along[p]).sum() for p, g in gradients.items())
    assert abs(slope(run, params, along) / wanted - 1) < 1e-6
    if not terms:
      return

    # Where a router knows nothing, p = 1 / E: each layer's balance is the
    # coefficient, and z log(E)^2, for every valid token, whoever is chosen.
    blind = {p: 0 * x for p, x in params.items() if p.endswith('router')}
    _, _, aux = run(params | blind)
    layers = runner.config.model.num_layers * (batch.segments > 0).sum() / 91.0
    np.testing.assert_allclose(aux.terms['balance'], BALANCE * layers, 1e-12)
    np.testing.assert_allclose(
      aux.terms['z'], Z * np.log(E) ** 2 * layers, 1e-12
    )


def unscaled(aux, dtype):
  """A sum of terms whose cotangent is 1, whatever comes."""

  del dtype

  @jax.custom_vjp
  def total(x):
    return x

  total.defvjp(lambda x: (x, ()), lambda _, g: (jnp.ones_like(g),))
  return total(sum(aux.terms.values()))


def test_a_cotangent_that_is_ignored_is_seen(monkeypatch):
  monkeypatch.setattr(aux_lib, 'total', unscaled)
  with jax.enable_x64(True):
    runner, params, batch = made('1f1b')
    _, none, _ = found(runner, params, batch, 0.0)
  assert any(g.any() for g in none.values())


def test_the_loss_as_jax_differentiates_it():
  """What an outer algorithm writes: jax.grad of a function of the loss."""
  with jax.enable_x64(True):
    runner, params, batch = made('one device')
    model = runner.job.model

    def f(learned, scale):
      return scale * loss_lib.next_token(model, params | learned, batch)

    learned = expert_counts.without(model, params)
    g = jax.jit(jax.grad(f))
    found = [jax.device_get(g(learned, s)) for s in (1.0, 0.5, 0.0)]
  whole, half, none = found
  assert not any(x.any() for x in none.values())
  for path, x in whole.items():
    np.testing.assert_array_equal(2 * half[path], x, err_msg=path)


def test_forward_mode_of_the_router():
  """jvp of its own functions is the gradient times the tangent; the whole loss
  has operations that know the backward pass alone."""
  config = model_schema.Experts(count=E, top_k=2, groups=2, top_groups=1)
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    logits, tangent = rng.normal(size=(2, 3, 5, E))
    valid = rng.random((3, 5)) > 0.2

    def terms(logits):
      s = router.scores(logits, 'sigmoid')
      ids, mix = router.choose(s, config)
      p = router.probabilities(s, 'sigmoid')
      count = router.counts(ids, valid, E)
      f = router.shares(count, 'sequence', ((), ()))
      return (
        router.balance(p, f, valid) + router.z(logits, valid) + (mix**2).sum()
      )

    _, along = jax.jvp(terms, (logits,), (tangent,))
    wanted = (jax.grad(terms)(logits) * tangent).sum()
  np.testing.assert_allclose(along, wanted, rtol=1e-12)
