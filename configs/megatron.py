"""Megatron-LM: tensor and sequence parallel layers

paper: arXiv:2104.04473
mechanism: sharding/project.py, sharding/rules.py, sharding/tensor.py
test: tests/sharding/test_tensor.py, tests/train/test_claims_layouts.py
run: paraxis reproduce megatron
expect: tbd
differs: tbd
"""

from paraxis.configs import schema


def get_config():
  """A small GPT on tensor=8, residuals sharded along the length."""
  config = schema.default()
  config.mesh.tensor = 8

  model = config.model
  model.vocab_size = 1024
  model.d_model, model.d_ff = 64, 256
  model.num_layers, model.num_heads = 2, 8
  model.mlp = 'gelu'

  config.data.tokenizer = 'bytes'
  config.data.sequence_length = 64
  config.train.batch_size = 4
  return config


def claims():
  """What `paraxis reproduce megatron` checks."""
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
