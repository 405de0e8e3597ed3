"""Claims about layouts hold, and fail when what they are about is broken."""

import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.sharding.planner import conversions as layout
from paraxis.train.claims import harness as claims
from paraxis.train.claims.layouts import conversions as claims_layout

SHAPE = (16, 8)
SOME = ('data:S(0) tensor:S(0) -> tensor:S(0)', 'tensor:P -> B')
MESH = 'data=2,tensor=4'


@pytest.fixture
def run(tmp_path):
  config = command_line.load('oneflow')
  config.model.update(d_model=32, d_ff=64)
  config.data.sequence_length = 8
  return claims.Run(schema.view(config), tmp_path, say=lambda text: None)


def test_totals_are_of_all_devices(run):
  check = lambda totals: claims_layout.conversion_totals(
    run, size=4, shape=SHAPE, totals=totals
  )
  right = check({'S(0) -> B': 3, 'P -> B': 6})
  assert right.passed and right.measured == '2 of 2' and 'B 6' in right.caveat
  wrong = check({'S(0) -> B': 3, 'P -> B': 3})
  assert not wrong.passed and wrong.measured == '1 of 2'


def test_declared_is_counted(run, monkeypatch):
  check = lambda: claims_layout.conversions_declared(
    run, mesh=MESH, shape=SHAPE, conversions=SOME
  )
  assert check().passed
  # All bytes on one axis: the sum is right, the axes are not.
  cost = layout.cost
  monkeypatch.setattr(
    layout, 'cost', lambda *args: {'tensor': sum(cost(*args).values())}
  )
  wrong = check()
  assert not wrong.passed and wrong.measured == '1 of 2'


def test_values(run, monkeypatch):
  check = lambda: claims_layout.conversions_equal(
    run, mesh=MESH, shape=SHAPE, conversions=SOME, within=1e-12
  )
  assert check().passed
  # A permutation that does nothing leaves blocks in wrong places.
  monkeypatch.setattr(layout.jax.lax, 'ppermute', lambda x, *_: x)
  assert not check().passed


def test_the_pair_that_moves_least(run):
  pair = lambda rows: claims_layout.cheapest_pair(run, size=4, rows=rows)
  assert pair(8).passed
  # More tokens than weights: all weights are gathered, whatever their layout.
  assert not pair(4096).passed


def test_sums_that_wait(run, monkeypatch):
  check = lambda: claims_layout.deferred_sums(run, mesh='tensor=8')
  right = check()
  assert right.passed and right.measured == '2 -> 1'
  block = claims_layout._block
  monkeypatch.setattr(
    claims_layout, '_block', lambda x, w, defer: block(x, w, False)
  )
  wrong = check()
  assert not wrong.passed and wrong.measured == '2 -> 2'


def test_the_parallel_block_equals_one_device(run):
  found = claims_layout.deferred_sums_equal(run, mesh='tensor=8', within=1e-9)
  assert found.passed and 0 < float(found.measured) < 1e-12


def test_a_block_that_nobody_sums_is_seen(run, monkeypatch):
  monkeypatch.setattr(layout, 'convert', lambda y, *_: y)
  found = claims_layout.deferred_sums_equal(run, mesh='tensor=8', within=1e-9)
  assert not found.passed


def test_too_few_devices(run):
  with pytest.raises(errors.UserError, match='16 places for 8 devices'):
    claims_layout.deferred_sums(run, mesh='tensor=16')
