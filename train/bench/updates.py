"""Benches of what follows a gradient: update rules, exchanges of replicas.

Of every rule a step beside AdamW's, and the bytes of its state. A step is the
gradient and the update of the model of `paraxis bench step` with
four times its rows, 8,192 tokens, on fsdp=8: where a rule that reads whole
matrices has to have them shared out (train/updates/matrices.py). The gradient
is the same for all, so it is timed once a round; of updates STEPS, so that what
a rule does at every tenth of them counts as a tenth. What a rule reaches after
so many steps is searched by `paraxis reproduce algoperf`: times.csv there has
the median time to a target in steps, tokens and operations.
"""

import jax
import jax.numpy as jnp

from paraxis.configs import schema
from paraxis.configs.base import optimizer as fields
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure
from paraxis.train.bench import train as bench_train
from paraxis.train.run import memory
from paraxis.train.steps import outer as outer_lib

MESH, TIMES_ROWS, STEPS = 'fsdp=8', 4, 10
PLAIN = fields.NAMES[0]
# Most CPU-seconds of gradient and update over AdamW's.
BOUNDS = {'muon': 1.2, 'soap': 1.6}


def optimizers(rounds, quick, say):
  """A step of every rule over AdamW's; bytes of its state over AdamW's."""
  plain = bench_train.config(quick, heads=8)
  rows = plain.train.batch_size * TIMES_ROWS
  plain = schema.with_value(plain, 'train.batch_size', rows)
  setup = f'{bench_train.describe(plain)} and others, {MESH}'
  now, report = bench_train.begin('optimizers', setup, quick)
  say('compiling the gradient')
  first = bench_train.Ours(plain, MESH, now)
  held, candidates = {}, {'gradient': _gradient(first, now)}
  for name in fields.NAMES:
    say(f'compiling {name}')
    job = job_lib.on_devices(_with(plain, name), MESH)
    held[name] = memory.device_bytes(job.state.optimizer)
    candidates[name] = _updates(job, first, now)
  times = measure.interleave(candidates, rounds, now, say)
  gradient = times.pop('gradient')
  steps = {
    name: [g + u / STEPS for g, u in zip(gradient, times[name], strict=True)]
    for name in fields.NAMES
  }
  report.add({'gradient': gradient})
  report.add({f'gradient and update, {n}': row for n, row in steps.items()})
  for name in fields.NAMES[1:]:
    ratios = measure.ratios(steps[name], steps[PLAIN])
    what = f'time of a step, {name} / {PLAIN}'
    if name in BOUNDS:
      report.check(what, ratios, BOUNDS[name], least=False)
    else:
      shown = ' '.join(f'{x:.2f}' for x in measure.spread(ratios))
      report.notes.append(f'{what}: {shown}')
  share = lambda name: f'{name} {held[name] / held[PLAIN]:.2f}'
  report.notes.append(
    f'bytes of state on a device, over those of {PLAIN} '
    f'({held[PLAIN] / 2**20:.1f} MiB): {", ".join(map(share, fields.NAMES))}'
  )
  return report


def _with(c, name):
  """The config with another rule."""
  more = {'optimizer.schedule': 'constant'} if name == 'schedule_free' else {}
  return schema.with_values(c, {'optimizer.name': name} | more)


def _gradient(first, now):
  """-> () -> {'': seconds} of a gradient."""

  def run():
    with first.job.context():
      before = now()
      jax.block_until_ready(first.gradient())
      return {'': now() - before}

  return run


def _updates(job, first, now):
  """-> () -> {'': seconds} of STEPS updates by the gradients of `first`."""
  clip = job.config.optimizer.clip_norm
  made = step_lib.make(job.built, job.optimizer, clip)
  with job.context():
    grads = first.gradient()
    update = job.compile_update(made.update, first.programs[0])
    kept = [job.initial_state()]

  def run():
    with job.context():
      before = now()
      for _ in range(STEPS):
        kept[0], _ = update(kept[0], *grads)
      jax.block_until_ready(kept)
      return {'': now() - before}

  return run


REPLICAS = 'replica=4,data=2'
PASSES = 6  # over the parameters: an exchange reads 3 trees and writes 3


def outer(rounds, quick, say):
  """A step of replicas alone and of replicas that average, an exchange."""
  plain = bench_train.config(
    quick, heads=8, choices=dict(collectives='explicit')
  )
  alone = schema.with_value(plain, 'outer', schema.Outer('mean', 1))
  sizes = bench_train.describe(plain)
  setup = f'{sizes}, {REPLICAS}, 8 devices, explicit collectives'
  now, report = bench_train.begin('outer', setup, quick)
  say('compiling')
  made = {
    'averaged': bench_train.Ours(plain, REPLICAS, now),
    'alone': bench_train.Ours(alone, REPLICAS, now),
  }
  times = measure.interleave(
    {f'step, {name}': ours.run for name, ours in made.items()},
    rounds, now, say,
  )  # fmt: skip
  report.add(times)
  report.check(
    'step: time of replicas alone / averaged',
    measure.ratios(times['step, alone'], times['step, averaged']),
    1.03,
    least=False,
  )
  moves = _exchange_and_passes(made['alone'].job, now)
  times = measure.interleave(moves, rounds, now, say)
  report.add(times)
  report.check(
    f'exchange: time of it / {PASSES} passes over the parameters of a replica',
    measure.ratios(*times.values()),
    1.5,
    least=False,
  )
  return report


def _exchange_and_passes(job, now):
  """{name: function -> {'': seconds}} of an exchange, and of passes over the
  parameters of every replica: each adds to them what another array holds."""
  with job.context():
    state, run = job.initial_state(), outer_lib.Exchange(job)
    run.compile()
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    total, params = jax.tree.map(jnp.copy, [state.outer.params] * 2)

  def exchange():
    nonlocal state
    with job.context():
      before = now()
      state, _ = run(1, state, None)
      jax.block_until_ready(state)
      return {'': now() - before}

  def passes():
    nonlocal total
    with job.context():
      before = now()
      for _ in range(PASSES // 3):  # each reads two trees and writes one
        total = add(total, params)
      jax.block_until_ready(total)
      return {'': now() - before}

  return {'exchange': exchange, f'{PASSES} passes': passes}
