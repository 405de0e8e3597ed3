"""APE: contexts read alone, by one query all at once

paper: arXiv:2502.05431
mechanism: decode/parallel_contexts.py, decode/cache.py, models/mixers/slots.py
test: tests/decode/test_parallel_contexts.py, tests/decode/test_forks.py,
  tests/train/claims/decode/test_parallel_contexts.py
run: paraxis reproduce ape
cost: 90 CPU-seconds
expect: EQ 1e-15 for one context with T = S = 1 against one pass, and for three
  contexts in any order with T = S = 0.9, random weights, float64; 96 tokens of
  keys for 8 contexts of 8 and a prefix of 32 (320 if each had its own). SIM
  8,736 tokens read instead of 66,304 for 8 queries over 8 contexts of 1,024,
  each in an order of its own.
partial: no perplexity or accuracy is measured, so nothing is said of what a
  model loses by it, nor of T = S = 0.9 against T = S = 1.
differs: the temperature and the weight are of contexts alone: the query's own
  tokens and the prefix are joined to them with their plain lse. Tokens are
  counted, no time; a step copies the rows of all contexts in every layer.
"""

from paraxis.configs import presets

SMALL = [5, 9, 6]  # tokens of the prefix, a context and the query
NONE, PAPER = [1.0, 1.0], [0.9, 0.9]
LONG = [32, 1024, 64]


def get_config():
  """A small decoder on bytes."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce ape` checks."""
  from paraxis.train.claims.decode import parallel_contexts as contexts

  one = dict(check=contexts.one_context, sizes=SMALL, how=NONE)
  order = dict(check=contexts.any_order, count=3, sizes=SMALL, how=PAPER)
  keys = dict(check=contexts.keys_stored, count=8, sizes=[32, 8, 4])
  read = dict(check=contexts.prefill, count=8, sizes=LONG, queries=8)
  return [
    ('one context, T = S = 1', 'EQ', one, None),
    ('contexts in any order', 'EQ', order, None),
    ('keys of the prefix are stored once', 'EQ', keys, None),
    ('tokens read', 'SIM', read, '28 x less prefill'),
  ]


def knockouts():
  """A temperature and a weight; a position too late; contexts that see each
  other; a prefix for each; no temperature and weight."""
  from paraxis.train.claims.decode import parallel_contexts as contexts

  return [
    ('cooled', 'one context, T = S = 1', {'how': PAPER}),
    ('shifted', 'one context, T = S = 1', contexts.shifted),
    ('see_each_other', 'contexts in any order', contexts.see_each_other),
    ('prefix_each', 'keys of the prefix are stored once', contexts.prefix_each),
    ('one_query', 'tokens read', {'queries': 1}),
  ]
