"""Problems of attention for tests: arrays, documents, all results, errors.

Legend: B rows, T queries, S keys, N query heads, K kv heads, H head size, V of
the values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.pallas_kernels import reference
from paraxis.pallas_kernels.attention import op as attention

NAMES = 'o', 'lse', 'dq', 'dk', 'dv', 'dsinks'


class Case(NamedTuple):
  """Arguments of attention (sinks: None or an array), cotangents (do, dlse)."""

  q: Any
  k: Any
  v: Any
  sinks: Any
  mask: Any
  segments: Any
  order: Any
  cotangents: Any

  def wide(self):
    """The same numbers in float64."""
    arrays, cotangents = jax.tree.map(
      lambda x: np.asarray(x, 'f8'), (self[:4], self.cotangents)
    )
    return Case(*arrays, *self[4:7], cotangents)


def documents(B, T, seed=1):
  """(B, T) segments: padding (0) and documents; the last row ends with 0."""
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(0, 4, (B, T)), axis=1)
  segments[0, :3], segments[-1, -5:] = 0, 0
  return segments.astype(np.int32)


def shuffled(B, T, seed=2):
  """(B, T) places in any order."""
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(T) for _ in range(B)]).astype(np.int32)


def make(dtype='f8', packed=False, ordered=False, sinks=False, **given):
  """Case of random arrays.

  Args:
    packed, ordered, sinks: are there segments, an order, sinks?
    given: sizes B, T, S, N, K, H, V and fields of attention.Mask.
  """
  sizes = dict(B=2, T=37, N=4, K=2, H=8)
  sizes |= {n: given.pop(n) for n in 'BTSNKHV' if n in given}
  B, T, N, K, H = (sizes[n] for n in 'BTNKH')
  S, V = sizes.get('S', T), sizes.get('V', H)
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(dtype)
  arrays = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, V)
  cotangents = draw(B, T, N, V), draw(B, T, N)
  pair = lambda ids, seed: (ids(B, T), ids(B, S, *(seed,) * (S != T)))
  return Case(
    *arrays,
    draw(N) if sinks else None,
    attention.Mask(**dict(scale=0.4) | given),
    pair(documents, 5) if packed else None,
    (shuffled(B, T), shuffled(B, S, 3)) if ordered else None,
    cotangents,
  )


def results(attend, case):
  """NAMES of a loss that uses both outputs; dsinks: None without sinks."""
  do, dlse = case.cotangents

  def loss(*arrays):
    *qkv, sinks = arrays
    o, lse = attend(*qkv, *case[4:7], sinks_N=sinks)
    used = jnp.where(lse > attention.NEG / 2, lse, 0)
    return (o * do).sum() + (jnp.sin(used) * dlse).sum(), (o, lse)

  run = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
  (_, out), grads = jax.jit(run)(*case[:4])
  return *out, *grads


def exact(case):
  """`results` by definition, in float64."""
  with jax.enable_x64(True):
    return results(reference.attention_ref, case.wide())


def compare(actual, wanted, outputs, gradients=None):
  """Largest error beside the largest value: of o and lse, and of gradients.

  gradients: the bound on their error; None: that of outputs.
  """
  for name, a, b in zip(NAMES, actual, wanted, strict=False):
    if b is None:
      continue
    a, b = np.asarray(a, 'f8'), np.asarray(b, 'f8')
    dead = b <= attention.NEG / 2
    assert np.isfinite(a).all(), name
    np.testing.assert_array_equal(a <= attention.NEG / 2, dead, err_msg=name)
    scale = max(1, np.abs(np.where(dead, 0, b)).max())
    error = np.abs(np.where(dead, 0, a - b)).max() / scale
    bound = outputs if name in NAMES[:2] else gradients or outputs
    assert error <= bound, (name, error)
