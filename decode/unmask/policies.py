"""Which masks of a canvas become final in a call: a score, and a count.

Score of a mask, 0 to 1, of the model's own probabilities p, sorted p1 >= p2:

    confidence  p of the token that was drawn     (LLaDA, arXiv:2502.09992)
    margin      p1 - p2                           (arXiv:2502.06768)
    entropy     1 - entropy(p) / ln V
    random      a number of its own               (as masks fall in training)
    filter      what a trained filter makes of the confidences (filters.py)

At a temperature above 0 every policy draws. One whose score is of the drawn
token (confidence, filter) then keeps likely draws and draws the others again:
even one token a call is not from the model's own distribution.

The score of an end may be less in the beginning, and rise to its own with the
share of the canvas that is text: times end_weight (1 - share) + share (EOSER,
arXiv:2509.23924, section 3), as ends are drawn early and cut what is before
them.

Count of masks that are taken, best first; always one, so a canvas ends:

    fixed       `tokens` of them
    threshold   those above `threshold`           (Fast-dLLM, arXiv:2505.22618)
    factor      the most n with (n + 1) (1 - score of the n-th) < `factor`
                                                  (Fast-dLLM, section 3.3)
    hierarchy   the best of every run of masks, and those above `threshold`
                                                  (dInfer, arXiv:2510.08666)
    ascending   2 ** i in call i of a block, and the rest in the last of log2 of
                its masks                         (arXiv:2509.23924, section 4)

Legend: B rows, C places of a canvas, V vocabulary.
"""

import jax
import jax.numpy as jnp

NONE = -1.0  # below all scores: of what is no mask


def score(policy, z_BCV, tokens_BC, noise_BC):
  """(B, C) float32, in [0, 1].

  Args:
    policy: configs.base.decode.Unmask. z_BCV: logits. tokens_BC: drawn.
    noise_BC: in [0, 1). Of score=filter: the confidences that it reads.
  """
  p = jax.nn.softmax(z_BCV.astype(jnp.float32), -1)
  if policy.score == 'random':
    return noise_BC
  if policy.score == 'margin':
    first, second = jnp.moveaxis(jax.lax.top_k(p, 2)[0], -1, 0)
    return first - second
  if policy.score == 'entropy':
    each = jnp.where(p > 0, -p * jnp.log(jnp.where(p > 0, p, 1)), 0)
    return 1 - each.sum(-1) / jnp.log(float(p.shape[-1]))
  here = jnp.arange(p.shape[-1], dtype=jnp.int32) == tokens_BC[..., None]
  return jnp.sum(jnp.where(here, p, 0), -1)


def later_ends(policy, score_BC, end_BC, share_B):
  """Scores, those of ends times end_weight (1 - share) + share.

  Args:
    end_BC: bool, drawn ends. share_B: of the canvas's tokens that are text.
  """
  weight = policy.end_weight * (1 - share_B) + share_B
  return jnp.where(end_BC, score_BC * weight[:, None], score_BC)


def ranks(score_BC):
  """int32: how many places are better, or as good and before it."""
  one, other = score_BC[:, :, None], score_BC[:, None]
  place = jnp.arange(score_BC.shape[1], dtype=jnp.int32)
  before = place < place[:, None]
  better = (other > one) | ((other == one) & before)
  return better.sum(-1, dtype=jnp.int32)


def chosen(policy, score_BC, open_BC, call_B):
  """(B, C) bool: masks that become final; one at least of a row with masks.

  Args:
    policy: configs.base.decode.Unmask. score_BC: of `score`. open_BC: the
      masks. call_B: int32, calls of the model that this canvas has had.
  """
  held = jnp.where(open_BC, score_BC, NONE)
  rank = ranks(held)
  return open_BC & ((rank == 0) | _counted(policy, held, rank, open_BC, call_B))


def _counted(policy, score_BC, rank_BC, open_BC, call_B):
  """Those beside the best one; what is no mask is not looked at."""
  if policy.count == 'fixed':
    return rank_BC < policy.tokens
  if policy.count == 'ascending':
    n = 2 ** jnp.minimum(call_B, 30)
    n += open_BC.sum(1, dtype=jnp.int32) == n + 1  # no call for one mask alone
    return rank_BC < n[:, None]
  if policy.count == 'factor':
    # Scores fall along ranks: the best n are those up to the last that passes.
    passes = (rank_BC + 2) * (1 - score_BC) < policy.factor
    last = jnp.where(passes & open_BC, rank_BC, -1).max(1)
    return rank_BC <= last[:, None]
  above = score_BC > policy.threshold
  if policy.count == 'threshold':
    return above
  return above | _best_of_runs(score_BC, open_BC)


def _best_of_runs(score_BC, open_BC):
  """(B, C) bool: the best mask of every run of neighbouring masks."""
  begins = open_BC & ~jnp.pad(open_BC[:, :-1], ((0, 0), (1, 0)))
  run = jnp.where(open_BC, jnp.cumsum(begins, 1), 0)
  same = (run[:, :, None] == run[:, None]) & open_BC[:, None]
  place = jnp.arange(score_BC.shape[1], dtype=jnp.int32)
  one, other = score_BC[:, :, None], score_BC[:, None]
  better = (other > one) | ((other == one) & (place < place[:, None]))
  return open_BC & ~(same & better).any(-1)


def credited(policy, z_BCV, credit_BCV, open_BC):
  """(logits, credit) after a call (CreditDecoding, arXiv:2510.06133).

    credit <- credit_decay credit,  + p1 ** credit_power at the likeliest token
    logits <- logits + credit_weight log(1 + credit)

  A token that has been the likeliest call after call is believed sooner.
  """
  p = jax.nn.softmax(z_BCV.astype(jnp.float32), -1)
  best = jnp.argmax(p, -1).astype(jnp.int32)[..., None]
  top = jnp.arange(p.shape[-1], dtype=jnp.int32) == best
  more = jnp.where(top & open_BC[..., None], p**policy.credit_power, 0)
  credit = policy.credit_decay * credit_BCV + more
  fused = z_BCV + policy.credit_weight * jnp.log1p(credit).astype(z_BCV.dtype)
  return fused, credit
