"""A step on disk, read without its run: not its mesh, its devices, its code.

`Step` holds a checked manifest and gives its leaves block by block, as they lie
in the files. What is no plain file (a link, a pipe) is refused before anything
is opened. Memory: a block of at most BLOCK bytes, or the rows of one chunk
where they are more; a leaf that was saved in columns is one block.
"""

import math
import os
import pathlib
import stat
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import saved_arrays

BLOCK = 2**26  # bytes that are read at once


def contents(folder: pathlib.Path) -> dict[str, int]:
  """{path in a step's folder: bytes} of its files; opens none.

  IntegrityError: one is a link, a pipe or a device, or the folder cannot be
  read.
  """
  if folder.is_symlink():
    raise manifest_lib.damaged(folder, 'it is a symbolic link')

  def fails(error):
    raise manifest_lib.damaged(folder, f'it cannot be read: {error.strerror}')

  sizes = {}
  for base, folders, files in os.walk(folder, onerror=fails):
    for name in (*folders, *files):
      path = pathlib.Path(base, name)
      found, inside = path.lstat(), path.relative_to(folder).as_posix()
      if stat.S_ISREG(found.st_mode):
        sizes[inside] = found.st_size
      elif not stat.S_ISDIR(found.st_mode):
        kind = 'symbolic link' if path.is_symlink() else 'pipe or device'
        raise manifest_lib.damaged(folder, f'{inside} is a {kind}, not a file')
  return sizes


def read_through(folder: pathlib.Path, name: str) -> int:
  """Reads every byte of a file of `contents` -> how many; OSError."""
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
  total = 0
  with open(os.open(folder / name, flags), 'rb', buffering=0) as file:
    while piece := file.read(2**20):
      total += len(piece)
  return total


class Step:
  """One committed step.

  Attributes:
    folder, number, manifest: of the step. files: what `contents` gives.
    leaves: {path: entry of the manifest}.
  """

  def __init__(self, folder: pathlib.Path):
    """IntegrityError: damaged. UserError: of a newer format."""
    self.files = contents(folder)
    self.folder = folder
    self.manifest = manifest_lib.read_manifest(folder)
    self.number = self.manifest['step']
    self.leaves = self.manifest['leaves']
    self._context = ts.Context()
    for path, leaf in self.leaves.items():
      try:
        jnp.dtype(leaf['dtype'])
      except TypeError:
        why = f'leaf {path} is of no type: {leaf["dtype"]!r}'
        raise manifest_lib.damaged(folder, why) from None

  def _open(self, path):
    entry = self.leaves[path]
    spec: Any = dict(
      driver='zarr',
      kvstore=dict(
        driver='ocdbt',
        base=dict(driver='file', path=f'{self.folder / "state"}/'),
        path=f'{path.replace("/", ".")}/',
      ),
      fill_missing_data_reads=False,  # a lost chunk is no chunk of zeros
    )
    found = ts.open(spec, read=True, open=True, context=self._context).result()
    have = found.dtype.name, found.shape
    want = jnp.dtype(entry['dtype']).name, tuple(entry['shape'])
    if have != want:
      raise ValueError(f'it is {have}, its manifest says {want}')
    chunk: Any = found.chunk_layout.read_chunk.shape or ()
    if any(c > max(n, 1) for c, n in zip(chunk, found.shape, strict=True)):
      raise ValueError(f'chunks {chunk} of an array of {found.shape}')
    return found, chunk

  def _unreadable(self, path, error):
    if isinstance(error, MemoryError):
      raise error
    why = f'leaf {path} does not read: {saved_arrays.first_line(error)}'
    raise manifest_lib.damaged(self.folder, why) from None

  def leaf(self, path: str, block: int = 0) -> rows.Rows:
    """A leaf by blocks of its first axis, read when they are asked for.

    block: rows of a block; 0: as the files have them.
    IntegrityError, also while blocks are read: it is damaged.
    """
    entry = self.leaves[path]
    shape, dtype = tuple(entry['shape']), entry['dtype']
    if 0 in shape:
      dtype = jnp.dtype(dtype)
      return rows.Rows(shape, dtype, lambda: iter([np.zeros(shape, dtype)]))
    try:
      found, chunk = self._open(path)
    except Exception as e:  # TensorStore raises many kinds for damaged files
      self._unreadable(path, e)
    dtype, once = found.dtype.numpy_dtype, 1
    if not shape:
      block = 0
    else:
      size = chunk[0] * dtype.itemsize * math.prod(shape[1:])
      once = chunk[0] * max(1, BLOCK // size)  # rows, of whole chunks
      block = block or once
      once = block * max(1, once // block)

    def blocks():
      for first in range(0, shape[0], once) if shape else (0,):
        here = found[first : min(first + once, shape[0])] if shape else found
        try:
          x = here.read().result()
        except Exception as e:
          self._unreadable(path, e)
        for i in range(0, len(x), block) if shape else ():
          yield x[i : i + block]
        if not shape:
          yield x

    return rows.Rows(shape, dtype, blocks, block)

  def check(self, path: str) -> None:
    """Reads a leaf; IntegrityError: its fingerprint is not the manifest's."""
    found = fingerprint.measure({path: self.leaf(path)})[0][path]
    if found != (wanted := self.leaves[path]['fingerprint']):
      raise manifest_lib.damaged(
        self.folder, f'leaf {path} has fingerprint {found}, not {wanted}'
      )

  def faults(self) -> list[str]:
    """Reads all files and every leaf; what is wrong, a line each.

    Leaves and the manifest have checksums. Other files are read, and the names
    in the arrays' metadata compared with the manifest.
    """
    found = []
    for name, size in self.files.items():
      try:
        if (read := read_through(self.folder, name)) != size:
          found.append(f'file {name} has {read} bytes, not {size}')
      except OSError as e:
        found.append(f'file {name} does not read: {e.strerror}')
    for path in self.leaves:
      try:
        self.check(path)
      except (errors.IntegrityError, errors.UserError) as e:
        found.append(str(e).partition('is damaged: ')[2] or str(e))
    full = {p for p, leaf in self.leaves.items() if 0 not in leaf['shape']}
    try:
      odd = sorted(full ^ saved_arrays.names(self.folder))
    except ValueError as e:
      name = 'state/_METADATA or state/_sharding'
      return [*found, f'file {name} does not read: {e}']
    if odd:
      found.append(f'file state/_METADATA and the manifest differ in {odd[0]}')
    return found
