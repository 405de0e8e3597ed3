"""Processes of a claim: how they end, and which chunks they should read."""

import jax
import numpy as np
import pytest

from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.train.claims import gang


def test_one_that_fails_is_told():
  with pytest.raises(RuntimeError, match="exit .*KeyError: 'nothing'"):
    gang.together(1, 1, what='nothing')


def test_bytes_that_are_read_are_counted(tmp_path):
  path = tmp_path / 'file'
  path.write_bytes(bytes(10**6))
  before = gang.read_so_far()
  path.read_bytes()
  assert 10**6 <= gang.read_so_far() - before < 2 * 10**6


@pytest.mark.parametrize(
  'cut, shards, chunks',
  [
    ('fsdp,', [0], 1),
    ('fsdp,', [0, 2, 4, 6], 4),
    ('fsdp,', [0, 1], 1),  # a replica
    (',fsdp', [0], 4),
    ('tensor,', [0], 2),
    (',', [5], 4),
  ],
)
def test_chunks_that_shards_touch(tmp_path, cut, shards, chunks):
  """An array of 8 x 16 in chunks of two rows."""
  mesh = mesh_lib.make('tensor=2,fsdp=4', jax.devices()[:8])
  on = lambda text: jax.NamedSharding(mesh, gang.spec_of(text))
  x = jax.device_put(np.ones((8, 16), np.float32), on('fsdp,'))
  with store_lib.Store(tmp_path) as store:
    store.save(gang.STEP, {'a/b': x}, {'a/b': (None, None)}, {})
  held = list(on(cut).devices_indices_map(x.shape).items())
  found = gang._chunks(tmp_path, 'a/b', dict(held[i] for i in shards))
  assert found == chunks * 2 * 16 * 4


def test_shards_are_compared_with_what_was_saved():
  mesh = mesh_lib.make('fsdp=8', jax.devices()[:8])
  x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
  tree = {
    'a': jax.device_put(x, jax.NamedSharding(mesh, gang.spec_of('fsdp,')))
  }
  assert gang._equal_shards(tree, {'a': x}) == 1
  other = x.copy()
  other[7, 1] = -1
  assert gang._equal_shards(tree, {'a': other}) == 0
