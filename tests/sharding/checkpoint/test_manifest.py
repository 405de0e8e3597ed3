"""A manifest is data: odd files, formats and contents are damage, and said."""

import json
import os

import jax
import jax.numpy as jnp
import pytest
import support

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import manifest as manifest_lib
from paraxis.sharding.checkpoint import store

META = {'cursor': {'step': 0}}


@pytest.fixture
def two(tmp_path):
  """A directory with good steps 1 and 2."""
  with store.Store(tmp_path / 'ck', store.Options(asynchronous=False)) as s:
    for step in (1, 2):
      s.save(step, {'w': jnp.arange(8.0) + step}, {'w': ('embed',)}, META)
  return tmp_path / 'ck'


def _restored(two):
  """(step that is restored, what is said)."""
  said = []
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = {'w': jax.ShapeDtypeStruct((8,), jnp.float32, sharding=here)}
  with store.Store(two, read_only=True, say=said.append) as s:
    step, tree, _ = s.restore_latest_good(like)
  assert tree['w'][0] == step
  return step, '\n'.join(said)


def _rewrite(two, step, **changes):
  """Seals a manifest with other content."""
  path = two / str(step) / 'manifest' / 'metadata'
  body = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(body | dict(sha256=manifest_lib._sha256(body))))


def test_good_steps_read(two):
  assert _restored(two) == (2, '')
  _rewrite(two, 2)
  assert _restored(two) == (2, '')  # `_rewrite` alone damages nothing


@pytest.mark.fault(41)
@pytest.mark.parametrize('version', [0, -7])
def test_formats_that_never_were(two, version):
  _rewrite(two, 2, version=version)
  step, said = _restored(two)
  assert step == 1 and f'its format is {version}, the first one is 1' in said
  _rewrite(two, 1, version=version)
  with pytest.raises(errors.IntegrityError, match='all 2 checkpoints'):
    _restored(two)


@pytest.mark.parametrize('meta', [None, [], 'text', 3])
def test_meta_that_is_no_object(two, meta):
  _rewrite(two, 2, meta=meta)
  step, said = _restored(two)
  assert step == 1 and 'its meta is no object' in said


@pytest.mark.invariant(14)
def test_content_nested_without_end(two):
  deep = '[' * 10**6 + ']' * 10**6
  path = two / '2' / 'manifest' / 'metadata'
  text = path.read_text()
  path.write_text(text.replace('{"cursor": {"step": 0}}', deep))
  assert path.read_text() != text
  step, said = _restored(two)
  assert step == 1 and 'its manifest does not read' in said


def _parts(two):
  """A file of each part of a checkpoint: manifest, metadata, data."""
  folder = two / '2'
  files = [p for p in (folder / 'state').rglob('*') if p.is_file()]
  data = max(files, key=lambda p: p.stat().st_size)
  return [folder / 'manifest' / 'metadata', folder / 'state/_METADATA', data]


@pytest.mark.fault(45)
@pytest.mark.parametrize('part', range(3))
def test_a_named_pipe_is_never_waited_for(two, part):
  path = _parts(two)[part]
  path.unlink()
  os.mkfifo(path)
  with support.within(60):
    step, said = _restored(two)
  assert step == 1 and said.count('\n') == 0
  assert f'{path.relative_to(two / "2")}: it is a named pipe' in said


def test_a_named_pipe_among_the_files(two):
  os.mkfifo(two / '2' / 'state' / 'd' / 'more')
  with support.within(60):
    assert _restored(two)[0] == 1
  os.mkfifo(two / '7')  # in place of a step
  with support.within(60):
    assert _restored(two)[0] == 1


def test_waiting_is_seen(tmp_path):
  """So the tests above can fail."""
  os.mkfifo(tmp_path / 'pipe')
  with pytest.raises(TimeoutError), support.within(1):
    (tmp_path / 'pipe').read_bytes()
