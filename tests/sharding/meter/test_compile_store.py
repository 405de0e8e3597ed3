"""The store of compiled programs survives kills, torn entries and moves."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import jax
from jax._src import compilation_cache
import pytest

from paraxis.configs.base import plain_files
from paraxis.sharding.meter import compile_store

PROGRAM = """
import os, sys
from paraxis.sharding.meter import compile_store

overlay = compile_store.Overlay(sys.argv[1])
import jax
for name, value in overlay.settings(0).items():
  jax.config.update(name, value)
hits = []
jax.monitoring.register_event_listener(
  lambda name, **_: hits.append(name) if name.endswith('cache_hits') else None)
if 'killed' in sys.argv:
  from jax._src import lru_cache
  def put(self, key, value):
    with open(f'{self.path}/{key}-cache', 'wb') as file:
      file.write(value[: len(value) // 2])
      file.flush()
      os._exit(9)
  lru_cache.LRUCache.put = put
if 'unguarded' not in sys.argv:
  compile_store.guard(overlay.folder)
x = jax.numpy.arange(1000.0)
x.block_until_ready()
jax.jit(lambda x: x * 2 + 1)(x).block_until_ready()
if 'looped' in sys.argv:
  mesh = jax.make_mesh((2,), ('data',))
  x = jax.device_put(x, jax.NamedSharding(mesh, jax.P('data')))
  for send in (lambda x: x + 1, lambda x: jax.lax.psum(x, 'data')) * 3:
    def looped(x):
      return jax.lax.fori_loop(0, 3, lambda i, x: send(x), x)
    run = jax.jit(jax.shard_map(
      looped, mesh=mesh, out_specs=jax.P('data'), check_vma=False))
    run(x).block_until_ready()
    print(len(hits), end=' ')
if 'unclean' in sys.argv:
  os._exit(0)
overlay.close()
print('hits', len(hits))
"""


def run(root, *arguments):
  """One process with an overlay; -W error: a torn entry that is read raises."""
  environment = {k: v for k, v in os.environ.items() if k[:4] != 'JAX_'}
  environment['JAX_PLATFORMS'] = 'cpu'
  environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
  return subprocess.run(
    [sys.executable, '-W', 'error', '-c', PROGRAM, str(root), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=100,
  )


def packed(data):
  """As jax packs an entry: by zstandard where that is installed, else zlib."""
  return compilation_cache.compress_executable(data)


def entries(root):
  return sorted(root.glob('*/*-cache.*'))


def test_a_kill_leaves_the_store_whole_and_a_moved_store_is_read(tmp_path):
  root = tmp_path / 'a'
  assert run(root, 'killed').returncode == 9
  (torn,) = root.glob('*/overlays/*/*-cache')
  assert compile_store.content(torn) is None and not entries(root)
  second = run(root)
  assert 'hits 0' in second.stdout, second.stderr
  assert entries(root) and not torn.exists()
  moved = root.rename(tmp_path / 'b')
  third = run(moved)
  assert third.returncode == 0, third.stderr
  assert 'hits' in third.stdout and 'hits 0' not in third.stdout


def test_a_torn_entry_in_the_store_is_made_again(tmp_path):
  run(tmp_path)
  before = [p.name for p in entries(tmp_path)]
  for torn in entries(tmp_path):
    data = torn.read_bytes()
    torn.unlink()  # its overlay's link must not be the same file
    torn.write_bytes(data[: len(data) // 2])
  again = run(tmp_path)
  assert again.returncode == 0 and 'hits 0' in again.stdout, again.stderr
  assert [p.name for p in entries(tmp_path)] == before
  assert None not in map(compile_store.content, entries(tmp_path))


def test_a_torn_entry_of_a_child_is_not_published(tmp_path):
  overlay = compile_store.Overlay(tmp_path)
  (overlay.folder / 'x-cache').write_bytes(packed(b'1' * 999)[:9])
  (overlay.folder / 'y-cache').write_bytes(packed(b'1' * 999))
  overlay.close()
  assert [p.name[:7] for p in entries(tmp_path)] == ['y-cache']
  assert not overlay.folder.exists()


def test_what_a_process_that_ended_early_left_is_removed(tmp_path):
  assert run(tmp_path, 'unclean').returncode == 0
  assert len(list(tmp_path.glob('*/overlays/*'))) == 1
  mine = compile_store.Overlay(tmp_path)
  assert list(tmp_path.glob('*/overlays/*')) == [mine.folder]
  mine.close()


def test_two_may_copy_one_entry(tmp_path, monkeypatch):
  """Without hard links; processes of two containers have the same number."""
  source, target = tmp_path / 'a', tmp_path / 'b'
  source.write_bytes(b'program')
  replace, others = os.replace, [target]

  def refused(*_):
    raise OSError(errno.EPERM, 'no links')

  def later(*paths):
    if others:
      compile_store._link(source, others.pop())
    replace(*paths)

  monkeypatch.setattr(os, 'link', refused)
  monkeypatch.setattr(os, 'replace', later)
  compile_store._link(source, target)
  assert sorted(tmp_path.iterdir()) == [source, target]
  assert target.read_bytes() == b'program'


@pytest.mark.parametrize('when', ['swept', 'swept after open', 'sweeping'])
def test_a_sweep_before_the_lock_costs_one_folder(when, tmp_path, monkeypatch):
  """Another process finds the new folder, and no lock on it."""
  locked, flock, folders, sweeping = compile_store._locked, fcntl.flock, [], []

  def lock(folder):
    folders.append(folder)
    if folders == [folder] and when == 'swept':
      shutil.rmtree(folder)
    if folders == [folder] and when == 'sweeping':
      sweeping.append(locked(folder))
    return locked(folder)

  def late(handle, flags):
    if len(folders) == 1 and when == 'swept after open':
      shutil.rmtree(folders[0])
    flock(handle, flags)

  monkeypatch.setattr(compile_store, '_locked', lock)
  monkeypatch.setattr(compile_store.fcntl, 'flock', late)
  mine = compile_store.Overlay(tmp_path)
  assert len(folders) == 2 and mine.folder == folders[1]
  assert (mine.folder / 'lock').exists()
  mine.close()
  for handle in sweeping:
    os.close(handle)


def test_an_entry_that_does_not_read_now_is_left_alone(tmp_path, monkeypatch):
  """As with too many open files; what is no file is damaged."""
  overlay = compile_store.Overlay(tmp_path)
  (overlay.folder / 'x-cache').write_bytes(packed(b'1'))
  overlay.close()
  (entry,) = entries(tmp_path)
  os.mkfifo(entry.with_name('y-cache.1-00000000'))
  lines, read = [], plain_files.read_bytes

  def refuse(path):
    if 'x-cache' in str(path):
      raise OSError(errno.EMFILE, 'Too many open files')
    return read(path)

  monkeypatch.setattr(plain_files, 'read_bytes', refuse)
  other = compile_store.Overlay(tmp_path, lines.append)
  assert not list(other.folder.glob('*-cache')) and entries(tmp_path) == [entry]
  assert len(lines) == 1 and '1 compiled programs' in lines[0]
  monkeypatch.undo()
  again = compile_store.Overlay(tmp_path, lines.append)
  assert (again.folder / 'x-cache').exists() and len(lines) == 1
  other.close()
  again.close()


def test_processors_do_not_share_code(tmp_path, monkeypatch):
  overlay = compile_store.Overlay(tmp_path)
  (overlay.folder / 'y-cache').write_bytes(packed(b'1'))
  overlay.close()
  assert len(entries(tmp_path)) == 1
  monkeypatch.setattr(compile_store, 'processor', lambda: 'another')
  other = compile_store.Overlay(tmp_path)
  assert not list(other.folder.glob('*-cache'))
  other.close()


def test_no_loop_of_several_cpu_devices_is_read_back(tmp_path):
  """Nor in the process that wrote it; a loop that sends nothing is."""
  looped = lambda root, *words: run(root, 'looped', *words).stdout.split()
  assert looped(tmp_path / 'a')[:6] == ['0', '0', '1', '1', '2', '2']
  counts = [int(n) for n in looped(tmp_path / 'a')[:6]]
  assert [n - counts[0] for n in counts] == [0, 0, 1, 1, 2, 2]
  names = [p.name for p in entries(tmp_path / 'a')]
  assert sum('looped' in name for name in names) == 1
  assert looped(tmp_path / 'b', 'unguarded')[:6] == [
    '0',
    '0',
    '1',
    '2',
    '3',
    '4',
  ]


def test_an_entry_that_was_half_written_is_looked_at_again(
  tmp_path, monkeypatch
):
  """Its second half leaves the folder's time as it is."""
  listeners = []
  add = listeners.append
  monkeypatch.setattr(jax.monitoring, 'register_event_listener', add)
  monkeypatch.setattr(compile_store, 'may_hang', lambda data: True)
  compile_store.guard(tmp_path)
  (before,) = listeners
  entry, data = tmp_path / 'x-cache', packed(b'1' * 999)
  entry.write_bytes(data[:9])
  before(compile_store._READS)
  with entry.open('ab') as file:
    file.write(data[9:])
  before(compile_store._READS)
  assert not entry.exists()
