"""Context parallel attention against the op on one device, in float64.

Every form: o, lse and the gradients of q, k, v, with random cotangents on both
outputs. Some mistakes leave the output exact and spoil gradients only; those
that are known are made here on purpose and must be found.
"""

import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import registry
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import gpu as attention_gpu
from paraxis.pallas_kernels.attention import op as attention_op
from paraxis.pallas_kernels.attention import tpu as attention_tpu
from paraxis.pallas_kernels.attention import xla as attention_xla
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.sequence import attention as context
from paraxis.sharding.sequence import forms as context_forms
from paraxis.sharding.sequence import order as context_order

B, NAMES = 2, ('o', 'lse', 'dq', 'dk', 'dv')


def documents(length, tail):
  """(segments, positions): packed rows; `tail` tokens of padding at the end."""
  rng = np.random.default_rng(1)
  segments = np.sort(rng.integers(1, 5, (B, length)), 1).astype(np.int32)
  segments[0, :3] = 0
  segments[:, length - tail :] = 0
  positions = np.zeros_like(segments)
  for t in range(1, length):
    same = segments[:, t] == segments[:, t - 1]
    positions[:, t] = np.where(same, positions[:, t - 1] + 1, 0)
  return segments, positions


# name -> mesh, layout, length, (N, K, H, H of v), documents, mask
CASES = {
  'causal': ('context=8', 'zigzag', 64, (8, 8, 4, 4), None, {}),
  'packed_softcap': (
    'context=8', 'zigzag', 128, (8, 2, 4, 6), 9, dict(softcap=2.0)
  ),
  'window': ('context=8', 'contiguous', 128, (8, 2, 4, 4), 34, dict(window=20)),
  'striped': ('context=8', 'striped', 64, (8, 4, 4, 4), 0, dict(window=30)),
  'full': ('context=8', 'zigzag', 80, (8, 1, 4, 4), 0, dict(causal=False)),
  'two_axes': (
    'context=4,tensor=2', 'zigzag', 64, (8, 4, 4, 4), 7, dict(window=25)
  ),
}  # fmt: skip


@functools.cache
def problem(name):
  """(mask, (q, k, v, do, dlse), (segments, positions)) as NumPy."""
  _, _, length, (n, k, h, v), tail, options = CASES[name]
  rng = np.random.default_rng(0)
  shapes = (n, h), (k, h), (k, v), (n, v), (n,)
  arrays = [rng.normal(size=(B, length, *s)) for s in shapes]
  mask = attention_op.Mask(**{'scale': 0.4, 'block': 4, **options})
  if tail is None:
    rows = np.ones((B, length), np.int32), np.arange(length)[None]
    return mask, arrays, np.broadcast_arrays(*rows)
  return mask, arrays, documents(length, tail)


def both(attend, q, k, v, do, dlse):
  """o, lse, dq, dk, dv."""
  out, back = jax.vjp(attend, q, k, v)
  return *out, *back((do, dlse))


@functools.cache
def expected(name):
  mask, arrays, (segments, _) = problem(name)

  def attend(q, k, v):
    return attention_op.attention(q, k, v, mask, (segments, segments))

  with jax.enable_x64(True):
    run = jax.jit(functools.partial(both, attend))
    return [np.asarray(x) for x in run(*arrays)]


def sharded(name, form, inner=0, dtype=np.float64):
  """o, lse, dq, dk, dv of one form on the case's mesh, in the global order."""
  where, layout, length, *_ = CASES[name]
  mask, arrays, rows = problem(name)
  arrays = [x.astype(dtype) for x in arrays]
  mesh = mesh_lib.make(where)
  n, heads = mesh.shape['context'], 'tensor' if 'tensor' in where else None
  plan = context.ContextPlan(form, 'context', n, layout, inner)

  def local(q, k, v, do, dlse, segments, positions):
    def attend(q, k, v):
      return context.attention(q, k, v, positions, segments, mask, plan)

    return both(attend, q, k, v, do, dlse)

  wide, row = P(None, 'context', heads), P(None, 'context')
  specs = (wide,) * 5 + (row,) * 2
  there = context_order.permutation(layout, n, length)
  with jax.enable_x64(dtype == np.float64), jax.set_mesh(mesh):
    ordered = tuple(x[:, there] for x in (*arrays, *rows))
    run = jax.shard_map(local, in_specs=specs, out_specs=wide, check_vma=False)
    out = jax.jit(run)(*jax.device_put(ordered, specs))
    return [np.asarray(x)[:, np.argsort(there)] for x in out]


def wrong(actual, wanted, tolerance=1e-9):
  """Names of the results that differ from `wanted` or are not finite."""
  out = []
  for name, x, y in zip(NAMES, actual, wanted, strict=True):
    assert x.dtype == y.dtype == np.float64
    size = max(1, np.abs(np.where(y > attention_op.NEG / 2, y, 0)).max())
    # As a negation: a NaN is wrong.
    if not np.abs(x - y).max() <= tolerance * size:
      out.append(name)
  return out


@pytest.mark.parametrize('form', context.FORMS)
@pytest.mark.parametrize('name', CASES)
def test_equals_one_device(name, form):
  assert wrong(sharded(name, form), expected(name)) == []


@pytest.mark.parametrize('inner', [1, 4, 8])
def test_usp_equals_one_device_for_every_inner_size(inner):
  assert wrong(sharded('causal', 'usp', inner), expected('causal')) == []


def test_the_cases_hold_what_they_are_about():
  segments = problem('window')[2][0]
  assert not segments[:, -32:].any()  # ranks 6 and 7 hold only padding
  assert (expected('window')[1][:, -32:] == attention_op.NEG).all()
  assert problem('full')[0].block < 80 // 16  # runs of 5 need padding
  for name in CASES:
    assert all(np.abs(x).max() > 0.1 for x in expected(name))


# ------------------------------------------------------------------ kernels --


def _scores(q, k, segments, order, mask):
  """Scores (B, N, T, S), NEG where a key is not seen, and their slope."""
  k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
  s, slope = mask.scale * jnp.einsum('btnh,bsnh->bnts', q, k), 1.0
  if mask.softcap:
    tanh = jnp.tanh(s / mask.softcap)
    s, slope = mask.softcap * tanh, 1 - tanh**2
  side = lambda pair: (pair[0][:, None, :, None], pair[1][:, None, None])
  (mine, theirs), (at, of) = side(segments), side(order)
  seen = (mine == theirs) & (mine > 0)
  seen &= (of <= at) | (not mask.causal)
  seen &= (at - of < mask.window) | (not mask.window)
  return jnp.where(seen, s, attention_op.NEG), slope


def whole_forward(q, k, v, segments, order, mask):
  """An implementation of the op that shares no code with the others."""
  s, _ = _scores(q, k, segments, order, mask)
  none = s.max(-1) == attention_op.NEG
  lse = jnp.where(none, attention_op.NEG, jax.nn.logsumexp(s, -1))
  p = jnp.exp(s - jnp.where(none, 0, lse)[..., None])
  o = jnp.einsum(
    'bnts,bsnv->btnv', p, jnp.repeat(v, q.shape[2] // k.shape[2], 2)
  )
  return o, lse.swapaxes(1, 2)


def whole_backward(q, k, v, segments, order, mask, rows):
  s, slope = _scores(q, k, segments, order, mask)
  groups = q.shape[2] // k.shape[2]
  lse, delta = (x.swapaxes(1, 2)[..., None] for x in (rows.lse, rows.delta))
  p = jnp.exp(s - jnp.where(lse == attention_op.NEG, 0, lse))
  wide = [jnp.repeat(x, groups, 2) for x in (k, v)]
  ds = p * (jnp.einsum('btnv,bsnv->bnts', rows.do, wide[1]) - delta) * slope
  ds = ds * mask.scale
  dq = jnp.einsum('bnts,bsnh->btnh', ds, wide[0])
  dk = jnp.einsum('bnts,btnh->bsnh', ds, q)
  dv = jnp.einsum('bnts,btnv->bsnv', p, rows.do)
  fold = lambda x: x.reshape(*k.shape[:3], groups, -1).sum(3)
  return dq, fold(dk), fold(dv)


WHOLE = registry.Implementation('whole', whole_forward, whole_backward)
XLA = registry.Implementation('xla', None, None)
KERNELS = [f for f in context.FORMS if f != 'rsa']


def run_by(monkeypatch, forward, backward):
  monkeypatch.setattr(attention_op, 'choose', lambda *_: (forward, backward))


@pytest.mark.sampled(12)
@pytest.mark.parametrize('form', KERNELS)
@pytest.mark.parametrize('name', CASES)
def test_with_kernels_it_equals_one_device(monkeypatch, name, form):
  wanted = expected(name)
  run_by(monkeypatch, WHOLE, WHOLE)
  assert wrong(sharded(name, form), wanted) == []


@pytest.mark.parametrize('passes', [(WHOLE, XLA), (XLA, WHOLE)])
def test_one_pass_may_have_a_kernel_alone(monkeypatch, passes):
  wanted = expected('packed_softcap')
  run_by(monkeypatch, *passes)
  assert wrong(sharded('packed_softcap', 'ring'), wanted) == []


@pytest.mark.parametrize('form', KERNELS)
def test_what_a_hop_runs_is_the_implementation(monkeypatch, form):
  """No hop walks XLA's blocks; whatever the kernel does wrong is seen."""
  wanted = expected('causal')

  def walked(*_):
    raise AssertionError('a walk')

  for name in ('accumulate', 'gradients'):
    monkeypatch.setattr(attention_xla, name, walked)
  run_by(monkeypatch, WHOLE, WHOLE)
  assert wrong(sharded('causal', form), wanted) == []
  half = lambda *given: [x / 2 for x in whole_backward(*given)]
  run_by(monkeypatch, WHOLE, registry.Implementation('half', None, half))
  assert wrong(sharded('causal', form), wanted) == ['dq', 'dk', 'dv']


@pytest.mark.parametrize('form', ['ring', 'token_ring', 'all_gather', 'usp'])
@pytest.mark.parametrize('module', [attention_tpu, attention_gpu])
def test_interpreted_kernels_equal_one_device(monkeypatch, module, form):
  launch = attention_blocks.Launch(block=(16, 16), interpret=True)
  ours = registry.Implementation(
    'ours',
    functools.partial(module.forward, launch=launch),
    functools.partial(module.backward, launch=launch),
  )
  wanted = [x.astype(np.float32) for x in expected('packed_softcap')]
  run_by(monkeypatch, ours, ours)
  for x, y in zip(sharded('packed_softcap', form, dtype=np.float32), wanted,
                  strict=True):  # fmt: skip
    assert x.dtype == y.dtype
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize('impl', ['pallas_tpu', 'xla/pallas_gpu'])
def test_scores_of_whole_rows_have_no_kernel(impl):
  with pytest.raises(errors.UserError, match=f'model.attention={impl}'):
    context.check('rsa', 4, 8, 8, 64, 'zigzag', 0, impl)
  context.check('rsa', 4, 8, 8, 64, 'zigzag', 0, 'auto/xla')


# ---------------------------------------------------------------- negatives --


def lost(monkeypatch, keep):
  """Sends for which keep(by, ring) is false do not happen."""
  send = context_forms.ContextCall.shift

  def shift(job, tree, by=1):
    return send(job, tree, by) if keep(by, job.ring) else tree

  monkeypatch.setattr(context_forms.ContextCall, 'shift', shift)


@pytest.mark.parametrize('form', ['ring', 'token_ring', 'rsa'])
def test_a_removed_permute_is_found(monkeypatch, form):
  lost(monkeypatch, lambda by, ring: False)
  assert wrong(sharded('causal', form), expected('causal')) == [*NAMES]


def test_gradients_that_are_not_sent_home_are_found(monkeypatch):
  lost(monkeypatch, lambda by, ring: by != 1 - ring)
  found = wrong(sharded('causal', 'ring'), expected('causal'))
  assert found == ['dk', 'dv']  # the output alone would not tell


def test_a_removed_sum_over_ranks_is_found(monkeypatch):
  def keep_own(x, axis_name, *, scatter_dimension, tiled):
    t = x.shape[scatter_dimension] // lax.axis_size(axis_name)
    at = lax.axis_index(axis_name) * t
    return lax.dynamic_slice_in_dim(x, at, t, scatter_dimension)

  monkeypatch.setattr(lax, 'psum_scatter', keep_own)
  found = wrong(sharded('causal', 'all_gather'), expected('causal'))
  assert found == ['dk', 'dv']


def test_a_merge_without_weights_is_found(monkeypatch):
  def merge(a, b):
    return a[0] + b[0], jnp.maximum(a[1], b[1]), a[2] + b[2]

  monkeypatch.setattr(attention_xla, 'merge', merge)
  assert wrong(sharded('causal', 'ring'), expected('causal')) == [*NAMES]


# ------------------------------------------------------------------- dtypes --


def traced(form, dtype, n=8, t=16):
  """Jaxpr of o, lse, dq, dk, dv of a rank (nothing is compiled)."""
  mask = attention_op.Mask(block=4, softcap=2.0)
  plan = context.ContextPlan(form, 'context', n, 'zigzag')
  mesh = mesh_lib.make({'context': n}, jax.devices()[:n])

  def local(q, k, v, rows):
    attend = lambda q, k, v: context.attention(q, k, v, rows, rows, mask, plan)
    (o, lse), back = jax.vjp(attend, q, k, v)
    return o, lse, *back((o, lse))

  spec = P(None, 'context')
  array = lambda *s: jax.ShapeDtypeStruct(
    (1, n * t, *s[:-1]), s[-1], sharding=NamedSharding(mesh, spec)
  )
  args = array(8, 4, dtype), array(2, 4, dtype), array(2, 6, dtype)
  run = jax.shard_map(
    local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  return jax.make_jaxpr(run)(*args, array(jnp.int32))


def local_shapes(*given, **sizes):
  """Shapes and dtypes of what is `traced`."""
  return [(x.shape[2:], x.dtype) for x in traced(*given, **sizes).out_avals]


@pytest.mark.parametrize('form', context.FORMS)
def test_bfloat16_keeps_its_dtype_and_sums_in_float32(form):
  low, wide = jnp.bfloat16, jnp.float32
  assert local_shapes(form, low) == [
    ((8, 6), low), ((8,), wide), ((8, 4), low), ((2, 4), low), ((2, 6), low),
  ]  # fmt: skip


@pytest.mark.parametrize('form', ['ulysses', 'usp'])
def test_gradients_of_copies_of_a_head_are_added_in_float32(form):
  text = str(traced(form, jnp.bfloat16))
  added = re.findall(r':(\w+)\[[\d,]*\] = (?:reduce_sum|add_any)', text)
  assert 'f32' in added and 'bf16' not in added


@pytest.mark.parametrize('form', [f for f in context.FORMS if f != 'usp'])
def test_one_rank_is_a_ring_of_one(form):
  assert len(local_shapes(form, jnp.float32, n=1)) == 5


# ------------------------------------------------------------------- errors --


@pytest.mark.parametrize(
  'arguments, texts',
  [
    (('rings', 8, 8, 8, 64, 'zigzag'), ['context_form=rings', 'token_ring']),
    (('ring', 8, 6, 4, 64, 'zigzag'), ['6 query heads', '4 kv heads']),
    (
      ('ring', 8, 8, 8, 72, 'zigzag'),
      ['data.sequence_length=72', '16 equal', 'mesh.context=8', '64 and 80'],
    ),
    (('ring', 8, 8, 8, 4, 'striped'), ['sequence_length=4', 'do: 8.']),
    (('ring', 8, 8, 8, 64, 'zagzig'), ['context_order=zagzig', 'striped']),
    (('ring', 8, 8, 8, 64, 'zigzag', 2), ['context_inner=2', 'not ring']),
    (
      ('ulysses', 8, 12, 4, 64, 'zigzag'),
      ['12 heads', 'model.num_heads', 'mesh.context=8', '8 and 16', ': 6;'],
    ),
    (
      ('usp', 8, 6, 6, 64, 'zigzag', 4),
      ['6 heads', 'mesh.context_inner=4', '4 and 8', ': 2;'],
    ),
    (('usp', 8, 6, 6, 64, 'zigzag', 3), ['inner=3', 'context=8', ': 1, 2.']),
    (
      ('usp', 8, 3, 3, 64, 'zigzag'),
      ['3 heads', 'mesh.context=8', 'form=ring'],
    ),
  ],
)
def test_what_does_not_fit_is_an_error_with_both_numbers(arguments, texts):
  with support.refused(*texts):
    context.check(*arguments)


def test_attention_checks_its_shapes_while_it_is_traced():
  plan = context.ContextPlan('ulysses', 'context', 8, 'zigzag')
  q = jax.ShapeDtypeStruct((1, 16, 4, 8), jnp.float32)
  row = jax.ShapeDtypeStruct((1, 16), jnp.int32)
  attend = functools.partial(
    context.attention, mask=attention_op.Mask(), plan=plan
  )
  with pytest.raises(errors.UserError, match='4 heads.*mesh.context=8'):
    jax.eval_shape(attend, q, q, q, row, row)


@pytest.mark.parametrize(
  'form, n, heads, inner, size',
  [
    ('usp', 8, 4, 0, 4),
    ('usp', 8, 8, 0, 4),  # leaves a ring of two
    ('usp', 8, 8, 8, 8),
    ('usp', 6, 9, 0, 3),
    ('usp', 2, 8, 0, 2),  # no ring can be left
    ('ulysses', 8, 8, 0, 8),
    ('ring', 8, 8, 0, 1),
  ],
)
def test_ranks_that_exchange_heads(form, n, heads, inner, size):
  context.check(form, n, heads, heads, 16 * n, 'zigzag', inner)
  assert context.resolve_inner(form, n, heads, inner) == size
