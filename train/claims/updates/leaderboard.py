"""Claims about how soon update rules reach a target, over several workloads.

arXiv:2306.07179, sections 4 and 5, with steps as the clock: a study tries a few
points of a rule's search space, quasi-random, and its time on a workload is
that of the trial that reaches the target first (inf: none does). Of several
studies the median counts. With t the time of rule s on workload w,

    r_sw = t_sw / min over rules,  rho_s(tau) = share of workloads, r_sw <= tau
    score of s = integral of rho_s from 1 to R / (R - 1),  R = 4

Legend: a study's trials are of a seed of its own.
"""

import csv
import math

import numpy as np
from scipy.stats import qmc

from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families
from paraxis.train.claims import harness as claims
from paraxis.train.plot import figures
from paraxis.train.run import metrics

LONGEST = 4.0  # R
HELD = 'eval/bits_per_byte'


def ratios(times):
  """{rule: [r of each workload]} of {rule: [time of each workload]}."""
  least = [min(column) for column in zip(*times.values(), strict=True)]
  of = lambda t, best: t / best if math.isfinite(t) else math.inf
  return {
    rule: [of(t, best) for t, best in zip(row, least, strict=True)]
    for rule, row in times.items()
  }


def score(times):
  """{rule: score in [0, 1]} of {rule: [time of each workload, may be inf]}."""
  share = lambda r: max(0.0, LONGEST - r) / (LONGEST - 1)
  return {
    rule: sum(map(share, row)) / len(row) for rule, row in ratios(times).items()
  }


def scores(run, *, examples, within):
  """EQ: the score of given times is what the integral of the profile gives.

  Args:
    examples: [[{rule: [time of each workload]; null: never}, {rule: score}]].
  """
  del run
  gaps = []
  for times, wanted in examples:
    given = {
      rule: [math.inf if t is None else t for t in row]
      for rule, row in times.items()
    }
    found = score(given)
    gaps += [abs(found[rule] - x) for rule, x in wanted.items()]
  return experiment.equal(
    gaps, within, f'{len(gaps)} scores worked out by hand'
  )


def _points(space, count, study):
  """`count` points of a search space, others in each study.

  space: {field of schema.Optimizer: [low, high]}, logarithmic.
  """
  points = qmc.Halton(len(space), scramble=False)
  points.fast_forward(study * count + 1)  # without the first, all zeros
  return [
    {
      name: float(f'{low * (high / low) ** x:.3g}')
      for (name, (low, high)), x in zip(space.items(), row, strict=True)
    }
    for row in points.random(count)
  ]


def _curve(rows):
  """[(step, held-out bits per byte)] of a training's metrics."""
  return [(s, rows[s][HELD]) for s in sorted(rows) if HELD in rows[s]]


def _work(config, rows):
  """(tokens, operations of the model) of a step of a training."""
  tokens = families.tokens(config) / config.train.steps
  row = next(row for row in rows.values() if 'train/flops' in row)
  return tokens, tokens * row['train/flops'] / row['train/tokens']


def _trials(run, rules, fields, trials, study):
  """({rule: [curve of each trial]}, `_work`) of a workload in a study."""
  found, work = {}, None
  for rule, space in rules.items():
    configs = {}
    for i, point in enumerate(_points(space, trials, study)):
      more = experiment.under('optimizer', {'name': rule} | point)
      if rule == 'schedule_free':
        more['optimizer.schedule'] = 'constant'
      name = f'{fields["name"]}-{rule}-{i}'
      own = {n: x for n, x in fields.items() if n != 'name'}
      configs[name] = experiment.fields(run.config, own, more)
    done = ablation.trained(run, configs, [study])
    kept = [
      (row[0].config, metrics.read(row[0].folder)) for row in done.values()
    ]
    found[rule] = [_curve(rows) for _, rows in kept]
    work = _work(*kept[0])
  return found, work


def _time(curves, target):
  """Steps until the first of some trials is at the target; inf: none is."""
  reached = [s for curve in curves for s, x in curve if x <= target]
  return min(reached, default=math.inf)


def leaderboard(run, *, rules, workloads, trials, studies, baseline, at, agree):
  """LEARN: in so many studies the rules have one order by their scores, which
  are not all equal; in every study the baseline alone has the least.

  Args:
    rules: {rule: {field of schema.Optimizer: [low, high]}}. workloads: {name:
      {'section.field': value}}. trials: of a rule in a study. studies: their
      seeds. baseline, at: a workload's target is what the best trial of that
      rule has at step `at`, the median of studies. agree: studies of one order.
  """
  found, work = {}, {}
  for w, fields in workloads.items():
    tried = [
      _trials(run, rules, {'name': w} | fields, trials, s) for s in studies
    ]
    found[w], work[w] = [curves for curves, _ in tried], tried[0][1]
  targets = {
    w: float(np.median([_best(each[baseline], at) for each in rows]))
    for w, rows in found.items()
  }
  times = lambda s: {
    rule: [_time(found[w][s][rule], targets[w]) for w in workloads]
    for rule in rules
  }
  by_study = [times(s) for s in range(len(studies))]
  every = [score(each) for each in by_study]
  median = {
    rule: [float(x) for x in np.median([t[rule] for t in by_study], 0)]
    for rule in rules
  }
  whole = score(median)
  orders = [_order(one) for one in every]
  most = max(orders.count(order) * (len(order) > 1) for order in orders)
  rates = _rates(rules, found, targets, trials, studies)
  run.say(f'wrote {_draw(by_study, run.results / "profiles.png")}')
  run.say(f'wrote {_write(median, work, run.results / "times.csv")}')
  table = ', '.join(
    f'{r} {whole[r]:.2f}' for r in sorted(rules, key=lambda r: -whole[r])
  )
  lists = '; '.join(' > '.join(map(' = '.join, order)) for order in orders)
  behind = sum(order[-1] == (baseline,) for order in orders)
  return claims.Outcome(
    f'one order in {agree} of {len(studies)} studies, {baseline} last in all',
    f'in {most}, in {behind}',
    f'scores of median times: {table}; targets in bits per byte '
    f'{", ".join(f"{w} {x:.3f}" for w, x in targets.items())}; orders: '
    f'{lists}; learning rates of trials that are first at a target: {rates}',
    most >= agree and behind == len(studies),
    '',
    len(studies),
  )


def _rates(rules, found, targets, trials, studies):
  """'adamw 0.004 to 0.014 of 0.003 to 0.03, 4 of 9 at an end': rates of trials
  that are first at a target; at an end of those of their study.

  Args:
    found: {workload: [{rule: [curve of each trial]} of each study]}. Others: as
      of `leaderboard`; targets: {workload: bits per byte}.
  """
  texts = []
  for rule, space in rules.items():
    (name,) = (n for n in space if n.endswith('learning_rate'))
    first, ends = [], 0
    for w, by_study in found.items():
      for study, each in zip(studies, by_study, strict=True):
        steps = [_time([curve], targets[w]) for curve in each[rule]]
        if not math.isfinite(min(steps)):
          continue
        points = _points(space, trials, study)
        point = points[int(np.argmin(steps))]
        first.append(point[name])
        ends += name in claims.at_ends(point, points)
    low, high = space[name]
    of = f'{min(first):g} to {max(first):g}' if first else 'none'
    texts.append(
      f'{rule} {of} of {low:g} to {high:g}, {ends} of {len(first)} at an end'
    )
  return '; '.join(texts)


def _order(scores):
  """Rules in tuples of equal scores, the best first."""
  values = sorted(set(scores.values()), reverse=True)
  of = lambda x: tuple(rule for rule, y in scores.items() if y == x)
  return tuple(map(of, values))


def _best(curves, step):
  """Least held-out bits per byte at a step, over trials."""
  return min(dict(curve)[step] for curve in curves)


def _write(median, work, path):
  """A row per workload and rule: its median time to the target, in steps, in
  tokens and in operations of the model (those of the rule are left out)."""
  with path.open('w', newline='', encoding='utf-8') as f:
    rows = csv.writer(f)
    rows.writerow(['workload', 'rule', 'steps', 'tokens', 'flops'])
    for i, (workload, (tokens, flops)) in enumerate(work.items()):
      for rule, times in median.items():
        steps = times[i]
        rows.writerow(
          [workload, rule, *(f'{steps * x:g}' for x in (1, tokens, flops))]
        )
  return path


def _draw(by_study, path):
  """Profiles: the share of workloads, over studies, within tau of the best."""
  fig = figures.make(6.5, 4)
  axes = fig.subplots()
  taus = np.linspace(1, LONGEST, 301)
  rules = list(by_study[0])
  for rule, colour in zip(rules, figures.COLOURS, strict=False):
    row = np.concatenate([ratios(times)[rule] for times in by_study])
    share = (row[:, None] <= taus).mean(0)
    axes.step(taus, share, color=colour, label=rule, where='post')
  axes.set_xlabel('steps over those of the fastest rule')
  axes.set_ylabel('share of workloads and studies')
  axes.legend(frameon=False)
  figures.tidy(axes)
  return figures.save(fig, path)
