"""OneFlow: split, broadcast, partial, and the bytes a conversion moves

paper: arXiv:2110.15032
mechanism: sharding/planner/conversions.py, sharding/planner/signatures.py
test: tests/sharding/planner/test_conversions.py,
  tests/sharding/planner/test_signatures.py,
  tests/train/claims/layouts/test_conversions.py
run: paraxis reproduce oneflow
cost: 8 CPU-seconds
expect: EQ 14 of 14 conversions move what table 2 says, 12 of 12 over two axes
  what was declared; values within 3e-15; (column, row) declares the fewest
  bytes of the 4 pairs; 2 -> 1 all-reduces, equal to one device within 2e-15 in
  float64 (bounds 1e-12, 1e-9).
partial: signatures and conversions are in claims only; training places arrays
  by sharding/annotate.py and sharding/rules.py.
differs: layouts are chosen per product by the caller, not by a compiler for a
  whole graph; the cheapest is chosen by bytes, links weigh the same. The
  parallel block is a function of the claim, counted forward. No actors: the
  slots of a pipeline play the role of their credits. Table 2 from memory.
  Nothing is timed.
"""

from paraxis.configs import schema


def get_config():
  """A small decoder; the claims use its widths."""
  config = schema.default()
  config.mesh.tensor = 8
  config.model.update(d_model=128, d_ff=512, num_heads=8, num_layers=2)
  config.data.sequence_length = 64
  config.train.batch_size = 2
  return config


def claims():
  """What `paraxis reproduce oneflow` checks."""
  from paraxis.train.claims.layouts import conversions

  shape = (64, 32)
  totals = {
    'S(0) -> S(0)': 0, 'S(0) -> S(1)': 7 / 8, 'S(1) -> S(0)': 7 / 8,
    'S(0) -> B': 7, 'S(1) -> B': 7, 'S(0) -> P': 0, 'B -> S(0)': 0,
    'B -> S(1)': 0, 'B -> B': 0, 'B -> P': 0, 'P -> S(0)': 7, 'P -> S(1)': 7,
    'P -> B': 14, 'P -> P': 0,
  }  # fmt: skip
  both = [
    'data:S(0) tensor:S(0) -> B',
    'data:S(0) tensor:S(0) -> tensor:S(0)',
    'data:S(0) tensor:S(0) -> tensor:S(0) data:S(0)',
    'data:S(0) tensor:S(1) -> tensor:S(0) data:S(1)',
    'data:S(0) tensor:S(1) -> data:S(0)',
    'data:P tensor:P -> B',
    'data:P tensor:P -> data:S(0) tensor:S(1)',
    'data:P tensor:S(1) -> data:S(0) tensor:S(1)',
    'data:S(1) tensor:P -> tensor:S(1)',
    'data:S(0) -> data:P tensor:S(1)',
    'tensor:S(0) -> data:P tensor:P',
    'B -> tensor:S(0) data:S(0)',
  ]
  one = dict(check=conversions.conversion_totals, size=8, shape=shape)
  two = dict(mesh='data=2,tensor=4', shape=shape, conversions=both)
  declared = dict(check=conversions.conversions_declared)
  equal = dict(check=conversions.conversions_equal, within=1e-12)
  pair = dict(check=conversions.cheapest_pair, size=8, rows=128)
  sums = dict(check=conversions.deferred_sums, mesh='tensor=8')
  sums_equal = dict(
    check=conversions.deferred_sums_equal, mesh='tensor=8', within=1e-9
  )
  return [
    ('bytes of 14 conversions', 'HLO', one | dict(totals=totals), 'table 2'),
    ('two axes: declared is counted', 'HLO', declared | two, None),
    ('two axes: values', 'EQ', equal | two, None),
    ('weights of an mlp that move least', 'SIM', pair, None),
    ('all-reduces of a parallel block', 'HLO', sums, None),
    ('that block, and its gradients', 'EQ', sums_equal, None),
  ]


def knockouts():
  """Conversions through the whole tensor, declared or not; sums where they
  arise, or never made."""
  from paraxis.train.claims.layouts import conversions

  return [
    ('direct_conversions', 'bytes of 14 conversions', conversions.by_broadcast),
    ('declared', 'two axes: declared is counted', conversions.whole_tensors),
    ('sums_of_terms', 'two axes: values', conversions.terms_apart),
    ('terms', 'weights of an mlp that move least', conversions.no_partial_sums),
    ('block_sums', 'that block, and its gradients', conversions.terms_apart),
    (
      'deferred_sums',
      'all-reduces of a parallel block',
      conversions.sums_at_once,
    ),
  ]
