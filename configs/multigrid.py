"""Multigrid training: rows cut short and long in turn, as many tokens

paper: arXiv:1912.00998
mechanism: train/data/shape_cycle.py
test: tests/train/data/test_shape_cycle.py,
  tests/train/claims/attention/test_shapes.py
run: paraxis reproduce multigrid
cost: 800 CPU-seconds
expect: EQ 1e-15 of whole rows whose documents end where a row is cut; LEARN, 3
  seeds, bits per byte of whole held-out rows: the cycle 2.731, 0.079 +-0.012
  below whole rows of as many operations (2.810). NOT REPRODUCED: the loss of
  whole rows of as many tokens, 2.705, for 78% of their operations: the cycle
  is 0.026 +-0.017 above it; CPU 0.72 of the CPU-seconds of whole rows,
  direction only (the paper: 0.22).
differs: text, not video: of a clip's frames, height and width, all of which the
  paper scales, a row has its length alone, and only attention costs less in a
  shorter one: the paper's training is 4.5 times as fast, with batches of more
  clips and fewer steps. As many tokens in every step, so the learning rate is
  not scaled. Long cycles without short ones, two, and a quarter of the steps
  whole at last. 154 thousand parameters, a row of 2,048 tokens a step.
"""

from paraxis.configs import presets

# Twice from short rows to whole ones, and whole at last.
CYCLE = '8:45,4:45,2:45,1:45,8:45,4:45,2:45,1:45,1'
FAMILIES = {
  'cycle': {'train.shape_cycle': CYCLE},
  'constant': {'train.shape_cycle': ''},
  # Of as many operations as the cycle, not as many tokens.
  'constant, fewer steps': {'train.shape_cycle': '', 'train.steps': 372},
}


def get_config():
  """154K parameters; a row of 2,048 tokens a step, in 8, 4, 2 or 1 pieces."""
  config = presets.replicas('data parallel')
  config.mesh.replica = 1
  config.data.sequence_length = 2048
  config.train.update(steps=480, batch_size=1, eval_batches=0, eval_every=0)
  config.train.shape_cycle = CYCLE
  return config


def claims():
  """What `paraxis reproduce multigrid` checks."""
  from paraxis.train.claims.attention import shapes

  equal = dict(
    check=shapes.equals, mesh='data=2,context=2,tensor=2', pieces=2,
    within=1e-9,
  )  # fmt: skip
  learn = dict(
    check=shapes.cheaper, families=FAMILIES, fields={}, seeds=[0, 1, 2]
  )
  same = dict(
    better=[['cycle', 'constant', 0.0]], at_most={'cycle': ['constant', 0.8]},
    admits='not reproduced',
  )  # fmt: skip
  more = dict(
    better=[['cycle', 'constant, fewer steps', 0.0]],
    at_most={'cycle': ['constant, fewer steps', 1.01]},
  )
  fewer = dict(
    check=shapes.seconds, rounds=5, at_most=0.9, published=dict(at_most=0.22),
    families={n: FAMILIES[n] for n in ('cycle', 'constant')},
    steps=16,
  )  # fmt: skip
  return [
    ('a cut row is one whose documents end', 'EQ', equal, None),
    ('the loss of whole rows, fewer operations', 'LEARN', learn | same, None),
    ('more than as many operations teach', 'LEARN', learn | more, None),
    ('CPU-seconds of a cycle over whole rows', 'CPU', fewer, '0.22'),
  ]


def knockouts():
  """Pieces of every k-th token, or with targets of others; whole rows in every
  step."""
  from paraxis.train.claims.attention import shapes

  equal, _, more, fewer = (name for name, *_ in claims())
  both = dict.fromkeys(('cycle', 'constant'), FAMILIES['constant'])
  return [
    ('strided', equal, shapes.strided),
    ('other_targets', more, shapes.other_targets, {'seeds': [0]}),
    ('whole_steps', fewer, {'families': both}),
  ]
