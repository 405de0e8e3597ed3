"""Which tokens a shard holds, and which block pairs are listed."""

import numpy as np
import pytest

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import op as attention
from paraxis.sharding.sequence import order as context_order

MASKS = {
  'causal': attention.Mask(block=4),
  'window': attention.Mask(block=4, window=11),
  'past': attention.Mask(block=4, window=10, causal=False),
  'full': attention.Mask(block=4, causal=False),
}


def test_orders_by_hand():
  order = context_order.order
  assert order('contiguous', 2, 8).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert order('zigzag', 2, 8).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
  assert order('striped', 2, 8).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize('layout', context_order.LAYOUTS)
@pytest.mark.parametrize('n', [1, 3, 8])
def test_every_token_has_one_place(layout, n):
  length = 6 * n
  order = context_order.order(layout, n, length)
  assert order.shape == (n, 6)
  there = context_order.permutation(layout, n, length)
  assert sorted(there) == list(range(length))
  row = np.arange(length) * 10
  np.testing.assert_array_equal(row[there].reshape(n, 6), row[order])


def test_auto_is_contiguous_only_if_every_layer_has_a_window():
  resolve, full, window = (
    context_order.resolve_order,
    MASKS['causal'],
    MASKS['window'],
  )
  assert resolve('auto', [window, window]) == 'contiguous'
  assert resolve('auto', [window, full]) == 'zigzag'
  assert resolve('auto', []) == 'zigzag'
  assert resolve('striped', [window]) == 'striped'


def listed(blocks, q, k):
  pairs = blocks.table[blocks.which[q, k]]
  kept = pairs[pairs[:, 0] >= 0]
  assert (pairs[len(kept) :] == -1).all()
  return {tuple(pair) for pair in kept.tolist()}


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('layout', context_order.LAYOUTS)
@pytest.mark.parametrize('length, shards', [(64, 4), (64, 2), (88, 4)])
def test_pairs_hold_every_visible_entry(layout, mask, length, shards):
  """Four ranks in 4 or 2 shards; 88 tokens make runs that need padding."""
  mask = MASKS[mask]
  blocks = context_order.blocks(layout, 4, length, mask, shards)
  runs = context_order.runs(layout)
  ids = context_order.order(layout, 4, length).reshape(4, runs, -1)
  extra = blocks.run - ids.shape[2]
  assert 0 <= extra < blocks.run // blocks.block <= blocks.count
  ids = np.pad(ids, ((0, 0), (0, 0), (0, extra)), constant_values=-1)
  ids = ids.reshape(shards, blocks.count, blocks.block)
  seen = np.asarray(reference.visible(mask, length, length)[0])
  least = 0
  for q, k in np.ndindex(shards, shards):
    some = {
      (i, j)
      for i, j in np.ndindex(blocks.count, blocks.count)
      if seen[
        np.ix_(ids[q, i][ids[q, i] >= 0], ids[k, j][ids[k, j] >= 0])
      ].any()
    }
    found = listed(blocks, q, k)
    assert some <= found
    if layout != 'striped':  # bounds are exact where a block is one run
      assert some == found
    if some:
      least = max(least, (q - k) % shards)
  assert blocks.hops == least + 1


def test_zigzag_and_striped_give_every_rank_the_same():
  mask, busiest = attention.Mask(block=16), {}
  for layout in context_order.LAYOUTS:
    blocks = context_order.blocks(layout, 8, 1024, mask, 8)
    work = [sum(len(listed(blocks, q, k)) for k in range(8)) for q in range(8)]
    busiest[layout] = max(work) / np.mean(work)
  assert busiest['zigzag'] == busiest['striped'] == 1
  assert busiest['contiguous'] > 1.7


def test_the_table_does_not_grow_with_the_ranks():
  """Causal shards differ in three ways; a list for each pair would be 64."""
  mask = attention.Mask(block=16)
  table = context_order.blocks('zigzag', 8, 2048, mask, 8).table
  assert len(table) == 3
  assert len(context_order.blocks('zigzag', 16, 4096, mask, 16).table) == 3
