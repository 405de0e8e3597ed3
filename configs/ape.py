"""APE: contexts read alone, by one query all at once

paper: arXiv:2502.05431
mechanism: decode/parallel_contexts.py, decode/cache.py, models/mixers/slots.py
test: tests/decode/test_parallel_contexts.py, tests/decode/test_forks.py,
  tests/train/claims/decode/test_parallel_contexts.py
run: paraxis reproduce ape
cost: 330 CPU-seconds
expect: EQ 1e-15 for one context with T = S = 1 against one pass, and for three
  contexts in any order with T = S = 0.9, random weights, float64; 96 tokens of
  keys for 8 contexts of 8 and a prefix of 32 (320 if each had its own). SIM,
  direction only, 7.6 x fewer tokens read (the paper: 28 x less time of prefill
  at 128k), 8,736 instead of 66,304 for 8 queries over 8 contexts of 1,024, each
  in an order of its own, by a formula that is right for contexts of 9, where
  the tokens given to a model are counted (125, 664). LEARN, SmolLM2, perplexity
  of 32 tokens after 8 contexts of 32: sequential 27.50, T = S = 1 44.92, T = S
  = 0.9 41.91, the best pair for 3 other texts (T 0.7, S 0.9) 41.41, no contexts
  94.33: 0.17 of what naive reading loses, in nats, is gained back.
partial: contexts that are read apart are in claims only, no command takes them.
differs: contexts are consecutive parts of one text, 12 texts and 384 tokens in
  all, no retrieval and no examples; that is far from sequential. The bound of
  0.1 is ours. The temperature and the weight are of contexts alone: the query's
  own tokens and the prefix are joined to them with their plain lse. Tokens are
  counted, no time; a step copies the rows of all contexts in every layer.
"""

from paraxis.configs import presets

SMALL = [5, 9, 6]  # tokens of the prefix, a context and the query
NONE, PAPER = [1.0, 1.0], [0.9, 0.9]
LONG, REAL = [32, 1024, 64], [8, 32, 33]
GRID = [[t, s] for t in (0.5, 0.7, 0.9) for s in (0.7, 0.9, 1.1)] + [NONE]


def get_config():
  """A small decoder on bytes."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce ape` checks."""
  from paraxis.train.claims.decode import parallel_contexts as contexts

  one = dict(check=contexts.one_context, sizes=SMALL, how=NONE)
  order = dict(check=contexts.any_order, count=3, sizes=SMALL, how=PAPER)
  keys = dict(check=contexts.keys_stored, count=8, sizes=[32, 8, 4])
  read = dict(
    check=contexts.prefill, count=8, small=SMALL, sizes=LONG, queries=8,
    above=1, published=dict(above=28),
  )  # fmt: skip
  real = dict(
    check=contexts.perplexity, count=8, sizes=REAL, texts=12, others=3,
    grid=GRID, share=0.1,
  )  # fmt: skip
  return [
    ('one context, T = S = 1', 'EQ', one, None),
    ('contexts in any order', 'EQ', order, None),
    ('keys of the prefix are stored once', 'EQ', keys, None),
    ('tokens read', 'SIM', read, '28 x less prefill'),
    ('perplexity of SmolLM2', 'LEARN', real, None),
  ]


def knockouts():
  """A temperature and a weight; a position too late; contexts that see each
  other; a prefix for each; contexts read for each query, or for one; no
  temperature and weight."""
  from paraxis.train.claims.decode import parallel_contexts as contexts

  few = {'grid': [NONE], 'texts': 2, 'others': 1}
  return [
    ('cooled', 'one context, T = S = 1', {'how': PAPER}),
    ('shifted', 'one context, T = S = 1', contexts.shifted),
    ('see_each_other', 'contexts in any order', contexts.see_each_other),
    ('prefix_each', 'keys of the prefix are stored once', contexts.prefix_each),
    ('read_anew', 'tokens read', contexts.read_anew),
    ('one_query', 'tokens read', {'queries': 1}),
    ('not_cooled', 'perplexity of SmolLM2', few),
  ]
