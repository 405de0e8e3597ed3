"""Layout-free fingerprints of arrays, computed where the arrays live.

Every element is hashed with its global index and the hashes are summed modulo
2**32. With u the element's bits, f a fixed bijection of 32-bit words and s(i),
t(i) two hashes of the global index i:

  word1 = sum_i f(u_i ^ s(i))        word2 = sum_i f(u_i ^ s(i)) * (t(i) | 1)

  f(x): x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35;
        x ^= x >> 16
  s(i) = 0x9E3779B9 + sum_a f(i_a + a * 0x27D4EB2F)
  t(i) = 0x7F4A7C15 + sum_a f(~(i_a + a * 0x27D4EB2F))

All modulo 2**32; i_a is the index along axis a = 0, 1, ...; ~ flips 32 bits. u
is an element of 1, 2 or 4 bytes extended by zeros; a bool is 0 or 1; one of 8
bytes is two elements, the low half first, along a last axis of its own. A
scalar has no axes; the words of an empty array are 0. The fingerprint is word1,
then word2, as 8 hexadecimal digits each.

Integer sums are exact in any order, so the result is the same on every mesh,
sharding and process count. f is a bijection: a change of one element (any bit
flip) always changes both words. Other damage, such as exchanged elements, is
missed with probability 2**-64. This detects accidents; it does not resist a
constructed collision.

Source: the 32-bit finaliser of MurmurHash3 (public domain). A plain weighted
sum of bits, the usual choice, does not detect that x and -x are exchanged;
hence f is not linear. Cost: one pass over memory, about 20 integer operations
per 32 bits (5 GB per CPU-second); three words per leaf leave each device.

Every device hashes the shards it holds, so replicas of a shard are compared in
the same pass: a device whose copy differs is named (`Words.read`).
"""

from collections.abc import Mapping
import contextlib
import functools
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding import meeting
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


def _leaf(x, first=()):
  """Array -> uint32 (word1, word2, 1 if any element is not finite).

  first: index of its first element in the leaf that it is a part of, for each
    axis; those not given are 0.
  """
  if x.size == 0:
    return (np.uint32(0),) * 3
  u = _bits(x)
  s, t = np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15)
  for axis, size in enumerate(u.shape):
    # Hash the index of one axis at a time: vectors, and no overflow of a flat
    # index in arrays of more than 2**32 elements.
    index = jnp.arange(size, dtype=jnp.uint32) + np.uint32(axis * 0x27D4EB2F)
    if axis < len(first):
      index = index + jnp.uint32(first[axis])
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
def _whole():
  """Words of arrays wherever they are: (leaves, 3)."""
  return jax.jit(lambda tree: jnp.stack([jnp.stack(_leaf(x)) for x in tree]))


@functools.lru_cache(maxsize=8)
def _of_devices(mesh, specs):
  """Words of the shards of each device, (*mesh, leaves, 3), where they are.

  One jit per mesh and layout, kept: a new one would compile every time. The
  program has no collective: a state is saved while others are under way.
  """
  lead = (1,) * len(mesh.axis_names)

  def words(x, spec):
    first = []
    for axis, names in enumerate(spec):
      place = jax.lax.axis_index(names) if names else 0
      first.append(place * x.shape[axis])
    return jnp.stack(_leaf(x, first))

  def local(tree):
    found = jnp.stack([words(*pair) for pair in zip(tree, specs, strict=True)])
    return found.reshape(*lead, *found.shape)

  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs,),
    out_specs=jax.P(*mesh.axis_names),
    check_vma=False,  # each device answers for itself, also for replicas
  )
  return jax.jit(mapped)


def _gathered(words):
  """The array of all devices; processes exchange theirs through the host."""
  if words.is_fully_addressable:
    return np.asarray(words)
  mine = [(s.index, np.asarray(s.data)) for s in words.addressable_shards]
  place = lambda index: [part.start or 0 for part in index[:-2]]
  text = json.dumps([[place(i), x.ravel().tolist()] for i, x in mine])
  out = np.zeros(words.shape, np.uint32)
  for other in meeting.gather('fingerprints', text):
    for at, values in json.loads(other):
      out[tuple(at)] = np.reshape(values, words.shape[-2:])
  return out


@jax.jit
def _block(x, first):
  return jnp.stack(_leaf(x, (first,)))


def _of_blocks(leaf):
  """The words of a rows.Rows: sums over its blocks."""
  total = np.zeros(3, np.uint32)
  for first, x in leaf.blocks() if leaf.size else ():
    with keeps_bits((leaf,)):
      words = np.asarray(_block(x, np.uint32(first)))
    total[:2] += words[:2]
    total[2] |= words[2]
  return total


def keeps_bits(leaves):
  """Within this context arrays of 8-byte numbers can be made, if some of the
  leaves are such; else JAX would make 4-byte ones where x64 is not enabled."""
  wide = any(x.dtype.itemsize == 8 for x in leaves)
  return jax.enable_x64(True) if wide else contextlib.nullcontext()


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


class Odd(NamedTuple):
  """A device whose copy of a shard is not that of most of its replicas.

  Attributes:
    leaf: name. device: jax device. others: devices with the same shard that
      agree with each other. axes: names of the mesh axes of its replicas along
      which the words change at the device.
  """

  leaf: str
  device: Any
  others: tuple
  axes: tuple[str, ...]

  def text(self) -> str:
    """One line: leaf, device, process, a device to compare, mesh axes."""
    name = lambda d: f'device {d.id} (process {d.process_index})'
    one, other = name(self.device), name(self.others[0])
    found = f'{self.leaf} of {one} is not that of {other}'
    if not self.axes:  # odd ones fill all its lines of the mesh
      return found
    axes = 'axis' if len(self.axes) == 1 else 'axes'
    return f'{found}, along mesh {axes} {", ".join(self.axes)}'


class Words:
  """Fingerprints under way: dispatched when made, waited for by `read`."""

  def __init__(
    self, tree: Mapping[str, jax.Array | np.ndarray | rows.Rows]
  ) -> None:
    """tree: as `measure` takes it; may be donated once this returns."""
    self._groups: list[tuple] = []  # (mesh, {name: spec}, words of devices)
    self._rows = {}
    alone, by_mesh = {}, {}
    for name, x in sorted(tree.items()):
      _supported(name, x)
      sharding: Any = getattr(x, 'sharding', None)
      if isinstance(x, rows.Rows):
        self._rows[name] = x
      elif _on_a_mesh(sharding):
        by_mesh.setdefault(sharding.mesh, {})[name] = x
      else:
        alone[name] = x
    for mesh, leaves in by_mesh.items():
      specs = {n: x.sharding.spec for n, x in leaves.items()}
      arrays = tuple(leaves.values())
      with keeps_bits(arrays):
        words = _of_devices(mesh, tuple(specs.values()))(arrays)
      self._groups.append((mesh, specs, words))
    if alone:
      with keeps_bits(alone.values()):
        words = _whole()(tuple(alone.values()))
      self._groups.append((None, dict.fromkeys(alone), words))

  def read(self) -> tuple[dict[str, str], list[str], list[Odd]]:
    """Waits -> ({name: 16 hex digits}, [names of non-finite leaves], [`Odd`]).

    Every process gets the same.
    """
    found, odd = {}, []
    for mesh, specs, words in self._groups:
      words = _gathered(words)
      for i, (name, spec) in enumerate(specs.items()):
        each = words[..., i, :]
        if mesh is None:
          found[name] = each
          continue
        found[name], devices = _summed(mesh, spec, each)
        odd += [Odd(name, *which) for which in devices]
    for name, x in self._rows.items():
      found[name] = _of_blocks(x)
    found = {n: found[n] for n in sorted(found)}
    prints = {n: '{:08x}{:08x}'.format(*w) for n, w in found.items()}
    return prints, [n for n, w in found.items() if w[2]], odd


def _on_a_mesh(sharding):
  if not isinstance(sharding, jax.NamedSharding):
    return False
  return sharding.mesh.size > 1 and sharding.memory_kind != 'pinned_host'


def _summed(mesh, spec, words):
  """Words (*mesh, 3) of one leaf -> (its words, [Odd without its leaf])."""
  used = {n for names in spec if names for n in np.atleast_1d(names)}
  axes = [i for i, n in enumerate(mesh.axis_names) if n in used]
  copies = [i for i in range(len(mesh.axis_names)) if i not in axes]
  order = *axes, *copies
  count = math.prod(words.shape[i] for i in axes)
  grid = words
  words = words.transpose(*order, words.ndim - 1).reshape(count, -1, 3)
  odd = []
  if not (words == words[:, :1]).all():
    devices = mesh.devices.transpose(order).reshape(count, -1)
    for row, held in zip(words, devices, strict=True):
      kinds = {tuple(w): [] for w in row}
      for w, device in zip(row, held, strict=True):
        kinds[tuple(w)].append(device)
      most, *rest = sorted(kinds.values(), key=len, reverse=True)
      for device in (d for other in rest for d in other):
        along = _along(mesh, copies, grid, device)
        odd.append((device, tuple(most), along))
  first = words[:, 0]
  total = first.sum(axis=0, dtype=np.uint32)
  total[2] = first[:, 2].any()
  return total, odd


def _along(mesh, axes, words, device):
  """Names of those of some mesh axes along which a device's words change."""
  place = tuple(np.argwhere(mesh.devices == device)[0])
  line = lambda i: words[(*place[:i], slice(None), *place[i + 1 :])]
  changes = lambda i: (line(i) != words[place]).any()
  return tuple(mesh.axis_names[i] for i in axes if changes(i))


def measure(
  tree: Mapping[str, jax.Array | np.ndarray | rows.Rows],
) -> tuple[dict[str, str], list[str]]:
  """Fingerprints and the names of leaves that hold NaN or infinity.

  One compiled pass over all leaves, and over each block of a rows.Rows. Every
  process must call it. Of replicas that differ the first counts: `Words.read`
  names them.

  Args:
    tree: {name: array}, any shapes and shardings; 1, 2, 4 or 8 byte real types.
      Empty leaves and scalars are fine.

  Returns:
    ({name: 16 hex digits}, [names of non-finite leaves]).

  Raises:
    UserError: a leaf is no array or of an unsupported type.
  """
  return Words(tree).read()[:2]


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
