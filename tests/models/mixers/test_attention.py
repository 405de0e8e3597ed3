"""The attention module against a loop over rows, heads and tokens.

Legend: B rows, T tokens, D model, N heads, K kv heads, H head width.
"""

import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.mixers import attention
from paraxis.models.mixers import slots
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, K, H = 2, 7, 6, 4, 2, 4
BASE = dict(
  d_model=D, num_heads=N, num_kv_heads=K, head_dim=H, num_layers=1, window=3,
  attention_chunk=2,
  rope_theta=50.0, attention_block=8, dtype='float64',
)  # fmt: skip
LLAMA4 = dict(
  query_growth=0.7, query_growth_kinds='unrotated', rope_original_length=2,
  qk_norm='rotated_bare', norm_epsilon=0.1, norm_zero_centered=True,
)  # fmt: skip
CASES = {
  'full': ('F', {}),
  'window': ('W', dict(attention_softcap=1.0)),
  'unrotated': ('N', dict(attention_scale=0.3)),
  'biases': ('F', dict(attention_bias=True, attention_output_bias=True)),
  'norm_head': ('F', dict(qk_norm='head', norm_zero_centered=True)),
  'norm_rotated': ('W', dict(qk_norm='rotated', norm_epsilon=0.1)),
  'norm_all': ('F', dict(qk_norm='all', norm_epsilon=0.1)),
  'norm_all_centered': ('W', dict(qk_norm='all', norm_zero_centered=True)),
  'sinks': ('F', dict(sinks=True)),
  'gate': ('F', dict(attention_gate=True, sinks=True)),
  'gate_bias': ('W', dict(attention_gate=True, attention_bias=True)),
  'chunk': ('K', dict(qk_norm='head')),
  'learned': ('F', dict(position='learned', max_positions=T)),
  'bare': ('W', dict(qk_norm='rotated', norm='rmsnorm_bare')),
  'grown': ('F', dict(query_growth=0.7, rope_original_length=2)),
  'grown_unrotated': ('N', LLAMA4),
  'norm_rotated_bare': ('K', LLAMA4),
  'clipped': ('F', dict(qkv_clip=0.4, attention_bias=True)),
  # GLM-4.5 and MiniMax-M2: the first numbers of a head rotate.
  'part': ('F', dict(rope_fraction=0.5, qk_norm='head', attention_bias=True)),
  'part_all': ('F', dict(rope_fraction=0.5, qk_norm='all')),
  'local': ('W', dict(rope_local_theta=5.0)),
  'both_sides': ('F', dict(visibility='full', sinks=True)),
  'blocks': ('N', dict(visibility='block', block=3)),
}


SEE = module_cases.see_of(((3, 4), (5,)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def make(kind, **fields):
  """(config, run(values, x, see) -> (y, state, aux), {name: values})."""
  config = schema.Model(**BASE | fields)
  return config, *module_cases.module(attention.Attention, config, kind, 1.0)


def clipped(config, y):
  most = config.qkv_clip or math.inf
  return np.array([min(max(v, -most), most) for v in y.flat]).reshape(y.shape)


def grown(config, kind, q, positions):
  first = 0
  if config.query_growth_kinds == 'unrotated':
    if kind != 'N':
      return q
    first = 1
  age = [(p + first) // config.rope_original_length for p in positions]
  factors = [1 + config.query_growth * math.log(1 + a) for a in age]
  return q * np.array(factors)[:, None, None]


def scale_of(config, kind, learned):
  """Of a norm of queries and keys, less what is added to it."""
  if config.norm == 'rmsnorm_bare':
    return 1
  if config.qk_norm == 'rotated_bare' and kind == 'K':
    return 1 - config.norm_zero_centered
  return learned


def reference(config, kind, w, x, segments, positions):
  """One head, one query, one key at a time."""

  def project(name):
    y = np.einsum('td,dnh->tnh', x, w[name]) + w.get(f'{name}_bias', 0)
    y = clipped(config, y)
    late = config.qk_norm in ('rotated', 'rotated_bare')
    return turn(normed(name, y)) if not late else normed(name, turn(y))

  def normed(name, y):
    scale = scale_of(config, kind, w.get(f'{name}_norm'))
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
    out, width = y.copy(), round(H * config.rope_fraction)
    for t, i in np.ndindex(T, width // 2):
      a = positions[t] * theta ** (-2 * i / width)
      z = (y[t, :, i] + 1j * y[t, :, i + width // 2]) * complex(
        math.cos(a), math.sin(a)
      )
      out[t, :, i], out[t, :, i + width // 2] = z.real, z.imag
    return out

  q, k = project('query'), project('key')
  v = np.einsum('td,dnh->tnh', x, w['value']) + w.get('value_bias', 0)
  v = clipped(config, v)
  q = grown(config, kind, q, positions)
  out = np.zeros((T, N, H))
  scale = config.attention_scale or H**-0.5
  for t, n in np.ndindex(T, N):
    first = max(0, t - 2) if kind == 'W' else 0
    chunk = lambda s: positions[s] // 2 if kind == 'K' else 0
    end = T if config.visibility == 'full' else t + 1
    while end < T and config.block and positions[end] % config.block:
      end += 1
    seen = [
      s for s in range(first, end)
      if segments[s] == segments[t] > 0 and chunk(s) == chunk(t)
    ]  # fmt: skip
    if not seen:
      continue
    s = np.array([scale * q[t, n] @ k[j, n // (N // K)] for j in seen])
    if config.attention_softcap:
      s = config.attention_softcap * np.tanh(s / config.attention_softcap)
    p = np.exp(s)
    sink = np.exp(w['sinks'][n]) if config.sinks else 0
    out[t, n] = p / (p.sum() + sink) @ v[seen, n // (N // K)]
  if config.attention_gate:
    gate = np.einsum('td,dnh->tnh', x, w['gate']) + w.get('gate_bias', 0)
    out = out / (1 + np.exp(-gate))
  return np.einsum('tnh,nhd->td', out, w['output']) + w.get('output_bias', 0)


@pytest.mark.parametrize('case', CASES)
def test_attention_equals_a_loop(case):
  kind, fields = CASES[case]
  config, run, w = make(kind, **fields)
  y, state, _ = jax.jit(run)(w, X, SEE)
  assert state is None and y.dtype == np.float64
  for b, row in enumerate(zip(X, SEE.segments, SEE.positions, strict=True)):
    want = reference(config, kind, w, *row)
    np.testing.assert_allclose(y[b], want, rtol=1e-10, atol=1e-10)


MISSING = {
  'sink': (
    'F', dict(sinks=True), attention.Attention, '_sunk', lambda self, o, lse: o
  ),
  'gate': ('F', dict(attention_gate=True), jax.nn, 'sigmoid', jnp.ones_like),
  'border': ('K', {}, slots, 'chunks', lambda segments, *_: segments),
}  # fmt: skip


@pytest.mark.parametrize('part', MISSING)
def test_a_missing_part_is_seen(part, monkeypatch):
  kind, fields, *replaced = MISSING[part]
  _, run, w = make(kind, **fields)
  wanted = run(w, X, SEE)[0]
  monkeypatch.setattr(*replaced)
  assert np.abs(run(w, X, SEE)[0] - wanted).max() > 0.01 * np.abs(wanted).max()


def test_ids_of_chunks_are_those_of_no_other_and_fit():
  see = module_cases.see_of(((7, 3), (1, 9)), 10)
  ids = slots.chunks(see.segments, see.positions, 3, 10)
  assert (np.diff(ids) >= 0).all() and (ids > 0).all()
  assert [len(set(np.asarray(row).tolist())) for row in ids] == [4, 4]
  assert (slots.chunks(0 * ids, see.positions, 3, 10) == 0).all()
  n = 2**20
  assert slots.chunks(np.int32([[n]]), np.int32([[n - 1]]), 2**10, n)[0, 0] > 0
  with support.refused('attention_chunk=64', '1048576 documents of 16384'):
    slots.chunks(see.segments, see.positions, 64, n)


def test_a_missing_rotation_is_no_silent_identity():
  module = attention.Attention(schema.Model(**BASE), nnx.Rngs(0), 'F')
  with pytest.raises(KeyError):
    module(X, SEE._replace(rotations={}))


# --- fewer kv heads than shards: every shard computes all, and reads its own

ROWS, LONG = 4, 8
# Mesh, query heads, kv heads: 2 and 4 shards a kv head; 3 on 2 shards.
FEW = [
  ('data=2,tensor=4', 8, 2),
  ('tensor=8', 8, 2),
  ('data=4,tensor=2', 12, 3),
]


@functools.cache
def few(heads, kv_heads):
  """(run(values, x, segments, positions), axes of values, arguments of
  `module_cases.differentiate`)."""
  config, run, values = make(
    'F', num_heads=heads, num_kv_heads=kv_heads, qk_norm='all',
    attention_bias=True, attention_gate=True,
  )  # fmt: skip
  skeleton = skeleton_lib.Skeleton(
    lambda rngs: attention.Attention(config, rngs, 'F')
  )
  axes = {name: leaf.axes for name, leaf in skeleton.leaves.items()}
  x, c = np.random.default_rng(2).normal(size=(2, ROWS, LONG, D))
  see = module_cases.see_of([(3, 4)] * ROWS, LONG)
  outputs = lambda w, x, *see: run(w, x, attention.Visibility(*see))[0]
  return outputs, axes, (values, x, c, see.segments, see.positions)


@functools.cache
def one_device(heads, kv_heads):
  run, _, args = few(heads, kv_heads)
  run = functools.partial(module_cases.differentiate, run)
  return jax.tree.map(np.asarray, jax.jit(run)(*args))


def on_mesh(mesh, heads, kv_heads, manual):
  made = mesh_lib.make(mesh)
  rules = rules_lib.of(schema.Mesh(), dict(made.shape), kv_heads)
  assert rules.axes('kv_heads') == ()
  run, axes, args = few(heads, kv_heads)
  return module_cases.on_mesh(run, axes, args, made, rules, manual)


def assert_near(found, wanted):
  def near(path, a, b):
    bound = 1e-12 * np.abs(wanted[1]).max() if not b.any() else 0
    np.testing.assert_allclose(
      a, b, rtol=0, atol=bound or 1e-11 * np.abs(b).max(), err_msg=str(path)
    )

  jax.tree.map_with_path(near, found, wanted)


@pytest.mark.parametrize('manual', [False, True])
@pytest.mark.parametrize('mesh, heads, kv_heads', FEW)
def test_few_kv_heads(mesh, heads, kv_heads, manual):
  found = on_mesh(mesh, heads, kv_heads, manual)
  assert_near(found, one_device(heads, kv_heads))


def test_another_shards_heads_are_seen(monkeypatch):
  take = annotate.take

  def next_one(x, names, dimension):
    return jnp.roll(take(x, names, dimension), 1, 1)

  monkeypatch.setattr(annotate, 'take', next_one)
  found = on_mesh(*FEW[0], True)
  with pytest.raises(AssertionError):
    assert_near(found, one_device(*FEW[0][1:]))


def test_kv_heads_are_whole_where_query_heads_are():
  """Rules that split keys and not queries: nobody may lose a head."""
  x = np.random.default_rng(0).normal(size=(4, 4, 4, 2))
  made = mesh_lib.make('data=4,tensor=2')
  mesh = schema.Mesh(rules='fsdp_tensor heads=', sequence=False)
  rules = rules_lib.of(mesh, dict(made.shape), 4)
  with annotate.use(rules), jax.set_mesh(made):
    for names in (attention.KEYS, attention.CACHE):
      sharding = jax.NamedSharding(made, annotate.spec(names))
      got = attention._on_heads(jax.device_put(x, sharding), names)
      np.testing.assert_array_equal(np.asarray(got), x)
