"""Shards of a process, read and written in chunks (chunks.py), beside Orbax.

Orbax reads the shards one by one: a chunk that several of them touch comes from
the disk once for each whose read does not happen to be under way with another's
(1.0 to 2.0 times the bytes, as it falls out). Here a process reads every chunk
that its shards touch once: what several of them share stays in a pool until all
have their part. Memory: its shards, and in the pool at most STAGED pieces of
PIECE bytes, or of one row of chunks where that is more.

Orbax chooses chunks that cut the axes of the writer's shards ever finer, and
other axes last: of rows it makes shorter rows, which do not help whoever reads
columns. Where chunks have a size, they are chosen here. Memory: a copy of
IN_FLIGHT bytes of shards, or of one leaf.
"""

import asyncio
from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from paraxis.sharding.checkpoint import chunks
from paraxis.sharding.checkpoint import fingerprint

IN_FLIGHT = 2**26  # bytes that are handed over and not yet written
PIECE = 2**24  # bytes that are read at once for several shards
STAGED = 4  # more of them take memory that is new, which costs more than reuse
POOL = 'cache_pool#shards'  # of chunks that several shards touch


def _slices(box, start=None):
  """Index of a box; start: of what is indexed, in the whole array."""
  start = start or [0] * len(box)
  return tuple(
    slice(a - s, b - s) for (a, b), s in zip(box, start, strict=True)
  )


class _Target:
  """One shard that is being filled.

  Attributes:
    box: of the shard. values: NumPy array.
  """

  def __init__(self, box, dtype):
    self.box = box
    self.values = np.empty([end - first for first, end in box], dtype)

  def part(self, box):
    """View of what a box, within the shard, has of it."""
    return self.values[*_slices(box, [first for first, _ in self.box]), ...]


async def _read_cell(stored, box, targets, gate):
  """Reads the chunks of a box, each once, into the shards that meet it."""
  if len(targets) == 1:
    await _fill(stored, targets[0], box)
    return
  rows = math.inf
  if box:
    width = stored.dtype.numpy_dtype.itemsize
    row = width * math.prod(end - first for first, end in box[1:])
    step = stored.chunk_layout.read_chunk.shape[0]
    rows = max(1, PIECE // (row * step)) * step
  (first, end), *others = box or [(0, 1)]
  for at in range(first, end, min(rows, end - first)):
    piece = ((at, min(at + rows, end)), *others) if box else ()
    async with gate:
      await _all(_fill(stored, target, piece) for target in targets)


async def _fill(stored, target, box):
  """Reads what a box and a shard have in common into the shard."""
  inner = chunks.common(box, target.box)
  if all(inner):
    out = ts.array(target.part(inner))
    await out.write(stored[_slices(inner)][ts.d[:].translate_to[0]])


async def _all(reads):
  """What reads give, in order; an error is raised when all have ended.

  One that nobody awaits would report its error when it is freed, anywhere.
  """
  found = await asyncio.gather(*reads, return_exceptions=True)
  for result in found:
    if isinstance(result, BaseException):
      raise result
  return found


async def _read_array(info, arg, gate, context):
  """The jax.Array of a leaf, whose process reads each chunk once.

  context: ts.Context with POOL.
  """
  spec = ocp.type_handlers.get_json_tspec_read(info, info.is_ocdbt_checkpoint)
  open_ = functools.partial(ts.open, open=True, read=True, context=context)
  stored = await open_(ts.Spec(spec))
  shape, dtype, sharding = tuple(arg.global_shape), arg.dtype, arg.sharding
  have = stored.shape, stored.dtype.numpy_dtype
  if have != (shape, dtype):
    raise ValueError(f'it holds {have}, where {(shape, dtype)} was saved')
  devices = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    devices.setdefault(box, []).append(device)
  targets = [_Target(box, dtype) for box in devices]
  steps: Any = stored.chunk_layout.read_chunk.shape or ()
  cells = list(chunks.cells(shape, steps, list(devices)))
  if any(len(meets) > 1 for _, meets in cells):
    stored = await open_(ts.Spec(spec | dict(cache_pool=POOL)))
  await _all(
    _read_cell(stored, box, [targets[i] for i in meets], gate)
    for box, meets in cells
  )
  one = functools.partial(
    jax.sharding.SingleDeviceSharding, memory_kind=sharding.memory_kind
  )
  with fingerprint.keeps_bits((arg,)):
    parts = [
      jax.device_put(target.values, one(device))
      for target in targets
      for device in devices[target.box]
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _pool(context):
  """ts.Context with POOL, and what another one has."""
  return ts.Context({POOL: dict(total_bytes_limit=STAGED * PIECE)}, context)


class Reader(ocp.type_handlers.ArrayHandler):
  """Reads jax arrays as they are asked for, every chunk once."""

  async def deserialize(self, infos: Sequence, args: Any = None) -> Sequence:
    gate = asyncio.Semaphore(STAGED)
    context = _pool(infos[0].ts_context)
    pairs = zip(infos, args, strict=True)
    return await _all(
      _read_array(info, arg, gate, context) for info, arg in pairs
    )


def _own(value):
  """The shards that this process writes: the first of each of replicas."""
  return [s for s in value.addressable_shards if s.replica_id == 0]


def _groups(values, infos):
  """Lists of (array, info), of at most IN_FLIGHT bytes to write, or one."""
  group, size = [], 0
  for value, info in zip(values, infos, strict=True):
    more = sum(s.data.nbytes for s in _own(value))
    if group and size + more > IN_FLIGHT:
      yield group
      group, size = [], 0
    group.append((value, info))
    size += more
  yield group


class Writer(ocp.type_handlers.NumpyHandler):
  """Writes jax arrays, of which a process may hold nothing."""

  def __init__(self, chunk_bytes: int):
    """chunk_bytes: of a chunk, at most; 0: a shard."""
    super().__init__(deepcopy_host_arrays=False)
    self._chunk_bytes = chunk_bytes

  def typestr(self) -> str:
    return 'jax.Array'

  async def _background_serialize(self, values: Any, infos: Any, args=None):
    for group in _groups(values, infos):
      # One commit of the group: each rewrites the tree of all chunks.
      transaction = ts.Transaction(atomic=True)
      for value, info in group:
        await info.await_path_creation()
        await self._write(value, info, transaction)
      await transaction.commit_async()

  async def _write(self, value, info, transaction):
    written = value.sharding.shard_shape(value.shape)
    spec = spec_of(info, value, written, self._chunk_bytes)
    opened = functools.partial(
      ts.open, ts.Spec(spec), open=True, context=info.ts_context,
      transaction=transaction,
    )  # fmt: skip
    if not jax.process_index():
      await opened(create=True)
    out = await opened(assume_metadata=True)
    for shard in _own(value):
      await out[shard.index].write(
        np.asarray(shard.data), can_reference_source_data_indefinitely=True
      )


def spec_of(info, leaf, written, chunk_bytes) -> dict:
  """TensorStore's specification of a leaf to write.

  Args:
    info: Orbax's. leaf: with shape and dtype.
    written: shape of the blocks that are written at once.
    chunk_bytes: of a chunk, at most; 0: a block.
  """
  spec = ocp.type_handlers.get_json_tspec_write(
    info, info.is_ocdbt_checkpoint, leaf.shape, written, leaf.dtype,
    process_index=jax.process_index(),
  )  # fmt: skip
  if chunk_bytes:
    width = np.dtype(leaf.dtype).itemsize
    shape = chunks.shape(leaf.shape, written, width, chunk_bytes)
    spec['metadata']['chunks'] = shape
  return spec
