"""The command line: `paraxis COMMAND ...`.

Nothing heavy is imported before the arguments are read: help, the index of
papers and config printing never start jax. Whatever is wrong with the arguments
is said before anything is compiled or written. Exit codes:
configs/base/errors.py.
"""

import functools
import sys
from typing import Any, NamedTuple

from absl import flags

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.run import hosts as hosts_lib

HELP = ('-h', '-help', '--help', '--helpfull')
# Held-out text beyond this is not compressed for comparison after a run.
COMPARED_BYTES = 20_000_000


def _flags(*rows):
  """Rows of (kind, name, default, help) -> define(values), for parse."""
  kinds = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    bool: flags.DEFINE_bool,
    list: flags.DEFINE_list,
    'count': functools.partial(flags.DEFINE_integer, lower_bound=0),
  }

  def define(values):
    for kind, name, default, text in rows:
      kinds[kind](name, default, text, flag_values=values)

  return define


_CPUS = 'virtual CPU devices; 0: the accelerators present, else 8 virtual ones'
_AXES = (
  "devices along each axis, 'data=2,fsdp=2,tensor=2', for the config's; "
  'unnamed axes are 1, one may be -1'
)
_FIELDS = 'print every config field (meaning, default, valid values), and end'
_DEVICES = (('count', 'devices', 0, _CPUS),)
_MESH = ((str, 'mesh', '', _AXES),)
_COMPILED = 'compile every kernel for TPUs and GPUs that are not here, and end'
_doctor_flags = _flags(*_MESH, *_DEVICES, (bool, 'kernels', False, _COMPILED))
_train_flags = _flags(
  (str, 'workdir', '', 'folder of the run; if it holds one, that goes on'),
  *_MESH,
  *_DEVICES,
  (bool, 'print_config', False, 'print the resolved config as JSON, and end'),
  (bool, 'helpconfig', False, _FIELDS),
  (str, 'coordinator_address', '', 'several hosts: HOST:PORT of process 0'),
  (int, 'num_processes', 0, 'several hosts: how many processes'),
  (int, 'process_id', -1, 'several hosts: which process this is, from 0'),
)
_JSON = ((bool, 'json', False, 'one JSON document instead of the table'),)
_check_flags = _flags(*_MESH, *_JSON)
_verify_flags = _flags(
  *_MESH,
  ('count', 'devices', 8, 'virtual CPU devices; a larger mesh is shrunk'),
  *_JSON,
  (str, 'dtype', 'float64', 'float64 (within 1e-9), float32 or bfloat16'),
)
_compile_flags = _flags(
  *_MESH,
  *_JSON,
  (str, 'topology', '', "the machine: 'v5p:8x8x8', 'h200:256'"),
  ('count', 'slices', 1, 'TPU slices, joined by the data center network'),
)
_reproduce_flags = _flags(
  (str, 'workdir', '', 'of the training; empty: runs/NAME'), *_DEVICES
)
_fetch_flags = _flags(
  (str, 'out', '', 'folder; empty: corpus in the user cache'),
  (bool, 'debian', False, 'also the copyleft Debian texts'),
  (list, 'skip', [], 'packages to leave out, by comma'),
)


def _flag_help(define):
  values = flags.FlagValues()
  define(values)
  lines = []
  for name in sorted(set(values[n].name for n in values)):
    flag = values[name]
    default = f' (default {flag.default!r})' if flag.default else ''
    lines += [f'  --{name}', f'      {flag.help}{default}']
  return '\n'.join(lines)


def _parse(argv, define, most=0, config=False):
  """command_line.parse, with at most `most` arguments that are not flags.

  `config`: whether the command reads --config; elsewhere it is an error.
  """
  takes_config = config
  values, config, left = command_line.parse(argv, define)
  if config is not None and not takes_config:
    raise errors.UserError('--config: this command does not read it.')
  if len(left) > most:
    raise errors.UserError(f'unexpected argument {left[most]!r}.')
  return values, config, left


def _train(argv):
  if any(a.lstrip('-') == 'helpconfig' for a in argv):
    print(command_line.help_fields())
    return errors.EXIT_OK
  values, config = _with_config(argv, _train_flags)
  if values.print_config:
    print(schema.to_json(config), end='')
    return errors.EXIT_OK
  if not values.workdir:
    raise errors.UserError('--workdir is missing: where is the run to be kept?')
  hosts = values.coordinator_address, values.num_processes, values.process_id
  several = hosts_lib.check(*hosts)
  command_line.prepare_devices(values.devices)
  from paraxis.sharding import mesh

  mesh.parse(values.mesh)
  if several:
    hosts_lib.connect(*hosts)
  from paraxis.train import loop
  from paraxis.train.run import compiling

  compiling.use_cache()
  result = loop.run(config, values.workdir, values.mesh)
  if result['stopped']:
    return errors.EXIT_PREEMPTED
  if not values.process_id > 0:
    print(result['evaluation'].line())
    print(_against_gzip(config, result['evaluation']))
  return errors.EXIT_OK


def _against_gzip(config, evaluation):
  """The model and gzip -9 on the same held-out text, or why not."""
  from paraxis.train.claims import harness as claims
  from paraxis.train.data import baselines

  if config.train.eval_batches:
    return 'gzip -9: not compared, train.eval_batches leaves text out'
  if evaluation.n_bytes > COMPARED_BYTES:
    return (
      f'gzip -9: not compared, {evaluation.n_bytes:,} bytes of held-out text '
      f'are more than {COMPARED_BYTES:,}'
    )
  base = baselines.text_baselines(
    config.data.path, config.data.held_out_fraction, xz=False
  )
  return claims.domain_table(evaluation, base)


def _papers(argv):
  _, _, left = _parse(argv, None, most=1)
  from paraxis.train.claims import papers

  papers.run(left[0] if left else '')


def _reproduce(argv):
  values, _, left = _parse(argv, _reproduce_flags, most=1)
  if not left:
    raise errors.UserError('reproduce what? `paraxis papers` lists the names.')
  command_line.find_config(left[0])
  command_line.prepare_devices(values.devices)
  from paraxis.train.claims import harness as claims
  from paraxis.train.run import compiling

  compiling.use_cache()
  return claims.reproduce(left[0], values.workdir)


def _plot(argv):
  from paraxis.train.plot import command as plot_command

  return plot_command.main(argv)


def _data(argv):
  known = ('fetch', 'list')
  what, rest = (argv[0], argv[1:]) if argv else ('', [])
  if what not in known:
    raise errors.UserError(
      f'paraxis data {what or "..."}: it is `paraxis data fetch` or `paraxis '
      'data list`.' + schema.suggest(what, known)
    )
  from paraxis.train.data import fetch

  if what == 'list':
    _parse(rest, None)
    print(fetch.table(fetch.listing()))
  else:
    values, _, _ = _parse(rest, _fetch_flags)
    fetch.fetch(values.out or None, values.debian, skip=values.skip)


def _doctor(argv):
  values, config, _ = _parse(argv, _doctor_flags, config=True)
  command_line.prepare_devices(values.devices)
  if values.kernels:
    from paraxis.train.bench import kernel_matrix

    return kernel_matrix.run()
  from paraxis.train.certify import doctor

  config = None if config is None else schema.view(config)
  return doctor.run(config, values.mesh)


def _check(argv):
  values, config = _with_config(argv, _check_flags)
  command_line.prepare_devices(1)
  from paraxis.train.certify import check

  return check.run(config, values.mesh, values.json)


def _verify(argv):
  values, config = _with_config(argv, _verify_flags)
  command_line.prepare_devices(values.devices or 8)
  from paraxis.train.certify import verify

  return verify.run(config, values.mesh, values.json, values.dtype)


def _compile(argv):
  values, config = _with_config(argv, _compile_flags)
  from paraxis.train.certify import target_compile

  return target_compile.run(
    config, values.mesh, values.topology, values.slices, values.json
  )


def _with_config(argv, define):
  """(flags, schema.Config) of a command that needs --config."""
  values, config, _ = _parse(argv, define, config=True)
  if config is None:
    raise errors.UserError('--config is missing: --config=configs/FILE.py.')
  return values, schema.view(config)


def _decode(argv):
  from paraxis.decode import __main__ as decode_main

  return decode_main.main(argv)


def _bench(argv):
  from paraxis.train.bench import command as bench

  return bench.main(argv)


class Command(NamedTuple):
  """run(argv) -> exit code or None. define: its flags; None: it has its own
  help."""

  run: Any
  summary: str
  usage: str
  define: Any = None


_CONFIG = '--config=configs/quickstart.py'
COMMANDS = {
  'train': Command(
    _train,
    'train a model, or go on with a run',
    f'{_CONFIG} --workdir=RUN [--config.train.steps=50 ...]',
    _train_flags,
  ),
  'decode': Command(_decode, 'sample text from a run', '--checkpoint=RUN'),
  'check': Command(
    _check,
    'type-check a layout without devices: bytes per chip, collectives',
    f'{_CONFIG} --mesh=data=64,tensor=64',
    _check_flags,
  ),
  'verify': Command(
    _verify,
    'certify that a layout gives the numbers of one device; else exit code 1',
    f'{_CONFIG} --mesh=fsdp=2,context=2,tensor=2',
    _verify_flags,
  ),
  'compile': Command(
    _compile,
    'compile for a real TPU or GPU machine without one: memory, bytes',
    f'{_CONFIG} --topology=v5p:8x8x8 --mesh=...',
    _compile_flags,
  ),
  'papers': Command(
    _papers, 'list the configs, or those that mention a word', '[WORD]', None
  ),
  'reproduce': Command(
    _reproduce,
    "run a config's claims; exit code 1 if one fails",
    'NAME',
    _reproduce_flags,
  ),
  'plot': Command(
    _plot, "draw a run's loss, or a pipeline schedule", '--workdir=RUN'
  ),
  'data': Command(
    _data,
    'fetch more text, list the text at hand',
    'fetch | list',
    _fetch_flags,
  ),
  'doctor': Command(
    _doctor,
    'versions, devices, mesh, kernels; what is known to be bad',
    f'[--mesh=data=8] [{_CONFIG}] [--kernels]',
    _doctor_flags,
  ),
  'bench': Command(_bench, 'measure', 'NAME | all'),
}
OWN_HELP = ('decode', 'plot', 'bench')


def usage(name=''):
  """Help for a command, or for all of them."""
  if not name:
    width = max(map(len, COMMANDS))
    lines = [f'  {n:{width}}  {c.summary}' for n, c in COMMANDS.items()]
    tail = [
      'paraxis COMMAND --help shows its flags, paraxis train --helpconfig',
      'every config field. Exit codes: 0 done, 1 a claim failed, 2 bad input,',
      '13 crash, 14 damaged data, 75 stopped by a signal and saved.',
    ]
    return '\n'.join(['usage: paraxis COMMAND ...', '', *lines, '', *tail])
  command = COMMANDS[name]
  lines = [f'usage: paraxis {name} {command.usage}', '', command.summary]
  if command.define:
    lines += ['', _flag_help(command.define)]
  if name in ('train', 'doctor', 'check', 'verify', 'compile'):
    lines += [
      '  --config=FILE, --config.SECTION.FIELD=VALUE',
      '      a config and changes to it; paraxis train --helpconfig lists the '
      'fields',
    ]
  return '\n'.join(lines)


def _dispatch(argv):
  if not argv or argv[0] in HELP or argv[0] == 'help':
    print(usage())
    return errors.EXIT_OK
  name, rest = argv[0], argv[1:]
  if name not in COMMANDS:
    raise errors.UserError(
      f'{name!r} is not a command; there are {", ".join(COMMANDS)}.'
      + schema.suggest(name, COMMANDS)
    )
  if name not in OWN_HELP and any(a in HELP for a in rest):
    print(usage(name))
    return errors.EXIT_OK
  return COMMANDS[name].run(rest)


def main(argv=None):
  """Runs `paraxis ARGV` -> its exit code (configs/base/errors.py)."""
  code = command_line.run(_dispatch, sys.argv[1:] if argv is None else argv)
  stopped = code in (errors.EXIT_OK, errors.EXIT_PREEMPTED)
  if hosts_lib.connected() and not stopped:
    hosts_lib.exit_now(code)
  return code
