"""Claims about the ends of a pipeline hold, and fail on wrong numbers."""

import types

import claim_cases

from paraxis.sharding.planner import simulate
from paraxis.train.claims.layouts import vocabulary as claims_vocabulary

SHAPE = dict(layers=32, hidden=3072, sequence=2048)
VOCABULARIES = [32768, 262144]


def run():
  return claim_cases.small('vocab_parallelism', num_layers=4)


def test_shares_of_the_ends():
  case = dict(mesh='stage=4,tensor=2')
  check = lambda fields: claims_vocabulary.head_shares(
    run(), cases=[case | fields]
  )
  right = check({})
  # Embedding and head of 64 x 32 numbers of 4 bytes, on 8 devices.
  assert right.passed and '2 x V h / 8, 2,048 bytes' in right.caveat
  assert check({'model.tied_embedding': True}).passed
  # A table that stages do not share: each holds four times as much.
  wrong = check({'mesh.rules': 'fsdp_tensor vocab=tensor'})
  assert not wrong.passed and '8,192 bytes' in wrong.caveat


def test_work_is_even():
  last = lambda *args, **costs: simulate.run(
    *args, **costs | dict(vocabulary='last')
  )
  broken = types.SimpleNamespace(HEADS=simulate.HEADS, run=last)
  right, _ = claim_cases.holds_until(
    claims_vocabulary, 'simulate', broken, claims_vocabulary.imbalance,
    shape=SHAPE, stages=8, microbatches=8, vocabularies=VOCABULARIES,
  )  # fmt: skip
  assert right.measured == '1.00 1.00'
  layer = 24 * 3072**2 + 4 * 2048 * 3072
  head = 2 * 3072 * VOCABULARIES[1] / layer
  assert f'{(4 + head) / (4 + head / 8):.2f}, as' in right.caveat


def test_a_vocabulary_adds_an_even_share_to_a_stage(monkeypatch):
  def compiled(config, topology):
    assert topology == 'v5p:2x2x1' and config.mesh.stage == 4
    end = 18 * config.model.vocab_size * config.model.d_model
    whole = config.mesh.rules.endswith('vocab=tensor')
    return 2**30 + (alone if whole else spread) * 2 * end, held

  monkeypatch.setattr(claims_vocabulary, '_compiled', compiled)
  check = lambda rules='fsdp_tensor': claims_vocabulary.growth(
    run(), mesh='stage=4', topology='v5p:2x2x1',
    model={'model.d_model': 1024, 'mesh.rules': rules},
    vocabularies=VOCABULARIES, few=1024, within=0.05,
  )  # fmt: skip
  alone, spread, held = 1.1, 0.26, [100] * 4
  right = check()
  assert right.passed and right.measured == '1.040'
  # 1 GiB and of both ends, 1.125 GiB or 9, 0.26 or 1.1.
  assert 'ends spread, 1.3 3.3, state 0% apart' in right.caveat
  assert 'whole ends 2.2 10.9, and 1.0 with ends of 1,024' in right.caveat
  assert ', 55% and 91% less. V adds 2.0 8.7' in right.caveat
  assert 'the first 0.945 of an even share' in right.caveat
  assert not check('fsdp_tensor vocab=tensor').passed  # ends on every stage
  held = [100, 100, 100, 90]
  assert not check().passed
  alone, held = 0.9, [100] * 4  # the unequal stage grows by less
  assert not check().passed
  alone, spread = 1.1, 0.23
  assert not check().passed and check().measured == '0.920'
