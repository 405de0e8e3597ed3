"""Without its mechanism a claim about programs fails: every EQ and HLO one.

`make knockouts` also runs those that train or compile for a real machine, too
long for a test; those of simulators are in test_knockouts.py.
"""

import claim_cases
import pytest

CASES = claim_cases.switched_off('EQ', 'HLO')


@pytest.mark.sampled(64)
@pytest.mark.parametrize('path, off, claim', CASES)
def test_a_claim_fails_without_its_mechanism(path, off, claim, tmp_path):
  claim_cases.loses(path, off, claim, tmp_path)
