"""The model of overlapped products: by hand, and its claims can fail."""

import math

import pytest

from paraxis.configs import t3
from paraxis.train.claims.layouts import overlap

MACHINE = dict(flops=1e9, memory=1e9, link=1e3, latency=0.0)


def layer(n, inner=500, tokens=1000, hidden=100):
  return overlap._Sublayer('', tokens, inner, hidden, n)


def test_speedup_by_hand():
  """Product 0.1 s (1e8 operations), chunk of 200000 / n bytes."""
  product, send = overlap._times(layer(2), {**MACHINE, 'link': 1e6})
  assert (product, send) == (0.1, 0.1)
  found = overlap.speedup(layer(2), {**MACHINE, 'link': 1e6})
  # Half the product, the message beside the other half, the gather.
  assert found == pytest.approx((0.1 + 0.2) / (0.05 + 0.1 + 0.1))
  # Slow links: only the first of four chunks is waited for.
  product, send = overlap._times(layer(4), MACHINE)
  found = overlap.speedup(layer(4), MACHINE)
  assert found == pytest.approx((product + 6 * send) / (product / 4 + 6 * send))
  # Fast links: nothing to hide. Latency counts in every message.
  fast = {**MACHINE, 'link': math.inf}
  assert overlap.speedup(layer(8), fast) == 1
  assert overlap._times(layer(8), {**fast, 'latency': 2.0})[1] == 2
  # A product that only reads and writes.
  slow = {**MACHINE, 'memory': 1e3, 'link': math.inf}
  assert overlap._times(layer(2), slow)[0] == 2 * (
    1000 * 500 + 500 * 100 + 1000 * 100) / 1e3  # fmt: skip


def test_no_speedup_beyond_a_half():
  """The gather stays, so three equal parts are the best case."""
  for link in (10.0**k for k in range(2, 9)):
    for n in (2, 8, 64):
      found = overlap.speedup(layer(n), {**MACHINE, 'link': link})
      assert 1 <= found <= 1.5


def test_moved_bytes_by_hand():
  """Four devices: the ring's messages and sums one by one, in chunks."""
  apart = overlap.moved_bytes(layer(4), False)
  fused = overlap.moved_bytes(layer(4), True)
  chunk = 2 * 1000 * 100 // 4
  # Sends own; then reads arrived and own; the sum is read to be sent: twice,
  # and the last sum stays.
  assert apart['ring reads'] == chunk * (1 + 2 + 2 + 2)
  assert apart['ring writes'] == chunk * (3 + 1)
  assert fused['ring reads'] == chunk * 2 and fused['product writes'] == (
    chunk * 3
  )
  assert apart['inputs'] == fused['inputs'] == 2 * (1000 * 500 + 500 * 100)
  assert apart['gather'] == fused['gather'] == chunk * 6


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
