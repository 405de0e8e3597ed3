"""Gated linear attention against its definition, token by token."""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import gated_linear

pytestmark = pytest.mark.usefixtures('float64')

D, N, T, W = 8, 2, 8, 3


def reference(config, w, x, segments, positions):
  """The formulas at the top of the module, one row and one token at a time."""
  c = config.gated_linear.gate_normaliser
  heads = lambda name: jnp.einsum('td,dnh->tnh', x, w[name])
  q, k, v, r = map(heads, ('query', 'key', 'value', 'output_gate'))
  z = jnp.einsum('td,dr,rnh->tnh', x, w['decay_down'], w['decay_up'])
  a = jax.nn.sigmoid(z + w['decay_bias']) ** (1 / c)
  if config.gated_linear.conv_width:
    q, k, v = (
      module_cases.convolved(w[f'{name}_conv'], x, positions)
      for name, x in (('query', q), ('key', k), ('value', v))
    )
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


@pytest.mark.parametrize(
  'own', [dict(gate_normaliser=4.0), dict(conv_width=W)], ids=str
)
def test_output_and_every_gradient_are_those_of_the_loop(own):
  config = schema.Model(
    d_model=D, num_heads=N, num_layers=1,
    gated_linear=mixer_schema.GatedLinear(gate_rank=3, **own),
  )  # fmt: skip
  run, values = module_cases.module(gated_linear.GatedLinear, config, 'G', 0.5)
  see = module_cases.see_of(((3, 4),), T)
  x = np.random.default_rng(1).normal(size=(1, T, D))
  loop = lambda w, x: reference(
    config, w, x[0], see.segments[0], see.positions[0]
  )[None]
  module_cases.assert_equal(
    lambda w, x: run(w, x, see)[0], loop, values, x, see.segments > 0,
    of_values=1e-12,
  )  # fmt: skip


def test_widths_of_heads():
  config = schema.Model(d_model=64, num_heads=4)
  assert gated_linear.sizes(config) == (4, 8, 16)
  own = mixer_schema.GatedLinear(heads=2, key_expand=0.25, value_expand=2.0)
  config = schema.Model(d_model=64, num_heads=4, gated_linear=own)
  assert gated_linear.sizes(config) == (2, 8, 64)
