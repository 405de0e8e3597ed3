"""Judges: which drafts are kept, and the token that follows them.

A call of the model gives the logits z_0 .. z_C after the last token and after
each of C drafts, of a chain or of a tree (trees.py). A judge keeps a path of
drafts and adds one token, so every call makes at least one.

    replay      draws every token as decoding one by one would, with the same
                keys, and keeps drafts while they are these draws: the text is
                that of decoding one by one, token for token, greedy and drawn.
                Drafts that a draft model drew by the same noise agree often.
    rejection   keeps draft x with probability min(1, p(x) / q(x)), else draws
                from (p - q)+ and drops the rest (Leviathan et al.,
                arXiv:2211.17192, section 2.3): the distribution is p, and no
                judge keeps more of one draft. Temperature and filters change p
                and q alike, before. Choices of a tree are not drawn: to reject
                one and draw the next from what is left of p, and so on
                (SpecInfer, arXiv:2305.09781, section 4.3), keeps each with its
                p(x), as a draw of p that is looked for among them: replay.
    typical     keeps the longest path of drafts that p finds likely enough,
                p(x) > min(.09, .3 exp(-entropy of p)) (Medusa,
                arXiv:2401.10774; the numbers of its code): NOT the distribution
                of p. The token behind them is a draw of p, which is ours (the
                paper: p's most likely one).

`lossless` is what tests hold a judge to.
Legend: B rows, C drafts, D drafts of the longest path, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import sampling
from paraxis.sharding import annotate

# Purposes of draws (sampling.keys) beside the token itself.
DRAFT, ACCEPT, REST = 1, 2, 3
MOST, SCALE = 0.09, 0.3  # of what the typical judge asks of a draft


class Drafts(NamedTuple):
  """tokens: (B, C) int32. valid: (B, C) bool, those that there are; of a chain
  the first ones. logits: (B, C, V) of what drew them, or None: certain."""

  tokens: Any
  valid: Any
  logits: Any = None


class Draws(NamedTuple):
  """What the draws of a call need: form, values as sampling.check gives them;
  request, index: (B,) uint32, index of the call's first new token."""

  form: Any
  values: Any
  request: Any
  index: Any

  def at(self, c) -> tuple[Any, Any]:
    """(request, index) of the call's token c, a number or (B,)."""
    return self.request, self.index + jnp.asarray(c, jnp.uint32)


class Judged(NamedTuple):
  """tokens: (B, D + 1) int32, the first n + 1 are new. n: (B,) int32, drafts
  that are kept. at: (B, D + 1) int32: logits z_at drew token c."""

  tokens: Any
  n: Any
  at: Any


class Judge(NamedTuple):
  """lossless: the text is distributed as that of decoding one by one.
  run: (z (B, C + 1, V), Drafts, Draws, trees.Tree) -> Judged. coupled: drafts
  are drawn by the noise of the tokens."""

  lossless: bool
  coupled: bool
  run: Callable


def accepted(ok_BC):
  """(B,) int32: how many are ok, up to the first that is not."""
  n = jnp.sum(jnp.zeros_like(ok_BC, jnp.int32), 1, dtype=jnp.int32)
  for c in range(ok_BC.shape[1]):
    n = n + ((n == c) & ok_BC[:, c])
  return n


def at(x, index_B):
  """x (B, C, ..) at one place of each row: (B, ..). Others may be NaN."""
  place = jnp.arange(x.shape[1], dtype=jnp.int32) == index_B[:, None]
  place = place.reshape(place.shape + (1,) * (x.ndim - 2))
  return jnp.sum(jnp.where(place, x, jnp.zeros((), x.dtype)), 1, dtype=x.dtype)


def _along(tokens):
  """Places of the logits of a chain's tokens (B, D + 1)."""
  order = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  return jnp.broadcast_to(order, tokens.shape)


def replay(z, drafts, draws, tree):
  """See the module."""

  def draw(z_BV, c):
    return sampling.sample(z_BV, draws.form, draws.values, *draws.at(c))[0]

  if tree.is_chain:
    tokens = jnp.stack([draw(z[:, c], c) for c in range(z.shape[1])], 1)
    same = (tokens[:, :-1] == drafts.tokens) & drafts.valid
    return Judged(tokens, accepted(same), _along(tokens))
  parents = np.array(tree.parents, np.int32) + 1
  node = n = jnp.zeros_like(draws.request, jnp.int32)
  path, tokens = [], []
  for c in range(tree.depth + 1):
    tokens.append(draw(at(z, node), c))
    path.append(node)
    child = drafts.valid & (parents == node[:, None])
    child &= drafts.tokens == tokens[-1][:, None]
    here = child.any(1) & (n == c)
    n = n + here
    node = jnp.where(here, jnp.argmax(child, 1).astype(jnp.int32) + 1, node)
  return Judged(jnp.stack(tokens, 1), n, jnp.stack(path, 1))


def rejection(z, drafts, draws, tree, rest=lambda p, q: jnp.maximum(p - q, 0)):
  """See the module. rest: of p and q (B, V), what is drawn from where a draft
  is dropped, up to a factor."""
  width = drafts.tokens.shape[1]
  # Nothing is rejected without drafts: the draw of decoding one by one.
  if draws.form.greedy or not tree.is_chain or not width:
    assert tree.is_chain or drafts.logits is None, 'choices of a tree are drawn'
    return replay(z, drafts, draws, tree)
  form, values = draws.form, draws.values
  p_of = lambda z: jax.nn.softmax(sampling.filtered(z, form, values), -1)
  vocab = jnp.arange(z.shape[2], dtype=jnp.int32)
  p, q, ok = [p_of(z[:, c]) for c in range(width + 1)], [], []
  certain, valid = drafts.logits is None, drafts.valid
  if not certain:  # from logits that are not finite there is no q
    valid = valid & jnp.isfinite(drafts.logits).all(-1)
  for c in range(width):
    hit = vocab == drafts.tokens[:, c, None]
    q.append(hit.astype(p[c].dtype) if certain else p_of(drafts.logits[:, c]))
    of = lambda x, hit=hit: jnp.sum(jnp.where(hit, x, 0), -1)
    key = sampling.keys(values.seed, *draws.at(c), purpose=ACCEPT)
    u = annotate.put(jax.vmap(jax.random.uniform)(key), ('batch',))
    ok.append((u * of(q[c]) < of(p[c])) & valid[:, c])
  n = jnp.zeros_like(draws.request, jnp.int32)
  n = accepted(jnp.stack(ok, 1))
  tokens = []
  for c in range(width + 1):
    left = p[c]
    if c < width:  # all drafts kept: the token is a draw of p
      left = jnp.where(valid[:, c, None], rest(p[c], q[c]), p[c])
    noise = sampling.gumbel(left.shape, values, *draws.at(c), purpose=REST)
    drawn = jnp.argmax(jnp.log(left) + noise, -1).astype(jnp.int32)
    kept = drafts.tokens[:, c] if c < width else drawn
    tokens.append(jnp.where(c < n, kept, drawn))
  tokens = jnp.stack(tokens, 1)
  return Judged(tokens, n, _along(tokens))


def typical(z, drafts, draws, tree):
  """See the module."""
  alive, likely, lp = [True], [0.0], []  # of the last token and every draft
  for c in range(z.shape[1]):
    scaled = z[:, c].astype(jnp.float32)
    if not draws.form.greedy:
      scaled = sampling.filtered(scaled, draws.form, draws.values)
    lp.append(jax.nn.log_softmax(scaled))
  for c, parent in enumerate(tree.parents):
    seen = lp[parent + 1]
    own = sampling.logprob(seen, drafts.tokens[:, c])
    p = jnp.exp(seen)
    entropy = -jnp.sum(jnp.where(p > 0, p * seen, 0), -1)
    least = jnp.minimum(MOST, SCALE * jnp.exp(-entropy))
    ok = drafts.valid[:, c] & (jnp.exp(own) > least)
    alive.append(alive[parent + 1] & ok)
    likely.append(likely[parent + 1] + jnp.where(ok, own, 0))
  depths, node = tree.depths(), jnp.zeros_like(draws.request, jnp.int32)
  n, best = node, jnp.zeros_like(lp[0][:, 0])
  for c in range(1, len(depths)):
    more = depths[c] > n
    better = alive[c] & (more | ((depths[c] == n) & (likely[c] > best)))
    node = jnp.where(better, c, node)
    n = jnp.where(better, depths[c], n)
    best = jnp.where(better, likely[c], best)
  # Not by an index: rows may be sharded, and the tree is not.
  here = jnp.arange(len(depths), dtype=jnp.int32) == node[:, None]
  sees = (here[..., None] & tree.sees()).any(1)
  tokens, path = [], []
  for c in range(tree.depth + 1):  # the node of the path that is c deep
    place = jnp.zeros_like(node)
    for i in np.flatnonzero(depths == c):
      place = jnp.where(sees[:, i], i, place)
    path.append(place.astype(jnp.int32))
  for c in range(tree.depth + 1):
    drawn = sampling.sample(
      at(z, path[c]), draws.form, draws.values, *draws.at(c)
    )[0]
    if c < tree.depth:
      kept = at(drafts.tokens, jnp.maximum(path[c + 1] - 1, 0))
      drawn = jnp.where(c < n, kept, drawn)
    tokens.append(drawn)
  return Judged(jnp.stack(tokens, 1), n, jnp.stack(path, 1))


JUDGES = {
  'replay': Judge(True, True, replay),
  'rejection': Judge(True, False, rejection),
  'typical': Judge(False, True, typical),
}
