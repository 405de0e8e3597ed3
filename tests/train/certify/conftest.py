"""What tests of certification share."""

import pytest

from paraxis.train.certify import trial

KEPT = trial._one_device, trial._gradients, trial._reference


@pytest.fixture(autouse=True)
def references(request):
  """One device's numbers from a test that breaks a mechanism serve no other."""
  yield
  if 'monkeypatch' in request.fixturenames:
    for cached in KEPT:
      cached.cache_clear()
