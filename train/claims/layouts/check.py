"""Claims about a config that need no device (train/certify/check.py).

As in train/claims/harness.py, every public function whose first argument is
`run` is a check that a config can name: 'claims_check.<function>'.
"""

from paraxis.train.certify import check
from paraxis.train.claims import harness as claims


def parameters(run, *, expected):
  """EQ: the model has exactly `expected` parameters, counted from shapes."""
  found = check.parameters(run.config)
  return claims.Outcome(
    f'{expected:,}',
    f'{found:,}',
    'counted from shapes; no array is made',
    found == expected,
  )
