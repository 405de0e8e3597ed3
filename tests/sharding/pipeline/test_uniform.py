"""Collectives in branches that devices take apart are refused while tracing."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.attention import blocks
from paraxis.pallas_kernels.attention import hopper
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.pipeline import uniform


def ring(x):
  return lax.ppermute(x, 'data', [(i, (i + 1) % 8) for i in range(8)])


def at_times(predicate):
  """A ring in a branch, in a scan, as a mixer in a pipeline's stage might."""

  def turn(x, i):
    return lax.cond(predicate(x, i), ring, lambda x: x, x), None

  return lambda x: lax.scan(turn, x, jnp.arange(4))[0]


def kernel(x):
  """Branches and loops on a device's own numbers, in a kernel."""
  q = jnp.zeros((1, 128, 1, 64), 'bfloat16') + x[0].astype('bfloat16')
  mask = attention.Mask(scale=0.125)
  o, lse = hopper.forward(q, q, q, None, None, mask)
  rows = blocks.QueryRows(lse, lse, o)
  dq, *_ = hopper.backward(q, q, q, None, None, mask, rows)
  return x + dq.astype(x.dtype).sum()


def checked(function):
  """Traces `function` in a region over data=8, and checks it there."""

  def body(x):
    uniform.check(jax.make_jaxpr(function)(x), what='the mixer')
    return x

  with jax.set_mesh(mesh_lib.make('data=8')):
    run = jax.shard_map(
      body, in_specs=jax.P('data'), out_specs=jax.P('data'), check_vma=False
    )
    jax.jit(run).trace(jnp.zeros(8, out_sharding=jax.P('data')))


@pytest.mark.parametrize(
  'function',
  [
    at_times(lambda x, i: lax.axis_index('data') > i),
    at_times(lambda x, i: x.sum() > 0),
    lambda x: lax.while_loop(lambda x: x.sum() < 9, ring, x),
    jax.jit(at_times(lambda x, i: x.sum() > 0)),
  ],
  ids=['place', 'data', 'loop', 'in jit'],
)
def test_a_branch_that_may_differ_is_refused(function):
  with pytest.raises(errors.UserError, match='the mixer: ppermute at .*') as e:
    checked(function)
  assert 'test_uniform.py' in str(e.value)


@pytest.mark.parametrize(
  'function',
  [
    at_times(lambda x, i: i % 2 == 0),
    at_times(lambda x, i: lax.psum(x.sum(), ('data',)) > 0),
    lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, ring(x)),
    lambda x: jnp.where(lax.axis_index('data') > 3, ring(x), x),
    kernel,
  ],
  ids=['counter', 'full sum', 'nothing sent', 'selected', 'kernel'],
)
def test_what_devices_agree_on_is_not(function):
  checked(function)
