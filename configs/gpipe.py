"""GPipe: microbatches through stages, forwards first, then backwards

paper: arXiv:1811.06965
mechanism: sharding/pipeline/schedules.py, sharding/pipeline/executor.py,
  sharding/planner/simulate.py
test: tests/train/claims/pipeline/test_schedules.py,
  tests/train/claims/pipeline/test_step.py
run: paraxis reproduce gpipe
cost: 35 CPU-seconds
expect: EQ 4e-15; SIM a bubble of (K - 1) / M over ideal time, which is (K - 1)
  / (M + K - 1) of all of it, exactly, in lock step too; 19% of the time at M =
  4 K, below 1 / 5 by the formula, direction only (the paper: negligible); M
  inputs held; HLO three inputs of a stage more for each microbatch, and none in
  1F1B; recomputing takes 0.10 of what storing takes.
differs: negligible is taken as 5%, and recomputing is held to 0.15 of storing:
  both bounds are ours, for the paper counts M inputs and the layers of a stage
  without their sizes. Every stage holds the same number of layers, or one
  fewer; costs of cells are not searched over. No batch norm. The forward and
  the backward pass of a microbatch are phases of one program on all stages,
  idle or not, so no time can be measured on virtual devices. Temporaries are
  those of a program compiled for CPU. No AmoebaNet, no translation.
"""

from paraxis.configs import presets


def get_config():
  """A small decoder on stage=4,data=2, eight microbatches."""
  config = presets.tiny(d_ff=256, num_layers=4)
  config.mesh.update(stage=4, data=2)
  config.pipeline.update(schedule='gpipe', microbatches=8)
  config.train.batch_size = 16
  return config


def claims():
  """What `paraxis reproduce gpipe` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.pipeline import schedules
  from paraxis.train.claims.pipeline import step

  table = lambda check, **given: dict(check=check, schedule='gpipe', **given)
  stored = {'pipeline.activations': 'store'}
  equal = experiment.on_layouts(
    'stage=4,data=2',
    {'mesh': 'stage=2,data=2,tensor=2'} | stored,
    {'mesh': 'stage=4', 'model.num_layers': 6},
  )
  grid = [[p, m, 1] for p in (2, 4, 8) for m in (8, 32, 128)]
  bubble = table(schedules.bubbles, cases=grid, share=1, model='asynchronous')
  locked = bubble | dict(model='lock_step')
  small = table(
    schedules.bubble_share, per_stage=4, stages=[2, 4, 8, 16],
    at_most=1 / 5, published=dict(at_most=0.05),
  )  # fmt: skip
  held = table(
    schedules.inputs_held,
    cases=[[4, 8, 1, 8], [4, 32, 1, 32], [8, 64, 1, 64]],
    balanced=True,
  )
  memory = dict(
    check=step.temporaries,
    mesh='stage=4', rows=2, microbatches=[8, 16, 32],
    grows={'gpipe': True, 'one_f_one_b': False},
  )  # fmt: skip
  kept = dict(
    check=step.rematerialised,
    mesh='stage=4', rows=2, microbatches=32, schedule='gpipe', at_most=0.15,
  )  # fmt: skip
  return [
    ('equal to one device', 'EQ', equal, None),
    ('bubble over ideal time', 'SIM', bubble, '(K-1)/(M+K-1) of all'),
    ('the same in lock step', 'SIM', locked, None),
    ('share of the time at M = 4 K', 'SIM', small, 'negligible'),
    ('inputs of stages held at once', 'SIM', held, 'M'),
    ('memory for each microbatch more', 'HLO', memory, None),
    ('recomputing over storing', 'HLO', kept, None),
  ]


def knockouts():
  """A batch that is not split, 1F1B in GPipe's place, memory without remat."""
  from paraxis.train.claims.pipeline import schedules
  from paraxis.train.claims.pipeline import step

  split, grows = schedules.one_microbatch, 'memory for each microbatch more'
  return [
    ('microbatches', 'share of the time at M = 4 K', split),
    ('splitting', 'bubble over ideal time', split),
    ('splitting_in_lock_step', 'the same in lock step', split),
    ('forwards_first', grows, schedules.plain_1f1b),
    ('recomputing', 'recomputing over storing', step.stored),
    (
      'all_forwards_first',
      'inputs of stages held at once',
      {'schedule': 'one_f_one_b'},
    ),
  ]
