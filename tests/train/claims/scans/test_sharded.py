"""Checks of recurrences hold, and fail where what they check is broken."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs import schema
from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.sharding.sequence import scan
from paraxis.train.claims import harness as claims
from paraxis.train.claims.scans import sharded as claims_scans

SHAPE = [1, 2, 4]


@pytest.fixture
def run(tmp_path):
  config = schema.Config()
  model = dataclasses.replace(config.model, position='none')
  return claims.Run(dataclasses.replace(config, model=model), tmp_path)


def chunks(run):
  return claims_scans.chunks_equal_the_loop(
    run, length=21, shape=SHAPE, chunks=[8], within=1e-12
  )


def test_chunks_equal_the_loop_until_a_chunk_forgets(run, monkeypatch):
  assert chunks(run).passed
  real = gated_scan.gated_scan

  def forgets(*arrays, **how):
    o, state = real(*arrays, **how)
    return o, state if how['impl'] == 'loop' else 0.999 * state

  monkeypatch.setattr(gated_scan, 'gated_scan', forgets)
  assert not chunks(run).passed


def test_costs_are_ratios(run):
  found = claims_scans.chunks_cost(
    run, lengths=[32], shape=SHAPE, rounds=1, at_least=0
  )
  assert found.passed and float(found.measured) > 0
  assert 'forward alone' in found.caveat


def states(run):
  return claims_scans.state_crosses(
    run, devices=4, lengths=[32, 64], shape=SHAPE
  )


def test_bytes_of_states_are_counted(run, monkeypatch):
  assert states(run).passed
  monkeypatch.setattr(scan, 'received', lambda *sizes: 7)
  assert not states(run).passed


def solve(run, at_most):
  return claims_scans.iterations(
    run, cell='gru', problem=dict(tokens=64, channels=4, seeds=3),
    deviations=[0.02, 1.0], tolerance=1e-6, cap=30, at_most=at_most,
  )  # fmt: skip


def test_iterations_grow_with_the_recurrence(run):
  found = solve(run, [4, 12])
  weak, strong = map(int, found.measured.split())
  assert found.passed and 1 <= weak < strong
  assert not solve(run, [weak, strong - 1]).passed


def test_the_depth_of_a_solve_is_logarithmic(run):
  found = claims_scans.depth_of_solve(
    run, lengths=[64, 128, 256], channels=1, numbers=2
  )
  assert found.passed


def test_the_depth_of_a_loop_is_its_turns():
  def turns(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x) + 1, None), x, None, 10)[0]

  assert claims_scans._depth(jax.make_jaxpr(turns)(1.0).jaxpr) == 20


def test_solved_equals_in_sequence(run):
  found = claims_scans.newton_equals_sequence(
    run, cases=[dict(pattern='R')], within=1e-9
  )
  assert found.passed
