"""NoLoCo: replicas exchange by twos, without a sum over all

paper: arXiv:2506.10911
mechanism: train/steps/pairs.py, train/steps/outer.py
test: tests/train/steps/test_pairs.py,
  tests/train/claims/outer/test_exchanges.py
run: paraxis reproduce noloco
cost: 1,000 CPU-seconds
expect: EQ 2e-13; HLO permutations alone, 1.00 x the parameters: 25 rounds have
  five sixths of the bytes of DiLoCo's 20; LEARN 3.0% and 3.7% below DiLoCo at
  its two better rates (2.593 bits per byte; 2.674, 2.692), and 1.7% above plain
  averaging; replicas are .082 of their length apart right after exchange 12,
  .014 after the last.
differs: 154 thousand parameters, 4 replicas, 40 steps a period, 25 periods;
  pipelines with random routes are left out. One message is as large as the
  parameters, of the authors' code twice that. Saved and evaluated is the mean
  of the anchors, for which replicas meet when a checkpoint or an evaluation is
  due.
"""

from paraxis.configs import presets

NAMES = 'DiLoCo .4', 'DiLoCo .7', 'NoLoCo'
LOOP = presets.REPLICAS['NoLoCo']


def get_config():
  """Four replicas of a 154K-parameter decoder that meet by twos."""
  return presets.replicas('NoLoCo')


def claims():
  """What `paraxis reproduce noloco` checks."""
  from paraxis.train.claims.outer import exchanges
  from paraxis.train.claims.outer import learning
  from paraxis.train.claims.outer import steps

  alone = dict(
    check=steps.alone, within=1e-9,
    cases=[{'mesh': 'replica=2,fsdp=2,tensor=2'}],
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
  nearer = shared | dict(check=learning.spread, name='NoLoCo', early=480)
  return [
    ('a replica equals one device', 'EQ', alone, None),
    ('no sum over all replicas', 'HLO', twos, 'no all-reduce'),
    ('bytes between replicas', 'HLO', sent, None),
    ('as DiLoCo, with fewer bytes', 'LEARN', learned, 'up to 4% faster'),
    ('nearer when the rate falls', 'LEARN', nearer, None),
  ]


def knockouts():
  """Sums see all replicas; a mean over all; an exchange in every step; replicas
  that never met, or meet themselves alone; anchors do not approach."""
  from paraxis.train.claims.outer import equations
  from paraxis.train.claims.outer import steps

  equal, twos, sent, learned, nearer = (name for name, *_ in claims())
  best = {'DiLoCo .4': presets.REPLICAS['DiLoCo .4']}
  (name,), (met,), (alone,) = presets.NO_PULL, presets.NEVER, presets.UNPAIRED
  below = lambda name: dict(compare=[[[name], 'DiLoCo .4', 0.0]])
  never = dict(families=best | presets.NEVER) | below(met)
  unpaired = dict(families=best | presets.UNPAIRED) | below(alone)
  return [
    ('hidden_replicas', equal, steps.all_seen),
    ('mean', twos, {'outer.exchange': 'mean', 'outer.pull': 0.0}),
    ('period', sent, {'outer.period': 1}),
    ('never_met', learned, never),
    ('unpaired', learned, equations.unpaired, unpaired),
    ('no_pull', nearer, dict(families=presets.NO_PULL, name=name)),
  ]
