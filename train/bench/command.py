"""The bench command: paraxis against minimal plain JAX, interleaved.

    paraxis bench step

It compares CPU-seconds, not wall time, and prints each ratio beside its target.
A missed target is no failure.
Nothing here imports jax or NumPy before the arguments are read.
"""

import hashlib
import importlib
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import errors
from paraxis.train.bench import measure
from paraxis.train.bench import peer_process
from paraxis.train.bench import peers as peers_lib
from paraxis.train.bench import report as report_lib
from paraxis.train.bench.device import command as device_command

# name, also of the function -> (module, virtual CPU devices, help)
BENCHES = {
  'step': ('train', 1, 'a training step and its compilation: plain JAX'),
  'attention': (
    'attention', 1,
    'forward and backward at length 4096: jax.nn.dot_product_attention',
  ),
  'layouts': ('train', 8, 'a step on 8 virtual CPU devices: one device'),
  'outer': (
    'updates', 8,
    'replicas that step alone: those that average; an exchange: passes',
  ),
  'optimizers': (
    'updates', 8, 'a step of every update rule, and its state: AdamW'
  ),
  'context': (
    'attention', 8,
    'every form of context parallel attention on 8 virtual CPU devices',
  ),
  'pipeline': (
    'pipeline', 8,
    'a step on pipeline stages, every schedule: the same without stages',
  ),
  'kernels': (
    'kernels', 1,
    'every op: the strongest plain JAX; static TPU schedules: splash',
  ),
  'decode': (
    'decode', 1, 'new tokens, batch 1, 8, 64: plain JAX; reading parameters'
  ),
  'prefill': (
    'decode', 1, 'prompts of 4,080 and 8,000 tokens, a window: plain JAX'
  ),
  'methods': (
    'methods', 1, 'every method of decoding, SmolLM2-135M: one by one'
  ),
  'masks': (
    'methods', 1,
    'training steps and calls of masked models: causal ones of the same tokens',
  ),
  'checkpoint': (
    'checkpoint', 8, '128 MiB and 1 GiB saved and restored: Orbax'
  ),
  'data': ('data', 1, "packing documents into rows: grain's first-fit"),
  'scaling': (
    'scaling', 8,
    'exponents over devices, length, depth, rows, cache: the ideal ones',
  ),
  'startup': (
    'startup', 1, 'process start to the end of the first step: plain JAX'
  ),
  'own_run': (
    'own_run', 1,
    'importing weights: safetensors, Orbax; LoRA, logging: a step',
  ),
}  # fmt: skip
DEVICE = 'device'  # no bench beside plain JAX: the room of that name


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
  """'load 0.5', the load average of the last minute, where available."""
  try:
    return f'load {os.getloadavg()[0]:.1f}'
  except OSError:
    return 'load unknown'


def _cpu():
  """What the processor calls itself."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text('utf-8').splitlines()
    names = [x.partition(':')[2] for x in lines if x.startswith('model name')]
    return names[0].strip()
  except (OSError, IndexError):
    return platform.processor() or platform.machine()


def _threads():
  """Threads that XLA starts for its products: processors of this process."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def run(name, rounds, quick, **options):
  """One bench in this process -> measure.BenchReport.

  options: path, resume and peers of measure.Session.
  """
  module, count, _ = BENCHES[name]
  _devices(count)
  before = _load()
  bench = importlib.import_module(f'paraxis.train.bench.{module}')
  import jax

  from paraxis.sharding.meter import aot
  from paraxis.train.run import metrics

  facts = dict(
    jax=jax.__version__,
    python=sys.version.split()[0],
    device=jax.devices()[0].device_kind,
    cpu=_cpu(),
    cores=os.cpu_count(),
    threads=_threads(),
    flags=os.environ.get('XLA_FLAGS', ''),
    rounds=rounds,
    quick=quick,
    peers=[list(peer) for peer in options.get('peers', ())],
    drafts=[[f, _digest(f)] for f in options.get('drafts', ())],
    source=metrics.digest(),
  )
  say = lambda line: _say(f'{name}: {line}')
  # What is compiled is timed: uncached.
  with measure.session(facts=facts, say=_say, **options), aot.uncached():
    try:
      report = getattr(bench, name)(rounds, quick, say)
    except measure.KeptError as kept:
      return kept.args[0]
    peers_lib.absent(report)
    if not any('peak memory' in row for row in report.rows):
      peak = peer_process.peak()
      report.add({'peak memory, this process': [peak]}, 'MiB')
    report.notes.append(f'{before} before, {_load()} after')
    report.finish()
  return report


def _in_child(name, rounds, quick, path=None, peers=(), drafts=(), **options):
  """The same in a process of its own, which sees its own devices."""
  command = [sys.executable, '-m', 'paraxis.train.bench.command', name]
  command += ['--json', f'--rounds={rounds}'] + ['--quick'] * quick
  command += [f'--out={path}', '--resume'] if path else []
  command += [f'--peer={peer}:{python}' for peer, python in peers]
  command += [f'--draft={file}' for file in drafts]
  done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
  if done.returncode:
    _say(f'{name}: ended with exit code {done.returncode}, not measured')
    return None
  return measure.from_json(done.stdout)[0]


def _digest(path):
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:12]


def _refuse(values, what, names):
  """Raises UserError if one of these flags is given, which `what` ignores."""
  given = [f'--{n}' for n in names.split() if getattr(values, n)]
  if given:
    raise errors.UserError(f'{what} takes no {", ".join(given)}.')


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


def _bench(values, _, names):
  known = (*BENCHES, 'all', DEVICE)
  if len(names) != 1 or names[0] not in known:
    given = ' '.join(names)
    raise errors.UserError(
      f'bench {given or "..."}: name one of {", ".join(known)}.'
      + schema.suggest(given, known)
    )
  rounds, quick, name = values.rounds, values.quick, names[0]
  if values.tune is not None:
    flags = 'quick out resume peer draft json markdown minutes'
    _refuse(values, '--tune', flags)
    return _tune(name, values.tune, rounds)
  if name == DEVICE:
    _refuse(values, f'bench {DEVICE}', 'peer draft markdown')
    _devices(1)
    return device_command.run(values, _say)
  if values.minutes is not None:
    raise errors.UserError(f'--minutes is for bench {DEVICE}, not {name}.')
  if values.json and values.markdown:
    raise errors.UserError('--json and --markdown print one form: choose one.')
  if name not in ('methods', 'all'):
    _refuse(values, f'bench {name}', 'draft')
  for file in values.draft:
    if not pathlib.Path(file).is_file():
      raise errors.UserError(f'--draft={file}: no such file.')
  path = pathlib.Path(values.out) if values.out else None
  options: dict[str, Any] = dict(path=path, resume=values.resume)
  options['peers'] = peers_lib.parse(values.peer)
  options['drafts'] = tuple(values.draft)
  measure.Session(**options)  # its errors, before anything is imported
  if name == 'all':
    every = [_in_child(n, rounds, quick, **options) for n in BENCHES]
  else:
    every = [run(name, rounds, quick, **options)]
  reports = [r for r in every if r is not None]
  if values.json:
    print(measure.to_json(reports))
  elif values.markdown:
    print('\n\n'.join(report_lib.table(r) for r in reports))
  else:
    print('\n\n'.join(measure.text(r) for r in reports))
  whole = len(reports) == len(every)
  return errors.EXIT_OK if whole else errors.EXIT_DIFFERENT


COMMAND = command_line.Command(
  _bench,
  'bench',
  'NAME | all | device',
  'measure CPU-seconds, or device time, beside plain JAX',
  (
    (
      'positive',
      'rounds=N',
      5,
      'measured rounds, after one warm-up round',
    ),
    (bool, 'quick', False, 'tiny sizes, to see that it runs; no verdicts'),
    (bool, 'json', False, 'print one JSON document instead of the table'),
    (
      bool,
      'markdown',
      False,
      'print a Markdown table as in BENCHMARKS.md: a row per target, memory, '
      'the machine, versions and flags',
    ),
    ('path', 'out=FILE', None, 'keep all rows, as JSON, after each comparison'),
    (
      bool,
      'resume',
      False,
      'leave out what FILE has, of the same sizes, versions, source and rounds',
    ),
    (
      'several',
      'peer=NAME:PYTHON',
      None,
      'measure a peer, too, in turn with ours, run by that Python; repeatable',
    ),
    (
      'paths',
      'draft=FILE',
      [],
      'methods: a trained draft (paraxis draft); repeatable',
    ),
    (
      'path',
      'tune=FILE',
      None,
      'kernels: search block sizes, write them to FILE',
    ),
    *device_command.FLAGS,
  ),
  words=None,
  notes=(
    'Benches, and what each is compared with in interleaved rounds:',
    *(f'  {name:10}  {text}' for name, (*_, text) in BENCHES.items()),
    '  all         all benches, each in its own process',
    '  device      all of a GPU or TPU in one call, to --out=DIR: ceilings,',
    '              errors and speed of kernels, steps, decoding, checkpoints',
    'Peers, which the Python of a --peer= must have installed:',
    *(f'  {name:13}  {text}' for name, (_, text) in peers_lib.NAMES.items()),
    'A peer that is missing, too old, or does not apply becomes a note of the',
    'table.',
    'The table has min, median and max of both, of their ratio within a round,',
    'and its target: met or missed in every round, or within noise. A missed',
    'target does not change the exit code.',
  ),
)
main = COMMAND

if __name__ == '__main__':
  sys.exit(command_line.run(main, sys.argv[1:]))
