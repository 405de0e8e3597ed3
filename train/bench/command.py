"""The bench command: paraxis against minimal plain JAX, in one interleaved run.

    paraxis bench step

It compares CPU-seconds, not wall time, and says how far a ratio is from its
target. It measures and never tests: nothing fails when a target is missed.
Nothing here imports jax or NumPy before the arguments are read.
"""

import importlib
import os
import subprocess
import sys

from absl import flags

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.bench import measure

# name -> (module, function, virtual CPU devices in the process)
BENCHES = {
  'step': ('train', 'step', 1),
  'attention': ('train', 'attention', 1),
  'layouts': ('train', 'layouts', 8),
  'context': ('context', 'context', 8),
  'pipeline': ('pipeline', 'pipeline', 8),
  'kernels': ('kernels', 'kernels', 1),
  'decode': ('decode', 'decode', 1),
  'data': ('data', 'data', 1),
  'startup': ('startup', 'startup', 1),
}

HELP = """\
paraxis bench NAME [flags]

Measures paraxis beside a minimal plain-JAX program in one interleaved run
(A B A B ...) and prints min, median and max of both, of their ratio within a
round, and the target. Figures are CPU-seconds of the process, which a shared
machine disturbs little; on an accelerator, device time. Nothing fails when a
target is missed.

  step       one training step, and compiling it, one device: plain JAX
  attention  forward and backward at length 4096: jax.nn.dot_product_attention
  layouts    a step on 8 virtual CPU devices: the same on one
  context    attention over a sequence on 8 virtual CPU devices, every form
  pipeline   a step on stages, every schedule: the same work without stages
  kernels    every op: what XLA makes of its definition; TPU schedules: splash
  decode     tokens one by one, batch 1: the time to read the parameters
  data       packing documents into rows: grain's first-fit
  startup    process start to first step done: a plain JAX program
  all        all of them, each in a process of its own

  --rounds=N   measured rounds (default 5), after one that is not
  --quick      tiny sizes, to see that it runs; no target is judged
  --json       one JSON document on stdout instead of the table
  --markdown   one line per target, as a Markdown table
  --tune=FILE  kernels only: search block sizes, write them to FILE
"""


def _define(values):
  flags.DEFINE_integer('rounds', 5, '', lower_bound=1, flag_values=values)
  for name in ('quick', 'json', 'markdown'):
    flags.DEFINE_boolean(name, False, '', flag_values=values)
  flags.DEFINE_string('tune', None, '', flag_values=values)


def _say(line):
  print(f'paraxis: {line}', file=sys.stderr, flush=True)


def _devices(count):
  """Before jax starts: 1 or 8 virtual CPU devices. One: or an accelerator."""
  if count > 1:
    command_line.prepare_devices(count)
    return
  flag = '--xla_force_host_platform_device_count'
  given = os.environ.get('XLA_FLAGS', '').split()
  kept = [f for f in given if not f.startswith(flag)]
  os.environ['XLA_FLAGS'] = ' '.join([*kept, f'{flag}=1'])
  command_line.prepare_devices(0)


def _load():
  """' load 0.52' of the machine over the last minute, where it tells."""
  try:
    return f', load {os.getloadavg()[0]:.1f}'
  except OSError:
    return ''


def run(name, rounds, quick):
  """One bench in this process -> measure.Report."""
  module, function, count = BENCHES[name]
  _devices(count)
  before = _load()
  bench = importlib.import_module(f'paraxis.train.bench.{module}')
  report = getattr(bench, function)(
    rounds, quick, lambda s: _say(f'{name}: {s}')
  )
  import jax

  report.notes.append(
    f'jax {jax.__version__}, {os.cpu_count()} cores, {rounds} rounds'
    f'{before} before, {_load()[2:] or "unknown"} after'
  )
  return report


def _in_child(name, rounds, quick):
  """The same in a process of its own, which sees its own devices."""
  command = [
    sys.executable,
    '-m',
    'paraxis.train.bench.command',
    name,
    '--json',
  ]
  command += [f'--rounds={rounds}'] + ['--quick'] * quick
  done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
  if done.returncode:
    raise RuntimeError(f'bench {name} ended with exit code {done.returncode}')
  return measure.from_json(done.stdout)[0]


def _tune(name, path, rounds):
  if name != 'kernels':
    raise errors.UserError(
      f'--tune: bench {name} has no blocks to search; name kernels.'
    )
  _devices(1)
  from paraxis.train.bench import kernel_tune

  lines = kernel_tune.tune(path, rounds, _say)
  print('\n'.join([*lines, f'wrote {path}: PARAXIS_BLOCKS={path} uses it']))
  return errors.EXIT_OK


def main(argv):
  """Runs the command; argv: arguments after its name. -> exit code."""
  if any(arg in ('--help', '-help', '-h') for arg in argv):
    print(HELP, end='')
    return errors.EXIT_OK
  values, _, names = command_line.parse(argv, _define)
  known = (*BENCHES, 'all')
  if len(names) != 1 or names[0] not in known:
    given = ' '.join(names)
    raise errors.UserError(
      f'bench {given or "..."}: name one of {", ".join(known)}.'
      + schema.suggest(given, known)
    )
  rounds, quick, name = values.rounds, values.quick, names[0]
  if values.tune is not None:
    return _tune(name, values.tune, rounds)
  if name == 'all':
    reports = [_in_child(n, rounds, quick) for n in BENCHES]
  else:
    reports = [run(name, rounds, quick)]
  if values.json:
    print(measure.to_json(reports))
  elif values.markdown:
    command = ' '.join(['paraxis bench', *argv])
    print(measure.summary(reports, command))
  else:
    print('\n\n'.join(measure.text(r) for r in reports))
  return errors.EXIT_OK


if __name__ == '__main__':
  sys.exit(command_line.run(main, sys.argv[1:]))
