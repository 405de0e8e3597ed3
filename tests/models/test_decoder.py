"""The decoder against plain loops; presets of rules, and their collectives.

Legend: B rows, T tokens, D model, N heads, K kv heads, H head width, F mlp,
V vocabulary, L layers.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import batch
from paraxis.models import build
from paraxis.models import decoder
from paraxis.models import memory
from paraxis.sharding import annotate
from paraxis.sharding.sequence import order as context_order
from paraxis.sharding.tensor import project
from paraxis.train import loss
from paraxis.train import step

pytestmark = pytest.mark.usefixtures('float64')

# No two sizes agree, so that a shape in compiled text names its array.
B, T, V, D, F = 24, 10, 64, 16, 32
LONG = 40  # tokens, where shards of the length must divide them
TINY = dict(
  vocab_size=V, d_model=D, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=F,
  num_layers=2, window=4, dtype='float64', param_dtype='float64',
  attention_block=8, unroll=1,
)  # fmt: skip
# Heads for up to 8 shards.
WIDE = TINY | dict(num_heads=16, num_kv_heads=8, head_dim=2)


def rows(rows=B, length=T, seed=0):
  """Two or three documents a row; padding at the end of every other row."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, V, (rows, length + 1)).astype(np.int32)
  segments = np.sort(rng.integers(1, 4, (rows, length)), 1).astype(np.int32)
  segments[::2, -2:] = 0
  positions = np.zeros_like(segments)
  for t in range(1, length):
    same = segments[:, t] == segments[:, t - 1]
    positions[:, t] = np.where(same, positions[:, t - 1] + 1, 0)
  weights = np.zeros(segments.shape)
  weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (
    segments[:, 1:] > 0
  )
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], segments, positions, weights, weights.sum()
  )


def model_of(remat='none', **fields):
  return decoder.Decoder(schema.Model(**TINY | fields), memory.policy(remat))


randomised = functools.partial(module_cases.parameters, spread=0.3)


def evaluate(model, params, data):
  """Loss and gradients."""
  run = jax.value_and_grad(functools.partial(loss.next_token, model))
  return jax.jit(run)(params, data)


def assert_close(actual, expected, bound):
  """Loss and every leaf, relative to the leaf's largest value."""
  (a, grads), (b, expected_grads) = actual, expected
  assert abs(a - b) <= bound * abs(b)
  assert set(grads) == set(expected_grads)
  for path, want in expected_grads.items():
    got, want = np.asarray(grads[path]), np.asarray(want)
    assert got.dtype == want.dtype and np.abs(want).max() > 0, path
    assert np.abs(got - want).max() <= bound * np.abs(want).max(), path


def reference(config, params, data):
  """The loss by a loop over layers and a dense mask; pre-RMSNorm, SwiGLU."""
  rms = lambda x, s: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * s
  x = params['embedding'][data.tokens]
  t = np.arange(data.tokens.shape[1])
  back = t[:, None] - t
  same = data.segments[:, :, None] == data.segments[:, None]
  same &= data.segments[:, :, None] > 0
  half = config.head_dim // 2
  f = config.rope_theta ** (-np.arange(half) / half)
  turn = jnp.exp(1j * data.positions[..., None, None] * f)

  def rotate(x):
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], -1)

  for i in range(config.num_layers):
    kind = config.pattern[i % len(config.pattern)]
    w = {
      p.removeprefix('layers/'): v[i]
      for p, v in params.items()
      if p.startswith('layers/')
    }
    y = rms(x, w['attention_norm/scale'])
    q, k, v = (
      jnp.einsum('btd,dnh->btnh', y, w[f'attention/{n}'])
      for n in ('query', 'key', 'value')
    )
    if kind != 'N':
      q, k = rotate(q), rotate(k)
    groups = config.num_heads // config.num_kv_heads
    k, v = (jnp.repeat(a, groups, 2) for a in (k, v))
    s = jnp.einsum('btnh,bsnh->bnts', q, k) / config.head_dim**0.5
    reach = config.window if kind == 'W' else len(t)
    ok = (same & (back >= 0) & (back < reach))[:, None]
    p = jnp.where(ok, jax.nn.softmax(jnp.where(ok, s, -1e30)), 0)
    o = jnp.einsum('bnts,bsnh->btnh', p, v)
    x = x + jnp.einsum('btnh,nhd->btd', o, w['attention/output'])
    y = rms(x, w['mlp_norm/scale'])
    gate = y @ w['mlp/gate']
    x = x + (gate / (1 + jnp.exp(-gate)) * (y @ w['mlp/up'])) @ w['mlp/down']
  z = rms(x, params['norm/scale']) @ params['embedding'].T
  nll = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(
    z, data.targets[..., None], -1
  ).squeeze(-1)
  return (nll * data.weights).sum() / data.weights.sum()


@pytest.mark.parametrize('pattern, depth', [('F', 3), ('WF', 5), ('WWF', 5)])
def test_scanned_and_unrolled_equal_a_loop(pattern, depth):
  fields = dict(pattern=pattern, num_layers=depth)
  model, data = model_of(**fields), rows(3)
  params = randomised(model)
  assert model.pattern == tuple((pattern * depth)[:depth])
  wanted = functools.partial(reference, model.config)
  expected = jax.jit(jax.value_and_grad(wanted))(params, data)
  scanned = evaluate(model, params, data)
  assert_close(scanned, expected, 1e-12)
  if pattern == 'WF':  # two units in the loop and one layer after it
    unrolled = evaluate(model_of(**fields | dict(unroll=0)), params, data)
    assert_close(unrolled, scanned, 1e-12)


def test_another_order_of_layers_is_seen():
  model, data = model_of(), rows(3)
  params = randomised(model)
  run = jax.jit(functools.partial(reference, model.config))
  swapped = {p: v[::-1] if 'mlp/up' in p else v for p, v in params.items()}
  right, wrong = run(params, data), run(swapped, data)
  assert abs(wrong - right) > 1e-6 * right


def test_full_remat_saves_memory():
  """Bytes of temporaries in the compiled gradient, eight layers.

  That it keeps the gradients: tests/train/certify/test_verify.py.
  """
  found = {}
  for remat in ('none', 'attention', 'full'):
    model = model_of(remat, num_layers=8, d_ff=256)
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.jit(jax.grad(functools.partial(loss.next_token, model)))
    compiled = gradient.lower(params, rows(8, 128)).compile()
    found[remat] = compiled.memory_analysis().temp_size_in_bytes
  assert found['full'] < 0.5 * found['none'], found
  assert found['full'] < found['attention'] < found['none'], found


def test_bfloat16_arithmetic_stays_close():
  """2**-8 a rounding, a few dozen of them: 3% of the root mean square."""
  narrow = dict(param_dtype='float32')
  model, data = model_of(dtype='float32', **narrow), rows(4)
  data = data._replace(
    weights=data.weights.astype('f4'), denominator=np.float32(data.denominator)
  )
  params = randomised(model)
  exact, grads = evaluate(model, params, data)
  coarse = model_of(dtype='bfloat16', **narrow)
  x, _ = jax.eval_shape(coarse.features, params, data)
  assert x.dtype == jnp.bfloat16
  assert jax.eval_shape(coarse.logits, params, x).dtype == jnp.float32
  found, found_grads = evaluate(coarse, params, data)
  assert found.dtype == jnp.float32 and 0 < abs(found - exact) < 0.01 * exact
  for path, want in grads.items():
    got = found_grads[path]
    assert got.dtype == want.dtype == params[path].dtype == np.float32
    error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
    assert 0 < error < 0.05, (path, error)


def test_a_tied_gradient_is_the_sum_of_both_ends():
  tied, free = model_of(), model_of(tied_embedding=False)
  params, data = randomised(tied), rows(3)
  assert 'head' not in params
  found, grads = evaluate(tied, params, data)
  both = params | dict(head=params['embedding'])
  expected, ends = evaluate(free, both, data)
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  total = ends['embedding'] + ends.pop('head')
  np.testing.assert_allclose(grads['embedding'], total, rtol=1e-12, atol=1e-15)
  assert set(grads) == set(ends)


def test_logits_are_capped():
  plain, capped = model_of(), model_of(logit_softcap=1.5)
  params = randomised(plain)
  x = np.random.default_rng(0).normal(size=(2, T, D))
  z = plain.logits(params, x)
  np.testing.assert_allclose(z, x @ params['embedding'].T, rtol=1e-12)
  assert np.abs(z).max() > 1.5
  np.testing.assert_allclose(
    capped.logits(params, x), 1.5 * np.tanh(z / 1.5), rtol=1e-12
  )


def test_padding_rows_stay_finite():
  model, data = model_of(), rows(2)
  data = data._replace(segments=np.zeros_like(data.segments))
  run = jax.jit(lambda params: model.features(params, data)[0])
  assert np.isfinite(run(randomised(model))).all()


def test_init_is_the_same_under_a_layout():
  model = model_of(num_layers=3)
  params = jax.jit(model.init)(jax.random.key(3))
  assert set(params) == set(model.axes) == set(model.kinds)
  up, down = params['layers/mlp/up'], params['layers/mlp/down']
  assert up.shape == (3, D, F) and up.dtype == jnp.float64
  assert all(np.abs(up[i] - up[j]).max() > 0.1 for i, j in ((0, 1), (0, 2)))
  np.testing.assert_allclose(up.std(), D**-0.5, rtol=0.1)
  np.testing.assert_allclose(down.std(), (F * 6) ** -0.5, rtol=0.1)
  config = schema.Config(model=model.config)
  built = build.build(config, 'data=2,fsdp=2,tensor=2')
  with annotate.use(built.rules), jax.set_mesh(built.mesh):
    sharded = jax.jit(built.model.init)(jax.random.key(3))
  for path, value in params.items():
    # The bits are the same; XLA may fuse the two factors after them.
    np.testing.assert_allclose(sharded[path], value, rtol=1e-15, err_msg=path)
    wanted = built.params[path].sharding
    assert sharded[path].sharding.is_equivalent_to(wanted, value.ndim), path


# Between them they have every kind of parameter and every placement of norms.
KITCHENS = {
  'rope': dict(
    pattern='W', tied_embedding=False, qk_norm='rotated', sinks=True,
    query_growth=0.5, rope_original_length=4, qkv_clip=0.5,
  ),
  'learned': dict(
    position='learned', max_positions=LONG + 2, position_offset=2,
    embedding_norm=True, norm='layernorm',
    norm_placement='sandwich', mlp_bias=True, attention_bias=True,
    attention_output_bias=True, qk_norm='all', logit_softcap=3.0,
    attention_softcap=2.0, mlp='gelu',
  ),
}  # fmt: skip
EXPLICIT = dict(collectives='explicit')
WHOLE = dict(rules='tensor', sequence=False)
# Presets other than the one of tests/train/certify/test_invariance.py.
PRESETS = [
  ('rope', dict(rules='data', data=8)),
  ('learned', dict(rules='fsdp', fsdp=8)),
  ('learned', WHOLE | dict(tensor=8)),
  ('learned', dict(rules='tensor', data=2, tensor=4)),
]


def certified(kitchen, mesh):
  model = schema.Model(**WIDE | KITCHENS[kitchen])
  return module_cases.certified(model, **mesh)


@pytest.mark.parametrize('kitchen, mesh', PRESETS)
def test_a_preset_equals_one_device(kitchen, mesh):
  rows = certified(kitchen, mesh)
  assert len(rows) == 2 and all(row.passed for row in rows), rows


def test_a_dropped_partial_sum_is_seen(monkeypatch):
  """One device's term is missing from the sum over the hidden width."""
  whole = project.project

  def partial(x, x_names, weights, *rest, **options):
    missing = np.arange(F)[:, None] < (F // 8 if annotate.sizes() else 0)
    weights = [
      (e, w._replace(value=jnp.where(missing, 0, w.value)), *names)
      if e == 'BTF,FD->BTD'
      else (e, w, *names)
      for e, w, *names in weights
    ]
    return whole(x, x_names, weights, *rest, **options)

  monkeypatch.setattr(project, 'project', partial)
  assert not any(row.passed for row in certified('learned', PRESETS[2][1]))


@functools.cache
def placed(mesh, kitchen, **choices):
  """(Built, compiled loss and gradients) of a layout."""
  config = schema.Config(
    mesh=schema.Mesh(**choices),
    model=schema.Model(**WIDE | KITCHENS[kitchen]),
    data=schema.Data(sequence_length=LONG),
  )
  built = build.build(config, mesh)
  build.check_rows(B, built, 'batch')
  with build.use(built):
    run = jax.jit(step.make(built, None, 0.0).grads)
    return built, run.lower(built.params, put_rows(built)).compile()


def put_rows(built):
  """The batch on the mesh, its tokens in the order of the context axis."""
  plan, order = built.model.layout.context, slice(None)
  if plan is not None:
    order = context_order.permutation(plan.layout, plan.n, LONG)
  with build.use(built):
    spec = annotate.spec(('batch', 'length'))
  put = lambda x, s: jax.device_put(x, jax.NamedSharding(built.mesh, s))
  return jax.tree.map(
    lambda x: put(x[:, order], spec) if np.ndim(x) else put(x, P()),
    rows(B, LONG),
  )


def test_a_denominator_of_each_shard_is_seen():
  """A mean of means over 8 shards of unequal weight."""
  model, data = model_of(), rows()
  params = randomised(model)
  parts = data.weights.reshape(8, -1).sum(1)
  assert len(set(parts)) > 1
  each = np.repeat(parts, B // 8)[:, None]
  wrong = data._replace(weights=data.weights / each, denominator=8.0)
  run = jax.jit(functools.partial(loss.next_token, model))
  right = run(params, data)
  assert abs(run(params, wrong) - right) > 1e-6 * right


def collectives(compiled, name):
  """Shapes (without element type) that a collective of that name makes."""
  found = []
  for line in compiled.as_text().splitlines():
    m = re.search(rf'= (.*?) {name}(-start)?\(', line)
    if m:
      found += re.findall(r'\b[a-z]+\d+\[([\d,]*)\]', m[1])
  return [tuple(map(int, filter(None, s.split(',')))) for s in found]


def test_whole_residuals_are_summed_twice_a_layer_and_direction():
  """arXiv:2104.04473, section 2.3: a scan's body stands for every layer."""
  _, compiled = placed('tensor=8', 'learned', **WHOLE)
  for name in ('all-gather', 'all-to-all', 'collective-permute'):
    assert not collectives(compiled, name)
  sums = collectives(compiled, 'all-reduce')
  # Two forward and two backward in the layers; the embedding, and the logits'
  # backward pass. All else that is reduced is smaller.
  assert sums.count((B, LONG, D)) == 6
  assert max(np.prod(s) for s in sums if s != (B, LONG, D)) < B * LONG * D


def test_split_residuals_are_gathered_and_scattered():
  """arXiv:2205.05198, section 4.2.2, in a manual region."""
  _, compiled = placed('tensor=8', 'rope', **EXPLICIT)
  part = (B, LONG // 8, D)
  for name in ('all-to-all', 'collective-permute'):
    assert not collectives(compiled, name)
  # In a layer 2 forward and 2 backward; the embedding; the logits, backward.
  assert collectives(compiled, 'reduce-scatter') == [part] * 6
  # In a layer 2 forward, and backward 2 of the inputs again and 2 of
  # cotangents; one more at each end (XLA finds the logits' second one equal).
  assert collectives(compiled, 'all-gather') == [(B, LONG, D)] * 8
  # No activation is all-reduced: their sums are scattered.
  assert not [s for s in collectives(compiled, 'all-reduce') if D in s[2:]]


@pytest.mark.parametrize('kitchen, choices', [
  ('learned', dict(rules='fsdp')), ('rope', EXPLICIT)])  # fmt: skip
def test_fsdp_gathers_weights_and_never_rows(kitchen, choices):
  built, compiled = placed('fsdp=8', kitchen, **choices)
  for name in ('all-to-all', 'collective-permute'):
    assert not collectives(compiled, name)
  gathered = collectives(compiled, 'all-gather')
  sizes = set()  # of what fsdp shards: tables whole, matrices a layer at once
  for path, value in built.params.items():
    if 'fsdp' in value.sharding.spec:
      stacked = path.startswith('layers/')
      sizes.add(int(np.prod(value.shape[1 if stacked else 0 :])))
  _, laid_out, _ = compiled.output_shardings
  for path, value in built.params.items():
    assert laid_out[path].is_equivalent_to(value.sharding, value.ndim), path
  assert gathered
  for shape in gathered:
    assert B not in shape and B * LONG not in shape, shape
    assert int(np.prod(shape)) in sizes, shape
  if choices == EXPLICIT:  # XLA on CPU forms no reduce-scatter of its own
    scattered = collectives(compiled, 'reduce-scatter')
    assert {int(np.prod(s)) * 8 for s in scattered} == sizes
    reduced = collectives(compiled, 'all-reduce')
    assert not [s for s in reduced if int(np.prod(s)) in sizes], reduced
