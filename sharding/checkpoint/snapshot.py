"""Copies of a state in host memory, which a step does not wait for.

Parameters and optimizer do not change until the next update. So the copies
(`to_host`) run beside the next gradient, and only the update, which donates
what they are made from, waits for them: DataStates-LLM (arXiv:2406.10707,
section 4), lazy asynchronous copies. What is written to disk are the copies.
They keep their layout: every process writes its own shards. Of a shard's
replicas, which are compared on the devices (fingerprint.py), one is copied, and
its process writes it; another one from leaf to leaf, so that devices and
processes share the work.

On CPU jax computes most of a copy, and of a fingerprint on several devices, in
the call that asks for it, so a thread makes the call (`Copier`).

The runtime orders a donation after reads that were dispatched before it: of
copies that the caller's thread asked for, a test on CPU cannot fail without the
wait. It is there for the thread, for the decision whether the state may be
saved, and for accelerators, where the order is not known.
"""

import collections
from collections.abc import Mapping
from concurrent import futures
import contextlib
import json
import math
import os
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding import meeting
from paraxis.sharding.checkpoint import fingerprint

HOST = 'pinned_host'


def possible(tree: Mapping[str, object]) -> bool:
  """Whether all leaves are jax arrays whose devices have pinned host memory."""
  devices = set()
  for x in tree.values():
    if not isinstance(x, jax.Array) or not x.addressable_shards:
      return False
    devices |= set(x.sharding.addressable_devices)
  return all(has_host_memory(d) for d in devices)


def has_host_memory(device) -> bool:
  """Whether arrays of a device may be in pinned host memory."""
  try:
    return HOST in {memory.kind for memory in device.addressable_memories()}
  except Exception:  # a backend without memories
    return False


def to_host(tree: Mapping[str, Any]) -> dict[str, jax.Array]:
  """The same leaves as new arrays in pinned host memory; returns at once.

  On the devices of one replica each: a process may hold nothing of a leaf.
  """
  places = {path: place for path, place, _ in _places(tree)}
  parts, theirs = [], []
  for path, x in tree.items():
    for shard in _copied(x, places[path]):
      parts.append(shard.data)
      theirs.append(
        jax.sharding.SingleDeviceSharding(shard.device, memory_kind=HOST)
      )
  # Shard by shard: for whole arrays of several processes jax runs programs that
  # all devices take part in. An alias would be what the update donates.
  copies = iter(jax.device_put(parts, theirs, may_alias=False))
  out = {}
  with fingerprint.keeps_bits(tree.values()):
    for path, x in tree.items():
      own = [next(copies) for _ in _copied(x, places[path])]
      out[path] = jax.make_array_from_single_device_arrays(
        x.shape, places[path].with_memory_kind(HOST), own, dtype=x.dtype
      )
  return out


def _copied(x, place):
  """The shards of an array whose devices here are those of a sharding."""
  devices = place.addressable_devices
  return [shard for shard in x.addressable_shards if shard.device in devices]


def _places(tree):
  """Yields (path, sharding of its copy, bytes of a shard) of jax's leaves.

  The same in every process.
  """
  for number, path in enumerate(sorted(tree)):
    x = tree[path]
    if getattr(x, 'sharding', None) is not None:  # else on the host already
      place = _one_replica(x.sharding, number)
      size = math.prod(place.shard_shape(x.shape))
      yield path, place, size * jnp.dtype(x.dtype).itemsize


def _one_replica(sharding, number):
  """The sharding over the devices of one replica, of n that (number mod n)-th.

  All of them of a sharding without a mesh.
  """
  if not isinstance(sharding, jax.NamedSharding):
    return sharding
  mesh: Any = sharding.mesh
  used = {n for names in sharding.spec if names for n in np.atleast_1d(names)}
  sizes = [1 if n in used else mesh.shape[n] for n in mesh.axis_names]
  at = np.unravel_index(number % math.prod(sizes), sizes)
  cut = tuple(
    slice(None) if n in used else slice(i, i + 1)
    for n, i in zip(mesh.axis_names, at, strict=True)
  )
  devices = mesh.devices[cut]
  mesh = jax.sharding.Mesh(devices, mesh.axis_names, mesh.axis_types)
  return jax.NamedSharding(mesh, sharding.spec)


class Copier:
  """Asks for fingerprints and copies of a state, on CPU in a thread of its own.

  Not with several processes: they begin programs in one order. Nor on
  accelerators: a save of 1.5 GiB held a step up for .036 s on an H200.
  """

  def __init__(self):
    self._thread = futures.ThreadPoolExecutor(1, 'snapshot')

  def begin(self, tree: Mapping[str, Any], copied: bool) -> futures.Future:
    """Future of (copies, fingerprint.Words), or of an error of asking for them.

    tree: as it is now; its leaves stay until there is a result.
    copied: whether copies are `possible`; if not, `tree` itself is the first.
    """
    tree = dict(tree)
    inline = not copied or jax.process_count() > 1
    if not inline and all(_is_cpu(x) for x in tree.values()):
      # A program compiled under a mesh is found again under it only.
      return self._thread.submit(_ask, tree, copied, jax.sharding.get_mesh())
    made = futures.Future()
    made.set_result(_ask(tree, copied))
    return made

  def close(self) -> None:
    """Frees the thread, after what it has begun."""
    self._thread.shutdown()


def _is_cpu(x):
  return all(d.platform == 'cpu' for d in x.sharding.addressable_devices)


def _ask(tree, copied, mesh=None):
  """(copies or `tree`, its words), under a mesh."""
  known = mesh is not None and not mesh.empty
  with jax.set_mesh(mesh) if known else contextlib.nullcontext():
    words = fingerprint.Words(tree)  # first: copies may wait for memory
    return (to_host(tree) if copied else tree), words


def check(most: int, tree: Mapping[str, Any]) -> None:
  """UserError if one snapshot takes more host memory than there is.

  The same in every process, which all call it: of the process that copies most,
  and of all processes of a machine together.

  most: checkpoint.host_bytes, of each process.
  """
  each = collections.Counter()
  for _, place, size in _places(tree):
    for device in place.device_set:
      each[device.process_index] += size
  taken = max(each.values(), default=0)
  if 0 < most < taken:
    raise errors.UserError(
      f'checkpoint.host_bytes={most} is less than one snapshot of the state, '
      f'{taken} bytes: give at least that, or 0.'
    )
  on, memory = collections.Counter(), {}
  mine = json.dumps([_machine(), machine_bytes()])
  for process, text in enumerate(meeting.gather('memory of machines', mine)):
    machine, there = json.loads(text)
    memory[machine] = there
    on[machine] += each[process]
  for machine, taken in on.items():
    if 0 < memory[machine] < taken:
      raise errors.UserError(
        f'one snapshot of the state takes {taken} bytes of host memory, and '
        f'the machine has {memory[machine]}: more machines hold less each.'
      )


def _machine():
  """What tells this machine from others: two may have one name."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text('utf-8')
  except OSError:
    return platform.node()


def machine_bytes() -> int:
  """Bytes of memory of this machine; 0: not known."""
  try:
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (AttributeError, OSError, ValueError):
    return 0


def host_bytes(tree: Mapping[str, Any]) -> int:
  """Bytes of the copies in this process: one replica of each of its shards, or
  none, as `to_host` makes them.

  tree: {path: array or jax.ShapeDtypeStruct with its sharding}.
  """
  return sum(
    len(place.addressable_devices) * size for _, place, size in _places(tree)
  )
