"""Claims about late workers fail where chunks have no coefficients, more are
late than a scheme bears, or all are waited for."""

import claim_cases

from paraxis.train.claims.outer import coding

NAME = 'sequential_gradient_coding'


def test_chunks_without_coefficients_are_seen():
  claim_cases.falls(NAME, 'coefficients', codes=[[5, 2]])


def test_one_more_late_worker_is_seen():
  check = lambda beyond: coding.in_time(
    None, n=4, bursts=[[1, 2, 1]], rounds=3, beyond=beyond
  )
  assert check(0).passed
  found = check(1)
  assert not found.passed and not found.measured.startswith('0 ')


def test_every_conforming_pattern_is_tried():
  """By hand: of 3 workers at most one is late in 2 rounds, never twice."""
  found = coding._patterns(3, coding.lib.Bursts(1, 2, 1), 2)
  assert len(found) == 1 + 3 + 3  # nobody; one in either round


def test_a_master_that_waits_for_all_is_seen():
  given = dict(
    n=64, rounds=60, seeds=[1], fixed=1.0, at_most=0.9,
    grids={'GC': [[4], [6]], 'M-SGC': [[4, 5, 12]]},
  )  # fmt: skip
  assert coding.makespan(None, patience=1.0, **given).passed
  assert not coding.makespan(None, patience=1e9, **given).passed
