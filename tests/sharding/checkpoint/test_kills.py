"""Kills while a checkpoint is written or read, of one process and of two."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import support

from paraxis.sharding.checkpoint import store

CHILD = """
import os, sys, threading
import jax, jax.numpy as jnp
from paraxis.sharding.checkpoint import store
make = jax.jit(lambda k: jax.random.normal(jax.random.key(k), (2048, 2048)))
s = store.Store(sys.argv[1])
s.save(1, {'w': make(1)}, {'w': ('embed', 'mlp')}, {})
s.wait()
x = make(2)
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), 9)).start()
s.save(2, {'w': x}, {'w': ('embed', 'mlp')}, {})
os.kill(os.getpid(), 9)
"""


@pytest.mark.fault(3)
def test_kill_during_an_asynchronous_save(tmp_path, said):
  """Killed right after `save` returned: step 1 is whole."""
  code = subprocess.run(
    [sys.executable, '-c', CHILD, str(tmp_path), '5'],
    env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    capture_output=True,
  )
  assert code.returncode == -signal.SIGKILL, code.stderr[-500:]
  unfinished = list(pathlib.Path(tmp_path).glob('2.orbax-checkpoint-tmp*'))
  with store.Store(tmp_path, say=said.append) as s:
    assert len(said) == len(unfinished) and not list(tmp_path.glob('2.*'))
    like = {'w': jnp.zeros((2048, 2048))}
    step, tree, _ = s.restore_latest_good(like)
    assert step == (2 if (tmp_path / '2').exists() else 1)
    wanted = jax.random.normal(jax.random.key(step), (2048, 2048))
    assert bool(jnp.all(tree['w'] == wanted))
    s.save(step + 1, tree, {'w': ('embed', 'mlp')}, {})


RESTORES = """
import os, sys
import jax.numpy as jnp
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import store
read = saved_arrays.read

def killed(folder, wanted):
  read(folder, wanted)
  os.kill(os.getpid(), 9)

saved_arrays.read = killed
with store.Store(sys.argv[1]) as s:
  s.restore_latest_good({'w': jnp.zeros((64, 64))})
"""


@pytest.mark.fault(5)
def test_kill_during_a_restore(tmp_path, said):
  w = jax.random.normal(jax.random.key(0), (64, 64))
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    s.save(1, {'w': w}, {'w': ('embed', 'mlp')}, {})
  files = lambda: {
    p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()
  }
  before = files()
  code = subprocess.run(
    [sys.executable, '-c', RESTORES, str(tmp_path / 'ck')],
    env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    capture_output=True,
  )
  assert code.returncode == -signal.SIGKILL, code.stderr[-500:]
  assert files() == before
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    step, tree, _ = s.restore_latest_good({'w': w})
  assert step == 1 and bool(jnp.all(tree['w'] == w)) and not said


GANG = """
import os, sys
from paraxis.configs.base import command_line
command_line.prepare_devices(2)
from paraxis.train.run import hosts
folder, address, me = sys.argv[1], sys.argv[2], int(sys.argv[3])
hosts.connect(address, 2, me)
import jax, numpy as np
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import store
mesh = mesh_lib.make(dict(data=4), jax.devices())
sharding = jax.NamedSharding(mesh, jax.P('data'))
x = np.arange(64, dtype=np.float32)
w = jax.make_array_from_callback((64,), sharding, lambda i: x[i])
s = store.Store(folder, say=lambda line: None)
s.save(1, {'w': w}, {'w': ('embed',)}, {})
s.wait()
"""


KILLED = """
item = saved_arrays.item

def killed(tree):
  if me:
    os.kill(os.getpid(), 9)
  return item(tree)

saved_arrays.item = killed
s.save(2, {'w': w}, {'w': ('embed',)}, {})
s.wait()
"""


# A program in the writing thread would wait for one that waits for it.
BESIDE = """
import threading
from jax.experimental import multihost_utils

def in_thread(*args, **kwargs):
  raise RuntimeError('a program in ' + threading.current_thread().name)

multihost_utils.sync_global_devices = in_thread
multihost_utils.process_allgather = in_thread
total = jax.jit(lambda w: w * w.sum(), out_shardings=sharding)
for step in range(2, 8):
  s.begin(step, {'w': w}, {'w': ('embed',)}, {})
  found = total(w)
  s.barrier()
  jax.block_until_ready(found)
s.close()
assert me or s.steps() == [5, 6, 7]  # process 0 deletes
"""


@pytest.mark.invariant(4)
def test_two_processes_save_beside_their_collectives(tmp_path, said):
  ended = two_processes(GANG + BESIDE, tmp_path / 'ck')
  assert [code for code, _ in ended] == [0, 0], ended
  like = {'w': jnp.zeros(64)}
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    assert bool(jnp.all(s.restore(7, like)[0]['w'] == jnp.arange(64.0)))


def two_processes(code, folder, *more):
  """[(exit code, stderr)] of both."""
  address = support.address()
  environment = dict(
    os.environ,
    PYTHONPATH=os.pathsep.join(sys.path),
    PARAXIS_HEARTBEAT_SECONDS='3',
  )
  both = [
    subprocess.Popen(
      [sys.executable, '-c', code, str(folder), address, p, *more],
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )
    for p in '01'
  ]
  said = [process.communicate(timeout=150)[1] for process in both]
  return [(p.returncode, s) for p, s in zip(both, said, strict=True)]


@pytest.mark.fault(4)
def test_kill_of_one_of_two_processes_in_a_save(tmp_path, said):
  first, second = two_processes(GANG + KILLED, tmp_path / 'ck')
  assert second[0] == -signal.SIGKILL, second[1][-2000:]
  assert first[0] not in (0, None), first[1][-2000:]
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    like = {'w': jnp.zeros(64)}
    step, tree, _ = s.restore_latest_good(like)
    assert step == 1 and bool(jnp.all(tree['w'] == jnp.arange(64.0)))
    assert s.steps() == [1] and not list(s.directory.glob('2*'))


# Of `a` process 1 writes nothing, of `b` process 0.
NOTHING = """
from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import snapshot
s.close()
mesh = mesh_lib.make(dict(data=2, fsdp=2), jax.devices())
specs = dict(a=jax.P(), b=jax.P('fsdp'), c=jax.P('data'))
tree = {
  path: jax.make_array_from_callback(
    (64,), jax.NamedSharding(mesh, spec), lambda i: x[i]
  )
  for path, spec in specs.items()
}
copies = snapshot.to_host(tree)
sizes = {
  path: sum(s.data.nbytes for s in y.addressable_shards)
  for path, y in copies.items()
}
assert sizes == [dict(a=256, b=0, c=128), dict(a=0, b=256, c=128)][me], sizes
assert snapshot.host_bytes(tree) == 384
try:  # process 1 copies nothing of it, and says the same
  snapshot.check(100, {'a': tree['a']})
  raise AssertionError
except errors.UserError as e:
  assert '256 bytes' in str(e), e
snapshot.machine_bytes = lambda: 600
try:  # both copies are in the memory of one machine
  snapshot.check(0, tree)
  raise AssertionError
except errors.UserError as e:
  assert 'takes 768 bytes' in str(e) and 'has 600' in str(e), e
snapshot._machine = lambda: str(me)
snapshot.check(0, tree)
chunk = int(sys.argv[4])
s = store.Store(folder, store.Options(chunk_bytes=chunk), say=print)
for step in (2, 3):
  s.save(step, tree, dict.fromkeys('abc', ('embed',)), {})
found, _ = s.restore(3, tree)
for path, y in found.items():
  for shard in y.addressable_shards:
    assert np.array_equal(shard.data, x[shard.index])
s.close()
assert s.steps() == [1, 2, 3], s.steps()
"""


@pytest.mark.parametrize('chunk_bytes', [0, 4096])
def test_processes_that_write_nothing_of_a_leaf(tmp_path, said, chunk_bytes):
  ended = two_processes(GANG + NOTHING, tmp_path / 'ck', str(chunk_bytes))
  assert [code for code, _ in ended] == [0, 0], [x[-2000:] for _, x in ended]
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    tree = s.restore(2, dict.fromkeys('abc', jnp.zeros(64)))[0]
  assert all(bool(jnp.all(y == jnp.arange(64.0))) for y in tree.values())


# A file may have no byte on the disk of process `bad`: a save fails in the
# middle; the next one, with room, is written.
FULL = """
import resource, signal
sys.dont_write_bytecode = True  # a module's would be cut short and stay
from paraxis.sharding.checkpoint import folders
bad, place = int(sys.argv[4]), sys.argv[5]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
s.close()
said = []
options = store.Options(failures=3)
s = store.Store(folder, options, say=said.append)
force = folders.force

def full(folder):
  raise OSError(28, 'No space left on device')

if place == 'name':
  folders.force = full
elif me == bad:
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
s.begin(2, {'w': w}, {'w': ('embed',)}, {})
s.barrier()
while s._writer.writes(2):
  s.check()
if me == bad:
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
folders.force = force
s.save(3, {'w': w}, {'w': ('embed',)}, {})
s.close()
assert me or any('2 was not written' in line for line in said), said
other = any('another process could not' in line for line in said)
assert me or other == (bad == 1), said
assert s.steps() == [1, 3], s.steps()
"""


@pytest.mark.fault(15)
@pytest.mark.parametrize(
  'bad, place', [(0, 'files'), (1, 'files'), (0, 'name')]
)
def test_a_disk_that_is_full_for_one_of_two(tmp_path, said, bad, place):
  """The other one does not wait for it in vain, and both save again."""
  ended = two_processes(GANG + FULL, tmp_path / 'ck', str(bad), place)
  assert [code for code, _ in ended] == [0, 0], [x[-2000:] for _, x in ended]
  assert 'Traceback' not in ended[0][1] + ended[1][1]
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    tree = s.restore(3, {'w': jnp.zeros(64)})[0]
    assert bool(jnp.all(tree['w'] == jnp.arange(64.0)))
