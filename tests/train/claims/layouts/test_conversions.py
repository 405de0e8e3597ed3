"""Claims about layouts hold, and fail when what they are about is broken."""

import claim_cases
import pytest

from paraxis.sharding.planner import conversions as layout
from paraxis.train.claims.layouts import conversions as claims_layout

SHAPE = (16, 8)
SOME = ('data:S(0) tensor:S(0) -> tensor:S(0)', 'tensor:P -> B')
MESH = 'data=2,tensor=4'


@pytest.fixture
def run():
  sizes = {'model.d_model': 32, 'model.d_ff': 64, 'data.sequence_length': 8}
  return claim_cases.run_of('oneflow', sizes)


def test_totals_are_of_all_devices(run):
  check = lambda totals: claims_layout.conversion_totals(
    run, size=4, shape=SHAPE, totals=totals
  )
  right = check({'S(0) -> B': 3, 'P -> B': 6})
  assert right.passed and right.measured == '2 of 2' and 'B 6' in right.caveat
  wrong = check({'S(0) -> B': 3, 'P -> B': 3})
  assert not wrong.passed and wrong.measured == '1 of 2'


def test_declared_is_counted(run):
  """All bytes on one axis: the sum is right, the axes are not."""
  cost = layout.cost
  one = lambda *args: {'tensor': sum(cost(*args).values())}
  _, wrong = claim_cases.holds_until(
    layout, 'cost', one, claims_layout.conversions_declared, run,
    mesh=MESH, shape=SHAPE, conversions=SOME,
  )  # fmt: skip
  assert wrong.measured == '1 of 2'


def test_values(run):
  """A permutation that does nothing leaves blocks in wrong places."""
  claim_cases.holds_until(
    layout.jax.lax, 'ppermute', lambda x, *_: x,
    claims_layout.conversions_equal, run,
    mesh=MESH, shape=SHAPE, conversions=SOME, within=1e-12,
  )  # fmt: skip


def test_the_pair_that_moves_least(run):
  pair = lambda rows: claims_layout.cheapest_pair(run, size=4, rows=rows)
  assert pair(8).passed
  # More tokens than weights: all weights are gathered, whatever their layout.
  assert not pair(4096).passed


def test_sums_that_wait(run):
  block = claims_layout._block
  each = lambda x, w, defer: block(x, w, False)
  outcomes = claim_cases.holds_until(
    claims_layout, '_block', each, claims_layout.deferred_sums, run,
    mesh='tensor=8',
  )  # fmt: skip
  assert [o.measured for o in outcomes] == ['2 -> 1', '2 -> 2']


def test_the_parallel_block_equals_one_device(run):
  nobody_sums = lambda y, *_: y
  right, _ = claim_cases.holds_until(
    layout, 'convert', nobody_sums, claims_layout.deferred_sums_equal, run,
    mesh='tensor=8', within=1e-9,
  )  # fmt: skip
  assert 0 < float(right.measured) < 1e-12
