"""Streaming DiLoCo: fragments in turn, late, and in four bits

paper: arXiv:2501.18512
mechanism: train/steps/outer.py, train/steps/codec.py
test: tests/train/steps/test_replicas.py, tests/train/steps/test_codec.py,
  tests/train/claims/outer/test_equations.py,
  tests/train/claims/outer/test_exchanges.py
run: paraxis reproduce streaming_diloco
cost: 1,200 CPU-seconds
expect: EQ the equations in NumPy, without codes; HLO 400 times fewer bytes than
  data parallel between two replicas (200 between four), .29 of them in a step,
  of 4 fragments; a sum is read a step later; SIM messages of .7 steps are
  hidden, half of one of 2; LEARN 4.3% below DiLoCo (2.552 bits per byte;
  2.668), 2.555 in four bits; 2.555 where a sum is 5 steps late, 2.561 where 10.
differs: 154 thousand parameters in 2 layers, so 2 fragments, of which one has
  the embedding, 64% of all; 4 replicas, 50 steps a period, 20 periods. DiLoCo
  is far behind data parallel here, and behind plain averaging of the same
  period, which has 2.551, as much as streaming (configs/diloco.py); that
  replicas keep half of their own (mixing .5) may be why streaming is ahead of
  DiLoCo. Codes are gathered by every replica: of 16 and more that is no less
  than a sum of float32. That four bits are as good says little here: codes of
  which the sign alone was read gave 2.521.
"""

from paraxis.configs import presets

NAMES = (
  'DiLoCo .4', 'streamed', 'streamed, 5 late', 'streamed, 10 late',
  'streamed, 4 bits',
)  # fmt: skip
LOOP = presets.REPLICAS['streamed, 4 bits']
# Of the claim on one step's bytes: the ends are a small part of it.
DEEP = {
  'model.num_layers': 8, 'model.vocab_size': 264, 'data.tokenizer': 'bytes',
  'outer.fragments': 4,
}  # fmt: skip


def get_config():
  """Two fragments of a 154K-parameter decoder, a step late, in four bits."""
  return presets.replicas('streamed, 4 bits')


def claims():
  """What `paraxis reproduce streaming_diloco` checks."""
  from paraxis.train.claims.outer import equations
  from paraxis.train.claims.outer import exchanges
  from paraxis.train.claims.outer import learning

  numpy = dict(
    check=equations.by_numpy, within=1e-9,
    cases=[
      {'mesh': 'replica=2,fsdp=2', 'outer.period': 4, 'outer.codec': ''}
    ],
  )  # fmt: skip
  sent = dict(
    check=exchanges.messages, meshes=['replica=2,fsdp=4', 'replica=2,tensor=2'],
    fewer=7.5 * LOOP['period'],
  )  # fmt: skip
  peak = dict(
    check=exchanges.peak, mesh='replica=4,fsdp=2', changes=DEEP, within=0.32
  )
  unread = dict(
    check=exchanges.unread, meshes=['replica=2,fsdp=2,tensor=2'], steps=1
  )
  hidden = dict(
    check=exchanges.hidden, steps=1000, seed=0,
    times=[[0.7, 1, 1], [2.0, 0.4, 0.6]],
  )  # fmt: skip
  learned = dict(
    check=learning.above, families={n: presets.REPLICAS[n] for n in NAMES},
    seeds=[0, 1, 2], warm=0,
    compare=[
      [['streamed'], 'DiLoCo .4', 0.01],
      [['streamed, 4 bits'], 'streamed', 0.005],
    ],
  )  # fmt: skip
  return [
    ('exchanges equal the equations', 'EQ', numpy, None),
    ('bytes between replicas', 'HLO', sent, 'two orders of magnitude fewer'),
    ('bytes of one step', 'HLO', peak, 'of a fragment alone'),
    ('a sum is read when it is due', 'HLO', unread, None),
    ('messages are hidden', 'SIM', hidden, None),
    ('as DiLoCo, and so in four bits', 'LEARN', learned, 'as good'),
  ]


def knockouts():
  """Layers alone move; numbers as they are; no fragments; at once; replicas
  that never met."""
  from paraxis.train.claims.outer import equations

  numpy, sent, peak, unread, hidden, learned = (name for name, *_ in claims())
  (met,) = presets.NEVER
  own = {n: presets.REPLICAS[n] for n in ('DiLoCo .4', 'streamed')}
  never = dict(
    families=own | presets.NEVER, compare=[[[met], 'DiLoCo .4', 0.01]]
  )
  return [
    ('ends', numpy, equations.without_ends),
    ('codec', sent, {'outer.codec': ''}),
    ('fragments', peak, {'changes': DEEP | {'outer.fragments': 1}}),
    ('delay', unread, {'outer.delay': 0}),
    ('late', hidden, {'outer.delay': 0}),
    ('never_met', learned, never),
  ]
