"""CO2: a sum has a whole round to arrive in

paper: arXiv:2401.16265
mechanism: train/steps/outer.py
test: tests/train/steps/test_replicas.py,
  tests/train/claims/outer/test_equations.py,
  tests/train/claims/outer/test_exchanges.py
run: paraxis reproduce co2
cost: 1,300 CPU-seconds
expect: HLO 12 times fewer bytes, a sum first read 12 steps after it was sent;
  EQ the equations in NumPy, no number above the clip; SIM messages of up to a
  round are hidden; LEARN, 3 seeds, NOT REPRODUCED (1% was asked): 2.748 bits
  per byte at an outer rate of .5, local SGD 2.513, 9.3% above. At rate 1 the
  penalty is what keeps it: 2.810, and 3.198 without; but half the rate does as
  well without it, 2.756: that the penalty is better is NOT REPRODUCED (.3%
  +-.7%).
differs: 154 thousand parameters, 4 replicas, 12 steps a round. The paper's
  own form of the penalty for a stale sum was not at hand; here it is 1 + the
  distance that the anchor has moved, in lengths of what arrives, after
  gap-aware SGD (arXiv:1909.10802). The authors' code clips a copy of the
  momentum, and drops it. A sum that is a round late is as a gradient that is
  late: where replicas reach their minimum within a round, z^2 - 1.2 z + .2 +
  rate = 0 (momentum .2) leads from round to round, whose roots grow at rate 1,
  1.10, and decay at .5, .84. The penalty lowers the rate, too. Rates below are
  worse, on one seed: .25 2.831 (2.794 without penalty), .15 2.954 (2.903), and
  2.772 at .5. outer.clip=1 binds in no training here.
"""

from paraxis.configs import presets

LOOP = presets.REPLICAS['CO2']
PLAIN = 'CO2, no penalty', 'CO2 .5, no penalty'
NAMES = 'mean of 12', 'CO2', 'CO2 .5', *PLAIN


def get_config():
  """Four replicas of a 154K-parameter decoder; what is sent lands 12 later."""
  return presets.replicas('CO2')


def claims():
  """What `paraxis reproduce co2` checks."""
  from paraxis.train.claims.outer import equations
  from paraxis.train.claims.outer import exchanges
  from paraxis.train.claims.outer import learning

  numpy = dict(
    check=equations.by_numpy, within=1e-9,
    cases=[
      {'mesh': 'replica=2,fsdp=2', 'outer.period': 2, 'outer.delay': 2}
    ],
  )  # fmt: skip
  sent = dict(
    check=exchanges.messages, meshes=['replica=2,fsdp=4', 'replica=4,tensor=2'],
    fewer=0.99 * LOOP['period'],
  )  # fmt: skip
  unread = dict(
    check=exchanges.unread, meshes=['replica=2,fsdp=2,tensor=2'],
    steps=LOOP['delay'],
  )  # fmt: skip
  clips = dict(check=exchanges.clips, mesh='replica=2,fsdp=2', most=0.002)
  hidden = dict(
    check=exchanges.hidden, steps=1200, seed=0,
    times=[[0.9, 1, 1], [2.0, 0.45, 0.55]],
  )  # fmt: skip
  learned = dict(
    check=learning.above, families={n: presets.REPLICAS[n] for n in NAMES},
    seeds=[0, 1, 2], warm=0,
  )  # fmt: skip
  same = dict(
    compare=[[['CO2', 'CO2 .5'], 'mean of 12', 0.01]], admits='not reproduced'
  )
  kept = dict(compare=[[['CO2'], 'CO2, no penalty', 0.0]])
  penalty = dict(
    compare=[[['CO2', 'CO2 .5'], name, 0.0] for name in PLAIN],
    admits='not reproduced',
  )
  return [
    ('exchanges equal the equations', 'EQ', numpy, None),
    ('one exchange a round', 'HLO', sent, None),
    ('a sum is unread for a round', 'HLO', unread, None),
    ('the momentum is clipped', 'EQ', clips, None),
    ('messages are hidden', 'SIM', hidden, 'fully, at 80 Gbit/s'),
    ('as local SGD', 'LEARN', learned | same, 'as good'),
    ('at rate 1 better with the penalty', 'LEARN', learned | kept, None),
    ('better with the penalty', 'LEARN', learned | penalty, 'better'),
  ]


def knockouts():
  """No penalty; an exchange in every step; at once; no clip."""
  from paraxis.train.claims.outer import exchanges

  numpy, sent, unread, clips, hidden, _, kept, _ = (
    name for name, *_ in claims()
  )
  at_once = {'outer.delay': 0, 'outer.penalty': False}
  name, (plain, _) = 'CO2, switched off', PLAIN
  loops = {name: LOOP, plain: presets.REPLICAS[plain]}
  off = dict(families=loops, compare=[[[name], plain, 0.0]])
  return [
    ('full_weight', numpy, exchanges.without_penalty),
    ('period', sent, {'outer.period': 1, 'outer.delay': 1}),
    ('delay', unread, at_once),
    ('dropped', clips, exchanges.without_clip),
    ('late', hidden, at_once),
    ('no_penalty', kept, exchanges.without_penalty, off),
  ]
