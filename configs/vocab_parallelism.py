"""Vocabulary parallelism: embedding and head on all stages of a pipeline

paper: arXiv:2411.05288
mechanism: sharding/rules.py, sharding/tensor/vocabulary.py,
  sharding/pipeline/executor.py
test: tests/train/claims/layouts/test_vocabulary.py,
  tests/train/claims/pipeline/test_schedules.py
run: paraxis reproduce vocab_parallelism
cost: 480 CPU-seconds
expect: EQ 2e-15, tied or not; HLO every device holds V h / (p t) numbers of the
  embedding and head, and equal state; SIM the busiest stage does the mean, for
  any V, and is 1.16 to 2.12 times as fast as even layers with the head on the
  last stage, direction only (the paper: 1.05 to 1.51), 1.11 to 1.33 as layers
  moved away from it; AOT, which needs libtpu, from 32k to 256k words every
  stage of 8 grows from 10.4 to 13.4 GiB, 1.000 of an even share of 18 bytes a
  number of both ends; a stage with whole ends from 13.6 to 39.5, one with ends
  of 1,024 words has 10.0, 26% and 75% less. AOT takes nearly all of the time.
differs: one all-reduce of statistics and one of gradients for each microbatch,
  the loss between F and B of one tick; the paper delays them by one tick. All
  devices run one program, so the compiler reports one peak: an unequal stage is
  one of a program whose stages all hold both ends (in the paper the embedding
  is on the first, the head on the last), the others are of a program with
  almost none. 18 bytes as Megatron-LM counts them, 4 of the gradient, no
  logits; at 16 it is 1.125 of an even share. Whole ends as compiled grow by
  25.8 GiB, with logits, an even share of which is 3.2, not 3.0. Times count
  operations alone: all-reduces are free, small matrices as fast as large ones.
  1F1B in phased ticks holds 2 p - 1 inputs on every stage.
"""

from paraxis.configs import presets

# The paper's model for 8 devices; vocabularies as there.
SHAPE = dict(layers=32, hidden=3072, sequence=2048)
VOCABULARIES = [32768, 65536, 131072, 262144]
STAGES, MICROBATCHES = 8, 128


def get_config():
  """A small decoder on stage=4,tensor=2, a head of its own."""
  config = presets.tiny(
    vocab_size=1024, d_ff=256, num_layers=4, mlp='gelu', tied_embedding=False
  )
  config.mesh.update(stage=4, tensor=2)
  config.pipeline.schedule = 'one_f_one_b'
  config.train.batch_size = 8
  return config


def claims():
  """What `paraxis reproduce vocab_parallelism` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.layouts import vocabulary
  from paraxis.train.claims.pipeline import schedules

  on = lambda mesh, tied=False: {'mesh': mesh, 'model.tied_embedding': tied}
  cases = [
    on('stage=4,tensor=2'),
    on('stage=4,tensor=2', True),
    on('stage=2,data=2,tensor=2'),
  ]
  equal = experiment.on_layouts(*cases)
  held = dict(check=vocabulary.head_shares, cases=cases)
  sizes = dict(
    shape=SHAPE, stages=STAGES, microbatches=MICROBATCHES,
    vocabularies=VOCABULARIES,
  )  # fmt: skip
  even = dict(check=vocabulary.imbalance, **sizes)
  # All there is to gain is what the other stages wait: p times at most.
  faster = lambda against: sizes | dict(
    check=schedules.vocabulary_speedup, against=against, between=[1, STAGES],
    published=dict(between=[1.05, 1.51]),
  )  # fmt: skip
  memory = dict(
    check=vocabulary.growth,
    mesh=f'stage={STAGES}', topology='v5p:2x2x2',
    model={
      'model.d_model': 3072, 'model.d_ff': 12288, 'model.num_layers': 32,
      'model.num_heads': 24, 'model.dtype': 'bfloat16',
      'model.attention_block': 512, 'data.sequence_length': 2048,
      'train.remat': 'full', 'train.batch_size': MICROBATCHES,
      'pipeline.microbatches': MICROBATCHES,
    },
    vocabularies=[VOCABULARIES[0], VOCABULARIES[-1]], few=1024, within=0.05,
  )  # fmt: skip
  return [
    ('equal to one device', 'EQ', equal, None),
    ('bytes of the ends by device', 'HLO', held, 'V h / (p t)'),
    ('work of the busiest stage', 'SIM', even, None),
    ('faster than even layers', 'SIM', faster('even'), '1.05 to 1.51'),
    (
      'faster than layers moved',
      'SIM',
      faster('redistributed'),
      '1.05 to 1.51',
    ),
    ('growth of a stage, 32k to 256k', 'AOT', memory, 'even'),
  ]


def knockouts():
  """The head on the last stage; ends that no stage shares."""
  from paraxis.train.claims.layouts import vocabulary
  from paraxis.train.claims.pipeline import schedules

  return [
    ('spread_head', 'work of the busiest stage', schedules.head_last),
    ('shared_work', 'faster than even layers', schedules.head_last),
    ('shared_work_moved', 'faster than layers moved', schedules.head_last),
    ('shared_ends', 'bytes of the ends by device', vocabulary.WHOLE),
    ('shared_memory', 'growth of a stage, 32k to 256k', vocabulary.WHOLE),
  ]
