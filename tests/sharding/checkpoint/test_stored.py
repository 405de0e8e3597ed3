"""Steps read without their run: what verifies is right, damage has a name."""

import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import chunks
from paraxis.sharding.checkpoint import difference
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import reshard
from paraxis.sharding.checkpoint import rows
from paraxis.sharding.checkpoint import store
from paraxis.sharding.checkpoint import stored

META = {'config': '{}', 'cursor': {'step': 3}}


def host(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'params/layers/up': rng.standard_normal((4, 24, 32)).astype(np.float32),
    'params/embedding': rng.standard_normal((9, 6)).astype(jnp.bfloat16),
    'optimizer/none': np.zeros((0, 3), np.float32),
    'mask': rng.integers(0, 2, 7).astype(bool),
    'step': np.asarray(seed, np.int32),
  }


def save(directory, tree, step=3, meta=META):
  """Its leaves of three dimensions in chunks of columns."""
  mesh = jax.make_mesh((2,), ('x',), devices=jax.devices()[:2])
  spec = lambda x: jax.P(None, None, 'x') if x.ndim == 3 else jax.P()
  placed = {
    p: jax.device_put(x, jax.NamedSharding(mesh, spec(x)))
    for p, x in tree.items()
  }
  axes = {p: (None,) * x.ndim for p, x in tree.items()}
  with store.Store(directory) as opened:
    opened.save(step, placed, axes, meta)
  return directory / str(step)


@pytest.fixture
def folder(tmp_path):
  return save(tmp_path / 'ck', host())


def restored(folder):
  """(tree, meta) as the Store reads it; None: it says that it is damaged."""
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = {
    p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    for p, x in host().items()
  }
  with store.Store(folder.parent, read_only=True) as opened:
    try:
      return opened.restore(int(folder.name), like)
    except errors.IntegrityError:
      return None


def right(found):
  tree, meta = found
  return meta == META and all(
    np.asarray(tree[p]).tobytes() == x.tobytes() for p, x in host().items()
  )


def faults(folder):
  try:
    return stored.Step(folder).faults()
  except errors.IntegrityError as e:
    return [str(e)]


def flips(folder, count, seed=0):
  """Yields after each flip of one bit; half are drawn by file, not by byte."""
  rng = random.Random(seed)
  sizes = stored.contents(folder)
  names = sorted(n for n, size in sizes.items() if size)
  for i in range(count):
    weights = [1 if i % 2 else sizes[n] for n in names]
    path = folder / rng.choices(names, weights)[0]
    good = path.read_bytes()
    bad = bytearray(good)
    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    path.write_bytes(bad)
    yield path
    path.write_bytes(good)


@pytest.mark.fault(18)
def test_200_flips_anywhere_are_found_or_harmless(folder):
  assert not faults(folder) and right(restored(folder))
  found = 0
  for path in flips(folder, 200):
    damage, tree = faults(folder), restored(folder)
    found += bool(damage)
    # What verifies does restore; and what restores is right, verified or not.
    assert damage or tree is not None, path
    assert tree is None or right(tree), path
  assert not faults(folder)
  assert 40 < found < 200  # flips hit arrays, and bytes that carry nothing


def bytes_of(step, path):
  return b''.join(x.tobytes() for _, x in step.leaf(path).blocks())


def test_without_fingerprints_flips_go_unseen(folder, monkeypatch):
  """The knock-out of the test above."""
  step = stored.Step(folder)

  def blind(tree):
    for leaf in tree.values():
      list(leaf.blocks())
    return {p: step.leaves[p]['fingerprint'] for p in tree}, []

  monkeypatch.setattr(fingerprint, 'measure', blind)
  path = 'params/layers/up'
  unseen = [
    not faults(folder) and bytes_of(step, path) != host()[path].tobytes()
    for _ in flips(folder, 40)
  ]
  assert any(unseen)


def pipe(path):
  path.unlink()
  os.mkfifo(path)


def link(path):
  elsewhere = path.parents[2] / 'elsewhere'
  path.rename(elsewhere)
  path.symlink_to(elsewhere)


def without_mask(path):
  text = json.loads(path.read_text())
  del text['tree_metadata']["('mask',)"]
  path.write_text(json.dumps(text))


MANIFEST = 'manifest/metadata'
DAMAGE = [  # (file, what happens to it, what is said)
  (MANIFEST, pipe, 'manifest/metadata is a pipe'),
  ('state/_METADATA', pipe, 'state/_METADATA is a pipe'),
  ('state/manifest.ocdbt', link, 'state/manifest.ocdbt is a symbolic link'),
  ('state/manifest.ocdbt', os.unlink, 'leaf mask does not read'),
  (MANIFEST, lambda p: p.write_text('[' * 10**6), 'manifest does not read'),
  (MANIFEST, lambda p: p.write_text('{"a":' * 10**5), 'manifest does not read'),
  (MANIFEST, lambda p: p.write_text('null'), 'no paraxis-checkpoint manifest'),
  (MANIFEST, lambda p: os.truncate(p, 2**26 + 1), 'over 67108864'),
  ('state/_METADATA', lambda p: p.write_text('{'), 'state/_METADATA'),
  ('state/_METADATA', without_mask, 'and the manifest differ in mask'),
]


@pytest.mark.fault(19, 20)
@pytest.mark.parametrize('name, happens, said', DAMAGE)
def test_damage_is_named(folder, name, happens, said):
  happens(folder / name)
  found = faults(folder)
  assert any(said in line for line in found), found
  assert all('\n' not in line and len(line) < 500 for line in found)


def crafted(folder, change):
  """Another manifest, under a seal of its own."""
  file = folder / MANIFEST
  manifest = json.loads(file.read_text())
  change(manifest)
  manifest['sha256'] = manifest_lib._sha256(manifest)
  file.write_text(json.dumps(manifest))


@pytest.mark.fault(45)
def test_crafted_manifests(folder):
  good = (folder / MANIFEST).read_text()
  leaf = 'params/embedding'
  for change, said in [
    (dict(dtype='junk'), "of no type: 'junk'"),
    (dict(dtype='float32'), f'leaf {leaf} does not read: it is'),
    (dict(shape=[9, 7]), f'leaf {leaf} does not read: it is'),
    (dict(shape=[2**50, 6]), f'leaf {leaf} does not read: it is'),
    (dict(fingerprint='0' * 16), f'leaf {leaf} has fingerprint'),
  ]:
    (folder / MANIFEST).write_text(good)
    crafted(folder, lambda m, c=change: m['leaves'][leaf].update(c))
    found = faults(folder)
    assert len(found) == 1 and said in found[0], found
  crafted(folder, lambda m: m.update(version=2))
  with pytest.raises(errors.UserError, match='format 2.*reads up to 1'):
    stored.Step(folder)


def test_a_lost_chunk_of_zeros_is_damage(tmp_path):
  """TensorStore would fill it in, with what happens to be right."""
  import tensorstore as ts

  folder = save(tmp_path / 'ck', {'x': np.zeros((4, 4), np.float32)})
  base = dict(driver='file', path=f'{folder}/state/')
  files = ts.KvStore.open(dict(driver='ocdbt', base=base)).result()
  files.write(b'x/0.0', None).result()
  assert 'leaf x does not read' in faults(folder)[0]


def test_memory_is_that_of_a_block(tmp_path, monkeypatch):
  """Leaves are read in rows of whole chunks, up to BLOCK bytes of them."""
  x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
  source = rows.Rows(
    x.shape, x.dtype, lambda: (x[i : i + 4] for i in range(0, 64, 4)), 4
  )
  with store.Store(tmp_path / 'ck') as opened:
    opened.save(3, {'x': source}, {'x': (None, None)}, META)
  monkeypatch.setattr(stored, 'BLOCK', 10 * 32 * 4)
  step = stored.Step(tmp_path / 'ck' / '3')
  assert [len(b) for _, b in step.leaf('x').blocks()] == [8] * 8
  assert [len(b) for _, b in step.leaf('x', 3).blocks()] == [3] * 21 + [1]
  assert bytes_of(step, 'x') == x.tobytes()
  assert not step.faults()


def test_numbers_of_8_bytes(tmp_path):
  """Without x64, as a command runs: no bit is lost."""
  with jax.enable_x64(True):
    tree = {'x': np.linspace(0, 1, 12).reshape(3, 4), 'n': np.arange(5) << 40}
    folder = save(tmp_path / 'ck', tree)
  step = stored.Step(folder)
  assert step.leaves['x']['dtype'] == 'float64' and not step.faults()
  assert bytes_of(step, 'x') == tree['x'].tobytes()


def test_how_leaves_differ(tmp_path, folder):
  tree = host()
  tree['params/layers/up'][1, 2, 3] += 0.5
  tree['params/layers/up'][0, 0, 0] = -0.0
  was = host()['params/layers/up']
  was[0, 0, 0] = 0.0
  a = save(tmp_path / 'a', host() | {'params/layers/up': was})
  tree['params/embeddings'] = tree.pop('params/embedding')
  tree['mask'] = np.append(tree['mask'], True)
  tree['step'] = tree['step'].astype(np.uint32)
  b = save(tmp_path / 'b', tree)
  found = difference.leaves(stored.Step(a), stored.Step(b))
  by_path = {row.path: row for row in found}
  assert set(by_path) == {
    'params/layers/up', 'params/embedding', 'params/embeddings', 'mask', 'step'
  }  # fmt: skip
  up = by_path['params/layers/up']
  assert (up.what, up.changed, up.size) == ('values', 2, 3072)
  x, y = was.astype('f8'), tree['params/layers/up'].astype('f8')
  largest = np.abs(x - y).max()
  assert up.largest == largest and largest > 0.4
  assert up.relative == largest / max(np.abs(x).max(), np.abs(y).max())
  lost = by_path['params/embedding'].what
  assert lost == "only in A. The other has 'params/embeddings'."
  assert 'only in B' in by_path['params/embeddings'].what
  assert by_path['mask'].what == 'shape (7,) and (8,)'
  assert by_path['mask'].changed is None
  assert by_path['step'][1:4] == ('dtype int32 and uint32', 0, 1)
  assert not difference.leaves(stored.Step(a), stored.Step(a))


def test_a_damaged_leaf_is_no_difference(tmp_path):
  """A flip is damage, not a number to report."""
  a = save(tmp_path / 'a', host(0))
  b = save(tmp_path / 'b', host(1))
  for path in (b / 'state').rglob('d/*'):
    raw = bytearray(path.read_bytes())
    for i in range(0, len(raw), 16):
      raw[i] ^= 2
    path.write_bytes(raw)
  with pytest.raises(errors.IntegrityError, match='b/3 is damaged: leaf'):
    difference.leaves(stored.Step(a), stored.Step(b))


def test_the_first_step_that_differs():
  def run(*prints):
    leaf = dict(shape=[], dtype='int32', axes=[])
    return {
      n: dict(leaves={'x': leaf | dict(fingerprint=p)})
      for n, p in enumerate(prints)
    }

  assert difference.first_step(run('a', 'b', 'c'), run('a', 'd', 'e')) == 1
  assert difference.first_step(run('a', 'b'), run('a', 'b', 'c')) is None
  later = {n: x for n, x in run('a', 'd', 'e').items() if n}
  assert difference.first_step(run('a', 'b', 'c'), later) == 1


@pytest.mark.parametrize(
  'chunk_bytes, most', [(8, 8), (100, 100), (2**20, 12288)]
)
def test_other_chunks_the_same_leaves(folder, tmp_path, chunk_bytes, most):
  step = stored.Step(folder)
  before = {p: (folder / p).read_bytes() for p in stored.contents(folder)}
  out = tmp_path / 'new'
  out.mkdir()
  reshard.write(step, out, chunk_bytes)
  new = stored.Step(out / '3')
  assert new.manifest == step.manifest and not new.faults()
  assert right(restored(out / '3'))
  sizes = []
  for path, x in host().items():
    if x.size:
      chunk = new._open(path)[1]
      assert int(np.prod(chunk)) * x.itemsize <= max(chunk_bytes, x.itemsize)
      sizes.append(int(np.prod(chunk)) * x.itemsize)
  assert max(sizes) == most or chunk_bytes == 100 and 48 <= max(sizes) <= 100
  assert before == {p: (folder / p).read_bytes() for p in before}


def test_reshard_refuses(folder, tmp_path, monkeypatch):
  (tmp_path / 'new').mkdir()
  step = stored.Step(folder)
  with pytest.raises(errors.UserError, match='chunk_bytes=4.*give at least 8'):
    reshard.write(step, tmp_path / 'new', 4)
  monkeypatch.setattr(chunks, 'MOST_CHUNKS', 10)
  with pytest.raises(errors.UserError, match=r'would be \d+ chunks; give'):
    reshard.write(step, tmp_path / 'new', 8)
  usage = shutil.disk_usage(tmp_path)._replace(free=100)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(errors.UserError, match='the disk has 100'):
    reshard.write(step, tmp_path / 'new', 2**20)
  assert not list((tmp_path / 'new').iterdir())
