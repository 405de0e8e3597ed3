"""Bench of checkpoints: what a save blocks, what it costs in all, and restore.

The same float32 arrays, random and so hardly compressible, cut by rows over
eight devices, are saved by our store and by Orbax: as it is by default (zstd)
and without compression. Ours writes by Orbax too and adds fingerprints, one
pass over the arrays, which a restore checks. It is restored as it was saved,
without that check, and cut into rows and columns.

`blocks` is the CPU-seconds that the process spends until `save` returns, with
what other threads do meanwhile; the total ends when all of them are idle.
Files are in the system's temporary folder, which holds one checkpoint at a
time; they are read from the page cache.

The stages of a save are in wall seconds, of a run that saves at every step, the
steps as in train/loop.py: gradients run between `begin` and `barrier`, and the
update donates what is saved. A stage counts for as long as it blocks the thread
that trains; a barrier is entered when the gradients are there.
"""

import functools
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train

ARRAYS, SIZES = 16, (2**21, 2**24)  # elements of each: 128 MiB, 1 GiB
QUICK_ARRAYS, QUICK_SIZES = 3, (2**12,)
COLUMNS = 64
BLOCKS, SAVE, RESTORE = ', save blocks', ', save', ', restore'
UNVERIFIED, ELSEWHERE = ', restore unverified', ', restore on another mesh'
BEGIN, BARRIER = ', stall of begin', ', stall of barrier'
STEPS, LONGER = ', steps', ', step with a save less one without'
WHOLE = ', begun to committed'
SAVES = 3  # steps of which stalls are the median
WIDTH, PRODUCTS = 1024, 64  # of the step beside which a checkpoint is written
QUICK_WIDTH, QUICK_PRODUCTS = 8, 1
STALL = 0.05  # of a whole save, at most
BLOCKED = 2.0  # times as long as Orbax, at most
SAVED = 0.5  # CPU-seconds of a save over those of Orbax's default
RESTORED = 1.3  # of a verified restore, of one on another mesh


class Ours:
  """Our store, which keeps the newest step."""

  def __init__(self, folder):
    options = store_lib.Options(keep=1)
    self._store = store_lib.Store(folder, options, say=lambda line: None)
    self._step = -1

  def begin(self, tree):
    axes = {path: (None,) * x.ndim for path, x in tree.items()}
    self._step += 1
    self._store.begin(self._step, tree, axes, {})

  def barrier(self):
    self._store.barrier()

  def wait(self):
    self._store.wait()

  def restore(self, like):
    return self._store.restore(self._step, like)[0]

  def unverified(self, like):
    folder = self._store.directory / str(self._step)
    return saved_arrays.read(folder, like)[0]

  def close(self):
    self._store.close()


class Synchronous(Ours):
  """Our store, waited for until a step is committed."""

  def begin(self, tree):
    super().begin(tree)
    self.wait()


class Orbax:
  """Orbax's asynchronous checkpointer, with or without compression."""

  def __init__(self, folder, compressed):
    self._folder, self._step = folder, -1
    self._orbax = ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(use_compression=compressed)
    )

  def begin(self, tree):
    self._step += 1
    path = self._folder / str(self._step)
    self._orbax.save(path, args=ocp.args.PyTreeSave(dict(tree)))

  def barrier(self):
    pass  # it has copied what it writes

  def wait(self):
    self._orbax.wait_until_finished()

  def restore(self, like):
    each = ocp.checkpoint_utils.construct_restore_args(dict(like))
    args = ocp.args.PyTreeRestore(dict(like), each)
    return self._orbax.restore(self._folder / str(self._step), args=args)

  def close(self):
    self._orbax.close()


FORMS = {
  'Orbax': functools.partial(Orbax, compressed=True),
  'Orbax, uncompressed': functools.partial(Orbax, compressed=False),
  'ours': Ours,
}


def arrays(count, size, place=None):
  """{path: random float32 array of `size`}; place: its sharding."""
  keys = jax.random.split(jax.random.key(0), count)
  shape = size // COLUMNS, COLUMNS
  draw = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=place)
  return {f'params/array_{i}': draw(key) for i, key in enumerate(keys)}


def places():
  """Shardings of an array: by rows over all devices; by rows and columns."""
  devices = np.array(jax.devices())
  columns = 2 if len(devices) % 2 == 0 else 1
  rows = jax.NamedSharding(jax.make_mesh(devices.shape, ('x',)), jax.P('x'))
  both = jax.make_mesh((len(devices) // columns, columns), ('x', 'y'))
  return rows, jax.NamedSharding(both, jax.P('x', 'y'))


def once(form, tree, sizes, now, other=None):
  """Saves and restores -> {part: seconds}; appends MiB on disk to `sizes`.

  other: a sharding, for restores of ours without verifying, and on that mesh.
  RuntimeError: what comes back is not what was saved.
  """

  def wanted(place=None):
    return {
      p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place or x.sharding)
      for p, x in tree.items()
    }

  folder = pathlib.Path(tempfile.mkdtemp(prefix='paraxis-bench-'))
  store = form(folder)
  try:
    before = now()
    store.begin(tree)
    store.barrier()
    blocked = time.process_time()
    store.wait()
    found = {BLOCKS: blocked - before, SAVE: now() - before}
    files = [p for p in folder.rglob('*') if p.is_file()]
    sizes.append(sum(p.stat().st_size for p in files) / 2**20)
    restores = {RESTORE: (store.restore, None)}
    if other is not None:
      restores[UNVERIFIED] = store.unverified, None
      restores[ELSEWHERE] = store.restore, other
    for part, (restore, place) in restores.items():
      like, before = wanted(place), now()
      back = jax.block_until_ready(restore(like))
      found[part] = now() - before
      if not all(np.array_equal(back[p], x) for p, x in tree.items()):
        raise RuntimeError(f'what was restored is not what was saved{part}')
      del back
  finally:
    store.close()
    shutil.rmtree(folder)
  return found


@functools.partial(jax.jit, donate_argnums=0)
def _update(tree):
  return jax.tree.map(lambda x: 0.999 * x, tree)


def stalls(store, tree, compute, saves=SAVES):
  """Wall seconds for which each of `saves` steps waits for its checkpoint.

  Args:
    store: one of the classes above, its threads running; None: nothing is
      saved. One more step follows, beside which the last save is written.
    tree: {path: array}, unchanged.
    compute: the gradients of a step; returns when they are there.

  Returns:
    {BEGIN, BARRIER: median seconds of a save; STEPS: of all steps}.
  """
  now, each = time.perf_counter, {BEGIN: [], BARRIER: []}
  held = jax.block_until_ready(jax.tree.map(jnp.copy, tree))
  start = now()
  for number in range(saves + 1):
    saved = store and number < saves
    if saved:
      before = now()
      store.begin(held)
      each[BEGIN].append(now() - before)
    compute()
    if saved:
      before = now()
      store.barrier()
      each[BARRIER].append(now() - before)
    held = jax.block_until_ready(_update(held))
  found = {part: statistics.median(x or [0.0]) for part, x in each.items()}
  return found | {STEPS: now() - start}


def _stages(form, tree, compute):
  """Wall seconds of the stages of a save in a new store: {part: seconds}."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='paraxis-bench-'))
  store = form(folder)

  def save():
    before = time.perf_counter()
    store.begin(tree)
    store.barrier()
    store.wait()
    return time.perf_counter() - before

  try:
    save()  # threads start
    without = stalls(None, tree, compute)
    found = stalls(store, tree, compute)
    store.wait()
    found[LONGER] = (found.pop(STEPS) - without[STEPS]) / SAVES
    return found | {WHOLE: save()}
  finally:
    store.close()
    shutil.rmtree(folder)


def _gradients(width, products):
  """A function that multiplies matrices for a while."""
  run = jax.jit(
    lambda x: jax.lax.fori_loop(0, products, lambda _, x: jnp.sin(x @ x), x)
  )
  x = jnp.ones((width, width))
  return lambda: jax.block_until_ready(run(x))


def _add_stages(report, text, tree, rounds, quick, say):
  """Rows of the stages of a save, of ours and of Orbax as it is by default."""
  sizes = (QUICK_WIDTH, QUICK_PRODUCTS) if quick else (WIDTH, PRODUCTS)
  compute = _gradients(*sizes)

  def step():
    before = time.perf_counter()
    compute()
    return {'': time.perf_counter() - before}

  made: dict[str, Any] = {
    text + name: functools.partial(_stages, FORMS[name], tree, compute)
    for name in ('Orbax', 'ours')
  }
  made[f'{text}gradients of a step'] = step
  times = measure.interleave(made, rounds, time.perf_counter, say)
  report.add(times, 'wall s')
  stalled = _sums(times[f'{text}ours{BEGIN}'], times[f'{text}ours{BARRIER}'])
  report.check(
    f'{text}wall time that ours blocks a step / begun to committed',
    measure.ratios(stalled, times[f'{text}ours{WHOLE}']),
    STALL,
    least=False,
  )
  orbax = f'{text}Orbax'
  theirs = _sums(times[orbax + BEGIN], times[orbax + BARRIER])
  report.check(
    f'{text}wall time that ours blocks a step / that Orbax does',
    measure.ratios(stalled, theirs),
    BLOCKED,
    least=False,
  )


def _sums(first, second):
  return [a + b for a, b in zip(first, second, strict=True)]


def _add_size(report, text, size, rounds, quick, say, now):
  """Rows and targets of arrays of a size."""
  place, other = places()
  tree = jax.block_until_ready(
    arrays(QUICK_ARRAYS if quick else ARRAYS, size, place)
  )
  files = {text + name: [] for name in FORMS}
  made: dict[str, Any] = {
    text + name: functools.partial(
      once,
      form,
      tree,
      files[text + name],
      now,
      other if name == 'ours' else None,
    )
    for name, form in FORMS.items()
  }
  made[f'{text}fingerprint'] = lambda: fingerprint.measure(tree) and None
  times = measure.interleave(made, rounds, now, say)
  report.add(times)
  report.add({f'{name}: on disk': s[1:] for name, s in files.items()}, 'MiB')
  default, plain, ours = (text + name for name in FORMS)
  once_more = times[f'{text}fingerprint']
  for part in (SAVE, RESTORE):
    report.check(
      f'{ours}{part} / (uncompressed Orbax + fingerprint)',
      measure.ratios(times[ours + part], _sums(times[plain + part], once_more)),
      1.0,
      least=False,
    )
  for part, base, most in (
    (SAVE, default + SAVE, SAVED),
    (RESTORE, ours + UNVERIFIED, RESTORED),
    (ELSEWHERE, ours + RESTORE, RESTORED),
  ):
    report.check(
      f'{ours}{part} / {base.removeprefix(text)}',
      measure.ratios(times[ours + part], times[base]),
      most,
      least=False,
    )
  _add_stages(report, text, tree, rounds, quick, say)


def checkpoint(rounds, quick, say):
  """128 MiB and 1 GiB of float32 to the disk and back, beside Orbax."""
  count = QUICK_ARRAYS if quick else ARRAYS
  now, report = bench_train.begin(
    'checkpoint',
    f'{count} float32 arrays, cut by rows over {jax.device_count()} devices',
    quick,
  )
  for size in QUICK_SIZES if quick else SIZES:
    text = f'{count * size * 4 / 2**20:g} MiB: '
    if report.lacks(text):
      _add_size(report, text, size, rounds, quick, say, now)
      report.finish(text)
  versions = f'orbax-checkpoint {ocp.__version__}'
  report.notes.append(f'{versions}; a save of ours computes fingerprints')
  return report
