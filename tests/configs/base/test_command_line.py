"""Flags, config files and exit codes."""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors

FLAGS = ((str, 'workdir=RUN', '', 'where'),)


def _parse(*argv):
  return command_line.parse(argv, FLAGS)


def test_flags_config_and_overrides():
  values, config, left = _parse(
    '--config=quickstart',
    '--workdir=a',
    'word',
    '--config.train.steps=7',
    '--config.optimizer.learning_rate=0.5',
    '--config.data.path=x y',
    '--noconfig.model.tied_embedding',
  )
  assert values.workdir == 'a' and left == ['word']
  view = schema.view(config)
  assert view.train.steps == 7 and view.optimizer.learning_rate == 0.5
  assert view.data.path == 'x y' and view.model.tied_embedding is False
  assert _parse('--config', 'quickstart')[1].train.steps == 480


def test_a_value_is_no_key():
  """Without a dash, as of '--prompt', it is text; with one it is a field."""
  for more in ((), ('--config=quickstart',)):
    values, _, _ = _parse(*more, '--workdir', 'config.py holds')
    assert values.workdir == 'config.py holds'
  with support.refused('unknown config key py'):
    _parse('--config=quickstart', '-config.py=3')
  with support.refused('needs --config=FILE first'):
    _parse('--config.train.steps=3')


def test_paths_begin_at_home(tmp_path, monkeypatch):
  """bash leaves ~ as it is in --flag=~/x."""
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'mine.py').write_text(
    'from paraxis.configs import schema\n\n\n'
    'def get_config():\n  return schema.default()\n'
  )
  rows = ('path', 'out=FILE', None, 'one'), ('paths', 'run=RUN', [], 'several')
  argv = ['--config=~/mine.py', '--out=~/a', '--run=~', '--run', 'b~/~']
  values, config, _ = command_line.parse(argv, rows)
  assert config.train.steps == schema.Config().train.steps
  assert values.out == f'{tmp_path}/a' and values.run == [f'{tmp_path}', 'b~/~']
  assert command_line.parse([], rows)[0].out is None
  with support.refused('--out=~nobody_here/a', '~nobody_here is no home'):
    command_line.parse(['--out=~nobody_here/a'], rows)


def test_without_a_config():
  values, config, left = _parse('--workdir', 'a')
  assert config is None and values.workdir == 'a' and left == []


@pytest.mark.parametrize(
  'argv, words',
  [
    (['--config=quickstrat'], "Did you mean 'quickstart'?"),
    (['--config='], 'no such file'),
    (['--config'], 'no such file'),
    (['--config=quickstart', '--config.train.stesp=3'], "'train.steps'?"),
    (['--wrokdir=a'], 'workdir'),
  ],
)
def test_a_wrong_argument_is_one_line(argv, words):
  with support.refused(words):
    _parse(*argv)


def test_a_file_without_its_suffix_is_meant(tmp_path, monkeypatch):
  """Rather than a name that ships and looks like it."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').touch()
  with support.refused('--config=mine: no such file', 'Did you mean mine.py?'):
    _parse('--config=mine')


def test_a_config_that_cannot_be_looked_up_is_one_line(monkeypatch):
  for name in ('a' * 300, 'a' * 254, f'configs/{"a" * 254}'):
    with support.refused(f'--config={name}: File name too long.'):
      command_line.find_config(name)

  def locked(path):
    raise PermissionError(13, 'Permission denied', str(path))

  monkeypatch.setattr(pathlib.Path, 'is_file', locked)
  with support.refused('--config=/locked/a.py: Permission denied.'):
    command_line.find_config('/locked/a.py')


MINE = """
from paraxis.configs import schema

def get_config():
  config = schema.default()
  {}
  return config
"""


@pytest.mark.parametrize(
  'text, words',
  [
    ('import no_such_module\n', 'ModuleNotFoundError'),
    (MINE.format('config.train.stesp = 3'), 'stesp'),
    (MINE.format('config.train.steps = 0'), 'train.steps=0 is below'),
  ],
)
def test_a_wrong_config_file_is_one_line(tmp_path, text, words):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  with support.refused(words):
    command_line.load(str(path))


def _raise(error):
  def command(argv):
    raise error

  return command


@pytest.mark.parametrize(
  'command, code, words',
  [
    (lambda argv: None, 0, ''),
    (lambda argv: 75, 75, ''),
    (_raise(errors.UserError('what')), 2, 'paraxis: what\n'),
    (_raise(errors.IntegrityError('rot')), 14, 'paraxis: rot\n'),
    (_raise(RuntimeError('oh')), 13, 'paraxis: crashed: RuntimeError: oh\n'),
    (_raise(KeyboardInterrupt()), 130, 'paraxis: interrupted\n'),
  ],
)
def test_exit_codes(capsys, command, code, words):
  assert command_line.run(command, []) == code
  shown = capsys.readouterr().err
  assert shown.endswith(words)
  # Only a crash shows a traceback.
  assert ('Traceback' in shown) == (code == 13)


def _piped(code):
  """A process whose command_line.run calls `command`, its output in a pipe."""
  text = f"""
    import os, sys, time
    from paraxis.configs.base import command_line
    {code}
    sys.exit(command_line.run(command, []))
  """
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(text)],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def test_a_pipe_gets_each_line_as_it_is_printed():
  with _piped('command = lambda argv: (print("a line"), time.sleep(99))') as p:
    assert p.stdout.readline() == 'a line\n'
    assert p.poll() is None  # it sleeps: nothing was flushed at its end
    p.kill()


def test_a_reader_that_goes_away_is_no_crash():
  forever = 'command = lambda argv: [print(i) for i in range(10**9)]'
  with _piped(forever) as p:
    assert p.stdout.readline() == '0\n'
    p.stdout.close()
    assert p.stderr.read() == '' and p.wait() == errors.EXIT_PIPE


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full')
def test_a_full_disk_is_one_line():
  full = 'os.dup2(os.open("/dev/full", os.O_WRONLY), 1); command = print'
  with _piped(full) as p:
    said = p.stderr.read()
    assert p.wait() == errors.EXIT_USER
  assert said == (
    'paraxis: stdout cannot be written: No space left on device.\n'
  )


def test_a_backend_that_cannot_start_is_one_line(capsys, monkeypatch):
  def backends():
    advice = "(set JAX_PLATFORMS='' to choose)"
    raise RuntimeError(f'no such\n backend {advice}')

  monkeypatch.setenv('JAX_PLATFORMS', 'garbage')
  named = backends.__code__.replace(co_filename='jax/xla_bridge.py')
  failing = types.FunctionType(named, {'RuntimeError': RuntimeError})
  assert command_line.run(lambda argv: failing(), []) == errors.EXIT_USER
  shown = capsys.readouterr().err
  assert shown.count('\n') == 1 and 'JAX_PLATFORMS=garbage: jax cannot' in shown
  assert 'no such backend). Unset it' in shown
  monkeypatch.delenv('JAX_PLATFORMS')
  assert command_line.run(lambda argv: failing(), []) == errors.EXIT_CRASH


@pytest.mark.parametrize('count', [0, 1])
def test_an_unknown_platform_is_refused_before_jax(monkeypatch, count):
  """Also where virtual CPU devices would replace it."""
  monkeypatch.setenv('XLA_FLAGS', os.environ.get('XLA_FLAGS', ''))
  for text, words in (('garbage', 'no platform'), ('cpu,cudaa', "'cuda'?")):
    monkeypatch.setenv('JAX_PLATFORMS', text)
    with support.refused(f'JAX_PLATFORMS={text}: ', words):
      command_line.prepare_devices(count)
  plugin = lambda value: importlib.metadata.EntryPoint('x', value, '')
  found = [plugin('jax_plugins.xla_cuda12')]
  monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: found)
  with support.refused('JAX_PLATFORMS=cpu,cudaa: '):
    command_line.prepare_devices(count)
  found.append(plugin('jax_plugins.other'))  # which may know that name
  command_line.prepare_devices(count)


def test_virtual_devices_and_another_platform(monkeypatch):
  """One of the two is meant; `check` takes its one device whatever is set."""
  rows = [('count', 'devices=N', 8, '')]
  for text in ('tpu', 'cuda,tpu'):
    monkeypatch.setenv('JAX_PLATFORMS', text)
    with support.refused('--devices=2 ', f'JAX_PLATFORMS={text} '):
      command_line.parse(['--devices=2'], rows)
    assert command_line.parse([], rows)[0].devices == 8
    assert command_line.parse(['--devices=0'], rows)[0].devices == 0
  for text in ('', 'cpu', 'tpu,cpu'):
    monkeypatch.setenv('JAX_PLATFORMS', text)
    assert command_line.parse(['--devices=2'], rows)[0].devices == 2
    with support.refused('--devices=3000000000 ', '4096 virtual'):
      command_line.parse(['--devices=3000000000'], rows)


def test_a_platform_that_is_not_here(tmp_path):
  """doctor says so instead of half of its report."""
  done = subprocess.run(
    [sys.executable, '-m', 'paraxis.train.cli', 'doctor'],
    env=os.environ | dict(JAX_PLATFORMS='cuda'), capture_output=True, text=True,
  )  # fmt: skip
  if done.returncode == 0:
    pytest.skip('it is here')
  assert done.returncode == errors.EXIT_USER and not done.stdout
  assert done.stderr.count('\n') == 1
  assert 'JAX_PLATFORMS=cuda: jax cannot start it here' in done.stderr
  assert 'AssertionError' not in done.stderr


@pytest.mark.parametrize(
  'given, count, wanted',
  [
    ('', 0, '--xla_force_host_platform_device_count=8'),
    ('--a=1', 3, '--a=1 --xla_force_host_platform_device_count=3'),
    (
      '--xla_force_host_platform_device_count=2',
      0,
      '--xla_force_host_platform_device_count=2',
    ),
    (
      '--xla_force_host_platform_device_count=2 --a=1',
      4,
      '--a=1 --xla_force_host_platform_device_count=4',
    ),
  ],
)
def test_devices(monkeypatch, given, count, wanted):
  monkeypatch.setenv('XLA_FLAGS', given)
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu')
  command_line.prepare_devices(count)
  assert os.environ['XLA_FLAGS'] == wanted
  command_line.prepare_devices(count, otherwise=5)  # where nobody says
  assert os.environ['XLA_FLAGS'] == wanted
  # Virtual devices are the CPU's, whatever else the machine has.
  assert os.environ['JAX_PLATFORMS'] == ('cpu' if count else 'tpu')


@pytest.mark.parametrize(
  'installed, device, wanted',
  [
    ('libtpu', '', 'cpu'), ('jax_cuda13_plugin', '', 'cpu'), ('', '', None),
    ('jax_cuda13_plugin', '/dev/nvidia*', None),
    ('libtpu', '/dev/vfio/*', None),
    ('jax_cuda12_plugin', '/dev/dxg', None),
  ],
)  # fmt: skip
def test_compilers_without_a_device(monkeypatch, installed, device, wanted):
  """What is here to compile with is not started, where its device is not."""
  real = importlib.util.find_spec
  find = lambda name, *more: (
    real(name, *more) if name not in command_line._COMPILERS
    else name if name == installed else None
  )  # fmt: skip
  monkeypatch.setattr(importlib.util, 'find_spec', find)
  monkeypatch.setattr(command_line.glob, 'glob', lambda p: [p] * (p == device))
  monkeypatch.setenv('XLA_FLAGS', '')
  # Set and then taken away, so that it is as before when the test ends.
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu')
  monkeypatch.delenv('JAX_PLATFORMS')
  command_line.prepare_devices(0)
  assert os.environ.get('JAX_PLATFORMS') == wanted


def test_help_lists_every_field():
  text = command_line.help_fields()
  for name, field in schema.fields():
    assert f'  {name} = {field.default!r}\n' in text
    assert field.metadata['doc'] in text
  assert '[cosine | wsd | constant]' in text
