"""RG-LRU against its definition, token by token.

Legend: B rows, T tokens, D model, N heads, H head width, W taps.
"""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models import checks as model_checks
from paraxis.models import skeleton as skeleton_lib
from paraxis.models.mixers import rg_lru

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, N, H, W = 3, 9, 6, 2, 4, 3


def config_of(**own):
  own = dict(width=N * H, heads=N, conv_width=W) | own
  return schema.Model(
    d_model=D, num_heads=3, num_layers=2, pattern='U', dtype='float64',
    param_dtype='float64', rg_lru=mixer_schema.RgLru(**own),
  )  # fmt: skip


SEE = module_cases.see_of(((4, 1, 3), (9,), (2, 5)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def module(**own):
  return module_cases.module(rg_lru.RgLru, config_of(**own), 'U', 0.5)


def loop(w, x, scaled=False):
  """y_BTD, row by row and token by token.

  scaled: the first token of a document is scaled like all others.
  """
  out = []
  for b, t in np.ndindex(B, T):
    p = int(SEE.positions[b, t])
    if p == 0:
      h = jnp.zeros((N, H))
    inputs = [
      jnp.einsum('d,dnh->nh', x[b, t - j], w['value']) + w['value_bias']
      for j in range(min(W, p + 1))
    ]
    v = sum(w['taps'][j] * u for j, u in enumerate(inputs)) + w['taps_bias']
    gate = lambda name, v=v: jax.nn.sigmoid(
      jnp.einsum('nh,nhp->np', v, w[name]) + w[f'{name}_bias']
    )
    a = jax.nn.sigmoid(-w['rate']) ** (8 * gate('recurrent_gate'))
    scale = jnp.sqrt(1 - a**2) if p or scaled else 1
    h = a * h + scale * gate('input_gate') * v
    side = jnp.einsum('d,dnh->nh', x[b, t], w['output_gate'])
    side = jax.nn.gelu(side + w['output_gate_bias'], approximate=True)
    out.append(jnp.einsum('nh,nhd->d', side * h, w['output']))
  return jnp.stack(out).reshape(x.shape) + w['output_bias']


def test_equals_a_loop_over_tokens():
  run, values = module()
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE)[0], loop, values, X, SEE.segments > 0
  )


def test_the_scale_of_the_first_token_is_seen():
  values = module()[1]
  found, other = (jax.jit(loop, static_argnums=2)(values, X, s) for s in (0, 1))
  assert not module_cases.close(found, other, 1e-3)


def test_the_slope_of_the_root_is_bounded():
  slope = jax.grad(rg_lru.root)
  for x in (1.0, 1e-3, 3e-7):
    np.testing.assert_allclose(slope(x), 0.5 / np.sqrt(x), rtol=1e-12)
  assert slope(1e-8) == slope(0.0) == 1000


def test_narrow_arithmetic_keeps_wide_states():
  """bfloat16 inside, float32 in gates, decays and states."""
  run, values = module()
  exact = jax.jit(loop)(values, X)
  cast = lambda tree, dtype: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
  y, (memory, tail), _ = jax.jit(
    lambda w, x: run(w, x, SEE, 'empty')
  )(cast(values, 'f4'), cast(X, jnp.bfloat16))  # fmt: skip
  assert y.dtype == tail.dtype == jnp.bfloat16 and memory.dtype == jnp.float32
  here = (SEE.segments > 0)[..., None]
  error = np.abs(here * (y.astype(np.float64) - exact)).max()
  assert 1e-4 < error / np.abs(here * exact).max() < 0.03


def test_channels_forget_at_many_speeds_at_the_start():
  config = config_of(width=4096)
  skeleton = skeleton_lib.Skeleton(lambda rngs: rg_lru.RgLru(config, rngs, 'U'))
  values = skeleton.init(jax.random.key(0), jnp.float64)
  a = np.exp(-8 * jax.nn.softplus(values['rate']))
  assert 0.9 <= a.min() < 0.901 and 0.998 < a.max() <= 0.999
  assert abs(a.mean() - 0.9495) < 0.002
  assert skeleton.leaves['rate'].kind == 'vector'


def test_heads_that_do_not_divide_the_width_are_refused():
  with pytest.raises(errors.UserError, match='width=8 .*heads=3'):
    model_checks.check_model(config_of(heads=3))


@pytest.mark.parametrize(
  'mesh', [dict(tensor=8, collectives='explicit'), dict(stage=2, tensor=4)],
  ids=str,
)  # fmt: skip
def test_a_layout_equals_one_device(mesh):
  """What tests/train/certify/test_invariance_mixers.py does not meet."""
  model = schema.Model(
    vocab_size=32, d_model=16, num_heads=8, head_dim=2, d_ff=16, num_layers=2,
    pattern='U', dtype='float64', param_dtype='float64',
    rg_lru=mixer_schema.RgLru(width=24),
  )  # fmt: skip
  rows = module_cases.certified(model, **mesh)
  assert len(rows) == 2 and all(row.passed for row in rows), rows
