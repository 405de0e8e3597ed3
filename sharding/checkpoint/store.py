"""Checkpoints: asynchronous, committed by one rename, verified on every load.

  <directory>/<step>/state     every leaf, sharded (OCDBT and zarr, by Orbax)
  <directory>/<step>/manifest  JSON: format, version, step; per leaf its shape,
                               type, logical axes, fingerprint; `meta` (of the
                               caller: config, data cursor); its own SHA-256

A leaf has a canonical path ('params/layers/attention/query') that depends on no
mesh, sharding or process. A step is committed if its manifest reads and matches
its hash; it is used if the fingerprint of every restored leaf, computed on the
devices, is the stored one: Orbax and TensorStore have no checksum of array
data, so a flipped bit on disk restores silently as a wrong number. Reading a
checkpoint executes no code.

Cost: `save` blocks for one pass over the state on the devices (fingerprint,
finiteness) and the copy to the host; writing continues in the background.
Source: Orbax (orbax.readthedocs.io), imported only here and in saved_arrays.py;
not its Manager, which counts any folder with a number as a step and, after a
full disk, none at all.
"""

from collections.abc import Mapping
import logging
import pathlib
import re
import shutil
import tempfile

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import saved_arrays

Tree = Mapping[str, jax.Array]  # canonical path -> leaf
Saved = Mapping[str, jax.Array | rows.Rows]
SPACE = 1.3  # free disk needed, in sizes of the state
_STEP = re.compile(r'0|[1-9][0-9]{0,17}')
_TMP = '.orbax-checkpoint-tmp'
_NO_ORBAX = lambda record: 'orbax' not in record.pathname


def _together(ok):
  """True if `ok` is true in every process; also a barrier."""
  if jax.process_count() == 1:
    return ok
  return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


def _open():
  # What Orbax logs, 100 lines for a failed write, it also raises.
  logging.getLogger('absl').addFilter(_NO_ORBAX)
  return saved_arrays.checkpointer()


class Store:
  """The checkpoints of one run; a context manager, which closes it.

  A tree is {canonical path: jax.Array}; `like` is {path: anything with shape,
  dtype and sharding}. Several processes make the same calls, in one folder.
  """

  def __init__(
    self, directory, keep=3, asynchronous=True, *, read_only=False, say=print
  ):
    """Opens, creates and cleans the directory.

    Args:
      directory: a local path; a relative one is resolved now.
      keep: newest good steps that stay; older ones go after a new commit.
      asynchronous: `save` returns once the state is copied to the host.
      read_only: create and delete nothing; another program may train here.
      say: called with one line of text per finding, in process 0 only.

    Raises:
      UserError: the directory is remote or cannot be written.
    """
    if '://' in str(directory):
      raise errors.UserError(
        f'{directory} is not a local path; mount the bucket and use its path.'
      )
    if keep < 1:
      raise errors.UserError(f'keep={keep} checkpoints; keep at least 1.')
    self.directory = pathlib.Path(directory).expanduser().resolve()
    self.keep = keep
    self.read_only = read_only
    self._asynchronous = asynchronous
    self._first = jax.process_index() == 0
    self._say = say if self._first else lambda line: None
    self._bad = set()  # steps whose arrays did not verify
    self._pending = None  # (step, bytes) handed to Orbax, not yet committed
    self._orbax = _open()
    if not read_only:
      self._prepare()

  def __enter__(self):
    return self

  def __exit__(self, kind, value, trace):
    try:
      self.close()
    except (errors.UserError, RuntimeError) as e:
      if kind is None:
        raise
      self._say(saved_arrays.first_line(e))  # the error under way matters more

  def _prepare(self):
    """Creates, tries to write, removes what a killed save left."""
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=self.directory):
        pass
    except OSError as e:
      raise errors.UserError(
        f'cannot write checkpoints to {self.directory}: {e.strerror or e}.'
      ) from e
    left = list(self.directory.glob(f'*{_TMP}*'))  # no committed step is one
    for path in left if self._first else []:
      shutil.rmtree(path, ignore_errors=True)
      self._say(f'removed the unfinished checkpoint {path}')
    _together(True)

  def _candidates(self):
    """Numbers of all folders that look like a step, newest first."""
    if not self.directory.is_dir():
      return []
    folders = [p for p in self.directory.iterdir() if p.is_dir()]
    steps = [int(p.name) for p in folders if _STEP.fullmatch(p.name)]
    return sorted(steps, reverse=True)

  def _folder(self, step):
    return self.directory / str(step)

  def steps(self) -> list[int]:
    """Committed steps, newest last: their manifests read. Arrays: not read."""
    good = []
    for step in self._candidates():
      try:
        manifest_lib.read_manifest(self._folder(step))
      except errors.IntegrityError:
        continue
      good.append(step)
    return good[::-1]

  def read_manifest(self, step: int | None = None) -> dict:
    """The manifest of a step (default: newest committed), no array loaded.

    Raises:
      UserError: there is no such step, or none at all.
      IntegrityError: the step is there and its manifest is damaged.
    """
    step = max(self.steps(), default=None) if step is None else step
    if step is None:
      raise errors.UserError(f'no checkpoint in {self.directory}.')
    if not self._folder(step).is_dir():
      raise errors.UserError(
        f'no checkpoint of step {step} in {self.directory}; there are '
        f'{", ".join(map(str, self.steps())) or "none"}.'
      )
    return manifest_lib.read_manifest(self._folder(step))

  def preflight(self, tree):
    """UserError unless the disk has 1.3 times the bytes of `tree` free."""
    size = fingerprint.nbytes(tree)
    need, free = int(SPACE * size), shutil.disk_usage(self.directory).free
    if free < need:
      raise errors.UserError(
        f'{self.directory}: a checkpoint needs {need} free bytes ({SPACE} x '
        f'{size}), the disk has {free}. Free some or use another directory.'
      )

  def save(self, step: int, tree: Saved, axes: Mapping, meta: dict) -> None:
    """Starts a checkpoint, after the one before; then `tree` may be donated.

    Args:
      step: int >= 0, not saved before.
      tree: {path: jax.Array}, or rows.Rows, which are read while it is written.
      axes: {path: tuple of logical axis names or None, one per dimension}.
      meta: dict that JSON can carry: config, data cursor, versions.

    Raises:
      IntegrityError: a leaf is not finite. Nothing is written.
      UserError: bad path, axes or meta; duplicate step; disk too small.
      RuntimeError: this or the earlier save failed.
    """
    if self.read_only:
      raise errors.UserError(f'{self.directory} is opened read-only.')
    step = int(step)
    if not tree or not _STEP.fullmatch(str(step)):
      raise errors.UserError(f'nothing to save, or a bad step: {step}.')
    manifest_lib.check_paths(tree)
    prints, bad = fingerprint.measure(tree)
    if bad:
      raise errors.IntegrityError(
        f'the state of step {step} is not finite in {", ".join(bad[:5])} '
        f'({len(bad)} of {len(tree)} leaves); it is not saved.'
      )
    manifest = manifest_lib.seal(
      step, manifest_lib.describe(tree, axes, prints), meta
    )
    self.wait()
    self._make_room(step)
    self.preflight(tree)
    self._pending = step, fingerprint.nbytes(tree)
    try:
      self._orbax.save(
        self._folder(step),
        args=ocp.args.Composite(
          state=saved_arrays.item(tree),
          manifest=ocp.args.JsonSave(manifest),
        ),
      )
    except Exception as e:  # Orbax raises many kinds
      self._failed(e)
    if not self._asynchronous:
      self.wait()

  def _make_room(self, step):
    """Duplicate step: UserError. A damaged one: set aside, never deleted."""
    folder = self._folder(step)
    if folder.exists():
      if step not in self._bad and step in self.steps():
        raise errors.UserError(f'step {step} is already saved in {folder}.')
      _together(True)  # all have looked before one renames
      if self._first:
        aside = tempfile.mkdtemp('', f'damaged-{step}-', self.directory)
        folder.rename(pathlib.Path(aside) / str(step))
        self._say(f'damaged checkpoint {folder} is now in {aside}')
      self._bad.discard(step)
    _together(True)

  def check(self):
    """Raises the error of an asynchronous save; never waits. Call every step.

    Raises:
      UserError: the disk is full. RuntimeError: any other failed write.
    """
    try:
      self._orbax.check_for_errors()
    except Exception as e:
      self._failed(e)
    self._prune()

  def wait(self):
    """Returns when the last save is committed; raises like `check`."""
    try:
      self._orbax.wait_until_finished()
    except Exception as e:
      self._failed(e)
    self._prune()
    if self._pending:
      self._failed(RuntimeError('the folder does not exist after the save'))

  def _failed(self, error):
    """Cleans up after a failed save and raises; older steps are untouched."""
    step, size = self._pending or ('?', 0)
    self._pending = None
    try:
      self._orbax.close()
    except Exception as e:  # a second error of the same save
      self._say(saved_arrays.first_line(e))
    self._orbax = _open()
    free = shutil.disk_usage(self.directory).free
    if self._first:
      for path in self.directory.glob(f'{step}{_TMP}*'):
        shutil.rmtree(path, ignore_errors=True)
    text = f'checkpoint {self._folder(step)} was not written'
    if re.search(r'os_error_code=.(28|122)|No space left', str(error)):
      raise errors.UserError(
        f'{text}: the disk is full, {free} bytes free of {int(SPACE * size)} '
        'needed. Older checkpoints are intact.'
      ) from error
    raise RuntimeError(f'{text}: {saved_arrays.first_line(error)}') from error

  def _prune(self):
    """After a commit: deletes good steps beyond `keep`, never the new one."""
    if not self._pending or not self._folder(self._pending[0]).is_dir():
      return
    new, self._pending = self._pending[0], None
    if not self._first:
      return
    good = [s for s in self.steps() if s not in self._bad]
    for step in set(good[: -self.keep]) - {new}:
      # Renamed first: a kill in between leaves no half-deleted step.
      gone = self.directory / f'{step}{_TMP}-deleted'
      self._folder(step).rename(gone)
      shutil.rmtree(gone, ignore_errors=True)

  def _load(self, step, manifest, like):
    """Restores onto the shardings of `like` and verifies."""
    wanted = {}
    for path, x in like.items():
      if getattr(x, 'sharding', None) is None:
        raise errors.UserError(f'like[{path!r}] has no sharding.')
      wanted[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    tree, problem = saved_arrays.read(self._folder(step), wanted)
    if not _together(problem is None):
      problem = problem or 'its files do not read in another process'
    else:
      prints, saved = fingerprint.fingerprint(tree), manifest['leaves']
      bad = [p for p in prints if prints[p] != saved[p]['fingerprint']]
      if bad:
        problem = f'fingerprint mismatch in {bad[0]} ({len(bad)} leaves in all)'
    if problem:
      self._bad.add(step)
      raise manifest_lib.damaged(self._folder(step), problem)
    return tree

  def restore(
    self, step: int, like: Mapping, under: str | tuple[str, ...] = ''
  ) -> tuple[Tree, dict]:
    """(tree, meta) of one step, verified, on the shardings of `like`.

    Only leaves whose path starts with `under` (one of it) are compared and
    read.

    Raises:
      UserError: no such step, or its leaves are not those of `like`.
      IntegrityError: the step is damaged.
    """
    self.wait()
    _together(True)  # process 0 may be deleting an old step
    manifest = self.read_manifest(step)
    manifest_lib.compare(manifest['leaves'], like, self._folder(step), under)
    return self._load(step, manifest, like), manifest['meta']

  def restore_latest_good(
    self, like: Mapping, under: str = ''
  ) -> tuple[int, Tree, dict] | None:
    """(step, tree, meta) of the newest step that verifies, or None.

    None: the directory holds no folder named like a step. A damaged step is
    reported in one line and skipped. `under`: as in `restore`.

    Raises:
      UserError: the newest readable step has other leaves than `like`.
      IntegrityError: there are steps and every one is damaged.
    """
    self.wait()
    _together(True)  # process 0 may be deleting an old step
    candidates = self._candidates()
    for step in candidates:
      try:
        return step, *self.restore(step, like, under)
      except errors.IntegrityError as e:
        self._say(f'{e} Trying an older one.')
    if not candidates:
      return None
    raise errors.IntegrityError(
      f'all {len(candidates)} checkpoints in {self.directory} are damaged '
      f'(steps {", ".join(map(str, candidates[:10]))}). Bring back a copy, or '
      'move the directory away to start from scratch.'
    )

  def close(self):
    """Waits for the last save, raises its error, frees Orbax's threads."""
    try:
      self.wait()
    finally:
      self._orbax.close()
