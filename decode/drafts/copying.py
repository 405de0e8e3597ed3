"""Methods that copy: what follows is taken from the text itself.

    Lookup       what followed the last tokens when they stood there before
    Aggressive   the prompt, from its beginning, as far as the text copies it;
                 where they part, on from the place that the last tokens name
                 (Ge et al., arXiv:2205.10350: input-guided aggressive decoding)

Legend: B rows, T prompt tokens, S slots.
"""

import functools

import jax
import jax.numpy as jnp

from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import trees
from paraxis.sharding import annotate

ROWS = proposal.ROWS
LONGEST = 3  # tokens that are compared, at most


class Lookup(proposal.Method):
  """own: (text_BS, length_B), all tokens that a row has."""

  def __init__(self, width):
    self.tree = trees.chain(width)

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, x_BTD
    more = slots + 1 - tokens_BT.shape[1]  # the last token has no slot
    return jnp.pad(tokens_BT, ((0, 0), (0, more))), lengths_B

  def first(self, own, seen):
    return self.settle(own, seen)

  def propose(self, params, own, token_B, live_B, draws):
    del params, token_B, live_B, draws
    find = jax.vmap(functools.partial(_found, self.tree.width))
    run = annotate.region(find, (ROWS, ('batch',)), (ROWS, ROWS))
    return judges.Drafts(*run(*own)), own

  def settle(self, held, seen):
    text, length = held
    return proposal.written(text, seen.tokens, length, seen.n), length + seen.n


class Aggressive(Lookup):
  """own: (text_BS, length_B, source_B, next_B): tokens of the prompt without
  its last one, which ends the source; and the place that is copied next."""

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    own = super().start(params, tokens_BT, lengths_B, slots, x_BTD)
    # A text begins with a token that no copy has.
    return (*own, jnp.maximum(lengths_B - 1, 0), jnp.ones_like(lengths_B))

  def first(self, own, seen):
    return self._moved(own, seen)

  def propose(self, params, own, token_B, live_B, draws):
    del params, token_B, live_B, draws
    text, _, source, place = own
    cut = jax.vmap(functools.partial(_from, self.tree.width))
    run = annotate.region(cut, (ROWS, *[('batch',)] * 2), (ROWS, ROWS))
    return judges.Drafts(*run(text, source, place)), own

  def settle(self, held, seen):
    return self._moved(held, seen)

  def _moved(self, own, seen):
    text, length, source, place = own
    text, length = super().settle((text, length), seen)
    follow = lambda *given: (jax.vmap(_followed)(*given),)
    args = (ROWS, *[('batch',)] * 4)
    run = annotate.region(follow, args, (('batch',),))
    (place,) = run(text, length, source, place, seen.n)
    return text, length, source, place


def _from(width, text_S, source, place):
  """(`width` tokens of the source from a place on, which there are)."""
  at = place + jnp.arange(width, dtype=jnp.int32)
  return text_S[jnp.minimum(at, text_S.shape[0] - 1)], at < source


def _followed(text_S, length, source, place, n):
  """The place of the source that is copied next, after n new tokens.

  As many tokens on, also where the last new one is another: a word in the place
  of a word is the most common change. But if the new tokens are not all a copy
  and the last two or more (`LONGEST` at most) stand in the source: behind them,
  the first time at that place or after it, or the last time before.
  """
  size = text_S.shape[0]
  order = jnp.arange(size, dtype=jnp.int32)
  new = text_S[jnp.clip(length - n + order, 0, size - 1)]
  old = text_S[jnp.clip(place + order, 0, size - 1)]
  copied = jnp.all((new == old) | (order >= n)) & (place + n <= source)
  same, best = order < source, jnp.full((), -1, jnp.int32)
  ahead = order + 1 >= place
  rank = jnp.where(ahead, 2 * size - 1 - order, order)
  for m in range(LONGEST):
    back = jnp.where(order >= m, jnp.roll(text_S, m), -1)
    same &= (back == text_S[jnp.maximum(length - 1 - m, 0)]) & (m < length)
    if m:
      found = jnp.max(jnp.where(same, 2 * size * m + rank, -1))
      best = jnp.maximum(best, found)
  rank = best % (2 * size)
  found = jnp.where(rank >= size, 2 * size - rank, rank + 1)
  on = place + n
  return jnp.where(copied | (best < 0), on, found).astype(jnp.int32)


def _found(width, text_S, length):
  """(the `width` tokens that followed the last ones, which there are): the
  latest place where the most of the last `LONGEST` tokens stood before."""
  size = text_S.shape[0]
  place = jnp.arange(size, dtype=jnp.int32)
  # Agreeing tokens x size + place after them.
  best = jnp.full((), -1, jnp.int32)
  same = place < length - 1  # place: of the last agreeing token
  for n in range(LONGEST):
    # Token `length - 1 - n` against the one n before each place.
    back = jnp.where(place >= n, jnp.roll(text_S, n), -1)
    same &= (back == text_S[jnp.maximum(length - 1 - n, 0)]) & (n < length)
    found = jnp.max(jnp.where(same, (n + 1) * size + place + 1, -1))
    best = jnp.maximum(best, found)
  at = best % size + jnp.arange(width, dtype=jnp.int32)
  return text_S[jnp.minimum(at, size - 1)], (best > 0) & (at < length)
