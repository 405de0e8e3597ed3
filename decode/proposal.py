"""What a method of decoding is: what it is given, and what it proposes.

A method is an object with `tree`, the trees.Tree of its drafts, and four pure
functions:

    start(params, tokens_BT, lengths_B, slots, x_BTD)  -> its own state
    first(own, seen)                             -> with the first new token
    propose(params, own, token_B, live_B, draws) -> (judges.Drafts, held)
    settle(held, seen)                           -> its own state, after a call

params: Params. token_B is the last token of each row, which no cache holds yet.
seen: Seen. A row that was not live has no new tokens and settles as it was.
Legend: B rows, T prompt tokens, C drafts, D drafts of the longest path, S
slots, V vocabulary.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from paraxis.decode import judges
from paraxis.decode import trees
from paraxis.sharding import annotate

ROWS = ('batch', None)


class Params(NamedTuple):
  """model: as `Decoder.unstack` gives them. own: of the method, or ()."""

  model: Any
  own: Any = ()


class Seen(NamedTuple):
  """What a call made.

  tokens: (B, D + 1) int32, the first n are new. n: (B,) int32. at: (B, D + 1)
  int32, of 0 .. C: which token in flight token c follows. x, z: features and
  logits of the tokens in flight, (B, C + 1, ..). draws: judges.Draws.
  """

  tokens: Any
  n: Any
  at: Any
  x: Any
  z: Any
  draws: Any

  def kept(self):
    """(B, C + 1) bool: tokens in flight that stay, one less than are new and
    the last one of before."""
    place = jnp.arange(self.x.shape[1], dtype=jnp.int32)
    out = jnp.zeros(self.x.shape[:2], bool)
    for c in range(self.at.shape[1]):
      here = place == self.at[:, c, None]
      out |= here & (c < self.n)[:, None]
    return out

  def last(self):
    """(B, model width): features that drew the last new token."""
    place = judges.at(self.at, jnp.maximum(self.n - 1, 0))
    return judges.at(self.x, place)


class Autoregressive:
  """No drafts."""

  tree = trees.chain(0)

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, tokens_BT, lengths_B, slots, x_BTD
    return ()

  def first(self, own, seen):
    del seen
    return own

  def propose(self, params, own, token_B, live_B, draws):
    del params, own, live_B, draws
    none = annotate.put(jnp.zeros((len(token_B), 0), jnp.int32), ROWS)
    return judges.Drafts(none, none == 0), ()

  def settle(self, held, seen):
    del held, seen
    return ()


def written(x_BS, new_BC, at_B, n_B):
  """x_BS with the first n_b of new_BC in the places from at_b on."""
  place = jnp.arange(x_BS.shape[1], dtype=jnp.int32)
  for c in range(new_BC.shape[1]):
    here = (place == at_B[:, None] + c) & (c < n_B)[:, None]
    x_BS = jnp.where(here, new_BC[:, c, None].astype(x_BS.dtype), x_BS)
  return x_BS
