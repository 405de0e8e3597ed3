"""The commands: what they accept, what they print, how they end."""

import importlib.metadata
import json
import os
import pathlib
import pwd
import re
import subprocess
import sys
import textwrap

import jax
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train import cli
from paraxis.train.run import hosts

pytestmark = pytest.mark.usefixtures('settings_stay')


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
    import paraxis.sharding.rules  # the check can fail
    assert 'jax' in sys.modules
  """
  done = _python('-c', textwrap.dedent(code))
  assert done.returncode == 0, done.stderr
  assert '"steps": 7' in done.stdout


@pytest.mark.parametrize('ends', [0, errors.EXIT_USER])
def test_a_command_within_a_notebook_leaves_it_its_devices(monkeypatch, ends):
  """And those of the commands that the notebook starts after it."""
  seen = []

  def show(argv):
    command_line.prepare_devices(3)
    seen.append((os.environ['XLA_FLAGS'], jax.config.jax_platforms))
    if ends:
      raise errors.UserError('no')

  monkeypatch.setitem(cli.COMMANDS, 'check', show)
  monkeypatch.setenv('XLA_FLAGS', '--a=1')
  monkeypatch.setenv('JAX_PLATFORMS', 'tpu,cpu')
  monkeypatch.delenv('JAX_PLATFORMS')
  before = jax.config.jax_platforms
  assert cli.main(['check']) == ends
  assert seen == [('--a=1 --xla_force_host_platform_device_count=3', 'cpu')]
  assert os.environ['XLA_FLAGS'] == '--a=1'
  assert 'JAX_PLATFORMS' not in os.environ
  assert jax.config.jax_platforms == before


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


@pytest.mark.parametrize('flag', ['--version', '-V'])
def test_version(capsys, flag):
  assert cli.main([flag]) == 0
  found = importlib.metadata.version('paraxis')
  assert capsys.readouterr().out == f'paraxis {found}\n' and found[0].isdigit()


@pytest.mark.parametrize('home', [None, '/'])
def test_no_home(home):
  """HOME unset, as under cron, or /, as in many containers."""
  environment = dict(os.environ)
  for name in ('HOME', 'PARAXIS_CACHE', 'XDG_CACHE_HOME'):
    environment.pop(name, None)
  environment |= {'HOME': home} if home else {}
  where = 'from paraxis.configs.base import cache; print(cache.root())'
  done = _python('-c', where, env=environment)
  root = home or pwd.getpwuid(os.getuid()).pw_dir
  assert done.stdout.strip() == os.path.join(root, '.cache/paraxis')
  done = _python('-m', 'paraxis.train.cli', 'data', 'list', env=environment)
  assert done.returncode == 0 and 'fixture' in done.stdout and not done.stderr


@pytest.mark.parametrize(
  'argv',
  [['train', '--config=quickstart', '--workdir=W'], ['doctor']],
)
def test_a_platform_that_is_not_there(tmp_path, argv):
  """jax itself refuses: libtpu is missing, or finds no TPU."""
  run = tmp_path / 'run'
  argv = [a.replace('=W', f'={run}') for a in argv]
  environment = dict(os.environ, JAX_PLATFORMS='tpu', TPU_SKIP_MDS_QUERY='1')
  done = _python('-m', 'paraxis.train.cli', *argv, env=environment)
  assert done.returncode == errors.EXIT_USER
  last = done.stderr.splitlines()[-1]
  assert last.startswith('paraxis: JAX_PLATFORMS=tpu: jax cannot start it')
  assert 'Traceback' not in done.stderr and not run.exists()


def test_a_learning_rate_without_a_model(tiny, tmp_path, capsys):
  """Parameters leave float32 at once: the run ends as damaged numbers do."""
  argv = ['train', f'--config={tiny.file}', f'--workdir={tmp_path / "run"}']
  argv += [
    f'--config.{field}'
    for field in (
      'optimizer.learning_rate=1e6',
      'optimizer.warmup_steps=0',
      'train.eval_batches=0',
    )
  ]
  assert cli.main(argv) == errors.EXIT_INTEGRITY == 14
  last = capsys.readouterr().err.splitlines()[-1]
  assert '4 of 6 steps were skipped' in last and 'learning_rate' in last


def test_print_config_is_the_config(capsys):
  argv = ['train', '--config=quickstart', '--print_config']
  assert cli.main([*argv, '--config.data.path=here']) == 0
  config = schema.from_json(capsys.readouterr().out)
  assert config.data.path == 'here' and config.model.d_model == 160


def test_helpconfig_lists_the_fields(capsys):
  assert cli.main(['train', '--helpconfig']) == 0
  shown = capsys.readouterr().out
  assert all(f'  {name} = ' in shown for name, _ in schema.fields())


def test_training_ends_with_the_comparison(tiny, tmp_path, capsys):
  argv = ['train', f'--config={tiny.file}', f'--workdir={tmp_path / "run"}']
  argv += ['--config.train.steps=2', '--config.train.eval_batches=0']
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


def test_a_dry_run_prints_the_header_and_leaves_nothing(tiny, tmp_path, capsys):
  assert cli.main(['train', f'--config={tiny.file}', '--dry_run']) == 0
  shown = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in shown[-10:]] == [
    'model', 'devices', 'numbers', 'kernels', 'step', 'data', 'held', 'compute',
    'memory', 'checkpoints',
  ]  # fmt: skip
  assert shown[-1].endswith('none without --workdir')
  where = f'--workdir={tmp_path / "run"}'
  assert cli.main(['train', f'--config={tiny.file}', '--dry_run', where]) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  assert last.endswith(f'in {tmp_path / "run"}')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('flags, n', [([], 1), (['--mesh=data=2'], 2)])
def test_the_config_of_the_readme_trains_on_as_many_places(tmp_path, flags, n):
  """Without --devices, where no accelerator is; it is one place itself."""
  root = pathlib.Path(__file__).resolve().parents[2]
  page = (root / 'README.md').read_text('utf-8')
  (text,) = re.findall(r'```python\n(.*?)```', page, re.S)
  (tmp_path / 'mine.py').write_text(text)
  command = 'train', '--config=mine.py', '--dry_run', *flags
  done = subprocess.run(
    [sys.executable, '-m', 'paraxis.train.cli', *command], cwd=tmp_path,
    env=os.environ | dict(XLA_FLAGS='', JAX_PLATFORMS='cpu'),
    capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert f': {n} x cpu' in done.stdout


@pytest.mark.parametrize('process, lines', [(-1, 2), (0, 2), (1, 0)])
def test_one_process_prints(
  tiny, tmp_path, capsys, monkeypatch, process, lines
):
  from paraxis.sharding.meter import compiling
  from paraxis.train import loop
  from paraxis.train.claims import held_out
  from paraxis.train.run import evaluate

  shared = []
  monkeypatch.setattr(compiling, 'share_cache', shared.append)
  found = evaluate.Evaluation(1.5, {'song': 1.5}, 100)
  result = dict(step=2, stopped='', loss=1.0, evaluation=found)
  monkeypatch.setattr(loop, 'run', lambda *a, **how: result)
  monkeypatch.setattr(hosts, 'connect', lambda *a: None)
  argv = ['train', f'--config={tiny.file}', f'--workdir={tmp_path}']
  if process >= 0:
    argv += ['--coordinator_address=localhost:1', '--num_processes=2']
    argv += [f'--process_id={process}']
  monkeypatch.setattr(held_out, 'against_gzip', lambda *a: 'table')
  assert cli.main(argv) == 0
  assert len(capsys.readouterr().out.splitlines()) == lines
  assert len(shared) == (process >= 0)  # by several


def test_a_stopped_run_exits_75(tiny, tmp_path, monkeypatch):
  from paraxis.train import loop

  result = dict(step=1, stopped='SIGTERM', loss=1.0, evaluation=None)
  monkeypatch.setattr(loop, 'run', lambda *a, **how: result)
  code = cli.main(['train', f'--config={tiny.file}', f'--workdir={tmp_path}'])
  assert code == errors.EXIT_PREEMPTED == 75


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
