"""Bench of starting: process start to the end of the first step.

Each candidate is a fresh process; its CPU-seconds are those that the operating
system charges for it (user and system, all threads). Plain JAX imports, makes
parameters and random tokens, compiles its scanned step and runs it. Ours is
`paraxis train` on the shipped fixture: also tokenizer, documents, packing,
batches, checkpoint store and logs. Both end as soon as the step has ended.

    python -m paraxis.train.bench.startup plain '{"batch": ...}'

is one process of the plain candidate; it imports nothing else of paraxis.
"""

import functools
import json
import os
import pathlib
import resource
import runpy
import subprocess
import sys
import tempfile
import time
import types

BENCH = dict(vocab_size=8192, d_model=384, num_heads=6, num_layers=6, d_ff=1024)
QUICK = dict(vocab_size=2048, d_model=96, num_heads=6, num_layers=2, d_ff=128)
ROWS, LENGTH = 8, 256


def plain_child(model):
  """The plain program; model: {field: value}. Prints its phases and ends."""
  import jax

  from paraxis.train.bench import reference

  phases = dict(imports=time.process_time())
  m = types.SimpleNamespace(**model)
  start, step = reference.make_step(m)
  params = jax.jit(lambda k: reference.init(m, k, True))(jax.random.key(0))
  state = jax.block_until_ready(jax.jit(start)(params))
  random = jax.random.randint(
    jax.random.key(1), (ROWS, LENGTH + 1), 0, m.vocab_size
  )
  tokens, targets = random[:, :-1], random[:, 1:]
  phases['state'] = time.process_time() - sum(phases.values())
  step = step.lower(params, state, tokens, targets).compile()
  phases['compile'] = time.process_time() - sum(phases.values())
  jax.block_until_ready(step(params, state, tokens, targets))
  _end(phases)


def our_child(argv):
  """`paraxis train ARGV` up to the first step. Prints its phases and ends."""
  from paraxis.sharding.meter import compiling
  from paraxis.train import loop
  from paraxis.train import program as job

  phases = dict(imports=time.process_time())

  def timed(owner, name, phase):
    function = getattr(owner, name)

    @functools.wraps(function)
    def run(*args, **kwargs):
      before = time.process_time()
      out = function(*args, **kwargs)
      spent = time.process_time() - before
      phases[phase] = phases.get(phase, 0) + spent
      return out

    setattr(owner, name, run)

  timed(job, 'make', 'data and shapes')
  timed(job.Job, 'initial_state', 'state')
  timed(compiling, 'compile_step', 'compile')
  first = lambda *_: _end(phases)
  loop.run = functools.partial(loop.run, callbacks=(first,))
  # As a user starts it: the bench may not import the command line.
  sys.argv[1:] = argv
  runpy.run_module('paraxis.train', run_name='__main__')


def _end(phases):
  phases['rest'] = time.process_time() - sum(phases.values())
  print(json.dumps(phases), flush=True)
  os._exit(0)


def _spent():
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def child(form, argument, environment):
  """Runs one child -> (CPU-seconds of it, its phases)."""
  command = [sys.executable, '-m', 'paraxis.train.bench.startup', form]
  before = _spent()
  done = subprocess.run(
    [*command, json.dumps(argument)],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )
  lines = done.stdout.strip().splitlines()
  if done.returncode or not lines:
    tail = ' | '.join(done.stderr.strip().splitlines()[-3:])
    raise RuntimeError(f'startup of {form}: exit {done.returncode}: {tail}')
  return _spent() - before, json.loads(lines[-1])


def train_arguments(model, tokens, workdir):
  """Of `paraxis train`, for a model {field: value} on one device."""
  fields = dict(
    model=model | dict(tied_embedding=False, qk_norm='none'),
    data=dict(sequence_length=LENGTH, cache_dir=str(tokens)),
    train=dict(batch_size=ROWS, steps=1),
    optimizer=dict(name='adamw'),
  )
  return [
    '--config=quickstart',
    '--devices=1',
    '--mesh=data=1',
    f'--workdir={workdir}',
    *(
      f'--config.{section}.{name}={value}'
      for section, values in fields.items()
      for name, value in values.items()
    ),
  ]


# row -> (form, may use what was compiled before, and what was tokenized)
STARTS = {
  'plain JAX, nothing cached': ('plain', False, False),
  'ours, programs not cached': ('ours', False, True),
  'plain JAX, programs cached': ('plain', True, False),
  'ours, programs cached': ('ours', True, True),
  'ours, text not tokenized yet': ('ours', False, False),
}


def start(root, model, form, compiled, tokens):
  """Runs one child below the folder `root` -> (CPU-seconds, its phases).

  model: {field: value}. form, compiled, tokens: as in STARTS.
  """
  root, fresh = pathlib.Path(root), pathlib.Path(tempfile.mkdtemp(dir=root))
  cache = root / f'shared {form}' if compiled else fresh
  environment = dict(PARAXIS_CACHE=str(cache))
  if form == 'plain':
    environment |= dict(
      JAX_COMPILATION_CACHE_DIR=str(cache),
      JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0.5',
    )
    return child(form, model, environment)
  kept = (root if tokens else fresh) / 'tokens'
  environment['JAX_COMPILATION_CACHE_DIR'] = ''
  return child(form, train_arguments(model, kept, fresh / 'run'), environment)


def startup(rounds, quick, say):
  """CPU-seconds of fresh processes, from start to the first step."""
  from paraxis.train.bench import measure

  model = QUICK if quick else BENCH
  sizes = ' '.join(f'{k}={v}' for k, v in model.items())
  report = measure.begin(
    'startup',
    f'{sizes}, T{LENGTH} B{ROWS}, one device, AdamW',
    'CPU-seconds of a fresh process',
    not quick,
  )
  phases = {name: [] for name in STARTS}
  with tempfile.TemporaryDirectory() as root:

    def run(name):
      seconds, found = start(root, model, *STARTS[name])
      phases[name].append(found)
      return {'': seconds}

    made = {name: functools.partial(run, name) for name in STARTS}
    times = measure.interleave(made, rounds, say=say)
  report.add(times)
  plain, ours, plain_cached, ours_cached, _ = STARTS
  for a, b in ((ours, plain), (ours_cached, plain_cached)):
    report.check(
      f'time of {a} / {b}',
      measure.ratios(times[a], times[b]),
      1.3,
      least=False,
    )
  for name, (first, *runs) in phases.items():
    runs = runs or [first]  # the warm-up, where all rounds were kept
    median = lambda p, runs=runs: measure.spread([r.get(p, 0) for r in runs])[1]
    shown = ', '.join(f'{p} {median(p):.2f}' for p in runs[0])
    report.notes.append(f'{name}: {shown}')
  return report


if __name__ == '__main__':
  form, argument = sys.argv[1:]
  (plain_child if form == 'plain' else our_child)(json.loads(argument))
