"""What drafts learn, and what is counted of them (distill.py).

Medusa weights head k by .8^k (Cai et al., arXiv:2401.10774), and so do prompt
tokens. The layers of eagle and falcon also learn the features themselves
(EAGLE, arXiv:2401.15077), and to go on from their own: a second pass, which is
ours, where the features before every token are the layer's, so keys of the text
too are made of them. In decoding those are of the model's features, and only
drafts have the layer's (EAGLE-3, arXiv:2503.01840, trains that).

Cross entropy is of the model's most likely token, not of its distribution, and
features have no noise on them (the papers of eagle and falcon: +-.1).

Legend: N, B rows, T tokens, K heads, M tokens of all rows, m prompt tokens, D
model width, V vocabulary.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax

from paraxis.decode import step
from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import prompt_tokens

DECAY = 0.8
NEAR, PASSES, DEPTH = 0.1, 2, 3  # of eagle: weight; of training; of accuracy
ROWS = ('eagle', 'falcon', 'ppd')  # trained on rows; the others on tokens


def of(model, kind, words):
  """(own, params, x, targets) of tokens, or (own, params, x, choice, tokens) of
  rows -> loss.

  Args:
    model: decoder.Decoder. kind: of heads.KINDS. words: as for distill.fit.
  """
  if kind == 'eagle':
    return _eagle_loss(model, words)
  if kind == 'falcon':
    return _falcon_loss(model, words)
  of = _ppd_loss if kind == 'ppd' else _heads_loss
  return functools.partial(of, model, words)


def hits(model, kind, words, top):
  """The same -> how often each choice of each head is right, (K, choices).

  top: (logits, targets) -> bool (.., choices).
  """
  of = dict(eagle=_eagle_hits, falcon=_falcon_hits, ppd=_ppd_hits)
  return functools.partial(of.get(kind, _hits), model, words, top)


def _nll(z, y):
  """Cross entropy of each target; 0 where there is none, y < 0."""
  found = optax.softmax_cross_entropy_with_integer_labels(z, jnp.maximum(y, 0))
  return jnp.where(y < 0, 0, found)


def _heads_loss(model, words, own, params, x_MD, y_MK):
  weight_K = DECAY ** np.arange(y_MK.shape[1])
  z = model.logits(params, heads.residual(own, x_MD[:, None]), words)
  nll = _nll(z, y_MK)
  return jnp.mean(nll @ jnp.asarray(weight_K / weight_K.sum(), nll.dtype))


def _prompted(model, words, own, params, choice_BT, tokens_BT):
  """(logits (B, T m, V) behind every token, targets (B, T, m))."""
  count = len(own[prompt_tokens.PROMPTS])
  x = prompt_tokens.features(model, params, own, tokens_BT)
  x = x.reshape(len(x), -1, x.shape[-1])
  y = prompt_tokens.targets(choice_BT, count)
  return model.logits(params, x, words), y


def _ppd_loss(model, words, own, params, x, choice_BT, tokens_BT):
  del x
  z, y = _prompted(model, words, own, params, choice_BT, tokens_BT)
  weight = DECAY ** np.arange(y.shape[2])
  nll = _nll(z, y.reshape(len(y), -1)).reshape(y.shape)
  return jnp.mean(nll @ jnp.asarray(weight / weight.sum(), nll.dtype))


def _ppd_hits(model, words, top, own, params, x, choice, tokens):
  """As `_hits`, of prompt tokens behind every token of rows."""
  del x
  z, y = _prompted(model, words, own, params, choice, tokens)
  return top(z.reshape(*y.shape, -1), y).sum((0, 1))


def _continued(layer, own, params, tokens_BT, x_BTD):
  """Features that the draft layer makes; x: those before each token."""
  lengths = jnp.full(len(x_BTD), x_BTD.shape[1], jnp.int32)
  x, _ = step.prefill(
    layer, params | own, tokens_BT, lengths, x_BTD.shape[1],
    eagle.begin(own, x_BTD),
  )  # fmt: skip
  return x


def _eagle_loss(model, words):
  """Cross entropy, and a tenth of the distance to the model's features, once
  with the model's features before each token and once with the layer's own
  before all of them."""
  layer = eagle.layer_of(model)

  def loss(own, params, x_BTD, choice_BT, tokens_BT):
    before, total = eagle.before(x_BTD), 0.0
    for _ in range(PASSES):
      found = _continued(layer, own, params, tokens_BT, before)
      z = model.logits(params, found, words)
      total += jnp.mean(_nll(z, choice_BT)) + NEAR * jnp.mean(
        optax.huber_loss(found, x_BTD)
      )
      before = eagle.before(found)
    return total / PASSES

  return loss


def _falcon_passes(model, words, own, params, x, choice, tokens):
  """(features, logits, targets) of a pass with the model's features before each
  token, then of one with the layer's own, but in blocks that were wrong.

  No glancing distillation (Falcon, arXiv:2412.12639, section 3.2), whose first
  pass only counts errors: the second one, which alone is learned, has the
  model's features, and at random places, a share of that count, the target's
  token and feature, k ahead.
  """
  layer, y = eagle.layer_of(model), falcon.shifted(choice, -1)
  before = right = eagle.before(x)
  for _ in range(PASSES):
    found = falcon.features(layer, params, own, tokens, before)
    z = model.logits(params, found, words)
    yield found, z, y
    wrong = jnp.pad(jnp.argmax(z, -1) != y, ((0, 0), (falcon.BLOCK, 0)))
    wrong = wrong[:, : y.shape[1]]
    pairs = wrong[:, : y.shape[1] // falcon.BLOCK * falcon.BLOCK]
    pairs = pairs.reshape(len(y), -1, falcon.BLOCK).any(-1)
    pairs = jnp.repeat(pairs, falcon.BLOCK, 1)
    wrong = wrong.at[:, : pairs.shape[1]].set(pairs)
    before = jnp.where(wrong[..., None], right, falcon.before(found))


def _falcon_loss(model, words):
  """As `_eagle_loss`, of features of the token k - 1 places later."""

  def loss(own, params, x, choice, tokens):
    total, far = 0.0, falcon.shifted(x)
    for found, z, y in _falcon_passes(
      model, words, own, params, x, choice, tokens
    ):
      near = optax.huber_loss(found, far)[:, : 1 - falcon.BLOCK]
      total += jnp.mean(_nll(z, y)) + NEAR * jnp.mean(near)
    return total / PASSES

  return loss


def falcon_places(length):
  """[slice of a row's places that are i-th of their block and have a target],
  i < BLOCK: a pass draws draft i + 1 there."""
  k = falcon.BLOCK
  return [slice((length + i) % k, length - k + 1, k) for i in range(k)]


def _falcon_hits(model, words, top, own, params, x, choice, tokens):
  """As `_eagle_hits`, of the drafts of each pass."""
  out, places = [], falcon_places(choice.shape[1])
  for _, z, y in _falcon_passes(model, words, own, params, x, choice, tokens):
    right = top(z, y)
    out += [right[:, at].sum((0, 1)) for at in places]
  return jnp.stack(out)


def _hits(model, words, top, own, params, x, y):
  """How often each choice of each head is the model's."""
  x = heads.residual(own, x[:, None])
  return top(model.logits(params, x, words), y).sum(0)


def _eagle_hits(model, words, top, own, params, x, choice, tokens):
  """How often each choice is the model's: of first drafts, then where the
  features before every token are the layer's, of the pass before."""
  layer, before, out = eagle.layer_of(model), eagle.before(x), []
  for _ in range(DEPTH):
    after = _continued(layer, own, params, tokens, before)
    z = model.logits(params, after, words)
    out.append(top(z, choice).sum((0, 1)))
    before = eagle.before(after)
  return jnp.stack(out)
