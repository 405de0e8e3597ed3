"""Update rules against plain numpy loops; schedules against hand values.

That a mesh changes no update: certify/test_invariance.py.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import depth
from paraxis.train.certify import dtypes
from paraxis.train.updates import adafactor
from paraxis.train.updates import matrices
from paraxis.train.updates import optimizers

# path: (shape, axes, kind, number of input axes after the layers)
LEAVES = {
  'embedding': ((8, 16), ('vocab', 'embed'), 'embedding', 1),
  'norm/scale': ((16,), ('norm',), 'vector', 0),
  'layers/mlp/up': ((2, 16, 12), ('layers', 'embed', 'mlp'), 'matrix', 1),
  'layers/mlp/down': ((2, 12, 16), ('layers', 'mlp', 'embed'), 'matrix', 1),
  'layers/attention/query': (
    (2, 16, 4, 6),
    ('layers', 'embed', 'heads', 'head_dim'),
    'matrix',
    1,
  ),
  'layers/attention/output': (
    (2, 4, 6, 16),
    ('layers', 'heads', 'head_dim', 'embed'),
    'matrix',
    2,
  ),
  'layers/moe/up': (
    (2, 3, 16, 12),
    ('layers', 'experts', 'embed', 'mlp'),
    'matrix',
    1,
  ),
  'layers/moe/down': (
    (2, 3, 12, 16),
    ('layers', 'experts', 'mlp', 'embed'),
    'matrix',
    1,
  ),
}
MODEL = types.SimpleNamespace(
  axes={p: leaf[1] for p, leaf in LEAVES.items()},
  kinds={p: leaf[2] for p, leaf in LEAVES.items()},
  frozen=frozenset(),
  held={},
  inputs={p: leaf[3] for p, leaf in LEAVES.items()},
)
STEPS = 4


def _arrays(seed):
  rng = np.random.default_rng(seed)
  return {
    p: rng.normal(size=leaf[0]).astype(np.float32) for p, leaf in LEAVES.items()
  }


def _settings(**changes):
  base = dict(
    learning_rate=0.01,
    matrix_learning_rate=0.02,
    warmup_steps=2,
    b1=0.8,
    b2=0.9,
    epsilon=0.3,
    weight_decay=0.3,
    matrix_momentum=0.9,
  )
  return schema.Optimizer(**{**base, **changes})


def _run(optimizer):
  """Parameters and optimizer state after STEPS steps."""
  params = jax.tree.map(jnp.asarray, _arrays(0))
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for step in range(STEPS):
    grads = jax.tree.map(jnp.asarray, _arrays(1 + step))
    params, state = update(grads, state, params, jnp.int32(step))
  return jax.tree.map(np.asarray, (params, state))


def _adamw(path, c):
  """Decoupled weight decay, arXiv:1711.05101, algorithm 2."""
  p = _arrays(0)[path].astype(float)
  m, v = np.zeros_like(p), np.zeros_like(p)
  decay = 0.0 if LEAVES[path][2] == 'vector' else c.weight_decay
  for step in range(STEPS):
    g = _arrays(1 + step)[path].astype(float)
    m = c.b1 * m + (1 - c.b1) * g
    v = c.b2 * v + (1 - c.b2) * g * g
    m_hat = m / (1 - c.b1 ** (step + 1))
    v_hat = v / (1 - c.b2 ** (step + 1))
    rate = c.learning_rate * _share(step, c)
    p -= rate * (m_hat / (np.sqrt(v_hat) + c.epsilon) + decay * p)
  return p, m, v


def _share(step, c):
  """Warm-up, then cosine to 0 over the steps that are left."""
  if step + 1 <= c.warmup_steps:
    return (step + 1) / c.warmup_steps
  done = (step + 1 - c.warmup_steps) / (STEPS - c.warmup_steps)
  return 0.5 * (1 + np.cos(np.pi * done))


@pytest.mark.parametrize('path', LEAVES)
def test_adamw_equals_a_numpy_loop(adamw, path):
  c, (params, state) = adamw
  p, m, v = _adamw(path, c)
  np.testing.assert_allclose(params[path], p, rtol=2e-5, atol=1e-6)
  moments = state['adamw'][0]
  np.testing.assert_allclose(moments.mu[path], m, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(moments.nu[path], v, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope='module')
def adamw():
  c = _settings()
  return c, _run(optimizers.Optimizer(c, STEPS, MODEL))


@pytest.mark.parametrize(
  'changes', [{'b1': 0.9}, {'b2': 0.95}, {'weight_decay': 0.2}]
)
def test_every_setting_counts(adamw, changes):
  """What the loop above is compared with would show another setting."""
  _, (params, _) = adamw
  p, _, _ = _adamw('embedding', _settings(**changes))
  assert np.abs(params['embedding'] - p).max() > 1e-5


def _newton_schulz(x):
  """One matrix (in, out): Keller Jordan's quintic, five steps."""
  wide = x.shape[0] > x.shape[1]
  x = x.T if wide else x
  x = x / (np.linalg.norm(x) + 1e-8)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x.T if wide else x


def _muon(path, c):
  """Nesterov momentum with the bias corrections of optax, layer by layer."""
  shape, _, _, inputs = LEAVES[path]
  stacked = 2 if 'moe' in path else 1  # layers, and the experts of each
  fan_in = int(np.prod(shape[stacked : stacked + inputs]))
  fan_out = int(np.prod(shape[stacked + inputs :]))
  p = _arrays(0)[path].astype(float)
  b, m = c.matrix_momentum, np.zeros_like(p)
  for step in range(STEPS):
    g = _arrays(1 + step)[path].astype(float)
    m = b * m + (1 - b) * g
    ahead = b * m / (1 - b ** (step + 2)) + (1 - b) * g / (1 - b ** (step + 1))
    rate = c.matrix_learning_rate * _share(step, c)
    for at in np.ndindex(shape[:stacked]):
      matrix = _newton_schulz(ahead[at].reshape(fan_in, fan_out))
      matrix = matrix * max(1, fan_out / fan_in) ** 0.5
      decay = c.weight_decay * p[at]
      p[at] -= rate * (matrix.reshape(shape[stacked:]) + decay)
  return p, m


@pytest.fixture(scope='module')
def muon():
  c = _settings(name='muon')
  return c, _run(optimizers.Optimizer(c, STEPS, MODEL))


@pytest.mark.parametrize('path', [p for p in LEAVES if 'layers' in p])
def test_muon_equals_a_numpy_loop(muon, path):
  """A stack is two matrices, of experts six; (embed, heads, head_dim) is one
  of 16 x 24."""
  c, (params, state) = muon
  p, m = _muon(path, c)
  np.testing.assert_allclose(params[path], p, rtol=1e-4, atol=2e-5)
  np.testing.assert_allclose(state['muon'][0].mu[path], m, rtol=1e-5, atol=1e-6)


def test_muon_leaves_embeddings_and_norms_to_adamw(muon):
  c, (params, state) = muon
  for path in ('embedding', 'norm/scale'):
    p, _, _ = _adamw(path, c)
    np.testing.assert_allclose(params[path], p, rtol=2e-5, atol=1e-6)
  assert set(state['adamw'][0].mu) == {'embedding', 'norm/scale'}


def test_a_head_is_not_a_matrix_of_its_own(muon):
  """Orthogonalising head by head would give other parameters."""
  _, (params, _) = muon
  c = _settings(name='muon')
  heads = types.SimpleNamespace(**vars(MODEL))
  heads.inputs = {**MODEL.inputs, 'layers/attention/query': 2}
  wrong, _ = _run(optimizers.Optimizer(c, STEPS, heads))
  path = 'layers/attention/query'
  assert np.abs(wrong[path] - params[path]).max() > 1e-3


@pytest.mark.parametrize('path', ['layers/moe/up', 'layers/moe/down'])
def test_experts_are_no_matrix_together(muon, path, monkeypatch):
  """Orthogonalising the experts of a layer as one is seen."""
  right = optimizers.Optimizer._dims

  def wrong(self, path):
    d = right(self, path)
    if 'moe' not in path:
      return d
    return d._replace(batch=1, inputs=2)

  monkeypatch.setattr(optimizers.Optimizer, '_dims', wrong)
  c, _ = muon
  params, _ = _run(optimizers.Optimizer(c, STEPS, MODEL))
  assert np.abs(params[path] - _muon(path, c)[0]).max() > 1e-3


@pytest.mark.parametrize('name', ['soap', 'kron', 'muon'])
def test_products_of_all_bits(name):
  """Of SOAP and Kron: bases and factors of small eigenvalues need them on
  accelerators; Newton-Schulz steps do not."""
  optimizer = optimizers.Optimizer(_settings(name=name), STEPS, MODEL)
  params = jax.tree.map(jnp.asarray, _arrays(0))
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  traced = update.trace(params, state, params, jnp.int32(0)).jaxpr.jaxpr
  found = [
    eqn.params['precision']
    for eqn in dtypes.equations(traced)
    if eqn.primitive.name == 'dot_general'
  ]
  asked = None if name == 'muon' else (jax.lax.Precision.HIGHEST,) * 2
  assert found and set(found) == {asked}


def test_kron_moves_matrices_alike_in_any_order_of_memory():
  """Layers of interleaved stages with an empty row, experts in an order of
  their own: its random probes are of the matrix, not of the row."""
  held = depth.Held((1, -1, 0), (1, (2, 0, 1)))
  other = types.SimpleNamespace(**vars(MODEL))
  other.held = {p: held for p, a in MODEL.axes.items() if 'experts' in a}
  c = _settings(name='kron')
  moved = []
  for model in (MODEL, other):
    optimizer = optimizers.Optimizer(c, STEPS, model)
    laid = lambda flat, of=model.held: {
      p: jnp.asarray(depth.from_order(x, *of.get(p, depth.IN_ORDER)))
      for p, x in flat.items()
    }
    params = laid(_arrays(0))
    state = optimizer.init(params)
    for step in range(3):
      params, state = optimizer.update(
        laid(_arrays(1 + step)), state, params, jnp.int32(step)
      )
    moved.append(params)
  for path in other.held:
    back = depth.to_order(moved[1][path], *held)
    np.testing.assert_allclose(back, moved[0][path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'changes, steps, values',
  [
    # Steps 0, 1, ... : the last one has the final fraction.
    (dict(schedule='constant', warmup_steps=2), 5, [0.5, 1, 1, 1, 1]),
    (dict(schedule='constant', warmup_steps=0), 2, [1, 1]),
    (dict(warmup_steps=2), 6, [0.5, 1, 0.85355, 0.5, 0.14645, 0]),
    (dict(warmup_steps=0), 2, [0.5, 0]),
    (
      dict(warmup_steps=1, final_fraction=0.5),
      5,
      [1, 0.92678, 0.75, 0.57322, 0.5],
    ),
    (
      dict(schedule='wsd', warmup_steps=2, decay_steps=4, final_fraction=0.2),
      8,
      [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
    ),
    (dict(schedule='wsd', warmup_steps=1, decay_steps=0), 3, [1, 1, 1]),
    # A decay longer than the run begins after the warm-up.
    (dict(schedule='wsd', warmup_steps=2, decay_steps=9), 4, [0.5, 1, 0.5, 0]),
  ],
)
def test_schedules(changes, steps, values):
  share = optimizers.schedule(schema.Optimizer(**changes), steps)
  got = [float(share(jnp.int32(step))) for step in range(steps)]
  np.testing.assert_allclose(got, values, atol=1e-5)


def test_rates_scale_the_schedule():
  optimizer = optimizers.Optimizer(_settings(name='muon'), STEPS, MODEL)
  rates = jax.tree.map(float, optimizer.rates(jnp.int32(0)))
  assert rates == pytest.approx(dict(adamw=0.005, muon=0.01))
  only = optimizers.Optimizer(_settings(), STEPS, MODEL)
  assert set(only.rates(jnp.int32(0))) == {'adamw'}


@pytest.mark.parametrize('rate', [1.0, 0.0])
def test_prodigy_before_its_first_gradient(rate):
  """Its estimate is 0 / 0: nothing moves, and the next steps do."""
  fields = dict(learning_rate=rate, weight_decay=0.0, schedule='constant')
  c = _settings(name='prodigy', **fields)
  optimizer = optimizers.Optimizer(c, 12, MODEL)
  given = params = jax.tree.map(jnp.asarray, _arrays(0))
  state, estimates = optimizer.init(params), []
  update = jax.jit(optimizer.update)
  for step in range(12):
    grads = {p: jnp.asarray(g * (step > 0)) for p, g in _arrays(1).items()}
    params, state = update(grads, state, params, jnp.int32(step))
    estimates.append(float(state['prodigy'].estim_lr))
    same = [np.array_equal(params[p], given[p]) for p in params]
    assert all(same) == (step == 0 or not rate)
  assert estimates[0] == np.float32(1e-6)
  assert (estimates[-1] > estimates[0]) == (rate > 0)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
  grads['embedding'] = grads['embedding'].at[0, 0].set(np.inf)
  params, _ = update(grads, optimizer.init(given), given, jnp.int32(0))
  assert np.isnan(params['embedding']).any()  # negative: that does show


def test_moments_are_of_rows_and_columns_of_each_matrix(monkeypatch):
  """Whichever dimensions are the longest: of heads, of experts, of layers."""
  monkeypatch.setattr(adafactor, 'FACTORED', 2)
  optimizer = optimizers.Optimizer(_settings(name='adafactor'), STEPS, MODEL)
  state = _run(optimizer)[1]['adafactor'][0][0]
  shape = lambda p: (state.v_row[p].shape, state.v_col[p].shape)
  assert shape('layers/attention/query') == ((2, 16), (2, 4, 6))
  assert shape('layers/moe/down') == ((2, 3, 12), (2, 3, 16))
  assert shape('embedding') == ((8,), (16,))
  assert shape('norm/scale') == ((1,), (1,))
  axes = optimizer.axes(_arrays(0))
  of = lambda name, p: axes[f'optimizer/adafactor/{name}/{p}']
  assert of('v_col', 'layers/attention/query') == (
    'layers', 'heads', 'head_dim',
  )  # fmt: skip
  assert of('v_row', 'layers/moe/down') == ('layers', 'experts', 'mlp')
  assert not adafactor.kept(matrices.Dims(1, 0), (200, 300))  # norms of layers


@pytest.mark.parametrize('name', ['prodigy', 'schedule_free'])
def test_skipped_steps_do_not_delay_a_schedule(name):
  """At a run's last step, the first that is not skipped."""
  start = jax.tree.map(jnp.asarray, _arrays(0))
  grads = jax.tree.map(jnp.asarray, _arrays(1))

  def moved(step, **changes):
    c = _settings(name=name, weight_decay=0.0, **changes)
    optimizer = optimizers.Optimizer(c, STEPS, MODEL)
    state = optimizer.init(start)
    return optimizer.update(grads, state, start, jnp.int32(step))[0][
      'norm/scale'
    ]

  p, last = start['norm/scale'], STEPS - 1
  if name == 'prodigy':  # a cosine ends at a rate of 0
    fields = dict(final_fraction=0.0, warmup_steps=0)
    np.testing.assert_array_equal(moved(last, **fields), p)
  else:
    fields = dict(schedule='constant')
    late = moved(last, **fields, warmup_steps=STEPS)
    np.testing.assert_allclose(late, moved(0, **fields, warmup_steps=1))
  assert np.abs(moved(0, **fields) - p).max() > 0


@pytest.mark.parametrize(
  'name', ['adamw', 'nadamw', 'sophia', 'ademamix', 'mars', 'schedule_free']
)
def test_what_has_no_gradient_does_not_become_nan(name):
  """At the least epsilon there is; 0 would divide 0 by itself."""
  least = dataclasses.fields(schema.Optimizer)
  (least,) = [f.metadata['low'] for f in least if f.name == 'epsilon']
  optimizer = optimizers.Optimizer(
    _settings(name=name, epsilon=least, weight_decay=0.0), STEPS, MODEL
  )
  start = jax.tree.map(jnp.asarray, _arrays(0))
  grads = jax.tree.map(jnp.zeros_like, start)
  params, _ = optimizer.update(
    grads, optimizer.init(start), start, jnp.int32(0)
  )
  for p, x in params.items():
    np.testing.assert_allclose(x, start[p], rtol=1e-6, err_msg=p)
