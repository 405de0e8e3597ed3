"""SkipPipe: microbatches that leave stages of the pipeline out

paper: arXiv:2502.19913
mechanism: sharding/schedule_paths.py, sharding/schedules.py, train/claims_skip.py
test: tests/sharding/test_schedule_paths.py, tests/train/test_claims_skip.py
run: paraxis reproduce skippipe
expect: tbd
differs: tbd
"""

from paraxis.configs import schema

STAGES = 8


def get_config():
  """A small decoder, a layer on each of 8 stages, half of them left out."""
  config = schema.default()
  config.mesh.stage = STAGES
  config.pipeline.schedule = 'skip'
  config.pipeline.microbatches = 8
  config.pipeline.skip_fraction = 0.5

  model = config.model
  model.vocab_size = 2048
  model.d_model, model.d_ff = 128, 344
  model.num_layers, model.num_heads = 8, 4
  model.mlp = 'swiglu'
  model.qk_norm = 'head'
  model.rope_theta = 1e4
  model.embedding_scale = 128**0.5
  model.attention_scale = 3 * 32**-0.5  # as in quickstart

  config.data.tokenizer = 'bpe2048'
  config.data.sequence_length = 256

  config.optimizer.update(
    name='muon', learning_rate=3e-3, muon_learning_rate=0.02, warmup_steps=30
  )
  config.train.steps = 240
  config.train.batch_size = 16
  config.checkpoint.every = 60
  return config


def claims():
  """What `paraxis reproduce skippipe` checks."""
  check = lambda name, **given: dict(check=f'claims_skip.{name}', **given)
  equal = check(
    'equals_pipeline', mesh='stage=8', fractions=[0, 0.25, 0.5], within=1e-9
  )
  paths = check(
    'balanced', stages=STAGES, microbatches=8, fractions=[0.25, 0.5]
  )
  time = lambda fraction, at_most: dict(
    check='claims_pipeline.skip_makespan', stages=STAGES, microbatches=32,
    fraction=fraction, send=1, at_most=at_most,
  )  # fmt: skip
  training = dict(
    stages=STAGES, fractions=[0, 0.25, 0.5], removed=[0, 0.25, 0.5], paths=4
  )
  robust = check(
    'robust', training=training, trained=0.5, share=0.5, at_most=1.07
  )
  full = check(
    'against_full', training=training, trained=0.5, share=0.5, at_most=0.7
  )
  return [
    ('pipeline equals layers on paths', 'EQ', equal, None),
    ('paths share the stages out', 'SIM', paths, None),
    ('time of a step, 1/4 left out', 'SIM', time(0.25, 0.95), None),
    ('time of a step, 1/2 left out', 'SIM', time(0.5, 0.8), '0.45'),
    ('half the model over all of it', 'LEARN', robust, '1.07'),
    ('half of it over half of a plain one', 'LEARN', full, None),
  ]
