"""The model of overlapped products: by hand, and chunk by chunk."""

import math

import numpy as np
import pytest

from paraxis.sharding.planner import overlap

MACHINE = overlap.Machine(flops=1e9, memory=1e9, link=1e3, latency=0.0)
LAYER = overlap.Sublayer(tokens=1000, inner=500, hidden=100, n=2)


def _on(n):
  return LAYER._replace(n=n)


def _ring(product, send, n):
  """End of a reduce-scatter whose links and product run side by side.

  Chunk by chunk of one rank: message k needs the link, chunk k of the product,
  and the message of the rank before it, which all ranks send at once.
  """
  made = [product * (k + 1) / n for k in range(n)]
  link = arrived = 0.0
  for k in range(n - 1):
    start = max(link, made[k], arrived)
    link = arrived = start + send
  return max(arrived, made[-1])


@pytest.mark.parametrize('seed', range(4))
def test_overlapped_is_a_ring_beside_a_product(seed):
  rng = np.random.default_rng(seed)
  for n in (2, 3, 8):
    product, send = rng.uniform(0, 2, 2)
    found = overlap.overlapped(product, send, n)
    assert found == pytest.approx(_ring(product, send, n))
    assert found < overlap.sequential(product, send, n)  # it can differ


def test_speedup_by_hand():
  """Product 0.1 s (1e8 operations), chunk of 200000 / n bytes."""
  quick = MACHINE._replace(link=1e6)
  product, send = overlap.times(LAYER, quick)
  assert (product, send) == (0.1, 0.1)
  found = overlap.speedup(LAYER, quick)
  # Half the product, the message beside the other half, the gather.
  assert found == pytest.approx((0.1 + 0.2) / (0.05 + 0.1 + 0.1))
  # Slow links: only the first of four chunks is waited for.
  product, send = overlap.times(_on(4), MACHINE)
  found = overlap.speedup(_on(4), MACHINE)
  assert found == pytest.approx((product + 6 * send) / (product / 4 + 6 * send))
  # Fast links: nothing to hide. Latency counts in every message.
  fast = MACHINE._replace(link=math.inf)
  assert overlap.speedup(_on(8), fast) == 1
  assert overlap.times(_on(8), fast._replace(latency=2.0))[1] == 2
  # A product that only reads and writes.
  slow = MACHINE._replace(memory=1e3, link=math.inf)
  assert overlap.times(LAYER, slow)[0] == 2 * (
    1000 * 500 + 500 * 100 + 1000 * 100) / 1e3  # fmt: skip


def test_no_speedup_beyond_a_half():
  """The gather stays, so three equal parts are the best case."""
  for link in (10.0**k for k in range(2, 9)):
    for n in (2, 8, 64):
      found = overlap.speedup(_on(n), MACHINE._replace(link=link))
      assert 1 <= found <= 1.5


def _counted(n, fused):
  """(chunks read, chunks written) by the ring, and by what makes its chunks."""
  reads = writes = 0
  for k in range(n):
    last, first = k == n - 1, k == 0
    if not (fused and first):  # else it goes out as it is made
      writes += 1
    if not first:
      writes += 1  # what arrives: added in memory, or put down
      reads += 0 if fused else 2  # and read, with the own chunk
      writes += last and not fused  # the other sums go out as they are made
    if not last and first != fused:  # the own chunk, or a sum in memory
      reads += 1
  return reads, writes


@pytest.mark.parametrize('n', [2, 3, 4, 8])
def test_moved_bytes_chunk_by_chunk(n):
  chunk = 2 * 1000 * 100 // n
  for fused in (False, True):
    found = overlap.moved_bytes(_on(n), fused)
    reads, writes = _counted(n, fused)
    assert found['ring reads'] == chunk * reads
    both = found['product writes'] + found['ring writes']
    assert both == chunk * writes
    assert found['inputs'] == 2 * (1000 * 500 + 500 * 100)
    assert found['gather'] == chunk * 2 * (n - 1)
  assert _counted(n, True) != _counted(n, False)
