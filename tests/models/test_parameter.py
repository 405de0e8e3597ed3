"""Declarations carry axes, kind, contracted inputs and a scale."""

from flax import nnx
import numpy as np

from paraxis.models import parameter


def test_scales():
  rngs, axes = nnx.Rngs(0), ('embed', 'mlp', None)
  std = lambda **options: float(
    parameter.matrix(rngs, (50, 4, 90), axes, **options)[...].std()
  )
  np.testing.assert_allclose(std(), 50**-0.5, rtol=0.05)
  np.testing.assert_allclose(std(inputs=2), 200**-0.5, rtol=0.05)
  np.testing.assert_allclose(std(std=0.3, gain=0.5), 0.15, rtol=0.05)
  assert np.all(parameter.vector((3,), axes, 2.0)[...] == 2)


def test_what_the_optimizer_reads():
  """Muon takes kind 'matrix' alone, and multiplies `inputs` axes as one."""
  rngs, axes = nnx.Rngs(0), ('heads', 'head_dim', 'embed')
  w = parameter.matrix(rngs, (2, 3, 5), axes, inputs=2)
  e = parameter.embedding(rngs, (7, 5), ('vocab', 'embed'), 0.02)
  b = parameter.vector((5,), ('norm',), 1.0)
  assert parameter.metadata(w) == (axes, 'matrix', 2)
  assert parameter.metadata(e) == (('vocab', 'embed'), 'embedding', 1)
  assert parameter.metadata(b) == (('norm',), 'vector', 0)
