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
  assert right.measured == '6 of 6' and '94 of 94 leaves' in right.caveat
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
  right, wrong = claim_cases.falls(NAME, 'whole', read=['fsdp,'])
  assert float(right.measured) < 1.05 and 'chunks are 0.50' in right.caveat
  assert float(wrong.measured) > 1.9


def test_a_chunk_is_read_once_until_each_shard_reads_it():
  right, wrong = claim_cases.falls(NAME, 'apart', read=[',fsdp+tensor'])
  assert float(right.measured) < 1.05 and 'chunks are 1.00' in right.caveat
  assert float(wrong.measured) > 3.9  # of 4 shards of a process


def test_chosen_chunks_are_those_of_shards_until_the_writer_chooses():
  right, wrong = claim_cases.falls(NAME, 'as_written', read=[',fsdp+tensor'])
  assert float(right.measured) < 1.05 and 'shards are 0.50' in right.caveat
  assert float(wrong.measured) > 1.9


def test_the_composed_layout_has_all():
  """Stages of v_half, experts folded over axes, ZeRO-2, Muon and averages."""
  run = claim_cases.run_of(NAME)
  ((_, (asked, job)),) = resharding._made(run, [STAGED]).items()
  assert asked.pipeline.schedule == 'v_half' and job.mesh.shape['stage'] == 2
  assert asked.mesh.zero == 2
  assert asked.model.experts.region == 'data+tensor'
  folders = {path.split('/')[0] for path in job.leaves}
  assert {'params', 'optimizer', 'ema'} <= folders
  assert any(path.startswith('optimizer/muon/mu/') for path in job.leaves)


def test_a_state_of_random_numbers_has_every_leaf():
  run = claim_cases.run_of(NAME)
  ((_, job),) = resharding._made(run, [ONE]).values()
  values = resharding._drawn(job)
  assert len({x.tobytes() for x in values.values()}) == len(values)
  assert {x.dtype.name for x in values.values()} == {'float32', 'int32'}
  moments = [p for p in values if '/mu/' in p]
  assert {p.split('/')[1] for p in moments} == {'adamw', 'muon'}
  averages = {p[4:] for p in values if p.startswith('ema/')}
  params = {p[7:] for p in values if p.startswith('params/')}
  assert averages == params - {'layers/moe/load'}  # counted, not learned
  assert experiment.case_text(ONE) == 'data=1' and jax.device_count() == 8
