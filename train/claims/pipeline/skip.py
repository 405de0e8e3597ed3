"""Claims about microbatches that leave stages out (SkipPipe, arXiv:2502.19913).

    x <- layers of stage s applied to x,  for s in the path of the microbatch

What a pipeline computes with the schedule `skip` does not need the pipeline:
here one device runs each microbatch through the layers on its path alone, which
are picked from the stacks. One claim says that the two are equal; the others
train so. A model is then evaluated without some of its stages, on a few
balanced paths drawn anew: perplexity of held-out text, its geometric mean over
paths, exp(mean of nats per token).

Legend: A microbatches, K layers on a path.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.models import aux as aux_lib
from paraxis.sharding.meter import compiling
from paraxis.sharding.pipeline import paths as schedule_paths
from paraxis.sharding.pipeline import schedules
from paraxis.train import loss as loss_lib
from paraxis.train import step as step_lib
from paraxis.train.certify import trial
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.plot import figures
from paraxis.train.plot import losses as plot

PICTURE = 'perplexity.png'
SMALL = {
  'model.dtype': 'float64', 'model.param_dtype': 'float64', 'model.d_model': 32,
  'model.d_ff': 64, 'model.num_heads': 4, 'model.vocab_size': 64,
  'data.sequence_length': 32,
}  # fmt: skip


def _skip(fraction, schedule='skip'):
  return {'pipeline.schedule': schedule, 'pipeline.skip_fraction': fraction}


def all_stages():
  """Knock-out: no microbatch leaves a stage out."""
  draw = schedule_paths.skip_paths
  whole = lambda stages, microbatches, fraction, *seed: draw(
    stages, microbatches, 0
  )
  return knockouts.patched(schedule_paths, 'skip_paths', whole)


def same_stages():
  """Knock-out: all microbatches leave the same stages out."""
  draw = schedule_paths.skip_paths
  first = lambda stages, microbatches, *how: (
    draw(stages, 1, *how) * microbatches
  )
  return knockouts.patched(schedule_paths, 'skip_paths', first)


def layers_of(paths, stages, layers):
  """(A, K) int: the layers that each microbatch passes, in order.

  UserError if the stages do not divide the layers, for then paths of as many
  stages differ in layers.
  """
  if layers % stages:
    raise errors.UserError(
      f'model.num_layers={layers} is not a multiple of {stages} stages.'
    )
  each = layers // stages
  return np.array(
    [[s * each + l for s in path for l in range(each)] for path in paths]
  )


def training_paths(config, stages):
  """Paths of the microbatches of a step, as the pipeline draws them."""
  pipeline = config.pipeline
  return schedules.make(
    'skip',
    stages,
    config.microbatches,
    fraction=pipeline.skip_fraction,
    seed=config.train.seed,
  ).paths


def nats(model, params, batch, layers):
  """Sum of nats over the weighted targets of (B, T), through some layers.

  Args:
    layers: (K,) int, in order.
  """
  picked = {
    p: x[layers] if p.startswith('layers/') else x for p, x in params.items()
  }
  x, see = model.embed(params, batch), model.visibility(batch)
  x, _ = model.run(model.pattern[: len(layers)], picked, x, see)
  return loss_lib.of_layers(model, picked, x, batch)


def make_step(layers):
  """A make_step for loop.run: microbatch i passes layers[i] of (A, K)."""

  def make(built, optimizer, clip_norm):
    model = built.model

    def one(params, batch, row):
      of = lambda p: nats(model, p, batch, row) / batch.denominator
      return jax.value_and_grad(of)(params)

    def grads(params, batch):
      def add(total, xs):
        rows, row = xs
        mine = rows._replace(denominator=batch.denominator)
        return jax.tree.map(jnp.add, total, one(params, mine, row)), ()

      wide = jnp.promote_types(model.config.dtype, jnp.float32)
      zeros = jnp.zeros((), wide), jax.tree.map(jnp.zeros_like, params)
      rows = batch._replace(denominator=None), jnp.asarray(layers)
      loss, gradients = jax.lax.scan(add, zeros, rows)[0]
      return loss, gradients, aux_lib.of_loss(loss)

    return step_lib.make(built, optimizer, clip_norm)._replace(grads=grads)

  return make


def equals_pipeline(run, *, mesh, fractions, within):
  """EQ: the pipeline with `skip` against picked layers on one device.

  Loss and every gradient, float64, with fractions of the stages left out by
  each microbatch; at fraction 0 also against 1F1B, bit for bit.
  """
  found, passed = {}, True
  with jax.enable_x64(True):
    for fraction in fractions:
      config, devices = experiment.on(run.config, mesh, SMALL | _skip(fraction))
      reference = trial.reference(config, True, devices[0])
      params, batch = reference.params, reference.batches[0]
      loss, gradients = _on_stages(config, devices, params, batch)
      paths = training_paths(config, config.mesh.stage)
      left = round(config.mesh.stage * (1 - fraction))
      passed &= {len(path) for path in paths} == {left}
      one = _on_one(config, devices[0], paths, params, batch)
      gap, _ = trial.worst(gradients | {'loss': loss}, one)
      found[f'{fraction:.0%}'] = gap
    exact = 0 not in fractions or _bitwise(config, devices, params, batch)
  return experiment.equal(
    found,
    within,
    f'{mesh}, shrunk, packed rows; stages left out: '
    f'{experiment.listed(found)}; with none left out '
    f'{"equal" if exact else "NOT equal"} to 1F1B bit for bit'
    + ('' if passed else '; paths do NOT leave out so much'),
    exact and passed,
  )


def _on_stages(config, devices, params, batch):
  """(loss, {path: gradient, layers in order}) of a pipeline, in NumPy."""
  side = trial.Runner(config, devices)
  loss, gradients, _ = side.gradients(side.start(params), batch)
  return np.asarray(loss), side.job.in_order(gradients)


def _alone(config):
  """The same config on one device, as many microbatches as on stages."""
  alone = dataclasses.replace(config, mesh=schema.Mesh())
  return experiment.fields(
    alone, {'pipeline.microbatches': config.microbatches}
  )


def _on_one(config, device, paths, params, batch):
  """{path: gradient, 'loss': loss} of one device, microbatches on paths."""
  layers = layers_of(paths, config.mesh.stage, config.model.num_layers)
  side = trial.Runner(_alone(config), [device])
  step = make_step(layers)(side.job.built, side.job.optimizer, 0.0)
  state = side.start(params)
  with side.job.context():
    loss, gradients, _ = jax.jit(step.grads)(state.variables, side.put(batch))
  return jax.device_get(gradients | {'loss': loss})


def _bitwise(config, devices, params, batch):
  """Whether `skip` that leaves nothing out is 1F1B, bit for bit."""
  both = []
  for name in ('skip', 'one_f_one_b'):
    mine = experiment.fields(config, _skip(0.0, name))
    loss, gradients = _on_stages(mine, devices, params, batch)
    both.append(gradients | {'loss': loss})
  skip, full = both
  return all(np.array_equal(skip[p], full[p]) for p in full)


def balanced(run, *, stages, microbatches, fractions):
  """SIM: paths leave out so much, all stages but the first equally often."""
  counts, right = [], True
  for fraction in fractions:
    made = schedules.make(
      'skip', stages, microbatches, fraction=fraction,
      seed=run.config.train.seed,
    )  # fmt: skip
    visits = [sum(s in p for p in made.paths) for s in range(stages)]
    lengths = {len(p) for p in made.paths}
    right &= not made.faults() and visits[0] == microbatches
    right &= lengths == {round(stages * (1 - fraction))}
    right &= max(visits[1:]) - min(visits[1:]) <= 1
    counts.append(f'{fraction:.0%} {experiment.numbers(visits)}')
  return claims.Outcome(
    'differ by <= 1',
    'balanced' if right else 'NOT balanced',
    f'{microbatches} microbatches; how many visit each of {stages} stages: '
    f'{"; ".join(counts)}. The first is never left out, none meet on a device',
    right,
  )


def _learn(stages, config, folder, say):
  """ablation.by_loop, microbatches on the paths that the pipeline draws."""
  paths = training_paths(config, stages)
  make = make_step(layers_of(paths, stages, config.model.num_layers))
  return ablation.by_loop(config, folder, say, make)


def perplexity(job, params, layers):
  """exp(nats per held-out token), mean over the paths of (paths, K)."""
  model, total, tokens = job.model, [], 0

  def mean(params, batch):
    of = lambda row: nats(model, params, batch, row)
    return jax.lax.map(of, jnp.asarray(layers)).mean()

  with job.context():
    run = None
    for held in job.held_out:
      for i in range(len(held)):
        batch = job.put(held.batch_at(i))
        run = run or compiling.compile_step('held out', mean, params, batch)
        total.append(run(params, batch))
      tokens += held.n_pairs
  return math.exp(math.fsum(map(float, jax.device_get(total))) / tokens)


def _perplexities(run, *, stages, seeds, fractions, removed, paths):
  """({share left out in training: {in evaluation: [of each seed]}}, seconds).

  seconds: CPU-seconds of the longest training.
  """
  plain = _alone(run.config)
  variants = {
    f'skip {round(100 * f)}': experiment.fields(plain, _skip(f))
    for f in fractions
  }
  made = ablation.trained(
    run, variants, seeds, functools.partial(_learn, stages), {'stages': stages}
  )
  found = {
    fraction: {
      share: [_left_out(t, stages, share, paths) for t in row]
      for share in removed
    }
    for fraction, row in zip(fractions, made.values(), strict=True)
  }
  run.say(f'wrote {_draw(found, run.results / PICTURE)}')
  folders = [t.folder for row in made.values() for t in row]
  run.say(f'wrote {plot.draw(folders, run.results / plot.NAME)}')
  return found, ablation.cpu_seconds(made)


def _left_out(training, stages, share, paths):
  """Perplexity of a training on paths that leave out a share of the stages."""
  config = training.config
  ways = schedule_paths.skip_paths(
    stages, paths if share else 1, share, config.train.seed + 1
  )
  layers = layers_of(ways, stages, config.model.num_layers)
  return training.measured(
    f'perplexity, {share:.0%} left out, {len(ways)} paths',
    lambda job, params: perplexity(job, params, layers),
  )


def _draw(found, path):
  """Perplexity against the share left out in evaluation, a line a training."""
  curves = {
    f'{fraction:.0%} of the stages': (
      [100 * s for s in row], [np.mean(p) for p in row.values()]
    )
    for fraction, row in found.items()
  }  # fmt: skip
  fig, _ = figures.lines(
    curves,
    'stages left out when the model is evaluated (%)',
    'held-out perplexity per token',
    title='left out in training',
  )
  return figures.save(fig, path)


def _named(found):
  """{'trained with 50% left out, without 0%': [perplexity of each seed]}."""
  return {
    f'trained with {f:.0%} left out, without {share:.0%}': values
    for f, row in found.items()
    for share, values in row.items()
  }


def robust(run, *, training, trained, share, at_most):
  """LEARN: without a share of the stages, a model that skipped stages in
  training loses less than the plain one, in perplexity over the plain model's
  with all stages.

  Skipping in training makes the whole model worse, so its own perplexity would
  flatter it as the divisor.

  Args:
    training: {'stages', 'seeds', 'fractions': left out in training, of one
      model each, 0 for the plain one, 'removed': left out in evaluation,
      'paths': over which to take the mean}.
    trained, share: the model, and what is left out of it.
    at_most: the paper's ratio; above it the claim is `direction only`.
  """
  found, seconds = _perplexities(run, **training)
  cut, plain = (np.divide(found[f][share], found[0][0]) for f in (trained, 0))
  text = f'without {share:.0%}, trained with {trained:.0%} left out'
  finding = ablation.judged(f'{text} below plain', plain - cut, 0.0, seconds)
  if finding.passed and not ablation.at_most(text, cut, at_most).passed:
    finding = finding._replace(verdict='direction only')
  return _outcome(run, found, finding, cut, seconds)


def against_full(run, *, training, trained, share):
  """LEARN: without a share of the stages, a model that skipped stages in
  training is below the plain one that loses as many, in perplexity.

  Args: as for `robust`.
  """
  found, seconds = _perplexities(run, **training)
  ratios = np.divide(found[trained][share], found[0][share])
  text = f'trained with {trained:.0%} left out below plain, without {share:.0%}'
  finding = ablation.judged(text, 1 - ratios, 0.0, seconds)
  return _outcome(run, found, finding, ratios, seconds)


def _outcome(run, found, finding, ratios, seconds):
  return ablation.outcome(
    run,
    _named(found),
    [finding],
    'perplexity per token',
    f'mean over paths drawn anew; ratios {experiment.numbers(ratios, ".3f")}; '
    f'{run.config.train.steps} steps',
    seconds,
  )
