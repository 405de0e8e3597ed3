"""Megatron-LM: tensor and sequence parallel layers

paper: arXiv:2104.04473
mechanism: sharding/project.py, sharding/rules.py, sharding/vocabulary.py
test: tests/sharding/test_project.py, tests/train/test_claims_layouts.py
run: paraxis reproduce megatron
expect: EQ 1e-15; HLO 2 all-reduces forward and 2 backward a layer, 8 (t - 1)
  / t activations in all; sharded along the sequence 2 + 2 gathers and scatters
  forward, 4 + 2 backward: the same bytes forward, 1.5 times backward; largest
  message of a step 1 / 16 of the logits. 15 CPU-seconds.
differs: the tensor and sequence part (the latter: arXiv:2205.05198, which
  counts 4 gathers and 4 scatters a layer, and besides gathers inputs again in
  the backward pass, overlapped; here they count). The pipeline part, 1F1B and
  interleaving, follows, and with it the 52% of peak, which no CPU can claim.
  RMSNorm, rotary positions, no biases, no dropout; messages compiled for CPU.
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
