"""ParaGRU and ParaLSTM against their definition, token by token."""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import recurrent

pytestmark = pytest.mark.usefixtures('float64')

D, N, T, W = 8, 4, 8, 3

SEE = module_cases.see_of(((3, 4),), T)


def reference(cell, numbers, config, w, x):
  (segments,), (positions,) = SEE.segments, SEE.positions
  x, g = (jnp.einsum('td,dnh->tnh', x, w[n]) for n in ('input', 'output_gate'))
  x = module_cases.convolved(w['taps'], x, positions)
  blocks = jnp.stack([w[f'block_{i}'] for i in range(3)])
  u = jnp.einsum('tnh,inhp->itnp', x, blocks) + w['bias'][:, None]
  h, out = jnp.zeros((numbers, N, D // N)), []
  for t in range(T):
    if segments[t] == 0:
      out.append(jnp.zeros(D))
      continue
    h = jnp.where(positions[t] == 0, 0, h)
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
  'R': (recurrent.ParaGRU, gru, 1),
  'L': (recurrent.ParaLSTM, lstm, 2),
}


def both(name, scale=1.0, **own):
  """(gradients of the module, of the loop, counts of the solver)."""
  kind, cell, numbers = CELLS[name]
  own = dict(heads=N, conv_width=W, tolerance=1e-13) | own
  config = schema.Model(
    d_model=D, num_layers=1, recurrent=mixer_schema.Recurrent(**own)
  )
  run, values = module_cases.module(kind, config, name, 0.5)
  values['recurrent'] *= scale
  x = np.random.default_rng(1).normal(size=(1, T, D))
  loop = lambda w, x: reference(cell, numbers, config, w, x[0])[None]
  found, wanted = (
    module_cases.gradients(f, values, x, SEE.segments > 0)
    for f in (lambda w, x: run(w, x, SEE)[0], loop)
  )
  tally = jax.jit(lambda w, x: run(w, x, SEE)[2].tallies['newton'])
  (counts,) = tally(values, x)
  return found, wanted, counts


@pytest.mark.parametrize('name', CELLS)
def test_output_and_every_gradient_are_those_of_the_loop(name):
  found, wanted, (solves, iterations, residual, again) = both(name)
  module_cases.assert_same(found, wanted, 1e-11)
  assert solves == 1 and 2 <= iterations <= 20
  assert residual <= 1e-13 and again == 0


@pytest.mark.parametrize('name', CELLS)
def test_what_newton_does_not_solve_is_run_in_sequence(name):
  """And is counted, so that a run can say so."""
  found, wanted, (solves, iterations, _, again) = both(name, 3.0, iterations=1)
  module_cases.assert_same(found, wanted, 1e-11)
  assert (solves, iterations, again) == (1, 1, 1)


def test_a_strict_solver_poisons_what_it_does_not_solve():
  (y, *_), *_ = both('R', bound=1e-3, strict=True)  # states are larger
  assert np.isnan(y).any()


def test_in_sequence_when_asked():
  found, wanted, counts = both('R', solver='sequential')
  module_cases.assert_same(found, wanted, 1e-11)
  assert (counts == 0).all()


def test_bad_input():
  config = schema.Model(d_model=10, recurrent=mixer_schema.Recurrent(heads=4))
  with pytest.raises(errors.UserError, match='d_model=10 is not divisible by'):
    recurrent.ParaGRU.check(config)
