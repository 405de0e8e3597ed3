"""Heads and their model learn together: the loss is a plain loop's, and reaches
the model only where it is to."""

import jax
import jax.numpy as jnp
import module_cases
import numpy as np
import pytest

from paraxis.decode.drafts import heads
from paraxis.decode.drafts import joint
from paraxis.decode.drafts import losses
from paraxis.models import batch as batch_lib
from paraxis.models import build

V, D, T, HEADS = 12, 16, 9, 2
HOW = joint.Together(steps=40, rows=4, rate=1e-2, slower=0.3, share=0.5)


@pytest.fixture(scope='module')
def made(float64):
  """(decoder, its parameters, heads, rows of random text), on its mesh."""
  generator = module_cases.generator('F')
  rng = np.random.default_rng(1)
  text = rng.integers(1, V, (8, T)).astype(np.int32)
  own = {
    n: rng.normal(0, 0.3, x.shape) for n, x in heads.initial(HEADS, D).items()
  }
  with build.use(generator.built):
    model = generator.built.model
    yield model, module_cases.parameters(model, 0.4), own, text


def _plain(model, params, own, text):
  """(text's loss, the heads' loss), token by token."""
  ones = np.ones_like(text)
  rows = batch_lib.Batch(text, None, ones, ones.cumsum(1) - 1, None, None)
  x, _ = model.features(params, rows)
  say = lambda x: np.asarray(model.logits(params, jnp.asarray(x)[None, None]))
  nll = lambda z, y: np.log(np.exp(z - z.max()).sum()) + z.max() - z[y]
  z = np.asarray(model.logits(params, x))
  of_text = [
    nll(z[n, t], text[n, t + 1]) for n in range(len(text)) for t in range(T - 1)
  ]
  of_heads, weight = [], losses.DECAY ** np.arange(HEADS)
  for n, t in np.ndindex(len(text), T - HEADS):
    each = []
    for k in range(HEADS):
      h = np.asarray(x[n, t]) @ own['weight'][k, 0] + own['bias'][k, 0]
      y = np.asarray(x[n, t]) + h / (1 + np.exp(-h))
      each.append(nll(say(y)[0, 0], z[n, t + 1 + k].argmax()))
    of_heads.append(each @ weight / weight.sum())
  return np.mean(of_text), np.mean(of_heads)


def test_the_loss_is_a_plain_loop(made):
  model, params, own, text = made
  of_text, of_heads = _plain(model, params, own, text[:3])
  for share in (0.0, 0.5):
    how = HOW._replace(share=share)
    found = joint.loss(model, how, (own, params), jnp.asarray(text[:3]))
    assert float(found) == pytest.approx(of_text + share * of_heads, rel=1e-12)


def test_without_coupling_the_model_learns_the_text_alone(made):
  """Heads learn the same either way."""
  model, params, own, text = made
  ids = jnp.asarray(text)

  def grads(**how):
    part = lambda both: joint.loss(model, HOW._replace(**how), both, ids)
    return jax.grad(part)((own, params))

  both, apart, alone = grads(), grads(coupled=False), grads(share=0.0)
  largest = lambda a, b: max(np.abs(a[p] - b[p]).max() for p in a)
  assert largest(apart[1], alone[1]) < 1e-14 < 1e-3 < largest(both[1], alone[1])
  assert largest(both[0], apart[0]) < 1e-14
  assert all(np.abs(g).max() > 0 for g in both[0].values())


def test_both_learn_and_the_model_slower(made):
  model, params, own, text = made
  said = []
  learn = lambda **how: joint.fit(
    model, params, own, text, HOW._replace(**how), 0, said.append
  )
  moved = lambda new, old: max(np.abs(new[p] - old[p]).max() for p in old)
  new, tuned = learn()
  first, last = (float(x) for x in said[0].split('loss ')[1].split(' -> '))
  assert last < first and moved(new, own) > 0
  assert 0 < moved(tuned, params) < moved(new, own)
  _, same = learn(slower=0.0)
  assert moved(same, params) == 0
