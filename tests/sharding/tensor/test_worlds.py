"""How worlds multiply on a GPU, tried on a CPU that says it is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.pallas_kernels import registry
from paraxis.sharding.tensor import worlds

SIZES = dict(D=8, F=24, N=8, H=2, P=2, V=40)
GPU = registry.Target('gpu', 'NVIDIA H200')


@pytest.mark.parametrize(
  'equation, rows, dtype, twice',
  [
    ('BTNP,NPD->BTD', (1, 1), 'bfloat16', True),
    ('BTD,DNH->BTNH', (1, 1), 'float16', True),
    ('BTD,VD->BTV', (1, 2), 'bfloat16', False),  # two rows already
    ('BTD,VD->BTV', (2, 1), 'bfloat16', False),
    ('BTD,DF->BTF', (1, 1), 'float32', False),  # which is not rounded
  ],
)
def test_a_gpu_multiplies_one_vector_as_two_rows(
  monkeypatch, equation, rows, dtype, twice
):
  sizes = SIZES | dict(zip('BT', rows, strict=True))
  shapes = [
    [sizes[letter] for letter in part]
    for part in equation.split('->')[0].split(',')
  ]
  rng = np.random.default_rng(0)
  x, w = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
  run = lambda x, w: worlds.local(equation, x, w, jnp.dtype(dtype))
  expected = run(x, w)
  monkeypatch.setattr(registry, 'current_target', lambda: GPU)
  found = run(x, w)
  assert found.shape == expected.shape and found.dtype == dtype
  exact = np.einsum(equation, *(np.asarray(y, 'f8') for y in (x, w)))
  np.testing.assert_allclose(np.asarray(found, 'f8'), exact, atol=0.05)
  (dot,) = (
    eqn for eqn in jax.make_jaxpr(run)(x, w).eqns
    if eqn.primitive.name == 'dot_general'
  )  # fmt: skip
  sides = {tuple(v.aval.shape) for v in dot.invars}
  assert ((2 * rows[0], *shapes[0][1:]) in sides) == twice
