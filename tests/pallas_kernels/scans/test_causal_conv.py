"""The causal convolution against loops over tokens and taps.

Legend: B batch, T length, W taps, D channels.
"""

import chex
import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
import support

from paraxis.pallas_kernels.scans import causal_conv

pytestmark = pytest.mark.usefixtures('float64')

B, D = 2, 3


def by_hand(x, w, positions, tail, dilation):
  """(y, the inputs that the next token may read), one product at a time."""
  r = (len(w) - 1) * dilation
  longer, y = jnp.concatenate([tail, x], 1), jnp.zeros_like(x)
  for b, t, j in np.ndindex(*x.shape[:2], len(w)):
    if positions[b, t] >= j * dilation:
      y = y.at[b, t].add(w[j] * longer[b, r + t - j * dilation])
  return y, longer[:, longer.shape[1] - r :]


def packed(t):
  """Positions: row 0 continues a document, row 1 begins one; both pack."""
  ends = [(5, 6, t), (2, 9, t)]
  rows = []
  for first, cuts in zip((40, 0), ends, strict=True):
    row = [first + i for i in range(cuts[0])]
    for a, b in zip(cuts, cuts[1:], strict=False):
      row += range(b - a)
    rows.append(row)
  return np.array(rows)


@pytest.mark.parametrize(
  't, taps, dilation', [(17, 4, 1), (17, 3, 4), (9, 1, 1)]
)
def test_equals_the_loop(t, taps, dilation):
  rng = np.random.default_rng(0)
  r = (taps - 1) * dilation
  shapes = (B, t, D), (taps, D), (B, r, D), (B, t, D), (B, r, D)
  arrays = [rng.normal(size=s) for s in shapes]
  positions = packed(t)
  found, wanted = (
    kernel_cases.with_gradients(
      lambda x, w, tail, op=op: op(x, w, positions, tail, dilation=dilation),
      arrays[:3],
      arrays[3:],
    )
    for op in (causal_conv.causal_conv, by_hand)
  )
  chex.assert_trees_all_close(found, wanted, rtol=0, atol=1e-12)


def test_a_tap_that_ignores_documents_is_found():
  rng = np.random.default_rng(0)
  x, w, tail = (rng.normal(size=s) for s in ((B, 17, D), (4, D), (B, 3, D)))
  wanted, _ = by_hand(x, w, packed(17), tail, 1)
  y, _ = causal_conv.causal_conv(x, w, packed(17) + 40, tail)
  assert np.abs(y - wanted).max() > 0.1


def test_ragged_pieces_are_the_whole_row():
  """Rows take what they like of each call, down to nothing at all."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(B, 24, D)), rng.normal(size=(4, D))
  positions = np.broadcast_to(np.arange(24), (B, 24))
  run = jax.jit(
    lambda *a: causal_conv.causal_conv(*a[:4], valid_BT=a[4], dilation=2)
  )
  whole, end = causal_conv.causal_conv(x, w, positions, dilation=2)
  tail, at, parts = np.zeros((B, 6, D)), np.zeros(B, int), [[], []]
  for takes in ((3, 8), (8, 0), (0, 1), (6, 8), (7, 7)):
    piece = rng.normal(size=(B, 8, D))  # what is beyond must not matter
    where, valid = np.zeros((B, 8), int), np.zeros((B, 8), bool)
    for b, n in enumerate(takes):
      piece[b, :n] = x[b, at[b] : at[b] + n]
      where[b, :n], valid[b, :n] = np.arange(at[b], at[b] + n), True
    y, tail = run(piece, w, where, tail, valid)
    for b, n in enumerate(takes):
      parts[b].append(y[b, :n])
    at += takes
  assert (at == 24).all()
  for b in range(B):
    np.testing.assert_allclose(np.concatenate(parts[b]), whole[b], atol=1e-12)
  np.testing.assert_array_equal(tail, end)


def test_what_does_not_fit_is_an_error():
  x, w, positions = np.ones((B, 5, D)), np.ones((4, D)), np.zeros((B, 5), int)
  run = causal_conv.causal_conv
  for args, dilation, texts in (
    ((x, w[:, :2], positions), 1, ('3 channels', 'w has 2')),
    ((x, w, positions, np.ones((B, 2, D))), 1, ('(2, 2, 3)', '(2, 3, 3)')),
    ((x, w, positions), 0, ('4 taps', 'dilation 0')),
  ):
    with support.refused(*texts):
      run(*args, dilation=dilation)
