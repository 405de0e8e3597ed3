"""Claims about steps along a direction: what is sent, held, learned, logged."""

import tempfile

import jax
import numpy as np

from paraxis.sharding.meter import aot
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.bench import measure
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.run import metrics
from paraxis.train.steps import zeroth_order


def another_direction():
  """Knock-out: an update goes along another direction than the losses did."""
  right = zeroth_order.Descent.along
  return knockouts.patched(
    zeroth_order.Descent, 'along', lambda own, draw: right(own, draw + 1)
  )


def another_key():
  """Knock-out: the log is of other directions than those of the run."""
  right = zeroth_order.logged
  return knockouts.patched(
    zeroth_order, 'logged', lambda slope, draw, loss: right(slope, 0, loss)
  )


def third_pass():
  """Knock-out: a step reads its rows a third time, where the parameters are."""
  sides = *zeroth_order.SIGNS, 0.0
  return knockouts.patched(zeroth_order, 'SIGNS', sides)


def scalars(run, *, meshes, numbers):
  """HLO: a step sends so many numbers of 4 bytes, and nothing else.

  Args:
    meshes: texts as for --mesh, which shard rows alone.
  """
  found, every = {}, True
  for mesh in meshes:
    config, devices = experiment.on(run.config, mesh)
    sent = [
      c
      for name in target_compile.PROGRAMS
      for c in experiment.step_collectives(config, devices, name)
    ]
    found[mesh] = sum(c.count for c in sent)
    every &= all(c.operand_bytes == 4 for c in sent)
  return claims.Outcome(
    f'{numbers} numbers of 4 bytes',
    f'{experiment.numbers(found.values())}{"" if every else ", some larger"}',
    f'{"; ".join(meshes)}: messages of both halves of a step',
    set(found.values()) == {numbers} and every,
  )


def replayed(run, *, mesh, steps):
  """EQ: numbers of the parameters that differ, bitwise, when a run is made
  again from its first state, the seed, and what metrics.jsonl has of a step.

  Args:
    mesh: text as for --mesh, of the run. steps: of it.
  """
  config, devices = experiment.on(run.config, mesh, {'train.steps': steps})
  jobs = []
  with tempfile.TemporaryDirectory() as folder:
    see = lambda step, values, job: jobs.append(job)
    claims.finish(config, folder, run.say, devices=devices, callbacks=[see])
    rows, job = metrics.read(folder), jobs[-1]
    log = [(r['train/slope'], r['train/draw'], r['train/loss'])
           for r in rows.values() if 'train/slope' in r]  # fmt: skip
    wanted = jax.device_get(experiment.restored(job, folder))
  with job.context():
    clip = config.optimizer.clip_norm
    update = step_lib.make(job.built, job.optimizer, clip).update
    first = job.initial_state()
    start = jax.device_get(first.params)
    state = zeroth_order.replayed(update, first, log)
  found = jax.device_get(state.params)
  off = sum(int((found[p] != x).sum()) for p, x in wanted.items())
  moved = sum(int((start[p] != x).sum()) for p, x in wanted.items())
  return claims.Outcome(
    '0 differ',
    f'{off:,} differ',
    f'{mesh}: {moved:,} numbers that {len(log)} steps moved, from {len(log)} '
    'slopes and keys',
    off == 0 and moved > 0 and len(log) == steps,
  )


def peak(run, *, topology, mesh, changes, at_most):
  """AOT: most bytes of a step's halves over those of a forward pass.

  Args:
    mesh: text as for --mesh. changes: {'section.field': value} of the model.
  """
  config = experiment.laid_out(run.config, mesh, changes)
  target, held = aot.topology(topology), {}
  with target.context():
    job = job_lib.of_shapes(config, '', target.devices)
    traced = target_compile.trace(job)
    with job.context():
      evaluate = step_lib.make(job.built, job.optimizer, 0.0).evaluate
      shapes = job.state.variables, job.batch_shapes()
      traced['forward'] = jax.jit(evaluate).trace(*shapes)
  with job.context():
    for name, program in traced.items():
      held[name] = aot.memory(aot.compile_for(target, name, program)).peak
  shares = [held[n] / held['forward'] for n in target_compile.PROGRAMS]
  size = sum(job.model.sizes(job.state.params).values())
  return claims.Outcome(
    f'<= {at_most:g}',
    experiment.numbers(shares, '.3f'),
    f'{topology}, {mesh}: gradient and update over a forward pass of '
    f'{held["forward"] / 2**30:.2f} GiB, {size / 1e6:.0f}M parameters',
    max(shares) <= at_most,
  )


def passes(run, *, changes, forwards, draws, rounds):
  """CPU: a step over so many forward passes and so many draws of a direction.

  Args:
    changes: {'section.field': value}.
  """
  config, devices = experiment.on(run.config, 'data=1', changes)
  job = job_lib.on_devices(config, devices=devices)
  made = step_lib.make(job.built, job.optimizer, config.optimizer.clip_norm)
  with job.context():
    state = job.initial_state()
    batch = job.put(trial.batches(config, packed=False)[0])
    inner = state.inner

    def drawn(params, draw):
      there = zeroth_order.moved(job.model, params, draw, 1e-3)
      return {p: x[...] for p, x in there.items()}

    grads, forward = map(jax.jit, (made.grads, made.evaluate))
    # Both halves write what they are given; so that a round costs no copy,
    # neither donates.
    update, draw = jax.jit(made.update), jax.jit(drawn)
    ways = {
      'step': lambda: update(state, *grads(inner, batch)),
      'forward': lambda: forward(inner, batch),
      'draw': lambda: draw(inner, batch.draw),
    }
    ready = {n: lambda f=f: jax.block_until_ready(f()) and None
             for n, f in ways.items()}  # fmt: skip
    times = measure.interleave(ready, rounds, measure.settled)
  both = zip(times['forward'], times['draw'], strict=True)
  bound = [forwards * f + draws * d for f, d in both]
  found = measure.spread(measure.ratios(times['step'], bound))
  apart = measure.spread(measure.ratios(times['step'], times['forward']))
  size = sum(job.model.sizes(inner).values())
  return claims.Outcome(
    f'<= {forwards:g} forward passes and {draws} draws',
    f'{found.median:.3f} of them',
    f'{size / 1e6:.1f}M parameters, '
    f'{config.train.batch_size * config.data.sequence_length:,} tokens; '
    f'{rounds} rounds in turn: {experiment.numbers(found, ".2f")}; in forward '
    f'passes {experiment.numbers(apart, ".2f")}',
    found.median <= 1,
  )


def learns(run, *, families, seeds, fall, share):
  """LEARN: held-out bits per byte fall by so many along directions, and by such
  a share of what another estimator reaches in as many steps.

  Args:
    families: {'start', 'directions', 'gradients': {'section.field': value}}.
    seeds: of the trainings.
  """
  variants = {
    name: experiment.fields(run.config, changes)
    for name, changes in families.items()
  }
  trainings = ablation.trained(run, variants, seeds)
  found = ablation.numbers(trainings, 'bits_per_byte')
  start, own, other = (
    np.asarray(found[n]) for n in ('start', 'directions', 'gradients')
  )
  seconds = ablation.cpu_seconds(trainings)
  findings = [
    ablation.less(found, 'directions', 'start', fall, seconds),
    ablation.judged(
      f'their fall above {share:g} of that by gradients',
      (start - own) / (start - other) - share,
      0.0,
      seconds,
      signed=False,
    ),
  ]
  return ablation.outcome(
    run, found, findings, 'bits per byte',
    f'what is learned: all but {run.config.train.freeze}; '
    f'{run.config.train.steps:,} steps',
    seconds,
  )  # fmt: skip
