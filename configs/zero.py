"""ZeRO: what data-parallel training repeats, divided

paper: arXiv:1910.02054
mechanism: sharding/rules.py, train/step.py, train/optimizers.py
test: tests/train/test_claims_layouts.py, tests/train/test_claims_memory.py
run: paraxis reproduce zero
expect: tbd
differs: tbd
"""

from paraxis.configs import schema

# 36 layers of 4096: the 7.5B model of arXiv:2104.04473 (table 1).
PAPER = dict(
  d_model=4096, d_ff=16384, num_layers=36, num_heads=32, vocab_size=51200,
  tied_embedding=True,
)  # fmt: skip
BILLION = dict(
  d_model=2048, d_ff=8192, num_layers=24, num_heads=16, vocab_size=32768,
  tied_embedding=True,
)  # fmt: skip


def get_config():
  """A small GPT on data=8, optimizer state and gradients sharded (stage 2)."""
  config = schema.default()
  config.mesh.data = 8
  config.mesh.zero = 2
  config.mesh.collectives = 'explicit'

  model = config.model
  model.vocab_size = 256
  model.d_model, model.d_ff = 128, 512
  model.num_layers, model.num_heads = 8, 4
  model.mlp = 'gelu'
  model.tied_embedding = False

  config.data.tokenizer = 'bytes'
  config.data.sequence_length = 64
  config.train.batch_size = 16
  config.train.microbatches = 2
  return config


def claims():
  """What `paraxis reproduce zero` checks."""
  mesh = dict(mesh='data=8')
  held = mesh | dict(
    check='claims_memory.zero_memory',
    bytes_per_parameter=[16, 9, 5.5, 2],
    within=0.02,
  )
  table = dict(
    check='claims_memory.zero_published',
    model=PAPER,
    devices=64,
    widths=[2, 2, 12],
    gigabytes=[120, 31.4, 16.6, 1.88],
    within=0.015,
  )
  machines = dict(
    check='claims_memory.zero_compiled',
    model=BILLION,
    topologies=['v5p:2x2x2', 'v5p:4x4x4'],
    within=0.01,
  )
  volume = mesh | dict(
    check='claims_layouts.zero_volume', volumes=[2, 2, 2, 3], within=0.05
  )
  equal = mesh | dict(
    check='claims_layouts.zero_trajectories', steps=4, within=1e-9
  )
  return [
    ('parameters after 4 steps', 'EQ', equal, None),
    ('bytes held by stage, real arrays', 'HLO', held, '16 5.5 3.75 2'),
    ('bytes sent by stage', 'HLO', volume, '2 2 2 3'),
    ('GB of 7.5B parameters on 64', 'SIM', table, '120 31.4 16.6 1.9'),
    ('GB of 1.3B on TPUs', 'AOT', machines, None),
  ]
