"""Claims about collective matmuls: they measure what they say, and can fail."""

import math

import claim_cases
import jax
import pytest
import support

from paraxis.configs import t3
from paraxis.sharding.tensor import rings as tensor
from paraxis.train.claims.layouts import tensor as claims_tensor


def test_rings_equal_products_until_a_ring_adds_a_neighbours_chunk():
  put = tensor._put
  next_rank = lambda whole, chunk, rank, n, dim: put(
    whole, chunk, (rank + 1) % n, n, dim
  )
  right, wrong = claim_cases.holds_until(
    tensor, '_put', next_rank, claims_tensor.rings_equal_products,
    shards=2, within=1e-12,
  )  # fmt: skip
  assert '2 shards' in right.caveat and float(wrong.measured) > 0.1
  assert not jax.config.jax_enable_x64  # as before


def test_messages_are_counted(monkeypatch):
  outcome = claims_tensor.ring_messages(None, shards=4)
  assert outcome.passed and outcome.measured == '3+6+3+3 permutes'
  send = tensor._send
  back = lambda x, axis, step: send(
    send(send(x, axis, 1), axis, -1), axis, step
  )
  monkeypatch.setattr(tensor, '_send', back)  # right, and three times the way
  outcome = claims_tensor.ring_messages(None, shards=2)
  assert not outcome.passed and 'DIFFER' in outcome.caveat


TEXT = """HloModule m, is_scheduled=true, num_partitions=4

%inside (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %c = f32[4,4]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
}

%cheap (b: f32[4,4]) -> f32[4,4] {
  %b = f32[4,4]{1,0} parameter(0)
  ROOT %n = f32[4,4]{1,0} negate(%b)
}

ENTRY %main (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %s1 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%p)
  %f1 = f32[4,4]{1,0} fusion(%p), kind=kOutput, calls=%inside
  %s2 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%f1)
  %f2 = f32[4,4]{1,0} fusion(%p), kind=kOutput, calls=%inside
  %d1 = f32[4,4]{1,0} collective-permute-done(%s1)
  %d2 = f32[4,4]{1,0} collective-permute-done(%s2)
  %s3 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%d2)
  %f3 = f32[4,4]{1,0} fusion(%d1), kind=kLoop, calls=%cheap
  %d3 = f32[4,4]{1,0} collective-permute-done(%s3)
  %g = f32[16,4]{1,0} all-gather(%d3), dimensions={0}
  ROOT %f4 = f32[4,4]{1,0} fusion(%g), kind=kOutput, calls=%inside
}
"""


def test_products_between_start_and_end():
  """Two, one, none in a fusion that has no product, none while all wait."""
  assert claims_tensor.schedule(TEXT) == [2, 1, 0, 0]


SMALL = dict(topology='v5p:2x2x1', tokens=256, width=256, mlp=512)


@support.compiles('tpu')
def test_messages_enclose_products_on_a_tpu(monkeypatch):
  check = claims_tensor.messages_enclose_products
  outcome = check(None, **SMALL)
  assert outcome.passed and outcome.measured == '15 messages'
  assert 'collectives apart: 0 of 5' in outcome.caveat
  arrivals = tensor._arrivals

  def all_first(*args):
    """No product before the last chunk is there."""
    ranks, chunks = zip(*arrivals(*args), strict=True)
    return zip(ranks, jax.lax.optimization_barrier(chunks), strict=True)

  monkeypatch.setattr(tensor, '_arrivals', all_first)
  outcome = check(None, **SMALL)
  assert not outcome.passed and outcome.expected == '15 messages'


MACHINE = dict(flops=1e9, memory=1e9, link=1e3, latency=0.0)


def layer(n, inner=500, tokens=1000, hidden=100):
  return claims_tensor._Sublayer('', tokens, inner, hidden, n)


def test_speedup_by_hand():
  """Product 0.1 s (1e8 operations), chunk of 200000 / n bytes."""
  product, send = claims_tensor._times(layer(2), {**MACHINE, 'link': 1e6})
  assert (product, send) == (0.1, 0.1)
  found = claims_tensor.speedup(layer(2), {**MACHINE, 'link': 1e6})
  # Half the product, the message beside the other half, the gather.
  assert found == pytest.approx((0.1 + 0.2) / (0.05 + 0.1 + 0.1))
  # Slow links: only the first of four chunks is waited for.
  product, send = claims_tensor._times(layer(4), MACHINE)
  found = claims_tensor.speedup(layer(4), MACHINE)
  assert found == pytest.approx((product + 6 * send) / (product / 4 + 6 * send))
  # Fast links: nothing to hide. Latency counts in every message.
  fast = {**MACHINE, 'link': math.inf}
  assert claims_tensor.speedup(layer(8), fast) == 1
  assert claims_tensor._times(layer(8), {**fast, 'latency': 2.0})[1] == 2
  # A product that only reads and writes.
  slow = {**MACHINE, 'memory': 1e3, 'link': math.inf}
  assert claims_tensor._times(layer(2), slow)[0] == 2 * (
    1000 * 500 + 500 * 100 + 1000 * 100) / 1e3  # fmt: skip


def test_no_speedup_beyond_a_half():
  """The gather stays, so three equal parts are the best case."""
  for link in (10.0**k for k in range(2, 9)):
    for n in (2, 8, 64):
      found = claims_tensor.speedup(layer(n), {**MACHINE, 'link': link})
      assert 1 <= found <= 1.5


def test_moved_bytes_by_hand():
  """Four devices: the ring's messages and sums one by one, in chunks."""
  apart = claims_tensor.moved_bytes(layer(4), False)
  fused = claims_tensor.moved_bytes(layer(4), True)
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
  small = dict(machine=t3.MACHINE, models=t3.MODELS)
  gain = claims_tensor.overlap_gain
  right = dict(geomean=1.30, most=1.47, within=0.06)
  assert gain(None, **small, **right).passed
  assert not gain(None, **small, **{**right, 'geomean': 1.2}).passed
  assert not gain(None, **small, **{**right, 'most': 1.6}).passed
  saved = claims_tensor.movement_saved
  assert saved(None, models=t3.MODELS, geomean=0.22, within=0.02).passed
  assert not saved(None, models=t3.MODELS, geomean=0.36, within=0.02).passed
