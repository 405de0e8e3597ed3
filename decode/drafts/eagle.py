"""EAGLE: one layer that continues the model's features, and drafts from them.

    f'_t = layer(W [embedding of token t; f_(t-1)])

f are the features that drew the tokens (after the final norm), f' what the
draft layer makes of them; the model's own embedding and head, frozen, belong to
both (Li et al., EAGLE, arXiv:2401.15077). Among the tokens of the
text f is the model's; for drafts f' stands for it. A call first reads the
tokens of the call before with the model's features, which are there now, then
drafts a chain; what it kept of its own drafts is forgotten.

Its parameters: 'mix' (2 D, D), and those of one layer, by the names of layer 0.

Legend: B rows, T prompt tokens, C drafts, S slots, D model width.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import recurrence
from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.decode.drafts import heads
from paraxis.models import decoder
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate

MIX = 'mix'
LAYER = 'layers/0/'
WIDE = ('batch', None, None)


class Pending(NamedTuple):
  """cache: of the draft layer, all tokens of the text but these. tokens: (B,
  C + 1) int32, x: (B, C + 1, D) the features that drew them. n: (B,) int32."""

  cache: Any
  tokens: Any
  x: Any
  n: Any


def layer_of(model):
  """decoder.Decoder of the draft layer: of the kind of the model's last one."""
  own, kind = model.config, model.pattern[-1]
  # layer.kinds_of: E or P experts behind the mixer, . nothing, or an mlp.
  given = dict(pattern=kind[1]) if kind[1:] in ('E', 'P') else dict(count=0)
  small = dataclasses.replace(
    own,
    num_layers=1,
    groups=min(own.groups, 1),
    pattern=kind[0],
    mlp='none' if kind[1:] == '.' else own.mlp,
    experts=dataclasses.replace(own.experts, **given),
    recurrence=recurrence.Recurrence(),
  )
  return decoder.Decoder(small, layout=model.layout)


def initial(model, params):
  """{name: array}: the model's last layer, and what passes features on."""
  width, last = model.config.d_model, f'layers/{len(model.pattern) - 1}/'
  own = {
    LAYER + p.removeprefix(last): x
    for p, x in params.items()
    if p.startswith(last)
  }
  eye = jnp.eye(width, dtype=jnp.float32)
  return own | {MIX: jnp.concatenate([0 * eye, eye])}


def begin(own, x_BTD):
  """What embedded tokens go through; x_BTD: features that drew them."""

  def mixed(e_BTD):
    both = jnp.concatenate([e_BTD, x_BTD.astype(e_BTD.dtype)], -1)
    return jnp.einsum('btd,de->bte', both, own[MIX].astype(e_BTD.dtype))

  return mixed


def before(x_BTD):
  """Features that drew each token of a row; the first had none."""
  return jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))


def branches(tokens_BT, depth):
  """Rows of text, and behind every token a chain of the next ones as drafts.

  Place t of pass j > 0 is draft j behind token t - j: it sees the text up to
  that token, of pass 0, and the drafts between, of passes 1 .. j - 1.

  Returns:
    (packed.Packed (B, depth T), its form): pass 0, which is the text, then each
    of the others; places t < j of pass j are padding.
  """
  rows, length = tokens_BT.shape
  draft, place = np.divmod(np.arange(depth * length), length)
  root = place - draft
  every = lambda x: jnp.broadcast_to(
    jnp.asarray(x, jnp.int32), (rows, depth * length)
  )
  row = jnp.arange(rows, dtype=jnp.int32)[:, None]
  zeros = every(0 * place)
  packed = packed_lib.Packed(
    jnp.concatenate([tokens_BT] * depth, 1),
    jnp.where(every(root) < 0, rows, row),
    every(place),
    every(np.maximum(root, 0) * depth + draft),  # of one root, by drafts
    every(np.where(draft > 0, 1 + np.maximum(root, 0), 0)),
    zeros,
    jnp.ones_like(zeros, jnp.uint32),
  )
  form = (packed_lib.Group(rows, depth * length, fresh=True, tree=True),)
  return packed, form


def passes(layer, params, own, tokens_BT, x_BTD, depth):
  """Features (B, T, D) of each pass: of the first draft behind every token, of
  the second one, .., if all drafts are right.

  They are those of a call: the text is read with the model's features, x_BTD,
  and each draft with what the layer made of the one before (EAGLE-3,
  arXiv:2503.01840, section 3.2: training-time test).

  Args:
    layer: of `layer_of`. depth: how many passes.
  """
  given = [before(x_BTD)]
  for drafts in range(1, depth + 1):
    packed, form = branches(tokens_BT, drafts)
    cache = layer.init_cache(*tokens_BT.shape)
    x, _ = layer.step(
      params | own, cache, packed, form,
      begin(own, jnp.concatenate(given, 1)),
    )  # fmt: skip
    x = x[:, -tokens_BT.shape[1] :]
    yield x
    given.append(before(x))


def waiting(x_BCD, seen):
  """The features that drew the tokens of the last call, as
  proposal.waiting has those."""
  new = seen.tokens.shape[1]
  drew = jnp.stack([judges.at(seen.x, seen.at[:, c]) for c in range(new)], 1)
  pad = x_BCD.shape[1] - new
  x = annotate.put(jnp.pad(drew, ((0, 0), (0, pad), (0, 0))), WIDE)
  moved = (seen.n > 0)[:, None, None]
  return jnp.where(moved, x.astype(x_BCD.dtype), x_BCD)


class Eagle(proposal.Method):
  """own: Pending."""

  def __init__(self, model, width, coupled):
    self.tree, self._layer = trees.chain(width), layer_of(model)
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    layer, own = self._params(params)
    x = annotate.put(before(x_BTD), WIDE)
    _, cache = step.prefill(
      self._layer, layer, tokens_BT, lengths_B, slots, begin(own, x)
    )
    width = self.tree.width + 1
    none = jnp.concatenate([jnp.zeros_like(tokens_BT[:, :1])] * width, 1)
    x = jnp.concatenate([jnp.zeros_like(x[:, :1])] * width, 1)
    return Pending(cache, none, x, jnp.zeros_like(lengths_B))

  def _params(self, params):
    return params.model | params.own, params.own

  def first(self, own, seen):
    return self._settled(own, own.cache, seen)

  def propose(self, params, own, token_B, live_B, draws):
    del token_B
    layer, mix = self._params(params)
    form = step.drafted(len(live_B), trees.chain(own.tokens.shape[1] - 1))
    packed = step.rows(
      own.tokens, jnp.where(live_B, own.n, 0), own.cache.length
    )
    x, flight = self._layer.step(
      layer, own.cache, packed, form, begin(mix, own.x)
    )
    sound = jnp.isfinite(x).all(-1) & (packed.request < len(live_B))
    kept = self._layer.commit(own.cache, flight, form, sound)
    last = judges.at(annotate.put(x, WIDE), jnp.maximum(own.n - 1, 0))
    form = (packed_lib.Group(len(live_B), 1),)

    def draw(last, c):
      z = heads.logits(self._layer, layer, mix, last[:, None])[:, 0]
      z = annotate.put(z, sampling.ROWS)
      drawn, _ = sampling.sample(
        z, draws.form, draws.values, *draws.at(c), purpose=self._purpose
      )
      return drawn, z

    def one(carry, c):
      cache, last = carry
      drawn, z = draw(last, c)
      packed = step.rows(drawn[:, None], live_B.astype(jnp.int32), cache.length)
      x, flight = self._layer.step(
        layer, cache, packed, form, begin(mix, last[:, None])
      )
      sound = jnp.isfinite(x).all(-1)
      cache = self._layer.commit(cache, flight, form, sound)
      return (cache, annotate.put(x, WIDE)[:, 0]), (drawn, z)

    order = jnp.arange(self.tree.width, dtype=jnp.uint32)
    (cache, _), (tokens, z) = jax.lax.scan(one, (kept, last), order)
    tokens, z = jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(z, 0, 1)
    valid = jnp.ones_like(tokens, bool)
    return judges.Drafts(tokens, valid, z), (own, cache, kept.length)

  def settle(self, held, seen):
    own, cache, length = held
    moved = seen.n > 0
    length = jnp.where(moved, length, own.cache.length)
    cache = cache_lib.rollback(self._layer, cache, length)
    return self._settled(own, cache, seen)

  def _settled(self, own, cache, seen):
    """The new tokens wait for the next call, with what drew them."""
    tokens, n = proposal.waiting(own.tokens, own.n, seen)
    return Pending(cache, tokens, waiting(own.x, seen), n)
