"""Losses on decoded texts against loops, and the record of their order.

Legend: N rows, S tokens of a row, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.decode import trace as trace_lib
from paraxis.decode.unmask import tuning

RNG = np.random.default_rng(1)
Z = jnp.array(RNG.normal(0, 2, (3, 5, 4)), jnp.float32)
IDS = RNG.integers(0, 4, (3, 5))
PART = RNG.random((3, 5)) < 0.7


def _p(z):
  p = np.exp(np.float64(z) - np.max(z))
  return p / p.sum()


def test_certainty_is_a_loop():
  nll, entropy = [], []
  for i, j in np.argwhere(PART):
    z = np.asarray(Z[i, j])
    nll.append(-np.log(_p(z)[IDS[i, j]]))
    if z.argmax() == IDS[i, j]:
      p = _p(z / tuning.SHARP)
      entropy.append(-(p * np.log(p)).sum())
  for weight in (0.0, 2.0):
    found = tuning.certainty(Z, IDS, PART, weight)
    want = np.mean(nll) + weight * np.mean(entropy)
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_only_right_tokens_are_made_sure():
  """The entropy has no gradient where the likeliest token is not the text's."""
  loss = lambda z, w: tuning.certainty(z, IDS, PART, w)
  plain, both = (jax.grad(loss)(Z, w) for w in (0.0, 1.0))
  extra = np.abs(both - plain).max(-1)
  right = PART & (np.asarray(Z).argmax(-1) == IDS)
  assert right.any() and (PART & ~right).any()
  assert (extra[right] > 1e-6).all() and (extra[~right] == 0).all()
  # Sharper logits have less of it.
  assert loss(3 * Z, 1.0) - loss(3 * Z, 0.0) < loss(Z, 1.0) - loss(Z, 0.0)


def test_trajectory_is_a_loop():
  old = np.log(RNG.uniform(0.05, 0.9, (3, 5)))
  gain = np.array([1.0, -0.5, 2.0])
  rows, ratios = [], []
  text = np.array([1, 0, 1])  # two calls of one text, one of the other
  for i in range(3):
    each = []
    for j in np.flatnonzero(PART[i]):
      r = _p(np.asarray(Z[i, j]))[IDS[i, j]] / np.exp(old[i, j])
      clipped = min(max(r, 1 - tuning.CLIP), 1 + tuning.CLIP)
      each.append(min(r * gain[i], clipped * gain[i]))
      ratios.append(abs(r - 1))
    rows.append(np.mean(each))
  loss, off = tuning.trajectory(Z, IDS, PART, old, gain, text)
  want = np.mean([np.mean([rows[0], rows[2]]), rows[1]])
  assert abs(want - np.mean(rows)) > 1e-2
  np.testing.assert_allclose([loss, off], [-want, max(ratios)], rtol=1e-4)
  ended = np.where([[1], [1], [0]], PART, False)  # of the third text
  nothing, _ = tuning.trajectory(Z, IDS, ended, old, gain, text)
  np.testing.assert_allclose(nothing, -np.mean(rows[:2]), rtol=1e-4)


def test_advantages_are_of_a_prompt():
  found = tuning.advantages([1, 0, 0, 0, 1, 1, 1, 1], 4)
  np.testing.assert_allclose(found[4:], 0)
  np.testing.assert_allclose(
    found[:4], np.array([3, -1, -1, -1]) / 3**0.5, rtol=1e-3
  )


def test_half_of_a_block_and_all_behind_it_are_masked():
  ids, there = np.zeros((200, 14), int), np.ones((200, 14), bool)
  there[:, 12:] = False
  masked, half = tuning.half_masked(ids, np.full(200, 2), there, 5, RNG)
  assert not masked[:, :2].any() and not masked[:, 12:].any()
  first, second = masked[:, 2:7], masked[:, 7:12]
  late = ~first.any(1)  # the second block, or no mask of the first one
  assert 60 < late.sum() < 140
  assert second[~late].all() and 0.4 < first[~late].mean() < 0.65
  assert 0.4 < second[late].mean() < 0.6
  # What stands behind the block has no loss.
  assert (half[:, 2:7] == first).all() and not half[~late, 7:].any()
  whole = late & second.all(1)  # by chance, or behind a block without a mask
  assert (half[late & ~whole] == masked[late & ~whole]).all()


def _result(calls, tokens):
  """Of canvases of 2 places: [{place: token}] of each call."""
  fill = lambda dtype: np.zeros((len(calls), 2), dtype)
  canvas, ids, final, p = fill(int), fill(int), fill(bool), fill(np.float32)
  left = {0, 1}
  for k, drawn in enumerate(calls):
    canvas[k] = [-1 if c in left else 7 for c in range(2)]
    for c, token in drawn.items():
      ids[k, c], final[k, c], p[k, c] = token, True, -k
    left = (left - {*drawn}) or {0, 1}
  made = trace_lib.Trace(canvas, ids, final, p, p, len(calls))
  return dict(tokens=tokens, trace=made)


def test_a_record_is_in_the_order_of_calls():
  calls = [{1: 5}, {0: 4}, {0: 6, 1: 3}]
  found = tuning.Rollouts.of([[1, 2]], [_result(calls, [4, 5, 6, 3])], 4)
  assert found.ids.tolist() == [[1, 2, 4, 5, 6, 3]]
  assert found.when.tolist() == [[-1, -1, 1, 0, 2, 2]]
  canvas, taken, text = found.calls(9)
  assert canvas.tolist() == [
    [1, 2, 9, 9, 9, 9], [1, 2, 9, 5, 9, 9], [1, 2, 4, 5, 9, 9],
  ]  # fmt: skip
  assert [np.flatnonzero(x).tolist() for x in taken] == [[3], [2], [4, 5]]
  assert text.tolist() == [0, 0, 0]


def test_behind_an_end_all_stays_masked():
  ended = _result([{0: 4, 1: 8}], [4])
  whole = _result([{0: 4}, {1: 5}, {0: 6, 1: 3}], [4, 5, 6, 3])
  found = tuning.Rollouts.of([[1], [1, 2]], [ended, whole], 4)
  assert found.there.sum(1).tolist() == [5, 6]
  assert found.when[0].tolist() == [-1, 0, 0, *[tuning.NEVER] * 2, -1]
  canvas, taken, text = found.calls(9)
  assert text.tolist() == [0, 1] * 3 and not taken[2].any()
  assert canvas[4].tolist()[:5] == [1, 4, 8, 9, 9]


def test_canvases_that_begin_in_a_prompt_are_refused():
  with pytest.raises(ValueError, match='call 0 is not of a canvas of masks'):
    made = _result([{1: 5}], [5])
    made['trace'].canvas[0, 0] = 3  # as of a block that has part of the prompt
    tuning.Rollouts.of([[3]], [made], 2)
