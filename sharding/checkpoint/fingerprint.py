"""Layout-free fingerprints of arrays, computed where the arrays live.

Every element is hashed with its global index and the hashes are summed modulo
2**32. With u the element's bits, f a fixed bijection of 32-bit words and s(i),
t(i) two hashes of the global index i:

  word1 = sum_i f(u_i ^ s(i))        word2 = sum_i f(u_i ^ s(i)) * (t(i) | 1)

Integer sums are exact in any order, so the result is the same on every mesh,
sharding and process count. f is a bijection: a change of one element (any bit
flip) always changes both words. Other damage, such as exchanged elements, is
missed with probability 2**-64. This detects accidents; it does not resist a
constructed collision.

Source: the 32-bit finaliser of MurmurHash3 (public domain). A plain weighted
sum of bits, the usual choice, does not detect that x and -x are exchanged;
hence f is not linear. Cost: one pass over memory, about 20 integer operations
per 32 bits (5 GB per CPU-second); three words per leaf leave the device.
"""

from collections.abc import Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import rows

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def _mix(x):
  """A bijection of uint32 in which every input bit reaches every output bit."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _bits(x):
  """Raw bits as uint32, same shape; 8-byte types get a last axis of 2."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
  return bits.astype(jnp.uint32)


def _leaf(x, first=0):
  """Array -> uint32 (word1, word2, 1 if any element is not finite).

  first: index of its first row in the leaf that it is a block of.
  """
  if x.size == 0:
    return (np.uint32(0),) * 3
  u = _bits(x)
  s, t = np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15)
  for axis, size in enumerate(u.shape):
    # Hash the index of one axis at a time: vectors, and no overflow of a flat
    # index in arrays of more than 2**32 elements.
    index = jnp.arange(size, dtype=jnp.uint32) + np.uint32(axis * 0x27D4EB2F)
    index = index if axis else index + jnp.uint32(first)
    other = (1,) * axis + (size,) + (1,) * (u.ndim - axis - 1)
    s = s + _mix(index).reshape(other)
    t = t + _mix(~index).reshape(other)
  h = _mix(u ^ s)
  bad = h & np.uint32(0)
  if jnp.issubdtype(x.dtype, jnp.inexact):
    found = (~jnp.isfinite(x)).astype(jnp.uint32)
    bad = bad | (found if x.ndim == h.ndim else found[..., None])
  # One reduction of three words: one pass over memory, three times as fast as
  # three sums, and sharded dimensions exchange their partial words only.
  return jax.lax.reduce(
    (h, h * (t | np.uint32(1)), bad),
    (np.uint32(0),) * 3,
    lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] | b[2]),
    tuple(range(h.ndim)),
  )


@functools.lru_cache(maxsize=8)
def _compiled(out):
  """One jit per output sharding, kept: a new one would compile every time."""

  def measure(tree):
    return jnp.stack([jnp.stack(_leaf(x)) for x in tree.values()])

  return jax.jit(measure, out_shardings=out)


@jax.jit
def _block(x, first):
  return jnp.stack(_leaf(x, first))


def _of_blocks(leaf):
  """The words of a rows.Rows: sums over its blocks."""
  total = np.zeros(3, np.uint32)
  for first, x in leaf.blocks() if leaf.size else ():
    words = np.asarray(_block(x, np.uint32(first)))
    total[:2] += words[:2]
    total[2] |= words[2]
  return total


def _supported(name, x):
  kind = getattr(x, 'dtype', None)
  if kind is None or not isinstance(x, (jax.Array, np.ndarray, rows.Rows)):
    raise errors.UserError(
      f'{name} is {type(x).__name__}, not an array; store it as jnp.asarray.'
    )
  if jnp.issubdtype(kind, jax.dtypes.prng_key):
    raise errors.UserError(
      f'{name} is a typed random key; store jax.random.key_data of it.'
    )
  four_bit = kind.name in ('int2', 'uint2', 'int4', 'uint4', 'float4_e2m1fn')
  if kind.itemsize not in _UNSIGNED or kind.kind == 'c' or four_bit:
    raise errors.UserError(f'{name} is {kind}: no fingerprint of that type.')


def measure(
  tree: Mapping[str, jax.Array | np.ndarray | rows.Rows],
) -> tuple[dict[str, str], list[str]]:
  """Fingerprints and the names of leaves that hold NaN or infinity.

  One compiled pass over all leaves, and over each block of a rows.Rows. Every
  process must call it.

  Args:
    tree: {name: array}, any shapes and shardings over the same devices; 1, 2, 4
      or 8 byte real types. Empty leaves and scalars are fine.

  Returns:
    ({name: 16 hex digits}, [names of non-finite leaves]).

  Raises:
    UserError: a leaf is no array or of an unsupported type.
  """
  if not tree:
    return {}, []
  for name, x in tree.items():
    _supported(name, x)
  arrays = {n: x for n, x in tree.items() if not isinstance(x, rows.Rows)}
  shardings = [getattr(x, 'sharding', None) for x in arrays.values()]
  named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  out = None
  if named:
    out = jax.sharding.NamedSharding(
      named[0].mesh, jax.sharding.PartitionSpec()
    )
  ordered = {name: arrays[name] for name in sorted(arrays)}
  found = np.asarray(_compiled(out)(ordered)) if ordered else ()
  words = dict(zip(ordered, found, strict=True))
  for name, x in tree.items():
    if isinstance(x, rows.Rows):
      words[name] = _of_blocks(x)
  prints = {n: '{:08x}{:08x}'.format(*words[n]) for n in sorted(words)}
  return prints, [n for n in sorted(words) if words[n][2]]


def fingerprint(tree: Mapping[str, jax.Array | np.ndarray]) -> dict[str, str]:
  """{name: array} -> {name: 16 hex digits}; equal bits, equal digits.

  See `measure` for what a leaf may be. The type and the shape are not part of
  the digits: compare those too.
  """
  return measure(tree)[0]


def nbytes(tree: Mapping[str, Any]) -> int:
  """Bytes of all leaves of {name: array or ShapeDtypeStruct}, unsharded."""
  return sum(
    math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in tree.values()
  )
