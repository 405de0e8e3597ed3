"""SkipPipe: microbatches that leave stages of the pipeline out

paper: arXiv:2502.19913
mechanism: sharding/pipeline/paths.py, sharding/pipeline/schedules.py,
  train/claims/pipeline/skip.py
test: tests/sharding/pipeline/test_paths.py,
  tests/train/claims/pipeline/test_skip.py
run: paraxis reproduce skippipe
expect: EQ 3e-15 against layers on paths, and 1F1B bit for bit with nothing left
  out; SIM a step takes 0.79 of the time with half left out, 0.92 with a
  quarter; LEARN perplexity of half the model over that of all of it: 0.94 when
  trained with half left out (104 over 111), 1.13 with a quarter (109 over 96),
  1.68 with none (141 over 84); the paper: 1.07. 650 CPU-seconds.
differs: 1.8M parameters in 8 layers, 1M tokens, one seed: with so little of it
  leaving out costs, 96 and 111 of perplexity with all stages against 84. Half a
  model is the mean over 4 balanced paths drawn anew. In training paths are
  drawn once and kept, not searched for by conflict; equal stages and links, so
  that the 55% of the paper, on slow links that differ, is out of reach. In lock
  step, as our executor runs, a step takes 0.93 at best. Learning runs on one
  device, which the first claim says is the same.
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
  from paraxis.train.claims.pipeline import schedules
  from paraxis.train.claims.pipeline import skip

  check = lambda check, **given: dict(check=check, **given)
  equal = check(
    skip.equals_pipeline,
    mesh='stage=8',
    fractions=[0, 0.25, 0.5],
    within=1e-9,
  )
  paths = check(
    skip.balanced, stages=STAGES, microbatches=8, fractions=[0.25, 0.5]
  )
  time = lambda fraction, at_most: dict(
    check=schedules.skip_makespan, stages=STAGES, microbatches=32,
    fraction=fraction, send=1, at_most=at_most,
  )  # fmt: skip
  training = dict(
    stages=STAGES, fractions=[0, 0.25, 0.5], removed=[0, 0.25, 0.5], paths=4
  )
  robust = lambda trained, at_most: check(
    skip.robust,
    training=training,
    trained=trained,
    share=0.5,
    at_most=at_most,
  )
  full = check(
    skip.against_full,
    training=training,
    trained=0.5,
    share=0.5,
    at_most=0.8,
  )
  return [
    ('pipeline equals layers on paths', 'EQ', equal, None),
    ('paths share the stages out', 'SIM', paths, None),
    ('time of a step, 1/4 left out', 'SIM', time(0.25, 0.95), None),
    ('time of a step, 1/2 left out', 'SIM', time(0.5, 0.8), '0.45'),
    ('half over all, trained with 1/4 out', 'LEARN', robust(0.25, 1.2), '1.07'),
    ('half over all, trained with 1/2 out', 'LEARN', robust(0.5, 1.07), '1.07'),
    ('half of it over half of a plain one', 'LEARN', full, None),
  ]
