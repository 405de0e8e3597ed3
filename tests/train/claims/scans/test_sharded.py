"""Checks of recurrences hold, and fail where what they check is broken."""

import types

import claim_cases
import jax
import jax.numpy as jnp
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.sharding.sequence import scan
from paraxis.train.bench import measure as bench_measure
from paraxis.train.certify import trial
from paraxis.train.claims.scans import sharded as claims_scans

SHAPE = [1, 2, 4]


def test_chunks_equal_the_loop_until_a_chunk_forgets():
  real = gated_scan.gated_scan

  def forgets(*arrays, **how):
    o, state = real(*arrays, **how)
    return o, state if how['impl'] == 'loop' else 0.999 * state

  claim_cases.holds_until(
    gated_scan, 'gated_scan', forgets, claims_scans.chunks_equal_the_loop,
    length=21, shape=SHAPE, chunks=[8], within=1e-12,
  )  # fmt: skip


def test_costs_are_ratios(monkeypatch):
  seconds = dict(plain=6.0, loop=4.0, xla=2.0)
  times = {
    f'{name}{part}': [x, 2 * x, x]
    for name, x in seconds.items()
    for part in ('', ' forward')
  }
  monkeypatch.setattr(bench_measure, 'interleave', lambda *given: times)
  check = lambda at_least: claims_scans.chunks_cost(
    None, lengths=[32], shape=SHAPE, rounds=3, at_least=at_least
  )
  assert check(2).passed and check(2).measured == '2.0'  # of our own loop
  assert 'forward alone 2.00' in check(2).caveat
  assert 'jax differentiates 3.0' in check(2).caveat
  assert not check(2.1).passed


def test_bytes_of_states_are_counted():
  claim_cases.holds_until(
    scan, 'received', lambda *sizes: 7, claims_scans.state_crosses,
    devices=4, lengths=[32, 64], shape=SHAPE,
  )  # fmt: skip


def solve(at_most=3, cap=64):
  return claims_scans.iterations(
    None, cell='gru', problem=dict(tokens=64, channels=4, seeds=3),
    deviations=[0.02], stronger=[1.0], tolerance=1e-6, cap=cap, at_most=at_most,
  )  # fmt: skip


def test_iterations_are_few_until_there_are_no_jacobians():
  found = solve()
  few = int(found.measured)
  assert found.passed and not solve(few - 1).passed
  assert 'at 1: ' in found.caveat
  with claims_scans.picard():
    assert int(solve().measured) > 3 * few
  with pytest.raises(errors.UserError, match='=64 .* cannot fail .* cap=64'):
    solve(64)


def test_the_depth_of_a_solve_is_logarithmic():
  ask = lambda: claims_scans.depth_of_solve(
    None, lengths=[64, 128, 256], channels=1, numbers=2
  )
  assert ask().passed
  with claims_scans.in_turn():
    assert not ask().passed


def test_the_depth_of_a_loop_is_its_turns():
  def turns(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x) + 1, None), x, None, 10)[0]

  assert claims_scans._depth(jax.make_jaxpr(turns)(1.0).jaxpr) == 20


EQUAL = dict(cases=[dict(pattern='R')], within=1e-9)


def test_solved_equals_in_sequence():
  run = claim_cases.run_of('', {'model.position': 'none'})
  reference = trial.reference

  def off(*given):
    """The loss in sequence is another."""
    real = reference(*given)
    return types.SimpleNamespace(
      gradients=real.gradients, loss=real.loss * (1 + 1e-6)
    )

  claim_cases.holds_until(
    trial, 'reference', off, claims_scans.newton_equals_sequence, run, **EQUAL
  )


@pytest.mark.parametrize(
  'never',
  [{'model.recurrent.solver': 'sequential'}, {'model.recurrent.iterations': 1}],
  ids=str,
)
def test_a_loop_compared_with_itself_is_no_solution(never):
  run = claim_cases.run_of('', {'model.position': 'none'} | never)
  assert not claims_scans.newton_equals_sequence(run, **EQUAL).passed
