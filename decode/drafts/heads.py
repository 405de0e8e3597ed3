"""Trained parts of a draft, and the method that drafts with heads.

    x <- x + silu(x W + b), block after block

turns the features x of a token into those of one k + 1 places after it; the
model's own head, frozen, makes logits of both (Medusa, Cai et al.,
arXiv:2401.10774, whose heads have an own copy of it). W and b are 0 in the
beginning. The same blocks improve a draft model of the first layers
(drafters.py).

A draft may say some words of the vocabulary alone, the frequent ones: its
logits, most of its cost, are then as many (FR-Spec, arXiv:2502.14856; EAGLE-3,
arXiv:2503.01840). It never drafts the others, which the model still may say.

A file of them (`save`, `load`) is an .npz archive of arrays alone, with a JSON
text about what they belong to.

Legend: B rows, K heads, L blocks, D model width, V vocabulary.
"""

import dataclasses
import io
import json
import os
import pathlib
import tempfile
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.decode import judges
from paraxis.decode import proposal
from paraxis.sharding import annotate

KINDS = ('medusa', 'speculative', 'eagle', 'falcon', 'ppd', 'filter')
ABOUT, WORDS = 'about', 'words'
NEVER = -1e30  # logits of what a draft does not say; finite, as logits are


@dataclasses.dataclass(frozen=True)
class About:
  """What trained parts belong to.

  kind: of KINDS. layers: of the draft model, 0: heads of the whole. model:
  (vocab_size, d_model, num_layers). tokenizer: its fingerprint. accuracy: for
  each place after the last token, how often each choice is right; of a filter
  (unmask/filters.py), for each place of a canvas; or ().
  """

  kind: str
  layers: int
  model: tuple[int, int, int]
  tokenizer: str
  accuracy: tuple[tuple[float, ...], ...] = ()


def initial(count, width, blocks=1):
  """{'weight': (K, L, D, D), 'bias': (K, L, D)} float32, which change
  nothing."""
  shape = count, blocks, width
  return {
    'weight': np.zeros((*shape, width), np.float32),
    'bias': np.zeros(shape, np.float32),
  }


def residual(own, x_BKD):
  """Features of each head, of its own or of the same x_B1D: (B, K, D)."""
  count, blocks, width = own['bias'].shape
  x = jnp.broadcast_to(x_BKD, (len(x_BKD), count, width))
  for i in range(blocks):
    w, b = (own[name][:, i].astype(x.dtype) for name in ('weight', 'bias'))
    x = x + jax.nn.silu(jnp.einsum('bkd,kde->bke', x, w) + b)
  return x


def logits(model, params, own, x_BTD):
  """(B, T, V) of a draft's features: NEVER for what is none of its words.

  Args:
    model: decoder.Decoder. params: its own, as `unstack` gives them.
    own: {name: array} of a draft, with (V',) int32 WORDS where it has few.
  """
  if WORDS not in own:
    return model.logits(params, x_BTD)
  z = model.logits(params, x_BTD, own[WORDS])
  few = len(own[WORDS])
  place = jnp.full(model.config.vocab_size, few, jnp.int32)
  place = place.at[own[WORDS]].set(jnp.arange(few, dtype=jnp.int32))
  z = jnp.pad(z, ((0, 0), (0, 0), (0, 1)), constant_values=NEVER)
  if annotate.mode() == 'explicit' and annotate.sizes():
    laid = annotate.spec(('batch', None, None))
    return z.at[:, :, place].get(out_sharding=laid)
  return z[:, :, place]


def said(model, params, x_BTD):
  """Logits of a draft model's features: `residual`, then `logits`.

  params: proposal.Params, of the model and of the draft.
  """
  x = residual(params.own, x_BTD)
  return logits(model, params.model, params.own, x)


def numbers(arrays):
  """How many parameters of a draft are trained."""
  return sum(x.size for name, x in arrays.items() if name != WORDS)


def save(path, about, arrays):
  """Writes a file that `load` reads. arrays: {name: array}.

  What was there stays until the new one is whole; nothing else is left.
  """
  text = json.dumps(dataclasses.asdict(about))
  held = {ABOUT: np.array(text)} | jax.tree.map(np.asarray, arrays)
  path = pathlib.Path(path)
  number, temporary = tempfile.mkstemp(prefix=f'{path.name}.', dir=path.parent)
  try:
    with open(number, 'wb') as file:
      np.savez(file, **held)
    os.chmod(temporary, 0o644)  # others may decode with it
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise


def load(path, model, tokenizer):
  """(About, {name: array}) for a schema.Model and a tokenizer's fingerprint.

  Raises:
    UserError: no such file, not one of `save`, or of another model.
  """
  try:
    content = io.BytesIO(pathlib.Path(path).read_bytes())
    with np.load(content, allow_pickle=False) as held:
      arrays = {name: held[name] for name in held.files}
    fields = json.loads(str(arrays.pop(ABOUT)))
    fields['model'] = tuple(fields['model'])
    fields['accuracy'] = tuple(map(tuple, fields['accuracy']))
    about = About(**fields)
  except (
    OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile
  ) as e:  # fmt: skip
    raise errors.UserError(
      f'decode.draft={path}: no trained draft ({e}); `paraxis draft` makes one.'
    ) from None
  want = model.vocab_size, model.d_model, model.num_layers
  if about.model != want or about.tokenizer != tokenizer:
    names = 'vocabulary', 'model width', 'layers'
    other = [
      f'{name} {a}, here {b}'
      for name, a, b in zip(names, about.model, want, strict=True)
      if a != b
    ] or ['another tokenizer']
    raise another(path, other)
  bad = [n for n, x in arrays.items() if not np.isfinite(x).all()]
  if bad:
    raise errors.UserError(
      f'decode.draft={path}: {", ".join(bad)} are not finite: the file is '
      'damaged, or its training diverged.'
    )
  words = arrays.get(WORDS, np.zeros(0, np.int32))
  if words.size and not 0 <= words.min() <= words.max() < model.vocab_size:
    raise errors.UserError(
      f'decode.draft={path}: it says ids {words.min()} to {words.max()}, the '
      f'vocabulary has {model.vocab_size}: the file is damaged.'
    )
  return about, arrays


def another(path, differences):
  """UserError: a draft of another model; what differs, and both values."""
  return errors.UserError(
    f'decode.draft={path} was trained for another model: '
    f'{"; ".join(differences)}. Draft and target share a vocabulary: train one '
    'for this model (`paraxis draft`).'
  )


class Medusa(proposal.Method):
  """own: (B, D), features that drew the last token."""

  def __init__(self, model, tree):
    """model: decoder.Decoder."""
    self.tree, self._model = tree, model

  def start(self, params, tokens_BT, lengths_B, slots, x_BTD):
    del params, slots, x_BTD
    shape = len(tokens_BT), self._model.config.d_model
    x = jnp.zeros(shape, jnp.dtype(self._model.config.dtype))
    return annotate.put(x, proposal.ROWS)

  def first(self, own, seen):
    return self.settle(own, seen)

  def propose(self, params, own, token_B, live_B, draws):
    del token_B, live_B, draws
    x_BKD = residual(params.own, own[:, None])[:, : self.tree.depth]
    z = logits(self._model, params.model, params.own, x_BKD)
    z = annotate.put(z, ('batch', None, None))
    tokens = proposal.likeliest(self.tree, lambda k: z[:, k])
    return judges.Drafts(tokens, jnp.ones_like(tokens, bool)), own

  def settle(self, held, seen):
    x = annotate.put(seen.last(), proposal.ROWS).astype(held.dtype)
    return jnp.where((seen.n > 0)[:, None], x, held)
