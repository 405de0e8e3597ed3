"""The command line: `paraxis COMMAND ...`.

Nothing heavy is imported before the arguments are read: help, the index of
papers and config printing never start jax. Wrong arguments are reported before
anything is compiled or written. Exit codes: configs/base/errors.py.
"""

import contextlib
import importlib.metadata
import os
import sys
import tempfile
from typing import Any

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.decode import __main__ as decode_main
from paraxis.decode.evaluate import command as evaluate_command
from paraxis.models import checks
from paraxis.sharding import mesh
from paraxis.train import checkpoint_command
from paraxis.train import data_command
from paraxis.train import draft_command
from paraxis.train import exchange_command
from paraxis.train.bench import command as bench_command
from paraxis.train.claims import command as claims_command
from paraxis.train.launch import command as launch_command
from paraxis.train.plot import command as plot_command
from paraxis.train.run import hosts as hosts_lib
from paraxis.train.run import lossy

_CONFIG = '--config=configs/quickstart.py'
_MESH = (
  str, 'mesh=AXIS=N,...', '',
  "devices along each axis instead of the config's, as data=2,fsdp=2,tensor=2; "
  'unnamed axes are 1, one may be -1: all that are left',
)  # fmt: skip
_DEVICES = (
  'count', 'devices=N', 0,
  'virtual CPU devices; 0: the accelerators present, else virtual ones, as '
  'many as the mesh has, up to 8 (8 without a mesh)',
)  # fmt: skip
_COMPARED = 'init_optimizer', 'init_layers', 'init_ema', 'profile'
_JSON = (bool, 'json', False, 'print one JSON document instead of the table')


def _train(values, config, _):
  if values.print_config:
    print(schema.to_json(config), end='')
    return errors.EXIT_OK
  if not values.workdir and not values.dry_run:
    raise errors.UserError('--workdir is missing: name a run directory.')
  hosts = values.coordinator_address, values.num_processes, values.process_id
  several = hosts_lib.check(*hosts)
  sizes = _sizes(values, config)
  if not values.init_from:  # else the weights say what the model is
    from paraxis.train.run import early

    folder = '' if several or values.dry_run else values.workdir
    early.check(config, folder, values.profile, values.from_scratch)
  otherwise = 8 if several else mesh.virtual_devices(sizes)
  command_line.prepare_devices(values.devices, otherwise)
  if several:
    # --from_scratch is not: launchers drop it, each when it sees a commit.
    flags = {name: getattr(values, name) for name in _COMPARED}
    # A host may keep it elsewhere; what is there is compared in `differing`.
    flags['init_from'] = bool(values.init_from)
    compared = hosts_lib.fields_of(config, values.workdir, values.mesh, flags)
    hosts_lib.connect(*hosts, compared)
  source = exchange_command.source(values, config)
  if values.dry_run:
    return _dry_run(config, values, source)
  from paraxis.sharding.meter import compiling
  from paraxis.train import loop
  from paraxis.train.run import ledger

  compiling.use_cache()
  if several:
    compiling.share_cache(hosts_lib.START_SECONDS)
  began = ledger.process_began()
  asked = loop.Options(values.profile, source, values.from_scratch, began)
  result: Any = loop.run(config, values.workdir, values.mesh, options=asked)
  if not (result['stopped'] or values.process_id > 0):
    from paraxis.train.claims import held_out

    print(result['evaluation'].line())
    print(held_out.against_gzip(config, result['evaluation']))
  hosts_lib.wait_for_the_end()
  return errors.EXIT_PREEMPTED if result['stopped'] else errors.EXIT_OK


def _sizes(values, config):
  """{mesh axis: size} of --mesh, which replaces that of a config.

  values: with mesh. config: schema.Config or None.
  """
  if values.mesh or config is None:
    return mesh.parse(values.mesh)
  return {axis: getattr(config.mesh, axis) for axis in mesh.AXES}


def _dry_run(config, values, source):
  """Prints what a run would begin with, and the memory that it is to need."""
  from paraxis.train import loop
  from paraxis.train import program
  from paraxis.train import start
  from paraxis.train import step
  from paraxis.train.run import header

  with tempfile.TemporaryDirectory() as folder:  # of a tokenizer
    if source:
      config = source.configured(config, folder, print)
    job = program.make(config, values.mesh)
    if source:
      source.fits(job, start.wanted(job), print)
  made = step.make(job.built, job.optimizer, config.optimizer.clip_norm)
  traced = header.trace(job, made.grads)
  print(header.text(job, loop.cost(config), values.workdir, traced))
  return errors.EXIT_OK


def _plain(values, config):
  """UserError for what needs no jax to be refused."""
  mesh.parse(values.mesh)
  checks.check_fields(config.model)


def _doctor(values, config, _):
  sizes = _sizes(values, config)
  alone = mesh.virtual_devices(sizes) if sizes else 8
  command_line.prepare_devices(values.devices, alone)
  if values.kernels:
    from paraxis.train.bench import kernel_matrix

    return kernel_matrix.run()
  from paraxis.train.certify import doctor

  return doctor.run(config, values.mesh)


def _check(values, config, _):
  _plain(values, config)
  command_line.prepare_devices(1)
  from paraxis.train.certify import verdict

  return verdict.run(config, values.mesh, values.json, values.chip)


def _verify(values, config, _):
  drawn = values.random > 0
  if drawn and (config is not None or values.mesh or values.json):
    raise errors.UserError(
      f'--random={values.random} draws configurations and meshes and prints a '
      'line for each: leave out --config, --mesh and --json.'
    )
  if not drawn and config is None:
    raise errors.UserError('--config is missing: --config=configs/FILE.py.')
  if config is not None:
    _plain(values, config)
  command_line.prepare_devices(values.devices or 8)
  if drawn:
    from paraxis.train.certify import random_layouts

    return random_layouts.run(values.random, values.seed, values.dtype)
  from paraxis.train.certify import verify

  return verify.run(config, values.mesh, values.json, values.dtype)


def _compile(values, config, _):
  _plain(values, config)
  from paraxis.train.certify import target_compile

  return target_compile.run(
    config, values.mesh, values.topology, values.slices, values.json
  )


_ALL = (
  command_line.Command(
    lossy.output(_train),
    'train',
    f'{_CONFIG} --workdir=RUN',
    'train a model, or resume a run',
    (
      ('path', 'workdir=RUN', '', 'run directory; an existing run is resumed'),
      _MESH,
      _DEVICES,
      (bool, 'print_config', False, 'print the resolved config as JSON; exit'),
      (bool, 'dry_run', False, 'print model, mesh, data, memory; exit'),
      *exchange_command.INIT,
      (bool, 'from_scratch', False, 'begin again if checkpoints are missing'),
      (str, 'profile=FIRST:LAST', '', 'trace these steps into RUN/profile'),
      (str, 'coordinator_address=HOST:PORT', '', 'several hosts: process 0'),
      (int, 'num_processes=N', 0, 'several hosts: how many processes'),
      (int, 'process_id=N', -1, 'several hosts: this process, from 0'),
    ),
    'required',
  ),
  launch_command.COMMAND,
  decode_main.COMMAND,
  draft_command.COMMAND,
  evaluate_command.COMMAND,
  *exchange_command.commands(_DEVICES),
  *checkpoint_command.COMMANDS,
  command_line.Command(
    _check,
    'check',
    f'{_CONFIG} --mesh=data=64,tensor=64',
    'type-check a layout without devices: bytes per chip, collectives',
    (_MESH, _JSON, (str, 'chip=NAME', '', 'v5p, h100, ...: does it fit?')),
    'required',
  ),
  command_line.Command(
    _verify,
    'verify',
    f'{_CONFIG} --mesh=fsdp=2,context=2,tensor=2',
    'certify that a layout gives the numbers of one device',
    (
      _MESH,
      ('count', 'devices=N', 8, 'virtual CPU devices; larger meshes shrink'),
      _JSON,
      (str, 'dtype=NAME', 'float64', 'float64 (to 1e-9), float32 or bfloat16'),
      ('count', 'random=N', 0, 'N random configurations on random meshes'),
      ('count', 'seed=N', 1, 'of --random: the same N again'),
    ),
    'optional',
  ),
  command_line.Command(
    _compile,
    'compile',
    f'{_CONFIG} --topology=v5p:8x8x8 --mesh=...',
    'compile for a TPU or GPU topology you do not have: memory, bytes',
    (
      _MESH,
      _JSON,
      (str, 'topology=NAME', '', "compilation target: 'v5p:8x8x8', 'h200:256'"),
      ('count', 'slices=N', 1, 'TPU slices, joined by the data center network'),
    ),
    'required',
  ),
  *claims_command.commands(_JSON, _DEVICES),
  *plot_command.COMMANDS,
  *data_command.COMMANDS,
  command_line.Command(
    _doctor,
    'doctor',
    '[--mesh=data=8] [--config=FILE] [--kernels]',
    'versions, devices, mesh, kernels; known incompatible versions',
    (
      _MESH,
      _DEVICES,
      (bool, 'kernels', False, 'compile every kernel ahead of time; exit'),
    ),
    'optional',
  ),
  bench_command.COMMAND,
)
COMMANDS = {command.name: command for command in _ALL}


def usage() -> str:
  """Help for all commands."""
  width = max(map(len, COMMANDS))
  lines = [f'  {n:{width}}  {c.summary}' for n, c in COMMANDS.items()]
  tail = [
    'paraxis COMMAND --help shows its flags, paraxis train --helpconfig',
    'every config field. Exit codes: 0 done, 1 a claim failed, 2 bad input, 13',
    'crash, 14 damaged data, 75 stopped, saved, 77 nothing could be checked,',
    '130 Ctrl-C, 141 closed pipe.',
  ]
  return '\n'.join(['usage: paraxis COMMAND ...', '', *lines, '', *tail])


def _dispatch(argv):
  if argv[:1] in (['--version'], ['-V']):
    print(f'paraxis {importlib.metadata.version("paraxis")}')
    return errors.EXIT_OK
  if not argv or argv[0] == 'help' or command_line.asks_for_help(argv[:1]):
    print(usage())
    return errors.EXIT_OK
  two = ' '.join(argv[:2])
  name = two if two in COMMANDS else argv[0]
  found = [c for c in _ALL if f'{c.name} '.startswith(f'{name} ')]
  if not found:
    raise errors.UserError(
      f'{name!r} is not a command; there are {", ".join(COMMANDS)}.'
      + schema.suggest(name, COMMANDS)
    )
  rest = argv[len(name.split()) :]
  if command_line.asks_for_help(rest):
    print('\n\n'.join(command.help() for command in found))
    return errors.EXIT_OK
  if name not in COMMANDS:
    names = ' or '.join(f'`paraxis {c.name}`' for c in found)
    raise errors.UserError(
      f'paraxis {two if rest else f"{name} ..."}: it is {names}.'
      + schema.suggest(two.split()[-1], [c.name.split()[1] for c in found])
    )
  return COMMANDS[name](rest)


@contextlib.contextmanager
def _devices_stay():
  """What a command says of devices (prepare_devices) ends with it.

  A notebook that calls `main` goes on, and starts other commands.
  """
  names = 'XLA_FLAGS', 'JAX_PLATFORMS'
  before = {name: os.environ.get(name) for name in names}
  jax = sys.modules.get('jax')
  platforms = jax.config.jax_platforms if jax else before['JAX_PLATFORMS']
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name, None)
      if value is not None:
        os.environ[name] = value
    if jax := sys.modules.get('jax'):  # no matter to one that has started
      jax.config.update('jax_platforms', platforms)


def main(argv=None):
  """Runs `paraxis ARGV` -> its exit code (configs/base/errors.py)."""
  with _devices_stay():
    code = command_line.run(_dispatch, sys.argv[1:] if argv is None else argv)
  stopped = code in (errors.EXIT_OK, errors.EXIT_PREEMPTED)
  if hosts_lib.connected() and not stopped:
    hosts_lib.exit_now(code)
  return code


if __name__ == '__main__':
  sys.exit(main())
