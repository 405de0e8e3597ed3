"""Matmul rings and vocabulary ends against plain products on one device.

Legend: B rows, T tokens, D model, F mlp, N heads, H head width, V vocabulary.
"""

import re

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.tensor import rings as tensor
from paraxis.sharding.tensor import vocabulary

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, F, N, H, V = 2, 16, 6, 8, 8, 2, 24
NAMES = ('table', 'up', 'query', 'down', 'head')
EQUATIONS = ('BTD,DF->BTF', 'BTD,DNH->BTNH')
ROWS, WIDE = P(None, ('context', 'tensor'), None), P(None, 'context', 'tensor')
IDS = P(None, 'context')
SPECS = dict(
  table=P('tensor', None),
  up=P(None, 'tensor'),
  query=P(None, 'tensor', None),
  down=P('tensor', None),
  head=P('tensor', None),
)


def arrays():
  rng = np.random.default_rng(0)
  shapes = dict(
    table=(V, D), up=(D, F), query=(D, N, H), down=(F, D), head=(V, D)
  )
  params = {name: rng.normal(size=s) for name, s in shapes.items()}
  ids, targets = rng.integers(0, V, (2, B, T))
  return params, ids, targets, rng.normal(size=(B, T))


def mix(h_BTF, q_BTNH):
  """Something nonlinear in which both products matter."""
  return jnp.tanh(h_BTF) * (1 + jnp.sin(q_BTNH).mean(-1))


def plain(params, ids, targets, weights):
  x = params['table'][ids]
  h, q = (
    jnp.einsum(e, x, params[name])
    for e, name in zip(EQUATIONS, ('up', 'query'), strict=True)
  )
  y = x + jnp.einsum('BTF,FD->BTD', mix(h, q), params['down'])
  z = jnp.einsum('BTD,VD->BTV', jnp.sin(y), params['head'])
  picked = jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
  nll = jax.nn.logsumexp(z, -1) - picked
  return (nll * weights).sum(), nll


def sharded(params, ids, targets, weights, ways=2, scatter=None):
  """The same on one rank -> (its share of the loss, nll)."""
  axis, names = 'tensor', ('up', 'query')
  x = vocabulary.embedding(params['table'], ids, axis)
  products = [(e, params[n]) for e, n in zip(EQUATIONS, names, strict=True)]
  h, q = tensor.gather_matmul(x, products, axis, 1, ways=ways)
  y = x + tensor.matmul_scatter(
    'BTF,FD->BTD', mix(h, q), params['down'], axis, 1, ways=ways
  )
  head = [('BTD,VD->BTV', params['head'])]
  (z,) = tensor.gather_matmul(jnp.sin(y), head, axis, 1, ways=ways)
  nll = vocabulary.nll(z, targets, axis, scatter)
  return (nll * weights).sum(), nll


def evaluate(mesh_text, where, **options):
  """[loss, nll, *gradients] on a mesh, differentiated inside or outside."""
  n = int(np.prod(list(mesh_lib.parse(mesh_text).values())))
  mesh = mesh_lib.make(mesh_text, jax.devices()[:n])
  scatter = options.get('scatter')
  of_nll = IDS if scatter is None else P(*ROWS[:2])

  def inside(params, *batch):
    run = lambda params: sharded(params, *batch, **options)
    loss, vjp, nll = jax.vjp(run, params, has_aux=True)
    (grads,) = vjp(jnp.ones_like(loss))
    axes = ('context',) if scatter is None else ('context', 'tensor')
    grads = {k: jax.lax.psum(g, 'context') for k, g in grads.items()}
    return jax.lax.psum(loss, axes), nll, grads

  def outside(params, *batch):
    def loss(params):
      share = jax.shard_map(
        lambda *a: sharded(*a, **options)[1],
        in_specs=(SPECS, *specs),
        out_specs=of_nll,
        check_vma=False,
      )
      nll = share(params, *batch)
      return (nll * jax.sharding.reshard(batch[-1], of_nll)).sum(), nll

    (value, nll), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, nll, grads

  specs = (IDS, IDS, of_nll)
  with jax.set_mesh(mesh):
    put = lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s))
    params, *batch = arrays()
    params = {k: put(v, SPECS[k]) for k, v in params.items()}
    batch = [put(x, s) for x, s in zip(batch, specs, strict=True)]
    run = outside
    if where == 'inside':
      run = jax.shard_map(
        inside,
        in_specs=(SPECS, *specs),
        out_specs=(P(), of_nll, SPECS),
        check_vma=False,
      )
    loss, nll, grads = support.jit(run)(params, *batch)
  return [np.asarray(x) for x in (loss, nll, *(grads[k] for k in NAMES))]


@pytest.fixture(scope='module')
def expected():
  run = jax.jit(jax.value_and_grad(plain, has_aux=True))
  (loss, nll), grads = run(*arrays())
  return [np.asarray(x) for x in (loss, nll, *(grads[k] for k in NAMES))]


def wrong(found, expected):
  """Names of what differs."""
  return {
    name
    for name, a, b in zip(('loss', 'nll', *NAMES), found, expected, strict=True)
    if not np.allclose(a, b, rtol=1e-6, atol=1e-9)
  }


@pytest.mark.parametrize(
  'mesh, ways',
  [
    ('tensor=2', 2),
    ('tensor=8', 2),
    ('context=2,tensor=4', 1),
    ('context=2,tensor=4', 2),
  ],
)
def test_equal_to_one_device(mesh, ways, expected):
  support.close(evaluate(mesh, 'inside', ways=ways), expected)


@pytest.mark.parametrize('where', ['inside', 'outside'])
def test_scattered_nll(where, expected):
  """One of the two forms that may also be differentiated from outside."""
  support.close(evaluate('context=2,tensor=2', where, scatter=1), expected)


def test_replicated_nll_differentiated_from_outside_is_divided(expected):
  """shard_map's rule for replicated results: why `scatter` exists."""
  loss, nll, *grads = evaluate('tensor=2', 'outside')
  support.close([loss, nll, *(2 * g for g in grads)], expected)


def _break(monkeypatch, what):
  put, backward = tensor._put, vocabulary._nll.bwd
  reduced, psum = tensor._reduced, jax.lax.psum
  patches = {
    'a permute does nothing': (tensor, '_send', lambda x, *_: x),
    'chunks in the wrong place': (
      tensor, '_put', lambda w, c, r, n, d: put(w, c, (r + 1) % n, n, d)),
    'sums go to a neighbour': (
      tensor, '_reduced',
      lambda part, *a: reduced(lambda r: part((r + 1) % 2), *a)),
    'statistics are not summed': (
      jax.lax, 'psum',
      lambda x, axis: x if axis == 'tensor' else psum(x, axis)),
    'the maximum is local': (jax.lax, 'pmax', lambda x, axis: x),
    'the cotangent counts once a rank': (
      vocabulary._nll, 'bwd',
      lambda axis, s, kept, g: backward(axis, s, kept, 2 * g)),
  }  # fmt: skip
  monkeypatch.setattr(*patches[what])


@pytest.mark.parametrize(
  'what, loss_is_right',
  [
    ('a permute does nothing', False),
    ('chunks in the wrong place', False),
    ('sums go to a neighbour', False),
    ('statistics are not summed', False),
    ('the maximum is local', False),
    ('the cotangent counts once a rank', True),
  ],
)
def test_a_broken_collective_is_found(
  what, loss_is_right, expected, monkeypatch
):
  _break(monkeypatch, what)
  found = wrong(evaluate('tensor=2', 'inside'), expected)
  assert ('loss' not in found) == loss_is_right
  assert {'table', 'head'} <= found


def in_region(run, n, *specs):
  """run(local arrays) on n ranks of 'tensor'; results are local, too."""
  mesh = jax.sharding.Mesh(jax.devices()[:n], ('tensor',))
  return jax.shard_map(
    run, mesh=mesh, in_specs=specs, out_specs=P('tensor'), check_vma=False
  )


def gather(x, up, query):
  products = list(zip(EQUATIONS, (up, query), strict=True))
  return tensor.gather_matmul(x, products, 'tensor', 1)


def gather_gradients(x, up, query, h, q):
  products = list(zip(EQUATIONS, (up, query), strict=True))
  return tensor.gather_matmul_gradients(x, products, (h, q), 'tensor', 1)


def scatter(h, down):
  return tensor.matmul_scatter('BTF,FD->BTD', h, down, 'tensor', 1)


def scatter_gradients(h, down, y):
  return tensor.matmul_scatter_gradients('BTF,FD->BTD', h, down, y, 'tensor', 1)


SHAPES = dict(x=(B, T, D), y=(B, T, D), h=(B, T, F), q=(B, T, N, H),
  up=(D, F), query=(D, N, H), down=(F, D))  # fmt: skip
LAYOUTS = dict(
  SPECS, x=P(None, 'tensor'), y=P(None, 'tensor'), h=P(None, None, 'tensor'),
  q=P(None, None, 'tensor'))  # fmt: skip


def program(run, n, names, dtype='f8'):
  """The function on n ranks and the global arguments that `names` list."""
  specs = [LAYOUTS[name] for name in names]
  rng = np.random.default_rng(0)
  args = [jnp.asarray(rng.normal(size=SHAPES[name]), dtype) for name in names]
  return in_region(run, n, *specs), args


@pytest.mark.parametrize(
  'run, names, per_ring',
  [
    (gather, ('x', 'up', 'query'), 1),
    (gather_gradients, ('x', 'up', 'query', 'h', 'q'), 2),
    (scatter, ('h', 'down'), 1),
    (scatter_gradients, ('h', 'down', 'y'), 1),
  ],
)
@pytest.mark.parametrize('n', [1, 8])
def test_number_of_permutes(run, names, per_ring, n):
  """Counted apart: XLA would merge equal sends of one program."""
  run, args = program(run, n, names)
  text = jax.jit(run).lower(*args).compile().as_text()
  found = re.findall(r' (all-\w+|reduce-scatter|collective-\w+)', text)
  found = [name for name in found if not name.endswith('done')]
  assert found == ['collective-permute'] * (per_ring * (n - 1))


def waits(jaxpr, before, found):
  """Adds (primitive, primitives before it) of a jaxpr's equations to found.

  before: of each argument, the primitives that it depends on.
  """
  known = dict(zip(jaxpr.invars, before, strict=True))
  get = lambda v: known.get(v, set()) if isinstance(v, core.Var) else set()
  for eqn in jaxpr.eqns:
    ins = [get(v) for v in eqn.invars]
    inner = [
      getattr(p, 'jaxpr', p)
      for p in eqn.params.values()
      if isinstance(p, core.Jaxpr | core.ClosedJaxpr)
    ]
    name = eqn.primitive.name
    if inner and len(inner[0].invars) == len(ins):
      outs = waits(inner[0], ins, found)
    else:
      found.append((name, set().union(*ins)))
      outs = [set().union({name}, *ins)] * len(eqn.outvars)
    known |= zip(eqn.outvars, outs, strict=True)
  return [get(v) for v in jaxpr.outvars]


def test_no_send_waits_for_the_product_next_to_it():
  """A gather's sends depend on no product, a scatter's products on no send."""

  def before(run, names, primitive):
    run, args = program(run, 4, names)
    jaxpr, found = jax.make_jaxpr(run)(*args).jaxpr, []
    waits(jaxpr, [set() for _ in args], found)
    found = [ins for name, ins in found if name == primitive]
    assert len(found) in (3, 4, 6, 8)
    return set().union(*found)

  sends = before(gather, ('x', 'up', 'query'), 'ppermute')
  assert 'dot_general' not in sends
  products = before(scatter, ('h', 'down'), 'dot_general')
  assert 'ppermute' not in products
  # The products of a gather and the sends of a scatter do, of course.
  assert 'ppermute' in before(gather, ('x', 'up', 'query'), 'dot_general')
  assert 'dot_general' in before(scatter, ('h', 'down'), 'ppermute')


def test_bfloat16_products_and_float32_sums():
  """Messages and products are bfloat16; dw is a float32 sum over all tokens."""
  rng = np.random.default_rng(0)
  n, t = 8, 1024
  x = jnp.asarray(rng.normal(size=(1, t, 4)), jnp.bfloat16)
  w = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
  g = jnp.asarray(rng.normal(size=(1, t, 8)), jnp.bfloat16)
  v = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)

  def run(x, w, g, v):
    product = lambda x, w: tensor.gather_matmul(
      x, [('BTD,DF->BTF', w)], 'tensor', 1
    )
    (y,), vjp = jax.vjp(product, x, w)
    dx, dw = vjp((g,))
    z, vjp = jax.vjp(
      lambda g, v: tensor.matmul_scatter('BTF,FD->BTD', g, v, 'tensor', 1), g, v
    )
    dg, dv = vjp(x)
    wide = tensor.gather_matmul(
      x, [('BTD,DF->BTF', w)], 'tensor', 1, dtype=jnp.float32
    )[0]
    return tuple(a[None] for a in (y, dx, dw, z, dg, dv, wide))

  specs = (
    P(None, 'tensor'),
    P(None, 'tensor'),
    P(None, None, 'tensor'),
    P('tensor'),
  )
  run = in_region(run, n, *specs)
  y, dx, dw, z, dg, dv, wide = support.jit(run)(x, w, g, v)
  assert {a.dtype for a in (y, dx, z, dg)} == {jnp.dtype(jnp.bfloat16)}
  assert {a.dtype for a in (dw, dv, wide)} == {jnp.dtype(jnp.float32)}
  messages = re.findall(
    r'(\w+)\[[^\n]*= ppermute', str(jax.make_jaxpr(run)(x, w, g, v))
  )
  assert set(messages) == {'bf16'}
  f8 = lambda a: np.asarray(a, np.float64)
  exact = np.einsum('BTD,BTF->DF', f8(x), f8(g))
  dw = np.concatenate(list(f8(dw)), -1)
  assert np.abs(dw - exact).max() < 1e-3
  rounded = f8(jnp.asarray(dw, jnp.bfloat16))
  assert np.abs(rounded - exact).max() > 1e-2  # what bfloat16 would cost
  dv = np.concatenate(list(f8(dv)), 0)
  assert np.abs(dv - exact.T).max() < 1e-3


def nll(z, targets, scatter=None):
  """(nll, dz, seed) of logits over 2 x 2 ranks, seeded with 1, 2, 3, ..."""
  seed = 1.0 + np.arange(z.shape[0] * z.shape[1]).reshape(z.shape[:2])
  axes = 'context', 'tensor'

  def run(z, targets):
    f = lambda z: vocabulary.nll(z, targets, axes, scatter)
    out, vjp = jax.vjp(f, z)
    return out[None], vjp(jnp.asarray(seed, out.dtype))[0]

  columns = P(None, None, axes)
  run = jax.shard_map(
    run,
    mesh=jax.make_mesh(
      (2, 2),
      axes,
      devices=jax.devices()[:4],
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
    ),
    in_specs=(columns, P()),
    out_specs=(P(axes), columns),
    check_vma=False,
  )
  out, dz = support.jit(run)(z, targets)
  assert all((out[0] == one).all() for one in out)  # every rank has the same
  return out[0], dz, seed


def test_columns_that_pad_the_vocabulary_have_no_share():
  rng = np.random.default_rng(0)
  z, targets = rng.normal(size=(B, T, 16)), rng.integers(0, 9, (B, T))
  z[..., 9:] = -np.inf  # rank 2 holds one column, rank 3 none
  out, dz, seed = nll(z, targets)
  log_p = z[..., :9] - np.log(np.exp(z[..., :9]).sum(-1, keepdims=True))
  hit = np.eye(16)[targets]
  np.testing.assert_allclose(out, -(log_p * hit[..., :9]).sum(-1), rtol=1e-12)
  expected = seed[..., None] * (np.exp(log_p) - hit[..., :9])
  np.testing.assert_allclose(dz[..., :9], expected, rtol=0, atol=1e-12)
  assert (dz[..., 9:] == 0).all()


def test_logits_far_apart_and_in_bfloat16():
  z = np.zeros((1, 2, 8))
  z[0, 0, 1], z[0, 1, 6] = 900.0, -900.0
  out, dz, _ = nll(z, np.array([[1, 6]]))
  np.testing.assert_allclose(out, [[0.0, 900 + np.log(7)]], rtol=1e-12)
  assert np.isfinite(dz).all()
  out, dz, _ = nll(jnp.asarray(z, jnp.bfloat16), np.array([[1, 6]]))
  assert out.dtype == jnp.float32 and dz.dtype == jnp.bfloat16
  np.testing.assert_allclose(out, [[0.0, 900 + np.log(7)]], rtol=1e-6)


def test_ids_outside_the_vocabulary():
  """What the documentation says: log sum exp, and rows of zeros."""
  out, dz, seed = nll(np.zeros((1, 2, 8)), np.array([[-1, 8]]))
  np.testing.assert_allclose(out, np.log(8) * np.ones((1, 2)))
  np.testing.assert_allclose(dz.sum(-1), seed)

  def run(table, ids):
    return vocabulary.embedding(table, ids, 'tensor')[None]

  table = np.arange(1.0, 17).reshape(8, 2)
  ids = np.array([[-1, 7, 8, 0]])
  rows = support.jit(in_region(run, 2, P('tensor'), P()))(table, ids)
  rows = np.concatenate(list(np.asarray(rows)), 1)[0]
  np.testing.assert_array_equal(rows, [[0, 0], [15, 16], [0, 0], [1, 2]])


@pytest.mark.parametrize(
  'equation, dim, words',
  [
    ('BTF,FD->BTD', 2, "'D' must be in the first operand"),
    ('BTF,FD->BFD', 1, "'F' must be in the first operand and in the"),
    ('BTF,FD->BTD', 1, "'T' has size 6, which 4 ranks of 'tensor'"),
  ],
)
def test_what_cannot_be_scattered(equation, dim, words):
  run = lambda x, w: tensor.matmul_scatter(equation, x, w, 'tensor', dim)
  with pytest.raises(ValueError, match=words):
    in_region(run, 4, P(), P())(jnp.ones((1, 6, 4)), jnp.ones((4, 8)))
  with pytest.raises(ValueError, match="'D' must be in"):
    gathers = lambda x, w: tensor.gather_matmul(
      x, [('BTD,DF->BTF', w)], 'tensor', 2
    )
    in_region(gathers, 4, P(), P())(jnp.ones((1, 6, 4)), jnp.ones((4, 8)))


def test_tokens_that_do_not_divide_are_not_lost():
  with pytest.raises(ValueError, match='dimension 1 has size 6, which 4 ranks'):
    nll(np.zeros((1, 6, 8)), np.zeros((1, 6), int), scatter=1)
