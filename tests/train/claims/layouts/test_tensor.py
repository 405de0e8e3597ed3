"""Claims about collective matmuls: they measure what they say, and can fail."""

import claim_cases
import jax
import support

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
