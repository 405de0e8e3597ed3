"""Text for a draft, and its training (decode/drafts/distill.py).

A draft is to say what the model says, so it may learn from what the model
writes: pieces of the text, which it continues greedily (Medusa's
self-distillation, arXiv:2401.10774, section 2.3; there the answers are drawn).
A filter of a masked model learns from that alone (decode/unmask/filters.py).
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.decode import methods
from paraxis.decode import step
from paraxis.decode.drafts import distill
from paraxis.decode.unmask import filters
from paraxis.models import build
from paraxis.models import checks as model_checks
from paraxis.models.mixers import packed
from paraxis.train.data import corpus

LONGEST = 4  # rows of one document
TOGETHER = 64  # beginnings that are continued in one batch


class Text(NamedTuple):
  """What a draft learns from.

  path: as config.data.path. tokens: at most so many. own: of every row, how
  many the model writes; 0: none, rows are text.
  """

  path: str
  tokens: int
  own: int = 0


def documents(path, held, domains=()):
  """Texts of the training or the held-out part, of each domain in turn.

  domains: only of these; (): of all.
  """
  texts: dict = {}
  for document in corpus.documents(path):
    if document.held == held and (not domains or document.domain in domains):
      texts.setdefault(document.domain, []).append(document.text)
  turns = itertools.zip_longest(*(texts[d] for d in sorted(texts)))
  return list(filter(None, itertools.chain.from_iterable(turns)))


def beginnings(tokenizer, texts, count, length):
  """[ids] of the beginnings of at most `count` texts that are as long."""
  found = (tokenizer.encode(text) for text in texts)
  return list(
    itertools.islice((x[:length] for x in found if len(x) >= length), count)
  )


def rows(tokenizer, path, held, tokens, length):
  """(N, length) int32 of the training or the held-out part of a text.

  Args:
    path: as config.data.path. tokens: at most so many are taken, of each domain
      in turn.
  """
  taken, count = [], 0
  for text in documents(path, held):
    if count >= tokens:
      break
    ids = tokenizer.encode(text)[: LONGEST * length]
    taken.append([*tokenizer.opening(), *ids])
    count += len(taken[-1])
  return distill.rows_of(taken, length)[: max(tokens // length, 1)]


@functools.lru_cache(maxsize=1)
def written(made, text, length, say, block=0, held=False):
  """(N, length) int32: pieces of texts, and what the model writes after each.

  Args:
    made: loop.Generator. text: Text, whose `own` is above 0. block: tokens of a
      canvas, of which a masked model fills one a call; 0: it is none. held:
      pieces of the held-out part.
  """
  count, begin = max(text.tokens // length, 1), length - text.own
  how: dict = dict(method='unmask', unmask=dict(block=block)) if block else {}
  encoded = map(made.tokenizer.encode, documents(text.path, held))
  # The first piece of each document, then the second, ..
  pieces = itertools.zip_longest(*(_pieces(x, begin) for x in encoded))
  pieces = filter(None, itertools.chain.from_iterable(pieces))
  ids, found = list(itertools.islice(pieces, count)), []
  for at in range(0, len(ids), TOGETHER):
    part = ids[at : at + TOGETHER]
    results = made.generate(
      part, max_new_tokens=text.own, temperature=0.0, **how
    )
    found += [
      [*x, *r['tokens']]
      for x, r in zip(part, results, strict=True)
      if r['finish'] == 'length'
    ]
  say(
    f'{len(found)} rows of {begin} tokens of text and {text.own} of the model; '
    f'{len(ids) - len(found)} of {len(ids)} texts it ended before'
  )
  return distill.rows_of(found, length)


def _pieces(ids, length):
  return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


def alone(opened, length=0):
  """schema.Config of a load.Checkpoint: float32, on one device of all.

  length: tokens of a row that it must be able to write.
  """
  config, decode = schema.view(opened.config()), schema.Decode()
  config = schema.with_value(config, 'model.dtype', 'float32')
  most = max(decode.cache_length, length)
  decode = dataclasses.replace(decode, cache_length=most)
  return dataclasses.replace(config, mesh=schema.Mesh(data=1), decode=decode)


def trained(made, text, kind, layers, recipe, say):
  """(heads.About, {name: array}) for a loop.Generator.

  Args:
    text: Text. kind, layers, recipe, say: as for distill.train.

  Raises:
    UserError: decoding could not use it, before any text is made; too little
      text.
  """
  length, tokenizer = recipe.length, made.tokenizer
  config, said, most = made.built.model.config, f'--length={length}', length
  if kind == 'ppd':  # prompt tokens go on behind the last token
    said, most = f'{said} --heads={recipe.heads}', length + recipe.heads
  model_checks.need_causal(config, 'paraxis draft')
  model_checks.check_length(config, most, said)
  methods.check_training(made.built.model, kind, layers)
  if text.own:
    found = written(made, text, length, say)
  else:
    found = rows(tokenizer, text.path, False, text.tokens, length)
  with build.use(made.built):
    return distill.train(
      made.built.model, made.params, tokenizer, found, kind, layers, recipe, say
    )


def filtered(made, text, block, recipe, say):
  """(heads.About, {name: array}) of a filter for a loop.Generator of masks.

  Its accuracy, of every place of a canvas, is that of held-out text.

  Args:
    text: Text, whose `own` is above 0. block: tokens of a canvas. recipe:
      distill.Recipe; length, steps, batch, rate and seed are read.
  """
  model, own = made.built.model, text.own
  config, begin = model.config, recipe.length - own
  if config.visibility == 'block':
    block = config.block
    if begin % block:
      raise errors.UserError(
        f'--length={recipe.length} --own={own}: the model writes behind '
        f'{begin} tokens, which are no blocks of model.block={block}.'
      )
  records = []
  for held in (False, True):
    part = text._replace(tokens=max(text.tokens // 8, 1)) if held else text
    found = written(made, part, recipe.length, say, block, held)
    with build.use(made.built):
      read = functools.partial(_likeliest(model), made.params)
      calls, kept = filters.guided(read, found, begin, block, config.mask_id)
    records.append(kept)
  made_of = filters.fit(
    records[0], recipe.steps, recipe.batch, recipe.rate, recipe.seed
  )
  about = filters.about(config, made.tokenizer.fingerprint, made_of, records[1])
  right = sum(x for (x,) in about.accuracy) / len(about.accuracy)
  say(
    f'filter: {recipe.steps} steps of {recipe.batch} calls; held-out, '
    f'{right:.3f} of what it says of masks is right; who knows the end needs '
    f'{calls.mean():.1f} calls for {own} tokens'
  )
  return about, made_of


def _likeliest(model):
  """(params, ids (N, T)) -> (likeliest tokens, their probabilities), of a pass
  over rows without a cache."""

  @jax.jit
  def run(params, ids):
    count, size = ids.shape
    rows = step.rows(ids, jnp.full(count, size, jnp.int32))
    form = (packed.Group(count, size, fresh=True),)
    x, _ = model.step(params, model.init_cache(count, 1), rows, form)
    z = model.logits(params, x).astype(jnp.float32)
    if model.config.mask_shift:
      z = jnp.roll(z, 1, 1)
    mask = jnp.arange(z.shape[-1]) == model.config.mask_id
    p = jax.nn.softmax(jnp.where(mask, -jnp.inf, z))
    return p.argmax(-1).astype(jnp.int32), p.max(-1)

  return run
