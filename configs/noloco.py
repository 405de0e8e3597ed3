"""NoLoCo: replicas exchange by twos, without a sum over all

paper: arXiv:2506.10911
mechanism: train/steps/pairs.py, train/steps/outer.py
test: tests/train/steps/test_pairs.py,
  tests/train/claims/outer/test_equations.py,
  tests/train/claims/outer/test_exchanges.py
run: paraxis reproduce noloco
cost: 1,000 CPU-seconds
expect: EQ 2e-13 of one device, exchanges 2e-14 of the equations in NumPy; HLO
  permutations alone, 1.00 x the parameters: 25 rounds have five sixths of the
  bytes of DiLoCo's 20; LEARN, 3 seeds, 2.6% and 3.6% below DiLoCo at its two
  better rates (2.598 bits per byte; 2.668, 2.695), .5% below a mean over all in
  the same loop (2.611; asked: within 1%), and 1.8% above plain averaging;
  replicas are .081 of their length apart right after exchange 12, .014 after
  the last.
differs: 154 thousand parameters, 4 replicas, 40 steps a period, 25 periods;
  DiLoCo, of which the rate alone was tuned, has periods of 50, and a Nesterov
  momentum of .9 where NoLoCo has a heavy ball of .5, and most of what DiLoCo is
  behind by is that: a mean over all in NoLoCo's own loop, for half as many
  bytes again, is between them. Pipelines with random routes are left out. One
  message is as large as the parameters, of the authors' code twice that. Saved
  and evaluated is the mean of the anchors, for which replicas meet when a
  checkpoint or an evaluation is due.
"""

from paraxis.configs import presets

NAMES = 'DiLoCo .4', 'DiLoCo .7', 'NoLoCo'
SAME = 'DiLoCo, as NoLoCo'  # but for the pairs, and for what pulls them
LOOP = presets.REPLICAS['NoLoCo']


def get_config():
  """Four replicas of a 154K-parameter decoder that meet by twos."""
  return presets.replicas('NoLoCo')


def claims():
  """What `paraxis reproduce noloco` checks."""
  from paraxis.train.claims.outer import equations
  from paraxis.train.claims.outer import exchanges
  from paraxis.train.claims.outer import learning
  from paraxis.train.claims.outer import steps

  alone = dict(
    check=steps.alone, within=1e-9,
    cases=[{'mesh': 'replica=2,fsdp=2,tensor=2'}],
  )  # fmt: skip
  numpy = dict(
    check=equations.by_numpy, within=1e-9,
    cases=[
      {'mesh': 'replica=4,fsdp=2', 'outer.period': 2},
      {'mesh': 'replica=3', 'outer.period': 2, 'train.batch_size': 12},
    ],
  )  # fmt: skip
  twos = dict(check=exchanges.by_twos, mesh='replica=4,fsdp=2')
  # A replica receives 2 (R - 1) / R of them in a sum over R = 4.
  sent = dict(
    check=exchanges.messages, meshes=['replica=4,tensor=2'],
    fewer=1.49 * LOOP['period'],
  )  # fmt: skip
  shared = dict(
    families={n: presets.REPLICAS[n] for n in NAMES}, seeds=[0, 1, 2]
  )
  learned = shared | dict(
    check=learning.above,
    warm=0,
    compare=[[['NoLoCo'], 'DiLoCo .4', 0.0], [['NoLoCo'], 'DiLoCo .7', 0.0]],
  )
  same = learned | dict(
    families={n: presets.REPLICAS[n] for n in (SAME, 'NoLoCo')},
    compare=[[['NoLoCo'], SAME, 0.01]],
  )
  nearer = shared | dict(check=learning.spread, name='NoLoCo', early=480)
  return [
    ('a replica equals one device', 'EQ', alone, None),
    ('exchanges equal the equations', 'EQ', numpy, None),
    ('no sum over all replicas', 'HLO', twos, 'no all-reduce'),
    ('bytes between replicas', 'HLO', sent, None),
    ('as DiLoCo, with fewer bytes', 'LEARN', learned, 'up to 4% faster'),
    ('as a mean over all in the same loop', 'LEARN', same, None),
    ('nearer when the rate falls', 'LEARN', nearer, None),
  ]


def knockouts():
  """Sums see all replicas; an anchor without momentum; a mean over all; an
  exchange in every step; replicas that never met, or meet themselves alone;
  anchors do not approach."""
  from paraxis.train.claims.outer import equations
  from paraxis.train.claims.outer import steps

  equal, numpy, twos, *rest = (name for name, *_ in claims())
  sent, learned, same, nearer = rest
  of = lambda name: {name: presets.REPLICAS[name]}
  (name,), (met,), (alone,) = presets.NO_PULL, presets.NEVER, presets.UNPAIRED
  never = dict(
    families=of('DiLoCo .4') | presets.NEVER,
    compare=[[[met], 'DiLoCo .4', 0.0]],
  )
  unpaired = dict(
    families=of(SAME) | presets.UNPAIRED, compare=[[[alone], SAME, 0.01]]
  )
  return [
    ('hidden_replicas', equal, steps.all_seen),
    ('momentum', numpy, equations.without_momentum),
    ('unpulled', numpy, equations.unpulled),
    ('mean', twos, {'outer.exchange': 'mean', 'outer.pull': 0.0}),
    ('period', sent, {'outer.period': 1}),
    ('never_met', learned, never),
    ('unpaired', same, equations.unpaired, unpaired),
    ('no_pull', nearer, dict(families=presets.NO_PULL, name=name)),
  ]
