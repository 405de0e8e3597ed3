"""Declarations carry axes, kind, contracted inputs and a scale; products of
weights that are no matrices round once."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import peers

from paraxis.configs import schema
from paraxis.models import decoder
from paraxis.models import parameter
from paraxis.models import trained


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


def test_a_factor_is_not_rounded():
  x = jnp.linspace(1, 2, 128, dtype=jnp.bfloat16)
  wanted = (x.astype(jnp.float32) * 0.22).astype(jnp.bfloat16)
  found = parameter.scaled(x, 0.22)
  assert found.dtype == x.dtype
  np.testing.assert_array_equal(found, wanted)
  assert (x * jnp.asarray(0.22, x.dtype) != wanted).any()


def test_factors_of_a_model_are_not_rounded(monkeypatch):
  """Of residuals, logits, adapters, experts, gates and queries."""
  seen, right = set(), parameter.scaled
  watch = lambda x, factor: seen.add(factor) or right(x, factor)
  monkeypatch.setattr(parameter, 'scaled', watch)
  experts = dict(count=2, top_k=1, d_ff=8, shared=1, shared_scale=0.7)
  model = decoder.Decoder(
    schema.view(
      dict(
        model=dict(
          vocab_size=16, d_model=8, num_layers=2, num_heads=2, d_ff=8,
          pattern='GF', mlp='clamped', mlp_slope=1.702, residual_scale=0.22,
          logit_scale=1 / 9, experts=experts, dtype='bfloat16',
        )
      )
    ).model,
    trained=trained.Trained(rank=3, alpha=1.0),
  )  # fmt: skip

  def run(key):
    params, data = model.init(key), peers.rows(16, (1, 4))
    return model.logits(params, model.features(params, data)[0])

  assert jax.eval_shape(run, jax.random.key(0)).dtype == jnp.float32
  assert seen == {0.22, 1 / 9, 1 / 3, 0.7, 1.702, 2**-0.5}


def test_a_weight_of_whole_vectors_has_a_wide_gradient():
  """And of bfloat16 arrays nothing wider is kept for it."""
  rng = np.random.default_rng(1)
  arrays = [jnp.asarray(rng.normal(size=(4, 4096)) + 1, 'bfloat16')] * 2
  weights = [jnp.asarray(rng.normal(size=(4, 1)), 'float32') for _ in arrays]
  y, back = jax.vjp(parameter.weighed, weights, arrays)
  kept = [x.dtype for x in jax.tree.leaves(back) if x.shape == y.shape]
  assert y.dtype == jnp.bfloat16 and set(kept) == {y.dtype}
  exact = sum(np.float64(w) * x for w, x in zip(weights, arrays, strict=True))
  np.testing.assert_array_equal(y, np.float32(exact).astype(y.dtype))
  dw, dx = back(jnp.ones_like(y))
  for a, x in zip(dw, arrays, strict=True):
    np.testing.assert_allclose(a, np.float64(x).sum(1, keepdims=True), 1e-5)
  assert all(x.dtype == jnp.bfloat16 for x in dx)
