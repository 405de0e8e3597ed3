"""Scores and counts against loops over rows and places.

Legend: B rows, C places, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unmask_cases

from paraxis.configs.base import decode as fields
from paraxis.decode.unmask import policies

RNG = np.random.default_rng(0)
Z = RNG.normal(0, 2, (4, 9, 7))
TOKENS = RNG.integers(0, 7, (4, 9))
OPEN = RNG.random((4, 9)) < 0.7


def policy(**given):
  return fields.Unmask(**given)


@pytest.mark.parametrize('name', ['confidence', 'margin', 'entropy'])
def test_scores(name):
  found = policies.score(policy(score=name), jnp.array(Z), TOKENS, None)
  want = [
    [unmask_cases.score(name, z, t) for z, t in zip(*row, strict=True)]
    for row in zip(Z, TOKENS, strict=True)
  ]
  np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
  assert found.min() >= 0 and found.max() <= 1


def test_a_random_score_is_its_noise():
  noise = jnp.array(RNG.random((4, 9)))
  found = policies.score(policy(score='random'), jnp.array(Z), TOKENS, noise)
  np.testing.assert_array_equal(found, noise)


COUNTS = [
  dict(count='fixed', tokens=1), dict(count='fixed', tokens=3),
  dict(count='threshold', threshold=0.5),
  dict(count='threshold', threshold=1.0),
  dict(count='factor', factor=1.0), dict(count='factor', factor=2.5),
  dict(count='hierarchy', threshold=0.8), dict(count='ascending'),
]  # fmt: skip


@pytest.mark.parametrize(
  'given', COUNTS, ids=lambda g: '-'.join(map(str, g.values()))
)
def test_counts(given):
  given, call = policy(**given), np.array([0, 1, 2, 5])
  for ties in (False, True):
    score = RNG.random((4, 9)).round(1 if ties else 9)
    masks = OPEN.copy()
    masks[3] = False
    found = policies.chosen(given, jnp.array(score), jnp.array(masks), call)
    for row in range(4):
      places = np.flatnonzero(masks[row])
      want = unmask_cases.chosen(given, score[row], places, call[row])
      assert set(np.flatnonzero(found[row]).tolist()) == want


def test_ascending_calls_fill_a_canvas():
  """In log2 of its places, the last call what is left."""
  for width in (1, 2, 7, 8, 9, 31, 32, 33):
    masks, calls = jnp.ones((1, width), bool), 0
    score = jnp.array(RNG.random((1, width)))
    while masks.any():
      masks &= ~policies.chosen(
        policy(count='ascending'), score, masks, jnp.array([calls])
      )
      calls += 1
    assert calls == max(1, math.ceil(math.log2(width)))


def test_ends_are_later():
  """0 is an end of no score, 1 changes nothing, and text brings them back."""
  score, end = jnp.array([[0.5, 0.8]] * 3), jnp.array([[True, False]] * 3)
  share = jnp.array([0.0, 0.5, 1.0])
  for weight, want in ((0.0, [0, 0.25, 0.5]), (0.4, [0.2, 0.35, 0.5])):
    found = policies.later_ends(policy(end_weight=weight), score, end, share)
    np.testing.assert_allclose(found, [[w, 0.8] for w in want], rtol=1e-6)
  same = policies.later_ends(policy(), score, end, share)
  np.testing.assert_array_equal(same, score)


def test_credit():
  """By hand: three calls, the first token ahead in two of them."""
  given = policy(credit_weight=0.7, credit_decay=0.9, credit_power=0.3)
  calls = [
    np.array([[[1.0, 0.0]]]),
    np.array([[[2.0, 0.0]]]),
    np.array([[[0.0, 0.1]]]),
  ]
  credit, want = jnp.zeros((1, 1, 2)), [0.0, 0.0]
  for z in calls:
    fused, credit = policies.credited(
      given, jnp.array(z), credit, jnp.ones((1, 1), bool)
    )
    p = np.exp(z[0, 0]) / np.exp(z[0, 0]).sum()
    want = [0.9 * x for x in want]
    want[int(p.argmax())] += p.max() ** 0.3
    np.testing.assert_allclose(credit[0, 0], want, rtol=1e-5)
    np.testing.assert_allclose(
      fused[0, 0], z[0, 0] + 0.7 * np.log1p(want), rtol=1e-5
    )
  # It was ahead before: it stays ahead of what is a little likelier now.
  assert fused[0, 0].argmax() == 0 and calls[-1][0, 0].argmax() == 1
  same, _ = policies.credited(
    policy(), jnp.array(Z), jnp.ones(Z.shape), jnp.array(OPEN)
  )
  np.testing.assert_array_equal(same, Z.astype(same.dtype))


def test_no_mask_takes_no_credit():
  given = policy(credit_weight=1.0)
  _, credit = policies.credited(
    given, jnp.array(Z), jnp.zeros(Z.shape), jnp.array(OPEN)
  )
  assert (np.asarray(credit)[~OPEN] == 0).all()
  assert (np.asarray(credit)[OPEN].max(-1) > 0).all()


def test_ranks_count_the_better_ones():
  score = jnp.array([[0.1, 0.9, 0.5, 0.9]])
  assert policies.ranks(score).tolist() == [[3, 0, 2, 1]]
  assert jax.eval_shape(policies.ranks, score).dtype == jnp.int32
