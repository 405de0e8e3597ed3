"""What each call of the model found and made, as one record.

The text that a call works on is a canvas of W places. Of a method that drafts:
from the first token that is not final on, the drafts of the path that its judge
took and one place behind them. Of unmasking: a block or a sub-block, as
unmask/canvas.py has them. Drafts, filters and policies learn from these
records, and a rollout is one (`Generator.generate(trace=True)`).

Legend: B rows, K calls of the model, W places, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import judges
from paraxis.decode import sampling
from paraxis.sharding import annotate

NOTHING = -1  # what an empty place holds


class Trace(NamedTuple):
  """On the device of all rows; of a result without B, its own calls alone.

  canvas: (B, K, W) int32, what the places held before the call, or NOTHING.
  tokens: (B, K, W) int32, what the model puts there, as its judge says.
  final: (B, K, W) bool, places whose token is text from this call on.
  confidence: (B, K, W) float32, the largest probability of a token there; of
  unmasking, the score that its policy went by.
  logprobs: (B, K, W) float32, natural, of `tokens`. Both are the model's own,
  before temperature and filters; behind the first place that is not final they
  are given a draft that was dropped. calls: (B,) int32.
  """

  canvas: Any
  tokens: Any
  final: Any
  confidence: Any
  logprobs: Any
  calls: Any

  @classmethod
  def empty(cls, rows, calls, places):
    """With room for so many calls."""
    fill = lambda dtype: annotate.put(
      jnp.zeros((rows, calls, places), dtype), ('batch', None, None)
    )
    whole, real = jnp.int32, jnp.float32
    count = annotate.put(jnp.zeros(rows, whole), ('batch',))
    kinds = whole, whole, jnp.bool, real, real
    return cls._make([*map(fill, kinds), count])

  def add(self, live_B, drafts, seen, tree):
    """With a call more of the live rows.

    Args:
      drafts: judges.Drafts. seen: proposal.Seen. tree: trees.Tree.
    """
    width = seen.tokens.shape[1]
    order = jnp.arange(width, dtype=jnp.int32)
    best, own = [], []
    for c in range(width):
      z = judges.at(seen.z, seen.at[:, c])
      best.append(jax.nn.softmax(z.astype(jnp.float32), -1).max(-1))
      own.append(sampling.logprob(z, seen.tokens[:, c]))
    new = (
      _tried(drafts, seen, tree),
      seen.tokens,
      order < seen.n[:, None],
      jnp.stack(best, 1),
      jnp.stack(own, 1),
    )
    return self.put(live_B, new)

  def put(self, live_B, new):
    """With a call more of the live rows; new: its fields, (B, W) each."""
    call = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
    here = (call == self.calls[:, None]) & live_B[:, None]
    put = lambda x, y: jnp.where(here[..., None], y[:, None].astype(x.dtype), x)
    kept = map(put, self[:-1], new)
    return Trace._make([*kept, self.calls + live_B.astype(jnp.int32)])

  def of(self, row):
    """Of one row, as NumPy arrays of its calls."""
    own = [np.asarray(x[row]) for x in self]
    count = int(own.pop())
    return Trace._make([*(x[:count] for x in own), count])

  def listed(self):
    """Of one row: a dict of lists for each call."""
    names = self._fields[:-1]
    calls = zip(*(x.tolist() for x in self[:-1]), strict=True)
    return [dict(zip(names, call, strict=True)) for call in calls]


def _tried(drafts, seen, tree):
  """(B, W) int32: the draft in every place of the path, or NOTHING. Where a
  tree has several in a place, the one that the model agrees with, or the first.
  """
  parents = np.array(tree.parents, np.int32) + 1
  out = []
  for c in range(seen.tokens.shape[1]):
    there = drafts.valid & (drafts.tokens >= 0)
    there &= parents == seen.at[:, c, None]
    if c:  # a path that has ended has no further places
      there &= (seen.at[:, c] != seen.at[:, c - 1])[:, None]
    same = there & (drafts.tokens == seen.tokens[:, c, None])
    found = jnp.where(same.any(1, keepdims=True), same, there)
    first = jnp.cumsum(found, 1) == 1
    token = jnp.sum(jnp.where(found & first, drafts.tokens, 0), 1)
    out.append(jnp.where(found.any(1), token, NOTHING).astype(jnp.int32))
  return jnp.stack(out, 1)
