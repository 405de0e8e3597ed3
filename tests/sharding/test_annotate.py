"""Logical names in three worlds: explicit, manual and without a mesh.

Legend: B rows, T tokens, D model, N heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.pallas_kernels import varying
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, H = 4, 8, 6, 4, 2
MESH = 'data=2,context=2,tensor=2'
RESIDUAL = ('batch', 'residual_length', 'hidden')
ROWS, WHOLE = ('batch', 'length', 'hidden'), ('batch', None, 'hidden')
HEADS = ('batch', 'length', 'heads', 'head_dim')
ALL_HEADS = ('batch', 'length', None, 'head_dim')


@pytest.fixture
def cube():
  with support.laid_out(MESH, N, zero=1):
    yield


def array(*shape):
  return np.random.default_rng(0).normal(size=shape)


def placed(x, names):
  return jax.device_put(x, annotate.spec(names))


def in_region(function, names, out, x):
  """function(local x) in a manual region; x and the result by their names."""
  run = annotate.region(function, (names,), (out,), single=True)
  return jax.jit(run)(placed(x, names))


def test_without_a_mesh():
  x = array(B, T, D)
  assert annotate.mode() == 'none' and annotate.sizes() == {}
  assert annotate.shards('batch') == 1 and annotate.carriers('batch') == ()
  assert annotate.put(x, ROWS) is x and annotate.move(x, ROWS, WHOLE) is x
  assert annotate.take(x, ROWS, 1) is x
  assert annotate.stored(x, RESIDUAL, rules_lib.OPTIMIZER) is x
  assert annotate.region(np.sin, (ROWS,), (ROWS,)) is np.sin
  np.testing.assert_allclose(annotate.mean(x, -1, 'heads')[..., 0], x.mean(-1))


def test_modes_and_sizes(cube):
  assert annotate.mode() == 'explicit'
  assert annotate.sizes() == dict(data=2, context=2, tensor=2)
  assert annotate.carriers('batch') == ('data',)
  assert annotate.carriers('residual_length') == ('context', 'tensor')
  assert annotate.carriers('length') == ('context',)
  assert annotate.carriers('embed') == annotate.carriers(None) == ()
  assert annotate.shards('residual_length') == 4
  assert annotate.shards('hidden') == 1
  assert annotate.spec(RESIDUAL, (B, T, D)) == P(
    'data', ('context', 'tensor'), None
  )
  with jax.set_mesh(mesh_lib.make({}, jax.devices()[:1])):
    assert annotate.mode() == 'explicit' and annotate.sizes() == {}
    assert annotate.shards('batch') == 1


def test_use_is_undone():
  before = annotate._rules.get()
  with pytest.raises(KeyError), annotate.use(rules_lib.preset('data')):
    assert annotate._rules.get() is rules_lib.preset('data')
    raise KeyError
  assert annotate._rules.get() is before


def test_a_mesh_without_rules_is_an_error(cube):
  """Not a layout that nobody asked for; without a mesh there is none."""
  x = array(B, T, D)
  with annotate.use(None):
    for run in (
      lambda: annotate.put(x, ROWS),
      lambda: annotate.carriers('batch'),
      lambda: annotate.shards('heads'),
      lambda: annotate.stored(x, RESIDUAL, rules_lib.OPTIMIZER),
    ):
      with pytest.raises(LookupError, match=r'annotate\.use\(rules\)'):
        run()


def test_put_and_move_lay_out(cube):
  x = array(B, T, D)
  spec = lambda y: jax.typeof(y).sharding.spec
  y = annotate.put(jnp.asarray(x), RESIDUAL)
  assert spec(y) == annotate.spec(RESIDUAL) and annotate.put(y, RESIDUAL) is y
  for names in (ROWS, WHOLE, RESIDUAL):
    moved = annotate.move(y, RESIDUAL, names)
    assert spec(moved) == annotate.spec(names)
    np.testing.assert_array_equal(moved, x)
  with pytest.raises(errors.UserError, match="'residual_length' has size 6"):
    annotate.put(jnp.zeros((B, 6, D)), RESIDUAL)
  with pytest.raises(errors.UserError, match="'tensor' serves both"):
    annotate.put(y, ('batch', 'residual_length', 'heads'))


@pytest.mark.parametrize('target', [ROWS, WHOLE])
def test_move_gathers_in_a_region(cube, target):
  """Over tensor only, or over context too; in the order of the tokens."""
  x = array(B, T, D)
  found = in_region(
    lambda x: annotate.move(x, RESIDUAL, target), RESIDUAL, target, x
  )
  np.testing.assert_array_equal(found, x)


def test_move_refuses_to_scatter_in_a_region(cube):
  for source, target in ((ROWS, RESIDUAL), (WHOLE, ROWS)):
    move = functools.partial(annotate.move, source=source, target=target)
    with pytest.raises(ValueError, match='can be gathered in a manual region'):
      in_region(move, source, source, array(B, T, D))


def test_take_is_each_shards_own(cube):
  """All heads on every shard -> each has its own; gradients go back to all."""
  x, weights = array(B, T, N, H), array(B, T, N, H) + 1
  take = lambda x: annotate.take(x, HEADS, 2)
  y = jax.jit(take)(placed(x, ALL_HEADS))
  assert jax.typeof(y).sharding.spec == annotate.spec(HEADS)
  np.testing.assert_array_equal(y, x)
  np.testing.assert_array_equal(in_region(take, ALL_HEADS, HEADS, x), x)

  def gradient(x):
    own = annotate.take(jnp.asarray(weights)[:2, :4], HEADS, 2)
    (dx,) = jax.vjp(take, x)[1](own)
    assert dx.shape == x.shape  # of all heads, zero outside its own
    return jax.lax.psum(dx, 'tensor')

  dx = np.asarray(in_region(gradient, ALL_HEADS, ALL_HEADS, x))
  np.testing.assert_array_equal(dx[:2, :4], weights[:2, :4])


def _mean(name, x):
  """(mean over all heads, gradient of sum(sin mean)) on each shard."""
  mean = lambda x: annotate.mean(x, (-2, -1), name)
  loss = lambda x: jnp.sin(mean(x)) * jnp.ones((1, 1, x.shape[2], 1))
  y, vjp = jax.vjp(loss, x)
  return y, vjp(jnp.ones_like(y))[0]


def test_mean_over_heads_that_are_split(cube):
  x = array(B, T, N, H)
  mean = x.mean((-2, -1), keepdims=True)
  both = np.broadcast_to(np.sin(mean), (B, T, N, 1))
  dx = np.broadcast_to(np.cos(mean) * N / (N * H), x.shape)
  explicit = functools.partial(_mean, 'heads')
  for run in (explicit, annotate.region(explicit, (HEADS,), (HEADS, HEADS))):
    found = jax.jit(run)(placed(x, HEADS))
    np.testing.assert_allclose(found[0], both, rtol=1e-12)
    np.testing.assert_allclose(found[1], dx, rtol=1e-12)
  # Unnamed, a shard averages over its own heads alone.
  wrong = in_region(lambda x: _mean(None, x)[0], HEADS, HEADS, x)
  assert np.abs(wrong - both).max() > 0.01


def test_a_region_is_entered_once(cube):
  """Functions of axis names run under Explicit axes and inside a region."""

  def halo(x, y):
    assert annotate.mode() == 'manual' and annotate.shards('heads') == 2
    assert annotate.put(x, RESIDUAL) is x  # its layout is not known here
    return jax.lax.psum_scatter(
      x + y, 'tensor', scatter_dimension=1, tiled=True
    )

  x = array(B, T, D)
  run = annotate.region(halo, (ROWS, ROWS), (RESIDUAL,), single=True)
  assert run is not halo
  y = jax.jit(run)(placed(x, ROWS), placed(x, ROWS))
  assert jax.typeof(y).sharding.spec == annotate.spec(RESIDUAL)
  np.testing.assert_allclose(y, 4 * x)  # two shards hold the same tokens

  def inner(x):
    again = annotate.region(halo, (ROWS, ROWS), (RESIDUAL,), single=True)
    assert again is halo
    return again(x, x)

  np.testing.assert_allclose(in_region(inner, ROWS, RESIDUAL, x), 4 * x)
  several = annotate.region(lambda x: (x, x * 2), (ROWS,), (ROWS, ROWS))
  one, two = jax.jit(several)(placed(x, ROWS))
  np.testing.assert_array_equal([one, two], [x, x * 2])


def test_what_is_stored_is_sharded_over_data(cube):
  names = ('vocab', 'embed')
  table = placed(array(8, D), names)
  own = jax.typeof(table).sharding.spec
  assert own == P('tensor', None)
  state = annotate.stored(table, names, rules_lib.OPTIMIZER)
  assert jax.typeof(state).sharding.spec == P(('tensor', 'data'), None)
  np.testing.assert_array_equal(state, table)
  sums = annotate.stored(table, names, rules_lib.SUMS)  # the rules say 1
  assert sums is table


def test_like_varies_as_its_pattern(cube):
  x = placed(array(B, T, D), ROWS)
  y = varying.like(x, 3, jnp.int32)
  assert y.dtype == jnp.int32 and y.sharding == x.sharding and (y == 3).all()

  def run(x):
    start = varying.like(x, 0, x.dtype)
    assert jax.typeof(start).mat.varying == jax.typeof(x).mat.varying
    return jax.lax.scan(lambda c, _: (c + x, None), start, None, 2)[0]

  spec = annotate.spec(ROWS)
  found = jax.jit(jax.shard_map(run, in_specs=spec, out_specs=spec))(x)
  np.testing.assert_allclose(found, 2 * np.asarray(x))
