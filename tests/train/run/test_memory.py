"""A device that is too small: said before the first step, or when it shows."""

import jax
import jax.numpy as jnp
import pytest

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import snapshot
from paraxis.train import start
from paraxis.train.run import memory


def test_the_bytes_of_a_program():
  x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  add = lambda a, b: a + b
  plain = jax.jit(add).lower(x, x).compile()
  donated = jax.jit(add, donate_argnums=0).lower(x, x).compile()
  assert memory.needed(plain) == 3 * 2**18  # two arguments and a result
  assert memory.needed(donated) == 2 * 2**18  # which is where one was


@pytest.mark.fault(33)
def test_a_step_that_is_too_large_is_not_begun(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'limit', lambda device: 10_000)
  with pytest.raises(errors.UserError) as caught:
    tiny.run(tmp_path)
  first, *rows = str(caught.value).split('\n')
  assert first.startswith('gradient needs ') and 'has 10000: more dev' in first
  sizes = [float(row.split()[0]) for row in rows[: memory.LISTED]]
  assert sizes == sorted(sizes, reverse=True) and 'embedding' in str(rows)
  assert not [p for p in (tmp_path / 'checkpoints').iterdir() if p.is_dir()]


def test_what_is_there_beside_a_program_counts(monkeypatch):
  x = jnp.zeros((256, 256))
  add = jax.jit(lambda a, b: a + b).lower(x, x).compile()
  device, three = jax.devices()[0], 3 * 2**18
  monkeypatch.setattr(memory, 'limit', lambda device: three)
  flat, read = {'params/a': x, 'optimizer/a': x}, {'a': x}
  memory.check(dict(gradient=add), device, flat)
  with pytest.raises(errors.UserError, match=f'needs {4 * 2**18} bytes'):
    memory.check(dict(gradient=add), device, flat, {'gradient': (flat, read)})


@pytest.mark.fault(34)
def test_memory_that_runs_out_in_a_restore(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(start, 'state', lambda *given: _take())
  with pytest.raises(errors.UserError, match='out of memory: RES') as caught:
    tiny.run(tmp_path)
  assert 'MiB  params/embedding' in str(caught.value)


def test_one_that_fits_is_begun(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'limit', lambda device: 10**10)
  assert tiny.run(tmp_path, {'train.steps': 2})[0]['step'] == 2


def _take():
  """A real allocation, which no machine has."""
  jnp.zeros((2**22, 2**22)).block_until_ready()


@pytest.mark.fault(34)
def test_memory_that_runs_out_later(tiny, tmp_path):
  take = lambda step, values, job: _take() if step == 3 else None
  with pytest.raises(errors.CrashError, match='out of memory: RES') as caught:
    tiny.run(tmp_path, callbacks=[take])
  assert 'MiB  params/embedding' in str(caught.value)
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['2']


@pytest.mark.fault(34)
def test_memory_that_runs_out_in_the_last_save(tiny, tmp_path, monkeypatch):
  """Nothing follows it but the wait until it is written."""
  monkeypatch.setattr(snapshot, 'to_host', lambda tree: _take())
  with pytest.raises(errors.CrashError, match='out of memory: RES'):
    tiny.run(tmp_path, {'train.steps': 2})


@pytest.mark.fault(34)
def test_memory_that_runs_out_in_the_first_step():
  with pytest.raises(errors.UserError, match='out of memory: RESOURCE_EXHAUS'):
    with memory.explained(lambda: {}, lambda: True):
      _take()


def test_other_errors_stay():
  with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
    with memory.explained(lambda: {}, lambda: True):
      raise jax.errors.JaxRuntimeError('INTERNAL: no memory of it')
