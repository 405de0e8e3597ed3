"""What compiling says, and that a second compile comes from the cache."""

import os
import re
import stat

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from paraxis.sharding.meter import compile_store
from paraxis.sharding.meter import compiling


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """use_cache() on an empty folder; jax's settings come back afterwards."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_enable_xla_caches',
    'jax_raise_persistent_cache_errors',
  )
  old = {name: getattr(jax.config, name) for name in names}
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path))
  jax.config.update(names[0], None)
  compilation_cache.reset_cache()
  compiling.use_cache()
  jax.config.update(names[1], 0.0)
  yield tmp_path / 'compiled' / compile_store.processor()
  compiling._overlays.pop().close()
  for name, value in old.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def _compile(say, factor=3.0):
  jax.clear_caches()
  x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  return compiling.compile_step('step', lambda x: (x * factor) @ x, x, say=say)


def test_the_second_time_it_is_from_the_cache(cache):
  said = []
  first = _compile(said.append)
  again = _compile(said.append)
  _compile(said.append, 4.0)
  form = 'step: trace %s s, lower %s s, {} %s s'.replace('%s', r'\d+\.\d\d')
  kinds = 'compile', 'from the cache', 'compile'
  for line, kind in zip(said, kinds, strict=True):
    assert re.fullmatch(form.format(kind), line), line
  x = jnp.arange(64.0).reshape(8, 8)
  assert (first(x) == again(x)).all()
  assert list(cache.glob('*-cache.*-*'))


@pytest.fixture
def one(cache, monkeypatch):
  """The cache with one program; `use_cache` begins anew on its folder."""
  _compile(None)
  compiling._overlays.pop().close()
  (entry,) = cache.glob('*-cache.*-*')
  yield entry
  if not compiling._overlays:  # the fixture closes one
    compiling._overlays.append(compile_store.Overlay(cache.parent))


def _start():
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  compiling.use_cache()
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def _again():
  """Whether what is compiled now comes 'from the cache', or not: 'compile'."""
  said = []
  _compile(said.append)
  return re.search(r'(compile|from the cache) [\d.]+ s$', said[0])[1]


@pytest.mark.fault(47)
@pytest.mark.parametrize('at', [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_said_and_compiled_again(one, capsys, at):
  """Which jax alone may read as another program: it keeps no checksum."""
  flipped = bytearray(one.read_bytes())
  flipped[int(at * len(flipped))] ^= 1
  one.write_bytes(flipped)
  _start()
  line = capsys.readouterr().err
  assert line == (
    f'paraxis: 1 compiled programs in {one.parent} are damaged: they are '
    'compiled again\n'
  )
  assert _again() == 'compile'
  compiling._overlays.pop().close()
  _start()
  assert _again() == 'from the cache' and not capsys.readouterr().err


@pytest.mark.parametrize('deep', [False, True])
def test_a_folder_that_others_may_write_is_not_used(one, capsys, deep):
  """Whoever writes there decides what this user's processes run."""
  folder = one.parent if deep else one.parent.parent
  for kept in (one.parent, one.parent.parent):
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
  folder.chmod(0o770)
  before = sorted(one.parent.iterdir())
  _start()
  assert capsys.readouterr().err == (
    f'paraxis: every program is compiled: {folder} may be written by other '
    'users (mode 770), and what it holds is run as code: remove it.\n'
  )
  assert not jax.config.jax_compilation_cache_dir
  assert _again() == 'compile' and sorted(one.parent.iterdir()) == before
  folder.chmod(0o750)  # others may read
  _start()
  assert _again() == 'from the cache' and not capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason='gives a folder away: root only')
def test_a_folder_of_another_user_is_not_used(one, capsys):
  os.chown(one.parent.parent, 12345, -1)
  _start()
  words = f'{one.parent.parent} belongs to another user (id 12345)'
  assert words in capsys.readouterr().err
  assert not jax.config.jax_compilation_cache_dir


def test_a_folder_that_cannot_be_made(one, capsys, monkeypatch):
  monkeypatch.setenv('PARAXIS_CACHE', str(one))  # a file
  _start()
  assert capsys.readouterr().err == (
    f'paraxis: every program is compiled: {one}/compiled cannot be used (Not a '
    'directory).\n'
  )


def test_a_cache_that_all_processes_began_with_is_used(one):
  _start()
  compiling.share_cache(1.0)  # of one process
  assert _again() == 'from the cache'


@pytest.mark.parametrize('me', [0, 1])
def test_no_process_uses_a_cache_that_another_does_not_see(
  one, capsys, monkeypatch, me
):
  """Process 0, which alone writes, would not compile what the others do."""
  monkeypatch.setattr(jax, 'process_index', lambda: me)
  texts = []
  monkeypatch.setattr(
    compiling.meeting, 'gather',
    lambda name, text, seconds: texts.append(text) or texts,
  )  # fmt: skip
  kept = one.rename(one.parent.parent / one.name)
  _start()
  compiling.share_cache(1.0)  # of an empty store
  assert _again() == 'compile' and len(compiling._overlays) == 1
  compiling._overlays.pop().close()
  for entry in one.parent.glob('*-cache.*'):
    entry.unlink()
  kept.rename(one)
  _start()
  compiling.share_cache(1.0)
  assert len(set(texts)) == 2
  assert not compiling._overlays and _again() == 'compile'
  assert not jax.config.jax_compilation_cache_dir
  said = capsys.readouterr().err
  line = f'process 1 does not see what process 0 sees in {one.parent}: give all'
  assert (line in said) == (not me)
  assert said.count('\n') == (not me)


def test_a_cache_that_is_set_stays(tmp_path, cache):
  mine = str(tmp_path / 'mine')
  jax.config.update('jax_compilation_cache_dir', mine)
  compiling.use_cache()
  assert jax.config.jax_compilation_cache_dir == mine
  compilation_cache.reset_cache()
  said = []
  _compile(said.append)
  _compile(said.append)
  assert 'from the cache' in said[1]


def test_donated_arguments_are_gone():
  x = jnp.ones((4, 4))
  made = compiling.compile_step('step', lambda x: x + 1, x, donate=(0,))
  assert (made(x) == 2).all() and x.is_deleted()


def test_a_level_that_is_named_is_kept(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_backend_optimization_level=3')
  assert compiling.options() is None
  monkeypatch.setenv('XLA_FLAGS', '')
  assert compiling.options() == {'xla_backend_optimization_level': 1}


def test_programs_that_run_once_compile_without_optimisation(monkeypatch):
  monkeypatch.delenv('XLA_FLAGS')
  plain = compiling.options()
  with compiling.quickly():
    quick = compiling.options()
    assert float(jax.jit(abs, compiler_options=quick)(-1.0)) == 1.0
  assert quick['xla_backend_optimization_level'] == 0
  assert compiling.options() == plain


def test_options_of_another_release_are_left_out(monkeypatch):
  real = jax.jit

  def refuse(f, compiler_options):
    if 'xla_cpu_use_fusion_emitters' in compiler_options:
      raise jax.errors.JaxRuntimeError('no such option')
    return real(f, compiler_options=compiler_options)

  monkeypatch.setattr(jax, 'jit', refuse)
  assert compiling._quick.__wrapped__() == {'xla_backend_optimization_level': 0}
