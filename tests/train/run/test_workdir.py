"""A run's folder: who may write, what a resumed run may change."""

import dataclasses
import os
import subprocess
import sys

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train.run import workdir


def _changed(**fields):
  """schema.Config() with section__field=value."""
  config = schema.Config()
  for name, value in fields.items():
    section, field = name.split('__')
    part = dataclasses.replace(getattr(config, section), **{field: value})
    config = dataclasses.replace(config, **{section: part})
  return config


def test_prepare_makes_the_folder_and_leaves_nothing_in_it(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  path = workdir.prepare('a/b')
  assert path == tmp_path / 'a' / 'b' and not list(path.iterdir())
  assert workdir.prepare(path) == path


def test_what_cannot_be_written(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.chdir(tmp_path)
  for name in ('file', 'file/below'):
    with support.refused(f'--workdir={name}:', str(tmp_path / name)):
      workdir.prepare(name)


def test_a_second_holder_is_refused(tmp_path):
  lock = workdir.Lock(tmp_path)
  with pytest.raises(errors.UserError, match=f'process {os.getpid()} on '):
    workdir.Lock(tmp_path)
  lock.close()
  workdir.Lock(tmp_path).close()


def test_the_lock_goes_with_its_process(tmp_path):
  code = (
    'import os, pathlib, sys\n'
    'from paraxis.train import workdir\n'
    'lock = workdir.Lock(pathlib.Path(sys.argv[1]))\n'
    'print("held", flush=True)\n'
    'sys.stdin.read()\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout.readline() == 'held\n'
    with pytest.raises(errors.UserError, match=f'process {process.pid} on '):
      workdir.Lock(tmp_path)
    process.kill()
    process.wait()
  workdir.Lock(tmp_path).close()


FREE = dict(
  mesh__data=4,
  mesh__rules='data',
  checkpoint__every=7,
  decode__top_k=3,
  train__steps=9,
  train__eval_every=3,
  train__remat='full',
  model__unroll=2,
  model__attention='xla',
  data__prefetch=0,
  data__cache_dir='elsewhere',
  pipeline__schedule='gpipe',
)
HARD = dict(
  model__attention_softcap=30.0,
  model__attention_bias=True,
  model__d_model=320,
  model__dtype='bfloat16',
  data__path='other',
  data__packing='first_fit',
  data__sequence_length=128,
  optimizer__learning_rate=0.1,
  train__seed=1,
  train__batch_size=16,
  train__microbatches=2,
  pipeline__skip_fraction=0.5,
)


@pytest.mark.parametrize('name', FREE)
def test_free_fields_are_said(tmp_path, name):
  workdir.write_config(tmp_path, schema.Config())
  said = []
  workdir.check_config(tmp_path, _changed(**{name: FREE[name]}), said.append)
  dotted = name.replace('__', '.')
  assert len(said) == 1
  assert said[0].startswith(f'config: {dotted} was ')
  assert f', is now {FREE[name]!r}' in said[0]


@pytest.mark.parametrize('name', HARD)
def test_hard_fields_are_refused(tmp_path, name):
  workdir.write_config(tmp_path, schema.Config())
  changed = _changed(**{name: HARD[name], 'train__eval_every': 3})
  with pytest.raises(errors.UserError) as caught:
    workdir.check_config(tmp_path, changed, lambda line: None)
  text = str(caught.value)
  section, field = name.split('__')
  was = getattr(getattr(schema.Config(), section), field)
  assert f'{section}.{field} was {was!r}, is now {HARD[name]!r}' in text
  assert 'eval_every' not in text and str(tmp_path) in text


def test_every_free_name_is_a_field():
  names = {name for name, _ in schema.fields()}
  sections = {f'{section}.' for section in schema.SECTIONS}
  assert set(workdir.FREE) <= names | sections


def test_the_config_survives(tmp_path):
  config = _changed(train__steps=9, data__path='sea')
  workdir.write_config(tmp_path, config)
  assert workdir.read_config(tmp_path) == config
  assert [p.name for p in tmp_path.iterdir()] == [workdir.CONFIG]
  workdir.check_config(tmp_path, config, pytest.fail)


def test_no_config_and_a_damaged_one(tmp_path):
  workdir.check_config(tmp_path, schema.Config(), pytest.fail)
  with pytest.raises(errors.UserError, match='not a workdir'):
    workdir.read_config(tmp_path)
  for content in (b'{"train": ', b'\xff\xfe{}'):
    (tmp_path / workdir.CONFIG).write_bytes(content)
    with pytest.raises(errors.IntegrityError, match='is damaged'):
      workdir.read_config(tmp_path)
