"""Scans of a split row against the same ops on one device, in float64.

Every op in both forms: outputs, final state, every gradient, with random
cotangents on all results; packed documents and padding cross the borders of
shards. Known mistakes are made on purpose and must be found. (Beside other mesh
axes and inside pipelines: tests/train/certify/test_invariance_mixers.py.)
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.scans import delta as delta_scan
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.pallas_kernels.scans import newton as newton_scan
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import hlo
from paraxis.sharding.sequence import scan

pytestmark = pytest.mark.usefixtures('float64')

B, T, N = 2, 64, 8
ROW, ALL = P(None, 'context'), P()


def marks(t=T):
  """(reset, valid, positions): documents across borders, one of 3 shards."""
  segments, positions = np.zeros((B, t), int), np.zeros((B, t), int)
  for b, cuts in enumerate([(0, 5, 7, 31, t - 11), (0, 16, 17, 40, t)]):
    for i, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
      segments[b, first:end] = i + 1
      positions[b, first:end] = np.arange(end - first)
  positions[0, :5] += 9  # row 0 continues a document
  valid = segments > 0
  return (positions == 0) & valid, valid, positions


def gru(params, h_MD, x):
  h = h_MD[..., 0, :]
  z = jax.nn.sigmoid(params[0] * h + x[..., 0, :])
  c = jnp.tanh(params[1] * h + x[..., 1, :])
  return (z * c + (1 - z) * h)[..., None, :]


def lstm(params, h_MD, x):
  c, h = h_MD[..., 0, :], h_MD[..., 1, :]
  f = jax.nn.sigmoid(params[0] * h + x[..., 0, :])
  c = f * c + (1 - f) * jnp.tanh(params[1] * h + x[..., 1, :])
  return jnp.stack([c, jax.nn.sigmoid(params[0] * c) * jnp.tanh(c)], -2)


def gated(plan, q, k, v, g, state):
  reset, valid, _ = _local(plan, q)
  k = jnp.where(valid[..., None, None], k, 0)
  ok = valid if g.ndim == 3 else valid[..., None]
  g = jnp.where(ok[..., None], g, 0)
  return scan.gated(q, k, v, g, reset, state, plan)


def delta(plan, q, k, v, g, beta, state):
  reset, valid, _ = _local(plan, q)
  k = k / jnp.sqrt((k * k).sum(-1, keepdims=True))
  g, beta = (
    jnp.where(valid[..., None], x, 0) for x in (g, jax.nn.tanh(beta) + 1)
  )
  return scan.delta((q, k, v, g, beta), reset, state, plan)


def linear(plan, log_a, b, state):
  reset, valid, _ = _local(plan, b)
  log_a = jnp.where(valid[..., None], -jnp.abs(log_a) / 4, 0)
  b = jnp.where(valid[..., None], b, 0)
  return scan.linear(log_a, b, reset, state, plan)


def selective(plan, x, dt, shared, rate, state):
  reset, valid, _ = _local(plan, x)
  dt = jnp.where(valid[..., None], jnp.abs(dt) / 4, 0)
  return scan.selective(x, dt, shared, -jnp.exp(rate), reset, state, plan)


def newton(cell, options, plan, params, x, state):
  reset, valid, _ = _local(plan, x)
  return scan.newton(cell, params, x, reset, state, valid, plan, **options)


def conv(dilation, plan, x, w, tail):
  _, valid, positions = _local(plan, x)
  return scan.causal_conv(x, w, positions, tail, valid, plan, dilation=dilation)


def _local(plan, x_BT):
  """The marks of this shard, which has the tokens of x."""
  size = x_BT.shape[1]
  if plan is None:
    return marks(size)
  n, at = lax.axis_size(plan.axis), lax.axis_index(plan.axis) * size
  cut = lambda m: lax.dynamic_slice_in_dim(jnp.asarray(m), at, size, 1)
  return [cut(m) for m in marks(n * size)]


SOLVE = dict(tol=1e-13, cap=30)
GATED, WIDE = (T, 2, 3), (T, 4)
# name -> op, shapes of its arguments after B; None: parameters, without B.
CASES = {
  'gated': (gated, [GATED, GATED, (T, 2, 4), GATED, (2, 3, 4)]),
  'per_head': (gated, [GATED, GATED, (T, 2, 4), (T, 2), (2, 3, 4)]),
  'delta': (
    delta, [GATED, GATED, (T, 4, 2), (T, 4), (T, 4), (4, 3, 2)]
  ),
  'linear': (linear, [WIDE, WIDE, (4,)]),
  'selective': (selective, [WIDE, WIDE, (T, 2, 4), None, (4, 4)]),
  'gru': (
    functools.partial(newton, gru, SOLVE), [None, (T, 2, 4), (1, 4)]
  ),
  'lstm': (
    functools.partial(newton, lstm, SOLVE), [None, (T, 2, 4), (2, 4)]
  ),
  'fallback': (
    functools.partial(newton, gru, {**SOLVE, 'cap': 2}),
    [None, (T, 2, 4), (1, 4)],
  ),
  'conv': (functools.partial(conv, 1), [WIDE, None, (3, 4)]),
  'dilated': (functools.partial(conv, 7), [WIDE, None, (21, 4)]),
}  # fmt: skip


@functools.cache
def arguments(name):
  rng = np.random.default_rng(0)
  shapes = CASES[name][1]
  out = [
    rng.normal(size=(B, *s)) if s else rng.normal(size=(4, 4)) for s in shapes
  ]
  if CASES[name][0] in (gated, delta):
    out[3] = -np.exp(2 * out[3] - 2)  # decays from none to all
    out[3][:, 20::27, 1] = -np.inf
  return tuple(out)


def specs(name):
  return tuple(ROW if s and s[0] == T else ALL for s in CASES[name][1])


def both(run, args, seed=1):
  """Results, and gradients for cotangents of a seed (Info has none)."""
  out, back = jax.vjp(lambda *a: run(*a)[:2], *args)
  rng = np.random.default_rng(seed)
  put = lambda x: jax.device_put(
    rng.normal(size=x.shape), jax.typeof(x).sharding
  )
  return *out, *back(tuple(map(put, out)))


@functools.cache
def expected(name):
  run = functools.partial(CASES[name][0], None)
  found = jax.jit(functools.partial(both, run))(arguments(name))
  return [np.asarray(x) for x in found]


def sharded(name, form):
  """The same of a row that is split over eight devices."""
  mesh, plan = mesh_lib.make('context=8'), scan.ScanPlan(form, 'context')
  with jax.set_mesh(mesh):
    placed = jax.device_put(arguments(name), specs(name))
    run = jax.shard_map(
      lambda *a: CASES[name][0](plan, *a)[:2],
      in_specs=specs(name),
      out_specs=(ROW, ALL),
      check_vma=False,
    )
    found = jax.jit(functools.partial(both, run))(placed)
    return [np.asarray(x) for x in found]


def errors_of(found, wanted):
  """Largest relative difference of each result; not finite: infinite."""
  names = range(len(wanted))
  return list(kernel_cases.errors_of(names, found, wanted, least=1).values())


EVERY = [
  (name, form)
  for name in CASES
  for form in scan.FORMS
  if form == 'permute' or name not in ('conv', 'dilated')  # they have no form
]


@pytest.mark.parametrize('name, form', EVERY)
def test_equals_one_device(name, form):
  assert max(errors_of(sharded(name, form), expected(name))) < 1e-9


def test_the_cases_hold_what_they_are_about():
  for name in CASES:
    assert all(np.abs(x).max() > 1e-3 for x in expected(name)), name
  params, x, state = arguments('gru')
  reset, valid, _ = marks()
  run = lambda cap: (
    newton_scan.newton_scan(
      gru, params, x, reset, state, valid, tol=1e-13, cap=cap
    )[1].fell_back
  )
  assert [bool(jax.jit(run, static_argnums=0)(c)) for c in (2, 30)] == [1, 0]


# ---------------------------------------------------------------- negatives --


@pytest.mark.parametrize('form', scan.FORMS)
@pytest.mark.parametrize('name', ['gated', 'selective', 'delta', 'lstm'])
def test_shards_that_do_not_hand_over_are_found(monkeypatch, name, form):
  enter = scan._enter

  def alone(maps, state, plan, after):
    return jax.tree.map(jnp.zeros_like, enter(maps, state, plan, after))

  monkeypatch.setattr(scan, '_enter', alone)
  options = {**SOLVE, 'unsolved': 'keep', 'cap': 5}
  if name == 'lstm':
    op = functools.partial(newton, lstm, options)
    monkeypatch.setitem(CASES, name, (op, CASES[name][1]))
  assert max(errors_of(sharded(name, form), expected(name))) > 1e-3


def test_a_lost_correction_is_found(monkeypatch):
  lost = lambda q, g, reset, state: jnp.zeros((*g.shape[:3], state.shape[3]))
  monkeypatch.setattr(gated_scan, 'correction', lost)
  o, state, *_ = errors_of(sharded('gated', 'gather'), expected('gated'))
  assert o > 1e-2 and state < 1e-9  # the state alone would not tell


def test_a_lost_correction_of_the_delta_rule_is_found(monkeypatch):
  monkeypatch.setattr(delta_scan, 'correction', lambda reach, state: 0)
  o, state, *_ = errors_of(sharded('delta', 'gather'), expected('delta'))
  assert o > 1e-2 and state < 1e-9  # the state alone would not tell


def test_a_lost_halo_is_found(monkeypatch):
  monkeypatch.setattr(scan, '_send', lambda x, axis, by: jnp.zeros_like(x))
  y, tail, *_ = errors_of(sharded('conv', 'gather'), expected('conv'))
  assert y > 1e-2 and tail < 1e-9


# -------------------------------------------------------------------- bytes --


def sent(name, form, length, gradients):
  """{kind: bytes that a device receives} of a compiled program."""
  op, shapes = CASES[name]
  shapes = [(length, *s[1:]) if s and s[0] == T else s for s in shapes]
  mesh, plan = mesh_lib.make('context=8'), scan.ScanPlan(form, 'context')
  first = lambda *a: op(plan, *a)[0]

  def local(*a):
    if not gradients:
      return first(*a)
    out, back = jax.vjp(first, *a)
    return [x[None] for x in back(out)]

  with jax.set_mesh(mesh):
    args = [
      jax.ShapeDtypeStruct((B, *s) if s else (4, 4), np.float64, sharding=p)
      for s, p in zip(shapes, specs(name), strict=True)
    ]
    out = P('context') if gradients else ROW
    run = jax.shard_map(
      local, in_specs=specs(name), out_specs=out, check_vma=False
    )
    text = jax.jit(run).lower(*args).compile().as_text()
  return hlo.by_kind(hlo.collectives(text, mesh))


SIZES = {  # bytes of P and of S
  'linear': (8 * B * 4, 8 * B * 4),
  'delta': (8 * B * 4 * 3 * 3, 8 * B * 4 * 3 * 2),
  'gated': (8 * B * 2 * 3, 8 * B * 2 * 3 * 4),
  'per_head': (8 * B * 2, 8 * B * 2 * 3 * 4),
  'selective': (8 * B * 4 * 4, 8 * B * 4 * 4),
}


@pytest.mark.parametrize('form', scan.FORMS)
def test_bytes_of_a_newton_scan(monkeypatch, form):
  """Of every iteration its maps; of it and of the guess the last state."""
  cap, state = 3, 8 * B * 2 * 4
  fixed = functools.partial(newton, lstm, dict(tol=0, cap=cap, unsolved='keep'))
  monkeypatch.setitem(CASES, 'lstm', (fixed, CASES['lstm'][1]))
  found = sent('lstm', form, T, False)
  hops = found.pop('collective-permute') - (cap + 1) * state
  enter = cap * scan.received(form, N, 2 * state, state)
  assert hops + sum(found.values()) == enter


def test_bytes_of_a_halo():
  for name, taps in (('conv', 3), ('dilated', 21)):
    size = taps * 8 * B * 4
    assert sent(name, 'gather', T, False) == {'collective-permute': size}
    assert sent(name, 'gather', 2 * T, True) == {'collective-permute': 2 * size}


@pytest.mark.parametrize('name, form', [
  ('gated', 'gather'), ('gated', 'permute'), ('per_head', 'gather'),
  ('selective', 'gather'), ('selective', 'permute'), ('linear', 'permute'),
  ('delta', 'gather'), ('delta', 'permute'),
])  # fmt: skip
def test_bytes_are_those_declared(name, form):
  """Whatever the length; the backward pass sends as much again."""
  want = scan.received(form, N, *SIZES[name])
  there, back = {
    'gather': ('all-gather', 'reduce-scatter'),
    'permute': ('collective-permute',) * 2,
  }[form]
  assert sent(name, form, T, False) == {there: want}
  both_ways = {there: 2 * want} if there == back else {there: want, back: want}
  assert sent(name, form, 2 * T, True) == both_ways


@pytest.mark.parametrize('n', [1, 2, 5, 8])
def test_declared_bytes_of_any_number_of_ranks(n):
  assert scan.received('gather', n, 3, 10) == (n - 1) * 13
  wanted = {1: 0, 2: 20, 5: 46, 8: 46}[n]  # L S + (L - 1) P + S
  assert scan.received('permute', n, 3, 10) == wanted


def test_an_unknown_form_is_an_error():
  with pytest.raises(
    errors.UserError, match='context_scan=ring .* gather, permute'
  ):
    scan.ScanPlan('ring', 'context')
