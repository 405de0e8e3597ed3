"""The mlp forms against their formulas, with and without biases."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import mlp
from paraxis.models import parameter

D, F = 4, 6


def silu(x):
  return x / (1 + math.exp(-x))


def gelu(x):
  """The tanh form (arXiv:1606.08415, section 2)."""
  return x / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('form', ['swiglu', 'geglu', 'gelu'])
def test_mlp_equals_a_loop(form, bias):
  config = schema.Model(d_model=D, d_ff=F, mlp=form, mlp_bias=bias)
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    module = mlp.Mlp(config, nnx.Rngs(0))
    names = ['up', 'down'] + ['gate'] * (form != 'gelu')
    names += [f'{n}_bias' for n in names] * bias
    w = {}
    for name in names:
      w[name] = rng.normal(size=getattr(module, name)[...].shape)
      getattr(module, name)[...] = jnp.asarray(w[name])
    x = rng.normal(size=(2, 3, D))
    found = module(jnp.asarray(x))
  b = lambda name: w.get(f'{name}_bias', np.zeros(1))
  for i in np.ndindex(2, 3):
    up = x[i] @ w['up'] + b('up')
    if form == 'gelu':
      hidden = [gelu(u) for u in up]
    else:
      act = silu if form == 'swiglu' else gelu
      gate = x[i] @ w['gate'] + b('gate')
      hidden = [act(g) * u for g, u in zip(gate, up, strict=True)]
    want = np.array(hidden) @ w['down'] + b('down')
    np.testing.assert_allclose(found[i], want, rtol=1e-12, atol=1e-12)


def test_what_a_form_owns():
  has = lambda form, bias: {
    p[0]
    for p, _ in nnx.to_flat_state(
      nnx.state(
        mlp.Mlp(
          schema.Model(d_model=D, d_ff=F, mlp=form, mlp_bias=bias), nnx.Rngs(0)
        )
      )
    )
  }
  assert has('gelu', False) == {'up', 'down'}
  assert has('swiglu', False) == {'up', 'gate', 'down'}
  assert has('gelu', True) == {'up', 'down', 'up_bias', 'down_bias'}
  module = mlp.Mlp(schema.Model(d_model=D, d_ff=F), nnx.Rngs(0))
  assert parameter.metadata(module.up) == (('embed', 'mlp'), 'matrix', 1)
  assert parameter.metadata(module.down) == (('mlp', 'embed'), 'matrix', 1)
