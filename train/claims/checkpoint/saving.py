"""Claims about saving beside training: what it blocks, what the file holds.

A stall is the wall time for which the thread that trains is blocked by a save
(train/bench/checkpoint.py): the one cost that CPU-seconds do not show. Stores
and sizes are measured in turn, a ratio is taken within a round.
"""

import contextlib
import functools
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding.checkpoint import snapshot
from paraxis.sharding.checkpoint import store as store_lib
from paraxis.sharding.meter import compiling
from paraxis.train import loop
from paraxis.train import program as job_lib
from paraxis.train import start
from paraxis.train import state as state_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import checkpoint as bench
from paraxis.train.bench import measure
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.run import metrics as metrics_lib
from paraxis.train.run import workdir as workdir_lib

ARRAYS = 16
QUIET = lambda line: None


def the_arrays_themselves():
  """Knock-out: what is written are no copies, but what the update donates."""
  return knockouts.patched(snapshot, 'to_host', dict)


def written_at_once():
  """Knock-out: a step waits where a save begins until it is committed."""
  begin = store_lib.Store.begin

  def waits(self, *given):
    begin(self, *given)
    self.wait()

  return knockouts.patched(store_lib.Store, 'begin', waits)


def _never_saved(config, devices):
  """({step: {canonical path: NumPy array}}, [losses]) of a plain loop."""
  job = job_lib.make(config, '', devices, QUIET)
  states, losses = {}, []
  with job.context():
    step = step_lib.make(job.built, job.optimizer, config.optimizer.clip_norm)
    state, gradient = job.initial_state(), None
    update: Any = None
    for t in range(config.train.steps):
      batch = job.put(job.batches.batch_at(t))
      if gradient is None:
        arguments = step.grads, state.variables, batch
        gradient = compiling.compile_step('gradient', *arguments)
        update = job.compile_update(step.update, gradient)
      state, numbers = update(state, *gradient(state.variables, batch))
      flat = state_lib.in_order(state_lib.flatten(state), job.leaves)
      states[t + 1] = {p: np.array(x) for p, x in flat.items()}
      losses.append(float(numbers['loss']))
  return states, losses


def _saved(config, devices, folder):
  """The same of `paraxis train`: its checkpoints, as far as there are any."""
  problem = ''
  try:
    loop.run(config, folder, say=QUIET, devices=devices)
  except errors.CrashError as e:
    problem = str(e)
  job = job_lib.of_shapes(config, '', devices)
  with job.context():
    like = start.wanted(job)
    path = pathlib.Path(folder) / workdir_lib.CHECKPOINTS
    with store_lib.Store(path, read_only=True, say=QUIET) as store:
      states = {n: store.restore(n, like)[0] for n in store.steps()}
  rows = metrics_lib.read(folder)
  return states, [rows[n]['train/loss'] for n in rows], problem


def _same_bits(found, wanted):
  return found.keys() == wanted.keys() and all(
    np.asarray(x).tobytes() == wanted[path].tobytes()
    for path, x in found.items()
  )


def holds_what_was_asked(run, *, mesh):
  """EQ: the checkpoint of every step is the state after it, bit for bit.

  Every step's update donates what the save before it was asked for. States and
  losses are those of a plain loop that never saves.
  """
  config, devices = experiment.on(run.config, mesh)
  steps = config.train.steps
  wanted, losses = _never_saved(config, devices)
  with tempfile.TemporaryDirectory(prefix='paraxis-saving-') as folder:
    states, found, problem = _saved(config, devices, folder)
  right = sum(_same_bits(x, wanted[n]) for n, x in states.items())
  same = found == losses
  size = sum(x.nbytes for x in wanted[steps].values())
  return claims.Outcome(
    f'{steps} of {steps}',
    f'{right} of {steps}{"" if same else ", other losses"}',
    f'{mesh}, {steps} steps, each saved and then donated, {len(wanted[steps])} '
    f'leaves of {size:,} bytes, bitwise a loop that never saves; losses '
    f'{"equal" if same else "DIFFER"}{"; " + problem if problem else ""}',
    right == steps and same,
  )


def _in_turn(forms, tree, step):
  """Stalls of one size in one round: {', synchronous', ', ours': seconds}.

  Args:
    forms: {name: bench.Ours}. step: seconds of a pause, the device's part.
  """
  out = {}
  for name, store in forms.items():
    found = bench.stalls(store, tree, functools.partial(time.sleep, step))
    out[f', {name}'] = found[bench.BEGIN] + found[bench.BARRIER]
  return out


@functools.lru_cache(maxsize=1)
def _measured(megabytes, steps, rounds):
  """{'32, ours': [seconds, one a round]} of each size, forms in turn.

  megabytes, steps: tuples: sizes in MiB, and seconds of a step of each.
  """
  with contextlib.ExitStack() as stack:

    def opened(form):
      folder = tempfile.TemporaryDirectory(prefix='paraxis-saving-')
      path = pathlib.Path(stack.enter_context(folder))
      return stack.enter_context(contextlib.closing(form(path)))

    made = {}
    for size, step in zip(megabytes, steps, strict=True):
      tree = bench.arrays(ARRAYS, size * 2**18 // ARRAYS)
      forms = dict(synchronous=bench.Synchronous, ours=bench.Ours)
      made[str(size)] = functools.partial(
        _in_turn,
        {name: opened(form) for name, form in forms.items()},
        jax.block_until_ready(tree),
        step,
      )
    return measure.interleave(made, rounds, time.perf_counter)


def stall(run, *, megabytes, steps, rounds, at_least):
  """CPU: a step waits for a synchronous save so many times as long as for ours.

  Args:
    megabytes: sizes of the state in MiB, float32 on one device.
    steps: seconds of a step at each size: a pause, the device's part.
    at_least: the median ratio, at every size.
  """
  times = _measured(tuple(megabytes), tuple(steps), rounds)
  each, medians = [], []
  for size, step in zip(megabytes, steps, strict=True):
    other, ours = (times[f'{size}, {name}'] for name in ('synchronous', 'ours'))
    found = measure.spread(measure.ratios(other, ours))
    medians.append(found.median)
    median = lambda values: measure.spread(values).median
    each.append(
      f'{size} MiB: {1e3 * median(other):.0f} ms over {1e3 * median(ours):.1f} '
      f'ms, in steps of {step:g} s, '
      f'{experiment.numbers(found, ".0f")} (least, median, most)'
    )
  return claims.Outcome(
    f'>= {at_least:g}',
    experiment.numbers(medians, '.0f'),
    'wall time for which the thread that trains is blocked, a save at every '
    f'step, {rounds} rounds in turn; the device is a pause, and not these '
    f'cores. {"; ".join(each)}',
    min(medians) >= at_least,
  )


def growth(run, *, megabytes, steps, rounds, at_most):
  """CPU: the stall of the largest over that of the smallest state, likewise.

  Args:
    megabytes, steps, rounds: as of `stall`.
    at_most: the median of ours over a synchronous save's.
  """
  times = _measured(tuple(megabytes), tuple(steps), rounds)
  small, large = min(megabytes), max(megabytes)
  ours, other = (
    measure.ratios(times[f'{large}, {name}'], times[f'{small}, {name}'])
    for name in ('ours', 'synchronous')
  )
  found = measure.spread(measure.ratios(ours, other))
  median = lambda values: measure.number(measure.spread(values).median)
  return experiment.at_most(
    found.median,
    at_most,
    f'{small} to {large} MiB: ours {median(ours)}, a synchronous save '
    f'{median(other)} times; {experiment.numbers(found, ".2f")} (least, '
    'median, most)',
  )
