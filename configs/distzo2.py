"""DistZO2: zeroth-order steps, the two sides of a direction on two halves

paper: arXiv:2507.03211
mechanism: train/steps/zeroth_order.py
test: tests/train/steps/test_zeroth_order.py,
  tests/train/claims/outer/test_directions.py
run: paraxis reproduce distzo2
cost: 300 CPU-seconds
expect: HLO 2 numbers of 4 bytes; EQ 2e-12 in float64 (6e-4 in float32, where
  two losses nearly cancel); a run is made again from its log, bitwise; AOT .91
  and .68 of a forward pass; CPU 2.05 forward passes a step of 4,096 tokens, .92
  of 2.1 and three draws; LEARN bits per byte fall from 8.06 to 5.91, .70 of
  what Adam's 4.97 is below the start.
differs: blocks are not streamed from the host: all parameters stay on the
  device. The head of a random decoder is learned, not a pretrained one tuned.
"""

from paraxis.configs import presets

HEAD_ONLY = 'embedding,layers/*'
# Of the claim on memory: 1.4 billion parameters.
LARGE = {
  'model.d_model': 2048, 'model.d_ff': 5632, 'model.num_layers': 24,
  'model.num_heads': 16, 'model.vocab_size': 32000, 'model.dtype': 'bfloat16',
  'model.attention_block': 512, 'data.sequence_length': 2048,
  'train.freeze': '',
}  # fmt: skip
# Of the claim on CPU-seconds.
WIDE = {
  'model.d_model': 256, 'model.d_ff': 1024, 'model.num_layers': 4,
  'data.sequence_length': 256, 'train.batch_size': 16, 'train.freeze': '',
}  # fmt: skip
GRADIENTS = {'train.estimator': 'backprop', 'optimizer.learning_rate': 1e-2}
START = {'train.steps': 1, 'optimizer.learning_rate': 0.0}


def get_config():
  """The head of a random decoder of width 32, 8,480 numbers, is learned."""
  config = presets.tiny(d_model=32, d_ff=64, tied_embedding=False)
  config.data.path = 'fixture'
  config.train.update(
    estimator='zeroth_order', freeze=HEAD_ONLY, steps=3000, batch_size=8,
    eval_batches=8, print_every=500,
  )  # fmt: skip
  config.optimizer.update(learning_rate=2e-2, warmup_steps=20, weight_decay=0.0)
  config.checkpoint.every = 3000
  return config


def claims():
  """What `paraxis reproduce distzo2` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.outer import directions

  sent = dict(
    check=directions.scalars, meshes=['replica=2,data=4', 'data=8'], numbers=2
  )
  equal = experiment.on_layouts(
    {'mesh': 'replica=2,data=4', 'train.freeze': ''},
    {'mesh': 'replica=2,fsdp=2,tensor=2', 'train.freeze': ''},
  )
  log = dict(check=directions.replayed, mesh='replica=2,data=2', steps=40)
  held = dict(
    check=directions.peak, topology='v5p:2x2x1', mesh='data=4', changes=LARGE,
    at_most=1.1,
  )  # fmt: skip
  cost = dict(
    check=directions.passes, changes=WIDE, forwards=2.1, draws=3, rounds=12
  )
  learned = dict(
    check=directions.learns, seeds=[0, 1, 2], fall=1.0, share=0.5,
    families={'start': START, 'directions': {}, 'gradients': GRADIENTS},
  )  # fmt: skip
  return [
    ('two numbers are sent', 'HLO', sent, 'scalars'),
    ('as one device', 'EQ', equal, None),
    ('made again from its log', 'EQ', log, None),
    ('the memory of a forward pass', 'AOT', held, 'of inference'),
    ('two forward passes and three draws', 'CPU', cost, None),
    ('a head is learned', 'LEARN', learned, None),
  ]


def knockouts():
  """Gradients instead; other keys in the log, or in the update; three forward
  passes."""
  from paraxis.train.claims.outer import directions

  sent, _, log, held, cost, learned = (name for name, *_ in claims())
  gradients = {'train.estimator': 'backprop'}
  return [
    ('gradients', sent, gradients),
    ('key', log, directions.another_key),
    ('kept_gradients', held, gradients),
    ('third_pass', cost, directions.third_pass),
    ('another_direction', learned, directions.another_direction),
  ]
