"""Saving beside training: snapshots, failed writes, what stays, durability."""

from concurrent import futures
import contextlib
import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import folders
from paraxis.sharding.checkpoint import retention
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.checkpoint import store

AXES = {'w': ('embed', 'mlp'), 'b': ('mlp',)}


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make(dict(data=2, fsdp=2, tensor=2), jax.devices()[:8])


def state(mesh, seed=0):
  rng = np.random.default_rng(seed)
  w = NamedSharding(mesh, P('fsdp', 'tensor'))
  return {
    'w': jax.device_put(rng.standard_normal((64, 32), np.float32), w),
    'b': jax.device_put(
      rng.standard_normal(32, np.float32), NamedSharding(mesh, P('tensor'))
    ),
  }


def values(tree):
  return {p: np.asarray(x).copy() for p, x in tree.items()}


def equal(tree, wanted):
  return all(np.array_equal(np.asarray(tree[p]), wanted[p]) for p in wanted)


def with_other_copy(tree, mesh, path='b', device=5):
  """The same tree; some devices hold another copy of a replicated shard."""
  others = {mesh.devices.flat[i] for i in np.atleast_1d(device)}
  parts = []
  for shard in tree[path].addressable_shards:
    x = np.asarray(shard.data).copy()
    if shard.device in others:
      x[3] += 1
    parts.append(jax.device_put(x, shard.device))
  x = tree[path]
  changed = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
  return dict(tree, **{path: changed})


@pytest.mark.fault(29)
def test_a_replica_that_differs_is_named_and_nothing_is_written(
  mesh, tmp_path, said
):
  good = state(mesh)
  prints, bad, odd = fingerprint.Words(good).read()
  assert (prints, bad, odd) == (fingerprint.fingerprint(good), [], [])
  for number in (0, 5):
    tree = with_other_copy(good, mesh, device=number)
    _, _, odd = fingerprint.Words(tree).read()
    device = mesh.devices.flat[number]
    assert [(o.leaf, o.device) for o in odd] == [('b', device)]
    assert len(odd[0].others) == 3 and device not in odd[0].others
    assert odd[0].axes == ('data', 'fsdp')  # tensor has its shards
  with store.Store(tmp_path, say=said.append) as s:
    with pytest.raises(
      errors.IntegrityError,
      match=r'step 3 differ: b of device 5 \(process 0\) is not that of .*, '
      'along mesh axes data, fsdp ',
    ):
      s.save(3, tree, AXES, {})
    assert not list(tmp_path.glob('3*'))
    s.save(3, good, AXES, {})
    like = {
      p: jax.ShapeDtypeStruct.like(x) if False else x for p, x in good.items()
    }
    assert equal(s.restore(3, like)[0], values(good))


@pytest.mark.parametrize(
  'devices, axis', [((4, 6), 'data'), ((2, 6), 'fsdp'), ((5, 7), 'data')]
)
def test_the_axis_along_which_replicas_differ(mesh, devices, axis):
  """All copies of one place on an axis are others: not so on the other axis."""
  tree = with_other_copy(state(mesh), mesh, device=devices)
  _, _, odd = fingerprint.Words(tree).read()
  assert {o.axes for o in odd} == {(axis,)} and len(odd) == 2
  assert odd[0].text().endswith(f', along mesh axis {axis}')


def test_a_device_whose_lines_are_all_odd_has_no_axis(mesh):
  one = fingerprint.Odd('b', mesh.devices.flat[0], (mesh.devices.flat[7],), ())
  assert one.text() == (
    'b of device 0 (process 0) is not that of device 7 (process 0)'
  )


def test_two_replicas_that_differ_are_both_named(mesh):
  one = mesh_lib.make(dict(data=2), jax.devices()[:2])
  x = {'b': jax.device_put(np.ones(8, np.float32), NamedSharding(one, P()))}
  _, _, odd = fingerprint.Words(with_other_copy(x, one, device=1)).read()
  assert len(odd) == 1 and {odd[0].device, *odd[0].others} == set(
    one.devices.flat
  )


@pytest.mark.invariant(16)
def test_training_continues_while_it_is_copied(mesh, tmp_path, said):
  """The update donates what was saved; the file holds what was asked for."""
  update = jax.jit(
    lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0
  )
  tree, wanted = state(mesh), {}
  with store.Store(tmp_path, store.Options(keep=9), say=said.append) as s:
    for step in range(4):
      wanted[step] = values(tree)
      s.begin(step, tree, AXES, lambda step=step: {'step': step})
      s.barrier()
      tree = update(tree)
    s.wait()
    for step, numbers in wanted.items():
      found, meta = s.restore(step, tree)
      assert equal(found, numbers) and meta == {'step': step}


@pytest.mark.invariant(16)
def test_begin_does_not_wait_for_copies(mesh, tmp_path, said, monkeypatch):
  """A state that is donated before `barrier` is an error and is not saved."""
  gate, ask = threading.Event(), snapshot.to_host

  def slow(tree):
    assert gate.wait(60)
    return ask(tree)

  monkeypatch.setattr(snapshot, 'to_host', slow)
  with store.Store(tmp_path, say=said.append) as s:
    for step, donated in ((0, False), (1, True)):
      tree = state(mesh)
      wanted = values(tree)
      gate.clear()
      s.begin(step, tree, AXES, {})
      assert s.copying
      if donated:  # negative
        for x in tree.values():
          x.delete()
      tree.clear()  # the mapping is the caller's
      gate.set()
      if not donated:
        s.barrier()
        continue
      with pytest.raises(RuntimeError, match='deleted'):
        s.barrier()
    s.wait()
    assert s.steps() == [0]
    assert equal(s.restore(0, state(mesh, 1))[0], wanted)


@pytest.mark.parametrize('under', [True, False])
def test_a_snapshot_compiles_nothing_again(mesh, tmp_path, under):
  """What compiled a state's fingerprint before: a program's, under its mesh."""
  tree = state(mesh)
  with jax.set_mesh(mesh) if under else contextlib.nullcontext():
    fingerprint.Words(tree).read()
    specs = tuple(tree[path].sharding.spec for path in sorted(tree))
    program = fingerprint._of_devices(mesh, specs)
    before = program._cache_size()
    with store.Store(tmp_path) as s:
      s.save(0, tree, AXES, {})
    assert program._cache_size() == before > 0


def test_a_snapshot_is_a_copy_and_keeps_its_layout(mesh):
  tree = state(mesh)
  places = lambda x: {
    s.data.unsafe_buffer_pointer() for s in x.addressable_shards
  }
  copies = snapshot.to_host(tree)
  for path, x in copies.items():
    assert x.sharding.memory_kind == snapshot.HOST
    assert x.sharding.spec == tree[path].sharding.spec
    assert not places(x) & places(tree[path])
  # Negative: a copy to where it is would share memory with the original.
  same = jax.device_put(tree['w'], tree['w'].sharding)
  assert places(same) == places(tree['w'])
  # Of 8 devices: w is on each half of data, b on four places; one counts.
  assert snapshot.host_bytes(tree) == 4 * (64 * 32 + 32)


@pytest.mark.invariant(16)
def test_begin_does_not_wait_for_a_slow_disk(mesh, tmp_path, said):
  gate = threading.Event()
  with store.Store(tmp_path, store.Options(keep=9), say=said.append) as s:
    s.save(0, state(mesh), AXES, {})
    s.wait()
    write = s._writer._orbax.save

    def slow(*args, **kwargs):
      gate.wait(60)
      return write(*args, **kwargs)

    s._writer._orbax.save = slow
    for step in (1, 2):
      s.save(step, state(mesh, step), AXES, {})
    s.check()
    assert s.steps() == [0] and not said
    threading.Timer(0.3, gate.set).start()
    s.save(3, state(mesh, 3), AXES, {})  # a third snapshot waits for memory
    assert len(said) == 1 and 'checkpoint 3 waits until 1 is written' in said[0]
    assert s.steps()[:2] == [0, 1]
    s.wait()
    assert s.steps() == [0, 1, 2, 3]


def test_host_memory_below_one_snapshot(mesh, tmp_path):
  options = store.Options(host_bytes=100)
  with store.Store(tmp_path, options) as s:
    with pytest.raises(errors.UserError, match='=100 is less than .* 8320 byt'):
      s.preflight(state(mesh))


def test_a_snapshot_above_the_memory_of_the_machine(
  mesh, tmp_path, monkeypatch
):
  monkeypatch.setattr(snapshot, 'machine_bytes', lambda: 8319)
  with store.Store(tmp_path) as s:
    with support.refused('takes 8320 bytes', 'the machine has 8319'):
      s.preflight(state(mesh))
    monkeypatch.setattr(snapshot, 'machine_bytes', lambda: 0)  # not known
    s.preflight(state(mesh))


def test_without_host_memory_a_save_blocks(mesh, tmp_path, monkeypatch):
  monkeypatch.setattr(snapshot, 'has_host_memory', lambda device: False)
  tree = state(mesh)
  wanted = values(tree)
  with store.Store(tmp_path) as s:
    s.begin(3, tree, AXES, {})
    assert s.steps() == [3] and not s.copying
    for x in tree.values():
      x.delete()  # as a donation does
    s.barrier()
    like = state(mesh, 1)
    assert equal(s.restore(3, like)[0], wanted)


def test_a_save_that_is_not_asynchronous(mesh, tmp_path):
  """Written when `barrier` returns, which the training loop calls."""
  options = store.Options(asynchronous=False)
  with store.Store(tmp_path, options) as s:
    s.begin(3, state(mesh), AXES, {})
    assert s.copying  # beside the next gradient
    s.barrier()
    assert not s._writer.writes(3) and s.steps() == [3]


@pytest.mark.parametrize('host_memory', [True, False])
def test_saves_that_block_may_fail_as_others_may(
  mesh, tmp_path, said, monkeypatch, host_memory
):
  def fail(folder):
    raise OSError(f'{folder.name} is gone')

  monkeypatch.setattr(snapshot, 'has_host_memory', lambda device: host_memory)
  options = store.Options(asynchronous=not host_memory, failures=3)
  with store.Store(tmp_path, options, say=said.append) as s:
    s.save(0, state(mesh), AXES, {})
    monkeypatch.setattr(folders, 'force', fail)
    s.save(1, state(mesh), AXES, {})
    with pytest.raises(errors.CrashError, match='/1 was not written'):
      s.wait()  # as of a last one
    s.save(2, state(mesh), AXES, {})
    told = [line.partition('Training')[2] for line in said]
    assert told == [' continues (1 of 3).', ' continues (2 of 3).']
    with pytest.raises(errors.CrashError, match='/3 was not .* 3 in a row'):
      s.save(3, state(mesh), AXES, {})
    assert s.steps() == [0]


def test_two_threads_that_prune(mesh, tmp_path, monkeypatch):
  """The one that writes, and the one that makes room for the next step."""
  both, of = threading.Barrier(2, timeout=0.5), retention.expendable

  def listed(*args):
    with contextlib.suppress(threading.BrokenBarrierError):
      both.wait()  # passed where both have listed the same steps
    return of(*args)

  with store.Store(tmp_path, store.Options(keep=9)) as s:
    for step in range(3):
      s.save(step, state(mesh), AXES, {})
    s.wait()
    monkeypatch.setattr(retention, 'expendable', listed)
    with futures.ThreadPoolExecutor(2) as threads:
      list(threads.map(s._writer._prune, (1, 1)))
    assert s.steps() == [2] and both.broken


@pytest.mark.parametrize('name', ['bad', 'verified'])
def test_what_is_known_of_steps_goes_with_them(mesh, tmp_path, name):
  """A rolled back run saves the same steps again: nothing is known of these."""
  with store.Store(tmp_path, store.Options(keep=2)) as s:
    for step in (1, 2):
      s.save(step, state(mesh), AXES, {})
    s.wait()
    getattr(s._writer, name).update((1, 2))
    s.drop(1)
    assert getattr(s._writer, name) == {1}
    for step in (2, 3, 4):
      s.save(step, state(mesh), AXES, {})
    s.wait()
    assert s.steps() == [1, 3, 4]


def test_a_step_that_was_set_aside_is_not_verified(mesh, tmp_path):
  with store.Store(tmp_path, store.Options(keep=1)) as s:
    s.save(1, state(mesh), AXES, {})
    s.wait()
    s._writer.verified.add(1)
    s._writer.bad.add(1)
    for step in (1, 2):
      s.save(step, state(mesh), AXES, {})
    s.wait()
    assert s.steps() == [2]


def test_steps_before_a_spike_are_those_that_stay(mesh, tmp_path):
  with store.Store(tmp_path, store.Options(keep=2), say=print) as s:
    for step in (1, 2, 3):
      s.save(step, state(mesh, step), AXES, {})
    assert s.before(3) == [2] and s.before(2) == []


def full(monkeypatch, free):
  usage = shutil.disk_usage('/')
  found = lambda path: usage._replace(free=free[0])
  monkeypatch.setattr(shutil, 'disk_usage', found)


@pytest.mark.fault(15)
def test_a_full_disk_ends_the_run_after_some_saves(
  mesh, tmp_path, said, monkeypatch
):
  tree, free = state(mesh), [10**9]
  full(monkeypatch, free)
  options = store.Options(failures=3, keep=1)
  with store.Store(tmp_path, options, say=said.append) as s:
    s.save(0, tree, AXES, {})
    s.wait()
    free[0] = 1000
    for step in (1, 2):
      s.save(step, tree, AXES, {})
    assert [line.count('Training continues') for line in said] == [1, 1]
    assert 'needs 10816 free bytes' in said[0] and 'has 1000' in said[0]
    free[0] = 10**9
    s.save(3, tree, AXES, {})
    s.wait()
    assert s.steps() == [3]
    free[0] = 1000
    for step in (4, 5):  # counted from the last that was written
      s.save(step, tree, AXES, {})
    with pytest.raises(errors.CrashError, match='has 1000.* 3 in a row failed'):
      s.save(6, tree, AXES, {})
    assert s.steps() == [3]


def test_a_last_save_without_room_is_an_error(
  mesh, tmp_path, said, monkeypatch
):
  """However many may fail: the run would end without its last state."""
  tree, free = state(mesh), [10**9]
  full(monkeypatch, free)
  options = store.Options(failures=9)
  with pytest.raises(errors.CrashError, match='needs 10816 .* has 1000'):
    with store.Store(tmp_path, options, say=said.append) as s:
      s.save(0, tree, AXES, {})
      s.wait()
      free[0] = 1000
      s.save(1, tree, AXES, {})
      assert 'Training continues (1 of 9)' in said[-1]
  assert [p.name for p in tmp_path.iterdir()] == ['0']


@pytest.mark.parametrize('again', [False, True])
def test_a_save_without_room_behind_one_that_is_written(
  mesh, tmp_path, monkeypatch, again
):
  """It is still the last, unless it is begun again: that waits, and is none."""
  gate, force, free = threading.Event(), folders.force, [10**9]
  full(monkeypatch, free)
  slow = lambda path: gate.wait(60) and force(path)
  monkeypatch.setattr(folders, 'force', slow)
  no_room = pytest.raises(errors.CrashError, match='needs 21632 .* has 1000')
  with contextlib.nullcontext() if again else no_room:
    with store.Store(tmp_path, store.Options(failures=9)) as s:
      for step, free[0] in ((0, 10**9), (1, 1000)):
        s.save(step, state(mesh), AXES, {})
      free[0] = 10**9
      threading.Timer(0.3, gate.set).start()
      if again:
        s.save(1, state(mesh), AXES, {})
  assert store.Store(tmp_path).steps() == [0, 1][: 1 + again]


@pytest.mark.fault(16)
def test_the_disk_is_looked_at_for_all_that_is_kept(
  mesh, tmp_path, monkeypatch
):
  size, tree = 4 * (64 * 32 + 32), state(mesh)
  free = [4 * size]
  full(monkeypatch, free)
  with store.Store(tmp_path, store.Options(keep=3)) as s:
    with pytest.raises(errors.UserError, match='of 4 to keep needs 35776'):
      s.preflight(tree, saves=9)
    s.preflight(tree, saves=1)  # a run of one save keeps one
    s.preflight(tree)
    s.save(0, tree, AXES, {})
    s.wait()
    s.preflight(tree, saves=9)  # one of them is there


def test_an_older_step_makes_room(mesh, tmp_path, said, monkeypatch):
  """Where the disk would not hold one more, the oldest goes first."""
  tree = state(mesh)
  with store.Store(tmp_path, store.Options(keep=2), say=said.append) as s:
    for step in range(2):
      s.save(step, tree, AXES, {})
      s.wait()
    usage = shutil.disk_usage('/')
    few = lambda path: usage._replace(free=10**9 if len(s.steps()) < 2 else 9)
    monkeypatch.setattr(shutil, 'disk_usage', few)
    s.save(2, tree, AXES, {})
    s.wait()
    assert s.steps() == [1, 2]


@pytest.mark.invariant(6)
def test_files_are_on_the_disk_before_the_rename_and_before_pruning(
  mesh, tmp_path, monkeypatch
):
  events, fsync = [], os.fsync

  def synced(handle):
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{handle}'))
    events.append((path, (tmp_path / '1').exists(), (tmp_path / '0').exists()))
    return fsync(handle)

  with store.Store(tmp_path, store.Options(keep=1)) as s:
    s.save(0, state(mesh), AXES, {})
    s.wait()
    monkeypatch.setattr(os, 'fsync', synced)
    s.save(1, state(mesh), AXES, {})
    s.wait()
  *inside, last = events
  assert last == (tmp_path, True, True)  # the name, before step 0 is deleted
  assert not (tmp_path / '0').exists()
  assert not any(renamed for _, renamed, _ in inside)
  temporary = next(p for p, *_ in inside if '.orbax' in p.name)
  forced = {os.path.relpath(p, temporary) for p, *_ in inside}
  files = {str(p.relative_to(tmp_path / '1')) for p in tmp_path.rglob('1/**/*')}
  # Orbax writes this one after the rename; nothing reads it.
  assert files - forced == {'commit_success.txt'}


@pytest.mark.parametrize(
  'steps, keep, suspect, verified, gone',
  [
    ([1, 2, 3, 4], 2, [], [], [1, 2]),
    ([1, 2, 3, 4], 2, [], [1], [2]),
    ([1, 2, 3], 1, [3], [], [1]),  # 2 is before it
    ([1, 2, 3, 4], 1, [3, 4], [], [1]),
    ([1, 2, 3, 4, 5], 1, [3, 4, 5], [], [1, 4]),
    ([2, 3, 5, 6], 2, [3], [], [2, 3]),  # two good ones followed
    ([2, 3, 5], 2, [3], [], []),
    ([10, 20, 30], 3, [10, 20], [], [20]),  # one good one followed
    ([1, 2, 3, 4, 5], 2, [2, 3], [], [1, 2, 3]),  # two did
    ([1, 2, 3, 4], 2, [1, 2], [], [1, 2]),
    ([1, 2, 3, 4], 3, [1, 2], [], [2]),
    ([1], 1, [1], [], []),
    ([1, 2], 1, [1, 2], [], []),
    ([], 3, [], [], []),
  ],
)
def test_what_may_be_deleted(steps, keep, suspect, verified, gone):
  assert retention.expendable(steps, keep, suspect, verified) == gone


def test_steps_of_a_streak_push_out_no_good_one(mesh, tmp_path):
  with store.Store(tmp_path, store.Options(keep=2)) as s:
    for step in range(6):
      wild = step > 2
      s.save(step, state(mesh), AXES, {'suspect': True} if wild else {})
    s.wait()
    assert s.steps() == [1, 2, 3, 5]
  with store.Store(tmp_path / 'other', store.Options(keep=2)) as s:
    for step in range(6):  # the knock-out: nobody says that they are suspect
      s.save(step, state(mesh), AXES, {})
    s.wait()
    assert s.steps() == [4, 5]


@pytest.mark.invariant(8)
def test_committed_steps_are_told(mesh, tmp_path):
  told = []
  options = store.Options(keep=1, committed=told.append)
  with store.Store(tmp_path, options) as s:
    for step in (3, 7):
      s.save(step, state(mesh), AXES, {})
      s.wait()
      assert told[-1] == step and s.steps() == [step]
    with pytest.raises(errors.IntegrityError):
      s.save(9, jax.tree.map(lambda x: x * jnp.nan, state(mesh)), AXES, {})
    s.wait()
  assert told == [3, 7]


def _decays(folder, force=folders.force):
  """folders.force of a disk that loses a bit."""
  force(folder)
  path = max(folder.rglob('d/*'), key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def test_a_damaged_step_is_none_of_those_to_keep(mesh, tmp_path, monkeypatch):
  """Commits 2 and 4, of steps 1 and 3, are read back; 3 is damaged."""
  options = store.Options(keep=2, failures=9, verify_every=2)
  with store.Store(tmp_path, options, say=lambda line: None) as s:
    for step in range(5):
      with monkeypatch.context() as patch:
        if step == 3:
          patch.setattr(folders, 'force', _decays)
        s.save(step, state(mesh, step), AXES, {})
        while s._writer.writes(step):
          s.check()
  left = sorted(int(p.name) for p in tmp_path.iterdir())
  assert left == [1, 2, 3, 4]  # 1: verified; 3: not deleted, not counted


@pytest.mark.parametrize('every, steps', [(1, [1]), (2, [1, 3]), (0, [3])])
@pytest.mark.invariant(6)
def test_what_does_not_read_back_pushes_out_no_good_one(
  mesh, tmp_path, said, monkeypatch, every, steps
):
  """From step 2 on the disk loses a bit of all that is forced to it."""
  options = store.Options(keep=1, failures=9, verify_every=every)
  ends = pytest.raises(errors.CrashError, match='3 was .*does not read back')
  with (
    ends if every else contextlib.nullcontext(),
    store.Store(tmp_path, options, say=said.append) as s,
  ):
    s.save(0, state(mesh), AXES, {})
    s.save(1, state(mesh), AXES, {})
    s.wait()
    monkeypatch.setattr(folders, 'force', _decays)
    for step in (2, 3):
      s.save(step, state(mesh, step), AXES, {})
      while s._writer.writes(step):
        s.check()
  left = sorted(int(p.name) for p in tmp_path.iterdir())
  # Damaged ones that were read are kept apart from what counts.
  assert set(steps) <= set(left) and (1 in left) == (every > 0)
  assert any('does not read back' in line for line in said) == (every > 0)
  if every:
    with store.Store(tmp_path, read_only=True) as s:
      assert s.restore_latest_good(state(mesh))[0] == 1
