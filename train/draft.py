"""Text for a draft, and its training (decode/drafts/distill.py).

A draft is to say what the model says, so it may learn from what the model
writes: pieces of the text, which it continues greedily (Medusa's
self-distillation, arXiv:2401.10774, section 2.3; there the answers are drawn).
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

from paraxis.configs import schema
from paraxis.decode.drafts import distill
from paraxis.models import build
from paraxis.models import checks as model_checks
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
    taken.append([tokenizer.bos_id(None), *ids])
    count += len(taken[-1])
  return distill.rows_of(taken, length)[: max(tokens // length, 1)]


@functools.lru_cache(maxsize=1)
def written(made, text, length, say):
  """(N, length) int32: pieces of texts, and what the model writes after each.

  Args:
    made: loop.Generator. text: Text, whose `own` is above 0.
  """
  count, begin = max(text.tokens // length, 1), length - text.own
  encoded = map(made.tokenizer.encode, documents(text.path, False))
  # The first piece of each document, then the second, ..
  pieces = itertools.zip_longest(*(_pieces(x, begin) for x in encoded))
  pieces = filter(None, itertools.chain.from_iterable(pieces))
  ids, found = list(itertools.islice(pieces, count)), []
  for at in range(0, len(ids), TOGETHER):
    part = ids[at : at + TOGETHER]
    results = made.generate(part, max_new_tokens=text.own, temperature=0.0)
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


def alone(opened):
  """schema.Config of a load.Checkpoint: float32, on one device of all."""
  config = schema.view(opened.config())
  config = schema.with_value(config, 'model.dtype', 'float32')
  return dataclasses.replace(
    config, mesh=schema.Mesh(data=1), decode=schema.Decode()
  )


def trained(made, text, kind, layers, recipe, say):
  """(heads.About, {name: array}) for a loop.Generator.

  Args:
    text: Text. kind, layers, recipe, say: as for distill.train.
  """
  length, tokenizer = recipe.length, made.tokenizer
  model_checks.need_causal(made.built.model.config, 'paraxis draft')
  if text.own:
    found = written(made, text, length, say)
  else:
    found = rows(tokenizer, text.path, False, text.tokens, length)
  with build.use(made.built):
    return distill.train(
      made.built.model, made.params, tokenizer, found, kind, layers, recipe, say
    )
