"""Declarations carry axes, kind, contracted inputs and a scale."""

from flax import nnx
import numpy as np

from paraxis.models import parameter


def test_metadata_travels_through_split_and_merge():
  class Both(nnx.Module):
    def __init__(self, rngs):
      axes = ('heads', 'head_dim', 'embed')
      self.w = parameter.matrix(rngs, (2, 3, 5), axes, inputs=2)
      self.b = parameter.vector((5,), ('norm',), 1.0)
      self.e = parameter.embedding(rngs, (7, 5), ('vocab', 'embed'), 0.02)

  graph, state = nnx.split(nnx.eval_shape(lambda: Both(nnx.Rngs(0))))
  merged = nnx.merge(graph, state)
  assert parameter.metadata(merged.w) == (
    ('heads', 'head_dim', 'embed'),
    'matrix',
    2,
  )
  assert parameter.metadata(merged.b) == (('norm',), 'vector', 0)
  assert parameter.metadata(merged.e) == (('vocab', 'embed'), 'embedding', 1)


def test_scales():
  rngs, axes = nnx.Rngs(0), ('embed', 'mlp', None)
  std = lambda **options: float(
    parameter.matrix(rngs, (50, 4, 90), axes, **options)[...].std()
  )
  np.testing.assert_allclose(std(), 50**-0.5, rtol=0.05)
  np.testing.assert_allclose(std(inputs=2), 200**-0.5, rtol=0.05)
  np.testing.assert_allclose(std(std=0.3, gain=0.5), 0.15, rtol=0.05)
  assert np.all(parameter.vector((3,), axes, 2.0)[...] == 2)
