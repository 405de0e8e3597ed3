"""The commands: what they accept, what they print, how they end."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import support

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.run import hosts

TINY = """
  from paraxis.configs import schema
  def get_config():
    config = schema.default()
    config.mesh.data = 8
    config.model.vocab_size = 259
    config.model.d_model, config.model.d_ff = 8, 16
    config.model.num_layers, config.model.num_heads = 1, 2
    config.data.path, config.data.tokenizer = {text!r}, 'bytes'
    config.data.sequence_length = 32
    config.data.cache_dir = {cache!r}
    config.data.prefetch = 0
    config.train.steps = 2
    return config
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
  """A config file over a few hundred words; jax's settings stay as they are."""
  from paraxis.train.run import compiling

  monkeypatch.setattr(compiling, 'use_cache', lambda: None)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  text = tmp_path / 'text' / 'song.txt'
  text.parent.mkdir()
  verse = '\n\n'.join(
    f'verse {i}: the sea, the sea, the sea.' for i in range(999)
  )
  text.write_text(verse)
  path = tmp_path / 'tiny.py'
  cache = str(tmp_path / 'cache')
  path.write_text(textwrap.dedent(TINY.format(text=str(text), cache=cache)))
  return path


def _python(*arguments, **options):
  return subprocess.run(
    [sys.executable, *arguments], capture_output=True, text=True, **options
  )


LIGHT = [
  [],
  ['--help'],
  ['papers'],
  ['papers', 'quickstart'],
  ['data', 'list'],
  ['train', '--helpconfig'],
  ['train', '--config=quickstart', '--print_config', '--config.train.steps=7'],
  *([*name.split(), '--help'] for name in cli.COMMANDS),
]


def test_light_commands_do_not_start_jax():
  code = f"""
    import sys
    from paraxis.train import cli
    for argv in {LIGHT!r}:
      code = cli.main(argv)
      heavy = {{'jax', 'numpy', 'flax', 'grain'}} & set(sys.modules)
      assert code == 0 and not heavy, (argv, code, heavy)
    import paraxis.sharding.mesh  # the check can fail
    assert 'jax' in sys.modules
  """
  done = _python('-c', textwrap.dedent(code))
  assert done.returncode == 0, done.stderr
  assert '"steps": 7' in done.stdout


def test_the_module_is_the_train_command(capsys):
  done = _python('-m', 'paraxis.train', '--help')
  assert cli.main(['train', '--help']) == 0
  assert done.stdout == capsys.readouterr().out
  assert '--workdir' in done.stdout and '--process_id' in done.stdout


def test_help_names_every_command(capsys):
  assert cli.main([]) == cli.main(['--help']) == 0
  shown = capsys.readouterr().out
  for name, command in cli.COMMANDS.items():
    assert f'  {name} ' in shown and command.summary in shown


def test_print_config_is_the_config(capsys):
  argv = ['train', '--config=quickstart', '--print_config']
  assert cli.main([*argv, '--config.data.path=here']) == 0
  config = schema.from_json(capsys.readouterr().out)
  assert config.data.path == 'here' and config.model.d_model == 160


def test_helpconfig_lists_the_fields(capsys):
  assert cli.main(['train', '--helpconfig']) == 0
  shown = capsys.readouterr().out
  assert all(f'  {name} = ' in shown for name, _ in schema.fields())


QUICK = ['train', '--config=quickstart']


@pytest.mark.parametrize(
  'argv, words',
  [
    ([*QUICK, '--workdir=W', '--mesh=dta=2'], "Did you mean 'data'?"),
    ([*QUICK, '--workdir=W', '--mesh=data=x'], "is 'x', not a number"),
    ([*QUICK, '--workdir=W', '--devices=-1'], 'devices'),
    ([*QUICK, '--workdir=W', '--process_id=1'], 'not HOST:PORT'),
    (['reproduce'], 'reproduce what?'),
    (['reproduce', 'quikstart'], "Did you mean 'quickstart'?"),
    (['reproduce', 'quickstart', '--config=quickstart'], 'does not read it'),
    (['plot'], '--workdir is missing'),
    (['plot', 'W'], 'write --workdir=W'),
    (['plot', '--workdir=W'], 'metrics.jsonl does not exist'),
    (['data'], 'paraxis data fetch'),
    (['data', 'fetsh'], "Did you mean 'fetch'?"),
    (['data', 'fetch', '--skip=nothing'], '--skip=nothing'),
    (['papers', 'zebra'], "no paper mentions 'zebra'"),
    (['doctor', '--mesh=data=3'], 'has 3 places for 8 devices'),
  ],
)
def test_bad_input_is_one_line(argv, words, capsys, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'cache'))
  from paraxis.train.run import compiling

  monkeypatch.setattr(compiling, 'use_cache', lambda: None)
  workdir = tmp_path / 'run'
  assert cli.main([a.replace('=W', f'={workdir}') for a in argv]) == 2
  shown = capsys.readouterr().err
  assert words in shown and shown.count('\n') == 1
  assert not workdir.exists()


def test_training_ends_with_the_comparison(tiny, tmp_path, capsys):
  argv = ['train', f'--config={tiny}', f'--workdir={tmp_path / "run"}']
  assert cli.main(argv) == 0
  shown = capsys.readouterr().out
  at = shown.index('held-out bits per byte')
  assert (
    shown.index('gzip -9') > at and '  song ' in shown and '  all ' in shown
  )
  assert json.loads((tmp_path / 'run' / 'config.json').read_text())
  # Done already: the same command evaluates and says the same.
  assert cli.main(argv) == 0
  again = capsys.readouterr().out
  assert again[again.index('held-out') :] == shown[at:]


@pytest.mark.parametrize('process, lines', [(-1, 2), (0, 2), (1, 0)])
def test_one_process_prints(
  tiny, tmp_path, capsys, monkeypatch, process, lines
):
  from paraxis.train import loop
  from paraxis.train.run import evaluate

  found = evaluate.Evaluation(1.5, {'song': 1.5}, 100)
  result = dict(step=2, stopped='', loss=1.0, evaluation=found)
  monkeypatch.setattr(loop, 'run', lambda *a: result)
  monkeypatch.setattr(hosts, 'connect', lambda *a: None)
  argv = ['train', f'--config={tiny}', f'--workdir={tmp_path}']
  if process >= 0:
    argv += ['--coordinator_address=localhost:1', '--num_processes=2']
    argv += [f'--process_id={process}']
  monkeypatch.setattr(cli, '_against_gzip', lambda *a: 'table')
  assert cli.main(argv) == 0
  assert len(capsys.readouterr().out.splitlines()) == lines


def test_a_stopped_run_exits_75(tiny, tmp_path, monkeypatch):
  from paraxis.train import loop

  result = dict(step=1, stopped='SIGTERM', loss=1.0, evaluation=None)
  monkeypatch.setattr(loop, 'run', lambda *a: result)
  code = cli.main(['train', f'--config={tiny}', f'--workdir={tmp_path}'])
  assert code == errors.EXIT_PREEMPTED == 75


def test_gzip_is_compared_only_on_the_same_text_of_a_bearable_size():
  from paraxis.train.run import evaluate

  config = schema.Config()
  part = schema.Config(train=schema.Train(eval_batches=1))
  small = evaluate.Evaluation(2.0, {'code': 2.0}, 100)
  large = small._replace(n_bytes=cli.COMPARED_BYTES + 1)
  assert 'leaves text out' in cli._against_gzip(part, small)
  assert 'are more than 20,000,000' in cli._against_gzip(config, large)
  assert 'code' in cli._against_gzip(config, small)


@pytest.mark.parametrize(
  'address, processes, process, words',
  [
    ('', 2, 0, 'not HOST:PORT'),
    ('host', 2, 0, 'not HOST:PORT'),
    ('host:http', 2, 0, 'not HOST:PORT'),
    ('host:70000', 2, 0, 'not HOST:PORT'),
    ('host:1234', 2, 2, '--process_id=2 is not in 0 .. 1'),
    ('host:1234', 0, 0, 'of --num_processes=0'),
    ('host:1234', 2, -1, '--process_id=-1'),
  ],
)
def test_wrong_hosts(address, processes, process, words):
  with support.refused(words):
    hosts.check(address, processes, process)


def test_right_hosts():
  assert hosts.check('host:1234', 2, 1) and hosts.check('[::1]:1', 1, 0)
  assert not hosts.check('', 0, -1)


def test_nobody_listens():
  """A worker without process 0 says so, before jax could abort."""
  with pytest.raises(errors.UserError, match='was not to be reached for 0 s'):
    hosts.connect('127.0.0.1:9', 2, 1, patience=0)


@pytest.mark.parametrize(
  'argv, codes', [(['--help'], []), (['trian'], [errors.EXIT_USER])]
)
def test_a_failing_process_of_several_ends_at_once(monkeypatch, argv, codes):
  """Else it waits in jax's exit barrier, and its peers for it."""
  ended = []
  monkeypatch.setattr(hosts, '_connected', True)
  monkeypatch.setattr(hosts, 'exit_now', ended.append)
  cli.main(argv)
  assert ended == codes


def test_two_processes_and_one_fails():
  """An uncaught exception on one process ends the other within seconds."""
  code = """
    import os, sys, socket
    from paraxis.train.run import hosts
    from paraxis.configs.base import command_line
    command_line.prepare_devices(1)
    port, process = sys.argv[1:]
    hosts.connect(f'127.0.0.1:{port}', 2, int(process))
    import jax
    assert jax.process_count() == 2 and len(jax.devices()) == 2
    if process == '1':
      raise RuntimeError('one of two')
    from jax.experimental import multihost_utils
    for _ in range(10**6):
      multihost_utils.process_allgather(jax.numpy.ones(()))
  """
  import socket

  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = str(free.getsockname()[1])
  arguments = [sys.executable, '-c', textwrap.dedent(code), port]
  both = [
    subprocess.Popen([*arguments, p], stderr=subprocess.PIPE, text=True)
    for p in '01'
  ]
  said = [process.communicate(timeout=100)[1] for process in both]
  assert both[1].returncode == errors.EXIT_CRASH and 'one of two' in said[1]
  assert both[0].returncode != 0
