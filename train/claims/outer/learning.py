"""Claims about what replicas that step alone learn, beside data parallel.

All read the same batches, as many tokens: of a step's rows each replica takes
its own part. Held-out text is read with the anchor.
"""

import dataclasses
import functools

import numpy as np

from paraxis.configs import schema
from paraxis.train import loop
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families as families_lib
from paraxis.train.claims import harness as claims
from paraxis.train.run import origin


def _from_warm(results, config, folder, say):
  """As ablation.by_loop, from the parameters of 'warm' of the same seed."""
  source = origin.Run(str(results / f'warm-{config.train.seed}'))
  found = claims.finish(
    config, folder, say, devices=experiment.devices_of(config),
    options=loop.Options('', source),
  )  # fmt: skip
  return {'bits_per_byte': found.bits_per_byte}


def gap(run, *, families, fields, seeds, plain, within, warm):
  """LEARN: the best family is at most so far above data parallel.

  Args:
    families: {name: {'section.field': value}}, 'plain' among them. fields:
      likewise, of all. seeds: of the trainings.
    plain: the family that the others are compared with.
    within: of its bits per byte, a share.
    warm: {} or fields of a training whose parameters all begin with; the step
      and the optimizer are new.
  """
  configs = {
    n: experiment.fields(run.config, fields, f) for n, f in families.items()
  }
  how, picture = {}, 'from_scratch.png'
  if warm:
    first = experiment.fields(configs[plain], warm)
    ablation.trained(run, {'warm': first}, seeds)
    learn = functools.partial(_from_warm, run.results)
    how = dict(learn=learn, task={'warm': warm | fields})
    configs = {f'{n}, warm': c for n, c in configs.items()}
    plain, picture = f'{plain}, warm', 'warm.png'
  found, seconds = families_lib.train(run, configs, seeds, picture, **how)
  others = {n: row for n, row in found.items() if n != plain}
  best = min(others, key=lambda n: float(np.mean(others[n])))
  shares = np.divide(others[best], found[plain]) - 1
  text = f'{best} above {plain}, as a share,'
  finding = ablation.at_most(text, shares, within, seconds)
  rounds = configs[best].train.steps // configs[best].outer.period
  outer = dataclasses.asdict(configs[best].outer)
  changed = {
    k: v for k, v in outer.items() if v != dataclasses.asdict(schema.Outer())[k]
  }
  return ablation.outcome(
    run, found, [finding], 'bits per byte',
    f'{rounds} rounds, {configs[best].mesh.replica} replicas, '
    f'{families_lib.tokens(configs[best]):,} tokens; the best of '
    f'{len(others)}, chosen by these numbers: {changed}',
    seconds,
  )  # fmt: skip
