"""Norms: hand values, plain formulas, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import norm
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib


def test_rms_by_hand():
  """[3, 4]: mean square 12.5, so y = x / sqrt(12.5 + eps) * scale."""
  x, scale = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0])
  np.testing.assert_allclose(
    norm.rms(x, scale, 0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6
  )
  # epsilon stands inside the root: 12.5 + 3.5 = 16
  np.testing.assert_allclose(norm.rms(x, scale, 3.5), [[0.75, 2.0]], rtol=1e-6)
  np.testing.assert_allclose(
    norm.rms(x, scale, 3.5, zero_centered=True), [[1.5, 3.0]], rtol=1e-6
  )


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm'])
@pytest.mark.parametrize('centered', [False, True])
def test_norm_equals_a_loop(kind, centered):
  config = schema.Model(
    d_model=6, norm=kind, norm_epsilon=0.1, norm_zero_centered=centered
  )
  rng = np.random.default_rng(0)
  x, scale, bias = rng.normal(1, 2, (2, 3, 6)), rng.normal(size=6), [0.5] * 6
  with jax.enable_x64(True):
    module = norm.Norm(config)
    assert float(module.scale[...][0]) == (0.0 if centered else 1.0)
    module.scale[...] = jnp.asarray(scale)
    assert hasattr(module, 'bias') == (kind == 'layernorm')
    if kind == 'layernorm':
      module.bias[...] = jnp.asarray(bias)
    found = module(jnp.asarray(x))
  assert found.dtype == np.float64
  for i in np.ndindex(2, 3):
    v = x[i]
    if kind == 'layernorm':
      v = v - sum(v) / 6
    y = v / (sum(v * v) / 6 + 0.1) ** 0.5 * (scale + centered)
    y = y + bias if kind == 'layernorm' else y
    np.testing.assert_allclose(found[i], y, rtol=1e-12)


def test_bfloat16_input_is_squared_in_float32():
  """A sum of 300 squares, one of them large, keeps the small ones."""
  x = jnp.full((1, 300), 3.0, jnp.bfloat16).at[0, 0].set(100)
  y = norm.rms(x, jnp.ones(300), 0.0)
  assert y.dtype == jnp.bfloat16
  mean = (299 * 9 + 1e4) / 300
  np.testing.assert_allclose(float(y[0, 1]), 3 / mean**0.5, rtol=2**-8)
  # Accumulated in bfloat16 the nines would be lost.
  coarse = 0.0
  for v in np.asarray(x[0], 'f4') ** 2:
    coarse = float(jnp.bfloat16(coarse + v))
  assert abs(coarse / 300 - mean) > 0.05 * mean


def test_a_norm_over_heads_of_all_shards():
  """In a manual region too, forward and backward; unnamed it is another."""
  rng = np.random.default_rng(0)
  x, c = rng.normal(size=(2, 2, 4, 8, 3))
  scale = rng.normal(size=(8, 3))
  heads = ('batch', 'length', 'heads', 'head_dim')

  def differentiate(name, x, scale, c):
    run = lambda x, s: norm.rms(x, s, 0.1, axis=(-2, -1), name=name)
    y, vjp = jax.vjp(run, x, scale)
    return y, *vjp(c)

  with jax.enable_x64(True):
    wanted = jax.tree.map(
      np.asarray, jax.jit(differentiate, static_argnums=0)(None, x, scale, c)
    )
    square = (x * x).mean((-2, -1), keepdims=True)
    by_hand = x / np.sqrt(square + 0.1) * scale
    np.testing.assert_allclose(wanted[0], by_hand, rtol=1e-12)
    rules = rules_lib.preset('fsdp_tensor')
    made = mesh_lib.make('tensor=8')
    with annotate.use(rules), jax.set_mesh(made):
      specs = annotate.spec(heads), annotate.spec(heads[2:])
      put = lambda x, s: jax.device_put(x, jax.NamedSharding(made, s))
      args = put(x, specs[0]), put(scale, specs[1]), put(c, specs[0])
      for name, equal in (('heads', True), (None, False)):
        run = jax.shard_map(
          lambda *a, name=name: differentiate(name, *a),
          in_specs=(*specs, specs[0]),
          out_specs=(specs[0], *specs),
          check_vma=False,
        )
        found = jax.tree.map(np.asarray, jax.jit(run)(*args))
        for a, b in zip(found, wanted, strict=True):
          assert (np.abs(a - b).max() < 1e-12) == equal
