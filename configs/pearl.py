"""PEARL: the draft model goes on while the model judges

paper: arXiv:2408.11850
mechanism: decode/drafts/drafters.py
test: tests/decode/test_methods.py, tests/train/claims/decode/test_makespan.py
run: paraxis reproduce pearl
cost: 80 CPU-seconds
expect: EQ greedy and drawn texts of 20 prompts are those of decoding one by
  one, float64, two patterns; the joint of 4 tokens, chi-square p .003 (the
  texts are the same, so it is that of one by one); SIM, direction only, 1.32 to
  1.35 x plain speculation at its best length, acceptance .95, c = 4 to 10 (the
  paper: 1.52, measured); at .9: 1.22 to 1.32, at .8: 1.06 to 1.25, at .6: .92
  to 1.13, at .5: .91 to 1.08: it loses where much is rejected and the draft
  model is fast.
differs: one process: drafts are made before the call that they would run
  beside, so that calls are right and time is not gained; makespans are
  simulated, with every draft accepted on its own. Our judge is replay alone,
  whose drafts are drawn by the noise of the tokens; the paper's judges by
  ratios. The length of drafts is fixed, c in the simulation. A draft model with
  a recurrence is refused: its states of two calls would have to be kept. Small
  models with random parameters.
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

  text = lossless.texts(METHOD, [{}, {'model.pattern': 'WFN'}])
  joint = lossless.joint(METHOD)
  faster = dict(
    check=makespan.pearl,
    probabilities=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95], ratios=[4, 6, 8, 10],
    at=0.95, at_least=1.3, tokens=20_000, seed=0, longest=24,
    published=dict(at_least=1.52, probabilities=[0.95]),
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
    (
      'keeps_too_much',
      'joint of 4 tokens',
      lossless.keeps_one_more,
      lossless.TENTH,
    ),
    ('in_turn', 'makespan of plain speculation', makespan.in_turn),
  ]
