"""Commands, flags, config files and exit codes: what every command shares.

    paraxis COMMAND --config=configs/quickstart.py --config.train.steps=50

Flags are absl's because config overrides are (ml_collections.config_flags):
one parser for both, and --noflag, --flag=false, -flag and values that begin
with '-' keep working, which argparse refuses. Help is generated from the table
that defines the flags. Nothing here imports jax. A config file is Python and is
executed: the user names it, no checkpoint ever does.
"""

from collections.abc import Callable
import functools
import glob
import importlib.util
import os
import pathlib
import re
import sys
import textwrap
import traceback
from typing import Any, NamedTuple

from absl import flags
import ml_collections
from ml_collections import config_flags

from paraxis.configs import schema
from paraxis.configs.base import allocator
from paraxis.configs.base import errors
from paraxis.configs.base import explain
from paraxis.configs.base import extra as extra_lib
from paraxis.configs.base import meant
from paraxis.configs.base import mixers
from paraxis.configs.base import user_file

FOLDER = pathlib.Path(__file__).resolve().parents[1]


def find_config(name):
  """Path of a config: a file, or the name of one that ships with paraxis."""
  path = pathlib.Path(os.path.expanduser(name))
  shipped = FOLDER / f'{path.stem}.py'
  try:
    if path.is_file():
      return path
    if str(path.parent) in ('.', 'configs') and shipped.is_file():
      return shipped
    local = pathlib.Path(f'{name}.py').is_file()
  except OSError as e:  # no permission, a name that is too long
    raise errors.UserError(f'--config={name}: {e.strerror}.') from e
  names = [p.stem for p in papers()]
  close = schema.suggest(path.stem, names)
  raise errors.UserError(
    f'--config={name}: no such file; configs that ship with paraxis: '
    f'{", ".join(names)}.' + (f' Did you mean {name}.py?' if local else close)
  )


def papers():
  """Files in configs/ that define get_config, sorted."""
  has = lambda p: '\ndef get_config(' in p.read_text(encoding='utf-8')
  return [p for p in sorted(FOLDER.glob('*.py')) if has(p)]


def _fails(name, where, error):
  """The UserError of a config that fails, with its line and what may be meant.

  where: what is said if no line of the file is to blame.
  """
  text = user_file.one_line(error)
  if isinstance(error, errors.UserError):
    text = str(error)
  elif key := re.search(r'Error: (?:Key )?["\']?(\w+)["\']?', text):
    full = [n for n, _ in schema.fields() if n.split('.')[-1] == key[1]]
    if full and isinstance(error, (AttributeError, KeyError)):
      text += f' There is config.{" and config.".join(full[:3])}.'
  return user_file.refusal(name, user_file.place(error) or where, text)


def load_module(name):
  """Executes a config file; UserError if it defines no get_config."""
  path = find_config(name)
  extra_lib.forget()
  try:
    module = user_file.execute(path)
  except (Exception, SystemExit) as e:
    raise _fails(name, path, e) from e
  if not hasattr(module, 'get_config'):
    raise errors.UserError(f'--config={name}: {path} defines no get_config().')
  return module


def load(name, module=None):
  """A config's ConfigDict, checked, locked; module: what `load_module` gave."""
  module = module or load_module(name)
  try:
    config = module.get_config()
  except (Exception, SystemExit) as e:
    raise _fails(name, f'{module.__file__}, get_config()', e) from e
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.UserError(
      f'--config={name}: get_config() returns {type(config).__name__}, not '
      'a ConfigDict.'
    )
  try:
    schema.view(config)
  except errors.UserError as e:
    field = re.search(r'[a-z_]+(\.\w+)+', str(e))
    place = user_file.assigned(find_config(name), field[0] if field else '')
    raise user_file.refusal(name, place, e) from e
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


def _check_keys(argv):
  valid = [n for n, _ in schema.fields()]
  for arg in argv:
    head = arg.split('=', 1)[0].lstrip('-')
    head = head.removeprefix('no') if head.startswith('noconfig.') else head
    key = head.removeprefix('config.')
    if not (arg.startswith('-') and head.startswith('config.')) or key in valid:
      continue  # without a dash it is a value, '--prompt config.py'
    if key in (*schema.SECTIONS, extra_lib.NAME):
      raise errors.UserError(
        f'--config.{key} is a section; name a field of it.'
      )
    raise errors.UserError(
      f'unknown config key {key}.' + schema.suggest(key, valid)
    )


class _Maybe(flags.ArgumentParser):
  """--flag, --flag=VALUE or neither: ALL, VALUE, None."""

  def parse(self, argument):
    return {'true': ALL, 'false': None}.get(argument, argument)


ALL = '*'  # value of a 'maybe' flag that is given without one
_KINDS: dict[Any, Callable] = {
  str: flags.DEFINE_string,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  bool: flags.DEFINE_bool,
  list: flags.DEFINE_list,  # values separated by commas
  'maybe': functools.partial(flags.DEFINE, _Maybe(), boolean=True),
  'several': flags.DEFINE_multi_string,  # the flag may be repeated
  'path': functools.partial(flags.DEFINE, user_file.Path()),
  'paths': functools.partial(flags.DEFINE_multi, user_file.Path(), None),
  'count': functools.partial(flags.DEFINE_integer, lower_bound=0),
  'positive': functools.partial(flags.DEFINE_integer, lower_bound=1),
}
CONFIG_FLAGS = (
  (str, 'config=FILE', '', 'a config; paraxis papers lists those shipped'),
  (str, 'config.SECTION.FIELD=VALUE', '', 'changes a field of the config'),
  (bool, 'helpconfig', False, 'print every config field and exit'),
)

_OWN_FILE = (
  str, 'config=FILE', '', 'of a run with mixers of its own: their file, which '
  'is executed',
)  # fmt: skip


def parse(argv, rows=(), overrides=False):
  """Parses a command's arguments.

  Args:
    argv: arguments after the command's name.
    rows: the command's flags, as in `Command.flags`.
    overrides: the configuration is a checkpoint's: --config.x.y= overrides its
      fields, --config= is the file that its own mixers are from.

  Returns:
    (flags, config dictionary or None, positional arguments).

  Raises:
    UserError: an unknown flag or config key, or a value of the wrong type.
  """
  values = flags.FlagValues()
  for row in rows:
    if not isinstance(row, str):
      kind, name, default, text, *short = row
      name = re.match(r'\w+', name)[0]
      _KINDS[kind](
        name, default, text, flag_values=values, short_name=(*short, None)[0]
      )
  own = [name for name in values if len(name) > 1]
  name, rest = _take_config(list(argv))
  config = load(name) if name is not None else None
  if overrides:
    if name is not None and not mixers.OWN and not extra_lib.declared():
      raise errors.UserError(
        'the configuration is taken from the checkpoint, not from --config=, '
        f'and {name} has no mixer of its own; --config.SECTION.FIELD= '
        'overrides a field.'
      )
    config = schema.default(loaded=True)
  if config is not None:
    _check_keys(rest)
    config = config.copy_and_resolve_references()
    config.lock()
  elif any(a.startswith(('--config.', '-config.')) for a in rest):
    raise errors.UserError(
      '--config.x.y=value needs --config=FILE first.'
      + meant.override(rest, own)
    )
  try:
    if config is not None:
      config_flags.DEFINE_config_dict(
        'config', config, flag_values=values, sys_argv=rest
      )
    left = values(['paraxis', *rest])[1:]
  except flags.UnrecognizedFlagError as e:
    meant_as = meant.flag(e.flagname, rest, own, config is not None)
    raise errors.UserError(
      f'unknown argument {e.flagvalue!r} (--help lists all).{meant_as}'
    ) from e
  except (flags.Error, ValueError) as e:
    raise errors.UserError(' '.join(str(e).split())) from e
  if 'devices' in values and values['devices'].present and values.devices:
    explain.check_virtual(values.devices, os.environ.get('JAX_PLATFORMS'))
  result = values['config'].value if config is not None else None
  return values, result, left


class Command(NamedTuple):
  """A command of paraxis: what its help shows, and what runs it.

  Attributes:
    run: (flags, config, words) -> exit code, or None for success.
    name, usage, summary: for help; usage: the arguments of an example.
    flags: rows (kind of _KINDS, 'name=METAVAR', default, help, [letter]) in the
      order of the help, and strings, its headings.
    config: '': --config= is an error. 'optional': run gets a schema.Config or
      None. 'required': a schema.Config. 'overrides': --config= names the file
      of a run's own mixers, which is executed; run gets {'section.field':
      value} of the --config.section.field= given.
    words: the most positional arguments; None: run checks them.
    notes: rows and headings that only the help shows, after the flags.
  """

  run: Callable[[Any, Any, list[str]], int | None]
  name: str
  usage: str
  summary: str
  flags: tuple = ()
  config: str = ''
  words: int | None = 0
  notes: tuple = ()

  def help(self) -> str:
    """The text of --help, at most 80 columns where words allow it."""
    rows = [*self.flags, *self.notes]
    if self.config in ('optional', 'required'):
      rows += CONFIG_FLAGS
    elif self.config:
      rows.append(_OWN_FILE)
    lines = [f'usage: paraxis {self.name} {self.usage}', '', self.summary, '']
    for row in rows:
      if isinstance(row, str):
        lines.append(row)
        continue
      _, name, default, text, *short = row
      name += ''.join(f', -{letter}' for letter in short)
      text += f' (default {default!r})' if default else ''
      lines += textwrap.wrap(
        text,
        80,
        initial_indent=f'  --{name:18}  ',
        subsequent_indent=' ' * 24,
        break_long_words=False,
        break_on_hyphens=False,
      )
    return '\n'.join(line.rstrip() for line in lines).strip()

  def __call__(self, argv):
    """Parses the arguments after the name and runs -> exit code or None."""
    if asks_for_help(argv):
      print(self.help())
      return errors.EXIT_OK
    if self.config and any(a.lstrip('-') == 'helpconfig' for a in argv):
      print(help_fields())
      return errors.EXIT_OK
    overrides = self.config == 'overrides'
    values, config, words = parse(argv, self.flags, overrides)
    if config is not None and not self.config:
      raise errors.UserError('--config: this command does not read it.')
    if self.words is not None and len(words) > self.words:
      raise errors.UserError(
        f'unexpected argument {words[self.words]!r}.'
        + meant.word(words[self.words], self._own(), bool(self.config))
      )
    if self.config == 'required' and config is None:
      raise errors.UserError('--config is missing: --config=configs/FILE.py.')
    if overrides:
      config = config_flags.get_override_values(values['config'])
    elif config is not None:
      config = schema.view(config)
    return self.run(values, config, words)

  def _own(self):
    """Names of its flags."""
    rows = [row for row in self.flags if isinstance(row, tuple)]
    return [re.match(r'\w+', row[1])[0] for row in rows]


def asks_for_help(argv) -> bool:
  """Whether one of the arguments is --help."""
  return any(arg in ('-h', '-help', '--help', '--helpfull') for arg in argv)


_ACCELERATORS = (
  '/dev/accel*', '/dev/vfio/*', '/dev/nvidia*', '/dev/dxg', '/dev/kfd'
)  # fmt: skip
_COMPILERS = 'libtpu', 'jax_cuda13_plugin', 'jax_cuda12_plugin'


def prepare_devices(count, otherwise=8):
  """Before jax starts: `count` virtual CPU devices; 0: what the machine has.

  A machine without accelerators then shows `otherwise` virtual devices. On CPU,
  freed memory is kept (allocator). UserError: an unknown platform in
  JAX_PLATFORMS.
  """
  flag = '--xla_force_host_platform_device_count'
  given = os.environ.get('XLA_FLAGS', '')
  before = os.environ.get('JAX_PLATFORMS')
  explain.check_platforms(before)
  if count:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    kept = [f for f in given.split() if not f.startswith(flag)]
    os.environ['XLA_FLAGS'] = ' '.join([*kept, f'{flag}={count}'])
  elif flag not in given:
    os.environ['XLA_FLAGS'] = f'{given} {flag}={otherwise}'.strip()
  alone = not any(map(glob.glob, _ACCELERATORS))
  if alone and not count and any(map(importlib.util.find_spec, _COMPILERS)):
    # They are here to compile with: without a device libtpu warns, and jax's
    # CUDA plugin fails, after which it compiles nothing.
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  platforms = os.environ.get('JAX_PLATFORMS')
  if platforms == 'cpu' or alone:
    allocator.keep_pages()
  if platforms != before and 'jax' in sys.modules:  # a config imported it
    sys.modules['jax'].config.update('jax_platforms', platforms)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  # Every device calls LAPACK, whose own threads would wait in loops: 25 times
  # the CPU time of a factorisation (train/updates/soap.py).
  os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')


def run(command, argv):
  """Runs command(argv) -> exit code; prints one clear line for every error."""
  explain.line_by_line()
  try:
    return command(argv) or errors.EXIT_OK
  except (errors.UserError, errors.IntegrityError, errors.CrashError) as e:
    explain.tell(f'paraxis: {e}')
    return e.code
  except BrokenPipeError:  # the reader of a pipe, such as head, went away
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left goes nowhere
    return errors.EXIT_PIPE
  except KeyboardInterrupt:
    explain.tell('paraxis: interrupted')
    return errors.EXIT_INTERRUPTED
  except Exception as e:
    if outside := explain.outside(e):
      explain.tell(f'paraxis: {outside}')
      return errors.EXIT_USER
    explain.tell(traceback.format_exc())
    explain.tell(f'paraxis: crashed: {type(e).__name__}: {e}')
    return errors.EXIT_CRASH


def help_fields():
  """A table of every config field: name, default, meaning, valid values."""
  lines = []
  for name, f in schema.fields():
    extra = f.metadata['choices']
    extra = f' [{" | ".join(extra)}]' if extra else ''
    lines.append(f'  {name} = {f.default!r}\n      {f.metadata["doc"]}{extra}')
  return '\n'.join(lines)
