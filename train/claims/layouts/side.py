"""Claims about a network beside frozen layers (models/side.py)."""

import functools

import jax
import numpy as np

from paraxis.models import side as side_lib
from paraxis.sharding import mesh as mesh_lib
from paraxis.sharding.meter import aot
from paraxis.train import program as job_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import target_compile
from paraxis.train.certify import trial
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_tasks
from paraxis.train.claims import tasks

HELD = 16  # batches of new pieces that a model is asked


def deaf():
  """Knock-out: what is read of the states has no say in the features."""
  right = side_lib.Side.read
  return knockouts.patched(
    side_lib.Side, 'read', lambda *given: 0 * right(*given)
  )


def loud():
  """Knock-out: a side network begins with a say of its own."""
  right = side_lib.Side.init

  def init(own, key):
    params = right(own, key)
    up = f'{side_lib.FOLDER}up'
    return params | {up: jax.random.normal(key, params[up].shape)}

  return knockouts.patched(side_lib.Side, 'init', init)


def begins(run, *, mesh):
  """EQ: before the first step the model is the frozen one, bitwise.

  Args:
    mesh: text as for --mesh.
  """
  found, plain = [], {'train.side': 0}
  for changes in ({}, plain):
    config, devices = experiment.on(run.config, mesh, changes)
    job = job_lib.of_shapes(config, '', devices)
    with job.context():
      batch = job.put(trial.batches(config, packed=True)[0])
      read = jax.jit(lambda p, b, m=job.model: m.features(p, b)[0])
      found.append(np.asarray(read(job.initial_state().params, batch)))
  off = int((found[0] != found[1]).sum())
  return claims.Outcome(
    '0 differ', f'{off:,} differ', f'{mesh}: of {found[0].size:,} features',
    off == 0,
  )  # fmt: skip


def _temporaries(config, topology):
  """Bytes of temporaries of (a gradient, a forward pass)."""
  target = aot.topology(topology)
  with target.context():
    job = job_lib.of_shapes(config, '', target.devices)
    traced = target_compile.trace(job)['gradient']
    with job.context():
      evaluate = step_lib.make(job.built, job.optimizer, 0.0).evaluate
      shapes = job.state.variables, job.batch_shapes()
      forward = jax.jit(evaluate).trace(*shapes)
  compiled = functools.partial(aot.compile_for, target)
  with job.context():
    return np.array(
      [
        aot.memory(compiled(name, program)).temporaries
        for name, program in (('gradient', traced), ('forward', forward))
      ]
    )


def _kept(config, topology, depths):
  """Bytes that a gradient keeps of a further layer, beyond a forward pass."""
  few, many = (
    _temporaries(experiment.fields(config, {'model.num_layers': n}), topology)
    for n in depths
  )
  gradient, forward = (many - few) / (depths[1] - depths[0])
  return gradient - forward


def memory(run, *, topology, mesh, changes, widths, depths, at_most, rival):
  """AOT: what a gradient keeps of a layer is bounded without its width.

  Bytes of temporaries that a further layer adds to a gradient, beyond those
  that it adds to a forward pass (which a compiler's copy of its weights is in),
  in arrays of R numbers a token: T_l, the mean of it, and a cotangent of each.

  Args:
    mesh: text as for --mesh, of axes of rows. changes: {'section.field': value}
      of all. widths: [{'section.field': value}, ..] of the model, narrow and
      wide. depths: [layers, more layers]. at_most: such arrays. rival:
      {'section.field': value} of another way to learn, told of beside it.
  """
  config = experiment.laid_out(run.config, mesh, changes)
  of = functools.partial(_kept, topology=topology, depths=depths)
  tokens = config.train.batch_size * config.data.sequence_length
  shards = np.prod([*mesh_lib.parse(mesh).values()])
  itemsize = jax.numpy.dtype(config.model.dtype).itemsize
  array = tokens // shards * config.train.side * itemsize
  ours = [of(experiment.fields(config, width)) / array for width in widths]
  theirs = of(experiment.fields(config, widths[-1], rival)) / array
  names = [str(width['model.d_model']) for width in widths]
  return claims.Outcome(
    f'<= {at_most:g} arrays of {config.train.side} numbers a token',
    experiment.numbers(ours, '.2f'),
    f'{topology}, {mesh}: of a layer, at model.d_model={" and ".join(names)}; '
    f'with {", ".join(f"{k}={v}" for k, v in rival.items())} {theirs:.1f} at '
    f'{names[-1]}',
    bool(max(ours) <= at_most),
  )


def _wrong(config, params, task):
  """Share of new pieces whose answer is wrong."""
  job = job_lib.of_shapes(config, '', jax.devices()[:1])
  with job.context():
    ask = jax.jit(functools.partial(on_tasks.right, job.model, task))
    found = [
      ask(
        params,
        job.put(tasks.draw(task, config.train.batch_size, 10_000 + i, True)),
      )[0]
      for i in range(HELD)
    ]
  return 1 - float(np.mean(found))


def learns(run, *, task, base, fields, families, seeds, better):
  """LEARN: some ways to fine-tune a frozen model err less than others.

  Args:
    task: fields of labels.Labels. base: {'section.field': value} of the
      training on text that all begin with. fields, families: likewise, of each
      way's training on the task: {name: ..}. seeds: of all. better: list of
      [name, name, by]: the first errs less, by more than that share.
  """
  made = tasks.make('labels', **task)
  plain = experiment.fields(run.config, {'train.side': 0}, base)
  trainings = ablation.trained(run, {'base': plain}, seeds)
  seconds, begin = ablation.cpu_seconds(trainings), {}
  for one in trainings['base']:
    job = job_lib.of_shapes(one.config, '', jax.devices()[:1])
    with job.context():
      begin[one.config.train.seed] = experiment.restored(job, one.folder)
  found, sizes = {}, {}
  for name, own in families.items():
    rows, more = on_tasks.trained(
      run, made, fields | own, seeds, name, (begin, base)
    )
    seconds = max(seconds, more)
    found[name] = [_wrong(config, params, made) for config, params, _ in rows]
    config, params, _ = rows[0]
    model = job_lib.of_shapes(config, '', jax.devices()[:1]).model
    of = model.sizes(params)
    sizes[name] = sum(of[p] for p in of if p not in model.frozen)
  findings = [ablation.less(found, a, b, by, seconds) for a, b, by in better]
  learned = ', '.join(f'{name} {n:,}' for name, n in sizes.items())
  return ablation.outcome(
    run, found, findings, 'share of pieces whose domain is wrong',
    f'{made.about}, chance {1 - made.guess[0]:.3f}; numbers learned: {learned}',
    seconds,
  )  # fmt: skip
