"""PanGu-alpha: data, tensor, pipeline, optimizer parallelism and remat

paper: arXiv:2104.12369
mechanism: sharding/rules.py, models/memory.py, train/certify/verify.py
test: tests/train/claims/layouts/test_step.py,
  tests/train/claims/layouts/test_memory.py,
  tests/train/claims/pipeline/test_step.py
run: paraxis reproduce pangu
expect: EQ 2e-15 in all 16 combinations, and in 8 on two stages; SIM memory of
  2.6B: 8 times less of activations by data=8, of all classes by tensor=8, of
  parameters and optimizer state by stage=8, of optimizer state by ZeRO-1; 0.057
  of the activations by remat. 75 CPU-seconds.
differs: layouts are named by rules, not searched for; its query layer is not
  here. The matrix runs shrunk to 2 layers in float64; data=8 or tensor=8 alone,
  data=4,tensor=2 together; on stages remat is on in every other of the
  combinations. Bars are predictions of paraxis check for one step of 8 rows,
  state in float32. 200B parameters on 2,048 Ascend 910 are out of reach.
"""

from paraxis.configs import schema


def get_config():
  """PanGu-alpha 2.6B on data=4,tensor=2 with ZeRO-1 and remat."""
  config = schema.default()
  config.mesh.data, config.mesh.tensor = 4, 2
  config.mesh.zero = 1

  model = config.model
  model.vocab_size = 40064  # the paper's 40,000, and room to divide
  model.d_model, model.d_ff = 2560, 10240
  model.num_layers, model.num_heads = 32, 32
  model.norm, model.norm_epsilon = 'layernorm', 1e-5
  model.mlp = 'gelu'
  model.mlp_bias = True
  model.attention_bias = model.attention_output_bias = True
  model.position, model.max_positions = 'learned', 1024
  model.dtype = 'bfloat16'

  config.data.sequence_length = 1024
  config.train.batch_size = 8
  config.train.remat = 'full'
  config.model.loss = 'logits'  # whole, in every layout that is compared
  return config


def claims():
  """What `paraxis reproduce pangu` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.layouts import memory
  from paraxis.train.claims.layouts import step

  equal = dict(check=step.options_equal, devices=8, zero=1, within=1e-9)
  # On two stages: every pair of the other four dimensions, on and off.
  staged = dict(
    check=experiment.equals_one_device, within=1e-9,
    cases=[
      {
        'mesh': f'stage=2,data={data},tensor={tensor}', 'mesh.zero': zero,
        'train.remat': 'full' if (data + tensor + zero) % 2 else 'none',
        'pipeline.microbatches': 2,
      }
      for data in (1, 2) for tensor in (1, 2) for zero in (0, 1)
    ],
  )  # fmt: skip
  one = {'mesh.zero': 0, 'train.remat': 'none'}
  on = lambda **sizes: {f'mesh.{axis}': n for axis, n in sizes.items()}
  bar = lambda base, step, **ratios: dict(
    check=memory.predicted_ratios,
    models={'2.6B': {}},
    base=base,
    steps=[step],
    ratios={name: [ratio] for name, ratio in ratios.items()},
    within=0.03,
  )
  by_data = bar(one, on(data=8), parameters=1, optimizer=1, activations=1 / 8)
  by_tensor = bar(
    one, on(tensor=8), parameters=1 / 8, optimizer=1 / 8, activations=1 / 8
  )
  by_stage = bar(one, on(stage=8), parameters=1 / 8, optimizer=1 / 8)
  sharded = one | on(data=8), on(zero=1)
  by_zero = bar(*sharded, parameters=1, optimizer=1 / 8, activations=1)
  by_remat = dict(
    check=memory.predicted_at_most,
    base=one,
    step={'train.remat': 'full'},
    quantity='activations',
    ratio=0.1,
  )
  return [
    ('every combination equals one device', 'EQ', equal, None),
    ('and eight on two stages', 'EQ', staged, None),
    ('memory of 2.6B: data=8', 'SIM', by_data, None),
    ('memory of 2.6B: tensor=8', 'SIM', by_tensor, None),
    ('memory of 2.6B: stage=8', 'SIM', by_stage, None),
    ('memory of 2.6B: data=8, then ZeRO-1', 'SIM', by_zero, None),
    ('memory of 2.6B: remat', 'SIM', by_remat, None),
  ]
