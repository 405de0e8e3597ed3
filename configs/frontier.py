"""Frontier: what each knob of a layout does to memory and messages

paper: arXiv:2312.12705
mechanism: sharding/predict.py, sharding/liveness.py, train/check.py
test: tests/train/test_claims_memory.py, tests/sharding/test_predict.py
run: paraxis reproduce frontier
expect: tbd
differs: tbd
"""

from paraxis.configs import schema

CHIPS = 512
# Depth, width and heads (table 1).
MODELS = {
  '22B': dict(num_layers=48, d_model=6144, d_ff=24576, num_heads=48),
  '175B': dict(num_layers=96, d_model=12288, d_ff=49152, num_heads=96),
  '1T': dict(num_layers=128, d_model=25600, d_ff=102400, num_heads=128),
}


def get_config():
  """22B on 512 chips: tensor=8 in a node, data=64 with ZeRO-1."""
  config = schema.default()
  config.mesh.data, config.mesh.tensor = 64, 8
  config.mesh.zero = 1
  config.mesh.collectives = 'explicit'

  config.model.update(MODELS['22B'])
  config.model.vocab_size = 51200
  config.model.mlp = 'gelu'
  config.model.dtype = 'bfloat16'
  config.model.attention_block = 512

  config.data.sequence_length = 2048
  config.train.batch_size = 1024
  config.train.remat = 'full'
  return config


def claims():
  """What `paraxis reproduce frontier` checks."""
  both = {name: MODELS[name] for name in ('22B', '175B')}
  on = lambda tensor, **more: (
    dict(tensor=tensor, data=CHIPS // tensor, zero=1, batch_size=1024) | more
  )
  ratios = lambda base, *steps, within=0.03, **found: dict(
    check='claims_memory.predicted_ratios',
    models=both,
    base=base,
    steps=list(steps),
    ratios=found,
    within=within,
  )
  tensor = ratios(
    on(2),
    *(dict(tensor=n, data=CHIPS // n) for n in (4, 8, 16)),
    tensor=[3, 7, 15],
    data=[1 / 2, 1 / 4, 1 / 8],
    parameters=[1 / 2, 1 / 4, 1 / 8],
  )
  zero = ratios(
    on(8, zero=0, microbatches=4),
    *(dict(zero=stage) for stage in (1, 2, 3)),
    optimizer=[1 / 64] * 3,
    parameters=[1, 1, 1 / 64],
    tensor=[1, 1, 1],
  )
  rows = ratios(
    on(8, microbatches=4),
    *(dict(microbatches=n) for n in (2, 1)),
    activations=[2, 4],
    tensor=[1, 1],
    within=0.08,
  )
  more = [dict(batch_size=64 * n, microbatches=n) for n in (4, 16)]
  one = on(8, batch_size=64, microbatches=1)
  accumulated = ratios(one, *more, data=[1, 1], tensor=[4, 16])
  fsdp = one | dict(fsdp=64, data=1, zero=0)
  gathered = ratios(fsdp, *more, fsdp=[4, 16], tensor=[4, 16])
  inside = dict(
    check='claims_memory.axis_within_host',
    axis='tensor',
    chips=CHIPS,
    host=8,
    sizes=[2, 4, 8, 16],
    crosses=[1, 1, 1, 2],
  )
  fits = dict(
    check='claims_memory.predicted_fits',
    models=MODELS,
    layouts=[
      dict(data=64, tensor=8, zero=0, microbatches=16),
      dict(data=64, tensor=8, zero=1, microbatches=16),
      dict(data=64, tensor=8, zero=3, microbatches=16),
    ],
    memory=64e9,
    fits={
      '22B': [True, True, True],
      '175B': [False, False, True],
      '1T': [False, False, True],
    },
  )
  return [
    ('tensor 2 to 4, 8, 16', 'SIM', tensor, None),
    ('hosts that a tensor group spans', 'SIM', inside, 'tensor <= 8'),
    ('ZeRO 0 to 1, 2, 3', 'SIM', zero, None),
    ('rows of a microbatch 4 to 8, 16', 'SIM', rows, None),
    ('accumulation 1 to 4, 16', 'SIM', accumulated, None),
    ('accumulation 1 to 4, 16, on fsdp', 'SIM', gathered, None),
    ('what fits without a pipeline', 'SIM', fits, None),
  ]
