"""Attention on the host against one query, one head, one slot at a time."""

import math

import numpy as np
import pytest

from paraxis.pallas_kernels.decode_attention import host

ROWS, QUERIES, SLOTS, HEADS, KV_HEADS, WIDTH, SCALE = 2, 3, 5, 6, 2, 4, 0.7


def drawn():
  rng, shape = np.random.default_rng(0), (ROWS, KV_HEADS, SLOTS, WIDTH)
  q = rng.normal(size=(ROWS, QUERIES, HEADS, WIDTH))
  return q, rng.normal(size=shape), rng.normal(size=shape)


def one_by_one(q, k, v, kv_head):
  o, lse = np.zeros_like(q), np.zeros(q.shape[:3])
  for b, t, n in np.ndindex(lse.shape):
    pairs = list(zip(k[b, kv_head(n)], v[b, kv_head(n)], strict=True))
    masses = [math.exp(SCALE * np.dot(q[b, t, n], key)) for key, _ in pairs]
    lse[b, t, n] = math.log(math.fsum(masses))
    for mass, (_, value) in zip(masses, pairs, strict=True):
      o[b, t, n] += mass / math.fsum(masses) * value
  return o, lse


def test_every_query_attends_to_all_slots():
  found = host.attend(*drawn(), SCALE)
  wanted = one_by_one(*drawn(), lambda n: n // 3)
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)
  other = one_by_one(*drawn(), lambda n: n % 2)
  with pytest.raises(AssertionError):
    np.testing.assert_allclose(found[1], other[1], rtol=1e-3)


def test_large_scores_do_not_overflow():
  q, k, v = (x.astype(np.float32) for x in drawn())
  o, lse = host.attend(1e4 * q, k, v, SCALE)
  assert o.dtype == lse.dtype == np.float32
  assert np.isfinite(o).all() and lse.max() > 1e3
