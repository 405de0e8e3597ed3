"""SkipPipe: microbatches that skip stages of the pipeline

paper: arXiv:2502.19913
mechanism: sharding/pipeline/paths.py, sharding/pipeline/schedules.py,
  train/claims/pipeline/skip.py
test: tests/sharding/pipeline/test_paths.py,
  tests/train/claims/pipeline/test_skip.py
run: paraxis reproduce skippipe
cost: 2,000 CPU-seconds
expect: EQ 3e-15 against layers on paths, and 1F1B bit for bit when nothing is
  skipped; SIM a step takes 0.79 of the time when half is skipped, direction
  only (the paper: 0.45), 0.92 for a quarter; LEARN, 3 seeds: half of the model
  has 0.72 of the perplexity of half of a plain one (103 over 143), reproduced.
  Over that of a plain whole one, direction only: 1.24 when trained with half
  skipped, 1.32 with a quarter (111 over 83), 1.72 with none. Over their own
  with all stages: 0.95 (of 108), 1.16 (of 95), 1.72; the paper: 1.07.
differs: 1.8M parameters in 8 layers, 1M tokens: with so little training,
  skipping costs: perplexity 95 and 108 with all stages against 83. Half a model
  is the mean over 4 balanced paths drawn anew. In training, paths are drawn
  once and kept, not searched for conflicts; equal stages and links, so the
  paper's 55%, on slow and unequal links, is out of reach. In lock step, as our
  executor runs, a step takes 0.93 at best. LEARN runs on one device, equal by
  the first claim.
"""

from paraxis.configs import presets

STAGES = 8
TRAINING = dict(
  stages=STAGES, seeds=[0, 1, 2], fractions=[0, 0.25, 0.5],
  removed=[0, 0.25, 0.5], paths=4,
)  # fmt: skip


def get_config():
  """A small decoder, a layer on each of 8 stages, half of them left out."""
  config = presets.small_text(
    d_model=128, d_ff=344, num_layers=8, qk_norm='head'
  )
  config.mesh.stage = STAGES
  config.pipeline.update(schedule='skip', microbatches=8, skip_fraction=0.5)
  config.train.update(steps=240, batch_size=16)
  config.checkpoint.every = 60
  return config


def claims():
  """What `paraxis reproduce skippipe` checks."""
  from paraxis.train.claims.pipeline import schedules
  from paraxis.train.claims.pipeline import skip

  equal = dict(
    check=skip.equals_pipeline,
    mesh='stage=8',
    fractions=[0, 0.25, 0.5],
    within=1e-9,
  )
  paths = dict(
    check=skip.balanced, stages=STAGES, microbatches=8, fractions=[0.25, 0.5]
  )
  time = lambda fraction, **published: dict(
    check=schedules.skip_makespan, stages=STAGES, microbatches=32,
    fraction=fraction, send=1, below=1, published=published,
  )  # fmt: skip
  robust = lambda trained, at_most: dict(
    check=skip.robust,
    training=TRAINING,
    trained=trained,
    share=0.5,
    at_most=at_most,
  )
  full = dict(
    check=skip.against_full, training=TRAINING, trained=0.5, share=0.5
  )
  return [
    ('pipeline equals layers on paths', 'EQ', equal, None),
    ('paths share the stages out', 'SIM', paths, None),
    ('time of a step, 1/4 left out', 'SIM', time(0.25), None),
    ('time of a step, 1/2 left out', 'SIM', time(0.5, below=0.45), '0.45'),
    (
      'half over plain, trained with 1/4 out',
      'LEARN',
      robust(0.25, 1.07),
      '1.07',
    ),
    (
      'half over plain, trained with 1/2 out',
      'LEARN',
      robust(0.5, 1.07),
      '1.07',
    ),
    ('half of it over half of a plain one', 'LEARN', full, None),
  ]


def knockouts():
  """Microbatches that visit all stages, or skip the same; plain training."""
  from paraxis.train.claims.pipeline import skip

  one = TRAINING | {'seeds': [0], 'fractions': [0]}
  plain = {'trained': 0, 'training': one}
  return [
    ('skipping', 'pipeline equals layers on paths', skip.all_stages),
    ('skipping_a_quarter', 'time of a step, 1/4 left out', skip.all_stages),
    ('shorter_paths', 'time of a step, 1/2 left out', skip.all_stages),
    ('balance', 'paths share the stages out', skip.same_stages),
    ('quarter_in_training', 'half over plain, trained with 1/4 out', plain),
    ('half_in_training', 'half over plain, trained with 1/2 out', plain),
    ('skipping_in_training', 'half of it over half of a plain one', plain),
  ]
