"""Folders of checkpoints on disk: names, what a kill left, and durability.

A step is written into STEP.orbax-checkpoint-tmp..., forced to the disk, renamed
to STEP, and the rename forced to the disk too (`force`): after a loss of power
a step is there whole, or is not there.
"""

import os
import pathlib
import re
import shutil
import tempfile
import uuid

from paraxis.configs.base import errors

STEP = re.compile(r'0|[1-9][0-9]{0,17}')
TEMPORARY = '.orbax-checkpoint-tmp'


def resolved(directory) -> pathlib.Path:
  """The absolute path; UserError: it is remote."""
  if '://' in str(directory):
    raise errors.UserError(
      f'{directory} is not a local path; mount the bucket and use its path.'
    )
  return pathlib.Path(directory).expanduser().resolve()


def prepare(directory: pathlib.Path) -> None:
  """Creates a folder; UserError unless files can be written in it."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
      pass
  except OSError as e:
    raise errors.UserError(
      f'cannot write checkpoints to {directory}: {e.strerror or e}.'
    ) from e


def steps(directory: pathlib.Path) -> list[int]:
  """Numbers of all folders that look like a step, newest first."""
  if not directory.is_dir():
    return []
  folders = [p for p in directory.iterdir() if p.is_dir()]
  found = [int(p.name) for p in folders if STEP.fullmatch(p.name)]
  return sorted(found, reverse=True)


def unfinished(directory: pathlib.Path, step='*') -> list[pathlib.Path]:
  """Folders of saves that were not committed; no committed step is one."""
  return list(directory.glob(f'{step}{TEMPORARY}*'))


def remove(folder: pathlib.Path) -> None:
  """Deletes a step: renamed first, so that a kill leaves no half of one.

  The name is new: what of a folder cannot be deleted (a file of NFS that is
  open) keeps its name until the directory is opened again.
  """
  end = f'{TEMPORARY}-{uuid.uuid4().hex}-deleted'
  gone = folder.with_name(f'{folder.name}{end}')
  folder.rename(gone)
  shutil.rmtree(gone, ignore_errors=True)


def force(folder: pathlib.Path) -> None:
  """Waits until all files and folders below, and it, are on the disk."""
  for path, _, files in os.walk(folder):
    for name in files:
      _sync(os.path.join(path, name))
    _sync(path)


def _sync(path):
  handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def force_name(folder: pathlib.Path) -> None:
  """Waits until the names in a folder (a rename) are on the disk."""
  _sync(folder)
