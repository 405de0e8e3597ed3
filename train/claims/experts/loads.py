"""Claims about how evenly experts are loaded, and what follows from it.

The devices of a region wait for the busiest. Without hot experts rank i does
what its E / r experts are sent; `hot` experts (Hecate, arXiv:2502.02581) are
computed where their tokens are, which here is everywhere alike:

    busiest = max_i (sum of its cold experts' tokens + hot tokens / r) / mean

A step of tasks with several devices each (SE-MoE, arXiv:2205.10034) takes as
long as the slowest (sharding/planner/task_devices.py). No time is claimed: work
is counted.

Legend: E experts, r ranks, L layers, S steps.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from paraxis.sharding.experts import dispatch as expert
from paraxis.sharding.planner import task_devices
from paraxis.train.certify import trial
from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.plot import experts as plot_experts
from paraxis.train.run import metrics


def _scope_gaps(config, cases):
  """Largest difference of loss and gradients from one microbatch, of each case.

  cases: [scope, microbatches] on one device.
  """
  gaps = []
  with jax.enable_x64(True):
    scoped = lambda scope, parts: {
      'model.experts.balance_scope': scope,
      'train.microbatches': parts,
    }
    config, devices = experiment.shrunk(config, 'data=1')
    config = experiment.fields(config, scoped('microbatch', 1))
    whole = trial.reference(config, True, devices[0])
    wanted = whole.gradients | {'loss': np.asarray(whole.loss)}
    for scope, parts in cases:
      mine = experiment.fields(config, scoped(scope, parts))
      side = trial.Runner(mine, devices)
      start = side.start(whole.params)
      loss, gradients, _ = side.gradients(start, whole.batches[0])
      found = jax.device_get(gradients | {'loss': loss})
      gaps.append(trial.worst(found, wanted)[0])
  return gaps


def scopes_agree(run, *, equal, other, within, apart):
  """EQ: balance_scope on one device, against a batch in one microbatch.

  Loss and all gradients, float64: of one microbatch, device, microbatch and
  step are the same; of several, step is as if they were one (the paper's global
  batch), and microbatch is not.

  Args:
    equal: list of [scope, microbatches] that give the same numbers.
    other: [scope, microbatches] that does not.
    within: largest difference of what is equal. apart: least of the other.
  """
  cases = [*equal, other]
  gaps = _scope_gaps(run.config, cases)
  *same, last = gaps
  names = [f'{scope} of {parts}' for scope, parts in cases]
  return claims.Outcome(
    f'<= {within:.0e}; > {apart:.0e}',
    f'{max(same):.1e}; {last:.1e}',
    'one device, shrunk, packed rows, float64; against the scope microbatch of '
    'one, by scope and microbatches: '
    + ', '.join(f'{n} {g:.0e}' for n, g in zip(names, gaps, strict=True)),
    max(same) <= within and last > apart,
  )


def busiest(loads_E, ranks, hot=()):
  """Assignments of the busiest rank over the mean.

  Args:
    loads_E: of each expert. ranks: that share them out in order.
    hot: experts whose tokens stay where they are.
  """
  cold = np.array(loads_E, float)
  gathered = cold[list(hot)].sum()
  cold[list(hot)] = 0
  each = cold.reshape(ranks, -1).sum(1) + gathered / ranks
  return each.max() / each.mean()


def _hot(loads_E, count):
  """The experts that the model gathers at these loads."""
  return np.asarray(expert.hottest(jnp.asarray(loads_E), count))


def coldest():
  """Knock-out: the experts with the fewest assignments are gathered."""
  least = lambda load_E, count: jax.lax.top_k(-load_E, count)[1]
  return knockouts.patched(expert, 'hottest', least)


def zipf_stragglers(run, *, experts, ranks, hots, draws, exponents, falls):
  """SIM: the busiest rank over the mean, loads of expert i as i^-s.

  It falls with every number of hot experts.

  Args:
    experts, ranks: E and r. hots: numbers of hot experts, rising from 0.
    draws: orders of the experts, at random, that are averaged.
    exponents: s, rising.
    falls: the ratio of the first and the last of hots is above it, at every s.
  """
  found = {}
  for s in exponents:
    loads = np.arange(1, experts + 1.0) ** -s
    rng = np.random.default_rng(0)
    orders = [rng.permutation(loads) for _ in range(draws)]
    found[s] = [
      float(np.mean([busiest(x, ranks, _hot(x, h)) for x in orders]))
      for h in hots
    ]
  fall = {s: row[0] / row[-1] for s, row in found.items()}
  lower = all(
    a > b for row in found.values() for a, b in itertools.pairwise(row)
  )
  every = '; '.join(
    f's={s} {experiment.numbers(row, ".2f")}, the work of the busiest falls '
    f'{fall[s]:.2f} x'
    for s, row in found.items()
  )
  return claims.Outcome(
    f'falls, > {falls:g} x',
    f'{"falls" if lower else "does NOT fall"}, '
    f'{min(fall.values()):.2f} to {max(fall.values()):.2f} x',
    f'{experts} experts on {ranks} ranks, mean of {draws} orders; hot '
    f'{experiment.numbers(hots)}: {every}. Gathering costs bytes, and all '
    'ranks are taken to hold as many hot tokens',
    lower and min(fall.values()) > falls,
  )


def recorded_stragglers(run, *, seeds, steps, ranks, hots, falls):
  """LEARN: the same for loads of a training, hot by the step before.

  Args:
    seeds: of the trainings.
    steps: to train, on one device; the first is not judged.
    ranks, hots: as for `zipf_stragglers`, the first of hots 0.
    falls: least ratio of the busiest without and with hots[-1] experts, mean
      over steps and layers.
  """
  how = {f'train.{name}': 1 for name in ('print_every', 'eval_batches')}
  how |= {'model.experts.hot': 0, 'train.steps': steps}
  config, _ = experiment.on(run.config, 'data=1', how)
  trainings = ablation.trained(run, {'loads': config}, seeds)
  each = [_recorded(run, t.folder) for t in trainings['loads']]
  made = [_stragglers(loads, ranks, hots) for loads in each]
  found = {f'{h} hot': [f[i] for f, _ in made] for i, h in enumerate(hots)}
  oracle = np.mean([o for _, o in made], 0)
  worst = max(busiest(x, ranks) for loads in each for l in loads for x in l)
  fall = np.divide([f[0] for f, _ in made], [f[-1] for f, _ in made])
  seconds = ablation.cpu_seconds(trainings)
  text = f'falls by more than {falls:g} x'
  return ablation.outcome(
    run,
    found,
    [ablation.judged(text, fall - 1, falls - 1, seconds)],
    'busiest over mean',
    f'falls {experiment.numbers(fall, ".2f")} x; {each[0].shape[2]} experts on '
    f'{ranks} ranks, hot by the loads of the step before, mean of '
    f'{each[0].shape[0]} layers and steps 2 to {steps}; by those of the same '
    f'step {experiment.numbers(oracle, ".2f")}; worst step without hot experts '
    f'{worst:.2f}',
    seconds,
  )


def _recorded(run, folder):
  """(L, S, E) loads of a training, drawn."""
  rows, path = metrics.read(folder), run.results / plot_experts.NAME
  run.say(f'wrote {plot_experts.draw(rows, path, "loads")}')
  return np.concatenate(
    [
      np.swapaxes([r[name] for r in rows.values()], 0, 1)
      for name in rows[1]
      if name.startswith(plot_experts.PREFIX)
    ]
  )


def _stragglers(loads, ranks, hots):
  """[busiest over mean for each of hots], by the step before and by itself.

  loads: (L, S, E).
  """
  found, oracle = [], []
  for hot in hots:
    judged = [
      (
        busiest(now, ranks, _hot(before, hot)),
        busiest(now, ranks, _hot(now, hot)),
      )
      for layer in loads
      for before, now in itertools.pairwise(layer)
    ]
    for row, value in zip((found, oracle), np.mean(judged, 0), strict=True):
      row.append(float(value))
  return found, oracle


def evenly():
  """Knock-out: as many devices for each task, whatever its load."""
  share = lambda loads, devices: [devices // len(loads)] * len(loads)
  return knockouts.patched(task_devices, 'share', share)


def _slowest(loads, devices):
  """Work of a device of the task that has most of it."""
  return max(a / b for a, b in zip(loads, devices, strict=True))


def elastic_tasks(run, *, cases, draws):
  """SIM: devices by the load of tasks, against as many for each.

  Args:
    cases: list of {'loads': of tasks, 'devices': number, 'shares': expected,
      'times': expected ratio of the slowest, even over ours}.
    draws: random cases that are compared with every way to share out.
  """
  shares, ratios, right = [], [], True
  for case in cases:
    loads, n = case['loads'], case['devices']
    ours = task_devices.share(loads, n)
    even = max(loads) / (n / len(loads))
    ratio = even / _slowest(loads, ours)
    right &= ours == case['shares'] and abs(ratio - case['times']) < 0.005
    ratios.append(f'{ratio:.2f} x')
    shares.append(f'loads {loads} on {n}: {ours}, {ratios[-1]}')
  rng, best = np.random.default_rng(0), 0
  for _ in range(draws):
    tasks = int(rng.integers(2, 5))
    loads, n = rng.integers(1, 100, tasks).tolist(), int(rng.integers(4, 11))
    ways = itertools.product(range(1, n + 1), repeat=tasks)
    least = min(_slowest(loads, way) for way in ways if sum(way) == n)
    best += _slowest(loads, task_devices.share(loads, n)) == least
  return claims.Outcome(
    '; '.join(f'{c["times"]:.2f} x' for c in cases) + f', best in {draws}',
    f'{"; ".join(ratios)}, best in {best}',
    f'{"; ".join(shares)}: how much shorter the slowest takes than with as '
    f'many devices each; none of all ways to share out is better in {best} of '
    f'{draws} random cases',
    right and best == draws,
  )
