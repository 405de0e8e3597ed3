"""Floating-point operations counted from traced programs."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from paraxis.pallas_kernels.attention import hopper
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import flops

LAYERS, ROWS, WIDTH = 7, 8, 16
WEIGHTS = jnp.ones((LAYERS, WIDTH, WIDTH))
INPUT = jnp.ones((ROWS, WIDTH))
FORWARD = 2 * LAYERS * ROWS * WIDTH**2


def scanned(w, x):
  return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()


def unrolled(w, x):
  for layer in w:
    x = jnp.tanh(x @ layer)
  return x.sum()


def total(f, *args):
  return flops.count(f, *args).total


@pytest.mark.parametrize('f', [scanned, unrolled])
def test_training_is_six_per_weight_and_row(f):
  assert total(f, WEIGHTS, INPUT) == FORWARD
  # The gradient of the input too: three products for each of the forward pass.
  gradient = jax.jit(jax.grad(f, (0, 1)))
  assert total(gradient, WEIGHTS, INPUT) == 3 * FORWARD
  again = jax.checkpoint(f)
  assert total(jax.grad(again, (0, 1)), WEIGHTS, INPUT) == 4 * FORWARD


def test_a_walk_that_counts_a_body_once_is_wrong():
  (body,) = (
    e.params['jaxpr']
    for e in jax.make_jaxpr(scanned)(WEIGHTS, INPUT).eqns
    if e.primitive.name == 'scan'
  )
  assert flops.of_jaxpr(body).total == FORWARD / LAYERS


def grouped(x, kernel):
  return lax.conv_general_dilated(
    x, kernel, (1, 1), 'SAME', feature_group_count=2
  )


def ragged(x, w):
  return lax.ragged_dot(x, w, jnp.array([10, 10, 12]))


@pytest.mark.parametrize(
  'f, shapes, expected',
  [
    (jnp.dot, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
    (
      lambda a, b: jnp.einsum('bij,bjk->bik', a, b),
      [(2, 3, 4), (2, 4, 5)],
      2 * 2 * 3 * 4 * 5,
    ),
    (
      grouped,
      [(2, 4, 8, 8), (6, 2, 3, 3)],
      2 * (2 * 6 * 8 * 8) * (2 * 3 * 3),
    ),
    (ragged, [(32, 4), (3, 4, 5)], 2 * 32 * 4 * 5),
    (jax.grad(lambda *a: ragged(*a).sum(), (0, 1)), [(32, 4), (3, 4, 5)], 3840),
    (
      lambda a: lax.fori_loop(0, 5, lambda _, a: a @ a, a),
      [(4, 4)],
      5 * 2 * 4**3,
    ),
    (
      lambda a: lax.cond(a[0, 0] > 0, lambda: a @ a @ a, lambda: a @ a),
      [(4, 4)],
      2 * 2 * 4**3,
    ),
    (
      lambda a: lax.while_loop(lambda a: a[0, 0] > 1, lambda a: a / 2, a),
      [(4, 4)],
      0,
    ),
  ],
)
def test_primitives(f, shapes, expected):
  assert total(f, *map(jnp.ones, shapes)) == expected


def test_custom_rules_are_walked():
  square = jax.custom_vjp(lambda x: x @ x)
  square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x + x @ g,))
  x = jnp.ones((4, 4))
  assert total(square, x) == 2 * 4**3
  # Two products in the rule, besides the one of the forward pass.
  assert total(jax.grad(lambda x: square(x).sum()), x) == 3 * 2 * 4**3


def test_work_in_a_while_loop_is_an_error():
  f = lambda n, x: lax.fori_loop(0, n, lambda _, x: x @ x, x)
  with pytest.raises(ValueError, match='128 floating-point operations a turn'):
    flops.count(f, 3, jnp.ones((4, 4)))


def _kernel(x, **options):
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...]

  return pl.pallas_call(body, out_shape=x, interpret=True, **options)(x)


def test_kernels_count_their_estimate():
  estimate = pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=0)
  f = lambda x: _kernel(x, cost_estimate=estimate)
  assert total(f, jnp.ones((4, 4))) == 123
  assert total(jax.vmap(f), jnp.ones((3, 4, 4))) == 3 * 123
  with pytest.raises(ValueError, match='no cost_estimate'):
    flops.count(_kernel, jnp.ones((4, 4)))


def test_kernels_of_mosaic_for_gpus_count_what_their_name_says():
  q = jax.ShapeDtypeStruct((2, 256, 4, 64), 'bfloat16')
  k = jax.ShapeDtypeStruct((2, 256, 2, 64), 'bfloat16')
  mask = attention.Mask(scale=1.0)
  forward = lambda q, k, v: hopper.forward(q, k, v, None, None, mask)[0]
  dense = 4 * 2 * 4 * 256 * 256 * 64  # of which 3 of 4 blocks are visible
  for f in (forward, jax.checkpoint(forward), jax.jit(forward)):
    assert total(f, q, k, k) == dense * 3 / 4
  many = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in (q, k, k)]
  assert total(jax.vmap(forward), *many) == 5 * dense * 3 / 4

  def alone(x_ref, o_ref):
    o_ref[...] = x_ref[...]

  with pytest.raises(ValueError, match='alone: its work cannot be counted'):
    flops.count(plgpu.kernel(alone, out_type=q), q)


def test_attention_counts_the_blocks_it_walks():
  """Causal, 4 x 4 blocks of 64: 10 of 16 pairs, two products forward."""
  b, t, n, h = 2, 256, 3, 16
  q = jnp.ones((b, t, n, h))
  mask = attention.Mask(scale=1.0, block=64)
  f = lambda q, k, v: attention.attention(q, k, v, mask)[0].sum()
  dense = 4 * b * n * t * t * h
  assert total(f, q, q, q) == dense * 10 / 16
  both = total(jax.grad(f, (0, 1, 2)), q, q, q)
  assert both == dense * 10 / 16 * (1 + 2.5)


def place(shape, *spec):
  return jax.device_put(jnp.ones(shape), jax.P(*spec))


def test_share_of_a_device_from_types():
  with jax.set_mesh(mesh_lib.make('data=2,fsdp=2,tensor=2')):
    x = place((8, 16), ('data', 'fsdp'))
    up, down = place((16, 32), 'fsdp', 'tensor'), place((32, 16), 'tensor')

    def column(x, w):
      out = jax.P(('data', 'fsdp'), 'tensor')
      return jnp.einsum('bd,df->bf', x, w, out_sharding=out)

    def row(h, w):  # contracted over tensor on both sides
      out = jax.P(('data', 'fsdp'), None)
      return jnp.einsum('bf,fd->bd', h, w, out_sharding=out)

    one = 2 * 8 * 16 * 32
    assert flops.count(column, x, up) == (one, one / 8)
    h = column(x, up)
    assert flops.count(row, h, down) == (one, one / 8)
    # Nothing sharded over fsdp and tensor: four devices repeat each other.
    repeated = flops.count(jnp.dot, place((8, 16), 'data'), jnp.ones((16, 32)))
    assert repeated == (one, one / 2)


def test_manual_regions_count_every_shard():
  mesh = mesh_lib.make('data=2,fsdp=2,tensor=2')
  with jax.set_mesh(mesh):
    f = jax.shard_map(
      jnp.dot,
      in_specs=(jax.P('data'), jax.P(None, 'tensor')),
      out_specs=jax.P('data', 'tensor'),
      check_vma=False,
    )
    w = place((16, 32), None, 'tensor')
    found = flops.count(f, place((8, 16), 'data'), w)
  local = 2 * 4 * 16 * 16
  assert found == (8 * local, local)  # fsdp repeats, and that is executed
