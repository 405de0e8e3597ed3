"""Checks of restores on other layouts hold, and fail where one is wrong."""

import claim_cases
import jax
import numpy as np

from paraxis.configs import universal_checkpointing as config
from paraxis.train.claims import experiment
from paraxis.train.claims import gang
from paraxis.train.claims.checkpoint import resharding

NAME = 'universal_checkpointing'
ONE, STAGED = config.LAYOUTS[2], config.LAYOUTS[1]


def test_layers_in_order_are_read_on_any_layout():
  right, wrong = claim_cases.falls(
    NAME, 'order', layouts=[STAGED, ONE], gang_of=[0]
  )
  assert right.measured == '6 of 6' and '70 of 70 leaves' in right.caveat
  assert wrong.measured == '1 of 6'  # what held them so reads them so


def test_a_process_that_reads_otherwise_is_found(monkeypatch):
  """Pairs of this process are right, and the claim fails."""
  found = [dict(equal=34, leaves=35), dict(equal=35, leaves=35)]
  monkeypatch.setattr(gang, 'together', lambda *given, **more: found)
  outcome = resharding.every_pair(
    claim_cases.run_of(NAME), layouts=[ONE], gang_of=[]
  )
  assert outcome.measured == '1 of 1' and not outcome.passed


def test_steps_go_on_until_a_moment_is_lost():
  two = [{'mesh': 'tensor=2'}, ONE]
  right, wrong = claim_cases.falls(NAME, 'moment', layouts=two, steps=3)
  assert 'tensor=2 0e+00' in right.caveat  # it goes on bit for bit
  assert float(wrong.measured.split(',')[0]) > 1e-4


def test_bits_are_compared():
  x = np.array([0.0, 1.0], np.float32)
  assert resharding._equal({'a': x}, {'a': x}) == 1
  assert resharding._equal({'a': -x}, {'a': -x * [-1, 1]}) == 0


def test_bytes_are_those_of_chunks_until_all_are_read():
  right, wrong = claim_cases.falls(NAME, 'shards', read=['fsdp,'])
  assert float(right.measured) < 1.05 and 'chunks are 0.50' in right.caveat
  assert float(wrong.measured) > 1.9


def test_a_state_of_random_numbers_has_every_leaf():
  run = claim_cases.run_of(NAME)
  ((_, job),) = resharding._made(run, [ONE]).values()
  values = resharding._drawn(job)
  assert len({x.tobytes() for x in values.values()}) == len(values)
  assert {x.dtype.name for x in values.values()} == {'float32', 'int32'}
  moments = [p for p in values if '/mu/' in p]
  assert {p.split('/')[1] for p in moments} == {'adamw', 'muon'}
  assert experiment.case_text(ONE) == 'data=1' and jax.device_count() == 8
