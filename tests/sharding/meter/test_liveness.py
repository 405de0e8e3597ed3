"""What a step keeps: small functions by hand, a decoder against its compile."""

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.sharding.meter import liveness
from paraxis.sharding.meter import traced
from paraxis.train.certify import check
from paraxis.train.claims import experiment

P = jax.P
MESH = mesh_lib.abstract({'data': 4, 'tensor': 2})
ROWS = (64, 32)  # 2048 bytes on each device, over data
ONE = 64 * 32 * 4 // 4


def estimate(function, *specs):
  """`Memory` of a function of arrays of shape ROWS."""
  shapes = [
    jax.ShapeDtypeStruct(
      ROWS, jnp.float32, sharding=jax.NamedSharding(MESH, spec)
    )
    for spec in specs
  ]
  with jax.sharding.use_abstract_mesh(MESH):
    body, _ = traced.trace(function, dict(MESH.shape), *shapes)
  return liveness.estimate(body)


def square(x):
  """A product, so that something is really computed: (64, 32) -> (64, 32)."""
  w = jnp.ones((32, 32))
  return jnp.einsum('BD,DF->BF', x, w, out_sharding=P('data'))


def test_elementwise_work_takes_no_memory_until_it_is_read():
  assert estimate(lambda x: x.sum(), P('data')).peak == 4
  assert estimate(lambda x: jnp.sin(jnp.cos(x) + 1), P('data')).peak == ONE
  assert estimate(lambda x: x.reshape(64, 4, 8).sum(), P('data')).peak == 4
  # Both operands of the second product are there at once, and its result.
  w = 32 * 32 * 4
  found = estimate(lambda x: square(square(x)), P('data')).peak
  assert 2 * ONE <= found <= 2 * ONE + w


def test_an_update_in_place_takes_no_second_buffer():
  def body(total, i):
    row = jnp.full((64, 1), i, jnp.float32, out_sharding=P('data'))
    return jax.lax.dynamic_update_slice_in_dim(total, row, i, 1), ()

  fill = lambda x: jax.lax.scan(body, x * 2, jnp.arange(32))[0]
  found = estimate(fill, P('data')).peak
  assert ONE <= found <= ONE + 64 * 4 // 4 + 32 * 4 + 8


def test_a_scan_keeps_what_each_turn_needs_and_remat_its_inputs():
  def layer(x):
    return jnp.sin(square(jnp.sin(square(x))))

  def loss(layer):
    run = lambda x: jax.lax.scan(lambda x, _: (layer(x), ()), x, None, 5)[0]
    return jax.grad(lambda x: run(x).sum())

  plain = estimate(loss(layer), P('data'))
  remat = estimate(loss(jax.checkpoint(layer)), P('data'))
  # cos of both sines; with remat the input of each turn.
  assert plain.saved == 2 * 5 * ONE
  assert remat.saved == 5 * ONE
  assert plain.peak > remat.peak > remat.saved
  assert all('test_liveness.py' in k.where for k in plain.kept)
  assert plain.kept[0].what == 'f32[5,64@data,32]' and not plain.offloaded


def test_layouts_divide_what_is_kept():
  gradient = jax.grad(lambda x: jnp.sin(square(x)).sum())
  split = estimate(gradient, P('data')).saved
  assert split == ONE

  def whole(x):
    return gradient(jax.reshard(x, P('data')))

  assert estimate(whole, P()).saved == split
  # The same without products is fused: nothing is kept.
  assert estimate(jax.grad(lambda x: jnp.sin(x).sum()), P()).saved == 0


def test_a_step_in_one_region_is_seen_through():
  def body(x):
    product = lambda x: jnp.sin(x @ jnp.ones((32, 32))).sum()
    return jax.grad(product)(x)

  region = jax.shard_map(body, out_specs=P('data'), check_vma=False)
  found = estimate(lambda x: region(x), P('data'))
  assert found.saved == ONE and found.peak >= 2 * ONE


def _decoder(remat, memory=''):
  config = schema.default()
  config.model.update(d_model=64, num_layers=4, d_ff=256, vocab_size=64)
  config.data.sequence_length = 128
  config.train.remat, config.train.memory = remat, memory
  return schema.view(config)


def test_policies_differ_by_what_the_compiler_says():
  """Saved bytes of two policies against temporaries, compiled on one device."""

  def bytes_of(remat):
    config = _decoder(remat)
    program, _ = experiment.step_program(config, tuple(jax.devices()[:1]))
    saved = check.check(config, 'data=1').memory.saved
    return saved, aot.memory(program).temporaries

  (none, compiled_none), (full, compiled_full) = map(bytes_of, ('none', 'full'))
  assert none > 2 * full
  assert none - full == pytest.approx(compiled_none - compiled_full, rel=0.15)


def test_offloaded_arrays_are_the_hosts():
  kept = check.check(_decoder('full'), 'data=2').memory
  moved = check.check(_decoder('full', 'residual=offload'), 'data=2').memory
  assert kept.offloaded == 0
  # The input of every layer: 4 layers of 4 rows.
  assert moved.offloaded == 4 * 4 * 128 * 64 * 4
  assert moved.saved == kept.saved - moved.offloaded
