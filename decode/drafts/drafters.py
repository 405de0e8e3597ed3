"""Methods with a draft model: the first layers of the model, with its head.

    Speculative   drafts one token after the other, then the model judges all
                  (Leviathan et al., arXiv:2211.17192)
    Pearl         drafts while the model judges: the drafts of the call before,
                  continued as if all of them were kept (PEARL,
                  arXiv:2408.11850: pre-verify and post-verify)
    EasySpec      the mixers of several layers read the same features, so that
                  devices may share them; what such drafts leave in the cache is
                  replaced by the exact keys of the kept tokens (EasySpec,
                  arXiv:2502.02493: fuzzy approximation, bonus calibration)

Legend: B rows, T prompt tokens, C drafts, S slots, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.decode import cache as cache_lib
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import step
from paraxis.decode import trees
from paraxis.models import decoder
from paraxis.sharding import annotate


def first_layers(model, layers):
  """decoder.Decoder of the first layers of one, whole groups; 0: all of it."""
  if not layers:
    return model
  own = model.config
  groups = own.groups and layers // own.group_layers
  small = dataclasses.replace(own, num_layers=layers, groups=groups)
  return decoder.Decoder(small, layout=model.layout)


class Draft(NamedTuple):
  """A model that drafts. model: decoder.Decoder. say: (proposal.Params, (B, 1,
  D) features) -> logits, as it was trained to; None: those of the model."""

  model: Any
  say: Any = None

  def drawn(self, params, cache, token_B, live_B, draws, index, purpose):
    """Feeds tokens -> (next tokens, their logits (B, V), cache)."""
    z, cache = self.fed(params, cache, token_B, live_B)
    return draw(z, draws, index, purpose), z, cache

  def fed(self, params, cache, token_B, live_B, together=1):
    """(logits (B, V) after tokens, cache); together: as for Decoder.step."""
    say = self.say and functools.partial(self.say, params)
    z, cache = step.advance(
      self.model, params.model, cache, token_B, live_B, say, together
    )
    return annotate.put(z, sampling.ROWS), cache

  def logits(self, params, x_BTD):
    if self.say:
      return self.say(params, x_BTD)
    return self.model.logits(params.model, x_BTD)

  def read(self, params, tokens_BT, lengths_B, slots):
    """Its packed.Cache of the prompts."""
    given = params.model, tokens_BT, lengths_B, slots
    return step.prefill(self.model, *given)[1]


def draw(z_BV, draws, index, purpose):
  """(B,) int32: drafts, of the logits of the token `index` of the call."""
  given = draws.form, draws.values, *draws.at(index)
  return sampling.sample(z_BV, *given, purpose=purpose)[0]


class Speculative(proposal.Method):
  """own: the draft model's packed.Cache, as long as the target's."""

  def __init__(self, draft, width, coupled):
    """coupled: it draws by the noise of the target's tokens."""
    self.tree, self._draft = trees.chain(width), draft
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del x_BTD
    return self._draft.read(params, tokens_BT, lengths_B, slots)

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


class Pearl(proposal.Method):
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


class Unread(NamedTuple):
  """cache: the draft model's, all tokens of the text but these, exact. tokens:
  (B, C + 1) int32. n: (B,) int32."""

  cache: Any
  tokens: Any
  n: Any


class EasySpec(proposal.Method):
  """own: Unread. A call reads the tokens of the call before exactly, all at
  once, and draws the first draft from them."""

  def __init__(self, draft, width, together, coupled):
    """together: layers whose mixers read the same features."""
    self.tree, self._draft, self._together = trees.chain(width), draft, together
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del x_BTD
    cache = self._draft.read(params, tokens_BT, lengths_B, slots)
    tokens = jnp.zeros_like(tokens_BT[:, :1])
    tokens = jnp.concatenate([tokens] * (self.tree.width + 1), 1)
    return Unread(cache, tokens, jnp.zeros_like(lengths_B))

  def first(self, own, seen):
    return Unread(own.cache, *proposal.waiting(own.tokens, own.n, seen))

  def propose(self, params, own, token_B, live_B, draws):
    del token_B
    model = self._draft.model
    form = step.drafted(len(live_B), self.tree)
    n = jnp.where(live_B, own.n, 0)
    packed = step.rows(own.tokens, n, own.cache.length)
    x, flight = model.step(params.model, own.cache, packed, form)
    sound = jnp.isfinite(x).all(-1) & (packed.request < len(live_B))
    exact = model.commit(own.cache, flight, form, sound)
    x = annotate.put(x, ('batch', None, None))
    last = judges.at(x, jnp.maximum(own.n - 1, 0))
    z = self._draft.logits(params, last[:, None])[:, 0]

    def one(carry, c):
      cache, z = carry
      token = draw(z, draws, c, self._purpose)
      after, cache = self._draft.fed(
        params, cache, token, live_B, self._together
      )
      return (cache, after), (token, z)

    order = jnp.arange(self.tree.width, dtype=jnp.uint32)
    first = exact, annotate.put(z, sampling.ROWS)
    (cache, _), (tokens, z) = jax.lax.scan(one, first, order)
    tokens, z = jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(z, 0, 1)
    drafts = judges.Drafts(tokens, jnp.ones_like(tokens, bool), z)
    return drafts, (own, cache, exact.length)

  def settle(self, held, seen):
    own, cache, length = held
    length = jnp.where(seen.n > 0, length, own.cache.length)
    cache = cache_lib.rollback(self._draft.model, cache, length)
    return Unread(cache, *proposal.waiting(own.tokens, own.n, seen))
