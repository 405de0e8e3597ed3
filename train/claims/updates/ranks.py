"""Claims about what update rules learn from the same tokens, and when.

Each rule has a few learning rates; all are tried with the first seed, and the
rate whose held-out loss is least at the end is trained with the other seeds
(arXiv:2509.02046, section 3, with one hyperparameter for its many). Trainings
lie in the folder SHARED beside the config's results.
"""

import numpy as np

from paraxis.train.claims import ablation
from paraxis.train.claims import experiment
from paraxis.train.claims import families
from paraxis.train.claims import harness as claims
from paraxis.train.plot import figures
from paraxis.train.run import metrics

SHARED = 'rules'
MATRIX = ('muon', 'scion', 'soap', 'kron')  # rules of whole matrices
PLAIN = 'adamw'
HELD = 'eval/bits_per_byte'


def _trained(run, rules, size, fields, seeds):
  """{rule: [ablation.Training of its best trial, one a seed]}, and which trial
  that is: '90K: adamw 0.01, lion 0.006 (end of its grid)'.

  Args:
    rules: {rule: [{field of schema.Optimizer: value}, one a trial]}.
    size, fields: name of the model's size, {'section.field': value} of it.
  """
  home, best, texts = run.shared(SHARED), {}, []
  config = lambda rule, trial: experiment.fields(
    run.config, fields, experiment.under('optimizer', {'name': rule} | trial)
  )
  width = experiment.fields(run.config, fields).model.d_model
  # By what it is: a knock-out, whose trainings lie there too, has other trials.
  label = lambda rule, trial: '-'.join(
    [f'{width}', rule, *(f'{x:g}' for x in trial.values())]
  )
  for rule, trials in rules.items():
    tried = {label(rule, t): config(rule, t) for t in trials}
    first = ablation.trained(home, tried, seeds[:1])
    found = ablation.numbers(first, 'bits_per_byte')
    chosen = min(found, key=lambda name: found[name][0])
    rest = ablation.trained(home, {chosen: tried[chosen]}, seeds[1:])
    best[rule] = first[chosen] + rest[chosen]
    trial = trials[list(tried).index(chosen)]
    texts.append(f'{rule} {_numbers(trial, trials)}')
    run.say(f'{size}: {rule} is best with {trial}')
  return best, f'{size}: {", ".join(texts)}'


def _numbers(trial, trials):
  """'0.04 (end of its grid)': what is not alike in all trials."""
  other = {n: x for n, x in trial.items() if any(t[n] != x for t in trials)}
  end = ' (end of its grid)' if claims.at_ends(trial, trials) else ''
  return '/'.join(f'{x:g}' for x in (other or trial).values()) + end


def _curves(best):
  """{rule: {step: [held-out bits per byte, one a seed]}}."""
  out = {}
  for rule, row in best.items():
    kept = [metrics.read(t.folder) for t in row]
    steps = [s for s in sorted(kept[0]) if HELD in kept[0][s]]
    out[rule] = {s: [k[s][HELD] for k in kept] for s in steps}
  return out


def _draw(curves, path):
  fig = figures.make(6.5, 4)
  axes = fig.subplots()
  for (rule, curve), colour in zip(
    curves.items(), figures.COLOURS, strict=False
  ):
    steps = list(curve)
    axes.plot(
      steps, [np.mean(curve[s]) for s in steps], color=colour, label=rule
    )
  axes.set_xlabel('step')
  axes.set_ylabel('held-out text (bits per byte)')
  axes.legend(frameon=False)
  figures.tidy(axes)
  return figures.save(fig, path)


def _both(run, rules, sizes, seeds):
  """({size: {rule: {step: [..]}}}, most CPU-seconds, best trials in words),
  drawn."""
  curves, seconds, chosen = {}, 0.0, []
  for size, fields in sizes.items():
    best, text = _trained(run, rules, size, fields, seeds)
    chosen.append(text)
    curves[size] = _curves(best)
    seconds = max(seconds, ablation.cpu_seconds(best))
    run.results.mkdir(parents=True, exist_ok=True)
    picture = run.results / f'{size}.png'
    run.say(f'wrote {_draw(curves[size], picture)}')
  return curves, seconds, '; '.join(chosen)


def _end(curves):
  """{rule: [bits per byte of each seed at the last evaluation]}."""
  return {rule: curve[max(curve)] for rule, curve in curves.items()}


def first(run, *, rules, sizes, seeds):
  """LEARN: at the end a rule of matrices is below every other, at each size.

  Args:
    rules: {rule: [{field of schema.Optimizer: value}, one a trial]}.
    sizes: {name: {'section.field': value}}. seeds: of the trainings.
  """
  curves, seconds, chosen = _both(run, rules, sizes, seeds)
  found, findings = {}, []
  for size, each in curves.items():
    end = {f'{size} {rule}': row for rule, row in _end(each).items()}
    of = lambda names, size=size, end=end: min(
      (f'{size} {n}' for n in names), key=lambda n: np.mean(end[n])
    )
    matrix = of([r for r in rules if r in MATRIX])
    other = of([r for r in rules if r not in MATRIX])
    findings.append(ablation.less(end, matrix, other, 0.0, seconds))
    found |= end
  return _outcome(run, found, findings, rules, seconds, chosen)


def reordered(run, *, rules, sizes, seeds, early):
  """LEARN: two rules change their order between a step and the end.

  Args:
    rules, sizes, seeds: as for `first`. early: the step, an evaluation.
  """
  curves, seconds, chosen = _both(run, rules, sizes, seeds)
  found, findings = {}, []
  for size, each in curves.items():
    then, end = {r: c[early] for r, c in each.items()}, _end(each)
    lead = {
      (a, b): _least(then, a, b, end, b, a)
      for a in rules for b in rules if a != b
    }  # fmt: skip
    a, b = max(lead, key=lambda pair: lead[pair])
    findings.append(
      ablation.judged(
        f'{size}: {a} below {b} at {early}',
        np.subtract(then[b], then[a]), 0.0, seconds,
      )
    )  # fmt: skip
    findings.append(
      ablation.judged(
        f'{b} below {a} at the end', np.subtract(end[a], end[b]), 0.0, seconds
      )
    )
    for name, row in (('early', then), ('end', end)):
      found |= {f'{size} {r}, {name}': row[r] for r in (a, b)}
  return _outcome(run, found, findings, rules, seconds, chosen)


def _least(then, a, b, end, c, d):
  """The smaller lead, in standard errors, of a over b then, c over d at the
  end."""

  def lead(row, x, y):
    gains = np.subtract(row[y], row[x])
    error = np.std(gains, ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else 1
    return np.mean(gains) / max(error, 1e-9)

  return min(lead(then, a, b), lead(end, c, d))


def gains(run, *, rules, sizes, seeds):
  """LEARN: the best rule's gain over AdamW is smaller at the larger size.

  Args:
    rules, seeds: as for `first`. sizes: two, the larger last.
  """
  curves, seconds, chosen = _both(run, rules, sizes, seeds)
  found = {}
  for size, each in curves.items():
    end = _end(each)
    best = min((r for r in end if r != PLAIN), key=lambda r: np.mean(end[r]))
    found[f'{size}: {best} under {PLAIN}'] = [
      a - b for a, b in zip(end[PLAIN], end[best], strict=True)
    ]
  small, large = found
  findings = [ablation.less(found, large, small, 0.0, seconds)]
  return _outcome(run, found, findings, rules, seconds, chosen)


def _outcome(run, found, findings, rules, seconds, chosen):
  c = run.config
  trials = max(map(len, rules.values()))
  return ablation.outcome(
    run, found, findings, 'bits per byte',
    f'{c.train.steps} steps, {families.tokens(c):,} tokens; {trials} learning '
    f'rates a rule, tried with the first seed, best of them {chosen}',
    seconds,
  )  # fmt: skip
