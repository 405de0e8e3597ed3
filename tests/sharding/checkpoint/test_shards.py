"""Shards are read as they were written, in chunks of any size, each once."""

import asyncio
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import chunks
from paraxis.sharding.checkpoint import shards
from paraxis.sharding.checkpoint import store
from paraxis.sharding.checkpoint import stored

AXES = {'up': ('layers', None, None), 'embedding': (None, None), 'step': ()}


def host():
  rng = np.random.default_rng(0)
  return {
    'up': rng.standard_normal((4, 48, 64)).astype(np.float32),
    'embedding': rng.standard_normal((90, 24)).astype(jnp.bfloat16),
    'step': np.asarray(7, np.int32),
  }


def placed(cut):
  """The leaves; cut: three mesh axes or None, of the leaf of three axes."""
  mesh = jax.make_mesh((2, 4), ('data', 'tensor'))
  specs = {
    'up': jax.P(*cut), 'embedding': jax.P(None, cut[2]), 'step': jax.P()
  }  # fmt: skip
  return {
    path: jax.device_put(x, jax.NamedSharding(mesh, specs[path]))
    for path, x in host().items()
  }


def saved(folder, tree, chunk_bytes):
  options = store.Options(chunk_bytes=chunk_bytes)
  with store.Store(folder, options) as s:
    s.preflight(tree)
    s.save(3, tree, AXES, {})
  return stored.Step(folder / '3')


def same(tree):
  return all(
    np.asarray(tree[path]).tobytes() == x.tobytes()
    and all(
      np.asarray(s.data).tobytes() == x[s.index].tobytes()
      for s in tree[path].addressable_shards
    )
    for path, x in host().items()
  )


CUTS = [
  (None, None, None), ('data', 'tensor', None), (None, None, 'tensor'),
  (None, ('data', 'tensor'), None), (None, 'tensor', ('data',)),
]  # fmt: skip


@pytest.mark.parametrize('chunk_bytes', [0, 4096])
def test_from_any_cut_to_any_cut(tmp_path, chunk_bytes):
  trees = [placed(cut) for cut in CUTS]
  for i, tree in enumerate(trees):
    folder = tmp_path / str(i)
    step = saved(folder, tree, chunk_bytes)
    assert not step.faults()
    sizes = [
      int(np.prod(step._open(path)[1])) * x.itemsize
      for path, x in host().items()
    ]
    assert max(sizes) <= 4096 if chunk_bytes else max(sizes) > 4096
    with store.Store(folder, read_only=True) as s:
      for like in trees:
        assert same(s.restore(3, like)[0])


def test_pieces_of_chunks_that_several_shards_touch(tmp_path, monkeypatch):
  """However small the pieces are; and one that is left out is found."""
  folder = tmp_path / 'a'
  saved(folder, placed(CUTS[1]), 0)
  monkeypatch.setattr(shards, 'PIECE', 1)
  like = placed((None, 'tensor', 'data'))
  with store.Store(folder, read_only=True) as s:
    assert same(s.restore(3, like)[0])
    real = chunks.cells
    monkeypatch.setattr(
      chunks, 'cells', lambda *given: itertools.islice(real(*given), 1, None)
    )
    with pytest.raises(errors.IntegrityError, match='fingerprint'):
      s.restore(3, like)


@pytest.mark.skipif(
  not pathlib.Path('/proc/self/io').exists(), reason='Linux counts bytes'
)
@pytest.mark.parametrize('pool', [True, False])
def test_chunks_that_many_shards_touch_are_read_once(
  tmp_path, monkeypatch, pool
):
  """16 MiB in rows, read in columns, which take them one after the other;
  without a pool they are read again."""
  x = np.random.default_rng(0).standard_normal((512, 8192)).astype(np.float32)
  mesh = jax.make_mesh((8,), ('data',))
  put = lambda *axes: {
    'up': jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
  }
  with store.Store(tmp_path) as s:
    s.save(3, put('data'), {'up': (None, None)}, {})
  monkeypatch.setattr(shards, '_fill', late)
  if not pool:
    empty = {shards.POOL: dict(total_bytes_limit=0)}
    monkeypatch.setattr(shards, '_pool', lambda rest: ts.Context(empty, rest))
  with store.Store(tmp_path, read_only=True) as s:
    before = read_bytes()
    found = s.restore(3, put(None, 'data'))[0]['up']
    read = (read_bytes() - before) / x.nbytes
  assert np.array_equal(found, x)
  assert (read < 1.05) == pool, read


def read_bytes():
  """That this process has read from files."""
  text = pathlib.Path('/proc/self/io').read_text(encoding='utf-8')
  return int(text.split()[1])


async def late(stored, target, box, real=shards._fill):
  """shards._fill, of one shard after the other."""
  await asyncio.sleep(0.02 * (target.box[1][0] // 1024))
  await real(stored, target, box)


def test_arrays_of_another_kind_are_damage(tmp_path):
  """Those that the files hold, whatever the manifest says."""
  step = saved(tmp_path / 'a', placed(CUTS[0]), 0)
  other = {p: x.astype(jnp.int32) for p, x in placed(CUTS[0]).items()}
  saved(tmp_path / 'b', other, 0)
  state = tmp_path / 'b' / '3' / 'state'
  state.rename(tmp_path / 'whole')
  (step.folder / 'state').rename(state)
  with (
    store.Store(tmp_path / 'b', read_only=True) as s,
    pytest.raises(errors.IntegrityError, match=r'it holds .*was saved'),
  ):
    s.restore(3, other)


def test_no_read_is_abandoned(tmp_path, monkeypatch):
  """One that fails is reported when all the others have ended."""
  saved(tmp_path / 'a', placed(CUTS[0]), 0)
  ended = []

  async def slow(info, *_):
    if info.name == 'embedding':
      raise ValueError('lost')
    await asyncio.sleep(0.05)
    ended.append(info.name)

  monkeypatch.setattr(shards, '_read_array', slow)
  with store.Store(tmp_path / 'a', read_only=True) as s:
    with pytest.raises(errors.IntegrityError, match='do not read: lost'):
      s.restore(3, placed(CUTS[0]))
    assert sorted(ended) == ['step', 'up']
    monkeypatch.setattr(shards, '_all', lambda reads: asyncio.gather(*reads))
    with pytest.raises(errors.IntegrityError, match='do not read: lost'):
      s.restore(3, placed(CUTS[0]))
    assert len(ended) == 2


def test_leaves_of_more_than_a_group(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, 'IN_FLIGHT', 5000)
  tree = placed(CUTS[1])
  values = list(tree.values())
  groups = list(shards._groups(values, range(3)))
  assert [len(g) for g in groups] == [1, 2]
  assert not saved(tmp_path / 'a', tree, 4096).faults()


def test_refused_in_one_line(tmp_path):
  for most in (1, 4095, -1):
    with pytest.raises(errors.UserError, match=f'bytes={most} is below 4096'):
      store.Store(tmp_path / 'a', store.Options(chunk_bytes=most))
  assert not (tmp_path / 'a').exists()
