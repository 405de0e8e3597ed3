"""Speculative Jacobi decoding: a call judges the draws of the call before.

Every call draws a token at each place behind the last one, from the logits
that the drafts before it give. Those that are not judged yet are the drafts of
the next call, with the logits that drew them; the places that come new repeat
the last draft. Greedily this is Jacobi's fixed-point iteration; the judge
`rejection` makes it lossless for draws (Teng et al., arXiv:2410.01699), and
`replay`, whose noise belongs to a place and stays, converges to the text of
decoding one by one.

A draft's noise is that of its place and changes no token before it, so it may
be drawn again with other logits, until it is judged once.

Legend: B rows, C drafts, V vocabulary.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import sampling
from paraxis.decode import trees
from paraxis.sharding import annotate

CERTAIN = -1e30  # logit of all other tokens, where a draft was not drawn


class Window(NamedTuple):
  """tokens: (B, C) int32. logits: (B, C, V) float32 of what drew them."""

  tokens: Any
  logits: Any


class Jacobi(proposal.Method):
  """own: Window of the next call."""

  def __init__(self, width, vocab, coupled):
    """coupled: drafts are drawn by the noise of the tokens."""
    self.tree, self._vocab = trees.chain(width), vocab
    self._purpose = 0 if coupled else judges.DRAFT

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, lengths_B, slots, x_BTD
    none = jnp.zeros_like(tokens_BT[:, :1])
    tokens = jnp.concatenate([none] * self.tree.width, 1)
    return Window(tokens, self._certain(tokens))

  def first(self, own, seen):
    last = seen.tokens[:, :1]
    tokens = jnp.where(seen.n[:, None] > 0, last, own.tokens)
    return Window(tokens, self._certain(tokens))

  def propose(self, params, own, token_B, live_B, draws):
    del params, token_B, live_B, draws
    valid = jnp.ones_like(own.tokens, bool)
    return judges.Drafts(own.tokens, valid, own.logits), own

  def settle(self, held, seen):
    width, draws = self.tree.width, seen.draws
    z = seen.z.astype(jnp.float32)
    z = jnp.where(jnp.isfinite(z), z, 0)  # of a draft that is not kept
    tokens = [
      sampling.sample(
        z[:, c], draws.form, draws.values, *draws.at(c), purpose=self._purpose
      )[0]
      for c in range(width + 1)
    ]
    tokens = jnp.stack(tokens, 1)
    # Draft c of the next call is at the place of token n + c of this one.
    place = seen.n[:, None] + jnp.arange(width, dtype=jnp.int32)
    drawn = place <= width
    place = jnp.minimum(place, width)
    chosen = [judges.at(tokens, place[:, c]) for c in range(width)]
    tokens_BC = jnp.stack(chosen, 1)
    logits = jnp.stack([judges.at(z, place[:, c]) for c in range(width)], 1)
    logits = jnp.where(drawn[..., None], logits, self._certain(tokens_BC))
    moved = seen.n > 0
    return Window(
      jnp.where(moved[:, None], tokens_BC, held.tokens),
      jnp.where(moved[:, None, None], logits, held.logits),
    )

  def _certain(self, tokens_BC):
    """Logits (B, C, V) of drafts that were not drawn."""
    vocab = jnp.arange(self._vocab, dtype=jnp.int32)
    z = jnp.where(vocab == tokens_BC[..., None], 0.0, CERTAIN)
    return annotate.put(z.astype(jnp.float32), ('batch', None, None))
