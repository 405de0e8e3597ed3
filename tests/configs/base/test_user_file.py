"""What is wrong in a user's config is said with its line, and what is meant."""

import os
import subprocess
import sys

import pytest
import support

from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.configs.base import user_file

MINE = """\
from paraxis.configs import schema


def get_config():
  config = schema.default()
  {}
  return config
"""


@pytest.mark.parametrize(
  'line, words',
  [
    ('config.train.stesp = 3', 'mine.py:6: AttributeError | "steps"'),
    ('config.steps = 3', 'mine.py:6: | There is config.train.steps.'),
    ('config.train.learning_rate = 3', 'config.optimizer.learning_rate'),
    ('config.trian.steps = 3', 'mine.py:6: | "train"'),
    ('config["modle"]', 'mine.py:6: KeyError | "model"'),
    ('config.model.update(d_modl=3)', 'mine.py:6: KeyError | "d_model"'),
    ('config.train.steps = 2.5', "mine.py:6: TypeError: | 'steps'"),
    ('config.train.steps = 0', 'mine.py:6: train.steps=0 is below'),
    ('config.model.norm = "rms"', "mine.py:6: model.norm='rms' | rmsnorm"),
    ('config.extra.decay = 1', 'mine.py:6: AttributeError | decay'),
    ('schema.declare_extra(config, 1)', 'mine.py:6: extra is declared by 1'),
    ('1 / 0', 'mine.py:6: ZeroDivisionError: division by zero'),
    ('import no_such', 'mine.py:6: ModuleNotFoundError'),
    ('raise SystemExit(3)', 'mine.py:6: SystemExit: 3'),
    ('x = = 3', 'mine.py:6: SyntaxError: invalid syntax'),
    ('return 3', 'returns int, not a ConfigDict'),
  ],
)
def test_the_line_of_a_wrong_config(line, words, tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(MINE.format(line))
  with support.refused('--config=', *words.split(' | ')) as _:
    command_line.load(str(path))


def test_lists_of_fields_are_left_out(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(MINE.format('config.train.stesp = 3'))
  with pytest.raises(errors.UserError) as caught:
    command_line.load(str(path))
  assert 'batch_size' not in str(caught.value)


def test_a_line_that_is_not_the_only_one_is_not_named(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(MINE.format('config.train.steps = 5; config.train.steps = 0'))
  assert user_file.assigned(path, 'train.steps') == f'{path}:6'
  path.write_text('steps = 1\n' + MINE.format('config.train.steps = 0'))
  with support.refused('mine.py: train.steps=0'):
    command_line.load(str(path))


def test_an_edited_file_is_read_anew(tmp_path, monkeypatch):
  """Within its second, and of the same size: a .pyc would count as its own."""
  monkeypatch.setattr(sys, 'dont_write_bytecode', False)
  path = tmp_path / 'mine.py'
  for steps in (3, 4):
    path.write_text(MINE.format(f'config.train.steps = {steps}'))
    os.utime(path, (10**9, 10**9))
    assert command_line.load(str(path)).train.steps == steps


def test_lines_of_ours_are_not_the_users():
  command_line.load('quickstart')
  try:
    command_line.find_config('no_such')
  except errors.UserError as e:
    assert user_file.place(e) == ''


def test_a_config_that_imports_jax_gets_its_devices(tmp_path):
  """jax reads JAX_PLATFORMS when it is imported: here before the flags."""
  path = tmp_path / 'mine.py'
  path.write_text('import jax\n' + MINE.format('pass'))
  code = f"""
import os
os.environ.pop('JAX_PLATFORMS', None)
os.environ['XLA_FLAGS'] = ''
from paraxis.configs.base import command_line
command_line.load({str(path)!r})
command_line.prepare_devices(3)
import jax
print(jax.config.jax_platforms, len(jax.devices()))
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout == 'cpu 3\n'
