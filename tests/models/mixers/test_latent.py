"""Latent attention against dense loops: two forms, latent shards, layouts.

Legend: B rows, T tokens, D model, N heads, H width of a key without position,
P of the rotated key, U of a value, R of the latent, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import peers
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.decode import step
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import decoder
from paraxis.models.mixers import attention
from paraxis.models.mixers import latent as latent_attention
from paraxis.models.mixers import packed
from paraxis.models.mixers import rope
from paraxis.models.mixers import slot_writes
from paraxis.sharding import annotate

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, V = 3, 11, 8, 4, 32
H, P, U, R = 3, 4, 5, 8
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
    dict(query_rank=6, norm_epsilon=0.3),
    dict(attention_softcap=2.0, norm_epsilon=0.1),
  ),
  'yarn': ({}, YARN),
  'yarn, less': ({}, YARN | dict(rope_mscale=0.7)),
  'unrotated': ({}, dict(position='none', attention_scale=0.7)),
}
close = module_cases.close


def config_of(own, **fields):
  return schema.Model(**TINY | fields, latent=mixer_schema.Latent(**OWN | own))


def test_only_yarn_scales_whole_scores():
  """The factor of longrope is in the rotated columns already."""
  factors = ','.join(['1.0'] * (OWN['rope_dim'] // 2))
  long = dict(
    rope_scaling='longrope', rope_attention_factor=1.5, rope_factor=2.0,
    rope_original_length=64, rope_short_factors=factors,
    rope_long_factors=factors,
  )  # fmt: skip
  config = config_of({}, **long)
  model_checks.check_model(config)
  own = config.latent
  scale = latent_attention.mask_of(config).scale
  assert scale == (own.nope_dim + own.rope_dim) ** -0.5
  plain = config_of({}, rope_scaling='none')
  turns = [
    rope.rotations(c, 'A', SEE.positions, np.float64)['A']
    for c in (config, plain)
  ]
  for a, b in zip(*map(jax.tree.leaves, turns), strict=True):
    np.testing.assert_allclose(a, 1.5 * np.asarray(b), rtol=1e-12)


@functools.cache
def module(name):
  """(config, run(values, x, see) -> y, random values)."""
  own, fields = CASES[name]
  config = config_of(own, **fields)
  model_checks.check_model(config)
  kind = latent_attention.LatentAttention
  run, values = module_cases.module(kind, config, 'A', 0.5)
  return config, lambda *given: run(*given)[0], values


SEE = module_cases.see_of(((4, 1, 5), (11,), (2, 7)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def dense(config, w, x):
  """Every head, query and key; keys and values are made."""
  own = config.latent
  epsilon = own.norm_epsilon or config.norm_epsilon
  rms = lambda x, s: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * s
  f, factor = rope.frequencies(config, P)
  a = SEE.positions[..., None] * f

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
  segments = SEE.segments[:, :, None]
  ok = (segments == SEE.segments[:, None]) & (segments > 0)
  ok = ok & (t[:, None] >= t)
  scale = config.attention_scale or (H + P) ** -0.5
  y = 0
  for n in range(N):
    q = source @ w['query'][:, n]
    k = c @ w['key'][:, n]
    s = jnp.einsum('bth,bsh->bts', q[..., :H], k)
    s = s + jnp.einsum('btp,bsp->bts', rotate(q[..., H:]), shared)
    s = s * scale * factor**2
    if config.attention_softcap:
      s = config.attention_softcap * jnp.tanh(s / config.attention_softcap)
    e = jnp.where(ok, jnp.exp(s), 0)
    p = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30)
    y = y + p @ (c @ w['value'][:, n]) @ w['output'][n]
  return y


@pytest.mark.parametrize('name', CASES)
def test_equals_dense_attention(name):
  config, run, values = module(name)
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE), functools.partial(dense, config), values, X
  )


def test_another_factor_of_yarn_is_seen():
  """The rotated half alone corrected, as other models have it."""
  config, run, values = module('yarn')
  run_dense = jax.jit(lambda config, w: dense(config, w, X), static_argnums=0)
  plain = dataclasses.replace(config, attention_scale=(H + P) ** -0.5 / 1.1)
  found, wanted = jax.jit(run)(values, X, SEE), run_dense(config, values)
  assert close(found, wanted, 1e-12)
  assert not close(run_dense(plain, values), wanted, 1e-3)


# ------------------------------------------------------------------ decoding


@functools.cache
def random_of(shares=()):
  """{path: array} of a decoder, the same for any number of latent shards."""
  out = module_cases.parameters(decoder.Decoder(config_of({})), 0.4)
  if shares:
    out['layers/latent_attention/shares'] = np.tile(shares, (2, 1))
  return out


SHARES = (0.9, 0.1)
EIGHT = (0.3, *(0.1,) * 7)


def tokens_of(rows=B):
  return np.random.default_rng(3).integers(0, V, (rows, T)).astype('i4')


@pytest.mark.parametrize('own', [dict(scores='own'), dict(groups=8)], ids=str)
def test_absorbed_equals_explicit(own):
  """Rows of several lengths, one empty; the cache is the latent's."""
  model, lengths = decoder.Decoder(config_of(own)), [6, 3, 0]
  params, tokens = random_of(), tokens_of()
  want = module_cases.logits(model, params, tokens)
  (start, *steps), cache = module_cases.decoded(
    model, model.unstack(params), tokens, lengths, 2
  )
  assert close(start[0], want[0, :6], 1e-12)
  assert close(start[1, :3], want[1, :3], 1e-12)
  for i, z in enumerate(steps):
    for b, n in enumerate(lengths):
      assert close(z[b], want[b, n + i], 1e-12)
  g = own.get('groups', 1)
  assert cache.states[0][0].shape == (B, g, T, R // g + P)
  assert model.stack.mixer('A').capabilities.exact


def test_shards_with_scores_of_their_own_are_another_model():
  """Prefill is exact; a step is not, and says so."""
  model = decoder.Decoder(config_of(dict(groups=2, scores='own')))
  params, tokens = random_of(shares=SHARES), tokens_of()
  want = module_cases.logits(model, params, tokens)
  (start, first), _ = module_cases.decoded(
    model, model.unstack(params), tokens, [6] * B, 1
  )
  assert close(start, want[:, :6], 1e-12)
  assert not close(first, want[:, 6], 1e-2)
  assert not model.stack.mixer('A').capabilities.exact


def test_many_tokens_behind_others_are_those_one_by_one():
  """The first ones of a prompt are exact, in a lane beside others too."""
  model, count = decoder.Decoder(config_of(dict(groups=2, scores='own'))), 10
  assert count > packed.FEW
  params, form = random_of(shares=SHARES), (packed.Group(B, count),)
  tokens = np.concatenate([tokens_of(), tokens_of()], 1)[:, : 6 + count]
  lengths = np.array([6, 3, 0])
  loose = model.unstack(params)

  @jax.jit
  def lane(loose, cache, tokens):
    rows = step.rows(tokens, jnp.full(B, count), cache.length)
    return model.logits(loose, model.step(loose, cache, rows, form)[0])

  given = model, loose, tokens, lengths
  _, cache = module_cases.decoded(*given, 0)
  (_, *steps), _ = module_cases.decoded(*given, count)
  new = [row[n : n + count] for row, n in zip(tokens, lengths, strict=True)]
  found, steps = (
    np.asarray(lane(loose, cache, np.stack(new))),
    np.stack(steps, 1),
  )
  assert close(found[:2], steps[:2], 1e-12)
  exact = module_cases.logits(model, params, tokens[2:, :count])
  assert close(found[2:], exact, 1e-12) and not close(exact, steps[2:], 1e-3)


def test_latent_shards_equal_a_loop_over_them():
  """One layer's step: the paper's equations, one head and shard at a time."""
  own, g = dict(groups=2, scores='own'), 2
  config = config_of(own, num_layers=1, norm_epsilon=0.0)
  kind = latent_attention.LatentAttention
  run, w = module_cases.module(kind, config, 'A', 0.4)
  w['shares'] = np.array(SHARES)
  x = np.random.default_rng(4).normal(size=(1, T, D))
  out = []
  state = (np.zeros((1, g, T, R // g + P)),)
  form, one = (packed.Group(1, 1),), np.ones((1, 1), np.int32)

  @jax.jit
  def decode(x, at, state):
    plan = packed.plan(form, packed.Packed(one, 0 * one, at), at[0])
    see = attention.Visibility(one, at, plan=plan)
    y, flight, _ = run(w, x, see, state)
    keep = jnp.isfinite(y).all(-1)
    return y, slot_writes.write(form, 1, *state, *flight, keep, plan.ids)

  for t in range(T):
    y, state = decode(x[:, t : t + 1], t * one, state)
    out.append(y[0, 0])
  each, a = R // g, np.arange(T)[:, None] * rope.frequencies(config, P)[0]
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
  """module_cases.certified of eight heads."""
  model = config_of(own, num_heads=8, d_model=16, pattern=pattern)
  return module_cases.certified(model, **mesh)


# What tests/train/certify/test_invariance_mixers.py does not meet.
LAYOUTS = [
  ('A', dict(tensor=8) | EXPLICIT),
  ('A', dict(context=4, tensor=2, context_form='ulysses')),
  ('A', dict(context=4, tensor=2, context_form='token_ring')),
  ('FA', dict(context=2, tensor=4, context_form='all_gather')),
]


@pytest.mark.parametrize('pattern, mesh', LAYOUTS, ids=str)
def test_a_layout_equals_one_device(pattern, mesh):
  rows = certified(mesh, pattern, query_rank=8)
  assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_kernels_are_given_local_arrays(monkeypatch):
  """On a mesh without a context axis, too."""
  seen, choose = [], latent_attention.attention_op.choose

  def chosen(impl, spec=None):
    seen.extend([spec] if spec else [])
    return choose(impl, spec)

  monkeypatch.setattr(latent_attention.attention_op, 'choose', chosen)
  config = schema.Config(
    mesh=schema.Mesh(tensor=2, data=2), model=config_of({}, num_layers=1)
  )
  built = build.build(config, devices=jax.devices()[:4])
  with build.use(built):
    params = jax.jit(lambda: built.model.init(jax.random.key(0)))()
    put = lambda x: annotate.put(jnp.asarray(x), attention.ROWS[: x.ndim])
    batch = jax.tree.map(put, peers.rows(V, (4, 16)))
    jax.jit(lambda p: built.model.features(p, batch)[0]).lower(params)
  assert [spec.sharded for spec in seen] == [False] * len(seen) != []
  assert {spec.q[2] for spec in seen} == {N // 2}


def test_a_shard_without_the_others_keys_is_seen(monkeypatch):
  whole = latent_attention.context.attention

  def alone(q, k, v, positions, segments, mask, plan):
    lonely = jax.lax.axis_index(plan.axis) > 0
    return whole(q, k * lonely, v, positions, segments, mask, plan)

  monkeypatch.setattr(latent_attention.context, 'attention', alone)
  assert not all(row.passed for row in certified(dict(context=8)))


def decoded(own, mesh=None):
  """Logits of two steps of rows of several lengths, and the cache."""
  config = config_of(own)
  params = random_of(shares=EIGHT if own.get('scores') == 'own' else ())
  rows = tokens_of(4), [6, 3, 0, 5], 2
  if mesh:
    out, cache = module_cases.decoded_on_mesh(mesh, config, params, *rows)
  else:
    model = decoder.Decoder(config)
    out, cache = module_cases.decoded(model, model.unstack(params), *rows)
  return np.stack(out[1:], 1), cache


DECODING = [
  (dict(tensor=2, data=2, fsdp=2), dict(groups=2)),
  (dict(tensor=4, fsdp=2), dict(groups=8, scores='own')),
]


@pytest.mark.parametrize('mesh, own', DECODING, ids=str)
def test_decoding_on_a_mesh_equals_one_device(mesh, own):
  found, cache = decoded(own, mesh)
  assert close(found, decoded(own)[0], 1e-12)
  assert jax.typeof(cache.states[0][0]).sharding.spec[1] == 'tensor'


def test_shards_that_are_not_summed_are_seen(monkeypatch):
  mesh, own = DECODING[0]
  wanted, _ = decoded(own)
  monkeypatch.setattr(latent_attention.jax.lax, 'psum', lambda x, axes: x)
  assert not close(decoded(own, mesh)[0], wanted, 1e-3)


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
    build.use(built),
    pytest.raises(errors.UserError, match='groups=2 latent shards .* 4 shards'),
  ):
    built.model.init_cache(4, T)
