"""The mlp forms against their formulas, with and without biases."""

import functools
import math

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import parameter
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.ffn import mlp
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

D, F = 4, 6


def silu(x):
  return x / (1 + math.exp(-x))


def gelu(x):
  """The tanh form (arXiv:1606.08415, section 2)."""
  return x / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def xielu(x, s0, s1):
  """Equation 13 of arXiv:2411.13010, whose slope at 0 is 1/2."""
  if x > 0:
    return math.log1p(math.exp(s0)) * x * x + x / 2
  return (0.5 + math.log1p(math.exp(s1))) * (math.exp(x) - 1 - x) + x / 2


def skeleton_of(layout=parameter.PLAIN, **fields):
  """skeleton.Skeleton of an mlp; fields of schema.Model."""
  config = schema.Model(**dict(d_model=D, d_ff=F) | fields)
  return skeleton_lib.Skeleton(lambda rngs: mlp.Mlp(config, rngs, layout))


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(
  'form', ['swiglu', 'geglu', 'gelu', 'xielu', 'clamped']
)
def test_mlp_equals_a_loop(form, bias):
  skeleton = skeleton_of(mlp=form, mlp_bias=bias, mlp_limit=0.75, mlp_slope=1.3)
  w = module_cases.randomised(skeleton, 1.0)
  x = 3 * np.random.default_rng(1).normal(size=(2, 3, D))
  with jax.enable_x64(True):
    found = skeleton.module(w)(x)
  b = lambda name: w.get(f'{name}_bias', np.zeros(1))
  for i in np.ndindex(2, 3):
    up = x[i] @ w['up'] + b('up')
    if form == 'clamped':
      gate = np.minimum(x[i] @ w['gate'] + b('gate'), 0.75)
      hidden = gate / (1 + np.exp(-1.3 * gate)) * (np.clip(up, -0.75, 0.75) + 1)
    elif form == 'gelu':
      hidden = [gelu(u) for u in up]
    elif form == 'xielu':
      hidden = [xielu(u, *w['slopes']) for u in up]
    else:
      act = silu if form == 'swiglu' else gelu
      gate = x[i] @ w['gate'] + b('gate')
      hidden = [act(g) * u for g, u in zip(gate, up, strict=True)]
    want = np.array(hidden) @ w['down'] + b('down')
    np.testing.assert_allclose(found[i], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
  'form, count',
  [
    ('swiglu', 3),
    ('geglu_exact', 3),
    ('clamped', 3),
    ('gelu', 2),
    ('xielu', 2),
  ],
)
def test_products_and_the_hidden_layer_are_kept(form, count):
  """For the gradient, and nothing that lies between."""
  skeleton = skeleton_of(mlp=form)
  w = module_cases.randomised(skeleton, 1.0)
  x = np.random.default_rng(1).normal(size=(2, 3, D))
  _, back = jax.vjp(run_of(skeleton), w, x)
  kept = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == (2, 3, F)]
  assert len(kept) == count


def test_slopes_of_xielu_in_bfloat16():
  """Their gradient is a sum over all tokens: in bfloat16 it stops growing."""
  rng = np.random.default_rng(1)
  x, c = rng.normal(size=2**16), 1 + 0.1 * rng.normal(size=2**16)
  x, c = (jnp.asarray(a, jnp.bfloat16) for a in (x, c))
  slopes = jnp.array([0.2, -1.4])

  def run(dtype):
    y, back = jax.vjp(mlp.xielu, x.astype(dtype), slopes)
    kept = [a.dtype for a in jax.tree.leaves(back) if a.shape == x.shape]
    return y, back(c.astype(dtype))[1], kept

  (y, found, kept), (exact, wanted, _) = run(jnp.bfloat16), run(jnp.float32)
  np.testing.assert_allclose(found, wanted, rtol=0.02)
  assert kept == [jnp.bfloat16]  # x, and nothing wider
  np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_what_a_form_owns():
  has = lambda form, bias: set(skeleton_of(mlp=form, mlp_bias=bias).leaves)
  assert has('gelu', False) == {'up', 'down'}
  assert has('swiglu', False) == {'up', 'gate', 'down'}
  assert has('gelu', True) == {'up', 'down', 'up_bias', 'down_bias'}
  assert has('xielu', False) == {'up', 'down', 'slopes'}
  leaves = skeleton_of().leaves
  assert leaves['up'][2:] == (('embed', 'mlp'), 'matrix', 1)
  assert leaves['down'][2:] == (('mlp', 'embed'), 'matrix', 1)


WIDE = dict(d_model=8, d_ff=24, mlp='geglu', mlp_bias=True, dtype='float64')


def run_of(skeleton):
  return lambda values, x: skeleton.module(values)(x)


@functools.cache
def plain(form='geglu'):
  """(arguments of `module_cases.differentiate`, its results)."""
  skeleton = skeleton_of(**WIDE | dict(mlp=form))
  x, c = np.random.default_rng(1).normal(size=(2, 8, 8, 8))
  args = module_cases.randomised(skeleton, 1.0), x, c
  run = functools.partial(module_cases.differentiate, run_of(skeleton))
  return args, jax.tree.map(np.asarray, jax.jit(run)(*args))


def on_mesh(manual, rings, choices, form='geglu'):
  made = mesh_lib.make('data=2,fsdp=2,tensor=2')
  rules = rules_lib.of(choices, dict(made.shape), 8)
  skeleton = skeleton_of(parameter.Layout(rings), **WIDE | dict(mlp=form))
  axes = {name: leaf.axes for name, leaf in skeleton.leaves.items()}
  return module_cases.on_mesh(
    run_of(skeleton), axes, plain(form)[0], made, rules, manual
  )


@pytest.mark.parametrize(
  'manual, rings, choices',
  [
    (False, (), schema.Mesh(sequence=False)),
    (False, ('gate_up',), schema.Mesh(zero=3)),
    (True, ('gate_up', 'down'), schema.Mesh()),
    # Tokens alone are sharded, inside too.
    (True, (), schema.Mesh(
      rules='fsdp length=tensor residual_length=tensor')),
  ],
)  # fmt: skip
def test_any_layout_is_one_device(manual, rings, choices):
  with jax.enable_x64(True):
    support.close(on_mesh(manual, rings, choices), plain()[1])


@pytest.mark.parametrize('manual', [False, True])
def test_slopes_of_xielu_are_one_devices(manual):
  with jax.enable_x64(True):
    found = on_mesh(manual, (), schema.Mesh(zero=3), 'xielu')
    support.close(found, plain('xielu')[1])


def test_a_region_refuses_partial_sums():
  with jax.enable_x64(True), pytest.raises(ValueError, match='mesh.sequence'):
    on_mesh(True, (), schema.Mesh(sequence=False))
