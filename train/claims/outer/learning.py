"""Claims about what replicas that step alone learn, beside data parallel.

All read the same batches, as many tokens: of a step's rows each replica takes
its own part. Held-out text is read with the anchor. Configs that give the same
task share trainings, in the folder SHARED beside their results.
"""

import functools

import numpy as np

from paraxis.configs import schema
from paraxis.configs.base import errors
from paraxis.train import loop
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families as families_lib
from paraxis.train.claims import harness as claims
from paraxis.train.run import metrics
from paraxis.train.run import origin

SHARED = 'replicas'
PLAIN = schema.Outer()


def _shared(run, config):
  """A harness.Run whose trainings are in the folder that configs share.

  config: of its trainings. A knock-out replaces what the run's own outer loop
  does; other loops are trained once, with it or without.
  """
  other = run.shared(SHARED)
  other.mechanism = ('configs/base/outer.py',)  # what is due when
  if config.outer != run.config.outer:
    other.replaced = ()
  return other


def _configs(run, families):
  """{family: schema.Config}; and that of data parallel."""
  plain = schema.with_value(run.config, 'outer', PLAIN)
  return {
    name: experiment.fields(plain, experiment.under('outer', family))
    for name, family in families.items()
  }, plain


def _from_warm(results, config, folder, say):
  """As ablation.by_loop, from the parameters of 'warm' of the same seed."""
  source = origin.Run(str(results / f'warm-{config.train.seed}'))
  found = claims.finish(
    config, folder, say, devices=experiment.devices_of(config),
    options=loop.Options('', source),
  )  # fmt: skip
  return {'bits_per_byte': found.bits_per_byte}


def _trained(run, families, seeds, warm):
  """({family: [bits per byte of each seed]}, most CPU-seconds), drawn."""
  configs, plain = _configs(run, families)
  how, picture, trainings = {}, 'from_scratch.png', {}
  if warm:
    first = experiment.fields(plain, {'train.steps': warm})
    home = _shared(run, first)
    ablation.trained(home, {'warm': first}, seeds)
    learn = functools.partial(_from_warm, home.results)
    how = dict(learn=learn, task={'warm': warm})
    configs = {f'{n}, warm': c for n, c in configs.items()}
    picture = 'warm.png'
  run.results.mkdir(parents=True, exist_ok=True)
  for name, config in configs.items():
    home = _shared(run, config)
    trainings |= ablation.trained(home, {name: config}, seeds, **how)
  found, seconds = families_lib.drawn(run, trainings, run.results / picture)
  suffix = ', warm' if warm else ''
  return {n: found[f'{n}{suffix}'] for n in families}, seconds


def above(run, *, families, seeds, compare, warm):
  """LEARN: the best of some families is at most so far above another.

  Args:
    families: {name: {field of schema.Outer: value}}. seeds: of the trainings.
    compare: list of [[names], name, within]: the first name whose mean is best
      has at most so much more bits per byte than the other, a share.
    warm: 0, or steps of data parallel by whose parameters all begin; the step
      and the optimizer are new.
  """
  found, seconds = _trained(run, families, seeds, warm)
  findings, chosen = [], []
  for names, other, within in compare:
    best = min(names, key=lambda n: float(np.mean(found[n])))
    shares = np.divide(found[best], found[other]) - 1
    text = f'{best} above {other}, as a share,'
    findings.append(ablation.at_most(text, shares, within, seconds))
    if len(names) > 1:
      chosen.append(f'; {best} is the best of {len(names)} by these numbers')
  c = run.config
  begin = f'after {warm} steps of data parallel' if warm else 'from scratch'
  return ablation.outcome(
    run, found, findings, 'bits per byte',
    f'{begin}, {c.train.steps} steps, {c.mesh.replica} replicas, '
    f'{families_lib.tokens(c):,} tokens{"".join(chosen)}',
    seconds,
  )  # fmt: skip


def spread(run, *, families, seeds, name, early):
  """LEARN: replicas of a family are nearer to each other at the end than at an
  evaluation before it, when the learning rate was higher.

  Args:
    families, seeds: as of `above`. name: of the family. early: the step; an
    exchange is due at it, as at the end.

  Raises:
    UserError: at one of the two none is due.
  """
  config = _configs(run, {name: families[name]})[0][name]
  last = config.train.steps
  if not (config.outer.due(early) and config.outer.due(last)):
    raise errors.UserError(
      f'steps {early} and {last}: outer.period={config.outer.period} has no '
      'exchange at both of them.'
    )
  trainings = ablation.trained(_shared(run, config), {name: config}, seeds)
  rows = [metrics.read(t.folder) for t in trainings[name]]
  found = {
    'early': [row[early]['eval/spread'] for row in rows],
    'end': [row[last]['eval/spread'] for row in rows],
  }
  seconds = ablation.cpu_seconds(trainings)
  finding = ablation.less(found, 'end', 'early', 0.0, seconds)
  return ablation.outcome(
    run, found, [finding], 'distance of replicas from their mean',
    f'{name}, in lengths of the mean, after {early} and {last} steps, right '
    'after an exchange',
    seconds,
  )  # fmt: skip
