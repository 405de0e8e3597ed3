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
