"""Megatron-LM: tensor, sequence and pipeline parallel layers

paper: arXiv:2104.04473
mechanism: sharding/project.py, sharding/vocabulary.py, sharding/schedules.py
test: tests/sharding/test_project.py, tests/train/test_claims_layouts.py, tests/train/test_claims_pipeline_step.py
run: paraxis reproduce megatron
expect: tbd
differs: tbd
"""

from paraxis.configs import schema


def get_config():
  """A small GPT on tensor=8, residuals sharded along the length."""
  config = schema.default()
  config.mesh.tensor = 8
  # For --mesh= with stages, four layers of which each has two chunks of one.
  config.pipeline.schedule = 'interleaved'
  config.pipeline.chunks = 2

  model = config.model
  model.vocab_size = 1024
  model.d_model, model.d_ff = 64, 256
  model.num_layers, model.num_heads = 4, 8
  model.mlp = 'gelu'

  config.data.tokenizer = 'bytes'
  config.data.sequence_length = 64
  config.train.batch_size = 4
  return config


def _tensor_claims():
  """Of tensor and sequence parallel layers, on tensor=8."""
  on = dict(mesh='tensor=8')
  equal = on | dict(check='claims.equals_one_device', within=1e-9)
  layer = on | dict(check='claims_layouts.messages_per_layer')
  reduced = layer | dict(
    sequence=False, forward={'all-reduce': 2}, backward={'all-reduce': 2}
  )
  scattered = layer | dict(
    sequence=True,
    forward={'all-gather': 2, 'reduce-scatter': 2},
    backward={'all-gather': 4, 'reduce-scatter': 2},
  )
  volume = on | dict(
    check='claims_layouts.sequence_volume', forward=1.0, backward=1.5
  )
  logits = on | dict(check='claims_layouts.logits_stay')
  return [
    ('loss and all gradients equal one device', 'EQ', equal, None),
    ('tensor parallel: messages a layer', 'HLO', reduced, '2 | 2'),
    ('sequence parallel: messages a layer', 'HLO', scattered, '2, 2 | 2, 2'),
    ('bytes of sequence over tensor parallel', 'HLO', volume, '1 and 1'),
    ('logits are never gathered', 'HLO', logits, None),
  ]


def claims():
  """What `paraxis reproduce megatron` checks."""
  cube = dict(mesh='stage=2,data=2,tensor=2')
  small = cube | dict(batch_size=16, microbatches=4)
  one = dict(schedule='one_f_one_b', chunks=1)
  equal = dict(
    check='claims_pipeline_step.equals_one_device', within=1e-9,
    cases=[small, small | one],
  )  # fmt: skip
  table = lambda check, schedule, **given: dict(
    check=f'claims_pipeline.{check}', schedule=schedule, **given
  )
  grid = lambda *chunks: [
    [p, m, v] for p, m in ((4, 8), (4, 32), (8, 32)) for v in chunks
  ]
  bubble = lambda schedule, *chunks: table(
    'bubbles', schedule, cases=grid(*chunks), share=1, model='asynchronous'
  )
  held = table(
    'inputs_held', 'interleaved', balanced=False,
    cases=[[p, m, v, 2 * (p - 1) + (v - 1) * p + 1] for p, m, v in grid(2, 4)],
  )  # fmt: skip
  sent = cube | dict(
    check='claims_pipeline_step.messages', rows=4, microbatches=4,
    chunks=[1, 2], times=[1, 2],
  )  # fmt: skip
  return [
    *_tensor_claims(),
    ('stages, data and tensor equal one device', 'EQ', equal, None),
    ('bubble of 1F1B', 'SIM', bubble('one_f_one_b', 1), '(p-1)/m'),
    ('bubble, v chunks', 'SIM', bubble('interleaved', 2, 4), '(p-1)/(vm)'),
    ('inputs of chunks held at once', 'SIM', held, '2(p-1)+(v-1)p+1'),
    ('messages of stages, times', 'HLO', sent, 'v'),
  ]
