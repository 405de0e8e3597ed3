"""Methods with a draft model: the first layers of the model, with its head.

    Speculative   drafts one token after the other, then the model judges all
                  (Leviathan et al., arXiv:2211.17192)
    Pearl         drafts while the model judges: the drafts of the call before,
                  continued as if all of them were kept (PEARL,
                  arXiv:2408.11850: pre-verify and post-verify)

Legend: B rows, T prompt tokens, C drafts, S slots, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.models import decoder
from paraxis.sharding import annotate


def first_layers(model, layers):
  """decoder.Decoder of the first layers of one; 0: all of it."""
  if not layers:
    return model
  small = dataclasses.replace(model.config, num_layers=layers)
  return decoder.Decoder(small, layout=model.layout)


class Draft(NamedTuple):
  """A model that drafts. model: decoder.Decoder. residual: (params.own, x) ->
  x, what it was trained to add before the head, or None."""

  model: Any
  residual: Any = None

  def drawn(self, params, cache, token_B, live_B, draws, index, purpose):
    """Feeds tokens -> (next tokens, their logits (B, V), cache)."""
    z, cache = step.advance(
      self.model, params.model, cache, token_B, live_B, self._through(params)
    )
    z = annotate.put(z, sampling.ROWS)
    drawn, _ = sampling.sample(
      z, draws.form, draws.values, *draws.at(index), purpose=purpose
    )
    return drawn, z, cache

  def _through(self, params):
    return self.residual and functools.partial(self.residual, params.own)

  def read(self, params, tokens_BT, lengths_B, slots):
    """Its packed.Cache of the prompts."""
    given = params.model, tokens_BT, lengths_B, slots
    return step.prefill(self.model, *given)[1]


class Speculative:
  """own: the draft model's packed.Cache, as long as the target's."""

  def __init__(self, draft, width, coupled):
    """coupled: it draws by the noise of the target's tokens."""
    self.tree, self._draft = trees.chain(width), draft
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del x_BTD
    return self._draft.read(params, tokens_BT, lengths_B, slots)

  def first(self, own, seen):
    del seen
    return own

  def propose(self, params, own, token_B, live_B, draws):
    """The last draft is fed, too: all of them may be kept."""
    states = functools.partial(cache_lib.recurrent, self._draft.model)

    def one(carry, c):
      cache, token = carry
      token, z, cache = self._draft.drawn(
        params, cache, token, live_B, draws, c, self._purpose
      )
      return (cache, token), (token, z, states(cache))

    order = jnp.arange(self.tree.width + 1, dtype=jnp.uint32)
    (cache, _), (tokens, z, kept) = jax.lax.scan(one, (own, token_B), order)
    tokens = jnp.moveaxis(tokens, 0, 1)[:, :-1]
    z = jnp.moveaxis(z, 0, 1)[:, :-1]
    valid = jnp.ones_like(tokens, bool)
    return judges.Drafts(tokens, valid, z), (own, cache, kept)

  def settle(self, held, seen):
    before, cache, kept = held
    return cache_lib.after(self._draft.model, before, cache, kept, seen.n)


class Ahead(NamedTuple):
  """cache: the draft model's. drafts: (B, C) int32, to be judged. there: (B,)
  bool, whether they are; else the draft model goes on from the last token."""

  cache: Any
  drafts: Any
  there: Any


class Pearl:
  """own: Ahead. A call judges the C drafts of the call before, if they begin
  with what it drew, while C + 1 more are drafted behind them."""

  def __init__(self, draft, width):
    self.tree, self._draft = trees.chain(width), draft

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del x_BTD
    cache = self._draft.read(params, tokens_BT, lengths_B, slots)
    drafts = jnp.zeros_like(tokens_BT[:, :1])
    drafts = jnp.concatenate([drafts] * self.tree.width, 1)
    return Ahead(cache, drafts, lengths_B < 0)

  def first(self, own, seen):
    del seen
    return own

  def propose(self, params, own, token_B, live_B, draws):
    width = self.tree.width
    pending = jnp.where(own.there, width, 0)
    token = jnp.where(own.there, own.drafts[:, -1], token_B)

    def one(carry, c):
      cache, token = carry
      index = c + pending.astype(jnp.uint32)
      token, _, cache = self._draft.drawn(
        params, cache, token, live_B, draws, index, 0
      )
      return (cache, token), token

    order = jnp.arange(width + 1, dtype=jnp.uint32)
    (cache, _), more = jax.lax.scan(one, (own.cache, token), order)
    valid = own.there[:, None] & jnp.ones_like(own.drafts, bool)
    held = own, cache, jnp.moveaxis(more, 0, 1)
    return judges.Drafts(own.drafts, valid), held

  def settle(self, held, seen):
    """Goes on where all drafts are kept and the token after them is the first
    of those that were drafted meanwhile; else forgets these."""
    own, cache, more = held
    width = self.tree.width
    pending = jnp.where(own.there, width, 0)
    same = judges.at(seen.tokens, pending) == more[:, 0]
    there = (seen.n == pending + 1) & same
    moved = seen.n > 0
    was = own.cache.length - pending  # tokens of the text before this call
    length = was + seen.n + jnp.where(there, width, 0)
    length = jnp.where(moved, length, own.cache.length)
    return Ahead(
      cache_lib.rollback(self._draft.model, cache, length),
      jnp.where(moved[:, None], more[:, 1:], own.drafts),
      jnp.where(moved, there, own.there),
    )
