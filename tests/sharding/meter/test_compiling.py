"""What compiling says, and that a second compile comes from the cache."""

import re

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
  assert [p for p in cache.iterdir() if p.suffix[1:].isdigit()]


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
