"""How layers are joined, against plain loops, cached and on meshes.

Legend: B rows, T tokens, D model, N heads, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.decode import cache as cache_lib
from paraxis.decode import step as decode_step
from paraxis.models import build
from paraxis.models import checks
from paraxis.models import decoder
from paraxis.models.mixers import packed
from paraxis.train.claims import experiment

pytestmark = pytest.mark.usefixtures('float64')

B, T, V, D, N, LAYERS = 2, 7, 11, 8, 2, 4
SMALL = dict(
  vocab_size=V, d_model=D, num_heads=N, d_ff=12, num_layers=LAYERS, mlp='relu',
  position='none', attention_block=4, dtype='float64', param_dtype='float64',
)  # fmt: skip


def model_of(wiring, **fields):
  given = SMALL | dict(wiring=wiring) | FIELDS.get(wiring, {}) | fields
  return decoder.Decoder(schema.view(dict(model=given)).model)


# ------------------------------------------------------- against plain loops


def rms(x, scale):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(w, x, prefix=None):
  """What attention gives one row (T, D): all pairs of tokens, and a mask."""
  normed = rms(x, w['attention_norm/scale'])
  q, k, v = (
    jnp.einsum('td,dnh->nth', normed, w[f'attention/{name}'])
    for name in ('query', 'key', 'value')
  )
  seen = np.tri(len(x), dtype=bool)
  if prefix:
    k, v = (
      jnp.concatenate([a.swapaxes(0, 1), b], 1)
      for a, b in zip(prefix, (k, v), strict=True)
    )
    seen = np.append(np.ones((len(x), k.shape[1] - len(x)), bool), seen, 1)
  scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
  scores = jnp.tanh(scores) if prefix else scores  # STREAMS caps them at 1
  scores = jnp.where(seen, scores, -np.inf)
  y = jax.nn.softmax(scores) @ v
  return jnp.einsum('nth,nhd->td', y, w['attention/output'])


def mlp(w, x):
  normed = rms(x, w['mlp_norm/scale'])
  return jax.nn.relu(normed @ w['mlp/up']) @ w['mlp/down']


def standard(layers, x):
  for w in layers:
    x = x + attention(w, x)
    x = x + mlp(w, x)
  return x


def parallel(layers, x):
  for w in layers:
    x = x + attention(w, x) + mlp(w, x)
  return x


def ladder(layers, x):
  """By the residuals of the part before the last one, as the paper writes."""
  attended, after = x, x  # behind attention, behind the mlp of the last layer
  for w in layers:
    a, m = attention(w, attended), mlp(w, after)
    attended = after + a
    after = attended + m
  return after


def groups(layers, x, size=2):
  """What each layer of a group adds to the same x."""
  for first in range(0, len(layers), size):
    given = [standard([w], x) - x for w in layers[first : first + size]]
    x = x + sum(given)
  return x


PLAIN = dict(standard=standard, parallel=parallel, ladder=ladder, groups=groups)
STREAMS = dict(streams=3, stream_prefix=5, attention_softcap=1.0)
FIELDS = dict(groups=dict(groups=2), streams=STREAMS)


def layers_of(params):
  return [
    {
      p.removeprefix('layers/'): x[i]
      for p, x in params.items()
      if p.startswith('layers/')
    }
    for i in range(LAYERS)
  ]


def plain(join, params, tokens_BT):
  """Features (B, T, D), after the final norm."""
  if join == 'streams':
    return jnp.stack([streams(params, tokens) for tokens in tokens_BT])
  layers = layers_of(params)
  rows = [join(layers, params['embedding'][tokens]) for tokens in tokens_BT]
  return jnp.stack([rms(x, params['norm/scale']) for x in rows])


def streams(params, tokens):
  """Features of a row: each stream with its prefixes, then the mean by w."""
  found = []
  for p in range(STREAMS['streams']):
    x = params['embedding'][tokens]
    for w in layers_of(params):
      prefix = [w[f'attention/prefix_{n}'][p] for n in ('key', 'value')]
      x = x + attention(w, x, prefix)
      x = x + mlp(w, x)
    found.append(rms(x, params['norm/scale']))
  z = jax.nn.silu(jnp.concatenate(found, -1) @ params['mix_in'])
  w = jax.nn.softmax(z @ params['mix_out'])
  w = 0.99 * w + 0.01 / len(found)
  return sum(w[:, p, None] * x for p, x in enumerate(found))


@pytest.mark.parametrize('wiring', [*PLAIN, 'streams'])
def test_a_row_is_a_plain_loop(wiring):
  """Features and all gradients."""
  model, batch = model_of(wiring), experiment.documents(B, T, V)
  params = module_cases.parameters(model, 0.4)
  weight = np.random.default_rng(3).normal(size=(B, T, D))

  def ours(params):
    return (model.features(params, batch)[0] * weight).sum()

  def loop(join, params):
    return (plain(join, params, np.asarray(batch.tokens)) * weight).sum()

  of = lambda join: jax.value_and_grad(functools.partial(loop, join))
  found = jax.jit(jax.value_and_grad(ours))(params)
  support.close(found, jax.jit(of(PLAIN.get(wiring, wiring)))(params), 1e-11)
  # It can fail: joined otherwise, the same layers give something else.
  other = PLAIN['standard' if wiring != 'standard' else 'ladder']
  with pytest.raises(AssertionError):
    support.close(found, jax.jit(of(other))(params), 1e-3)


# -------------------------------------------------------------------- cached


@pytest.mark.parametrize('first', [0, 3])
@pytest.mark.parametrize('pattern', ['F', 'G-F-F'])
@pytest.mark.parametrize('wiring', ['ladder', 'groups', 'streams'])
def test_steps_equal_a_pass(wiring, pattern, first):
  """Token by token, from nothing and behind a prompt."""
  if wiring == 'streams':
    pattern = pattern.replace('G', 'W')
  model = model_of(wiring, pattern=pattern, window=3)
  params, batch = (
    experiment.random_parameters(model),
    experiment.documents(B, T, V),
  )
  wanted = jax.jit(lambda p: model.features(p, batch)[0])(params)
  found = experiment.stepped(model, model.unstack(params), batch, first)
  support.close(found, wanted, 1e-11)


def test_streams_of_lanes_in_several_groups():
  """Of any width, whichever request each lane has; others keep their slots."""
  model = model_of('streams', num_layers=2)
  stacks = experiment.random_parameters(model)
  params = model.unstack(stacks)
  rows, ids = 3, np.random.default_rng(5).integers(0, V, (3, 6))

  @functools.partial(jax.jit, static_argnames='form')
  def step(cache, given, form):
    x, flight = model.step(params, cache, given, form)
    return model.commit(cache, flight, form, given.request < rows), x

  def fed(cache, form, lanes):
    given = decode_step.pack(form, rows, lanes)
    cache, x = step(cache, given, form)
    return cache, x.reshape(-1, D)[np.ravel(given.request) < rows]

  each, one = packed.Group(2, 3, own=False), packed.Group(1, 1, own=False)
  lanes = [(2, ids[2, :3], 0), (0, ids[0, :2], 0), (1, ids[1, :1], 0)]
  cache, x = fed(model.init_cache(rows, 6), (each, one), lanes)
  batch = experiment.documents(rows, 6, V)._replace(tokens=jnp.asarray(ids))
  wanted = model.features(stacks, batch)[0]
  support.close(
    x, jnp.concatenate([wanted[2, :3], wanted[0, :2], wanted[1, :1]]), 1e-11
  )
  cache, x = fed(
    cache, (one, each), [(0, ids[0, 2:3], 2), None, (1, ids[1, 1:4], 1)]
  )
  support.close(x, jnp.concatenate([wanted[0, 2:3], wanted[1, 1:4]]), 1e-11)
  np.testing.assert_array_equal(cache.length, [3, 4, 3])
  reads = cache_lib.sharing(cache, 1)
  with support.refused('model.streams=3', 'decode without sharing'):
    fed(reads, (one,), [(0, ids[0, 3:4], 3)])


# ----------------------------------------------------------------- on meshes

MESHES = {
  'tensor': dict(data=2, tensor=4),
  'replicated residuals': dict(fsdp=2, tensor=4, sequence=False),
  'explicit': dict(context=2, tensor=2, data=2, collectives='explicit'),
  'rings': dict(fsdp=2, tensor=4, collective_matmul='all'),
  'stages': dict(stage=2, fsdp=2, tensor=2),
}


def config_of(wiring, mesh, pipeline=(), train=(), **fields):
  config = support.piped(
    mesh=MESHES[mesh], pipeline=pipeline, layers=5, **dict(train)
  )
  small = dict(d_model=32, d_ff=32, num_kv_heads=4, wiring=wiring)
  model = dataclasses.replace(config.model, **small | fields)
  return dataclasses.replace(config, model=model)


def check(config):
  rows = support.certify(config)
  assert len(rows) == 3 and all(row.passed for row in rows), rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize('mesh', MESHES)
def test_a_ladder_equals_one_device(mesh):
  check(config_of('ladder', mesh))


@pytest.mark.sampled(2)
@pytest.mark.parametrize('mesh', ['explicit', 'stages'])
def test_groups_equal_one_device(mesh):
  check(config_of('groups', mesh, groups=3, num_layers=6))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
  'pipeline',
  [
    dict(schedule='zero_bubble'),
    dict(schedule='interleaved', chunks=2),
    dict(activations='store'),
  ],
  ids=['zero bubble', 'interleaved', 'stored'],
)
def test_a_ladder_in_schedules(pipeline):
  check(config_of('ladder', 'stages', pipeline, dict(remat='full')))


@pytest.mark.sampled(3)
@pytest.mark.parametrize('mesh', ['replicated residuals', 'explicit', 'stages'])
def test_streams_equal_one_device(mesh):
  """Also where kv heads are fewer than their shards."""
  check(config_of('streams', mesh, **STREAMS, num_kv_heads=1))


def test_equal_prefixes_are_one_stream():
  """Whatever the weights; with prefixes that differ they are not."""
  model, batch = model_of('streams'), experiment.documents(B, T, V)
  params = experiment.random_parameters(model)
  alike = {
    p: jnp.broadcast_to(x[:, :1], x.shape) if 'prefix' in p else x
    for p, x in params.items()
  }
  found = model.features(alike, batch)[0]
  other = alike | {'mix_out': params['mix_out'][:, ::-1]}
  support.close(found, model.features(other, batch)[0], 1e-12)
  with pytest.raises(AssertionError):
    support.close(model.features(params, batch)[0], found, 1e-3)


def test_one_stream_is_the_standard_row():
  one = model_of('streams', streams=1)
  plain = model_of('standard', attention_softcap=1.0)
  assert one.axes == plain.axes
  params = module_cases.parameters(plain, 0.4)
  batch = experiment.documents(B, T, V)
  found, wanted = (m.features(params, batch)[0] for m in (one, plain))
  np.testing.assert_array_equal(found, wanted)


# ------------------------------------------------------------------- refused


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(wiring='ladder', residual='shared'), ["'ladder'", "'shared'"]),
    (dict(wiring='parallel', norm_placement='post'), ["'parallel'", "'post'"]),
    (dict(wiring='ladder', pattern='FC'), ['kind C', 'no separate output sum']),
    (
      dict(wiring='ladder', recurrence=dict(core=2)),
      ['recurrence.core=2', 'them alone'],
    ),
    (dict(wiring='groups'), ['model.groups=0', '1 or more']),
    (dict(wiring='streams'), ['model.streams=0', '1 or more']),
    (dict(wiring='streams', streams=2, pattern='FG'), ['streams=2', 'kind G']),
    (
      dict(wiring='streams', streams=2, experts=dict(count=2)),
      ['streams=2', 'every copy'],
    ),
    (
      dict(wiring='streams', streams=2, features=3, visibility='full'),
      ['streams=2', 'model.features=3'],
    ),
    (dict(groups=2), ["'standard'", 'model.groups=2']),
    (dict(wiring='groups', groups=3), ['groups=3', 'num_layers=4']),
  ],
  ids=lambda x: '-'.join(x) if isinstance(x, list) else '',
)
def test_what_cannot_be_joined_is_refused(fields, words):
  model = schema.view(dict(model=SMALL | fields)).model
  with support.refused(*words):
    checks.check_model(model)


def test_a_stage_has_whole_groups():
  config = config_of('groups', 'stages', groups=1, num_layers=4)
  with support.refused('model.groups=1', '1 runs of 4 layers', 'mesh.stage=2'):
    build.build(config)
