"""Checkpoints of every format open for ever, and by another program too."""

import json
import re
import shutil

import format_reader
import golden_checkpoints as golden
import jax
import ml_dtypes
import numpy as np
import pytest

from paraxis.configs import schema
from paraxis.models import build
from paraxis.sharding.checkpoint import fingerprint
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import store
from paraxis.train import state as state_lib

VERSIONS = range(1, manifest_lib.VERSION + 1)
BOTH = [(n, kind) for n in VERSIONS for kind in golden.KINDS]
KEPT = 200_000  # bytes


def directory(version, kind):
  return golden.FOLDER / f'format_{version}' / kind / 'checkpoints'


def restored(version, kind):
  """({path: array}, meta) by the Store, on one device."""
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with store.Store(directory(version, kind), read_only=True) as opened:
    like = {
      p: jax.ShapeDtypeStruct(tuple(x['shape']), x['dtype'], sharding=here)
      for p, x in opened.read_manifest(golden.STEP)['leaves'].items()
    }
    return opened.restore(golden.STEP, like)


@pytest.mark.fault(42)
@pytest.mark.parametrize('version, kind', BOTH)
def test_both_readers_find_the_same_bits(version, kind):
  tree, meta = restored(version, kind)
  folder = directory(version, kind) / str(golden.STEP)
  manifest, theirs = format_reader.read(folder)
  assert manifest['version'] == version and manifest['meta'] == meta
  assert set(tree) == set(theirs) and len(tree) > 20
  for path, x in tree.items():
    assert x.dtype == theirs[path].dtype
    assert np.asarray(x).tobytes() == theirs[path].tobytes(), path
  assert any(np.any(x) for p, x in theirs.items() if '/nu/' in p)


@pytest.mark.parametrize('version, kind', BOTH)
def test_it_is_the_state_of_a_run_of_today(version, kind):
  """Its leaves are those of the same config, and mean the same model."""
  tree, meta = restored(version, kind)
  built, optimizer = golden.built_of(schema.from_json(meta['config']))
  with build.use(built):
    init = lambda: state_lib.init(built.model, optimizer, jax.random.key(0))
    state = jax.eval_shape(init)
  wanted = {
    p: (x.shape, x.dtype.name) for p, x in state_lib.flatten(state).items()
  }
  assert {p: (x.shape, x.dtype.name) for p, x in tree.items()} == wanted
  leaves = format_reader.read(directory(version, kind) / '2')[0]['leaves']
  known = state_lib.leaves(state, built.model, optimizer.axes(state.params))
  for path, axes in state_lib.axes(known).items():
    assert leaves[path]['axes'] == list(axes), path
  variables = {
    p.removeprefix('params/'): x
    for p, x in tree.items()
    if p.startswith('params/')
  }
  kept = golden.FOLDER / f'format_{version}' / golden.LOSSES
  wanted = json.loads(kept.read_text())[kind]
  assert abs(golden.loss_of(built, variables) - wanted) < 1e-5
  # Negative: that of other parameters is another.
  other = variables | {'embedding': variables['embedding'] * 1.1}
  assert abs(golden.loss_of(built, other) - wanted) > 1e-4


def shape_of(folder):
  """What a change of the format changes: names of files and of fields."""
  manifest = json.loads((folder / 'manifest/metadata').read_text())
  names = {
    re.sub(r'/d/[0-9a-f]{32}$', '/d/*', p.relative_to(folder).as_posix())
    for p in folder.rglob('*')
    if p.is_file()
  }
  leaves = {
    path: {k: v for k, v in x.items() if k != 'fingerprint'}
    for path, x in manifest['leaves'].items()
  }
  kept = {k: type(manifest[k]).__name__ for k in manifest}
  digits = {re.sub('[0-9a-f]', '0', x['fingerprint']) for x in
            manifest['leaves'].values()}  # fmt: skip
  return dict(names=names, leaves=leaves, kept=kept, digits=digits)


def test_the_format_of_today_has_a_golden(tmp_path):
  """Fails when the format changes: raise VERSION, and keep a golden of it."""
  assert (golden.FOLDER / f'format_{manifest_lib.VERSION}').is_dir()
  kind, number = 'dense', str(golden.STEP)
  tree, _ = restored(manifest_lib.VERSION, kind)
  kept = directory(manifest_lib.VERSION, kind) / number
  manifest, _ = format_reader.read(kept)
  axes = {p: tuple(x['axes']) for p, x in manifest['leaves'].items()}
  meta = golden.meta_of(golden.config_of(kind))
  with store.Store(tmp_path / 'now') as opened:
    opened.save(golden.STEP, tree, axes, meta)
  now = tmp_path / 'now' / number
  assert shape_of(now) == shape_of(kept)
  assert set(manifest['meta']) <= set(meta)  # the caller's: it may say more
  prints = format_reader.read(now)[0]['leaves']
  for path, leaf in manifest['leaves'].items():  # the equation is the same
    assert prints[path]['fingerprint'] == leaf['fingerprint']
  # Negative: another file, field or field of a leaf is seen.
  for change in ('file', 'field', 'leaf'):
    other = tmp_path / change
    shutil.copytree(now, other)
    file = other / 'manifest/metadata'
    text = json.loads(file.read_text())
    if change == 'file':
      (other / 'state' / 'more').touch()
    elif change == 'field':
      file.write_text(json.dumps(text | {'more': 1}))
    else:
      text['leaves']['step']['spec'] = 1
      file.write_text(json.dumps(text))
    assert shape_of(other) != shape_of(kept)


def test_goldens_are_small_and_whole(tree):
  """git has every file that is there, and as bytes."""
  files = [p for p in golden.FOLDER.rglob('*') if p.is_file()]
  known = set(tree.files)
  for path in files:
    assert path.relative_to(tree.root).as_posix() in known
  for version in VERSIONS:
    folder = golden.FOLDER / f'format_{version}'
    size = sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())
    assert 0 < size < KEPT
  assert 'tests/golden/checkpoints/** binary' in (
    (tree.root / '.gitattributes').read_text().splitlines()
  )


def test_the_equation_of_other_types():
  """8 bytes, 1 byte, bool, scalars: as the docstring says."""
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    for x in (
      rng.standard_normal((3, 5)),
      np.asarray(-2.5),
      rng.integers(-9, 9, (2, 3, 4)),
      rng.integers(0, 2, 7).astype(bool),
      np.asarray(True),
      rng.standard_normal((4, 3)).astype(ml_dtypes.float8_e4m3fn),
      rng.standard_normal((2, 2)).astype(np.float16),
      rng.standard_normal((2, 1, 3)).astype(ml_dtypes.bfloat16),
    ):
      found = fingerprint.fingerprint({'x': x})['x']
      assert format_reader.words(x) == found, x.dtype
      flipped = np.frombuffer(x.tobytes(), np.uint8).copy()
      flipped[-1] ^= 1
      flipped = np.ndarray(x.shape, x.dtype, flipped.tobytes())
      assert format_reader.words(flipped) != found


@pytest.mark.parametrize('at', ['manifest/metadata', 'state'])
def test_the_reader_sees_damage(tmp_path, at):
  shutil.copytree(directory(1, 'dense') / '2', tmp_path / '2')
  path = tmp_path / '2' / at
  if path.is_dir():
    path = max(path.rglob('d/*'), key=lambda p: p.stat().st_size)
    for file in path.parent.parent.parent.rglob('d/*'):
      raw = bytearray(file.read_bytes())
      raw[len(raw) // 2] ^= 16
      file.write_bytes(raw)
  else:
    path.write_text(path.read_text().replace('"step": 2', '"step": 3', 1))
  with pytest.raises((AssertionError, ValueError)):
    format_reader.read(tmp_path / '2')
