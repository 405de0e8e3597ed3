"""ParaGRU and ParaLSTM against their definition, token by token."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import attention
from paraxis.models.mixers import recurrent

pytestmark = pytest.mark.usefixtures('float64')

D, N, T, W = 8, 2, 8, 3
QUICK = {'xla_backend_optimization_level': 0}  # to compile

SEGMENTS = np.array([1] * 3 + [2] * 4 + [0], np.int32)
POSITIONS = np.array([*range(3), *range(4), 0], np.int32)


def module(kind, scale, **own):
  own = dict(heads=N, conv_width=W, tolerance=1e-13) | own
  config = schema.Model(
    d_model=D, num_layers=1, recurrent=mixer_schema.Recurrent(**own)
  )
  made = kind(config, nnx.Rngs(0), '')
  graph, state = nnx.split(made, nnx.Param)
  rng = np.random.default_rng(0)
  flat = {
    path: jnp.asarray(rng.normal(0.2, 0.5, leaf.shape))
    for path, leaf in nnx.to_flat_state(state)
  }
  flat['recurrent',] = flat['recurrent',] * scale
  return config, graph, flat


def call(graph, flat, x):
  made = nnx.merge(graph, nnx.from_flat_state(list(flat.items())))
  return made(x, attention.Visibility(SEGMENTS[None], POSITIONS[None]))[0]


def reference(cell, numbers, config, flat, x):
  w = {path[0]: value for path, value in flat.items()}
  x, g = (jnp.einsum('td,dnh->tnh', x, w[n]) for n in ('input', 'output_gate'))
  x = jax.nn.silu(
    jnp.stack(
      [
        sum(w['taps'][j] * x[t - j] for j in range(W) if j <= POSITIONS[t])
        for t in range(T)
      ]
    )
  )
  u = jnp.stack(
    [
      jnp.einsum('tnh,nhp->tnp', x, w[f'block_{i}']) + w['bias'][i]
      for i in range(3)
    ]
  )
  h, out = jnp.zeros((numbers, N, D // N)), []
  for t in range(T):
    if SEGMENTS[t] == 0:
      out.append(jnp.zeros(D))
      continue
    h = jnp.where(POSITIONS[t] == 0, 0, h)
    h = cell(w['recurrent'], h, u[:, t])
    y = h[-1] * jax.nn.silu(g[t])
    y = y / jnp.sqrt((y * y).mean() + config.norm_epsilon) * w['norm']
    out.append(jnp.einsum('nh,nhd->d', y, w['output']))
  return jnp.stack(out)


def gru(a, h, u):
  s = jax.nn.sigmoid
  (h,) = h
  z, r = s(a[0] * h + u[0]), s(a[1] * h + u[1])
  return ((1 - z) * h + z * jnp.tanh(a[2] * h * r + u[2]))[None]


def lstm(a, h, u):
  s = jax.nn.sigmoid
  c, h = h
  f = s(a[0] * h + a[3] * c + u[0])
  c = f * c + (1 - f) * jnp.tanh(a[1] * h + u[1])
  return jnp.stack([c, s(a[2] * h + a[4] * c + u[2]) * jnp.tanh(c)])


CELLS = {
  'gru': (recurrent.ParaGRU, gru, 1),
  'lstm': (recurrent.ParaLSTM, lstm, 2),
}


def compare(name, scale=1.0, **own):
  """(largest relative difference, gradient of the solver's counter)."""
  kind, cell, numbers = CELLS[name]
  config, graph, flat = module(kind, scale, **own)
  rng = np.random.default_rng(1)
  x, weight = (jnp.asarray(rng.normal(size=(T, D))) for _ in range(2))
  weight = weight * (SEGMENTS > 0)[:, None]
  ours = lambda flat, x: (call(graph, flat, x[None])[0] * weight).sum()
  plain = lambda flat, x: (
    reference(cell, numbers, config, flat, x) * weight
  ).sum()
  got = jax.jit(jax.value_and_grad(ours, (0, 1)), compiler_options=QUICK)(
    flat, x
  )
  want = jax.jit(jax.value_and_grad(plain, (0, 1)), compiler_options=QUICK)(
    flat, x
  )
  took = got[1][0].pop(('solver',))
  want[1][0].pop(('solver',))
  gap = lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max())
  return max(jax.tree.leaves(jax.tree.map(gap, got, want))), took


@pytest.mark.parametrize('name', CELLS)
def test_output_and_every_gradient_are_those_of_the_loop(name):
  gap, (solves, iterations, residual, again) = compare(name)
  assert gap <= 1e-11
  assert solves == 1 and 2 <= iterations <= 20
  assert residual <= 1e-13 and again == 0


@pytest.mark.parametrize('name', CELLS)
def test_what_newton_does_not_solve_is_run_in_sequence(name):
  """And is counted, so that a run can say so."""
  gap, (solves, iterations, _, again) = compare(name, 3.0, iterations=1)
  assert gap <= 1e-11 and (solves, iterations, again) == (1, 1, 1)


def test_a_strict_solver_poisons_what_it_does_not_solve():
  gap, _ = compare('gru', 3.0, iterations=1, strict=True)
  assert np.isnan(gap)


def test_in_sequence_when_asked():
  gap, took = compare('gru', solver='sequential')
  assert gap <= 1e-11 and (took == 0).all()


def test_bad_input():
  config = schema.Model(d_model=10, recurrent=mixer_schema.Recurrent(heads=4))
  with pytest.raises(errors.UserError, match='d_model=10 is not divisible by'):
    recurrent.ParaGRU.check(config)
  own = dataclasses.replace(config.recurrent, solver='sequential')
  config = dataclasses.replace(config, recurrent=own)
  with pytest.raises(errors.UserError, match="take 'newton'"):
    recurrent.ParaGRU.check_context(config, 64)
