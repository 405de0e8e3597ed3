"""Make Deep Networks Shallow Again: layers beside each other

paper: arXiv:2309.08414
mechanism: models/wiring.py, models/stack.py
test: tests/models/test_wiring.py, tests/train/claims/layouts/test_wirings.py,
  tests/train/claims/test_pictures.py
run: paraxis reproduce shallow
cost: 900 CPU-seconds
expect: EQ 1e-15; LEARN NOT reproduced: of pictures of digits 6.05% are taken
  for another by one group of 6 layers, 5.79% by 6 in sequence, .3 points +-.4
  more, which is within 1 point by less than two standard errors (2 groups:
  5.63%); on language one group is neither better nor worse after 500 steps
  (2.990 bits per byte; 2.988 in sequence; .002 +-.022), NOT reproduced, too.
differs: layers of attention and mlp, the mlp behind attention within a layer,
  for the paper's convolutions; drawn digits of 7 x 8 pixels for MNIST and
  CIFAR10, and one depth for its 6,912 networks. 180 thousand parameters, for
  which 500 steps of bytes are too few to need depth: a longer training, not
  done here, is where layers that read each other should win. A module is not
  sharded over devices by itself: tensor shards are within each layer.
"""

from paraxis.configs import presets

GROUPS = {
  'deep': {'model.wiring': 'standard', 'model.groups': 0},
  '2 groups': {'model.wiring': 'groups', 'model.groups': 2},
  'shallow': {'model.wiring': 'groups', 'model.groups': 1},
}
PICTURES = {
  'train.steps': 400, 'train.batch_size': 64, 'optimizer.learning_rate': 2e-3,
}  # fmt: skip


def get_config():
  """Six layers of width 48 on bytes, all of which read the embeddings."""
  return presets.deep_bytes(wiring='groups', groups=1)


def claims():
  """What `paraxis reproduce shallow` checks."""
  from paraxis.train.claims import experiment
  from paraxis.train.claims import families
  from paraxis.train.claims import pictures
  from paraxis.train.claims.layouts import wirings

  layouts = experiment.on_layouts(
    'data=2,tensor=4',
    {'mesh': 'stage=2,fsdp=2,tensor=2', 'model.groups': 2},
  )
  deep = dict(
    check=wirings.equals, one={'model.groups': 6},
    other={'model.wiring': 'standard', 'model.groups': 0}, within=1e-12,
  )  # fmt: skip
  seen = dict(
    check=pictures.learn, families=GROUPS, fields=PICTURES, seeds=[0, 1, 2],
    rows=4096, within=[['shallow', 'deep', 0.01]], admits='not reproduced',
  )  # fmt: skip
  read = dict(
    check=families.learn, families=GROUPS, fields={}, seeds=[0, 1, 2],
    better=[['deep', 'shallow', 0.0]], admits='not reproduced',
  )  # fmt: skip
  return [
    ('groups of one layer are a standard row', 'EQ', deep, None),
    ('shards equal one device', 'EQ', layouts, None),
    ('pictures: as good', 'LEARN', seen, 'no difference on MNIST and CIFAR10'),
    ('language: the deep one is better', 'LEARN', read, None),
  ]


def knockouts():
  """Groups of two layers."""
  deep, *_ = (name for name, *_ in claims())
  return [('groups', deep, {'one': {'model.groups': 3}})]
