"""Claims about experts that were trained: what they cost, and learn, and take.

Small models on the shipped text of six domains, several seeds; the claims of
one config share the runs, which are folders of the workdir and are resumed
where they stopped. Held-out loss is reported in bits per byte.

How far experts specialise is the mutual information of domain and expert on
held-out text, with all domains as likely, in bits, the mean over layers:

    I = mean over domains of sum_e p(e | domain) log2 (p(e | domain) / p(e))

0: every domain uses all experts alike; at most log2 of the experts, or of the
domains. Assignments are counted as in training (models/aux.py).

Legend: L layers, E experts.
"""

import functools
import json

import jax
import numpy as np

from paraxis.models import depth
from paraxis.train import expert_counts
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.plot import experts as plot_experts
from paraxis.train.plot import losses as plot
from paraxis.train.run import compiling
from paraxis.train.run import workdir as workdir_lib

PICTURE = 'domains.png'


def domain_loads(job, params):
  """{domain: (L, E) float}: assignments of its held-out text, layers in order.

  All layers of the model must have as many experts.
  """
  model, run = job.model, None
  paths = expert_counts.paths(model, (expert_counts.LOAD,))

  def count(params, batch):
    return model.features(params, batch)[1].counts

  out = {}
  with job.context():
    for held in job.held_out:
      total = 0
      for i in range(len(held)):
        batch = job.put(held.batch_at(i))
        run = run or compiling.compile_step('loads', count, params, batch)
        found = jax.device_get(run(params, batch))
        rows = [
          depth.to_order(found[p], model.rows.get(p))[:, :-2] for p in paths
        ]
        total = total + np.concatenate(rows).astype(float)
      out[held.domain] = total
  return out


def mutual_information(loads):
  """Bits of domain and expert, mean over layers, of {domain: (L, E)}."""
  counts = np.array(list(loads.values()))
  given = counts / counts.sum(-1, keepdims=True)
  ratio = given / np.maximum(given.mean(0), 1e-300)
  bits = given * np.log2(ratio, where=given > 0, out=np.zeros_like(given))
  return float(bits.sum(-1).mean())


@functools.lru_cache(maxsize=4)
def _trained(run, text, seeds):
  """{variant: [(bits per byte, job.Job, parameters) of each seed]}.

  text: JSON of {variant: {'section.field': value}}. Losses are drawn.
  """
  variants, folders = json.loads(text), []
  found = {name: [] for name in variants}
  for seed in seeds:
    for name, fields in variants.items():
      config = experiment.fields(run.config, {'train.seed': seed}, fields)
      folder = f'{name.replace(" ", "_")}{seed}'
      found[name].append(experiment.train(run, folder, config))
      folders.append(run.workdir / folder)
      run.say(f'{name}, seed {seed}: {found[name][-1][0]:.4f} bits per byte')
  run.say(f'wrote {plot.draw(folders, run.workdir / plot.NAME)}')
  return found


@functools.lru_cache(maxsize=4)
def _shared_bits(run, text, seeds):
  """{variant: [mutual information of each seed]}; draws the last seed."""
  loads = {
    name: [domain_loads(job, params) for _, job, params in rows]
    for name, rows in _trained(run, text, seeds).items()
  }
  path = workdir_lib.resolve(run.workdir) / PICTURE
  last = {name: rows[-1] for name, rows in loads.items()}
  run.say(f'wrote {plot_experts.draw_domains(last, path)}')
  return {n: list(map(mutual_information, rows)) for n, rows in loads.items()}


def _table(found):
  """'name mean (lowest to highest)' of {name: numbers}."""

  def one(name, row):
    spread = f' ({min(row):.4f} to {max(row):.4f})' if len(row) > 1 else ''
    return f'{name} {np.mean(row):.4f}{spread}'

  return '; '.join(one(name, row) for name, row in found.items())


def _seeds(seeds):
  return 'one seed' if len(seeds) == 1 else f'mean of {len(seeds)} seeds'


def specialise(run, *, variants, seeds, more, times):
  """LEARN: experts of one variant are more of a domain than another's.

  Args:
    variants: {name: {'section.field': value}}.
    seeds: of the trainings.
    more: [name, name]: the mutual information of the first is at least `times`
      that of the second, in every seed.
  """
  found = _shared_bits(run, json.dumps(variants), tuple(seeds))
  ratios = [a / b for a, b in zip(*(found[n] for n in more), strict=True)]
  return claims.Outcome(
    f'>= {times:g} x in every seed',
    experiment.numbers(ratios, '.3g'),
    f'{" over ".join(more)}, mutual information of domain and expert on '
    f'held-out text, in bits: {_table(found)}; {_seeds(seeds)} '
    f'(lowest to highest), {run.config.train.steps} steps',
    min(ratios) >= times,
    seeds=len(seeds),
  )


def learn_better(run, *, variants, seeds, better, by):
  """LEARN: held-out bits per byte of one variant are fewer than another's.

  Args:
    variants, seeds: as for `specialise`.
    better: list of [name, name]: the mean of the first is below the second's
      by more than `by` bits per byte (experiment.above).
  """
  trained = _trained(run, json.dumps(variants), tuple(seeds))
  found = {n: [bits for bits, *_ in rows] for n, rows in trained.items()}
  pairs = [list(zip(found[a], found[b], strict=True)) for a, b in better]
  gains = [np.array([b - a for a, b in pair]) for pair in pairs]
  wins = [sum(a < b for a, b in pair) for pair in pairs]
  return claims.Outcome(
    '; '.join(f'{a} below {b}' for a, b in better),
    ', '.join(map(experiment.paired, gains)),
    f'bits per byte of held-out text, {_seeds(seeds)}: {_table(found)}; better '
    f'in {", ".join(f"{w} of {len(seeds)}" for w in wins)}; '
    f'{run.config.train.steps} steps',
    all(experiment.above(gain, by) for gain in gains),
    seeds=len(seeds),
  )
