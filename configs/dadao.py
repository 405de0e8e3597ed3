"""DADAO: nodes of a graph, gradients and exchanges at times of their own

paper: arXiv:2208.00779
mechanism: train/steps/events.py
test: tests/train/steps/test_events.py,
  tests/train/claims/outer/test_decentralized.py
run: paraxis reproduce dadao
cost: 400 CPU-seconds
expect: EQ 2e-15; LEARN log errors are a line (squared correlation .99), down to
  1e-16 on all three graphs; .3 of the exchanges that the theorem allows, where
  gossip SGD is stopped. Gradient tracking, whose nodes step together, needs
  .37 to .61 times as many as DADAO at L / mu of 40: nothing is won over it.
differs: 16 nodes, logistic regression with a ridge, data that differ between
  nodes; times and nodes are simulated in one process. The model of this config
  is not read.
"""

from paraxis.configs import presets

GRAPHS = ['chain', 'grid', 'random']
SIZE = dict(graphs=GRAPHS, nodes=16, seeds=[0, 1, 2], most=200_000)


def get_config():
  """The smallest preset: claims bring functions of their own."""
  return presets.tiny()


def claims():
  """What `paraxis reproduce dadao` checks."""
  from paraxis.train.claims.outer import decentralized

  equal = dict(
    check=decentralized.equals_numpy, graphs=GRAPHS, nodes=9, count=600,
    within=1e-10,
  )  # fmt: skip
  line = SIZE | dict(check=decentralized.rate, to=1e-16, straight=0.9)
  fewer = SIZE | dict(check=decentralized.fewer, tracking=False)
  return [
    ('as the equations, one at a time', 'EQ', equal, None),
    ('a linear rate', 'LEARN', line, 'linear'),
    ('fewer exchanges than gossip SGD', 'LEARN', fewer, 'fewer'),
  ]


def knockouts():
  """Nothing moves between events; nothing is exchanged; six times as much."""
  from paraxis.train.claims.outer import decentralized

  equal, line, fewer = (name for name, *_ in claims())
  return [
    ('still', equal, decentralized.still),
    ('silent', line, decentralized.silent),
    ('alone', fewer, decentralized.silent),
    ('six_times', fewer, decentralized.six_times),
  ]
