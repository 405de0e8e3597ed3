"""Checkpoints: bitwise on any layout, and no damage goes unseen."""

import itertools
import json
import logging
import os
import random
import shutil
import sys
import types

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from paraxis.configs.base import errors
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import saved_arrays
from paraxis.sharding.checkpoint import store

AXES = {
  'params/layers/query': ('layers', 'embed', 'heads'),
  'params/embedding': ('vocab', 'embed'),
  'optimizer/mu/embedding': ('vocab', 'embed'),
  'optimizer/mask': ('vocab',),
  'optimizer/none': (None, 'embed'),
  'step': (),
}


def mesh(data, tensor):
  sizes = dict(data=data, tensor=tensor)
  return mesh_lib.make(sizes, jax.devices()[: data * tensor])


def layouts():
  """Name -> {path: sharding}: four meshes, four ways to cut every leaf."""

  def all_of(m, stacked, matrix, vector):
    specs = [stacked, matrix, matrix, vector, P(), P()]
    return {
      path: NamedSharding(m, s) for path, s in zip(AXES, specs, strict=True)
    }

  return {
    'one': all_of(mesh(1, 1), P(), P(), P()),
    'data8': all_of(mesh(8, 1), P(None, 'data'), P('data'), P('data')),
    'data4tensor2': all_of(
      mesh(4, 2), P(None, 'data', 'tensor'), P('tensor', 'data'), P('data')
    ),
    'data2tensor2': all_of(
      mesh(2, 2), P('tensor', None, 'data'), P(('data', 'tensor')), P()
    ),
  }


def host(seed=0):
  rng = np.random.default_rng(seed)
  values = [
    rng.standard_normal((2, 16, 16)).astype(np.float32),
    rng.standard_normal((512, 64)).astype(np.float32),
    rng.standard_normal((512, 64)).astype(jnp.bfloat16),
    rng.integers(0, 2, (64,)).astype(bool),
    np.zeros((0, 8), np.float32),
    np.asarray(seed, np.int32),
  ]
  return dict(zip(AXES, values, strict=True))


def like_of(layout, tree=None):
  return {
    path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout[path])
    for path, x in (tree or host()).items()
  }


def same(tree, wanted):
  return set(tree) == set(wanted) and all(
    x.dtype == wanted[path].dtype
    and np.asarray(x).tobytes() == wanted[path].tobytes()
    for path, x in tree.items()
  )


LAYOUT = layouts()['data4tensor2']


@pytest.fixture
def two(tmp_path, said):
  """A directory with good steps 1 and 2."""
  with store.Store(tmp_path / 'ck', say=said.append) as s:
    for step in (1, 2):
      s.save(
        step, jax.device_put(host(step), LAYOUT), AXES, {'cursor': step * 8}
      )
  return tmp_path / 'ck'


def data_file(folder):
  files = [p for p in (folder / 'state').rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


@pytest.mark.fault(25)
@pytest.mark.invariant(2, 3, 4)
def test_any_layout_to_any_layout_is_bitwise(tmp_path):
  all_layouts, prints = layouts(), set()
  for name, layout in all_layouts.items():
    with store.Store(tmp_path / name) as s:
      s.save(3, jax.device_put(host(3), layout), AXES, {'from': name})
  for a, b in itertools.product(all_layouts, all_layouts):
    with store.Store(tmp_path / a, read_only=True) as s:
      step, tree, meta = s.restore_latest_good(like_of(all_layouts[b]))
      assert (step, meta) == (3, {'from': a})
      assert same(tree, host(3)), (a, b)
      assert all(
        x.sharding.is_equivalent_to(all_layouts[b][p], x.ndim)
        for p, x in tree.items()
      )
      leaves = s.read_manifest()['leaves']
      prints.add(json.dumps({p: v['fingerprint'] for p, v in leaves.items()}))
  assert len(prints) == 1
  *_, (b, layout) = all_layouts.items()
  with store.Store(tmp_path / f'{b} again') as s:  # what was restored
    s.save(3, tree, AXES, {})
    s.wait()
    again = s.read_manifest()['leaves']
  assert again == leaves
  assert not same(host(4), host(3))  # `same` can fail


def test_manifest_and_donation(tmp_path):
  meta = {'config': {'lr': 0.1 + 0.2}, 'cursor': 2**60 + 1, 'name': 'é'}
  with store.Store(tmp_path / 'ck') as s:
    assert s.restore_latest_good(like_of(LAYOUT)) is None
    tree = jax.device_put(host(5), LAYOUT)
    s.save(5, tree, AXES, meta)
    change = jax.jit(
      lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0
    )
    jax.block_until_ready(change(tree))  # the saved buffers are reused
    s.wait()
    got = s.read_manifest()
    assert (got['format'], got['version']) == ('paraxis-checkpoint', 1)
    assert (got['step'], got['meta']) == (5, meta)
    leaf = got['leaves']['optimizer/mu/embedding']
    assert leaf['shape'] == [512, 64] and leaf['dtype'] == 'bfloat16'
    assert leaf['axes'] == ['vocab', 'embed']
    assert same(s.restore(5, like_of(LAYOUT))[0], host(5))


def test_arrays_are_not_compressed_and_compressed_ones_open(
  tmp_path, monkeypatch
):
  tree, axes = {'x': jnp.arange(2**18.0) // 2**10}, {'x': ('embed',)}
  plain = saved_arrays.ocp.PyTreeCheckpointHandler

  def kept(name):
    with store.Store(tmp_path / name) as s:
      s.save(0, tree, axes, {})
      assert same(s.restore(0, tree)[0], tree)
    files = (p for p in (tmp_path / name).rglob('*') if p.is_file())
    return sum(p.stat().st_size for p in files)

  assert kept('now') > tree['x'].nbytes
  older = lambda **how: plain(**how | dict(use_compression=True))
  monkeypatch.setattr(saved_arrays.ocp, 'PyTreeCheckpointHandler', older)
  assert kept('before') < tree['x'].nbytes / 2


@pytest.mark.fault(18)
def test_every_bit_flip_falls_back(two, said):
  path = data_file(two / '2')
  good, rng = path.read_bytes(), random.Random(0)
  with store.Store(two, say=said.append) as s:
    for _ in range(20):
      bad = bytearray(good)
      bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
      path.write_bytes(bad)
      said.clear()
      step, tree, meta = s.restore_latest_good(like_of(LAYOUT))
      if step == 1:
        assert same(tree, host(1)) and meta == {'cursor': 8}
        assert len(said) == 1 and '2 is damaged' in said[0], said
      else:  # a bit that carries nothing: the state is bitwise right
        assert same(tree, host(2)) and not said
    path.write_bytes(good)
    assert s.restore_latest_good(like_of(LAYOUT))[0] == 2
    # Negative: without the fingerprints a flip of an array's bits goes unseen.
    unseen = types.SimpleNamespace(seen=0)

    class Blind:
      def __init__(self, tree):
        unseen.seen += not same(tree, host(2))

      def read(self):
        leaves = s.read_manifest(2)['leaves']
        return {p: v['fingerprint'] for p, v in leaves.items()}, [], []

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(fingerprint, 'Words', Blind)
      for place in range(100, len(good), len(good) // 8):
        bad = bytearray(good)
        bad[place] ^= 4
        path.write_bytes(bad)
        try:
          s.restore(2, like_of(LAYOUT))
        except errors.IntegrityError:
          pass
    assert unseen.seen > 0


def count_on(manifest):
  text = manifest.read_text()
  assert text.count('"cursor": 16') == 1
  manifest.write_text(text.replace('"cursor": 16', '"cursor": 17'))


def link(path):
  path.symlink_to(path.rename(path.with_name('elsewhere')))


MANIFEST = 'manifest/metadata'
DAMAGE = {  # kind -> (what of a step, '': its largest file; what happens to it)
  'truncated': ('', lambda path: os.truncate(path, path.stat().st_size // 2)),
  'zeros': ('', lambda path: path.write_bytes(bytes(path.stat().st_size))),
  'missing': ('', os.unlink),
  'symbolic link': ('', link),
  'tree metadata': ('state/_METADATA', lambda path: path.write_text('{"a"')),
  # One bit: Orbax then reads nothing of that name and says nothing.
  'a name in it': (
    'state/_METADATA',
    lambda path: path.write_bytes(path.read_bytes().replace(b'mask', b'masj')),
  ),
  'half copied': ('manifest', shutil.rmtree),
  'one digit of the manifest': (MANIFEST, count_on),
  'manifest no json': (MANIFEST, lambda path: path.write_bytes(b'\xff\x00')),
  'manifest empty': (MANIFEST, lambda path: path.write_text('')),
  'deep manifest': (MANIFEST, lambda path: path.write_text('[' * 100_000)),
}


def damage(kind, folder):
  name, happens = DAMAGE[kind]
  happens(folder / name if name else data_file(folder))


@pytest.mark.fault(19, 20)
@pytest.mark.parametrize('kind', DAMAGE)
def test_damaged_files_fall_back_with_one_line(two, said, kind):
  damage(kind, two / '2')
  with store.Store(two, say=said.append) as s:
    step, tree, _ = s.restore_latest_good(like_of(LAYOUT))
    assert step == 1 and same(tree, host(1))
    assert len(said) == 1 and '\n' not in said[0]
    assert 'ck/2 is damaged' in said[0] and len(said[0]) < 400
    with pytest.raises(errors.IntegrityError, match='is damaged'):
      s.restore(2, like_of(LAYOUT))
    # Training goes on from 1 and reaches 2 again: the damaged one is kept.
    s.save(2, jax.device_put(host(22), LAYOUT), AXES, {})
    s.wait()
    assert s.steps() == [1, 2]
    assert same(s.restore(2, like_of(LAYOUT))[0], host(22))
    assert len(list(two.glob('damaged-2-*/2'))) == 1


def test_reads_given_up_say_nothing_however_late(
  two, said, monkeypatch, caplog
):
  """A read may end long after another one's failure was answered."""
  heard = []
  monkeypatch.setattr(sys, 'unraisablehook', heard.append)

  def report(text, of=None):
    sys.unraisablehook(
      types.SimpleNamespace(exc_value=RuntimeError(text), object=of)
    )

  with store.Store(two, say=said.append) as s:
    s.restore(2, like_of(LAYOUT))
    assert sys.unraisablehook == heard.append  # nothing stays of a good read
    damage('truncated', two / '2')
    for _ in range(2):
      with pytest.raises(errors.IntegrityError, match='do not read'):
        s.restore(2, like_of(LAYOUT))
      report('Event loop is closed')
      logging.getLogger('asyncio').error('in orbax/serialization.py: lost')
      assert not heard and not caplog.records
  report('another error')
  report('Event loop is closed', of=damage)  # somebody else's
  logging.getLogger('asyncio').error('another task')
  assert len(heard) == 2 and len(caplog.records) == 1


def test_a_step_that_is_deleted_while_it_is_read(two, said, monkeypatch):
  """By the run that trains here: no damage, and a newer one is there."""
  read, newest = saved_arrays.read, [3]

  def pruned(folder, wanted):
    if newest and folder.name == str(newest[0] - 1):
      step, one = newest.pop(), store.Options(keep=1)
      with store.Store(two, one, say=lambda line: None) as s:
        s.save(step, jax.device_put(host(step), LAYOUT), AXES, {})
    return read(folder, wanted)

  monkeypatch.setattr(saved_arrays, 'read', pruned)
  with store.Store(two, read_only=True, say=said.append) as s:
    step, tree, _ = s.restore_latest_good(like_of(LAYOUT))
    assert step == 3 and same(tree, host(3)) and s.steps() == [3]
    (line,) = said
    assert 'ck/2 was deleted while it was read' in line
    newest.append(4)
    with pytest.raises(errors.UserError, match='3 was deleted while'):
      s.restore(3, like_of(LAYOUT))


@pytest.mark.fault(21)
def test_junk_is_no_step(two, said):
  (two / '6').mkdir()
  (two / '7' / 'default').mkdir(parents=True)
  (two / '8.orbax-checkpoint-tmp').mkdir()
  (two / '9').write_text('a file')
  (two / '007').mkdir()
  shutil.copytree(two / '2', two / '5')  # a copy under another number
  shutil.copytree(two / '2', two / '2.copy')
  with store.Store(two, read_only=True) as s:
    assert s.steps() == [1, 2]
  assert (two / '8.orbax-checkpoint-tmp').exists()
  with store.Store(two, say=said.append) as s:
    assert len(said) == 1 and '8.orbax' in said[0]
    assert not (two / '8.orbax-checkpoint-tmp').exists()
    assert s.steps() == [1, 2]
    assert s.restore_latest_good(like_of(LAYOUT))[0] == 2
    assert len(said) == 4 and 'manifest is of step 2' in said[3]


@pytest.mark.fault(22)
@pytest.mark.invariant(7)
def test_nothing_good_is_never_from_scratch(two, said):
  for step in (1, 2):
    damage('zeros', two / str(step))
  with store.Store(two, say=said.append) as s:
    with pytest.raises(errors.IntegrityError, match='all 2 checkpoints.*move'):
      s.restore_latest_good(like_of(LAYOUT))
  shutil.rmtree(two)
  (two / '6').mkdir(parents=True)
  with (
    store.Store(two, say=said.append) as s,
    pytest.raises(errors.IntegrityError),
  ):
    s.restore_latest_good(like_of(LAYOUT))


def test_counts_of_a_solver_in_an_old_checkpoint_are_left_unread():
  """Such leaves were numbers of one step; any other extra leaf is refused."""
  leaf = dict(shape=[4], dtype='float32')
  old = {'params/layers/gru/bias': leaf, 'params/layers/gru/solver': leaf}
  like = {'params/layers/gru/bias': jax.ShapeDtypeStruct((4,), jnp.float32)}
  manifest_lib.compare(old, like, 'here')
  other = old | {'params/layers/gru/solvers': leaf}
  with pytest.raises(errors.UserError, match='1 of 2 leaves(.|\n)*solvers'):
    manifest_lib.compare(other, like, 'here')


@pytest.mark.fault(23, 24)
def test_mismatch_lists_every_leaf(two, said):
  wanted = like_of(LAYOUT)

  def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=wanted['step'].sharding)

  del wanted['optimizer/mask']
  wanted['params/extra'] = struct((3,), jnp.float32)
  wanted['params/embedding'] = struct((1024, 64), jnp.float32)
  wanted['step'] = struct((), jnp.uint32)
  with store.Store(two, say=said.append) as s:
    for restore in (s.restore_latest_good, lambda x: s.restore(2, x)):
      with pytest.raises(errors.UserError) as e:
        restore(wanted)
      lines = str(e.value).splitlines()
      assert 'another architecture: 4 of 7 leaves' in lines[0]
      assert [x.strip() for x in lines[1:]] == [
        'optimizer/mask: saved bool(64,), wanted missing',
        'params/embedding: saved float32(512, 64), wanted float32(1024, 64)',
        'params/extra: saved missing, wanted float32(3,)',
        'step: saved int32(), wanted uint32()',
      ]
    with pytest.raises(errors.UserError, match='no checkpoint of step 9.*1, 2'):
      s.restore(9, like_of(LAYOUT))
  assert not said


def test_part_of_a_tree(two, said):
  wanted = {p: x for p, x in like_of(LAYOUT).items() if p.startswith('params/')}
  with store.Store(two, say=said.append) as s:
    with pytest.raises(errors.UserError, match='4 of 6 leaves'):
      s.restore(2, wanted)
    tree, _ = s.restore(2, wanted, under='params/')
    assert same(tree, {p: x for p, x in host(2).items() if p in wanted})
    damage('zeros', two / '2')
    assert s.restore_latest_good(wanted, under='params/')[0] == 1


@pytest.mark.fault(44)
@pytest.mark.invariant(10, 13)
def test_refused_saves_leave_everything_as_it_was(two, said, monkeypatch):
  tree = jax.device_put(host(), LAYOUT)
  with store.Store(two, say=said.append) as s:
    files = sorted(p for p in two.rglob('*'))
    with pytest.raises(errors.UserError, match='step 2 is already saved'):
      s.save(2, tree, AXES, {})
    bad = host()
    bad['params/embedding'][3, 3] = np.nan
    with pytest.raises(errors.IntegrityError, match='params/embedding'):
      s.save(3, jax.device_put(bad, LAYOUT), AXES, {})
    step = tree['step']
    paths = ['../evil', 'a/../../b', '/etc/x', 'a\\b', 'a//b', '', 'a.b']
    for words, leaves, axes, meta in [
      *[('leaf path', {path: step}, {path: ()}, {}) for path in paths],
      ('is below the leaf', {'a': step, 'a/b': step}, {}, {}),
      ('not an array', dict(tree, step=np.int32(3)), AXES, {}),
      ('axes', tree, dict(AXES, step=('embed',)), {}),
      ('differ in step', tree, {p: AXES[p] for p in AXES if p != 'step'}, {}),
      ('JSON', tree, AXES, {'x': {1, 2}}),
      ('JSON', tree, AXES, {'x': float('nan')}),
    ]:
      with pytest.raises(errors.UserError, match=words):
        s.save(3, leaves, axes, meta)
    usage = shutil.disk_usage(two)._replace(free=1000)
    with monkeypatch.context() as patch:
      patch.setattr(shutil, 'disk_usage', lambda path: usage)
      with pytest.raises(errors.CrashError, match='ck: .*needs 25.* has 1000'):
        s.save(3, tree, AXES, {})
    assert sorted(p for p in two.rglob('*')) == files
    s.save(3, tree, AXES, {})  # and it still works
  assert store.Store(two, read_only=True).steps() == [1, 2, 3]
  with store.Store(two, read_only=True) as s:
    with pytest.raises(errors.UserError, match='read-only'):
      s.save(4, tree, AXES, {})


@pytest.mark.fault(41, 45)
@pytest.mark.invariant(14)
def test_crafted_manifest_and_newer_format(two, said):
  path = two / '2' / 'manifest' / 'metadata'
  manifest = json.loads(path.read_text())

  def write(**changes):
    body = dict(manifest, **changes)
    body['sha256'] = manifest_lib._sha256(body)
    path.write_text(json.dumps(body))

  huge = {'p': dict(shape=[2**50], dtype='float32', axes=[''], fingerprint='')}
  evil = {'../../evil': dict(huge['p'], shape=[1])}
  with store.Store(two, say=said.append) as s:
    write(leaves=huge)  # nothing is allocated: it differs from `like`
    with pytest.raises(errors.UserError, match='another architecture'):
      s.restore_latest_good(like_of(LAYOUT))
    write(leaves=evil)
    assert s.steps() == [1]
    write(leaves={'p': {'shape': [-1]}})
    assert s.steps() == [1]
    write(version=2)
    with pytest.raises(errors.UserError, match='format 2.*upgrade'):
      s.restore_latest_good(like_of(LAYOUT))


@pytest.mark.fault(17)
def test_unwritable_and_relative_directories(tmp_path, monkeypatch):
  file = tmp_path / 'file'
  file.write_text('')
  with pytest.raises(errors.UserError, match=str(file)):
    store.Store(file / 'ck')
  with pytest.raises(errors.UserError, match='not a local path'):
    store.Store('gs://bucket/run')
  monkeypatch.chdir(tmp_path)
  with store.Store('runs/../here') as s:
    assert s.directory == tmp_path / 'here'
    s.save(0, jax.device_put(host(), LAYOUT), AXES, {})
  assert (tmp_path / 'here' / '0').is_dir()


def test_keep_counts_good_steps_only(tmp_path, said):
  tree = jax.device_put(host(), LAYOUT)
  options = store.Options(keep=2, asynchronous=False)
  with store.Store(tmp_path, options, say=said.append) as s:
    for step in range(1, 5):
      s.save(step, tree, AXES, {})
      assert s.steps() == list(range(max(1, step - 1), step + 1))
    damage('zeros', tmp_path / '4')
    assert s.restore_latest_good(like_of(LAYOUT))[0] == 3
    s.save(5, tree, AXES, {})
    # 4 is known to be damaged: it takes no good step's place.
    assert s.steps() == [3, 4, 5]


def test_failed_write_is_reported_and_the_older_step_stays(two, said):
  with store.Store(two, say=said.append) as s:
    s.save(3, jax.device_put(host(3), LAYOUT), AXES, {})
    s.wait()

    def fail(*args, **kwargs):
      raise OSError("[os_error_code='28'] No space left on device")

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(s._writer._orbax, 'wait_until_finished', fail)
      s.save(4, jax.device_put(host(4), LAYOUT), AXES, {})
      with pytest.raises(
        errors.CrashError, match='not written: the disk is fu'
      ):
        s.wait()
    assert not list(two.glob('4*'))
    s.check()
    s.save(4, jax.device_put(host(4), LAYOUT), AXES, {})  # a new writer
    s.wait()
    assert s.steps() == [2, 3, 4]


@pytest.mark.parametrize(
  'call',
  [
    lambda s, like: s.before(9),
    lambda s, like: s.drop(2),
    lambda s, like: s.restore(2, like),
    lambda s, like: s.restore_latest_good(like),
  ],
  ids=['before', 'drop', 'restore', 'restore_latest_good'],
)
def test_a_save_that_may_fail_ends_no_rollback(two, monkeypatch, call):
  tree, usage = jax.device_put(host(), LAYOUT), shutil.disk_usage(two)
  with store.Store(two, store.Options(failures=3)) as s:
    with monkeypatch.context() as patch:
      few = usage._replace(free=1000)
      patch.setattr(shutil, 'disk_usage', lambda path: few)
      s.save(3, tree, AXES, {})
    call(s, like_of(LAYOUT))
    s.save(3, tree, AXES, {})
  assert store.Store(two, read_only=True).steps()[-1] == 3
