"""The loss against plain numpy: weights, denominator.

And its two forms against each other, on the head of a decoder. Of a sharded
vocabulary: certify/test_invariance.py, tests/sharding/tensor/test_project.py.
"""

import functools

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest
import support

from paraxis.configs import schema
from paraxis.models import aux
from paraxis.models import batch as batch_lib
from paraxis.models import decoder
from paraxis.pallas_kernels.matmul import cross_entropy
from paraxis.sharding import annotate
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding import rules as rules_lib
from paraxis.train import loss as loss_lib

B, T, D, V = 4, 6, 8, 16
ALL = schema.Model(vocab_size=V, loss='logits')


def _logits(seed=0):
  return np.random.default_rng(seed).normal(size=(B, T, V)) * 3


def _batch(seed=0):
  """Half of a step: the denominator is of the whole step."""
  rng = np.random.default_rng(seed)
  weights = rng.integers(0, 2, (B, T)).astype(np.float32)
  ids = rng.integers(0, V, (2, B, T)).astype(np.int32)
  return batch_lib.Batch(
    ids[0], ids[1], None, None, weights, np.float32(2 * weights.sum())
  )


def _plain(z_BTV, batch):
  """Nats and their gradient, token by token."""
  nll, gradient = np.zeros((B, T)), np.zeros((B, T, V))
  for b in range(B):
    for t in range(T):
      z = z_BTV[b, t]
      p = np.exp(z - z.max())
      p /= p.sum()
      target = batch.targets[b, t]
      nll[b, t] = -np.log(p[target])
      p[target] -= 1
      gradient[b, t] = p * batch.weights[b, t] / batch.denominator
  return nll, gradient


class _Table:
  """A model whose logits are its parameter."""

  config = ALL

  def __call__(self, params, batch):
    return params, None

  def features(self, params, batch):
    return params, aux.NOTHING

  def logits(self, params, x):
    return x


def test_equals_numpy():
  z, batch = _logits(), _batch()
  nll, gradient = _plain(z, batch)
  with jax.enable_x64(True):
    params = jnp.asarray(z)
    got = loss_lib.negative_log_likelihood(params, batch.targets)
    np.testing.assert_allclose(got, nll, atol=1e-13)
    total = loss_lib.total(_Table(), params, batch)
    np.testing.assert_allclose(total, (nll * batch.weights).sum(), atol=1e-12)
    value, grad = jax.value_and_grad(
      lambda p: loss_lib.next_token(_Table(), p, batch)
    )(params)
    value, grad = np.asarray(value), np.asarray(grad)
    total = np.asarray(total)
  np.testing.assert_allclose(value, total / batch.denominator, atol=1e-13)
  np.testing.assert_allclose(grad, gradient, atol=1e-14)
  assert not np.any(grad[batch.weights == 0])


WORDS = 300  # three chunks: 128, 128 and 44
ENDS = ('embedding', 'head', 'norm/')


def _of_head(form, **model):
  """(value and gradient of the loss of features, params, x, a batch)."""
  fields = dict(vocab_size=WORDS, d_model=D, num_layers=1, d_ff=8, num_heads=2)
  made = decoder.Decoder(schema.Model(loss=form, **fields | model))
  rng = np.random.default_rng(2)
  dtype = made.config.param_dtype
  params = {
    p: rng.normal(1, 0.5, leaf.shape).astype(dtype)
    for p, leaf in jax.eval_shape(made.init, jax.random.key(0)).items()
    if p.startswith(ENDS)
  }
  x = jnp.asarray(rng.normal(size=(B, T, D)), made.config.dtype)
  batch = _batch()
  batch = batch._replace(targets=rng.integers(0, WORDS, (B, T)))
  loss = lambda params, x: loss_lib.of_layers(made, params, x, batch)
  return jax.value_and_grad(loss, (0, 1)), params, x


@pytest.mark.parametrize(
  'model, tolerance',
  [
    (dict(dtype='float64', param_dtype='float64', logit_softcap=2.0), 1e-12),
    (dict(dtype='float64', param_dtype='float64', tied_embedding=False), 1e-12),
    (dict(dtype='bfloat16'), 2e-2),
  ],
)
def test_both_forms_are_equal(monkeypatch, model, tolerance):
  monkeypatch.setattr(cross_entropy, 'LOGITS', 1)
  with jax.enable_x64(True):
    found = []
    for form in ('logits', 'chunked'):
      run, params, x = _of_head(form, **model)
      found.append(jax.tree.leaves(jax.jit(run)(params, x)))
      if form == 'chunked':
        other = jax.tree.leaves(jax.jit(run)(params, -x))
  for a, b in zip(*found, strict=True):
    assert a.dtype == b.dtype
    support.close(b, a, tolerance)
  gap = np.abs(np.asarray(other[-1] - found[0][-1], 'f8')).max()
  largest = np.abs(np.asarray(found[0][-1], 'f8')).max()
  assert gap > 5 * tolerance * largest  # of other features


def _largest(jaxpr):
  """Numbers in the largest array that a program makes."""
  sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
  inside = [_largest(j) for e in jaxpr.eqns
            for j in core.jaxprs_in_params(e.params)]  # fmt: skip
  return max(sizes + inside, default=0)


def test_logits_are_never_whole(monkeypatch):
  monkeypatch.setattr(cross_entropy, 'LOGITS', 1)
  largest = {}
  for form in ('logits', 'chunked', 'auto'):
    run, params, x = _of_head(form)
    largest[form] = _largest(jax.make_jaxpr(run)(params, x).jaxpr)
  assert largest['logits'] == B * T * WORDS
  assert largest['chunked'] == largest['auto'] == B * T * 128


def test_auto_is_chunked_where_that_saves_memory():
  wide = schema.Model(vocab_size=2**12, d_model=2**10)
  choose = functools.partial(loss_lib.form, wide)
  assert choose((4, 2**10)) == (
    'logits',
    '4,096 tokens x 4,096 words on a device are no more than 2**24 logits; '
    'words are at least 4 x model.d_model=1,024',
  )
  assert choose((5, 2**10))[0] == 'chunked'
  # Sums of T D numbers would replace the logits, and D is not small.
  wider = schema.Model(vocab_size=2**12, d_model=2**10 + 4)
  assert loss_lib.form(wider, (5, 2**10))[0] == 'logits'
  wide = schema.Model(vocab_size=2**12, d_model=2**6)
  choose = functools.partial(loss_lib.form, wide)
  with (
    annotate.use(rules_lib.preset('fsdp_tensor')),
    jax.set_mesh(mesh_lib.make('fsdp=2,tensor=4')),
  ):
    assert choose((32, 2**10))[0] == 'logits'
    form, why = choose((34, 2**10))
    assert form == 'chunked' and '17,408 tokens x 1,024 words' in why
  asked = schema.Model(loss='chunked')
  assert loss_lib.form(asked, (1, 1))[0] == 'chunked'
