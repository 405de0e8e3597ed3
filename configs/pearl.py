"""PEARL: the draft model goes on while the model judges

paper: arXiv:2408.11850
mechanism: decode/drafters.py, sharding/planner/events.py
test: tests/decode/test_methods.py,
  tests/train/claims/decode/test_makespan.py
run: paraxis reproduce pearl
cost: 60 CPU-seconds
expect: TODO
differs: TODO
"""

from paraxis.configs import presets

METHOD = dict(method='pearl', drafts=3, draft_layers=1)


def get_config():
  """A small decoder on bytes."""
  return presets.tiny(num_layers=2, window=16)


def claims():
  """What `paraxis reproduce pearl` checks."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import makespan

  text = dict(
    check=lossless.same_text, method=METHOD,
    changes=[{}, {'model.pattern': 'WFN'}], prompts=20, new=24,
    random_draft='',
  )  # fmt: skip
  joint = dict(
    check=lossless.same_distribution, method=METHOD, changes={}, letters=4,
    length=4, samples=40_000, random_draft='',
  )  # fmt: skip
  faster = dict(
    check=makespan.pearl,
    probabilities=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95], ratios=[4, 6, 8, 10],
    at=0.95, at_least=1.3, tokens=20_000, seed=0, longest=24,
  )  # fmt: skip
  return [
    ('texts of one by one', 'EQ', text, None),
    ('joint of 4 tokens', 'EQ', joint, None),
    ('makespan of plain speculation', 'SIM', faster, '1.52, measured'),
  ]


def knockouts():
  """A draft is kept that is not the draw; drafts wait for the call."""
  from paraxis.train.claims.decode import lossless
  from paraxis.train.claims.decode import makespan

  return [
    ('keeps_one_more', 'texts of one by one', lossless.keeps_one_more),
    ('keeps_too_much', 'joint of 4 tokens', lossless.keeps_one_more),
    ('in_turn', 'makespan of plain speculation', makespan.in_turn),
  ]
