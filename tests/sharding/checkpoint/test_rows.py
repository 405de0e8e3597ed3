"""Leaves that are read while they are saved: the same checkpoint, in blocks."""

import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import store

BLOCK = 4 * 32 * 32  # bytes of one of `counted`


def arrays():
  """{path: array} of every kind: stacked, flat, empty, a scalar."""
  rng = np.random.default_rng(0)
  return {
    'layers/up': rng.normal(size=(6, 5, 7)).astype('f4'),
    'layers/scale': rng.normal(size=(6, 5)).astype(ml_dtypes.bfloat16),
    'embedding': rng.normal(size=(9, 4)).astype('f4'),
    'load': np.arange(5, dtype='i4'),
    'step': np.array(3, 'i4'),
    'none': np.zeros((0, 3), 'f4'),
  }


def in_blocks(tree, **sizes):
  """{path: rows.Rows}; sizes: rows of a block of some, of others all."""

  def leaf(path, x):
    size = sizes.get(path.split('/')[-1], 0)
    cuts = range(0, len(x), size) if size else ()
    parts = [x[a : a + size] for a in cuts] or [x]
    return rows.Rows(x.shape, x.dtype, lambda: iter(parts), size)

  return {path: leaf(path, x) for path, x in tree.items()}


def saved(folder, tree, step=0, said=None):
  """The manifest of a step with the tree."""
  axes = {path: (None,) * x.ndim for path, x in tree.items()}
  say = (lambda line: None) if said is None else said.append
  with store.Store(folder, say=say) as opened:
    opened.save(step, tree, axes, dict(of='a test'))
    opened.wait()
    return opened.read_manifest(step)


def like(tree):
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {
    path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    for path, x in tree.items()
  }


def test_the_same_checkpoint(tmp_path):
  """Manifest and every bit; beside an array, too; several sizes of blocks."""
  tree = arrays()
  whole = {path: jax.numpy.asarray(x) for path, x in tree.items()}
  wanted = saved(tmp_path / 'arrays', whole)
  for i, sizes in enumerate((dict(up=1, scale=1), dict(up=4, embedding=9))):
    leaves = in_blocks(tree, **sizes)
    if i:
      leaves['layers/scale'] = whole['layers/scale']
    assert saved(tmp_path / f'rows{i}', leaves) == wanted
    with store.Store(tmp_path / f'rows{i}', read_only=True) as opened:
      found, meta = opened.restore(0, like(tree))
    assert meta == dict(of='a test')
    for path, x in tree.items():
      assert np.asarray(found[path]).tobytes() == x.tobytes(), path


def test_a_block_at_another_row_is_another_leaf():
  x = arrays()['layers/up']
  swapped = np.concatenate([x[1:2], x[:1], x[2:]])
  both = in_blocks(dict(up=x), up=1) | in_blocks(dict(down=swapped), down=1)
  prints = fingerprint.fingerprint(both)
  assert prints['up'] == fingerprint.fingerprint(dict(up=x))['up']
  assert prints['up'] != prints['down']


def test_what_is_not_finite_is_not_written(tmp_path):
  tree = arrays()
  tree['layers/up'][4, 2, 2] = np.inf
  with pytest.raises(errors.IntegrityError, match='not finite in layers/up'):
    saved(tmp_path, in_blocks(tree, up=1))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'second, words',
  [
    (lambda x: iter([x[:2]]), '2 rows of a leaf'),
    (lambda x: iter([x.astype('f8')]), 'float64'),
    (lambda x: iter([x[:, :4]]), 'a block of'),
  ],
)
def test_files_that_change_while_they_are_read(tmp_path, second, words):
  """A block that is missing or of another shape: the step is not there."""
  tree, calls = arrays(), []
  saved(tmp_path, in_blocks(tree), step=1)
  x = tree['layers/up']

  def blocks():
    calls.append(0)
    return iter([x]) if calls[1:] == [] else second(x)

  changed = in_blocks(tree) | {'layers/up': rows.Rows(x.shape, 'f4', blocks)}
  with pytest.raises(RuntimeError, match=f'was not written: .*{words}'):
    saved(tmp_path, changed, step=2)
  names = lambda: [p.name for p in tmp_path.iterdir()]
  assert [name for name in names() if name.isdigit()] == ['1']
  # A folder that was not committed may stay: the next writer removes it.
  with store.Store(tmp_path):
    assert names() == ['1']


def test_other_numbers_the_second_time_are_seen(tmp_path):
  tree, calls = arrays(), []

  def blocks():
    calls.append(0)
    return iter([tree['embedding'] + len(calls)])

  leaf = rows.Rows((9, 4), 'f4', blocks)
  saved(tmp_path, {'embedding': leaf})
  with store.Store(tmp_path, read_only=True) as opened:
    with pytest.raises(errors.IntegrityError, match='fingerprint mismatch'):
      opened.restore(0, like({'embedding': leaf}))


def counted(most, count=64):
  """A leaf of blocks; most[0]: how many were in memory at a time."""
  held = weakref.WeakSet()

  class Block(np.ndarray):
    pass

  def blocks():
    for i in range(count):
      x = np.full((1, 32, 32), i, 'f4').view(Block)
      held.add(Token(x))
      most[0] = max(most[0], len(held))
      yield x
      del x

  class Token:
    """Lives as long as its block."""

    def __init__(self, x):
      x.token = self

  return rows.Rows((count, 32, 32), 'f4', blocks, 1)


def test_few_blocks_are_in_memory(tmp_path, monkeypatch):
  """Those in flight; all of them where nothing bounds it."""
  monkeypatch.setattr(saved_arrays, 'IN_FLIGHT', 4 * BLOCK)
  most = [0]
  saved(tmp_path / 'a', {f'leaf{i}': counted(most) for i in range(3)})
  assert 0 < most[0] <= 8
  monkeypatch.setattr(saved_arrays, 'IN_FLIGHT', 2**30)
  keep, write = [], saved_arrays._write

  async def hoarding(out, leaf):
    keep.extend(x for _, x in leaf.blocks())
    await write(out, leaf)

  monkeypatch.setattr(saved_arrays, '_write', hoarding)
  saved(tmp_path / 'b', {'leaf': counted(most)})
  assert most[0] >= 64
