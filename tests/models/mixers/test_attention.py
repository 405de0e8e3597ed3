"""The attention module against a loop over rows, heads and tokens; its cache.

Legend: B rows, T tokens, D model, N heads, K kv heads, H head width.
"""

import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models.mixers import attention
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, K, H = 2, 7, 6, 4, 2, 4
BASE = dict(
  d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, num_layers=1, window=3,
  rope_theta=50.0, attention_block=8, dtype='float64',
)  # fmt: skip
CASES = {
  'full': ('F', {}),
  'window': ('W', dict(attention_softcap=1.0)),
  'unrotated': ('N', dict(attention_scale=0.3)),
  'biases': ('F', dict(attention_bias=True, attention_output_bias=True)),
  'norm_head': ('F', dict(qk_norm='head', norm_zero_centered=True)),
  'norm_all': ('F', dict(qk_norm='all', norm_epsilon=0.1)),
  'norm_all_centered': ('W', dict(qk_norm='all', norm_zero_centered=True)),
  'learned': ('F', dict(position='learned', max_positions=T)),
  'local': ('W', dict(rope_local_theta=5.0)),
}


def make(kind, **fields):
  """(module with random parameters, {name: array})."""
  module = attention.Attention(schema.Model(**BASE | fields), nnx.Rngs(0), kind)
  rng, w = np.random.default_rng(0), {}
  for (name,), v in nnx.to_flat_state(nnx.state(module, nnx.Param)):
    w[name] = rng.normal(size=v[...].shape)
    getattr(module, name)[...] = jnp.asarray(w[name])
  return module, w


def visibility(module, segments, positions, **slots):
  segments, positions = jnp.asarray(segments), jnp.asarray(positions)
  rotations = attention.rotations(
    module.config, module.kind, positions, jnp.float64
  )
  return attention.Visibility(segments, positions, rotations=rotations, **slots)


def inputs():
  rng = np.random.default_rng(1)
  x = rng.normal(size=(B, T, D))
  segments = np.array([[1] * 3 + [2] * 4, [1] * 5 + [0] * 2], np.int32)
  positions = np.array([[0, 1, 2, 0, 1, 2, 3], [*range(5), 0, 0]], np.int32)
  return x, segments, positions


def reference(config, kind, w, x, segments, positions):
  """One head, one query, one key at a time."""

  def project(name):
    y = np.einsum('td,dnh->tnh', x, w[name]) + w.get(f'{name}_bias', 0)
    scale = w.get(f'{name}_norm')
    if scale is None:
      return y
    axes = (-2, -1) if config.qk_norm == 'all' else -1
    square = (y * y).mean(axes, keepdims=True) + config.norm_epsilon
    return y / np.sqrt(square) * (scale + config.norm_zero_centered)

  theta = config.rope_theta
  if kind == 'W' and config.rope_local_theta:
    theta = config.rope_local_theta

  def turn(y):
    if kind == 'N' or config.position != 'rope':
      return y
    out = np.empty_like(y)
    for t, i in np.ndindex(T, H // 2):
      a = positions[t] * theta ** (-2 * i / H)
      z = (y[t, :, i] + 1j * y[t, :, i + H // 2]) * complex(
        math.cos(a), math.sin(a)
      )
      out[t, :, i], out[t, :, i + H // 2] = z.real, z.imag
    return out

  q, k = turn(project('query')), turn(project('key'))
  v = np.einsum('td,dnh->tnh', x, w['value']) + w.get('value_bias', 0)
  out = np.zeros((T, N, H))
  scale = config.attention_scale or H**-0.5
  for t, n in np.ndindex(T, N):
    first = max(0, t - 2) if kind == 'W' else 0
    seen = [
      s for s in range(first, t + 1) if segments[s] == segments[t] > 0
    ]  # fmt: skip
    if not seen:
      continue
    s = np.array([scale * q[t, n] @ k[j, n // (N // K)] for j in seen])
    if config.attention_softcap:
      s = config.attention_softcap * np.tanh(s / config.attention_softcap)
    p = np.exp(s - s.max())
    out[t, n] = p / p.sum() @ v[seen, n // (N // K)]
  return np.einsum('tnh,nhd->td', out, w['output']) + w.get('output_bias', 0)


@pytest.mark.parametrize('case', CASES)
def test_attention_equals_a_loop(case):
  kind, fields = CASES[case]
  module, w = make(kind, **fields)
  x, segments, positions = inputs()
  see = visibility(module, segments, positions)
  y, state = jax.jit(module.__call__)(jnp.asarray(x), see)
  assert state is None and y.dtype == np.float64
  for b in range(B):
    want = reference(module.config, kind, w, x[b], segments[b], positions[b])
    np.testing.assert_allclose(y[b], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('kind', ['F', 'W'])
def test_a_cache_gives_the_same_as_the_whole(kind):
  """Five tokens at once, then one at a time, into eight slots."""
  module, _ = make(kind, qk_norm='head')
  x, segments, _ = inputs()
  segments = np.ones_like(segments)
  positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  see = visibility(module, segments, positions)
  run = jax.jit(module.__call__)
  whole, _ = run(jnp.asarray(x), see)
  state = module.init_state(B, 8, jnp.float64)
  assert [s.shape for s in state] == [(B, 8, K, H)] * 2
  slot = np.zeros((2, B, 8), np.int32)
  found = []
  for first, last in ((0, 5), (5, 6), (6, 7)):
    part = slice(first, last)
    slot[0, :, part], slot[1, :, part] = segments[:, part], positions[:, part]
    see = visibility(
      module, segments[:, part], positions[:, part], slot=jnp.int32(first),
      slot_segments=jnp.asarray(slot[0]), slot_positions=jnp.asarray(slot[1]),
    )  # fmt: skip
    y, state = run(jnp.asarray(x[:, part]), see, state)
    found.append(y)
  np.testing.assert_allclose(
    jnp.concatenate(found, 1), whole, rtol=1e-10, atol=1e-10
  )
  assert not np.asarray(state[0])[:, T:].any()


def test_widths_have_defaults():
  config = schema.Model(d_model=12, num_heads=3)
  assert config.head_width == 4
  assert attention.num_kv_heads(config) == 3
  config = schema.Model(**BASE)
  assert config.head_width == H
  assert attention.num_kv_heads(config) == K


def test_a_missing_rotation_is_no_silent_identity():
  module, _ = make('F')
  x, segments, positions = inputs()
  see = visibility(module, segments, positions)._replace(rotations={})
  with pytest.raises(KeyError):
    module(jnp.asarray(x), see)


# --- fewer kv heads than shards: every shard computes all, and reads its own

QUICK = {'xla_backend_optimization_level': 0}  # to compile
ROWS, LONG = 4, 8
# Mesh, query heads, kv heads: 2 and 4 shards a kv head; 3 on 2 shards.
FEW = [
  ('data=2,tensor=4', 8, 2),
  ('tensor=8', 8, 2),
  ('data=4,tensor=2', 12, 3),
]


@functools.cache
def few(heads, kv_heads):
  """(module, {name: array}, x, segments, positions, cotangent of y)."""
  module, w = make(
    'F', num_heads=heads, num_kv_heads=kv_heads, qk_norm='all',
    attention_bias=True,
  )  # fmt: skip
  rng = np.random.default_rng(2)
  x, c = rng.normal(size=(2, ROWS, LONG, D))
  segments = np.array([[1] * 3 + [2] * 4 + [0]] * ROWS, np.int32)
  positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0]] * ROWS, np.int32)
  return module, w, x, segments, positions, c


def differentiate(module, w, x, segments, positions, c):
  """(y, dx, {name: dw}); the parameters are arguments."""
  graph, _ = nnx.split(module)
  names = {k: getattr(module, k) for k in w}

  def run(w, x):
    flat = [((k,), v.replace(w[k])) for k, v in names.items()]
    merged = nnx.merge(graph, nnx.from_flat_state(flat))
    return merged(x, visibility(module, segments, positions))[0]

  y, vjp = jax.vjp(run, w, x)
  dw, dx = vjp(c)
  return y, dx, dw


@functools.cache
def one_device(heads, kv_heads):
  module, *args = few(heads, kv_heads)
  run = functools.partial(differentiate, module)
  return jax.tree.map(np.asarray, jax.jit(run, compiler_options=QUICK)(*args))


def on_mesh(mesh, heads, kv_heads, world):
  module, w, *rows = few(heads, kv_heads)
  made = mesh_lib.make(mesh)
  rules = rules_lib.of(schema.Mesh(), dict(made.shape), kv_heads)
  axes = {k: getattr(module, k).get_metadata('axes') for k in w}

  def inside(*args):
    y, dx, dw = differentiate(module, *args)
    held = lambda k: {a for n in axes[k] for a in annotate.carriers(n)}
    left = lambda k: tuple(a for a in annotate.sizes() if a not in held(k))
    return y, dx, {k: jax.lax.psum(d, left(k)) for k, d in dw.items()}

  with annotate.use(rules), jax.set_mesh(made):
    assert annotate.carriers('kv_heads') == ()
    weights = {k: annotate.spec(a) for k, a in axes.items()}
    residual = annotate.spec(attention.RESIDUAL)
    ids = annotate.spec(attention.ROWS)
    specs = (weights, residual, ids, ids, residual)
    put = lambda x, s: jax.device_put(x, jax.NamedSharding(made, s))
    args = jax.tree.map(put, (w, *rows), specs)
    run = functools.partial(differentiate, module)
    if world == 'manual':
      run = jax.shard_map(
        inside,
        in_specs=specs,
        out_specs=(residual, residual, weights),
        check_vma=False,
      )
    run = jax.jit(run, compiler_options=QUICK)
    return jax.tree.map(np.asarray, run(*args))


def assert_near(found, wanted):
  def near(path, a, b):
    bound = 1e-12 * np.abs(wanted[1]).max() if not b.any() else 0
    np.testing.assert_allclose(
      a, b, rtol=0, atol=bound or 1e-11 * np.abs(b).max(), err_msg=str(path)
    )

  jax.tree.map_with_path(near, found, wanted)


@pytest.mark.parametrize('world', ['explicit', 'manual'])
@pytest.mark.parametrize('mesh, heads, kv_heads', FEW)
def test_few_kv_heads(mesh, heads, kv_heads, world):
  found = on_mesh(mesh, heads, kv_heads, world)
  assert_near(found, one_device(heads, kv_heads))


def test_another_shards_heads_are_seen(monkeypatch):
  take = annotate.take

  def next_one(x, names, dimension):
    return jnp.roll(take(x, names, dimension), 1, 1)

  monkeypatch.setattr(annotate, 'take', next_one)
  found = on_mesh(*FEW[0], 'manual')
  with pytest.raises(AssertionError):
    assert_near(found, one_device(*FEW[0][1:]))


def test_kv_heads_on_query_shards():
  """Head n of N reads kv head n K / N, whatever the number of shards."""
  x = np.arange(3.0)[None, None, :, None] + np.zeros((4, 1, 3, 2))
  made = mesh_lib.make('data=4,tensor=2')
  rules = rules_lib.of(schema.Mesh(), dict(made.shape), 3)
  with annotate.use(rules), jax.set_mesh(made):
    sharding = jax.NamedSharding(made, annotate.spec(attention.KEYS))
    got = attention._on_heads(jax.device_put(x, sharding))
    got = np.asarray(got)[0, 0, :, 0]
  assert got.tolist() == [0, 0, 1, 1, 2, 2]
  assert attention._on_heads(x) is x  # no mesh: nothing to repeat for


def test_kv_heads_are_whole_where_query_heads_are():
  """Rules that split keys and not queries: nobody may lose a head."""
  x = np.random.default_rng(0).normal(size=(4, 1, 4, 2))
  made = mesh_lib.make('data=4,tensor=2')
  mesh = schema.Mesh(rules='fsdp_tensor heads=', sequence=False)
  rules = rules_lib.of(mesh, dict(made.shape), 4)
  with annotate.use(rules), jax.set_mesh(made):
    sharding = jax.NamedSharding(made, annotate.spec(attention.KEYS))
    got = np.asarray(attention._on_heads(jax.device_put(x, sharding)))
  np.testing.assert_array_equal(got, x)
