"""A state keeps what its gates say; that they say nothing is seen."""

import claim_cases
import pytest

from paraxis.pallas_kernels.scans import gated as gated_scan
from paraxis.train.claims.scans import decays

G = dict(kind='G', gates=dict(normaliser=16), length=9, within=1e-9)
M = dict(kind='M', gates={}, length=9, within=1e-9)
ROWS = {'model.position': 'none'}


def test_gates_of_keys_until_there_are_none():
  assert decays.left_by_formula(claim_cases.run_of('', ROWS), **G).passed
  none = ROWS | {'model.gated_linear.gate_normaliser': 1e12}
  found = decays.left_by_formula(claim_cases.run_of('', none), **G)
  assert not found.passed and float(found.measured) > 0.1


def test_decays_of_heads_until_there_are_none():
  run = claim_cases.run_of('', ROWS)
  assert decays.left_by_formula(run, **M).passed
  with decays.no_decay():
    assert float(decays.left_by_formula(run, **M).measured) > 1


@pytest.mark.parametrize('given', [G, M], ids='GM')
def test_a_scan_without_resets_is_seen(given):
  real = gated_scan.gated_scan
  on = lambda q, k, v, g, reset, *rest, **how: real(
    q, k, v, g, 0 * reset, *rest, **how
  )
  claim_cases.holds_until(
    gated_scan, 'gated_scan', on, decays.left_by_formula,
    claim_cases.run_of('', ROWS), **given,
  )  # fmt: skip
