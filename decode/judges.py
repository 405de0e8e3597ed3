"""Judges: which drafts are kept, and the token that follows them.

A call of the model gives the logits z_0 .. z_C after the last token and after
each of C drafts. A judge keeps the first n drafts and adds one token, so every
call makes at least one.

    replay      draws every token as decoding one by one would, with the same
                keys, and keeps drafts while they are these draws: the text is
                that of decoding one by one, token for token, greedy and drawn.
                Drafts that a draft model drew by the same noise agree often.
    rejection   keeps draft x with probability min(1, p(x) / q(x)), else draws
                from (p - q)+ and drops the rest (Leviathan et al.,
                arXiv:2211.17192, section 2.3): the distribution is p, and no
                judge keeps more of one draft. Temperature and filters change p
                and q alike, before.

`lossless` is what tests hold a judge to.
Legend: B rows, C drafts, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paraxis.decode import sampling
from paraxis.sharding import annotate

# Purposes of draws (sampling.keys) beside the token itself.
DRAFT, ACCEPT, REST = 1, 2, 3


class Drafts(NamedTuple):
  """tokens: (B, C) int32. count: (B,) int32, how many there are, the first
  ones. logits: (B, C, V) of what drew them, or None: they were certain."""

  tokens: Any
  count: Any
  logits: Any = None


class Draws(NamedTuple):
  """What the draws of a call need: form, values as sampling.check gives them;
  request, index: (B,) uint32, index of the call's first new token."""

  form: Any
  values: Any
  request: Any
  index: Any

  def at(self, c) -> tuple[Any, Any]:
    """(request, index) of the call's token c."""
    return self.request, self.index + jnp.uint32(c)


class Judge(NamedTuple):
  """lossless: the text is distributed as that of decoding one by one.
  run: (z (B, C + 1, V), Drafts, Draws) -> (tokens (B, C + 1), n_B): the first
  n + 1 tokens are new. coupled: drafts are drawn by the noise of the tokens."""

  lossless: bool
  coupled: bool
  run: Callable


def accepted(ok_BC, count_B):
  """(B,) int32: how many of the first count are ok, up to the first that is
  not."""
  n = jnp.zeros_like(count_B)
  for c in range(ok_BC.shape[1]):
    n = n + ((n == c) & ok_BC[:, c] & (c < count_B))
  return n


def replay(z, drafts, draws):
  """See the module."""
  tokens = [
    sampling.sample(z[:, c], draws.form, draws.values, *draws.at(c))[0]
    for c in range(z.shape[1])
  ]
  tokens = jnp.stack(tokens, 1)
  same = tokens[:, :-1] == drafts.tokens
  return tokens, accepted(same, drafts.count)


def rejection(z, drafts, draws, rest=lambda p, q: jnp.maximum(p - q, 0)):
  """See the module. rest: of p and q (B, V), what is drawn from where a draft
  is dropped, up to a factor."""
  if draws.form.greedy:
    return replay(z, drafts, draws)
  form, values = draws.form, draws.values
  p_of = lambda z: jax.nn.softmax(sampling.filtered(z, form, values), -1)
  width, vocab = drafts.tokens.shape[1], jnp.arange(z.shape[2], dtype=jnp.int32)
  p, q, ok = [p_of(z[:, c]) for c in range(width + 1)], [], []
  for c in range(width):
    hit = vocab == drafts.tokens[:, c, None]
    certain = drafts.logits is None
    q.append(hit.astype(p[c].dtype) if certain else p_of(drafts.logits[:, c]))
    of = lambda x, hit=hit: jnp.sum(jnp.where(hit, x, 0), -1)
    key = sampling.keys(values.seed, *draws.at(c), purpose=ACCEPT)
    u = annotate.put(jax.vmap(jax.random.uniform)(key), ('batch',))
    ok.append(u * of(q[c]) < of(p[c]))
  n = accepted(jnp.stack(ok, 1), drafts.count) if width else 0 * draws.request
  tokens = []
  for c in range(width + 1):
    left = p[c]
    if c < width:  # all drafts kept: the token is a draw of p
      dropped = (c < drafts.count)[:, None]
      left = jnp.where(dropped, rest(p[c], q[c]), p[c])
    noise = sampling.gumbel(left.shape, values, *draws.at(c), purpose=REST)
    drawn = jnp.argmax(jnp.log(left) + noise, -1).astype(jnp.int32)
    kept = drafts.tokens[:, c] if c < width else drawn
    tokens.append(jnp.where(c < n, kept, drawn))
  return jnp.stack(tokens, 1), n.astype(jnp.int32)


JUDGES = {
  'replay': Judge(True, True, replay),
  'rejection': Judge(True, False, rejection),
}
