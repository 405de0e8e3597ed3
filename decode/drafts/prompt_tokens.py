"""PPD: trained prompt tokens behind every draft say what comes after it.

    x ... x  d1  p1 p2 p3      d: a draft;  p: prompt tokens, which see the path
             |                 to d and those before them, and nobody sees
             d2  p1 p2 p3

The features of prompt token i behind a token are those from which the model
draws the token i + 1 places after that one. So the call that judges drafts also
makes the next ones: whichever draft is kept last has prompt tokens behind it
(Parallel Prompt Decoding, arXiv:2405.18628). Trained are the m embeddings of
the prompt tokens, m D numbers, through the model, which stays as it is.

Every draft has all prompt tokens behind it (the paper gives unlikely ones fewer
of them), and each prompt token has one embedding (there: an ensemble of some).

Legend: N rows, T tokens, B rows, C drafts and prompt tokens, m prompt tokens, D
model width.
"""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.decode import trees
from paraxis.models import batch as batch_lib
from paraxis.models.mixers import packed as packed_lib
from paraxis.sharding import annotate

PROMPTS = 'prompts'


def initial(model, params, tokens_NT, count):
  """{'prompts': (m, D) float32}: the mean of the embedded text."""
  ids = jnp.asarray(np.unique(tokens_NT)[None], jnp.int32)
  ones = jnp.ones_like(ids)
  batch = batch_lib.Batch(ids, None, ones, ones.cumsum(1) - 1, None, None)
  x = model.embed(params, batch)[0]
  return {PROMPTS: jnp.tile(x.astype(jnp.float32).mean(0), (count, 1))}


def begin(own, which):
  """Embedded tokens, the prompt tokens among them in place of their own.

  which: NumPy int (C,), of each token in flight, its prompt token or -1.
  """

  def placed(e_BCD):
    found = own[PROMPTS][np.maximum(which, 0)].astype(e_BCD.dtype)
    found = jnp.broadcast_to(found, e_BCD.shape)
    if annotate.mode() == 'explicit' and annotate.sizes():
      found = jax.reshard(found, jax.typeof(e_BCD).sharding)
    return jnp.where((which >= 0)[:, None], found, e_BCD)

  return placed


def inserted(tokens_NT, count):
  """Rows of text with `count` prompt tokens behind every token.

  Returns:
    (packed.Packed (N, T + T m), its form, `which` of `begin`); the prompt
    tokens of a token come together, behind the text.
  """
  rows, length = tokens_NT.shape
  at, i = np.divmod(np.arange(length * count), count)
  own, text = i + 1, np.arange(length)
  every = lambda *x: jnp.broadcast_to(
    jnp.asarray(np.concatenate(x), jnp.int32), (rows, length * (1 + count))
  )
  zeros = np.zeros_like
  packed = packed_lib.Packed(
    jnp.pad(tokens_NT, ((0, 0), (0, length * count))),
    every(zeros(text), zeros(at)) + jnp.arange(rows, dtype=jnp.int32)[:, None],
    every(text, at + own),
    every(text, at),
    every(zeros(text), 1 + at),
    every(zeros(text), own),
    every(1 + zeros(text), 2 ** (own + 1) - 1).astype(jnp.uint32),
  )
  width = length * (1 + count)
  form = (packed_lib.Group(rows, width, fresh=True, tree=True),)
  return packed, form, np.concatenate([zeros(text) - 1, i])


def features(model, params, own, tokens_NT):
  """(N, T, m, D): features of the prompt tokens behind every token."""
  count = len(own[PROMPTS])
  packed, form, which = inserted(tokens_NT, count)
  rows, length = tokens_NT.shape
  cache = model.init_cache(rows, length)
  x, _ = model.step(params, cache, packed, form, begin(own, which))
  return x[:, length:].reshape(rows, length, count, -1)


def targets(choice_NT, count):
  """(N, T, m): what the prompt tokens are to say; -1: beyond the row."""
  length = choice_NT.shape[1]
  wide = jnp.pad(choice_NT, ((0, 0), (0, count)), constant_values=-1)
  each = [wide[:, i : i + length] for i in range(1, count + 1)]
  return jnp.stack(each, 2)


class Ppd(proposal.Method):
  """own: (the drafts of the next call, (B, C) int32, -1: a prompt token; (B,)
  bool, whether there are any)."""

  def __init__(self, model, accuracy, drafts):
    """accuracy: of heads.About, a row for each prompt token. drafts: a call."""
    tree, count = trees.grown(accuracy, drafts), len(accuracy)
    self.tree, self._model = trees.probed(tree, count), model
    # Prompt tokens in flight: those of the last token, then of each draft.
    self._first, self._count = 1 + tree.width, count
    which = np.tile(np.arange(count), 1 + tree.width)
    self._which = np.concatenate([np.full(1 + tree.width, -1), which])

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, slots, x_BTD
    none = jnp.full_like(tokens_BT[:, :1], -1)
    return jnp.concatenate([none] * self.tree.width, 1), lengths_B < 0

  def begin(self, params):
    return begin(params.own, self._which)

  def propose(self, params, own, token_B, live_B, draws):
    del params, token_B, live_B, draws
    tokens, there = own
    # Prompt tokens behind a draft that there is not are not there, too.
    place = np.arange(self.tree.width) + 1 - self._first
    always = (place >= 0) & (place < self._count)
    return judges.Drafts(tokens, there[:, None] | always), own

  def settle(self, held, seen):
    last = judges.at(seen.at, jnp.maximum(seen.n - 1, 0))
    tokens = proposal.likeliest(
      self.tree,
      lambda k: annotate.put(
        judges.at(seen.z, self._first + last * self._count + k), proposal.ROWS
      ),
    )
    moved, (before, there) = seen.n > 0, held
    return jnp.where(moved[:, None], tokens, before), there | moved
