"""Experts' counts, and the bias that follows them, against NumPy.

One layer whose attention writes nothing: the router sees normalised rows of the
embedding, so every score follows from three parameters.

Legend: B rows, T tokens, E experts, K choices, D model.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.train import expert_counts
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.updates import optimizers

B, T, E, K, D, V = 2, 24, 6, 2, 8, 32
RATE, SLOTS, STEPS = 0.05, 0.75, 4
WEIGHTS = 'layers/moe/router', 'embedding', 'layers/mlp_norm/scale'

pytestmark = pytest.mark.usefixtures('float64')


def rows(step):
  """(tokens_BT, segments_BT) of a step; some of a row is padding."""
  rng = np.random.default_rng(step)
  segments = np.ones((B, T), np.int32)
  segments[1, T - 5 :] = 0
  return rng.integers(0, V, (B, T), np.int32), segments


def parameters(built):
  rng = np.random.default_rng(0)
  params = {
    p: rng.normal(0, 0.4, leaf.shape) for p, leaf in built.params.items()
  }
  params['layers/attention/output'][:] = 0
  params['layers/moe/router'][:, :, 0] += 0.5  # one of them is overloaded
  params['layers/moe/bias'][:] = 0
  params['layers/moe/load'][:] = 0
  return params


def by_hand(params, bias, step):
  """(assignments to each expert, dropped, mean entropy) of a step."""
  router, table, scale = (params[p] for p in WEIGHTS)
  tokens, segments = rows(step)
  slots = int(np.ceil(B * T * K / E * SLOTS))
  load, dropped, entropy = np.zeros(E), 0, []
  for token in tokens[segments > 0]:
    x = table[token]
    x = x / np.sqrt((x * x).mean() + 1e-6) * scale[0]
    z = np.exp(x @ router[0])
    s = z / z.sum()
    for expert in np.argsort(-(s + bias))[:K]:
      load[expert] += 1
      dropped += load[expert] > slots
    entropy.append(-(s * np.log(s)).sum())
  return load, dropped, np.mean(entropy)


def biases(params):
  """(bias before every step and after the last, `by_hand` of every step):
  b_i <- b_i + rate sign(mean load - load_i), arXiv:2408.15664, algorithm 1."""
  bias, counted = [np.zeros(E)], []
  for step in range(STEPS):
    load, *rest = by_hand(params, bias[-1], step)
    counted.append((load, *rest))
    bias.append(bias[-1] + RATE * np.sign(load.mean() - load))
  return bias, counted


def trained():
  """(parameters, [bias after a step], [numbers of a step])."""
  experts = dict(
    count=E, top_k=K, d_ff=4, region='', balance=0.0, bias_rate=RATE,
    capacity_factor=SLOTS,
  )  # fmt: skip
  config = schema.view({
    'model': dict(
      vocab_size=V, d_model=D, num_layers=1, num_heads=2, experts=experts,
      dtype='float64', param_dtype='float64', norm_epsilon=1e-6,
    ),
    'data': dict(sequence_length=T),
  })  # fmt: skip
  built = build.build(config, devices=jax.devices()[:1])
  settings = schema.Optimizer(learning_rate=0.0)
  optimizer = optimizers.Optimizer(settings, STEPS, built.model)
  step = step_lib.make(built, optimizer, 0.0)
  params, found = parameters(built), ([], [])
  with build.use(built):
    held = jax.tree.map(jnp.asarray, params)
    zeros = [jnp.int32(0)] * 3
    state = state_lib.begun(built.model, jax.jit(optimizer.init), held, zeros)
    grads, update = jax.jit(step.grads), jax.jit(step.update)
    for i in range(STEPS):
      tokens, segments = rows(i)
      order = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
      weights = segments.astype(np.float32)
      data = batch_lib.Batch(
        tokens, tokens, segments, order, weights, weights.sum()
      )
      state, numbers = update(state, *grads(state.variables, data))
      found[0].append(np.asarray(state.counts['layers/moe/bias'][0]))
      found[1].append(jax.device_get(numbers))
  return params, *found


@pytest.fixture(scope='module')
def run(float64):
  return trained()


def test_a_bias_falls_where_an_expert_has_too_much(run):
  params, found, _ = run
  bias, counted = biases(params)
  np.testing.assert_allclose(found, bias[1:], rtol=0, atol=1e-14)
  busiest = np.argmax(counted[0][0])
  assert found[0][busiest] == -RATE
  # The bias matters: without one, later steps count other loads.
  plain = [by_hand(params, np.zeros(E), i)[0] for i in range(STEPS)]
  assert any((a != b[0]).any() for a, b in zip(plain, counted, strict=True))


def test_what_is_logged_of_experts(run):
  params, _, numbers = run
  _, counted = biases(params)
  for found, (load, dropped, entropy) in zip(numbers, counted, strict=True):
    assert dropped
    wanted = {
      'imbalance': load.max() / load.mean(),
      'dropped': dropped / load.sum(),
      'dropped_count': dropped,
      'entropy': entropy,
    }
    for name, value in wanted.items():
      np.testing.assert_allclose(found[f'experts/{name}'], value, rtol=1e-6)
    (shares,) = found['experts/load'].values()
    np.testing.assert_allclose(shares, [load / load.sum()], rtol=1e-6)


def test_what_is_said_of_a_step():
  fields = dict(experts=dict(drop_limit=0.25), recurrent=dict(iterations=7))
  config = schema.view(dict(model=fields)).model

  def said(dropped, again):
    values = {
      'experts/dropped': dropped, 'experts/dropped_count': 5.0,
      'newton/fallbacks': again,
    }  # fmt: skip
    lines, model = [], types.SimpleNamespace(config=config)
    expert_counts.warn(model, 9, values, lines.append)
    return ' '.join(lines)

  assert not said(0.25, 0.0)
  text = said(0.251, 0.0)
  assert text.startswith(
    'step 9: 5 assignments to experts, 25.1% of all, found'
  )
  assert 'model.experts.drop_limit=25.0%' in text and 'Newton' not in text
  text = said(0.1, 0.5)
  assert 'did not solve 50.0%' in text and 'recurrent.iterations=7' in text


def test_a_bias_that_rises_with_the_load_is_seen(run, monkeypatch):
  right = expert_counts.update

  def wrong(model, aux, params):
    new = right(model, aux, params)
    path = 'layers/moe/bias'
    return new | {path: 2 * params[path] - new[path]}

  monkeypatch.setattr(expert_counts, 'update', wrong)
  params, found, numbers = trained()
  bias, counted = biases(params)
  assert np.abs(found[-1] - bias[-1]).max() >= RATE
  last = numbers[-1]['experts/imbalance']
  assert abs(last - counted[-1][0].max() / counted[-1][0].mean()) > 1e-3
