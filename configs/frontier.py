"""Frontier: the effect of each layout setting on memory and messages

paper: arXiv:2312.12705
mechanism: sharding/meter/predict.py, sharding/pipeline/schedules.py,
  train/certify/check.py
test: tests/train/claims/layouts/test_memory.py,
  tests/train/claims/pipeline/test_schedules.py
run: paraxis reproduce frontier
cost: 40 CPU-seconds
expect: SIM, 22B and 175B on 512 chips: bytes over tensor grow as tensor - 1 at
  a fixed batch (26.8 to 402 GB a step for 22B), those over data shrink as 1 /
  tensor; ZeRO-1 divides optimizer state by data (22.1 to 0.345 GB); rows of a
  microbatch cost activations (as many, within 8%, our bound), not messages;
  accumulation costs none over data, but over fsdp as many as microbatches. With
  stages 175B and 1T fit 64 GB by ZeRO-1; a tensor group of 8 stays in a host as
  devices are placed; time over ideal with 2 to 128 stages rises from 1.01 to
  1.99 at 128 microbatches, and with 4 for each stage from 1.125 to 1.248,
  within the formula's 1/9. No device.
differs: predictions of paraxis check with explicit collectives, state in
  float32; times by the schedule, with free messages; no search. No throughput
  is claimed: the paper reached 38.38% of peak for 22B, 36.14% for 175B, 31.96%
  for 1T. RMSNorm, rotary positions, no biases; vocabulary 51,200 is assumed.
"""

from paraxis.configs import schema

CHIPS = 512
# Depth, width and heads of the three models of the paper.
SHAPES = {
  '22B': (48, 6144, 48), '175B': (96, 12288, 96), '1T': (128, 25600, 128)
}  # fmt: skip
MODELS = {
  name: {
    'model.num_layers': n, 'model.d_model': d, 'model.d_ff': 4 * d,
    'model.num_heads': heads,
  }
  for name, (n, d, heads) in SHAPES.items()
}  # fmt: skip
STAGES = 2, 4, 8, 16, 32, 64, 128
mesh = lambda **sizes: {f'mesh.{a}': n for a, n in sizes.items()}
train = lambda **given: {f'train.{k}': v for k, v in given.items()}
on = lambda n: mesh(tensor=n, data=CHIPS // n)
# 8, 32 and 64 stages of a node each, and accumulation slices.
STAGED = [
  on(8 * p) | mesh(stage=p, tensor=8, zero=1) | train(microbatches=n)
  for p, n in ((8, 2), (32, 8), (64, 16))
]
LARGE = [False, False, True]
LESS, LAST = [1 / 2, 1 / 4, 1 / 8], train(microbatches=16)


def get_config():
  """22B on 512 chips: tensor=8 in a node, data=64 with ZeRO-1."""
  config = schema.default()
  config.mesh.update(data=64, tensor=8, zero=1, collectives='explicit')
  config.update_from_flattened_dict(MODELS['22B'])
  config.model.update(vocab_size=51200, mlp='gelu', dtype='bfloat16')
  config.model.attention_block = 512
  config.data.sequence_length = 2048
  config.train.update(batch_size=1024, remat='full')
  return config


def claims():
  """What `paraxis reproduce frontier` checks."""
  from paraxis.train.claims.layouts import memory
  from paraxis.train.claims.pipeline import schedules

  both = {name: MODELS[name] for name in ('22B', '175B')}
  base = on(8) | mesh(zero=1) | train(batch_size=1024, microbatches=4)
  ratios = lambda base, *steps, within=0.03, **found: dict(
    check=memory.predicted_ratios, models=both, base=base,
    steps=list(steps), ratios=found, within=within,
  )  # fmt: skip
  tensor = ratios(
    base | on(2), on(4), on(8), on(16),
    tensor=[3, 7, 15], data=LESS, parameters=LESS,
  )  # fmt: skip
  inside = dict(
    check=memory.axis_within_host, axis='tensor', host=8,
    meshes=[f'data={CHIPS // n},tensor={n}' for n in (2, 4, 8, 16)],
    crosses=[1, 1, 1, 2],
  )  # fmt: skip
  stages = [mesh(zero=stage) for stage in range(4)]
  zero = ratios(
    base | stages[0], *stages[1:],
    optimizer=[1 / 64] * 3, parameters=[1, 1, 1 / 64], tensor=[1, 1, 1],
  )  # fmt: skip
  fewer = [train(microbatches=n) for n in (2, 1)]
  rows = ratios(base, *fewer, activations=[2, 4], tensor=[1, 1], within=0.08)
  one, *more = (train(batch_size=64 * n, microbatches=n) for n in (1, 4, 16))
  accumulated = ratios(base | one, *more, data=[1, 1], tensor=[4, 16])
  fsdp = base | one | mesh(fsdp=64, data=1, zero=0)
  gathered = ratios(fsdp, *more, fsdp=[4, 16], tensor=[4, 16])
  fits = dict(
    check=memory.predicted_fits, models=MODELS, memory=64e9,
    layouts=[on(8) | LAST | stages[i] for i in (0, 1, 3)],
    fits={'22B': [True] * 3, '175B': LARGE, '1T': LARGE},
  )  # fmt: skip
  staged = fits | dict(
    models={n: MODELS[n] for n in ('175B', '1T')}, layouts=STAGED,
    fits={'175B': [True] * 3, '1T': LARGE},
  )  # fmt: skip
  # 1 + (p - 1) / m: with m = 4 p from 1.125 at p = 2 to less than 1.25.
  times = lambda expected, *cases, within=0.05: dict(
    check=schedules.trend, schedule='one_f_one_b', within=within,
    cases=[list(c) for c in cases], expected=expected,
  )  # fmt: skip
  slower = times('rises', *((p, 128) for p in STAGES))
  constant = times('constant', *((p, 4 * p) for p in STAGES), within=1 / 9)
  saturates = times('falls', *((16, m) for m in (16, 64, 256, 512, 1024)))
  return [
    ('tensor 2 to 4, 8, 16', 'SIM', tensor, None),
    ('hosts that a tensor group spans', 'SIM', inside, 'tensor <= 8'),
    ('ZeRO 0 to 1, 2, 3', 'SIM', zero, None),
    ('rows of a microbatch 4 to 8, 16', 'SIM', rows, None),
    ('accumulation 1 to 4, 16', 'SIM', accumulated, None),
    ('accumulation 1 to 4, 16, on fsdp', 'SIM', gathered, None),
    ('what fits without a pipeline', 'SIM', fits, None),
    ('what fits on 8, 32, 64 stages', 'SIM', staged, None),
    ('time, more stages', 'SIM', slower, 'rises'),
    ('time, more stages, 4 microbatches each', 'SIM', constant, 'constant'),
    ('time, more microbatches', 'SIM', saturates, 'saturates'),
  ]


def knockouts():
  """Tensor over hosts, or not over layers; no ZeRO, or one that sums gradients
  in each microbatch; rows, parameters and microbatches that do not change."""
  from paraxis.train.claims.layouts import memory
  from paraxis.train.claims.pipeline import schedules

  fixed = [[p, 128] for p in STAGES]
  flat = [layout | mesh(stage=1, data=CHIPS // 8) for layout in STAGED]
  spans = 'hosts that a tensor group spans'
  more = 'time, more stages, 4 microbatches each'
  layers = {'mesh.rules': 'fsdp_tensor heads= kv_heads= mlp='}
  layers['mesh.collectives'] = 'annotated'  # the others refuse such rules
  parameters = {'mesh.rules': 'fsdp_tensor embed='}
  rows = [train(microbatches=n, batch_size=256 * n) for n in (2, 1)]
  summed = on(8) | mesh(zero=2) | train(batch_size=64, microbatches=1)
  return [
    ('tensor_in_layers', 'tensor 2 to 4, 8, 16', layers),
    ('more_rows', 'rows of a microbatch 4 to 8, 16', {'steps': rows}),
    ('sums_at_the_end', 'accumulation 1 to 4, 16', {'base': summed}),
    ('gathers', 'accumulation 1 to 4, 16, on fsdp', parameters),
    ('tensor', 'what fits without a pipeline', layers),
    ('stages', 'what fits on 8, 32, 64 stages', {'layouts': flat}),
    ('one_stage', 'time, more stages', schedules.one_stage),
    ('splitting', 'time, more microbatches', schedules.one_microbatch),
    ('tensor_outermost', spans, memory.tensor_outermost),
    ('no_zero', 'ZeRO 0 to 1, 2, 3', memory.zero_off),
    ('fixed_microbatches', more, {'cases': fixed}),
  ]
