"""Text for a draft, and its training (decode/distill.py)."""

import dataclasses
import itertools

import jax

from paraxis.configs import schema
from paraxis.decode import distill
from paraxis.models import build
from paraxis.train.data import corpus

LONGEST = 4  # rows of one document


def rows(tokenizer, path, held, tokens, length):
  """(N, length) int32 of the training or the held-out part of a text.

  Args:
    path: as config.data.path. tokens: at most so many are taken, of each domain
      in turn.
  """
  domains: dict = {}
  for document in corpus.documents(path):
    if document.held == held:
      domains.setdefault(document.domain, []).append(document.text)
  # One document of each domain in turn, until there are enough tokens.
  turns = itertools.zip_longest(*(domains[d] for d in sorted(domains)))
  taken, count = [], 0
  for text in filter(None, itertools.chain.from_iterable(turns)):
    if count >= tokens:
      break
    ids = tokenizer.encode(text)[: LONGEST * length]
    taken.append([tokenizer.bos_id(None), *ids])
    count += len(taken[-1])
  return distill.rows_of(taken, length)[: max(tokens // length, 1)]


def alone(opened):
  """schema.Config of a load.Checkpoint: float32, on one device of all."""
  config = schema.view(opened.config())
  config = schema.with_value(config, 'model.dtype', 'float32')
  return dataclasses.replace(config, mesh=schema.Mesh(data=1))


def trained(opened, path, tokens, kind, layers, recipe, say):
  """(heads.About, {name: array}) for a load.Checkpoint or load.Weights.

  Args:
    path: of text, as config.data.path. tokens: of it, at most.
    kind, layers, recipe, say: as for distill.train.
  """
  built, params, tokenizer, _ = opened.parts(alone(opened))
  with build.use(built):
    params = jax.jit(built.model.unstack)(params)
    text = rows(tokenizer, path, False, tokens, recipe.length)
    return distill.train(
      built.model, params, tokenizer, text, kind, layers, recipe, say
    )
