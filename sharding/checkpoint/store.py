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

A save is in three parts: `begin` starts fingerprints and copies to host memory
(snapshot.py) and returns; `barrier`, before the state is donated, waits for
them and refuses what must not be saved; a thread writes, forces to the disk,
commits and prunes. `save` is the first two.
Source: Orbax (orbax.readthedocs.io), in saved_arrays.py, shards.py and
writer.py; not its Manager, which counts any folder with a number as a step and,
after a full disk, none at all.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import json
import pathlib
import shutil
import tempfile
from typing import Any, NamedTuple

import jax

from paraxis.configs.base import checkpoint
from paraxis.configs.base import errors
from paraxis.sharding import meeting
from paraxis.sharding.checkpoint import chunks
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import folders
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.checkpoint import writer

Tree = Mapping[str, jax.Array]  # canonical path -> leaf
Options, DEFAULT = writer.Options, writer.Options()
Saved = Mapping[str, jax.Array | rows.Rows]


class _Snapshot(NamedTuple):
  step: int
  taken: futures.Future  # of (tree on the host or the caller's, its Words)
  size: int  # bytes of this process' copies
  axes: Mapping
  meta: Any  # dict, or a function that gives it


def _of_first(name, steps):
  """Steps as process 0 sees them; others may see the folder as it was (NFS)."""
  return json.loads(meeting.gather(name, json.dumps(steps))[0])


class Store:
  """The checkpoints of one run; a context manager, which closes it.

  A tree is {canonical path: jax.Array}; `like` is {path: anything with shape,
  dtype and sharding}. Several processes make the same calls, in one folder.
  """

  def __init__(self, directory, options=DEFAULT, *, read_only=False, say=print):
    """Opens, creates and cleans the directory.

    Args:
      directory: a local path; a relative one is resolved now.
      options: Options.
      read_only: create and delete nothing; another program may train here.
      say: called with one line of text per finding, in process 0 only.

    Raises:
      UserError: the directory is remote or cannot be written; an option has no
        valid value.
    """
    if options.keep < 1:
      raise errors.UserError(
        f'keep={options.keep} checkpoints; keep at least 1.'
      )
    checkpoint.check_chunk_bytes(options.chunk_bytes)
    self.directory, self.options = folders.resolved(directory), options
    self.read_only = read_only
    self._first = jax.process_index() == 0
    self._say = say if self._first else lambda line: None
    self._snapshot: _Snapshot | None = None
    self._writer = writer.Writer(self.directory, options, self._say)
    self._copier = snapshot.Copier()
    saved_arrays.hear_no_log()
    if not read_only:
      folders.prepare(self.directory)
      for path in folders.unfinished(self.directory) if self._first else []:
        shutil.rmtree(path, ignore_errors=True)
        self._say(f'removed the unfinished checkpoint {path}')
      meeting.meet('checkpoints opened')

  def __enter__(self):
    return self

  def __exit__(self, kind, value, trace):
    if kind is not None:
      self._snapshot = None  # its meta may need what the error has closed
    try:
      self.close()
    except (errors.UserError, RuntimeError) as e:
      if kind is None:
        raise
      self._say(saved_arrays.first_line(e))  # the error under way matters more

  def _folder(self, step):
    return self.directory / str(step)

  def steps(self) -> list[int]:
    """Committed steps, newest last: their manifests read. Arrays: not read."""
    return sorted(manifest_lib.committed(self.directory))

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

  def preflight(self, tree, saves=0):
    """UserError unless the disk has room for `tree` and memory for a snapshot,
    and its chunks are not too many.

    tree: {path: array or jax.ShapeDtypeStruct with its sharding}.
    saves: of a run: room for those that are kept, and one, less those there.
    """
    snapshot.check(self.options.host_bytes, tree)
    chunks.check(self.options.chunk_bytes, tree)
    keep = min(self.options.keep, saves)
    more = max(0, keep - len(folders.steps(self.directory)))
    self._writer.room(fingerprint.nbytes(tree), more)

  def save(self, step: int, tree: Saved, axes: Mapping, meta: Any) -> None:
    """`begin` and `barrier`: then `tree` may be donated.

    Args:
      step: int >= 0, not saved before.
      tree: {path: jax.Array}, or rows.Rows, which are read while it is written.
      axes: {path: tuple of logical axis names or None, one per dimension}.
      meta: dict that JSON can carry: config, data cursor, versions; a function
        that gives it is called in `barrier`.

    Raises:
      IntegrityError: a leaf is not finite, or replicas differ. Nothing is
        written.
      UserError: bad path, axes or meta; duplicate step.
      CrashError: this or an earlier save failed; disk too small.
    """
    self.begin(step, tree, axes, meta)
    self.barrier()

  def begin(self, step: int, tree: Saved, axes: Mapping, meta: Any) -> None:
    """Starts fingerprints and copies of a state; arguments: `save`'s.

    `tree` must not be donated before `barrier` has returned.
    """
    if self.read_only:
      raise errors.UserError(f'{self.directory} is opened read-only.')
    step = int(step)
    if not tree or not folders.STEP.fullmatch(str(step)):
      raise errors.UserError(f'nothing to save, or a bad step: {step}.')
    manifest_lib.check_paths(tree)
    self.barrier()  # one copy is under way
    size, copied = 0, snapshot.possible(tree)
    if copied:
      size = snapshot.host_bytes(tree)
      self._writer.wait_for_memory(step, size)
    taken = self._copier.begin(tree, copied)
    self._snapshot = _Snapshot(step, taken, size, axes, meta)
    if not copied:  # the caller's own arrays, which may be donated next
      self.barrier()
      self._writer.drain()

  def before(self, step: int) -> list[int]:
    """Steps below one that are kept; process 0 deletes older ones."""
    self.drain()
    found = [s for s in self.steps() if s < step] if self._first else []
    return _of_first('older steps seen', found)

  def drop(self, step: int) -> None:
    """Deletes the steps after one: the run left the path that they are of."""
    self.drain()
    meeting.meet('later steps seen')
    for later in self.steps() if self._first else []:
      if later > step:
        folders.remove(self._folder(later))
    self._writer.forget(step)
    meeting.meet('later steps deleted')

  @property
  def copying(self) -> bool:
    """Whether `begin` started a snapshot that `barrier` has not seen."""
    return self._snapshot is not None

  def barrier(self) -> None:
    """Waits for the snapshot that `begin` started, and hands it to the writer.

    Call before what was saved is donated; without a snapshot it does nothing.
    Without `asynchronous` it waits until all is written, too.

    Raises: as `save`.
    """
    begun, self._snapshot = self._snapshot, None
    if begun is None:
      return
    tree, words = begun.taken.result()
    prints, bad, odd = words.read()
    if bad:
      raise errors.IntegrityError(
        f'the state of step {begun.step} is not finite in {", ".join(bad[:5])} '
        f'({len(bad)} of {len(tree)} leaves); it is not saved.'
      )
    self._same_replicas(begun.step, odd)
    jax.block_until_ready({p: x for p, x in tree.items() if begun.size})
    meta = begun.meta() if callable(begun.meta) else begun.meta
    manifest = manifest_lib.seal(
      begun.step, manifest_lib.describe(tree, begun.axes, prints), meta
    )
    self.check()
    self._set_aside(begun.step)
    self._writer.submit(begun.step, tree, begun.size, manifest)
    if not self.options.asynchronous:
      self._writer.drain()

  def compare_replicas(self, step: int, tree: Tree) -> None:
    """IntegrityError naming leaf and device if copies of a shard differ."""
    self._same_replicas(step, fingerprint.Words(tree).read()[2])

  def _same_replicas(self, step, odd):
    if odd:
      raise errors.IntegrityError(
        f'replicas of the state of step {step} differ: {odd[0].text()} '
        f'({len(odd)} shards in all); it is not saved. A process may run other '
        'code, or a device computes wrongly.'
      )

  def _set_aside(self, step):
    """Duplicate step: UserError. A damaged one: renamed, never deleted."""
    folder = self._folder(step)
    if self._writer.writes(step):
      self._writer.drain()
    # What one process sees of a shared folder, another may not see yet.
    if not meeting.agree('a checkpoint begun', not folder.exists()):
      saved = step not in self._writer.bad and step in self.steps()
      if not meeting.agree('a damaged checkpoint seen', not saved):
        raise errors.UserError(f'step {step} is already saved in {folder}.')
      if self._first:
        aside = tempfile.mkdtemp('', f'damaged-{step}-', self.directory)
        folder.rename(pathlib.Path(aside) / str(step))
        self._say(f'damaged checkpoint {folder} is now in {aside}')
      self._writer.bad.discard(step)
      self._writer.verified.discard(step)
      meeting.meet('a damaged checkpoint set aside')

  def check(self) -> None:
    """Reports finished writes; never waits. Call every step.

    Raises:
      CrashError: `failures` saves in a row were not written.
    """
    self._writer.check()

  def drain(self) -> None:
    """Returns when nothing that was begun is being written; raises as `check`:
    a failed save that is not one too many ends no rollback."""
    self.barrier()
    self._writer.drain()

  def wait(self) -> None:
    """Returns when all is committed that was begun, at the end of a run.

    Raises:
      CrashError: as `check`, or the last save was not written.
    """
    self.barrier()
    self._writer.wait()

  def _load(self, step, manifest, like):
    """Restores onto the shardings of `like` and verifies."""
    wanted = {}
    for path, x in like.items():
      if getattr(x, 'sharding', None) is None:
        raise errors.UserError(f'like[{path!r}] has no sharding.')
      wanted[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    tree, problem = saved_arrays.read(self._folder(step), wanted)
    if not meeting.agree('checkpoint read', problem is None):
      problem = problem or 'its files do not read in another process'
    else:
      prints, _, odd = fingerprint.Words(tree).read()
      saved = manifest['leaves']
      bad = [p for p in prints if prints[p] != saved[p]['fingerprint']]
      if bad:
        problem = f'fingerprint mismatch in {bad[0]} ({len(bad)} leaves in all)'
      elif odd:
        problem = f'replicas of it differ: {odd[0].text()}'
    if problem:
      if not self._folder(step).exists():
        text = f'{self._folder(step)} was deleted while it was read'
        raise errors.UserError(f'{text}: read a newer one.')
      self._writer.bad.add(step)
      raise manifest_lib.damaged(self._folder(step), problem)
    self._writer.verified.add(step)
    return tree

  def restore(
    self, step: int, like: Mapping, under: str | tuple[str, ...] = ''
  ) -> tuple[Tree, dict]:
    """(tree, meta) of one step, verified, on the shardings of `like`.

    Only leaves whose path starts with `under` (one of it) are compared and
    read; those of `like`, whatever else there is, if it is ().

    Raises:
      UserError: no such step, or its leaves are not those of `like`.
      IntegrityError: the step is damaged.
    """
    self.drain()
    meeting.meet('restore')  # process 0 may be deleting an old step
    found = self._alike(step, 'manifest read', self.read_manifest)
    manifest_lib.compare(found['leaves'], like, self._folder(step), under)
    return self._load(step, found, like), found['meta']

  def _alike(self, step, name, read):
    """What `read(step)` gives; raises in all processes if it does in one."""
    try:
      found: Any = read(step)
    except (errors.UserError, errors.IntegrityError) as e:
      found = e
    failed = isinstance(found, Exception)
    if not meeting.agree(name, not failed):
      text = 'its manifest does not read in another process'
      raise found if failed else manifest_lib.damaged(self._folder(step), text)
    return found

  def restore_latest_good(
    self,
    like: Mapping | Callable[[int], Mapping],
    under: str | tuple[str, ...] = '',
  ) -> tuple[int, Tree, dict] | None:
    """(step, tree, meta) of the newest step that verifies, or None.

    None: the directory holds no folder named like a step. A damaged step is
    reported in one line and skipped. `like`, `under`: as in `restore`; or a
    function of the step, which may find it damaged.

    Raises:
      UserError: the newest readable step has other leaves than `like`.
      IntegrityError: there are steps and every one is damaged.
    """
    self.drain()
    meeting.meet('restore')  # process 0 may be deleting an old step
    listed, tried = lambda: folders.steps(self.directory), []
    while left := set(_of_first('steps seen', listed())) - set(tried):
      step = max(left)
      try:
        like_ = self._alike(step, 'leaves', like) if callable(like) else like
        return step, *self.restore(step, like_, under)
      except (errors.UserError, errors.IntegrityError) as e:
        # Another program, which trains here, may have deleted it meanwhile.
        kept = meeting.agree('step there', self._folder(step).exists())
        if kept and isinstance(e, errors.UserError):
          raise
        self._say(f'{e} Trying {"an older" if kept else "another"} one.')
        tried.append(step)
    if not tried:
      return None
    raise errors.IntegrityError(
      f'all {len(tried)} checkpoints in {self.directory} are damaged '
      f'(steps {", ".join(map(str, tried[:10]))}). Bring back a copy, or '
      'move the directory away to start from scratch.'
    )

  def close(self):
    """Waits for what was begun, raises its error, frees the threads."""
    try:
      self.wait()
    finally:
      self._copier.close()
      self._writer.close()
