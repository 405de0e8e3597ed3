"""Arrays from one layout to another in memory: other meshes, other devices.

    move(tree, shardings) -> tree      received(tree, shardings) -> {device: B}

Of every array device d holds a box of global indices, S_d, and wants T_d. It
keeps what it holds and receives the rest once, the fewest bytes that do:

    received(d) = sum over arrays of (|T_d| - |T_d & S_d|) x bytes of an element

A device cuts what others want of its shards, sends it, a message for each set
of receivers and each type (pieces.py), and d joins the pieces. Cutting and
joining are programs of one device: no program spans two meshes, as no array of
an Explicit mesh may enter another, and meshes may be over the same devices,
over others, or over some of both. Only `send` moves bytes between devices.

Cost: messages are in memory beside source and target. The first move of a pair
of layouts compiles two programs per device: 7 to 17 CPU-seconds for 32 arrays
on 8 virtual CPU devices, where a later move of 14 MB takes 0.02 to 0.04. A
shard that stays as it is keeps its buffer: it is not copied, and donating the
old array deletes it in the new one, too.

Source: ReaLHF (arXiv:2406.14088), the reallocation of parameters between the
layouts of two calls of a model.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.core

from paraxis.configs.base import errors
from paraxis.sharding import pieces


class Leaf(NamedTuple):
  """An array, where it is in its tree, and its boxes before and after."""

  path: str
  array: Any
  target: jax.sharding.Sharding
  held: dict[pieces.Device, pieces.Box]
  wanted: dict[pieces.Device, pieces.Box]


def send(arrays: list, devices: list) -> list:
  """Arrays of one device each, each on another device."""
  return jax.device_put(arrays, devices)


def _name(keys):
  return jax.tree_util.keystr(keys, simple=True, separator='/')


def _boxes(path, shape, sharding) -> dict[pieces.Device, pieces.Box]:
  try:
    sharding.shard_shape(shape)
    indices = sharding.devices_indices_map(shape)
  except (ValueError, IndexError) as e:  # the latter: more axes than dimensions
    mesh = getattr(sharding, 'mesh', None)
    sizes = dict(mesh.shape) if mesh is not None else {}
    sizes = ','.join(f'{a}={n}' for a, n in sizes.items() if n > 1)
    raise errors.UserError(
      f'{path}: shape {tuple(shape)} does not divide into '
      f'{getattr(sharding, "spec", sharding)} on {sizes or "one device"}: '
      'change the layout or the size.'
    ) from e
  return {
    device: tuple(
      cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)
    )
    for device, index in indices.items()
  }


def _leaves(tree, shardings) -> list[Leaf]:
  """A `Leaf` for each path of both trees, in the order of `tree`."""
  by_path = lambda tree: dict(jax.tree_util.tree_leaves_with_path(tree))
  arrays, targets = by_path(tree), by_path(shardings)
  missing = [_name(p) for p in arrays if p not in targets]
  more = [_name(p) for p in targets if p not in arrays]
  if missing or more:
    word = lambda paths: f'{", ".join(paths[:3])} ({len(paths)})'
    raise errors.UserError(
      'arrays and layouts differ: '
      + '; '.join(
        f'{what} {word(paths)}'
        for what, paths in (('no layout for', missing), ('no array for', more))
        if paths
      )
      + f'; {len(arrays)} arrays, {len(targets)} layouts.'
    )
  out = []
  for keys, x in arrays.items():
    path, target = _name(keys), targets[keys]
    source = getattr(x, 'sharding', None)
    if isinstance(x, jax.core.Tracer) or source is None:
      raise errors.UserError(f'{path} is {type(x).__name__}, on no device.')
    if not isinstance(target, jax.sharding.Sharding):
      raise errors.UserError(
        f'{path}: {type(target).__name__} names no devices: give a sharding.'
      )
    held, wanted = (_boxes(path, x.shape, s) for s in (source, target))
    out.append(Leaf(path, x, target, held, wanted))
  return out


def _check_in_reach(leaves):
  """UserError unless all shards are in this process, in devices' memory."""
  if not jax.sharding.get_mesh().empty:
    raise errors.UserError(
      'reallocate.move is called within jax.set_mesh: its arrays may be of two '
      'meshes; leave the mesh before.'
    )
  here = jax.process_index()
  for leaf in leaves:
    for device in {**leaf.held, **leaf.wanted}:
      if device.process_index != here:
        raise errors.UserError(
          f'{leaf.path}: {device} is of process {device.process_index}, this '
          f'is process {here}: move within one process, or by a checkpoint.'
        )
    for layout in (leaf.array.sharding, leaf.target):
      usual = next(iter(layout.device_set)).default_memory().kind
      if layout.memory_kind not in (None, usual):
        raise errors.UserError(
          f'{leaf.path} is to be moved from or to {layout.memory_kind}, not '
          f"between devices' memory ({usual}): use jax.device_put."
        )


def received(tree: Any, shardings: Any) -> dict[pieces.Device, int]:
  """{device: bytes} that `move` of the same arguments sends to each device.

  Nothing is moved; arrays may be jax.ShapeDtypeStructs with a sharding.

  Raises:
    UserError: as `move`, but for devices out of reach, which are counted.
  """
  total = {}
  for leaf in _leaves(tree, shardings):
    for device, wanted in leaf.wanted.items():
      lacks, held = pieces.size(wanted), leaf.held.get(device)
      kept = None if held is None else pieces.overlap(held, wanted)
      if kept is not None:
        lacks -= pieces.size(kept)
      total[device] = total.get(device, 0) + lacks * leaf.array.dtype.itemsize
  return total


@functools.partial(jax.jit, static_argnames='messages')
def _pack(shards, messages):
  """A message of each ((number of a shard, Part), ...)."""
  rows = lambda x, part: x.reshape(-1) if part.flat else x
  cut = lambda n, part: rows(_cut(shards[n], part), part)
  return [jax.lax.concatenate([cut(*p) for p in m], 0) for m in messages]


@functools.partial(jax.jit, static_argnames='shards')
def _join(arrays, shards):
  """A new shard of each ((number of an array, Part), ...)."""
  return [_grid([(p.part, _cut(arrays[n], p)) for n, p in s]) for s in shards]


def _cut(x, part):
  """What a `Part` wants of its array."""
  if part.first is not None:
    shape = pieces.shape(part.box)
    rows = pieces.size(part.box) if part.flat else shape[0]
    x = x[part.first : part.first + rows].reshape(shape)
  inside = [
    (first - zero, end - zero)
    for (first, end), (zero, _) in zip(part.part, part.box, strict=True)
  ]
  return jax.lax.slice(x, [a for a, _ in inside], [b for _, b in inside])


def _grid(parts):
  """The array of which (box, array) are a grid."""
  if len(parts) == 1:
    return parts[0][1]
  for axis in range(len(parts[0][0])):
    firsts = sorted({box[axis][0] for box, _ in parts})
    if len(firsts) > 1:
      rows = [[p for p in parts if p[0][axis][0] == at] for at in firsts]
      return jax.lax.concatenate([_grid(row) for row in rows], axis)
  raise ValueError('two pieces are in the same place')


def _numbered(rows):
  """([key], rows of (key, part) with its number in place of each key)."""
  number = {key: None for row in rows for key, _ in row}
  number = {key: n for n, key in enumerate(number)}
  return list(number), tuple(tuple((number[k], p) for k, p in r) for r in rows)


def _deliver(messages: list[pieces.Message], there: dict) -> None:
  """Sends messages and adds them to {(Key, device): array}."""
  payload, packs = {}, {}
  for i, message in enumerate(messages):
    if message.whole:
      payload[i] = there[(pieces.SHARD, message.parts[0][0]), message.sender]
    else:
      packs.setdefault(message.sender, []).append(i)
  for device, mine in packs.items():
    leaves, parts = _numbered([messages[i].parts for i in mine])
    shards = [there[(pieces.SHARD, leaf), device] for leaf in leaves]
    made = _pack(shards, parts)
    payload |= zip(mine, made, strict=True)
  to = [(i, d) for i, m in enumerate(messages) for d in m.receivers]
  arrays = send([payload[i] for i, _ in to], [d for _, d in to])
  for (i, device), x in zip(to, arrays, strict=True):
    there[(pieces.MESSAGE, i), device] = x


def _new_shards(plan: pieces.Plan, there: dict) -> dict:
  """{(leaf, device): shard}; there: {(Key, device): array}, all delivered."""
  out = {}
  for device, leaves in plan.shards.items():
    joined = {}
    for leaf, parts in leaves.items():
      (key, part), *more = parts
      if part.box == part.part and part.first is None and not more:
        out[leaf, device] = there[key, device]  # as it lies, or came there
      else:
        joined[leaf] = parts
    if joined:
      keys, shards = _numbered(joined.values())
      arrays = [there[key, device] for key in keys]
      made = _join(arrays, shards)
      out |= {(n, device): x for n, x in zip(joined, made, strict=True)}
  return out


def move(tree: Any, shardings: Any) -> Any:
  """Arrays laid out by other shardings, bitwise the same.

  Call it outside of jax.set_mesh and of traced functions. Returns before the
  arrays are there, as any function of jax.

  Args:
    tree: pytree of jax.Arrays, any shapes, types and layouts.
    shardings: pytree of the same paths, a jax Sharding for each.

  Returns:
    A pytree like `tree`.

  Raises:
    UserError: a path without layout, a layout without array, a shape that its
      layout does not divide, a device of another process, host memory.
  """
  leaves = _leaves(tree, shardings)
  _check_in_reach(leaves)
  layouts = (
    (x.array.dtype, tuple(x.held.items()), tuple(x.wanted.items()))
    for x in leaves
  )
  plan = pieces.plan_of(tuple(layouts))
  there = {
    ((pieces.SHARD, number), shard.device): shard.data
    if leaf.array.committed
    else jax.device_put(shard.data, shard.device)
    for number, leaf in enumerate(leaves)
    for shard in leaf.array.addressable_shards
  }
  _deliver(plan.messages, there)
  shards, out = _new_shards(plan, there), []
  for number, leaf in enumerate(leaves):
    if leaf.array.size == 0:
      out.append(jax.device_put(leaf.array, leaf.target))
      continue
    each = [shards[number, device] for device in leaf.wanted]
    shape = leaf.array.shape
    out.append(
      jax.make_array_from_single_device_arrays(shape, leaf.target, each)
    )
  return jax.tree.unflatten(jax.tree.structure(tree), out)
