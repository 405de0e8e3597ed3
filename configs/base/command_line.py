"""Flags, config files and exit codes: what every command shares.

    paraxis COMMAND --config=configs/quickstart.py --config.train.steps=50

Conventions of absl and ml_collections; nothing here imports jax. A config
file is Python and is executed: the user names it, no checkpoint ever does.
"""

import glob
import importlib.util
import os
import pathlib
import sys
import traceback

from absl import flags
import ml_collections
from ml_collections import config_flags

from paraxis.configs import schema
from paraxis.configs.base import errors

FOLDER = pathlib.Path(__file__).resolve().parents[1]


def find_config(name):
  """Path of a config: a file, or the name of one that ships with paraxis."""
  path = pathlib.Path(name)
  if path.is_file():
    return path
  shipped = FOLDER / f'{path.stem}.py'
  if str(path.parent) in ('.', 'configs') and shipped.is_file():
    return shipped
  names = [p.stem for p in papers()]
  raise errors.UserError(
    f'--config={name}: no such file; configs that ship with paraxis: '
    f'{", ".join(names)}.' + schema.suggest(path.stem, names)
  )


def papers():
  """Files in configs/ that define get_config, sorted."""
  return [
    p
    for p in sorted(FOLDER.glob('*.py'))
    if '\ndef get_config(' in p.read_text(encoding='utf-8')
  ]


def _one_line(error):
  return ' '.join(f'{type(error).__name__}: {error}'.split())


def load_module(name):
  """Executes a config file; UserError if it defines no get_config."""
  path = find_config(name)
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as e:
    raise errors.UserError(
      f'--config={name}: {path} fails with {_one_line(e)}'
    ) from e
  if not hasattr(module, 'get_config'):
    raise errors.UserError(f'--config={name}: {path} defines no get_config().')
  return module


def load(name):
  """A config's ConfigDict, checked and locked."""
  module = load_module(name)
  try:
    config = module.get_config()
  except errors.UserError:
    raise
  except (Exception, SystemExit) as e:
    raise errors.UserError(
      f'--config={name}: get_config() fails with {_one_line(e)}'
    ) from e
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.UserError(
      f'--config={name}: get_config() returns {type(config).__name__}, not '
      'a ConfigDict.'
    )
  schema.view(config)
  return config.lock()


def _take_config(argv):
  """Splits --config=NAME (or --config NAME) off: -> (NAME or None, rest)."""
  name, rest, skip = None, [], False
  for i, arg in enumerate(argv):
    if skip:
      skip = False
    elif arg in ('--config', '-config'):
      name, skip = (argv[i + 1] if i + 1 < len(argv) else ''), True
    elif arg.startswith(('--config=', '-config=')):
      name = arg.split('=', 1)[1]
    else:
      rest.append(arg)
  return name, rest


def _check_keys(argv, config):
  valid = [n for n, _ in schema.fields()]
  for arg in argv:
    head = arg.split('=', 1)[0].lstrip('-')
    head = head.removeprefix('no') if head.startswith('noconfig.') else head
    key = head.removeprefix('config.')
    if not head.startswith('config.') or key in valid:
      continue
    if key in schema.SECTIONS:
      raise errors.UserError(
        f'--config.{key} is a section; name a field of it.'
      )
    raise errors.UserError(
      f'unknown config key {key}.' + schema.suggest(key, valid)
    )


def parse(argv, define, config=None):
  """Parses a command's arguments.

  Args:
    argv: arguments after the command's name.
    define: called with a FlagValues to define the command's own flags, or None.
    config: ConfigDict that --config.x.y= overrides; None: the one of --config=.

  Returns:
    (flags, config dictionary or None, positional arguments).

  Raises:
    UserError: an unknown flag or config key, or a value of the wrong type.
  """
  values = flags.FlagValues()
  if define:
    define(values)
  name, rest = _take_config(list(argv))
  if name is not None and config is None:
    config = load(name)
  if config is not None:
    _check_keys(rest, config)
    config = config.copy_and_resolve_references()
    config.lock()
  elif any(a.lstrip('-').startswith('config.') for a in rest):
    raise errors.UserError('--config.x.y=value needs --config=FILE first.')
  try:
    if config is not None:
      config_flags.DEFINE_config_dict(
        'config', config, flag_values=values, sys_argv=rest
      )
    left = values(['paraxis', *rest])[1:]
  except flags.Error as e:
    raise errors.UserError(' '.join(str(e).split())) from e
  result = values['config'].value if config is not None else None
  return values, result, left


_ACCELERATORS = ('/dev/accel*', '/dev/vfio/*', '/dev/nvidia*', '/dev/kfd')


def prepare_devices(count):
  """Before jax starts: `count` virtual CPU devices; 0: what the machine has.

  A machine without accelerators then shows 8 virtual devices.
  """
  flag = '--xla_force_host_platform_device_count'
  given = os.environ.get('XLA_FLAGS', '')
  if count:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    kept = [f for f in given.split() if not f.startswith(flag)]
    os.environ['XLA_FLAGS'] = ' '.join([*kept, f'{flag}={count}'])
  elif flag not in given:
    os.environ['XLA_FLAGS'] = f'{given} {flag}=8'.strip()
  if not count and not any(map(glob.glob, _ACCELERATORS)):
    # libtpu may be here to compile with; without a TPU it warns at length.
    if importlib.util.find_spec('libtpu'):
      os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')


def run(command, argv):
  """Runs command(argv) -> exit code; prints one clear line for every error."""
  try:
    return command(argv) or errors.EXIT_OK
  except errors.UserError as e:
    print(f'paraxis: {e}', file=sys.stderr)
    return errors.EXIT_USER
  except errors.IntegrityError as e:
    print(f'paraxis: {e}', file=sys.stderr)
    return errors.EXIT_INTEGRITY
  except BrokenPipeError:  # the reader of a pipe, such as head, went away
    sys.stderr.close()
    return errors.EXIT_CRASH
  except KeyboardInterrupt:
    print('paraxis: interrupted', file=sys.stderr)
    return errors.EXIT_INTERRUPTED
  except Exception as e:
    traceback.print_exc()
    print(f'paraxis: crashed: {type(e).__name__}: {e}', file=sys.stderr)
    return errors.EXIT_CRASH


def help_fields():
  """A table of every config field: name, default, meaning, valid values."""
  lines = []
  for name, f in schema.fields():
    extra = f.metadata['choices']
    extra = f' [{" | ".join(extra)}]' if extra else ''
    lines.append(f'  {name} = {f.default!r}\n      {f.metadata["doc"]}{extra}')
  return '\n'.join(lines)
