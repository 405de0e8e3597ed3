"""Gated linear attention: a matrix state, trained in chunks

paper: arXiv:2312.06635
mechanism: models/gated_linear.py, pallas_kernels/gated_scan.py,
  sharding/scan.py
test: tests/models/test_gated_linear.py, tests/train/test_claims_scans.py
run: paraxis reproduce gated_linear_attention
expect: TODO
differs: TODO
"""

from paraxis.configs import schema


def get_config():
  """The quickstart's size and data, gated linear attention in every layer."""
  config = schema.default()
  model = config.model
  model.vocab_size = 2048
  model.d_model, model.d_ff = 160, 432
  model.num_layers, model.num_heads = 4, 4
  model.pattern = 'G'
  model.position = 'none'
  model.embedding_scale = 160**0.5
  config.data.tokenizer = 'bpe2048'
  config.data.sequence_length = 256
  config.optimizer.update(
    name='muon', learning_rate=3e-3, muon_learning_rate=0.02, warmup_steps=30
  )
  config.train.steps = 300
  config.train.batch_size = 8
  return config


def claims():
  """What `paraxis reproduce gated_linear_attention` checks."""
  check = lambda name, **given: dict(check=f'claims_scans.{name}', **given)
  shape = [4, 64, 64]  # heads, key width, value width
  equal = check(
    'chunks_equal_the_loop',
    length=200, shape=[2, 8, 16], chunks=[16, 64, 256], within=1e-12,
  )  # fmt: skip
  cost = check(
    'chunks_cost', lengths=[4096, 16384], shape=shape, rounds=5, at_least=4
  )
  crosses = check(
    'state_crosses', devices=8, lengths=[512, 1024], shape=[2, 8, 16]
  )
  layouts = dict(
    check='claims_pipeline_step.equals_one_device',
    cases=[
      dict(mesh='context=8'),
      dict(mesh='context=2,tensor=2,fsdp=2'),
      dict(mesh='stage=2,context=2'),
    ],
    within=1e-9,
  )
  return [
    ('chunks equal the loop', 'EQ', equal, None),
    ('layouts equal one device', 'EQ', layouts, None),
    ('states cross devices, bytes', 'HLO', crosses, None),
    ('loop over chunks, with gradients', 'CPU', cost, None),
    (
      'held-out bits per byte', 'LEARN',
      dict(check='claims.held_out_at_most', bits_per_byte=2.6), None,
    ),
  ]  # fmt: skip
