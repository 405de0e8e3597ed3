"""Latent attention against dense loops: two forms, latent shards, layouts.

Legend: B rows, T tokens, D model, N heads, H width of a key without position,
P of the rotated key, U of a value, R of the latent, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import mixer_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.decode import step
from paraxis.models import batch
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import latent as latent_attention
from paraxis.sharding import annotate
from paraxis.train.certify import verify

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, V = 3, 11, 8, 4, 32
H, P, U, R = 3, 4, 5, 8
QUICK = {'xla_backend_optimization_level': 0}  # to compile
TINY = dict(
  vocab_size=V, d_model=D, num_heads=N, head_dim=4, d_ff=16, num_layers=2,
  pattern='A', dtype='float64', param_dtype='float64', attention_block=8,
  rope_theta=50.0,
)  # fmt: skip
OWN = dict(rank=R, nope_dim=H, rope_dim=P, value_dim=U)
YARN = dict(
  rope_scaling='yarn', rope_factor=4.0, rope_low_frequency=1.0,
  rope_high_frequency=32.0, rope_original_length=64,
)  # fmt: skip
# name -> (fields of mixer_schema.Latent, of schema.Model)
CASES = {
  'plain': ({}, {}),
  'query latent': (
    dict(query_rank=6),
    dict(attention_softcap=2.0, norm_epsilon=0.1),
  ),
  'yarn': ({}, YARN),
  'unrotated': ({}, dict(position='none', attention_scale=0.7)),
}
jit = functools.partial(jax.jit, compiler_options=QUICK)
close = mixer_cases.close


def config_of(own, **fields):
  return schema.Model(**TINY | fields, latent=mixer_schema.Latent(**OWN | own))


@functools.cache
def module(name):
  """(config, run(values, x, see) -> y, random values)."""
  own, fields = CASES[name]
  config = config_of(own, **fields)
  model_checks.check_model(config)
  kind = latent_attention.LatentAttention
  run, values = mixer_cases.module(kind, config, 'A', 0.5)
  return config, lambda *given: run(*given)[0], values


def see_of(lengths, length=T):
  return mixer_cases.see_of(lengths, length)


PACKED = ((4, 1, 5), (11,), (2, 7))


def inputs(rows=B, length=T, seed=1):
  return np.random.default_rng(seed).normal(size=(rows, length, D))


def yarn(config):
  """(frequencies, factor on all scores) of DeepSeek-V3's rotations, by hand."""
  f = [config.rope_theta ** (-2 * i / P) for i in range(P // 2)]
  if config.rope_scaling != 'yarn':
    return f, 1.0
  at = lambda turns: (
    P
    * math.log(config.rope_original_length / (turns * 2 * math.pi))
    / (2 * math.log(config.rope_theta))
  )
  low = max(math.floor(at(config.rope_high_frequency)), 0)
  high = min(math.ceil(at(config.rope_low_frequency)), P - 1)
  out = []
  for i, x in enumerate(f):
    ramp = min(max((i - low) / (high - low), 0), 1)
    out.append(x / config.rope_factor * ramp + x * (1 - ramp))
  return out, (0.1 * math.log(config.rope_factor) + 1) ** 2


def dense(config, w, x, see):
  """Every head, query and key; keys and values are made."""
  own = config.latent
  rms = lambda x, s: (
    x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * s
  )
  f, factor = yarn(config)
  a = see.positions[..., None] * np.array(f)

  def rotate(y):  # (B, T, P)
    if config.position != 'rope':
      return y
    one, two = y[..., : P // 2], y[..., P // 2 :]
    return jnp.concatenate(
      [one * np.cos(a) - two * np.sin(a), two * np.cos(a) + one * np.sin(a)], -1
    )

  c = rms(x @ w['down'], w['latent_norm'])
  shared = rotate(x @ w['shared_key'])
  source = x
  if own.query_rank:
    source = rms(x @ w['query_down'], w['query_norm'])
  t = np.arange(x.shape[1])
  ok = (see.segments[:, :, None] == see.segments[:, None]) & (
    see.segments[:, :, None] > 0
  )
  ok = ok & (t[:, None] >= t)
  scale = config.attention_scale or (H + P) ** -0.5
  y = 0
  for n in range(N):
    q = source @ w['query'][:, n]
    k = c @ w['key'][:, n]
    s = jnp.einsum('bth,bsh->bts', q[..., :H], k)
    s = s + jnp.einsum('btp,bsp->bts', rotate(q[..., H:]), shared)
    s = s * scale * factor
    if config.attention_softcap:
      s = config.attention_softcap * jnp.tanh(s / config.attention_softcap)
    e = jnp.where(ok, jnp.exp(s), 0)
    p = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30)
    y = y + p @ (c @ w['value'][:, n]) @ w['output'][n]
  return y


def gradients(run, values, see):
  u = np.random.default_rng(2).normal(size=(B, T, D))

  def value(values, x):
    y = run(values, x)
    return jnp.sum(y * u), y

  return jit(jax.grad(value, (0, 1), has_aux=True))(values, inputs())


@pytest.mark.parametrize('name', CASES)
def test_equals_dense_attention(name):
  config, run, values = module(name)
  see = see_of(PACKED)
  (want, dx), y = gradients(lambda w, x: dense(config, w, x, see), values, see)
  (found, dx_found), out = gradients(lambda w, x: run(w, x, see), values, see)
  assert close(out, y, 1e-12) and close(dx_found, dx, 1e-12)
  assert set(found) == set(want) == set(values)
  assert not [p for p in values if not close(found[p], want[p], 1e-11)]


def test_another_factor_of_yarn_is_seen():
  """The rotated half alone corrected, as other models have it."""
  config, run, values = module('yarn')
  see = see_of(PACKED)
  run = jit(run)
  run_dense = jit(
    lambda config, w: dense(config, w, inputs(), see), static_argnums=0
  )
  want = run_dense(config, values)
  plain = dataclasses.replace(config, attention_scale=(H + P) ** -0.5 / 1.1)
  assert close(run(values, inputs(), see), want, 1e-12)
  assert not close(run_dense(plain, values), want, 1e-3)


# ------------------------------------------------------------------ decoding


@functools.cache
def random_of(layers=2, shares=()):
  """{path: array} of a decoder, the same for any number of latent shards."""
  model = decoder.Decoder(config_of({}, num_layers=layers))
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  out = {p: rng.normal(0, 0.4, s.shape) for p, s in shapes.items()}
  if shares:
    out['layers/latent_attention/shares'] = np.tile(shares, (layers, 1))
  return out


SHARES = (0.9, 0.1)
EIGHT = (0.3, *(0.1,) * 7)


def tokens_of(rows=B, length=T):
  return np.random.default_rng(3).integers(0, V, (rows, length)).astype('i4')


def whole(model, params, tokens):
  """Logits of rows of one document each."""
  ones = np.ones_like(tokens)
  order = np.cumsum(ones, 1, dtype=np.int32) - 1
  data = batch.Batch(tokens, None, ones, order, None, None)
  return jit(lambda p: model.logits(p, model(p, data)[0]))(params)


def decoded(model, params, tokens, lengths, chunks=()):
  """Logits (B, .., V) of a prefill, of chunks of tokens, and of two steps."""
  lengths, rows = np.asarray(lengths), np.arange(len(tokens))

  @jit
  def start(params, tokens):
    x, cache = step.prefill(model, params, tokens, jnp.array(lengths), T)
    return model.logits(params, x), cache

  @jit
  def more(params, tokens, cache):
    ones = jnp.ones_like(tokens)
    order = cache.length + jnp.cumsum(ones, 1, dtype=jnp.int32) - 1
    data = batch.Batch(tokens, None, ones, order, None, None)
    x, cache = model(params, data, cache)
    return model.logits(params, x), cache

  z, cache = start(params, tokens[:, : lengths.max()])
  out, advance = [z], jit(functools.partial(step.advance, model))
  for count in chunks:
    part = tokens[:, lengths[0] : lengths[0] + count]
    z, cache = more(params, part, cache)
    out, lengths = [*out, z], lengths + count
  for i in range(2):
    at = lengths + i
    z, cache = advance(
      params, cache, tokens[rows, at], at, np.ones(len(tokens), bool)
    )
    out.append(z[:, None])
  return out, cache


EXACT = [dict(scores='own'), dict(groups=8)]


@pytest.mark.parametrize('own', EXACT, ids=str)
def test_absorbed_equals_explicit(own):
  """Rows of several lengths, one empty; the cache is the latent's."""
  model = decoder.Decoder(config_of(own))
  params, tokens = random_of(), tokens_of()
  want = whole(model, params, tokens)
  (start, *steps), cache = decoded(
    model, model.unstack(params), tokens, [6, 3, 0]
  )
  assert close(start[0], want[0, :6], 1e-12)
  assert close(start[1, :3], want[1, :3], 1e-12)
  for i, z in enumerate(steps):
    for b, n in enumerate([6, 3, 0]):
      assert close(z[b, 0], want[b, n + i], 1e-12)
  g = own.get('groups', 1)
  assert cache.states[0][0].shape == (B, T, g, R // g + P)
  assert model.stack.mixer('A').capabilities.exact


def test_a_prompt_in_chunks_equals_the_prompt():
  model = decoder.Decoder(config_of(dict(groups=2)))
  params, tokens = random_of(), tokens_of()
  want = whole(model, params, tokens)
  out, _ = decoded(model, model.unstack(params), tokens, [4] * B, (3, 2))
  assert close(np.concatenate(out, 1), want, 1e-12)


def test_parts_with_scores_of_their_own_are_another_model():
  """Prefill is exact; a step is not, and says so."""
  model = decoder.Decoder(config_of(dict(groups=2, scores='own')))
  params, tokens = random_of(shares=SHARES), tokens_of()
  want = whole(model, params, tokens)
  (start, first, _), _ = decoded(model, model.unstack(params), tokens, [6] * B)
  assert close(start, want[:, :6], 1e-12)
  assert not close(first[:, 0], want[:, 6], 1e-2)
  assert not model.stack.mixer('A').capabilities.exact


def test_latent_shards_equal_a_loop_over_them():
  """One layer's step: the paper's equations, one head and shard at a time."""
  own, g = dict(groups=2, scores='own'), 2
  config = config_of(own, num_layers=1, norm_epsilon=0.0)
  model, rng = decoder.Decoder(config), np.random.default_rng(4)
  params = model.unstack(random_of(1, SHARES))
  prefix = 'layers/0/latent_attention/'
  w = {
    p.removeprefix(prefix): v for p, v in params.items() if p.startswith(prefix)
  }
  x = rng.normal(size=(1, T, D))
  values = {p: params[f'layers/0/{p}'] for p in model.stack._kinds['A'].leaves}

  @jit
  def one(x, see, state):
    rotations = attention.rotations(config, 'A', see.positions, x.dtype)
    see = see._replace(rotations=rotations)
    return model.stack._kinds['A'].module(values).mixer(x, see, state)

  state, out = model.init_cache(1, T).states[0], []
  order = np.arange(T, dtype=np.int32)[None]
  for t in range(T):
    here = slice(t, t + 1)
    see = attention.Visibility(
      np.ones((1, 1), np.int32), order[:, here], jnp.int32(t),
      (order <= t).astype(np.int32), order,
    )  # fmt: skip
    y, state = one(x[:, here], see, state)
    out.append(y[0, 0])
  each, a = R // g, np.arange(T)[:, None] * np.array(yarn(config)[0])
  rotate = lambda y: np.concatenate([
    y[..., :2] * np.cos(a) - y[..., 2:] * np.sin(a),
    y[..., 2:] * np.cos(a) + y[..., :2] * np.sin(a),
  ], -1)  # fmt: skip
  low, shared = x[0] @ w['down'], rotate(x[0] @ w['shared_key'])
  want = np.zeros((T, D))
  for n in range(N):
    q = x[0] @ w['query'][:, n]
    rotated = rotate(q[:, H:]) @ shared.T
    for i in range(g):
      here = slice(i * each, (i + 1) * each)
      c = low[:, here]
      square = (c * c).sum(-1, keepdims=True) / R
      c = c / np.sqrt(square / SHARES[i]) * w['latent_norm'][here]
      s = (q[:, :H] @ w['key'][here, n].T @ c.T + rotated) * (H + P) ** -0.5
      p = np.tril(np.exp(s))
      o = p / p.sum(-1, keepdims=True) @ c
      want += o @ w['value'][here, n] @ w['output'][n]
  assert close(np.stack(out), want, 1e-12)


# ------------------------------------------------------------------- layouts


EXPLICIT = dict(collectives='explicit', collective_matmul='all')


def certified(mesh, pattern='A', **own):
  """Rows of verify: a layout on 8 devices against one device."""
  config = schema.Config(
    mesh=schema.Mesh(**mesh),
    model=config_of(own, num_heads=8, d_model=16, pattern=pattern),
    data=schema.Data(sequence_length=32),
    optimizer=schema.Optimizer(warmup_steps=0),
    train=schema.Train(batch_size=8),
  )
  subject = verify.Case(config, jax.devices(), True, ())
  return verify.certify(subject, ('loss', 'gradients'))


# What tests/train/certify/test_invariance_mixers.py does not meet.
MORE = [
  ('A', dict(context=4, tensor=2, context_form='ulysses')),
  ('A', dict(context=4, tensor=2, context_form='token_ring')),
  ('FA', dict(context=2, tensor=4, context_form='all_gather')),
]


@pytest.mark.parametrize(
  'pattern, mesh',
  [
    ('A', dict(tensor=8) | EXPLICIT),
    *MORE,
  ],
  ids=str,
)
def test_a_layout_equals_one_device(pattern, mesh):
  rows = certified(mesh, pattern, query_rank=8)
  assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_a_shard_without_the_others_keys_is_seen(monkeypatch):
  whole = latent_attention.context.attention

  def alone(q, k, v, positions, segments, mask, plan):
    lonely = jax.lax.axis_index(plan.axis) > 0
    return whole(q, k * lonely, v, positions, segments, mask, plan)

  monkeypatch.setattr(latent_attention.context, 'attention', alone)
  assert not all(row.passed for row in certified(dict(context=8)))


def on_mesh(mesh, own):
  """Logits of prefill and steps on a mesh, and where the latents lie."""
  config = schema.Config(
    mesh=schema.Mesh(sequence=False, **mesh), model=config_of(own)
  )
  built = build.build(config)
  with build.layout(built):
    params = random_of(shares=EIGHT if own.get('scores') == 'own' else ())
    params = {
      p: jax.device_put(params[p], leaf.sharding)
      for p, leaf in built.params.items()
    }
    put = lambda x: jax.device_put(
      x, jax.NamedSharding(built.mesh, annotate.spec(('batch',)))
    )
    lengths = np.array([6, 3, 0, 5])
    tokens = tokens_of(4)
    model = built.model
    params = jit(model.unstack)(params)
    start = jit(lambda p, x, n: step.prefill(model, p, x, n, T))
    _, cache = start(params, put(tokens[:, :6]), put(lengths))
    advance = jit(functools.partial(step.advance, model))
    out = []
    for i in range(2):
      at = lengths + i
      z, cache = advance(
        params, cache, *map(put, (tokens[np.arange(4), at], at, at >= 0))
      )
      out.append(np.asarray(z))
    return np.stack(out, 1), jax.typeof(cache.states[0][0]).sharding.spec


DECODING = [
  (dict(tensor=2, data=2, fsdp=2), dict(groups=2)),
  (dict(tensor=4, fsdp=2), dict(groups=8, scores='own')),
]


@functools.cache
def alone(groups=1, scores='summed'):
  own = dict(groups=groups, scores=scores)
  model, tokens = decoder.Decoder(config_of(own)), tokens_of(4)
  params = model.unstack(random_of(shares=EIGHT if scores == 'own' else ()))
  out, _ = decoded(model, params, tokens, [6, 3, 0, 5])
  return np.concatenate(out[1:], 1)


@pytest.mark.parametrize('mesh, own', DECODING, ids=str)
def test_decoding_on_a_mesh_equals_one_device(mesh, own):
  found, spec = on_mesh(mesh, own)
  assert close(found, alone(**own), 1e-12)
  assert spec[2] == 'tensor'


def test_parts_that_do_not_add_up_are_seen(monkeypatch):
  monkeypatch.setattr(latent_attention.jax.lax, 'psum', lambda x, axes: x)
  mesh, own = DECODING[0]
  assert not close(on_mesh(mesh, own)[0], alone(**own), 1e-3)


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize('own, text', [
  (dict(rope_dim=5), 'rope_dim=5 is odd'),
  (dict(groups=3), 'rank=8 is not divisible by model.latent.groups=3'),
  (dict(rank=12, rotation='hadamard'), 'rank=12; take pca, or 16'),
])  # fmt: skip
def test_fields_that_contradict(own, text):
  with pytest.raises(errors.UserError, match=text):
    model_checks.check_model(config_of(own))


def test_fewer_latent_shards_than_devices_are_refused():
  config = schema.Config(
    mesh=schema.Mesh(tensor=4, data=2, sequence=False),
    model=config_of(dict(groups=2)),
  )
  built = build.build(config)
  with (
    build.layout(built),
    pytest.raises(errors.UserError, match='groups=2 latent shards .* 4 shards'),
  ):
    built.model.init_cache(4, T)
