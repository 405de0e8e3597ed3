"""Which implementation of attention runs, which blocks its kernels visit."""

import chex
import kernel_cases
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import adapters as attention_adapters
from paraxis.pallas_kernels.attention import blocks as attention_blocks
from paraxis.pallas_kernels.attention import op as attention
from paraxis.pallas_kernels.attention import xla as attention_xla

CPU, TPU, GPU = kernel_cases.CPU, kernel_cases.TPU, kernel_cases.GPU


# ------------------------------------------------------------------- choice --


X = 1, 1024, 2, 128
SPEC = attention.AttentionSpec(X, X, 'bfloat16', attention.Mask(), False, False)


def names(impl, target, spec):
  return tuple(i.name for i in attention.choose(impl, spec, target))


@pytest.mark.parametrize(
  'impl, target, chosen',
  [
    ('auto', CPU, ('xla', 'xla')),
    ('auto', TPU, ('pallas_tpu', 'pallas_tpu')),
    ('auto', GPU, ('pallas_hopper', 'pallas_hopper')),
    ('xla', TPU, ('xla', 'xla')),
    ('pallas_tpu/xla', TPU, ('pallas_tpu', 'xla')),
    ('xla/auto', GPU, ('xla', 'pallas_hopper')),
    ('splash', TPU, ('splash', 'pallas_tpu')),
    ('cudnn/xla', GPU, ('cudnn', 'xla')),
  ],
)
def test_each_pass_is_chosen(impl, target, chosen):
  assert names(impl, target, None) == names(impl, target, SPEC) == chosen


@pytest.mark.parametrize(
  'impl, target, line',
  [
    ('xla/pallas_gpu', TPU, 'needs a GPU, target is TPU v5 lite'),
    ('pallas_hopper', TPU, 'needs a GPU, target is TPU v5 lite'),
    ('xla/splash', TPU, 'splash has no backward pass'),
    ('xla/other', TPU, "no implementation 'other'"),
  ],
)
def test_what_cannot_run_is_an_error_with_its_reason(impl, target, line):
  with pytest.raises(errors.UserError, match=line):
    attention.choose(impl, SPEC, target)


# ------------------------------------------------------------------- blocks --


def plans():
  """(Plan of 100 queries and keys in blocks of 16 x 32, visible_BTS)."""
  rng = np.random.default_rng(0)
  packed = np.sort(rng.integers(0, 4, (2, 100)), 1).astype(np.int32)
  order = np.stack([rng.permutation(100) for _ in range(2)]).astype(np.int32)
  near = np.arange(100, dtype=np.int32)[None] + np.array([[0], [7]], np.int32)
  for causal, window, segments, places in [
    (True, 0, None, None),
    (True, 30, None, None),
    (False, 0, None, None),
    (False, 9, None, None),
    (True, 0, packed, None),
    (False, 0, packed, None),
    (True, 40, packed, near),
    (True, 0, None, order),
  ]:
    mask = attention.Mask(causal=causal, window=window)
    pair = lambda x: None if x is None else (x, x)
    args = pair(segments), pair(places)
    plan = attention_blocks.plan((100, 100), *args, mask, (16, 32))
    ok = np.asarray(reference.visible(mask, 100, 100, *args))
    yield plan, np.broadcast_to(ok, (plan.kinds.shape[0], 100, 100))


def by_blocks(plan, ok, fill):
  """(B, R, C, 16, 32) of visible_BTS; what is past the end is `fill`."""
  (tp, sp), (b, t, s) = plan.padded, ok.shape
  ok = np.pad(ok, [(0, 0), (0, tp - t), (0, sp - s)], constant_values=fill)
  return ok.reshape(b, tp // 16, 16, sp // 32, 32).swapaxes(2, 3)


def test_kinds_are_true_of_every_pair():
  seen = set()
  for plan, ok in plans():
    kinds = np.asarray(plan.kinds)
    some = by_blocks(plan, ok, False).any((-1, -2))
    keys = np.pad(ok, [(0, 0), (0, 0), (0, plan.padded[1] - 100)])
    keys = np.pad(keys, [(0, 0), (0, 12), (0, 0)], mode='edge')
    every = by_blocks(plan, keys, False).all((-1, -2))
    assert not some[kinds == 0].any() and every[kinds == 2].all()
    seen |= set(kinds.flat)
  assert seen == {0, 1, 2}


@pytest.mark.parametrize('by_key', [False, True])
def test_lists_hold_every_visible_block_once(by_key):
  at = attention_blocks
  for plan, _ in plans():
    kinds = plan.kinds.swapaxes(1, 2) if by_key else plan.kinds
    entries, steps, size = at.flat(kinds, plan.most_blocks[by_key])
    kinds, columns_of = np.asarray(kinds), np.asarray(at.lists(kinds)[0])
    counts = np.asarray(at.lists(kinds)[1])
    for b, row in enumerate(np.asarray(entries).reshape(-1, size)):
      row = row[: int(steps)]
      live = row[at.KIND(row) > 0]
      places = list(zip(at.ROW(live), at.COLUMN(live), strict=True))
      assert places == [tuple(x) for x in np.argwhere(kinds[b] > 0)]
      np.testing.assert_array_equal(at.KIND(live), kinds[b][kinds[b] > 0])
      for end in (at.FIRST, at.LAST):  # each row begins and ends once
        np.testing.assert_array_equal(
          at.ROW(row[end(row)]), np.arange(kinds.shape[1])
        )
      for r, (full, every) in enumerate(counts[b]):
        listed = columns_of[b, r, :every]
        assert (kinds[b, r, listed[:full]] == 2).all()
        assert (kinds[b, r, listed[full:]] == 1).all()
        assert every == (kinds[b, r] > 0).sum() == len(set(listed))


def test_cost_is_that_of_the_visible_blocks():
  q, v = np.zeros((3, 64, 4, 8), 'f4'), np.zeros((3, 64, 2, 16), 'f4')
  plan = attention_blocks.plan((64, 64), None, None, attention.Mask(), (16, 16))
  pairs = 3 * 4 * 10 * 16 * 16  # 10 of 16 blocks
  found = [
    attention_blocks.cost(which, plan, q, v).flops
    for which in ('forward', 'dq', 'dkv')
  ]
  assert found == [2 * pairs * n for n in (8 + 16, 2 * 8 + 16, 2 * 8 + 2 * 16)]


def test_splash_gives_the_same_output_and_lse():
  rng = np.random.default_rng(0)
  make = lambda n: rng.normal(size=(1, 128, n, 128)).astype('f4')
  q, k, v = make(2), make(1), make(1)
  ids = np.repeat([[0, 1, 2, 0]], 32, axis=1).reshape(1, 128)
  ids = ids.astype(np.int32)
  mask = attention.Mask(scale=0.1, window=20, softcap=3.0)
  launch = attention_blocks.Launch((128, 128), True)
  args = q, k, v, (ids, ids), None, mask
  actual = attention_adapters.splash(*args, launch)
  wanted = attention_xla.forward(*args)
  chex.assert_trees_all_close(actual, wanted, rtol=1e-5, atol=1e-5)
