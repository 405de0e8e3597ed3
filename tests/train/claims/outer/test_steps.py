"""Claims about replicas fail where a step of one sees another."""

import contextlib

import claim_cases

from paraxis.sharding import annotate
from paraxis.train.claims.outer import steps

SMALL = {
  'model.d_model': 16, 'model.d_ff': 32, 'model.vocab_size': 64,
  'data.sequence_length': 16,
}  # fmt: skip


def test_a_sum_over_replicas_is_seen():
  run = claim_cases.run_of('diloco', SMALL)
  cases = [{'mesh': 'replica=2,fsdp=2'}]
  claim_cases.holds_until(
    annotate, 'hide', lambda axis: contextlib.nullcontext(), steps.alone, run,
    cases=cases, within=1e-9,
  )  # fmt: skip
