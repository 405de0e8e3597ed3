"""Claims about experts that were trained: what they cost, and learn, and take.

Small models on the shipped text of six domains, several seeds; the claims of
one config share the trainings (train/claims/ablation.py). Held-out loss is
reported in bits per byte.

How far experts specialise is the mutual information of domain and expert on
held-out text, with all domains as likely, in bits, the mean over layers:

    I = mean over domains of sum_e p(e | domain) log2 (p(e | domain) / p(e))

0: every domain uses all experts alike; at most log2 of the experts, or of the
domains. Assignments are counted as in training (models/aux.py).

Legend: L layers, E experts.
"""

import jax
import numpy as np

from paraxis.models import depth
from paraxis.sharding.meter import compiling
from paraxis.train import expert_counts
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.plot import experts as plot_experts
from paraxis.train.plot import losses as plot

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
        rows = [depth.to_order(found[p], *model.held[p])[:, :-2] for p in paths]
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


def _loads(job, params):
  return {
    name: load.tolist() for name, load in domain_loads(job, params).items()
  }


def _trained(run, variants, seeds):
  """{variant: [ablation.Training of each seed]}; losses are drawn."""
  configs = {n: experiment.fields(run.config, f) for n, f in variants.items()}
  found = ablation.trained(run, configs, seeds)
  folders = [t.folder for row in found.values() for t in row]
  run.say(f'wrote {plot.draw(folders, run.results / plot.NAME)}')
  return found


def specialise(run, *, variants, seeds, more, times):
  """LEARN: experts of one variant are more of a domain than another's.

  Args:
    variants: {name: {'section.field': value}}.
    seeds: of the trainings.
    more: [name, name]: the mutual information of the first is above `times`
      that of the second.
  """
  trainings = _trained(run, variants, seeds)
  seconds = ablation.cpu_seconds(trainings)
  loads = {
    name: [t.measured('domain loads', _loads) for t in row]
    for name, row in trainings.items()
  }
  path = run.results / PICTURE
  last = {
    name: {domain: np.array(load) for domain, load in row[-1].items()}
    for name, row in loads.items()
  }
  run.say(f'wrote {plot_experts.draw_domains(last, path)}')
  found = {n: list(map(mutual_information, row)) for n, row in loads.items()}
  ratios = np.divide(found[more[0]], found[more[1]])
  # As often: neither specialises more.
  text = f'{" over ".join(more)} above {times:g} x'
  finding = ablation.judged(text, ratios - 1, times - 1, seconds)
  return ablation.outcome(
    run,
    found,
    [finding],
    'bits of domain and expert',
    f'mutual information on held-out text; times as much: '
    f'{experiment.numbers(ratios, ".3g")}; {run.config.train.steps} steps',
    seconds,
  )


def learn_better(run, *, variants, seeds, better, by, shares):
  """LEARN: held-out bits per byte of one variant are fewer than another's.

  Args:
    variants, seeds: as for `specialise`.
    better: list of [name, name]: the first has fewer than the second, by more
      than `by`.
    shares: list of [name, low, high, share]: the first gains more than such a
      share of what `high` gains over `low`.
  """
  trainings = _trained(run, variants, seeds)
  seconds = ablation.cpu_seconds(trainings)
  found = ablation.numbers(trainings, 'bits_per_byte')
  findings = [ablation.less(found, a, b, by, seconds) for a, b in better]
  for name, low, high, share in shares:
    gains = np.subtract(found[low], found[name])
    wanted = share * np.subtract(found[low], found[high])
    text = f'{name} gains over {low} {share:g} of what {high} does'
    findings.append(ablation.judged(text, gains - wanted, 0.0, seconds))
  return ablation.outcome(
    run,
    found,
    findings,
    'bits per byte',
    f'of held-out text; {run.config.train.steps} steps',
    seconds,
  )
