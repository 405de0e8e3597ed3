"""What a method of decoding is: what it is given, and what it proposes.

A `Method` has `tree`, the trees.Tree of its drafts, and pure functions:

    start(params, tokens_BT, lengths_B, slots, x_BTD)  -> its own state
    first(own, seen)                             -> with the first new token
    propose(params, own, token_B, live_B, draws) -> (judges.Drafts, held)
    settle(held, seen)                           -> its own state, after a call
    begin(params)                                -> as for `Decoder.step`

A draft below 0 is no token: it is fed, as what `begin` makes of it, and not
kept. params: Params. token_B is the last token of each row, which no cache
holds yet. seen: Seen. A row that was not live has no new tokens and settles as
it was.
Legend: B rows, T prompt tokens, C drafts, D drafts of the longest path, S
slots, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
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


class Method:
  """What methods have in common."""

  tree: trees.Tree
  fills = False  # a canvas, in any order, by calls of its own (unmask/)
  lane = 0  # tokens that a row of the cache must hold, however few are asked

  def calls(self, new):
    """At most, for so many new tokens; one that makes none ends its row."""
    return new

  def first(self, own, seen):
    del seen
    return own

  def begin(self, params) -> Any:
    del params
    return None


class Autoregressive(Method):
  """No drafts."""

  tree = trees.chain(0)

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, tokens_BT, lengths_B, slots, x_BTD
    return ()

  def propose(self, params, own, token_B, live_B, draws):
    del params, own, live_B, draws
    none = annotate.put(jnp.zeros((len(token_B), 0), jnp.int32), ROWS)
    return judges.Drafts(none, none == 0), ()

  def settle(self, held, seen):
    del held, seen
    return ()


def waiting(tokens, n, seen):
  """(tokens (B, C + 1), n (B,)) of the last call of each row, the first n of
  them: who drafts has not read them."""
  width, moved = tokens.shape[1], seen.n > 0
  new = jnp.pad(seen.tokens, ((0, 0), (0, width - seen.tokens.shape[1])))
  return jnp.where(moved[:, None], new, tokens), jnp.where(moved, seen.n, n)


def likeliest(tree, z_of):
  """(B, C) int32: the drafts of a tree by their ranks, -1 for what is none.

  Args:
    z_of: k -> logits (B, V) of the drafts that are k + 1 deep.
  """
  tokens: list[Any] = [None] * tree.width
  places = tree.depths()[1:] - 1
  for k in range(tree.depth):
    nodes = [c for c in range(tree.width) if places[c] == k]
    nodes = [c for c in nodes if tree.ranks[c] >= 0]
    most = 1 + max(tree.ranks[c] for c in nodes)
    choices = jax.lax.top_k(z_of(k), most)[1].astype(jnp.int32)
    for c in nodes:
      tokens[c] = choices[:, tree.ranks[c]]
  none = jnp.full_like(tokens[0], -1)
  drafts = [none if x is None else x for x in tokens]
  return annotate.put(jnp.stack(drafts, 1), ROWS)


def written(x_BS, new_BC, at_B, n_B):
  """x_BS with the first n_b of new_BC in the places from at_b on."""
  place = jnp.arange(x_BS.shape[1], dtype=jnp.int32)
  for c in range(new_BC.shape[1]):
    here = (place == at_B[:, None] + c) & (c < n_B)[:, None]
    x_BS = jnp.where(here, new_BC[:, c, None].astype(x_BS.dtype), x_BS)
  return x_BS
