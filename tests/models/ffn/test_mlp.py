"""The mlp forms against their formulas, with and without biases."""

import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import parameter
from paraxis.models.ffn import mlp
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib

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


WIDE = schema.Model(
  d_model=8, d_ff=24, mlp='geglu', mlp_bias=True, dtype='float64'
)


def differentiate(module, w, x, c):
  """(y, {name: dw}, dx); the parameters are arguments."""
  graph, _ = nnx.split(module)
  names = {k: getattr(module, k) for k in w}

  def run(w, x):
    flat = [((k,), v.replace(w[k])) for k, v in names.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))(x)

  y, vjp = jax.vjp(run, w, x)
  return y, *vjp(c)


@functools.cache
def plain():
  """(arguments of `differentiate`, its results on one device)."""
  module = mlp.Mlp(WIDE, nnx.Rngs(0))
  rng = np.random.default_rng(0)
  w = {
    path[0]: rng.normal(size=v[...].shape)
    for path, v in nnx.to_flat_state(nnx.state(module, nnx.Param))
  }
  x, c = rng.normal(size=(2, 8, 8, 8))
  run = jax.jit(functools.partial(differentiate, module))
  return (w, x, c), jax.tree.map(np.asarray, run(w, x, c))


def on_mesh(world, choices, rings=()):
  made = mesh_lib.make('data=2,fsdp=2,tensor=2')
  rules = rules_lib.of(choices, dict(made.shape), 8)
  module = mlp.Mlp(WIDE, nnx.Rngs(0), parameter.Layout(rings))
  args, _ = plain()
  axes = {k: getattr(module, k).get_metadata('axes') for k in args[0]}

  def inside(*args):
    y, dw, dx = differentiate(module, *args)
    held = lambda k: {a for n in axes[k] for a in annotate.carriers(n)}
    left = lambda k: tuple(a for a in annotate.sizes() if a not in held(k))
    add = lambda k, d: jax.lax.psum(d, left(k)) if left(k) else d
    return y, {k: add(k, d) for k, d in dw.items()}, dx

  with annotate.use(rules), jax.set_mesh(made):
    weights = {k: annotate.spec(a) for k, a in axes.items()}
    rows = annotate.spec(mlp.RESIDUAL)
    put = lambda x, s: jax.device_put(x, jax.NamedSharding(made, s))
    args = jax.tree.map(put, args, (weights, rows, rows))
    run = functools.partial(differentiate, module)
    if world == 'manual':
      run = jax.shard_map(
        inside,
        in_specs=(weights, rows, rows),
        out_specs=(rows, weights, rows),
        check_vma=False,
      )
    return jax.tree.map(np.asarray, jax.jit(run)(*args))


@pytest.mark.parametrize(
  'world, rings, choices',
  [
    ('explicit', (), schema.Mesh(sequence=False)),
    ('explicit', ('gate_up',), schema.Mesh(zero=3)),
    ('manual', ('gate_up', 'down'), schema.Mesh()),
    # Tokens alone are split, inside too.
    ('manual', (), schema.Mesh(
      rules='fsdp length=tensor residual_length=tensor')),
  ],
)  # fmt: skip
def test_any_layout_is_one_device(world, rings, choices):
  with jax.enable_x64(True):
    found, (_, wanted) = on_mesh(world, choices, rings), plain()
  near = lambda a, b: np.testing.assert_allclose(
    a, b, rtol=0, atol=1e-12 * np.abs(b).max()
  )
  jax.tree.map(near, found, wanted)


def test_a_region_refuses_partial_sums():
  with jax.enable_x64(True), pytest.raises(ValueError, match='mesh.sequence'):
    on_mesh('manual', schema.Mesh(sequence=False))
