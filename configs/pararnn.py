"""ParaRNN: nonlinear recurrent cells, all tokens at once by Newton's method

paper: arXiv:2510.21450
mechanism: models/mixers/recurrent.py, pallas_kernels/scans/newton.py,
  sharding/sequence/scan.py
test: tests/models/mixers/test_recurrent.py,
  tests/pallas_kernels/scans/test_newton.py,
  tests/train/claims/scans/test_sharded.py
run: paraxis reproduce pararnn
expect: EQ solved against in sequence 1e-15, layouts 2e-15; SIM iterations to
  1e-6, median, at weights of standard deviation 0.02, 0.3, 1, 2: GRU 2 4 6 25,
  LSTM 3 4 7 37 (the published code takes 3); a solve is 13 operations deeper
  per doubling of the length, 148 at 2,048 tokens against 8,194 in sequence. 100
  CPU-seconds.
differs: Newton goes on to a residual of 1e-6 within 20 iterations; what is not
  solved is run in sequence and counted (newton/fallbacks). At weights of
  deviation 1 three iterations leave gradients up to 180% wrong. Seeds differ
  widely at deviation 2 (15 to 60 and more). Input maps are drawn normal, not
  uniform. No fused kernel, no 7B model, no speed: the paper's 665 times is of a
  GPU; on a CPU a loop is cheaper.
"""

from paraxis.configs import schema


def get_config():
  """The quickstart's size and data, ParaGRU and ParaLSTM in turn."""
  config = schema.default()
  model = config.model
  model.vocab_size = 2048
  model.d_model, model.d_ff = 160, 432
  model.num_layers, model.num_heads = 4, 4
  model.pattern = 'RL'
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
  """What `paraxis reproduce pararnn` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.scans import sharded

  check = lambda check, **given: dict(check=check, **given)
  took = lambda cell, at_most: check(
    sharded.iterations,
    cell=cell, problem=dict(tokens=512, channels=32, seeds=9),
    deviations=[0.02, 0.3, 1.0, 2.0], tolerance=1e-6, cap=60, at_most=at_most,
  )  # fmt: skip
  depth = check(
    sharded.depth_of_solve,
    lengths=[256, 512, 1024, 2048],
    channels=1,
    numbers=2,
  )
  equal = check(
    sharded.newton_equals_sequence,
    cases=[dict(pattern='R'), dict(pattern='L')], within=1e-9,
  )  # fmt: skip
  layouts = dict(
    check=experiment.equals_one_device,
    cases=[
      dict(mesh='context=8'),
      dict(mesh='context=2,tensor=2,fsdp=2'),
      dict(mesh='stage=2,context=2'),
    ],
    within=1e-9,
  )
  return [
    ('solved equals in sequence', 'EQ', equal, None),
    ('layouts equal one device', 'EQ', layouts, None),
    ('iterations to 1e-6, GRU', 'SIM', took('gru', [3, 5, 8, 40]), '3'),
    ('iterations to 1e-6, LSTM', 'SIM', took('lstm', [4, 5, 8, 60]), '3'),
    ('depth of a solve', 'SIM', depth, 'O(log T)'),
  ]
