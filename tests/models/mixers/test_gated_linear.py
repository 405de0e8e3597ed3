"""Gated linear attention against its definition, token by token."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import attention
from paraxis.models.mixers import gated_linear

pytestmark = pytest.mark.usefixtures('float64')

D, N, T, W = 8, 2, 8, 3
QUICK = {'xla_backend_optimization_level': 0}  # to compile


def module(**own):
  config = schema.Model(
    d_model=D, num_heads=N, num_layers=1,
    gated_linear=mixer_schema.GatedLinear(gate_rank=3, **own),
  )  # fmt: skip
  made = gated_linear.GatedLinear(config, nnx.Rngs(0), 'G')
  graph, state = nnx.split(made, nnx.Param)
  rng = np.random.default_rng(0)
  flat = {
    path: jnp.asarray(rng.normal(0.2, 0.5, leaf.shape))
    for path, leaf in nnx.to_flat_state(state)
  }
  return config, graph, flat


def call(graph, flat, x, see):
  made = nnx.merge(graph, nnx.from_flat_state(list(flat.items())))
  return made(x, see)[0]


def reference(config, flat, x, segments, positions):
  """The formulas at the top of the module, one row and one token at a time."""
  w = {path[0]: value for path, value in flat.items()}
  c = config.gated_linear.gate_normaliser
  heads = lambda name: jnp.einsum('td,dnh->tnh', x, w[name])
  q, k, v, r = map(heads, ('query', 'key', 'value', 'output_gate'))
  z = jnp.einsum('td,dr,rnh->tnh', x, w['decay_down'], w['decay_up'])
  a = jax.nn.sigmoid(z + w['decay_bias']) ** (1 / c)
  if config.gated_linear.conv_width:
    taps = lambda x, name: jax.nn.silu(
      jnp.stack(
        [
          sum(w[name][j] * x[t - j] for j in range(W) if j <= positions[t])
          for t in range(T)
        ]
      )
    )
    q = taps(q, 'query_conv')
    k, v = taps(k, 'key_conv'), taps(v, 'value_conv')
  s, out = jnp.zeros((N, q.shape[-1], v.shape[-1])), []
  for t in range(T):
    if segments[t] == 0:
      out.append(jnp.zeros(D))
      continue
    s = jnp.where(positions[t] == 0, 0, s * a[t][..., None])
    s = s + k[t][..., None] * v[t][:, None]
    o = jnp.einsum('nkv,nk->nv', s, q[t]) * q.shape[-1] ** -0.5
    o = o / jnp.sqrt((o * o).mean(-1, keepdims=True) + config.norm_epsilon)
    o = o * w['output_norm'] * jax.nn.silu(r[t])
    out.append(jnp.einsum('nv,nvd->d', o, w['output']))
  return jnp.stack(out)


def compare(**own):
  segments = np.array([1] * 3 + [2] * 4 + [0], np.int32)
  positions = np.array([*range(3), *range(4), 0], np.int32)
  config, graph, flat = module(**own)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(T, D)))
  weight = jnp.asarray(np.random.default_rng(2).normal(size=(T, D)))
  weight = weight * (segments > 0)[:, None]
  see = attention.Visibility(segments[None], positions[None])
  ours = lambda flat, x: (call(graph, flat, x[None], see)[0] * weight).sum()
  plain = lambda flat, x: (
    reference(config, flat, x, segments, positions) * weight
  ).sum()
  got = jax.jit(jax.value_and_grad(ours, (0, 1)), compiler_options=QUICK)(
    flat, x
  )
  want = jax.jit(jax.value_and_grad(plain, (0, 1)), compiler_options=QUICK)(
    flat, x
  )
  gap = lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max())
  return max(jax.tree.leaves(jax.tree.map(gap, got, want)))


def test_output_and_every_gradient_are_those_of_the_loop():
  assert compare() <= 1e-12


def test_the_same_with_convolutions_before_it():
  assert compare(conv_width=W) <= 1e-12


def test_widths_of_heads():
  config = schema.Model(d_model=64, num_heads=4)
  assert gated_linear.sizes(config) == (4, 8, 16)
