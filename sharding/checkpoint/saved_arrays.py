"""Arrays of a checkpoint, written and read by Orbax.

A tree of arrays is written as Orbax does; by several processes, or in smaller
chunks, by shards.py; leaves that are read while they are saved (rows.py), one
after the other, each block a chunk of the file, or several: at most IN_FLIGHT
bytes, or one block, are in memory until they are written.

Reading (shards.py) gives a tree, or the fault in one line.
Orbax reads the metadata of all leaves at once and stops at the first that
fails; later reports of the other reads carry no information and are filtered
out.
"""

import collections
import inspect
import logging
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import shards

IN_FLIGHT = 2**26  # bytes of blocks that are handed over and not yet written
_NO_ORBAX = lambda record: 'orbax' not in record.pathname
_WHOLE = logging.Formatter()
_NO_ORBAX_TRACE = lambda record: 'orbax' not in _WHOLE.format(record)


class _RowsHandler(ocp.type_handlers.NumpyHandler):
  """rows.Rows, kept as NumPy's arrays are."""

  def __init__(self, chunk_bytes):
    super().__init__(deepcopy_host_arrays=False)
    self._chunk_bytes = chunk_bytes

  async def _background_serialize(self, values: Any, infos: Any, args=None):
    # All at once is Orbax's own way, which holds every leaf.
    for value, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      if jax.process_index():
        continue
      spec = shards.spec_of(info, value, value.block, self._chunk_bytes)
      out = await ts.open(
        ts.Spec(spec), create=True, open=True, context=info.ts_context
      )
      await _write(out, value)


async def _write(out, leaf):
  """Writes a rows.Rows into an open TensorStore."""
  pending, size = collections.deque(), 0
  for first, x in leaf.blocks():
    here = out[first : first + len(x)] if leaf.ndim else out
    while pending and size + x.nbytes > IN_FLIGHT:
      write, done = pending.popleft()
      await write
      size -= done
    pending.append((here.write(x), x.nbytes))
    size += x.nbytes
  for write, _ in pending:
    await write


def checkpointer(
  written=None, chunk_bytes=0, meet=None
) -> ocp.AsyncCheckpointer:
  """Writes `item`s and JSON; commits them by one rename.

  It may be used in a thread: processes meet without a program on devices.

  Args:
    written: called when all files are written, before the rename.
    chunk_bytes: the most that a chunk of a file holds; 0: a shard, or a block.
    meet: (key=, timeout_ms=), in which processes wait for each other when all
      files are written, and when the folder has its name; None: Orbax's own.
  """
  arrays: Any = ocp.type_handlers.ArrayHandler()
  if chunk_bytes or jax.process_count() > 1:
    # Orbax wants a shard of every leaf in every process (snapshot.py).
    arrays = shards.Writer(chunk_bytes)
  types = ocp.type_handlers.create_type_handler_registry(
    (rows.Rows, _RowsHandler(chunk_bytes)),
    (np.ndarray, ocp.type_handlers.NumpyHandler()),
    (jax.Array, arrays),
  )
  handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
  # Weights hardly compress (by 8%), and a save takes 4 times the CPU-seconds.
  several = {}
  if jax.process_count() > 1:
    several['multiprocessing_options'] = ocp.options.MultiprocessingOptions(
      active_processes=set(range(jax.process_count())),
      barrier_sync_key_prefix='paraxis',
    )
  plain: Any = ocp.PyTreeCheckpointHandler(
    type_handler_registry=types, use_compression=False, **several
  )
  handlers.add(None, ocp.args.PyTreeSave, plain)
  return ocp.AsyncCheckpointer(
    ocp.CompositeCheckpointHandler(
      handler_registry=handlers,
      composite_options=ocp.CompositeOptions(**several),
    ),
    async_options=ocp.options.AsyncOptions(
      post_finalization_callback=written, barrier_sync_fn=meet
    ),
    **several,
  )


def item(tree):
  """The argument for Orbax of a tree of arrays and rows.Rows."""
  return ocp.args.PyTreeSave(manifest_lib.nest(tree))


def first_line(error):
  while error.__cause__:  # Orbax wraps the reason in pages of specification
    error = error.__cause__
  text = str(error).strip() or type(error).__name__
  return text.partition('\n')[0][:160]


def write(folder: pathlib.Path, tree, manifest, chunk_bytes) -> None:
  """Writes and commits one step's folder; returns when it is there."""
  saver = checkpointer(chunk_bytes=chunk_bytes)
  try:
    saver.save(
      folder,
      args=ocp.args.Composite(
        state=item(tree), manifest=ocp.args.JsonSave(manifest)
      ),
    )
    saver.wait_until_finished()
  finally:
    saver.close()


def names(folder: pathlib.Path) -> set[str]:
  """Canonical paths of the arrays that Orbax's metadata of a step lists.

  It decides what Orbax reads, and carries no checksum. ValueError: damaged.
  """
  path: Any = folder / 'state'
  hook = hear_no_abandoned()
  try:
    tree = ocp.PyTreeCheckpointHandler().metadata(path).tree
  except Exception as e:  # Orbax raises many kinds for damaged files
    logging.getLogger('asyncio').addFilter(_NO_ORBAX_TRACE)
    raise ValueError(first_line(e)) from None
  sys.unraisablehook = hook
  found = set()
  for keys, x in jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda x: not isinstance(x, dict)
  ):
    if not isinstance(x, ocp.metadata.ArrayMetadata):
      raise ValueError(f'a leaf of it is {type(x).__name__}')
    found.add('/'.join(str(k.key) for k in keys))
  return found


def _without_abandoned(hook):
  """`hook` of sys.unraisablehook, without what abandoned reads and writes say.

  After a first failure Orbax closes the loop its other ones still answer to,
  from TensorStore's threads and whenever they end: pages of text, no news.
  """

  def filtered(report):
    # TensorStore's threads name no object; what names one may be the user's.
    late = report.object is None and 'loop is closed' in str(report.exc_value)
    if not late and not inspect.iscoroutine(report.object):
      hook(report)

  filtered.of_paraxis = True
  return filtered


def hear_no_log():
  """What Orbax logs, 100 lines for a failed write, it also raises."""
  logging.getLogger('absl').addFilter(_NO_ORBAX)


def hear_no_abandoned():
  """Filters sys.unraisablehook -> what to set it to when nothing failed."""
  hook = sys.unraisablehook
  if not hasattr(hook, 'of_paraxis'):
    sys.unraisablehook = _without_abandoned(hook)
  return hook


def read(folder: pathlib.Path, wanted) -> tuple[dict, str | None]:
  """(restored tree, None), or ({}, the fault of the files).

  Reads the item itself: a Checkpointer ends in a barrier, where the others
  would wait for a process that met a damaged file.
  """
  hook = hear_no_abandoned()
  try:
    target = manifest_lib.nest(wanted)
    each = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(target, each, partial_restore=True)
    path: Any = folder / 'state'  # Orbax asks for etils' own kind of path
    types = ocp.type_handlers.create_type_handler_registry(
      (jax.Array, shards.Reader())
    )
    reader = ocp.PyTreeCheckpointHandler(type_handler_registry=types)
    nested = reader.restore(path, args=args)
    tree = manifest_lib.flatten(nested, wanted)
  except Exception as e:  # Orbax raises many kinds for damaged files
    # With shapes already compared, lack of memory is not damage.
    if isinstance(e, MemoryError) or 'Out of memory' in str(e):
      raise
    # Both filters stay: the end of the last abandoned read is not observable.
    logging.getLogger('asyncio').addFilter(_NO_ORBAX_TRACE)
    return {}, f'its files do not read: {first_line(e)}'
  sys.unraisablehook = hook
  # A leaf whose name is damaged in Orbax's metadata comes back as it was asked.
  for path, x in tree.items():
    if not isinstance(x, jax.Array):
      return {}, f'its state does not name {path}'
  return tree, None
