"""A side network against a plain loop over tokens, on meshes, and in a run.

Legend: B rows, T tokens, D model, R width, L layers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import loop
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models import side
from paraxis.models import trained
from paraxis.models.text import tokenizer as tokenizer_lib
from paraxis.train import loss as loss_lib
from paraxis.train.certify import trial

pytestmark = pytest.mark.usefixtures('float64')

R, LAYERS = 4, 4
SIDE = {'train.side': R}
UNTIED = {'model.tied_embedding': False}
SMALL = {'train.batch_size': 4, 'data.sequence_length': 8}
LAYOUTS = {
  'annotated': dict(mesh=dict(data=2, fsdp=2, tensor=2, zero=1)),
  'whole': dict(mesh=dict(data=2, context=2, tensor=2, sequence=False)),
  'explicit': dict(
    mesh=dict(fsdp=2, context=2, tensor=2, collectives='explicit')
  ),
  'rings': dict(mesh=dict(data=2, tensor=4, collective_matmul='all')),
}
MODELS = {
  'one kind': {},
  'a unit and a rest': {'model.pattern': 'FWF', 'model.window': 6},
  'unrolled': {'model.unroll': LAYERS},
  'a recurrence': {
    'model.pattern': 'FM', 'model.mamba.head_dim': 4, 'model.mamba.state': 8,
  },
  'both ways': {'model.visibility': 'full', 'model.mask_id': 31,
                'train.objective': 'masked'},
  'parallel': {'model.wiring': 'parallel'},
  'experts': {'model.experts.count': 4, 'model.experts.d_ff': 8},
}  # fmt: skip


def config_of(changes=(), **layout):
  config = support.piped(**layout, layers=LAYERS)
  return schema.with_values(config, SIDE | dict(changes))


def on_one(changes=()):
  """(trial.Runner on one device, random parameters, a packed batch)."""
  config = config_of(SMALL | dict(changes))
  runner = trial.Runner(config, jax.devices()[:1])
  rng = np.random.default_rng(0)
  params = {
    p: rng.normal(0.5 if runner.job.model.kinds[p] == 'vector' else 0, 0.3,
                  x.shape)
    for p, x in sorted(runner.job.built.params.items())
  }  # fmt: skip
  return runner, params, trial.batches(config, packed=True)[0]


# --------------------------------------------------------- against plain loops


def states(config, params, batch):
  """[h_0 .. h_L] of rows, each the last of a decoder cut there."""
  found = []
  model = decoder.Decoder(config.model)
  x, see = model._begun(params, batch)
  found.append(x)
  for n in range(1, LAYERS + 1):
    carry, _ = model.stack.run(model.pattern[:n], params, x, see)
    found.append(carry)
  return found


def norm(x, w, name):
  x = x - x.mean()
  x = x / jnp.sqrt((x * x).mean() + 1e-6)
  return x * w[f'{name}/scale'] + w[f'{name}/bias']


def of_document(w, h, full):
  """What a document's tokens (n, D) of each level have added: (n, D)."""
  level = lambda l: {
    p.removeprefix('side/levels/'): x[l]
    for p, x in w.items()
    if p.startswith('side/levels/')
  }
  own = {p.removeprefix('side/'): x for p, x in w.items()}
  low = [
    jnp.stack([norm(x @ level(l)['down'], level(l), 'norm') for x in rows])
    for l, rows in enumerate(h)
  ]
  out, n = [], len(h[0])
  for t in range(n):
    seen = n if full else t + 1
    mean = [x[:seen].mean(0) for x in low]
    gate = jnp.stack([own['gate'] @ (mean[-1] * m) for m in mean[:-1]])
    share = jnp.exp(gate) / jnp.exp(gate).sum()
    total = 0.0
    for g, x in zip(share, low[:-1], strict=True):
      c = jnp.maximum(x[:seen] @ low[-1][t], 0.0)
      total = total + g * (c @ x[:seen] / (c.sum() + 1e-8) + x[t])
    y = low[-1][t] + norm(total @ own['mix'], own, 'norm')
    out.append(jnp.maximum(y, 0.0) @ own['up'])
  return jnp.stack(out)


def plain(config, params, batch, learned):
  """(features, nats per target) by loops, of parameters that are learned."""
  w, full = params | learned, config.model.visibility == 'full'
  h = [np.asarray(x) for x in states(config, params, batch)]
  model = decoder.Decoder(config.model)
  x_BTD = model.normalise(params, jnp.asarray(h[-1]))
  rows = []
  for b, segments in enumerate(np.asarray(batch.segments)):
    row = jnp.zeros_like(x_BTD[b])
    for one in sorted({*segments.tolist()} - {0}):
      at = np.flatnonzero(segments == one)
      row = row.at[at].set(of_document(w, [x[b, at] for x in h], full))
    rows.append(row)
  seen = (np.asarray(batch.segments) > 0)[..., None]
  y_BTD = jnp.where(seen, x_BTD + jnp.stack(rows), 0)
  nats = loss_lib._of_features(model, params, y_BTD, batch)
  return nats / batch.denominator, y_BTD


def differences(changes=(), remat='none'):
  """(gradients, those of loops, features, those of loops, masked alike)."""
  runner, params, batch = on_one({'train.remat': remat} | dict(changes))
  model = runner.job.model
  _, found, _ = runner.gradients(runner.start(params), batch)
  learned = {p: params[p] for p in found}
  with build.use(runner.job.built):
    run = functools.partial(plain, runner.config, params, batch)
    wanted, features = jax.grad(run, has_aux=True)(learned)
    y_BTD, _ = jax.jit(model.features)(params, runner.put(batch))
  y_BTD = jnp.where((batch.segments > 0)[..., None], y_BTD, 0)
  return jax.device_get((found, wanted, y_BTD, features))


@pytest.mark.parametrize(
  'name, remat',
  [(name, 'none') for name in MODELS]
  + [(name, 'full') for name in ('one kind', 'a unit and a rest', 'experts')],
)
def test_a_plain_loop(name, remat):
  found, wanted, y, features = differences(MODELS[name], remat)
  assert found.keys() == wanted.keys() and all(map(trained.is_added, found))
  support.close(found, wanted, 1e-9)
  np.testing.assert_allclose(y, features, 0, 1e-9 * np.abs(features).max())
  assert all(np.abs(x).max() > 1e-6 for x in wanted.values())


@pytest.mark.parametrize('wrong', ['own', 'order', 'segments'])
def test_a_wrong_term_shows(monkeypatch, wrong):
  """Tokens without their own states, of later tokens, of other documents."""
  if wrong == 'own':
    plus = side.Side.read

    def read(own, params, lows, batch):
      zero = jnp.concatenate([0 * lows[:-1], lows[-1:]])
      return plus(own, params, lows, batch) + plus(own, params, zero, batch)

    monkeypatch.setattr(side.Side, 'read', read)
  elif wrong == 'order':
    ever = lambda own, batch: (
      batch.segments[:, :, None] == batch.segments[:, None]
    )
    monkeypatch.setattr(side.Side, '_seen', ever)
  else:
    right = side.Side._seen
    one = lambda own, batch: right(
      own, batch._replace(segments=jnp.ones_like(batch.segments))
    )
    monkeypatch.setattr(side.Side, '_seen', one)
  found, wanted, _, _ = differences()
  with pytest.raises(AssertionError):
    support.close(found, wanted, 1e-6)


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_no_gradient_enters_the_layers(remat):
  """Whoever differentiates every parameter: the norm and the head have theirs,
  as without a side network, what is before them none."""
  runner, params, batch = on_one({'train.remat': remat} | UNTIED)
  base = {p: x for p, x in params.items() if not trained.is_added(p)}
  up = params | {'side/up': 0 * params['side/up']}
  plain_model = decoder.Decoder(runner.config.model)
  with build.use(runner.job.built):
    rows = runner.put(batch)
    of = lambda model: jax.grad(functools.partial(loss_lib.next_token, model))
    found = of(runner.job.model)(jax.tree.map(jnp.asarray, up), rows)
    wanted = of(plain_model)(jax.tree.map(jnp.asarray, base), rows)
  ends = {'head', 'norm/scale'}
  support.close(*({p: x[p] for p in ends} for x in (found, wanted)), 1e-12)
  assert all(np.any(wanted[p]) for p in wanted)
  assert not any(np.any(found[p]) for p in wanted.keys() - ends)


def test_the_head_is_learned_beside_it():
  runner, params, batch = on_one({'train.learn': 'head'} | UNTIED)
  _, found, _ = runner.gradients(runner.start(params), batch)
  assert {p for p in found if not trained.is_added(p)} == {'head'}
  off = trial.Runner(
    schema.with_values(runner.config, {'train.side': 0, 'train.learn': ''}),
    jax.devices()[:1],
  )
  base = {p: x for p, x in params.items() if not trained.is_added(p)}
  params['side/up'] = 0 * params['side/up']
  _, found, _ = runner.gradients(runner.start(params), batch)
  _, wanted, _ = off.gradients(off.start(base), batch)
  support.close({'head': found['head']}, {'head': wanted['head']}, 1e-12)


@pytest.mark.parametrize('remat', ['none', 'full'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_layout(layout, remat):
  config = config_of({'train.remat': remat}, **LAYOUTS[layout])
  rows = support.certify(config)
  assert len(rows) == 3 and all(row.passed for row in rows), rows


def test_a_replica_that_steps_alone():
  """Each has its own gradient, of its own rows."""
  config = config_of(mesh=dict(replica=2, fsdp=2, tensor=2))
  outer = schema.Outer(exchange='mean', period=4)
  config = dataclasses.replace(config, outer=outer)
  both = trial.Runner(config, jax.devices()[:8])
  _, params, batch = on_one({'train.batch_size': 8, 'data.sequence_length': 16})
  found = jax.device_get(both.gradients(both.start(params), batch)[1])
  one = trial.Runner(config_of(), jax.devices()[:1])
  for r, half in enumerate((slice(0, 4), slice(4, 8))):
    rows = batch._replace(
      **{n: getattr(batch, n)[half] for n in batch._fields[:5]},
      denominator=batch.weights[half].sum(),
    )
    _, wanted, _ = one.gradients(one.start(params), rows)
    support.close({p: x[r] for p, x in found.items()}, wanted, 1e-9)


@pytest.mark.parametrize('name', ['a unit and a rest', 'experts'])
def test_models_on_a_mesh(name):
  mesh = dict(fsdp=2, context=2, tensor=2, collectives='explicit')
  rows = support.certify(config_of(MODELS[name], mesh=mesh))
  assert all(row.passed for row in rows), rows


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'train.lora.rank': 2}, ('train.lora.rank=2', 'take one')),
    ({'mesh.stage': 2}, ('train.side=4', 'mesh.stage=2', 'stage=1')),
    ({'train.estimator': 'zeroth_order'},
     ('train.estimator=zeroth_order', "'backprop'")),
    ({'train.learn': 'layers/mlp/*'},
     ("train.learn='layers/mlp/*'", 'layers/mlp/down', "'head'")),
    ({'train.learn': 'hat'}, ("'hat'", 'matches no parameter')),
    ({'train.learn': 'head', 'train.side': 0},
     ("train.learn='head'", 'train.side')),
    ({'model.wiring': 'ladder'}, ("model.wiring='ladder'", "'standard'")),
    ({'model.recurrence.core': 2, 'model.recurrence.prelude': 1},
     ('model.recurrence.core=2', 'and 0')),
    ({'train.objective': 'block', 'model.visibility': 'block',
      'model.block': 4, 'model.mask_id': 31},
     ("train.objective='block'", "'next_token'")),
  ],
)  # fmt: skip
def test_refusals(changes, words):
  config = config_of(changes)
  with support.refused(*words):
    build.build(config, devices=jax.devices()[: config.mesh.stage])


def test_decoding_is_refused():
  config = config_of({'model.vocab_size': 264})
  built = build.build(config, 'data=1', devices=jax.devices()[:1])
  with build.use(built):
    params = built.model.init(jax.random.key(0))
  with support.refused('train.side=4', 'paraxis evaluate'):
    loop.Generator(built, params, tokenizer_lib.load('bytes'), schema.Decode())
