"""Checks of recurrences hold, and fail where what they check is broken."""

import functools
import types

import claim_cases
import jax
import jax.numpy as jnp

from paraxis.pallas_kernels.scans import affine as affine_scan
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
  assert check(3).passed and check(3).measured == '3.0'
  assert 'forward alone 3.00' in check(3).caveat
  assert not check(3.1).passed


def test_bytes_of_states_are_counted():
  claim_cases.holds_until(
    scan, 'received', lambda *sizes: 7, claims_scans.state_crosses,
    devices=4, lengths=[32, 64], shape=SHAPE,
  )  # fmt: skip


def solve(at_most):
  return claims_scans.iterations(
    None, cell='gru', problem=dict(tokens=64, channels=4, seeds=3),
    deviations=[0.02, 1.0], tolerance=1e-6, cap=30, at_most=at_most,
  )  # fmt: skip


def test_iterations_grow_with_the_recurrence():
  found = solve([4, 12])
  weak, strong = map(int, found.measured.split())
  assert found.passed and 1 <= weak < strong
  assert not solve([weak, strong - 1]).passed


def test_the_depth_of_a_solve_is_logarithmic():
  solve = functools.partial(affine_scan.affine_scan, impl='loop')
  in_turn = lambda *arrays, impl: solve(*arrays)
  claim_cases.holds_until(
    affine_scan, 'affine_scan', in_turn, claims_scans.depth_of_solve,
    lengths=[64, 128, 256], channels=1, numbers=2,
  )  # fmt: skip


def test_the_depth_of_a_loop_is_its_turns():
  def turns(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x) + 1, None), x, None, 10)[0]

  assert claims_scans._depth(jax.make_jaxpr(turns)(1.0).jaxpr) == 20


def test_solved_equals_in_sequence():
  run = claim_cases.run_of('', {'model.position': 'none'})
  reference = trial.reference

  def off(config, *given):
    """Newton's loss is another."""
    real = reference(config, *given)
    far = 1e-6 * (config.model.recurrent.solver == 'newton')
    return types.SimpleNamespace(
      gradients=real.gradients, loss=real.loss * (1 + far)
    )

  claim_cases.holds_until(
    trial, 'reference', off, claims_scans.newton_equals_sequence, run,
    cases=[dict(pattern='R')], within=1e-9,
  )  # fmt: skip
