"""A step written again in other chunks: the same leaves, fingerprints and meta.

Chunks are what a reader fetches whole. They are those of a run with the same
`checkpoint.chunk_bytes` whose process holds whole arrays (chunks.py): about as
many pieces of every axis, of at most the bytes asked for, or one element.
"""

import pathlib
import shutil

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import chunks
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import stored

LEAST = 8  # bytes of the largest element
SPACE = 1.3  # free disk needed, in sizes of the state


def _blocks(step, path, chunk_bytes) -> rows.Rows:
  """A leaf in blocks of the rows of a chunk."""
  leaf = step.leaf(path)
  if not leaf.ndim or not leaf.size:
    return leaf
  width = leaf.dtype.itemsize
  shape = chunks.shape(leaf.shape, leaf.shape, width, chunk_bytes)
  return step.leaf(path, shape[0])


def write(step: stored.Step, directory: pathlib.Path, chunk_bytes: int) -> None:
  """Writes `step` as a step of `directory`, and verifies both.

  Args:
    step: to be read; it is not changed.
    directory: of the new step; it exists and is empty.
    chunk_bytes: the most that a chunk holds.

  Raises:
    UserError: so small that there are too many chunks, or the disk is.
    IntegrityError: the step is damaged, or what was written is.
  """
  saved_arrays.hear_no_log()
  tree = {path: _blocks(step, path, chunk_bytes) for path in step.leaves}
  size = fingerprint.nbytes(tree)
  count = chunks.count(tree, chunk_bytes)
  if chunk_bytes < LEAST or count > chunks.MOST_CHUNKS:
    raise errors.UserError(
      f'--chunk_bytes={chunk_bytes}: {size} bytes would be {count} chunks; '
      f'give at least {max(LEAST, chunks.enough(tree))}.'
    )
  need, free = int(SPACE * size), shutil.disk_usage(directory).free
  if free < need:
    raise errors.UserError(
      f'{directory.parent}: needs {need} free bytes, the disk has {free}.'
    )
  for path in step.leaves:
    step.check(path)
  manifest = manifest_lib.seal(step.number, step.leaves, step.manifest['meta'])
  folder = directory / str(step.number)
  saved_arrays.write(folder, tree, manifest, chunk_bytes)
  if faults := stored.Step(folder).faults():
    raise manifest_lib.damaged(folder, f'after it was written, {faults[0]}')
