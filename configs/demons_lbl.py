"""Demons in the Detail: experts are balanced over the whole batch

paper: arXiv:2501.11873
mechanism: models/ffn/router.py, train/steps/gradients.py
test: tests/train/claims/experts/test_layer.py
run: paraxis reproduce demons_lbl
cost: 1000 CPU-seconds
expect: EQ 2e-15; LEARN, means of 6 seeds, loads counted over a row, 4 rows, the
  batch of 16: mutual information of domain and expert 0.008, 0.028, 0.126 bits
  (14 times as much over the batch as over a row), held-out text 3.059, 3.048,
  3.035 bits per byte; 3 seeds do not tell the last two apart (0.007 +-0.006).
  The paper: lower loss, and experts that specialise.
differs: 0.2M active parameters in layers of 64, 200 steps of 2,048 tokens, six
  domains, nearly always one to a row; the paper trains up to 42.8B parameters
  on 400B tokens. The weight of the loss, 0.05, was not swept. Trained on one
  device, where a row counted alone is what a device with one row would count,
  and a batch in one microbatch is the whole step (EQ). For several microbatches
  the paper keeps a buffer of counts of those before; here a separate forward
  pass counts all of them, or `running` counts the step before.
"""

from paraxis.configs import presets


def get_config():
  """8 experts, top-2; rows of 128 tokens, which are nearly always of one of
  the six domains, 16 to a batch."""
  config = presets.small_text(d_model=64, d_ff=96, qk_norm='head')
  experts = config.model.experts
  experts.update(count=8, top_k=2, balance=0.05, balance_scope='step')
  config.data.sequence_length = 128
  config.optimizer.warmup_steps = 40
  config.train.update(steps=200, batch_size=16, print_every=10)
  config.checkpoint.every = 200
  return config


def claims():
  """What `paraxis reproduce demons_lbl` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims.experts import loads
  from paraxis.train.claims.experts import training

  # A whole batch in one microbatch is the scope `step` without its second
  # forward pass: the first claims say so.
  scope = lambda name: {'model.experts.balance_scope': name}
  variants = {
    'a row': scope('sequence'),
    '4 rows': scope('microbatch') | {'train.microbatches': 4},
    'the batch': scope('step'),
  }
  trained = dict(variants=variants, seeds=[0, 1, 2, 3, 4, 5])
  special = trained | dict(
    check=training.specialise,
    more=['the batch', 'a row'], times=1,
  )  # fmt: skip
  better = trained | dict(
    check=training.learn_better,
    better=[['4 rows', 'a row'], ['the batch', '4 rows']], by=0.0, shares=[],
  )  # fmt: skip
  scopes = dict(
    check=loads.scopes_agree,
    equal=[['device', 1], ['step', 1], ['step', 4]], other=['microbatch', 4],
    within=1e-9, apart=1e-3,
  )  # fmt: skip
  meshes = experiment.on_layouts(
    {'mesh': 'data=2,fsdp=2,tensor=2', 'train.microbatches': 2},
    'stage=2,data=2,tensor=2',
  )
  return [
    ('scopes on one device, and of one batch', 'EQ', scopes, None),
    ('loads of a step, in any layout', 'EQ', meshes, None),
    ('domain and expert, the batch over a row', 'LEARN', special, 'yes'),
    ('held-out text, the wider the better', 'LEARN', better, 'lower'),
  ]


def knockouts():
  """No loss that balances; loads that are counted in each microbatch."""
  off = {'model.experts.balance': 0.0}
  narrow = {'model.experts.balance_scope': 'microbatch'}
  return [
    ('a_balance_loss', 'scopes on one device, and of one batch', off),
    ('loads_of_a_step', 'loads of a step, in any layout', narrow),
    ('balancing', 'domain and expert, the batch over a row', off),
    ('wide_balancing', 'held-out text, the wider the better', off),
  ]
