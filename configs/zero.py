"""ZeRO: optimizer state, gradients and parameters sharded over data

paper: arXiv:1910.02054
mechanism: sharding/rules.py, train/steps/gradients.py,
  train/updates/optimizers.py
test: tests/train/claims/layouts/test_step.py,
  tests/train/claims/layouts/test_memory.py
run: paraxis reproduce zero
cost: 60 CPU-seconds
expect: EQ 5e-14 after 4 steps; HLO 16, 9, 5.5, 2 bytes a parameter on 8
  devices, the paper's formula at our 4 + 4 + 8 (at its 2 + 2 + 12: 16, 5.5,
  3.75, 2), and 2, 2, 2, 2.96 Psi sent (the paper: 3; tables are gathered once);
  SIM 119, 31.2, 16.5, 1.87 GB of 7.5B on 64 (the paper: 120, 31.4, 16.6, 1.9);
  AOT 0.1% off the formula for 1.3B on 8 and 64 chips, which needs libtpu.
differs: float32, 4 + 4 + 8 bytes for a parameter, its gradient and its state,
  not 2 + 2 + 12; gradients leave the step sharded from stage 1 on, their sums
  over microbatches are whole until stage 2; no buckets: below stage 3 the
  gradient of one microbatch is whole for a moment. Each further microbatch
  moves Psi more at stage 2, 3 Psi at stage 3. Messages are those of our own
  collectives on CPU. A TPU compiler may undo them: we saw (and do not claim)
  all-reduces in place of the scatters on v5p:2x2x2, and stage 2 turned into
  stage 1 on v5e:2x4. The 7.5B shape is Megatron's. Of ZeRO-R only sharded
  activations are here (mesh.sequence); no throughput.
"""

from paraxis.configs import presets

# Depth, width, heads, vocabulary; the first is of arXiv:2104.04473 (table 1).
SHAPES = {'7.5B': (36, 4096, 32, 51200), '1.3B': (24, 2048, 16, 32768)}


def get_config():
  """A small GPT on data=8, optimizer state and gradients sharded (stage 2)."""
  config = presets.tiny(vocab_size=256, d_model=128, d_ff=512, num_layers=8)
  config.model.update(mlp='gelu', tied_embedding=False)
  config.mesh.update(data=8, zero=2, collectives='explicit')
  config.train.update(batch_size=16, microbatches=2)
  return config


def claims():
  """What `paraxis reproduce zero` checks."""
  from paraxis.train.claims.layouts import memory
  from paraxis.train.claims.layouts import step

  shapes = {
    name: {
      'model.num_layers': layers, 'model.d_model': d, 'model.d_ff': 4 * d,
      'model.num_heads': heads, 'model.vocab_size': vocabulary,
      'model.tied_embedding': True,
    }
    for name, (layers, d, heads, vocabulary) in SHAPES.items()
  }  # fmt: skip
  equal = dict(
    check=step.zero_trajectories,
    mesh='data=8', stages=[0, 1, 2, 3], steps=4, within=1e-9,
  )  # fmt: skip
  held = dict(
    check=memory.zero_memory,
    mesh='data=8', within=0.02,
    bytes_per_parameter=[4 + 4 + 8, 4 + 4 + 8 / 8, 4 + 12 / 8, 16 / 8],
  )  # fmt: skip
  volume = dict(
    check=step.zero_volume,
    mesh='data=8', volumes=[2, 2, 2, 3], within=0.05,
  )  # fmt: skip
  table = dict(
    check=memory.zero_published,
    model=shapes['7.5B'], devices=64, widths=[2, 2, 12],
    gigabytes=[120, 31.4, 16.6, 1.88], within=0.015,
  )  # fmt: skip
  machines = dict(
    check=memory.zero_compiled,
    model=shapes['1.3B'], topologies=['v5p:2x2x2', 'v5p:4x4x4'], within=0.01,
  )  # fmt: skip
  return [
    ('parameters after 4 steps', 'EQ', equal, None),
    (
      'bytes held by stage, real arrays',
      'HLO',
      held,
      '16 9 5.5 2 of 4 + 4 + 8',
    ),
    ('bytes sent by stage', 'HLO', volume, '2 2 2 3'),
    ('GB of 7.5B parameters on 64', 'SIM', table, '120 31.4 16.6 1.9'),
    ('GB of 1.3B on TPUs', 'AOT', machines, None),
  ]


def knockouts():
  """Nothing but parameters is sharded, or not them; gradients stay where they
  arise."""
  from paraxis.train.claims.layouts import memory
  from paraxis.train.claims.layouts import step

  off, small = memory.zero_off, {'topologies': ['v5p:2x2x2']}
  return [
    ('summed_gradients', 'parameters after 4 steps', step.own_gradients),
    ('sharded_parameters', 'bytes sent by stage', memory.parameters_whole),
    ('sharded_on_tpus', 'GB of 1.3B on TPUs', off, small),
    ('sharded_state', 'GB of 7.5B parameters on 64', off),
    ('sharded_arrays', 'bytes held by stage, real arrays', off),
  ]
