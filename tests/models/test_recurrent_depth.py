"""A core that runs several times, against plain loops, cached and on meshes.

Legend: B rows, T tokens, D model, N heads, V vocabulary.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import checks
from paraxis.models import decoder
from paraxis.models import recurrent_depth
from paraxis.models import stack
from paraxis.sharding import mesh as mesh_lib
from paraxis.train.certify import shrink
from paraxis.train.claims import experiment
from paraxis.train.data import objectives

pytestmark = pytest.mark.usefixtures('float64')

B, T, V, D, N = 2, 7, 11, 8, 2
CORE = dict(prelude=1, core=2, iterations=5, gradients=3)
SMALL = dict(
  vocab_size=V, d_model=D, num_heads=N, d_ff=12, num_layers=4, mlp='relu',
  position='none', attention_block=4, dtype='float64', param_dtype='float64',
)  # fmt: skip


def model_of(recurrence=(), **fields):
  given = SMALL | dict(recurrence=CORE | dict(recurrence)) | fields
  return decoder.Decoder(schema.view(dict(model=given)).model)


def rows(draw=None):
  batch = experiment.documents(B, T, V)
  return batch._replace(draw=None if draw is None else jnp.int32(draw))


# ------------------------------------------------------- against plain loops


def rms(x, scale):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def plain_layer(w, x):
  """One layer of one row (T, D): all pairs of tokens, and a mask."""
  normed = rms(x, w['attention_norm/scale'])
  q, k, v = (
    jnp.einsum('td,dnh->nth', normed, w[f'attention/{name}'])
    for name in ('query', 'key', 'value')
  )
  scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
  scores = jnp.where(np.tri(len(x), dtype=bool), scores, -np.inf)
  y = jax.nn.softmax(scores) @ v
  x = x + jnp.einsum('nth,nhd->td', y, w['attention/output'])
  normed = rms(x, w['mlp_norm/scale'])
  return x + jax.nn.relu(normed @ w['mlp/up']) @ w['mlp/down']


def noise_of(key, batch, b, t):
  own = jax.random.key(key)
  for n in (batch.positions[b, t], batch.tokens[b, t]):
    own = jax.random.fold_in(own, n)
  return jax.random.normal(own, (D,), jnp.float32).astype('f8')


def plain(params, batch, passes, learned, key=0):
  """Features (B, T, D), after the final norm."""
  layer = lambda i: {
    p.removeprefix('layers/'): x[i]
    for p, x in params.items()
    if p.startswith('layers/')
  }
  out = []
  for b in range(B):
    x = params['embedding'][batch.tokens[b]]
    e = plain_layer(layer(0), x)
    s = jnp.stack([noise_of(key, batch, b, t) for t in range(T)])
    for i in range(passes):
      if i == passes - learned:
        s = jax.lax.stop_gradient(s)
      x = e @ params['core/from_input'] + s @ params['core/from_state']
      for n in (1, 2):
        x = plain_layer(layer(n), x)
      s = rms(x, params['core/norm/scale'])
    out.append(rms(plain_layer(layer(3), s), params['norm/scale']))
  return jnp.stack(out)


@pytest.mark.parametrize(
  'draw, passes, learned',
  [(None, 5, 3), (7, 7, 3), (2, 2, 2)],
  ids=['fixed', 'more', 'fewer'],
)
def test_a_row_is_a_loop_over_passes(draw, passes, learned, monkeypatch):
  """Features and all gradients; passes before the learned ones have none."""
  monkeypatch.setattr(
    recurrent_depth, 'passes_of', lambda own, key: jnp.int32(passes)
  )
  model, batch, key = model_of(), rows(draw), draw or 0
  params = module_cases.parameters(model, 0.4)
  weight = np.random.default_rng(3).normal(size=(B, T, D))

  def ours(params):
    return (model.features(params, batch)[0] * weight).sum()

  def loop(params, learned=learned):
    return (plain(params, batch, passes, learned, key) * weight).sum()

  found = jax.jit(jax.value_and_grad(ours))(params)
  support.close(found, jax.jit(jax.value_and_grad(loop))(params), 1e-11)
  # It can fail: one pass less that is learned is another gradient.
  other = jax.grad(functools.partial(loop, learned=learned - 1))(params)
  gap = abs(found[1]['core/from_state'] - other['core/from_state']).max()
  assert gap > 1e-4


def test_without_a_core_it_is_a_stack():
  own = model_of(dict(core=0, prelude=0))
  assert type(own.stack) is stack.Stack
  assert not any(path.startswith('core/') for path in own.axes)


@pytest.mark.parametrize('unroll', [1, 4])
@pytest.mark.parametrize('pattern', ['F', 'WFG', 'MR', 'FSFF', 'D'])
def test_tokens_one_by_one_equal_the_row(pattern, unroll):
  """Every pass has its own keys, values and states; scanned or unrolled."""
  model = model_of(
    pattern=pattern, window=3, num_layers=6, unroll=unroll,
    mamba=dict(head_dim=4, state=4), gated_linear=dict(gate_rank=3),
    recurrent=dict(tolerance=1e-13), gated_delta=dict(heads=2),
  )  # fmt: skip
  params, batch = module_cases.parameters(model, 0.3), rows()
  params = jax.tree.map(jnp.asarray, params)
  whole = jax.jit(model.features)(params, batch)[0]
  found = experiment.stepped(model, model.unstack(params), batch, 3)
  np.testing.assert_allclose(found, whole, rtol=0, atol=1e-11)
  fewer = model_of(dict(iterations=4), pattern='F')
  assert len(fewer.stack.cached) == 1 + 2 * 4 + 1
  assert len(model.stack.cached) == 1 + 2 * 5 + 3


@pytest.mark.parametrize('prelude, core', [(0, 4), (0, 1), (2, 2)])
def test_a_core_may_begin_or_end_a_model(prelude, core):
  model = model_of(dict(prelude=prelude, core=core))
  params = jax.tree.map(jnp.asarray, module_cases.parameters(model, 0.3))
  whole = jax.jit(model.features)(params, rows())[0]
  found = experiment.stepped(model, model.unstack(params), rows(), 3)
  np.testing.assert_allclose(found, whole, rtol=0, atol=1e-11)


def test_more_passes_are_more_work_for_the_same_parameters():
  few, many = model_of(dict(iterations=2)), model_of(dict(iterations=40))
  chex.assert_trees_all_equal(few.axes, many.axes)
  assert many.stack.uses('layers/mlp/up') == (2 + 2 * 40) / 4
  assert many.stack.uses('core/from_state') == 40
  assert many.stack.uses('embedding') == many.stack.uses('core/from_input') == 1


# ------------------------------------------------------------------ training


def config_of(recurrence=(), **train):
  model = SMALL | dict(recurrence=CORE | dict(recurrence))
  return schema.view(dict(model=model, train=train))


def test_passes_are_drawn_for_a_step():
  """1 + a Poisson number whose rate is log-normal: mean iterations + 1,
  variance r + r^2 (e^(spread^2) - 1)."""
  config = config_of(dict(iterations=6, spread=0.3))
  keys = np.array([objectives.drawn(config, t) for t in range(4000)])
  assert keys.dtype == np.int32 and len(set(keys)) > 3990
  passes = np.array(
    jax.vmap(
      lambda k: recurrent_depth.passes_of(
        config.model.recurrence, jax.random.key(k)
      )
    )(keys)
  )
  spread = 6 + 36 * (np.exp(0.09) - 1)
  assert abs(passes.mean() - 7) < 4 * (spread / 4000) ** 0.5
  assert abs(passes.var() / spread - 1) < 0.15
  assert passes.min() >= 1
  assert objectives.drawn(config, 17) == keys[17]
  other = objectives.drawn(config_of(dict(iterations=8), seed=1), 17)
  assert other != keys[17]


def test_passes_are_not_drawn_without_spread():
  """Also where the step draws from a key for something else (zeroth order)."""
  batch = experiment.documents(1, 4, 8)._replace(draw=np.int32(5))
  for spread, fixed in ((0.0, True), (0.5, False)):
    model = config_of(dict(iterations=8, spread=spread)).model
    got = recurrent_depth.start(model, batch, jnp.float32)
    plain = recurrent_depth.start(model, batch._replace(draw=None), jnp.float32)
    assert (got.passes is plain.passes) == fixed
    assert np.array_equal(got[0], plain[0]) == fixed


def test_what_is_not_drawn():
  assert objectives.drawn(config_of(dict(spread=0.0)), 3) is None
  assert objectives.drawn(schema.Config(), 3) is None
  # Held-out rows have the passes of decoding.
  assert objectives.drawn(config_of(), 3, objectives.HELD_OUT) is None


@pytest.mark.parametrize(
  'mesh, train',
  [
    (dict(data=2, fsdp=2, tensor=2), {}),
    (dict(context=4, data=2), dict(remat='full')),
    (dict(fsdp=4, tensor=2, collectives='explicit'), dict(microbatches=2)),
  ],
  ids=['annotated', 'context', 'explicit'],
)
def test_on_a_mesh_it_is_one_device(mesh, train):
  """Loss, gradients and update, of passes that a step draws."""
  model = SMALL | dict(
    recurrence=CORE, num_heads=4, d_model=16, d_ff=16, vocab_size=32
  )
  given = dict(batch_size=16, **train)
  config = schema.view(
    dict(
      model=model, mesh=mesh, train=given, data=dict(sequence_length=32),
      optimizer=dict(warmup_steps=0),
    )
  )  # fmt: skip
  for row in support.certify(config):
    assert row.passed is not False, row


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
  'recurrence, fields, words',
  [
    (dict(prelude=3), {}, ('core=2', 'prelude=3', 'num_layers=4')),
    (dict(core=0), {}, ('core=0', 'prelude=1')),
    ({}, dict(experts=dict(count=4)), ('core=2', 'experts.count=4')),
    ({}, dict(visibility='full'), ('core=2', 'visibility=full')),
    ({}, dict(pattern='H'), ('core=2', 'kind H', "'H'")),
  ],
)
def test_what_a_core_cannot_do(recurrence, fields, words):
  model = SMALL | dict(recurrence=CORE | recurrence) | fields
  with support.refused(*words):
    checks.check_fields(schema.view(dict(model=model)).model)


def test_stages_are_refused():
  with support.refused('core=2', 'mesh.stage=4', 'mesh.stage=1'):
    checks.check_stages(config_of().model, 4)


def test_a_shrunk_model_still_has_a_core():
  model = SMALL | dict(
    num_layers=40, recurrence=dict(prelude=6, core=20, iterations=32)
  )
  config = schema.view(dict(model=model))
  sizes = dict.fromkeys(mesh_lib.AXES, 1)
  small = shrink.config(config, sizes, sizes, 'float64').model
  own = small.recurrence
  assert (own.prelude, own.core, own.iterations) == (1, 2, 3)
  assert small.num_layers >= 4
  checks.check_fields(small)


def test_noise_is_of_a_token():
  """Of its id and position: the same in any row, another with another key."""
  batch = rows()
  found = recurrent_depth.noise(batch, 0, 512, 'float64')
  assert abs(found.mean()) < 0.05 and abs(found.std() - 1) < 0.05
  turned = jax.tree.map(lambda x: x[::-1], batch)
  other = recurrent_depth.noise(turned, 0, 512, 'float64')
  np.testing.assert_array_equal(other, found[::-1])
  assert (recurrent_depth.noise(batch, 1, 512, 'float64') != found).all()
