"""What a snapshot copies: of a shard's replicas one, and what is written is the
same. (Beside training: test_writer.py; of two processes: test_kills.py.)"""

import jax
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.checkpoint import store
from paraxis.sharding.checkpoint import stored

# What `placed` makes: of each leaf its shape and specification.
LEAVES = {
  'count': ((), ()),
  'rows': ((32, 128), ('data', None)),
  'rows_and_columns': ((32, 128), ('fsdp', 'data')),
  'together': ((32, 128), (('data', 'fsdp'),)),
  'weight': ((32, 128), (None, 'fsdp')),
  'whole': ((32, 128), (None, None)),
  'wide': ((16, 8), ('fsdp',)),
}
AXES = {path: (None,) * len(shape) for path, (shape, _) in LEAVES.items()}
MESHES = ('data=8', 'data=4,fsdp=2', 'data=2,fsdp=4')


def placed(text):
  """{path: array on a mesh}, one of 8-byte numbers."""
  mesh, rng = mesh_lib.make(text), np.random.default_rng(0)
  tree = {}
  with jax.enable_x64(True):
    for path, (shape, spec) in LEAVES.items():
      sharding = jax.NamedSharding(mesh, jax.P(*spec))
      dtype = 'f8' if path == 'wide' else 'f4'
      x = np.asarray(rng.normal(size=shape), dtype)
      tree[path] = jax.device_put(x, sharding)
  return tree


def every_replica(tree):
  """Copies of all shards, as they are laid out."""
  there = lambda x: x.sharding.with_memory_kind(snapshot.HOST)
  return {path: jax.device_put(x, there(x)) for path, x in tree.items()}


def copied(copies):
  """Bytes of the shards in this process."""
  return sum(
    s.data.nbytes for x in copies.values() for s in x.addressable_shards
  )


@pytest.mark.parametrize('text', MESHES)
def test_one_replica_of_each_shard_is_copied(text):
  tree = placed(text)
  state = sum(x.nbytes for x in tree.values())
  copies = snapshot.to_host(tree)
  assert list(copies) == list(tree)
  assert copied(copies) == snapshot.host_bytes(tree) == state
  for path, x in tree.items():
    of = {s.device: s for s in x.addressable_shards}
    y = copies[path]
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert len({str(s.index) for s in y.addressable_shards}) == len(
      y.sharding.device_set
    )
    for s in y.addressable_shards:
      assert s.replica_id == 0 and s.index == of[s.device].index
      assert np.array_equal(s.data, of[s.device].data)
  shapes = {
    path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    for path, x in tree.items()
  }
  assert snapshot.host_bytes(shapes) == state
  assert copied(every_replica(tree)) > 2 * state  # negative


def test_replicas_take_turns():
  """The leaves of a model that all devices hold leave from all of them."""
  mesh = mesh_lib.make('data=8')
  whole = jax.NamedSharding(mesh, jax.P())
  tree = {str(i): jax.device_put(np.ones(4, 'f4'), whole) for i in range(9)}
  devices = [x.devices() for x in snapshot.to_host(tree).values()]
  assert devices == [{mesh.devices.flat[i % 8]} for i in range(9)]


def test_arrays_without_a_mesh():
  tree = {'x': jax.device_put(np.ones(4, 'f4'), jax.devices()[3])}
  copies = snapshot.to_host(tree)
  assert copies['x'].devices() == {jax.devices()[3]}
  assert copied(copies) == snapshot.host_bytes(tree) == 16


@pytest.mark.parametrize('chunk_bytes', [0, 4096])
@pytest.mark.parametrize('text', MESHES[:2])
def test_the_checkpoint_is_that_of_all_replicas(
  tmp_path, monkeypatch, text, chunk_bytes
):
  """Manifest and leaves, bit for bit, on another layout too."""
  tree, other = placed(text), placed(MESHES[2])
  found = {}
  for name in ('one', 'all'):
    if name == 'all':
      monkeypatch.setattr(snapshot, 'to_host', every_replica)
    options = store.Options(chunk_bytes=chunk_bytes)
    with store.Store(tmp_path / name, options) as s:
      s.save(3, tree, AXES, {})
    with store.Store(tmp_path / name, read_only=True) as s:
      restored = [s.restore(3, like)[0] for like in (tree, other)]
      found[name] = (
        s.read_manifest(3),
        [
          {path: np.asarray(x).tobytes() for path, x in leaves.items()}
          for leaves in restored
        ],
      )
    assert not stored.Step(tmp_path / name / '3').faults()
  assert found['one'] == found['all']
  assert found['one'][1][0] == {
    path: np.asarray(x).tobytes() for path, x in tree.items()
  }
