"""Claims about the model of overlapped products can fail."""

from paraxis.configs import t3
from paraxis.train.claims.layouts import overlap


def test_the_models_claims_can_fail():
  small = dict(machine=t3.MACHINE, models=t3.MODELS, batches=[1])
  gain = overlap.overlap_gain
  right = dict(geomean=1.30, most=1.47, within=0.03)
  assert gain(None, **small, **right).passed
  assert not gain(None, **small, **{**right, 'geomean': 1.2}).passed
  far = gain(None, **small, **{**right, 'most': 1.6})
  assert far.passed and far.verdict == 'direction only'
  saved = lambda geomean, most: overlap.movement_saved(
    None, models=t3.MODELS, geomean=geomean, most=most, within=0.02
  )
  assert saved(0.22, 0.25).passed and not saved(0.22, 0.25).verdict
  assert saved(0.22, 0.36).verdict == 'direction only'
  assert not saved(0.36, 0.25).passed and not saved(0.36, 0.25).verdict
