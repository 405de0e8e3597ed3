"""What drafts learn, and what is counted of them (distill.py).

Heads and prompt tokens learn the model's most likely token, and weight head k
by .8^k (Medusa, Cai et al., arXiv:2401.10774).

The layers of eagle and falcon learn the model's distribution, and a little its
features (EAGLE, arXiv:2401.15077, the other way round). Eagle learns every
draft of a chain from the layer's own features of the drafts before, the text
read with the model's, and weights draft j by .8^j (EAGLE-3, arXiv:2503.01840,
section 3.2, and its code, which has no loss of features). Falcon is shown some
of its targets (`shown`), and reads features with noise on them.

Legend: N, B rows, T tokens, K heads, M tokens of all rows, m prompt tokens, D
model width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from paraxis.decode.drafts import eagle
from paraxis.decode.drafts import falcon
from paraxis.decode.drafts import heads
from paraxis.decode.drafts import prompt_tokens

DECAY = 0.8
NEAR, PASSES = 0.1, 3  # of eagle: weight of features; drafts of a chain
# Of falcon: passes that are counted; what is added to features; glancing.
COUNTED, NOISE, SHOWN = 2, 0.1, (0.45, 0.1)
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


def drawn(kind, key, done):
  """What a step's loss takes beside its rows: of falcon a key and the share of
  errors that is shown, which falls; of others nothing.

  Args:
    done: the share of the steps that are done.
  """
  if kind != 'falcon':
    return ()
  first, last = SHOWN
  return key, first + (last - first) * done


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


def _eagle_loss(model, words):
  """Cross entropy with the model's distribution, and a share of the distance to
  its features, of every pass of eagle.passes."""
  layer, weight = eagle.layer_of(model), DECAY ** np.arange(PASSES)

  def loss(own, params, x_BTD, choice_BT, tokens_BT):
    p = jax.nn.softmax(model.logits(params, x_BTD, words))
    p = jnp.where(choice_BT[..., None] < 0, 0, p)
    total = 0.0
    every = eagle.passes(layer, params, own, tokens_BT, x_BTD, PASSES)
    for j, found in enumerate(every):
      z = model.logits(params, found[:, j:], words)
      nll = optax.softmax_cross_entropy(z, p[:, j:])
      near = optax.huber_loss(found[:, j:], x_BTD[:, j:])
      total += weight[j] * (jnp.mean(nll) + NEAR * jnp.mean(near))
    return total / weight.sum()

  return loss


def _falcon_passes(model, words, own, params, x, choice, tokens):
  """(features, logits, targets) of a pass with the model's features before each
  token, then of one with the layer's own, but in blocks that were wrong."""
  layer, y = eagle.layer_of(model), falcon.shifted(choice, -1)
  before = right = eagle.before(x)
  for _ in range(COUNTED):
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


def shown(key, wrong_B, share, tokens_BT, before_BTD):
  """Tokens and features before them, at random places those k further: what
  the place is to say.

  Glancing (Falcon, arXiv:2412.12639, section 3.2, and its code): of each row a
  share of the number of its errors, only first places of blocks.

  Args:
    wrong_B: errors of each row. share: of them.
  """
  k, length = falcon.BLOCK, tokens_BT.shape[1]
  place = np.arange(length)
  first = ((length - 1 - place) % k == k - 1) & (place + k < length)
  u = jax.random.uniform(key, tokens_BT.shape)
  rank = jnp.argsort(jnp.argsort(jnp.where(first, u, 2.0), -1), -1)
  here = first & (rank < jnp.floor(share * wrong_B)[:, None])
  ahead = lambda z: jnp.roll(z, -k, 1)
  return (
    jnp.where(here, ahead(tokens_BT), tokens_BT),
    jnp.where(here[..., None], ahead(before_BTD), before_BTD),
  )


def _falcon_loss(model, words):
  """As `_eagle_loss`, of features of the token k - 1 places later, in a second
  pass, of which some targets are shown (`shown`): the more, the more a first
  one had wrong. The first one is not learned."""
  layer, k = eagle.layer_of(model), falcon.BLOCK

  def loss(own, params, x, choice, tokens, key, share):
    y, noise, places = falcon.shifted(choice, -1), *jax.random.split(key)
    before = eagle.before(x)
    before += jax.random.uniform(noise, x.shape, x.dtype, -NOISE, NOISE)
    features = lambda *given: falcon.features(layer, params, own, *given)
    z = model.logits(params, features(tokens, before), words)
    wrong = ((jnp.argmax(z, -1) != y) & (y >= 0)).sum(-1)
    found = features(*shown(places, wrong, share, tokens, before))
    z = model.logits(params, found, words)[:, : 1 - k]
    p = jax.nn.softmax(model.logits(params, x[:, k - 1 :], words))
    p = jnp.where(y[:, : 1 - k, None] < 0, 0, p)
    nll = jnp.mean(optax.softmax_cross_entropy(z, p))
    near = optax.huber_loss(found[:, : 1 - k], x[:, k - 1 :])
    return nll + NEAR * jnp.mean(near)

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
  """How often each choice is the model's: of first drafts, of second ones, ..,
  where the drafts before are right."""
  layer = eagle.layer_of(model)
  every = eagle.passes(layer, params, own, tokens, x, PASSES)
  return jnp.stack(
    [
      top(model.logits(params, found[:, j:], words), choice[:, j:]).sum((0, 1))
      for j, found in enumerate(every)
    ]
  )
