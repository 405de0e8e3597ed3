"""Weights that follow from their names, batches, distances, golden numbers.

What `transformers` computes comes from hf_peer.py where torch is installed;
elsewhere tests/golden/peers has it (hf_families.py).

Legend: B rows, T tokens, D model, H head width, V vocabulary.
"""

import math
import pathlib
import zlib

import numpy as np

from paraxis.models import batch

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'peers'
TOLERANCE = 1e-9  # of the largest value


def weight(name, shape, spread):
  """float64 of that standard deviation, evenly distributed, from its name.

  Only raw integers of a generator are the same in every NumPy.
  """
  bits = np.random.PCG64(zlib.crc32(name.encode()))
  words = bits.random_raw(math.prod(shape)).reshape(shape)
  return (words / 2.0**64 - 0.5) * 12**0.5 * spread


def rows(vocab, shape):
  """A batch of one document a row; shape: (B, T)."""
  words = np.random.PCG64(1).random_raw(shape[0] * (shape[1] + 1))
  ids = (words % vocab).astype(np.int32).reshape(shape[0], -1)
  ones = np.ones(shape, np.int32)
  positions = np.arange(shape[1], dtype=np.int32) * ones
  return batch.Batch(
    ids[:, :-1], ids[:, 1:], ones, positions, ones * 1.0, ones.sum() * 1.0
  )


def within(prefix, values):
  """{prefix/name: value}."""
  return {f'{prefix}/{name}': value for name, value in values.items()}


def mlp_of(hf, name):
  """Llama's mlp by our names."""
  return {x: hf(f'{name}.{x}_proj.weight').T for x in ('gate', 'up', 'down')}


def distance(a, b, scale=None):
  """Largest difference, relative to the largest value of `scale` or b."""
  a, b = np.asarray(a), np.asarray(b)
  assert a.dtype == b.dtype == np.float64 and a.shape == b.shape
  largest = np.abs(b if scale is None else scale).max()
  assert np.isfinite(a).all() and largest > 0
  return np.abs(a - b).max() / largest


# --------------------------------------------------------------------- golden


def numbers(logits, grads):
  """What a golden file keeps: some logits, and of every gradient its norm and
  its product with the `weight` of its path."""
  length = logits.shape[1]
  seen = np.asarray(logits)[:, [length // 2, length - 1]]
  along = lambda p, g: (np.asarray(g) * weight(p, g.shape, 1.0)).sum()
  return seen, {
    p: np.array([np.linalg.norm(g), along(p, g)]) for p, g in grads.items()
  }
