"""Log-likelihoods of tokens: one forward pass a row, without a cache.

    log p(y | x) = sum_i log softmax(z_i)[y_i]

Logits and their softmax are at least float32, whatever the model's dtype; sums
over the tokens of a row are made on the host in float64. A row is padded to the
bucket of its own length, and only rows of one bucket share a batch: neither the
size of batches, nor other rows, nor the mesh change its numbers beyond
rounding, and few programs are compiled.

Legend: B rows, T tokens (padded), C of a chunk, D model, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs.base import errors
from paraxis.decode import loop
from paraxis.decode import step
from paraxis.decode import weights
from paraxis.models import batch as batch_lib
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models import side
from paraxis.sharding import annotate

CHUNK = 64  # tokens of a row whose logits are there at a time


class Score(NamedTuple):
  """Of a continuation. nats: log p, at most 0. tokens: how many were scored.
  greedy: each is the most likely one. cut: how many of the context's tokens,
  the first ones, were left out."""

  nats: float
  tokens: int
  greedy: bool
  cut: int


class Scorer:
  """One model on one mesh, in batches of equal length.

  Attributes:
    tokenizer: models.text.tokenizer. length: the most tokens a row reads.
    rows: of a batch, those asked for rounded up to the shards of the mesh.
  """

  def __init__(self, parts, config, length, batch_size=8, say=print):
    """Args:

    parts: build.Built, {path: array}, tokenizer and the ids that end a text, of
      load.Checkpoint.parts.
    config: schema.Decode, of generation; its weights also of scores.
    length: the most tokens of a row; batch_size: rows of a forward pass.
    """
    self._built, self._params, self.tokenizer, self._ends = parts
    self._config, self._say, self.length = config, say, length
    model = self._built.model.config
    model_checks.check_length(model, length, '--length')
    model_checks.need_causal(model, 'paraxis evaluate')
    if self.tokenizer.vocab_size > model.vocab_size:
      raise errors.UserError(
        f'tokenizer {self.tokenizer.name} has {self.tokenizer.vocab_size} '
        f'entries, the model has model.vocab_size={model.vocab_size}: they do '
        'not belong together.'
      )
    with build.use(self._built):
      shards = annotate.shards('batch')
      self._read = self._rounded(self._params)
    self.rows = -(-batch_size // shards) * shards
    self._program = jax.jit(self._forward)

  def _rounded(self, params):
    """{path: array} with what decode.weights rounds; on the rules in force."""
    if self._config.weights == 'loaded':
      return params
    keep = {p: x.sharding for p, x in params.items()}
    read = lambda p: weights.rounded(self._built.model, p, self._config)
    return jax.jit(read, out_shardings=keep)(params)

  def continuations(self, texts, first, names=()):
    """[Score] of (context, continuation) texts; names: as of `scores`.

    As lm-eval: blanks at the end of the context belong to the continuation,
    whose ids are those that it adds to the ids of the context.

    Args:
      first: [] or the ids in front of every context, that begin a document;
        one without a token gets them in any case.
    """
    encode, pairs = self.tokenizer.encode, []
    for context, continuation in texts:
      head = encode(context.rstrip())
      whole = encode(context + continuation)
      head, rest = [*first, *head], whole[len(head) :]
      pairs.append((head or self.tokenizer.opening(), rest))
    return self.scores(pairs, names)

  def rolling(self, texts, first):
    """[(nats, tokens)] of documents, every token predicted once.

    Disjoint windows, as lm-eval's loglikelihood_rolling: each continues the one
    token before it, the first one the ids `first`, with as many as the row has
    room for; the last one, if it is shorter, as many tokens more.
    """
    pairs, owner = [], []
    room = max(self.length + 1 - len(first), 1)  # of the first window
    for i, text in enumerate(texts):
      ids = self.tokenizer.encode(text)
      for a in [0, *range(room, len(ids), self.length)] if ids else ():
        end = min(a + self.length if a else room, len(ids))
        before = ids[max(end - self.length - 1, 0) : a] if a else first
        pairs.append((before, ids[a:end]))
        owner.append(i)
    sums = [(0.0, 0)] * len(texts)
    for i, found in zip(owner, self.scores(pairs), strict=True):
      sums[i] = sums[i][0] + found.nats, sums[i][1] + found.tokens
    return sums

  def scores(self, pairs, names=()):
    """[Score] of (context ids, continuation ids), cut from the left.

    names: what errors call them.

    Raises:
      UserError: an empty context or continuation, or one continuation that is
        longer than `length`.
      IntegrityError: a log-likelihood that is not finite.
    """
    rows, names = [], names or [f'example {i}' for i in range(len(pairs))]
    for name, (context, continuation) in zip(names, pairs, strict=True):
      if not context or not continuation:
        raise errors.UserError(
          f'{name}: the {"continuation" if context else "context"} is empty (0 '
          'tokens).'
        )
      if len(continuation) > self.length:
        raise errors.UserError(
          f'{name}: its continuation has {len(continuation)} tokens, a row '
          f'{self.length} (--length=).'
        )
      rows.append([*context, *continuation][-self.length - 1 :])
    out = {}
    for members in self._batches([len(row) - 1 for row in rows]):
      nats, best = self._batch([rows[i] for i in members])
      for b, i in enumerate(members):
        (context, continuation), end = pairs[i], len(rows[i]) - 1
        seen = slice(end - len(continuation), end)
        total = math.fsum(nats[b, seen])
        if not math.isfinite(total):
          raise errors.IntegrityError(
            f'{names[i]}: its log-likelihood is {total}: the parameters are '
            'damaged, or numbers overflow in model.dtype.'
          )
        cut = len(context) + len(continuation) - len(rows[i])
        greedy = bool(best[b, seen].all())
        out[i] = Score(total, len(continuation), greedy, cut)
    return [out[i] for i in range(len(rows))]

  def texts(self, prompts, new, stop):
    """Greedy continuations of lists of ids: ([text], prompts that were cut).

    Args:
      new: the most tokens of a continuation; prompts are cut from the left to
        length - new tokens. stop: texts that end one and are left out.
    """
    self.check_new(new)
    kept = [list(ids[new - self.length :]) for ids in prompts]
    out = {}
    for members in self._batches(list(map(len, kept))):
      made = self._continued([kept[i] for i in members], new, stop)
      out |= dict(zip(members, made, strict=True))
    cut = sum(len(a) < len(b) for a, b in zip(kept, prompts, strict=True))
    return [out[i] for i in range(len(kept))], cut

  def _continued(self, rows, new, stop):
    """[text] of the likeliest tokens after rows of ids, one by one, whatever
    the run's config says of methods, judges and rows that are shared."""
    made = self._generator.generate(
      self._padded(rows), stop=stop, max_new_tokens=new, temperature=0.0,
      method='autoregressive', judge='replay', draft='', requests=0,
    )  # fmt: skip
    return [row['text'] for row in made[: len(rows)]]

  def check_new(self, new):
    """UserError if a model has no cache to make new tokens with, or so many
    leave no room for a prompt."""
    side.check_decoding(self._built.model)
    if new >= self.length:
      raise errors.UserError(
        f'max_new_tokens={new} leaves nothing of the {self.length} tokens of a '
        'row (--length=) for the prompt.'
      )

  @functools.cached_property
  def _generator(self):
    config = dataclasses.replace(self._config, cache_length=self.length)
    return loop.Generator(
      self._built, self._params, self.tokenizer, config, self._say, self._ends
    )

  def _batches(self, lengths):
    """Yields lists of at most B indices whose lengths have one bucket."""
    buckets = {}
    for i, n in enumerate(lengths):
      buckets.setdefault(loop.bucket(n), []).append(i)
    for _, found in sorted(buckets.items()):
      for a in range(0, len(found), self.rows):
        yield found[a : a + self.rows]

  def _padded(self, rows):
    """B rows: the last one again for those that there are not."""
    return rows + rows[-1:] * (self.rows - len(rows))

  def _batch(self, rows):
    """(log p (B, T) of the token after each, whether it is the likeliest)."""
    rows = self._padded(rows)
    length = loop.bucket(max(map(len, rows)) - 1)
    mesh = self._built.mesh
    with build.use(self._built):
      tokens, lengths = step.place([row[:-1] for row in rows], length, mesh)
      targets, _ = step.place([row[1:] for row in rows], length, mesh)
      return jax.device_get(self._program(self._read, tokens, targets, lengths))

  def _forward(self, params, tokens_BT, targets_BT, lengths_B):
    x_BTD = self._features(params, tokens_BT, targets_BT, lengths_B)

    def score(x_BCD, targets_BC):
      z_BCV = self._logits(params, x_BCD)
      nats_BC = chosen(z_BCV, targets_BC) - jax.nn.logsumexp(z_BCV, -1)
      return nats_BC, jnp.argmax(z_BCV, -1) == targets_BC

    return by_chunks(score, x_BTD, targets_BT)

  def _features(self, params, tokens_BT, targets_BT, lengths_B):
    """(B, T, D) of rows of one document each."""
    order = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    here = order < lengths_B[:, None]
    weight = here.astype(jnp.float32)
    x_BTD, _ = self._built.model.features(
      params,
      batch_lib.Batch(
        tokens_BT,
        targets_BT,
        here.astype(jnp.int32),
        jnp.where(here, order, 0),
        weight,
        weight.sum(),
      ),
    )
    return x_BTD

  def _logits(self, params, x_BCD):
    """(B, C, V), whole on every device that has the row."""
    z_BCV = self._built.model.logits(params, x_BCD)
    return annotate.put(z_BCV, ('batch', None, None))


def chosen(z_BCV, targets_BC):
  """(B, C): the logits of the targets."""
  hit = jnp.arange(z_BCV.shape[-1], dtype=jnp.int32) == targets_BC[..., None]
  return jnp.sum(jnp.where(hit, z_BCV, 0), -1)


def by_chunks(function, *arrays):
  """A function of (B, C, ..) arrays, for all T tokens of (B, T, ..) arrays."""
  rows, length = arrays[0].shape[:2]
  size = math.gcd(length, CHUNK)

  def chunks(x):
    split = x.reshape(rows, length // size, size, *x.shape[2:])
    return jnp.moveaxis(split, 1, 0)

  def whole(x):
    return jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:])

  found = jax.lax.map(lambda part: function(*part), tuple(map(chunks, arrays)))
  return jax.tree.map(whole, found)
