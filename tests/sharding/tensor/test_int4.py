"""A parameter in 4 bits: the products of the floats that it stands for."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.sharding import annotate
from paraxis.sharding.tensor import int4
from paraxis.sharding.tensor import project

# A matrix, its logical axes and its contracted dimensions; a product with it.
MATRICES = {
  'query': ((64, 4, 32), ('embed', 'heads', None), 1),
  'output': ((4, 32, 64), ('heads', None, 'embed'), 2),
  'down': ((128, 64), ('mlp', 'embed'), 1),
}
TOKENS = ('batch', 'length')
PRODUCTS = {
  'query': ('BTD,DNH->BTNH', (*TOKENS, 'hidden'), (*TOKENS, 'heads', None)),
  'output': ('BTNH,NHD->BTD', (*TOKENS, 'heads', None), (*TOKENS, 'hidden')),
  'down': ('BTF,FD->BTD', (*TOKENS, 'mlp'), (*TOKENS, 'hidden')),
}
MESHES = ('data=2', 'tensor=2', 'data=2,fsdp=2,tensor=2')


def matrix(name):
  shape, axes, inputs = MATRICES[name]
  w = np.random.default_rng(0).normal(size=shape)
  w.reshape(math.prod(shape[:inputs]), -1)[:32, 0] = 0  # a group of zeros
  return w, axes, inputs


def rounded(w, inputs, group):
  """By definition, a group of a column after the other."""
  flat = w.reshape(math.prod(w.shape[:inputs]), -1)
  out = np.empty_like(flat)
  for a in range(0, len(flat), group):
    for f in range(flat.shape[1]):
      part = flat[a : a + group, f]
      step = float(np.asarray(np.abs(part).max() / 7, jnp.bfloat16)) or 1.0
      out[a : a + group, f] = np.clip(np.rint(part / step), -7, 7) * step
  return out.reshape(w.shape)


def product(name, w, x):
  equation, x_names, out = PRODUCTS[name]
  return project.einsum(equation, x, x_names, w, MATRICES[name][1], out)


def activations(name):
  w, _, inputs = matrix(name)
  shape = (4, 3, *w.shape[:inputs])
  return np.random.default_rng(1).normal(size=shape)


@pytest.mark.parametrize('group', [32, 64, 128])
@pytest.mark.parametrize('name', MATRICES)
def test_on_one_device(name, group):
  """What is kept, its bytes, and its products, in float64."""
  w, axes, inputs = matrix(name)
  rows = math.prod(w.shape[:inputs])
  if rows % group:
    with support.refused(f'{name} has {rows} inputs', f'{group}'):
      int4.make(w, axes, inputs, group, name)
    return
  with jax.enable_x64(True):
    kept = int4.make(jnp.asarray(w), axes, inputs, group)
    assert kept.nbytes == w.size // 2 + 2 * w.size // group
    assert kept.dtype == np.float64 and kept.shape == w.shape
    wanted = rounded(w, inputs, group)
    np.testing.assert_array_equal(kept.astype(jnp.float64), wanted)
    x = activations(name)
    found = jax.jit(functools.partial(product, name))(kept, x)
    right = np.einsum(PRODUCTS[name][0], x, wanted)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)
    # Scales of another column are seen.
    wrong = int4.Int4(
      kept.q, jnp.roll(kept.scale, 1, 1), w.shape, inputs, w.dtype
    )
    assert np.abs(product(name, wrong, x) - right).max() > 1


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('name', MATRICES)
def test_on_a_mesh(name, mesh):
  """The integers are laid out as the matrix was; products are the same."""
  w, axes, inputs = matrix(name)
  x, wanted = activations(name), rounded(w, inputs, 32)
  equation, x_names, _ = PRODUCTS[name]
  with jax.enable_x64(True), support.laid_out(mesh, 4, sequence=False):
    whole = annotate.put(jnp.asarray(w), axes)
    kept = jax.jit(lambda w: int4.make(w, axes, inputs, 32))(whole)
    shards = math.prod(map(annotate.shards, axes))
    local = kept.q.addressable_shards[0].data
    assert local.size * shards == kept.q.size == w.size // 2
    given = annotate.put(jnp.asarray(x), x_names)
    found = jax.jit(functools.partial(product, name))(kept, given)
    right = np.einsum(equation, x, wanted)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)


def test_a_shard_that_splits_a_group_is_refused():
  w, axes, inputs = matrix('down')
  with support.laid_out('tensor=8', 8), support.refused(
    'down has 128 inputs, 16 on each of 8 shards', '32'
  ):  # fmt: skip
    int4.make(annotate.put(w, axes), axes, inputs, 32, 'down')


def test_its_transpose_multiplies_floats():
  """An equation that contracts what groups do not follow."""
  w, axes, inputs = matrix('down')
  kept = int4.make(jnp.asarray(w, 'f4'), axes, inputs, 32)
  x = np.random.default_rng(1).normal(size=(3, 64)).astype('f4')
  found = project.einsum(
    'TD,FD->TF', x, (None, None), kept, (None, None), (None, None)
  )
  wanted = x @ rounded(w.astype('f4'), inputs, 32).T
  np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize('mesh', ['data=1', 'data=2,tensor=2'])
def test_floats_are_made_in_the_loop_over_tokens(mesh, monkeypatch):
  """Of one matrix at a time; without `tied` all stay in memory."""

  names, square = (*TOKENS, 'hidden'), ('embed', 'mlp')
  multiply = lambda x, w: project.einsum(
    'BTD,DF->BTF', x, names, w, square, names
  )

  def temporaries():
    with support.laid_out(mesh, sequence=False):
      made = jax.jit(lambda w: int4.make(w, square, 1, 32))
      layers = [
        made(annotate.put(jnp.full((256, 256), i + 1.0), square))
        for i in range(6)
      ]

      def body(_, x, layers):
        for w in layers:
          x = x + multiply(x, w)
        return x

      def run(x, layers):
        step = functools.partial(body, layers=layers)
        return jax.lax.fori_loop(0, x.size, step, x)

      x = annotate.put(jnp.ones((4, 1, 256)), names)
      made = jax.jit(run).lower(x, layers).compile()
      return made.memory_analysis().temp_size_in_bytes

  few = temporaries()
  monkeypatch.setattr(int4.quantized, 'tied', lambda q, x: q)
  assert temporaries() > 3 * few
