"""DiLoCo: replicas step alone and exchange once in many steps

paper: arXiv:2311.08105
mechanism: train/steps/replicas.py, train/steps/outer.py
test: tests/train/steps/test_replicas.py, tests/train/steps/test_outer.py,
  tests/train/claims/outer/test_steps.py
run: paraxis reproduce diloco
cost: 1,600 CPU-seconds
expect: EQ each replica within 1e-9 of one device on its rows; HLO no byte of a
  step crosses replicas, 50 times fewer in all; LEARN NOT REPRODUCED (1% was
  asked): from scratch, seed 0, data parallel has 2.366 bits per byte, the mean
  of the replicas 2.624, DiLoCo 2.678 at rate .4, 2.744 at .2, 2.798 at .7: 11%
  above at best.
differs: 154 thousand parameters, 4 replicas, 50 inner steps (the paper: 500),
  20 rounds, 512 tokens a replica and step; three outer rates. Only one seed of
  three had run to its end when this was written. A start by data parallel was
  not tried. The training loss of replicas that is logged is the mean of theirs,
  whatever number of targets each reads.
"""

from paraxis.configs import schema

REPLICAS = 4
PERIOD = 50


def get_config():
  """Four replicas of a 154K-parameter decoder, an exchange every 50 steps."""
  config = schema.default()
  config.mesh.replica = REPLICAS
  config.outer.update(
    exchange='mean', period=PERIOD, rate=0.7, momentum=0.9, nesterov=True
  )

  model = config.model
  model.update(vocab_size=2048, d_model=48, num_layers=2, num_heads=4, d_ff=128)
  model.update(qk_norm='head', tied_embedding=True)
  model.update(embedding_scale=48**0.5, attention_scale=3 * 12**-0.5)

  config.data.update(path='fixture', tokenizer='bpe2048', sequence_length=256)
  config.optimizer.update(
    name='adamw', learning_rate=5e-3, warmup_steps=40, final_fraction=0.1
  )
  config.train.update(steps=20 * PERIOD, batch_size=2 * REPLICAS)
  config.train.update(print_every=50, eval_batches=4)
  config.checkpoint.every = 250
  return config


# What is compared; all read the same rows.
PLAIN = {'outer.exchange': 'none', 'outer.period': 0}
FAMILIES = {
  'data parallel': PLAIN,
  'DiLoCo .7': {'outer.rate': 0.7},
  'DiLoCo .4': {'outer.rate': 0.4},
  'DiLoCo .2': {'outer.rate': 0.2},
  'mean': {'outer.rate': 1.0, 'outer.momentum': 0.0},
}


def claims():
  """What `paraxis reproduce diloco` checks."""
  from paraxis.train.claims.outer import learning
  from paraxis.train.claims.outer import steps

  alone = dict(
    check=steps.alone, within=1e-9,
    cases=[
      {'mesh': 'replica=2,fsdp=2,tensor=2'},
      {'mesh': 'replica=4,data=2', 'mesh.zero': 2},
      {'mesh': 'replica=2,context=4', 'train.microbatches': 2},
    ],
  )  # fmt: skip
  sent = dict(
    check=steps.messages, meshes=['replica=2,fsdp=4', 'replica=4,tensor=2'],
    fewer=PERIOD,
  )  # fmt: skip
  learned = dict(
    check=learning.gap, families=FAMILIES, fields={}, seeds=[0, 1, 2],
    plain='data parallel', within=0.01, warm={}, admits='not reproduced',
  )  # fmt: skip
  return [
    ('a replica equals one device', 'EQ', alone, None),
    ('bytes between replicas', 'HLO', sent, '500 times fewer'),
    ('as data parallel, from scratch', 'LEARN', learned, 'as good'),
  ]


def knockouts():
  """Sums see all replicas; an exchange in every step."""
  from paraxis.train.claims.outer import steps

  equal, sent, _ = (name for name, *_ in claims())
  return [
    ('hidden_replicas', equal, steps.all_seen),
    ('period', sent, {'outer.period': 1}),
  ]
