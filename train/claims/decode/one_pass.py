"""Claims about decoders that write all tokens of some frames in one pass."""

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.models import frames as frames_lib
from paraxis.train.claims import experiment
from paraxis.train.claims import knockouts


def as_a_loop(run, *, rows, length, within):
  """EQ: integrate-and-fire as one product, and frame by frame.

  Args:
    rows: of frames, of random weights. length: frames.
  """
  rng = np.random.default_rng(0)
  h, alpha = rng.normal(size=(rows, length, 8)), rng.random((rows, length))
  wanted = [_looped(*row) for row in zip(h, alpha, strict=True)]
  numbers, most = [len(x) for x in wanted], max(map(len, wanted))
  with jax.enable_x64(True):
    count = frames_lib.counted(alpha)
    made = np.asarray(frames_lib.fired(h, alpha, count, most))
  padded = [np.pad(x, ((0, most - len(x)), (0, 0))) for x in wanted]
  same = np.asarray(count).tolist() == numbers
  return experiment.equal(
    [experiment.gap(made, padded)], within,
    f'{rows} rows of {length} frames with random weights, {sum(numbers)} '
    f'tokens, {"as" if same else "NOT as"} many as the loop fires',
    same,
  )  # fmt: skip


def _looped(h_SD, alpha_S):
  """Tokens (n, D) of a row, frame by frame; the last may lack .45 of a token,
  as in FunASR."""
  out, total, token = [], 0.0, np.zeros(h_SD.shape[1])
  for h, left in zip(h_SD, alpha_S, strict=True):
    while total + left >= 1:
      out.append(token + (1 - total) * h)
      left, total, token = left - (1 - total), 0.0, np.zeros(len(h))
    total, token = total + left, token + left * h
  return np.array([*out, token] if total >= 1 - 0.45 else out)


def not_split():
  """Knock-out: a frame is whole in the token that it begins in."""

  def whole(alpha, tokens):
    first = jnp.cumsum(alpha, 1) - alpha
    own = jnp.floor(first)[..., None] == jnp.arange(tokens)
    return jnp.where(own, alpha[..., None], 0)

  return knockouts.patched(frames_lib, 'split', whole)
