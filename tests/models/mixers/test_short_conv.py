"""Gated short convolutions against a loop over tokens and taps."""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.configs.base import mixers as mixer_schema
from paraxis.models.mixers import short_conv

pytestmark = pytest.mark.usefixtures('float64')

B, T, D, W = 3, 9, 6, 4
CONFIG = schema.Model(
  d_model=D, num_heads=2, dtype='float64', param_dtype='float64',
  short_conv=mixer_schema.ShortConv(width=W),
)  # fmt: skip
SEE = module_cases.see_of(((4, 1, 3), (9,), (2, 5)), T)
X = np.random.default_rng(1).normal(size=(B, T, D))


def loop(w, x):
  """y_BTD: every token reads the W last ones of its document."""
  b, c, v = (x @ w[name] for name in ('gate', 'output_gate', 'value'))
  rows = []
  for row in range(B):
    for t in range(T):
      seen = range(min(W, int(SEE.positions[row, t]) + 1))
      y = sum(w['conv'][i] * (b * v)[row, t - i] for i in seen)
      rows.append((c[row, t] * y) @ w['output'])
  return jnp.stack(rows).reshape(x.shape)


def test_equals_a_loop_over_tokens():
  run, values = module_cases.module(short_conv.ShortConv, CONFIG, 'V', 0.5)
  module_cases.assert_equal(
    lambda w, x: run(w, x, SEE)[0], loop, values, X, SEE.segments > 0
  )


def test_a_gate_that_is_left_out_is_seen():
  run, values = module_cases.module(short_conv.ShortConv, CONFIG, 'V', 0.5)
  found = jax.jit(run)(values, X, SEE)[0]
  ones = values | {'output_gate': jnp.zeros((D, D))}
  assert not module_cases.close(run(ones, X, SEE)[0], found, 1e-3)
