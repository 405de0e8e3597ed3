"""Dispatch to experts on eight devices against a loop over tokens and experts.

Legend: N tokens (of all devices), K choices, E experts, D model, F width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels.matmul import grouped
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.experts import dispatch as expert
from paraxis.sharding.experts import product as expert_product
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import hlo

pytestmark = pytest.mark.usefixtures('float64')

N, K, E, D, F = 48, 2, 8, 4, 6
AXES = ('data', 'context', 'tensor')
MESH = 'data=2,context=2,tensor=2'
NAMES = ('y', 'dropped', 'up', 'down', 'x', 'mix')
DROPPED = NAMES.index('dropped')


@functools.cache
def arrays():
  """(up, down, x, mix, ids, valid, u): u weighs the outputs."""
  rng = np.random.default_rng(0)
  up, down = rng.normal(size=(E, D, F)), rng.normal(size=(E, F, D))
  x, u = rng.normal(size=(2, N, D))
  # Expert 1 is sent many tokens, expert 5 none.
  odds = np.array([1, 6, 1, 2, 1, 0, 1, 1]) / 13
  ids = np.stack([rng.choice(E, K, replace=False, p=odds) for _ in range(N)])
  valid = rng.random(N) > 0.2
  return up, down, x, rng.random((N, K)), ids.astype(np.int32), valid, u


def run(rows_SD, weights, multiply):
  up, down = weights
  return multiply(jnp.tanh(multiply(rows_SD, up, 1)), down, 2)


def kept(capacity=0, devices=8):
  """(N, K) bool: what is neither invalid nor dropped, device by device."""
  *_, ids, valid, _ = arrays()
  keep = np.zeros((N, K), bool)
  for rows in np.split(np.arange(N), devices):
    served = np.zeros(E, int)
    for n in rows[valid[rows]]:
      for k in range(K):
        served[ids[n, k]] += 1
        keep[n, k] = not capacity or served[ids[n, k]] <= capacity
  return keep


def reference(capacity=0, devices=8):
  """NAMES in order: a loop over tokens and their experts."""
  up, down, x, mix, ids, valid, u = arrays()
  keep = kept(capacity, devices)
  y, dup, ddown = np.zeros_like(x), np.zeros_like(up), np.zeros_like(down)
  dx, dmix = np.zeros_like(x), np.zeros_like(mix)
  for n, k in zip(*np.nonzero(keep), strict=True):
    e = ids[n, k]
    h = np.tanh(x[n] @ up[e])
    y[n] += mix[n, k] * (h @ down[e])
    dmix[n, k] = u[n] @ (h @ down[e])
    ddown[e] += mix[n, k] * np.outer(h, u[n])
    dz = mix[n, k] * (down[e] @ u[n]) * (1 - h**2)
    dup[e] += np.outer(x[n], dz)
    dx[n] += up[e] @ dz
  dropped = (valid[:, None] & ~keep).sum()
  return y, dropped, dup, ddown, dx, dmix


def program(plan, mesh):
  """jitted (up, down, x, mix, ids, valid, u[, hot]) -> NAMES; on one device
  without a mesh."""
  specs = 2 * [P(plan.region or None, plan.gather or None)]
  specs[1] = P(plan.region or None, None, plan.gather or None)
  held = {*plan.region, *plan.gather}
  missing = tuple(a for a in mesh.axis_names if a not in held) if mesh else ()
  total = lambda x, axes: jax.lax.psum(x, axes) if axes else x

  def local(up, down, x, mix, ids, valid, u, hot=None):
    f = lambda up, down, x, mix: expert.dispatch(
      run, (up, down), x, ids, mix, valid, plan, hot
    )
    y, vjp, dropped = jax.vjp(f, up, down, x, mix, has_aux=True)
    dup, ddown, dx, dmix = vjp(u)
    dup, ddown = total((dup, ddown), missing)
    dropped = total(dropped, mesh.axis_names if mesh else ())
    return y, dropped, dup, ddown, dx, dmix

  if mesh is None:
    return jax.jit(local)
  rows = P(mesh.axis_names)
  ins = (*specs, *5 * [rows])
  outs = (rows, P(), *specs, rows, rows)
  return jax.jit(
    lambda *a: jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(*ins, P())[: len(a)],
      out_specs=outs,
      check_vma=False,
    )(*a)  # fmt: skip
  )


def grid():
  return jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), AXES)


def evaluate(plan, mesh=None, hot=None):
  more = () if hot is None else (np.array(hot, np.int32),)
  return jax.device_get(program(plan, mesh)(*arrays(), *more))


wrong = functools.partial(kernel_cases.wrong, NAMES, tolerance=1e-12, least=1.0)


def ragged_all_to_all(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
  axis_name,
):  # fmt: skip
  """What jax documents of lax.ragged_all_to_all, which XLA on CPU lacks."""
  everywhere = lambda a: jax.lax.all_gather(a, axis_name)
  rows, start, count, target = map(
    everywhere, (operand, input_offsets, send_sizes, output_offsets)
  )
  ranks, me = len(rows), jax.lax.axis_index(axis_name)
  per = len(send_sizes) // ranks
  row = jnp.arange(len(operand))
  for source in range(ranks):
    for j in range(per):
      i = me * per + j
      sent = row < count[source, i]
      place = jnp.where(sent, target[source, i] + row, len(output))
      found = rows[source][(start[source, i] + row) % len(operand)]
      # Both ends must agree on the number of rows.
      agree = count[source, i] == recv_sizes[source * per + j]
      output = output.at[place].set(
        jnp.where(agree, found, jnp.nan), mode='drop'
      )
  return output


REGIONS = [('tensor',), ('context', 'tensor'), ('data', 'tensor'), AXES]
CASES = [  # plan, hot experts
  *[(expert.DispatchPlan(E, region), None) for region in REGIONS],
  (expert.DispatchPlan(E, ('context', 'tensor'), exchange='ragged'), None),
  (expert.DispatchPlan(E, AXES, exchange='ragged'), None),
  (expert.DispatchPlan(E, ('data', 'tensor'), hierarchical=True), None),
  (expert.DispatchPlan(E, ('tensor',), gather=('data',)), None),
  (expert.DispatchPlan(E, (), gather=('data', 'context')), None),
  (expert.DispatchPlan(E, AXES), (1, 3, 0)),
  (expert.DispatchPlan(E, ('data', 'tensor'), gather=('context',)), (5, 7, 2)),
  (expert.DispatchPlan(E, ('context',), exchange='ragged'), (1, 3, 0)),
]


@pytest.mark.parametrize('plan, hot', CASES, ids=str)
def test_equal_to_a_loop(plan, hot, monkeypatch):
  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', ragged_all_to_all)
  assert not wrong(evaluate(plan, grid(), hot), reference())


@pytest.mark.parametrize('factor', [0.0, 0.8])
def test_one_device(factor):
  found = evaluate(expert.DispatchPlan(E, factor=factor))
  expected = reference(math.ceil(N * K / E * factor), 1)
  assert not wrong(found, expected)
  assert (expected[DROPPED] > 0) == bool(factor)


@pytest.mark.parametrize(
  'tokens, choices, experts, factor, capacity',
  [
    (100, 1, 2, 1.1, 55),  # 55.00000000000001 in floating point
    (16, 2, 4, 1e30, 16),  # a token has another expert each time
    (48, 5, 8, 8 / 5, 48),
    (9, 1, 8, 1.0, 2),
    (8, 1, 8, 1.0001, 2),
    (8, 1, 8, 1e-12, 1),
    (8, 1, 8, 0.0, 0),
  ],
)
def test_slots_are_counted_exactly(tokens, choices, experts, factor, capacity):
  plan = expert.DispatchPlan(experts, factor=factor)
  assert expert.slots(plan, tokens, choices) == capacity


def test_rows_behind_the_last_run_move_no_bias(monkeypatch):
  """They come out of a product as anything, and so do their gradients."""
  product, runs = grouped.product, [2, 0, 4]
  used = (np.arange(10) < sum(runs))[:, None]
  monkeypatch.setattr(
    grouped, 'product', lambda *a: jnp.where(used, product(*a), jnp.nan)
  )
  up, down, x, *_ = arrays()
  up, down, x = map(jnp.asarray, (up[:3], down[:3], x[:10]))
  rng = np.random.default_rng(1)
  first, last = rng.normal(size=(3, F)), rng.normal(size=(3, D))
  multiply = expert_product.multiplier((), jnp.array(runs, jnp.int32), 2)

  def loss(first, last):
    h = jnp.tanh(multiply(x, up, 1, first))
    return jnp.where(used, jnp.sin(multiply(h, down, 2, last)), 0).sum()

  def looped(first, last):
    each, of = 0.0, np.repeat(np.arange(3), runs)
    for row, e in zip(x, of, strict=False):
      h = jnp.tanh(row @ up[e] + first[e])
      each += jnp.sin(h @ down[e] + last[e]).sum()
    return each

  found = jax.grad(loss, (0, 1))(first, last)
  support.close(found, jax.grad(looped, (0, 1))(first, last))


@pytest.mark.parametrize('hot', [None, (1, 5)])
def test_capacity(hot):
  """Drops are those of a loop over each device's tokens, hot experts or not."""
  plan = expert.DispatchPlan(E, ('context', 'tensor'), factor=1.3)
  capacity = math.ceil(N // 8 * K / E * 1.3)
  expected = reference(capacity)
  assert capacity == 2 and expected[DROPPED] > 5
  assert not wrong(evaluate(plan, grid(), hot), expected)
  # Other devices, other drops: a capacity depends on the layout.
  assert reference(capacity * 8, 1)[DROPPED] != expected[DROPPED]


ALL_TO_ALL, AXIS_INDEX = jax.lax.all_to_all, jax.lax.axis_index
BREAKS = {  # what: (hot experts, whether y is right, owner, name, instead)
  'tokens stay at home': (
    None, False, jax.lax, 'all_to_all', lambda x, *a, **k: x),
  'experts in another order': (
    None, False, jax.lax, 'all_to_all',
    lambda x, axes, *a, **k: ALL_TO_ALL(x, axes[::-1], *a, **k)),
  'hot experts of another rank': (
    (1, 2), False, jax.lax, 'axis_index', lambda axes: AXIS_INDEX(axes) + 1),
  'hot gradients stay': (
    (1, 2), True, expert.materialise, 'bwd',
    lambda region, kept, g: expert._materialise_backward((), (
      kept[0], kept[1] - AXIS_INDEX(region) * len(kept[0])), g)),
}  # fmt: skip


@pytest.mark.parametrize('what', BREAKS)
def test_a_broken_exchange_is_found(what, monkeypatch):
  hot, output_is_right, *patch = BREAKS[what]
  monkeypatch.setattr(*patch)
  plan = expert.DispatchPlan(E, ('context', 'tensor'))
  found = set(wrong(evaluate(plan, grid(), hot), reference()))
  assert ('y' not in found) == output_is_right and {'up', 'down'} <= found


@pytest.mark.parametrize('block', [1, 4])
def test_offsets_sort_by_expert_and_then_by_source(block):
  """Every row of every rank, moved by hand, there and back."""
  rng = np.random.default_rng(0)
  ranks, own = 4, 3
  counts = rng.integers(0, 4, (ranks, ranks * own)).astype(np.int32)
  home = [
    [(e, r, i) for e in range(ranks * own) for i in range(counts[r, e])]
    for r in range(ranks)
  ]
  plans = [expert.offsets(jnp.asarray(counts), r, block) for r in range(ranks)]

  def move(rows, way):
    out = [{} for _ in range(ranks)]
    for r in range(ranks):
      start, count, target, arriving = map(np.asarray, plans[r][way])
      for i in range(ranks * own):
        to = i // own
        back = np.asarray(plans[to][way].arriving)[r * own + i % own]
        assert back == count[i]
        for j in range(count[i]):
          assert target[i] + j not in out[to]
          out[to][target[i] + j] = rows[r][start[i] + j]
      assert arriving.shape == count.shape
    return out

  there = move(home, 0)
  for r in range(ranks):
    place = 0
    for e in range(r * own, (r + 1) * own):
      run = sorted(row for rows in home for row in rows if row[0] == e)
      for i, row in enumerate(run):
        assert there[r][place + i] == row
      place += -(-len(run) // block) * block
      assert plans[r][2][e - r * own] == -(-len(run) // block) * block
    assert len(there[r]) == counts[:, r * own : (r + 1) * own].sum()
  back = move(there, 1)
  assert [[rows[i] for i in range(len(rows))] for rows in back] == home


def test_capacity_bounds_the_bytes():
  """Of two exchanges forward and two backward: 2 slots an expert."""
  plan, mesh = expert.DispatchPlan(E, AXES[1:], factor=1.3), grid()
  text = program(plan, mesh).lower(*arrays()).compile().as_text()
  sent = hlo.collectives(text, mesh)
  found = [c for c in sent if c.kind == 'all-to-all']
  one = AXES[1:], E * 2 * D * 8 * 3 // 4, 1
  assert [(c.axes, c.bytes, c.count) for c in found] == 4 * [one]
  # Gradients of the experts over data, the count of what was dropped.
  assert {c.kind for c in sent if c not in found} == {'all-reduce'}


def test_bfloat16_tokens_and_float32_gradients():
  """The weight of an expert is summed over many tokens in its own dtype."""
  rng = np.random.default_rng(0)
  n = 2048
  x = jnp.asarray(rng.normal(size=(n, D)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(2, D, D)), jnp.float32)
  ids = jnp.asarray(rng.integers(0, 2, (n, 1)), jnp.int32)
  ones, valid = jnp.ones((n, 1), jnp.float32), jnp.ones(n, bool)
  only = lambda rows, weights, multiply: multiply(rows, weights[0], 1)
  f = lambda w: expert.dispatch(
    only, (w,), x, ids, ones, valid, expert.DispatchPlan(2)
  )[0]

  @jax.jit
  def run(w):
    y, vjp = jax.vjp(f, w)
    return y, vjp(jnp.ones_like(y))[0]

  y, dw = run(w)
  assert y.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  f8 = lambda a: np.asarray(a, np.float64)
  exact = np.stack([f8(x)[np.asarray(ids)[:, 0] == e].sum(0) for e in (0, 1)])
  assert np.abs(f8(dw)[..., 0] - exact).max() < 1e-3
  rounded = f8(jnp.asarray(dw, jnp.bfloat16))[..., 0]
  assert np.abs(rounded - exact).max() > 1e-2  # what bfloat16 would cost


def test_what_a_ragged_exchange_cannot():
  for plan in (
    expert.DispatchPlan(E, ('tensor',), factor=1.0, exchange='ragged'),
    expert.DispatchPlan(E, AXES, hierarchical=True, exchange='ragged'),
  ):
    with pytest.raises(ValueError, match='no capacity and no axis order'):
      evaluate(plan, grid())


@support.compiles('tpu')
def test_compiles_for_a_tpu():
  """There 'auto' is ragged: rows travel by ragged_all_to_all alone."""
  topology = aot.topology('v5e:2x4')
  mesh = mesh_lib.make(MESH, topology.devices)
  region = ('context', 'tensor')
  plan, rows = expert.DispatchPlan(E, region), P(AXES)
  n, d, f = 8 * 64, 128, 256

  def shape(sizes, dtype, spec):
    sharding = jax.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

  def local(up, down, x, mix, ids, valid):
    f = lambda *a: expert.dispatch(run, a[:2], *a[2:3], ids, a[3], valid, plan)[
      0
    ]
    y, vjp = jax.vjp(f, up, down, x, mix)
    return vjp(y)

  specs = (P(region), P(region), *4 * [rows])
  step = jax.shard_map(
    local, in_specs=specs, out_specs=specs[:4], check_vma=False
  )
  args = (
    shape((E, d, f), jnp.float32, specs[0]),
    shape((E, f, d), jnp.float32, specs[1]),
    shape((n, d), jnp.bfloat16, rows),
    shape((n, K), jnp.float32, rows),
    shape((n, K), jnp.int32, rows),
    shape((n,), jnp.bool, rows),
  )
  with topology.context(), jax.set_mesh(mesh), jax.enable_x64(False):
    traced = jax.jit(step).trace(*args)
  text = aot.compile_for(topology, 'experts', traced).as_text()
  found = [(c.kind, c.axes) for c in hlo.collectives(text, mesh)]
  assert found.count(('ragged-all-to-all', region)) == 4
  assert 'all-to-all' not in {kind for kind, _ in found}
