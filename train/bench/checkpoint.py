"""Bench of checkpoints: what a save blocks, what it costs in all, and restore.

The same float32 arrays, random and so hardly compressible, are saved by our
store and by Orbax: as it is by default (zstd) and without compression. Ours
writes by Orbax too and adds fingerprints, one pass over the arrays, which a
restore checks: the targets are those of uncompressed Orbax plus that pass.

`blocks` is the CPU-seconds that the process spends until `save` returns, with
what other threads do meanwhile; the total ends when all of them are idle.
Files are in the system's temporary folder, which holds one checkpoint at a
time; they are read from the page cache.
"""

import functools
import pathlib
import shutil
import tempfile
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train

ARRAYS, SIZE = 16, 2**23  # half a GiB
QUICK_ARRAYS, QUICK_SIZE = 3, 2**12
BLOCKS, SAVE, RESTORE = ', save blocks', ', save', ', restore'


class Ours:
  """Our store of one checkpoint."""

  def __init__(self, folder):
    self._store = store_lib.Store(folder, say=lambda line: None)

  def save(self, tree):
    axes = {path: (None,) * x.ndim for path, x in tree.items()}
    self._store.save(0, tree, axes, {})

  def wait(self):
    self._store.wait()

  def restore(self, like):
    return self._store.restore(0, like)[0]

  def close(self):
    self._store.close()


class Orbax:
  """Orbax's asynchronous checkpointer, with or without compression."""

  def __init__(self, folder, compressed):
    self._folder = folder / 'state'
    self._orbax = ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(use_compression=compressed)
    )

  def save(self, tree):
    self._orbax.save(self._folder, args=ocp.args.PyTreeSave(dict(tree)))

  def wait(self):
    self._orbax.wait_until_finished()

  def restore(self, like):
    each = ocp.checkpoint_utils.construct_restore_args(dict(like))
    args = ocp.args.PyTreeRestore(dict(like), each)
    return self._orbax.restore(self._folder, args=args)

  def close(self):
    self._orbax.close()


FORMS = {
  'Orbax': functools.partial(Orbax, compressed=True),
  'Orbax, uncompressed': functools.partial(Orbax, compressed=False),
  'ours': Ours,
}


def arrays(count, size):
  """{path: random float32 array of `size`}."""
  keys = jax.random.split(jax.random.key(0), count)
  draw = jax.jit(lambda key: jax.random.normal(key, (size // 64, 64)))
  return {f'params/array_{i}': draw(key) for i, key in enumerate(keys)}


def once(form, tree, sizes, now):
  """Saves and restores -> {part: seconds}; appends MiB on disk to `sizes`.

  RuntimeError: what comes back is not what was saved.
  """
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )
  folder = pathlib.Path(tempfile.mkdtemp(prefix='paraxis-bench-'))
  store = form(folder)
  try:
    before = now()
    store.save(tree)
    blocked = time.process_time()
    store.wait()
    saved = now()
    found = jax.block_until_ready(store.restore(like))
    end = now()
    files = [p for p in folder.rglob('*') if p.is_file()]
    sizes.append(sum(p.stat().st_size for p in files) / 2**20)
    if not all(np.array_equal(found[p], x) for p, x in tree.items()):
      raise RuntimeError('what was restored is not what was saved')
  finally:
    store.close()
    shutil.rmtree(folder)
  return {BLOCKS: blocked - before, SAVE: saved - before, RESTORE: end - saved}


def _sums(first, second):
  return [a + b for a, b in zip(first, second, strict=True)]


def checkpoint(rounds, quick, say):
  """Half a GiB of float32 to the disk and back, beside Orbax."""
  count, size = (QUICK_ARRAYS, QUICK_SIZE) if quick else (ARRAYS, SIZE)
  now, report = bench_train.begin(
    'checkpoint',
    f'{count} float32 arrays of {size * 4 / 2**20:g} MiB each, one device',
    quick,
  )
  tree = jax.block_until_ready(arrays(count, size))
  sizes = {name: [] for name in FORMS}
  made: dict[str, Any] = {
    name: functools.partial(once, form, tree, sizes[name], now)
    for name, form in FORMS.items()
  }
  made['fingerprint'] = lambda: fingerprint.measure(tree) and None
  times = measure.interleave(made, rounds, now, say)
  report.add(times)
  report.add({f'{name}: on disk': s[1:] for name, s in sizes.items()}, 'MiB')
  default, plain, ours = FORMS
  once_more = times['fingerprint']
  for part in (SAVE, RESTORE):
    report.check(
      f'time of ours{part} / ({plain} + fingerprint)',
      measure.ratios(times[ours + part], _sums(times[plain + part], once_more)),
      1.0,
      least=False,
    )
  report.check(
    f'time that ours{BLOCKS} / {default}',
    measure.ratios(times[ours + BLOCKS], times[default + BLOCKS]),
    2.0,
    least=False,
  )
  versions = f'orbax-checkpoint {ocp.__version__}'
  report.notes.append(f'{versions}; a save of ours computes fingerprints')
  return report
