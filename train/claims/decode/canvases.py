"""Claims about masked models that are decoded in any order, on lists.

Models of train/claims/on_lists.py under policies of decode/unmask/policies.py
(arXiv:2510.04767).
"""

import pathlib

import numpy as np

from paraxis.train.claims import ablation
from paraxis.train.claims import harness
from paraxis.train.claims import knockouts
from paraxis.train.claims import on_lists
from paraxis.train.claims import tasks
from paraxis.train.plot import figures
from paraxis.train.run import workdir as workdir_lib

ERRORS = 3  # standard errors above a ceiling that are no chance
MARKERS = 'os^D'  # of policies that have the same colour


def judged(found):
  """(share right, its ceiling, standard errors above, calls a text).

  The ceiling is 1 less what calls were to lose; errors are of the calls that
  stayed right (lists.py).
  """
  calls = [pair for _, pairs, *_ in found for pair in pairs]
  likely, kept = np.array(calls, float).T
  lost = (1 - likely).sum() / len(found)
  error = (likely * (1 - likely)).sum() ** 0.5
  above = (kept - likely).sum() / error if error else 0.0
  share = np.mean([ok for ok, *_ in found])
  return share, 1 - lost, above, np.mean([x[2] for x in found])


def ceilings(run, *, task, fields, policies, shown, lists_of, learned, seeds):
  """LEARN: no policy answers more lists than tokens drawn together allow.

  Args:
    task: fields of lists.Lists. fields: of the training. policies: {name:
      fields of decode.unmask}; 'one by one', 'all at once' among them. shown:
      those that take places for what was drawn there: not judged (lists.py).
      lists_of: [[items, ..], lists of each for a seed]. learned: [least share
      of lists, shuffles apart, that are right one by one, least share by which
      shuffles at once must stay below those one by one].
  """
  task, (sizes, rows) = tasks.make('lists', **task), lists_of
  models, seconds = on_lists.models(run, task, fields, seeds)
  found, nats, above, most = {}, {}, [], -np.inf
  for name, policy in policies.items():
    for operation in task.operations:
      every = []
      for n in sizes:
        drawn = [
          pair
          for seed, (made, _) in zip(seeds, models, strict=True)
          for pair in on_lists.answers(
            made, task, operation, n, policy, rows, seed
          )
        ]
        every += drawn
        if name in shown:
          continue
        errors = judged(drawn)[2]
        most = max(most, errors)
        if errors > ERRORS:
          above.append(f'{name}, {operation} of {n}: {errors:.1f}')
      found[name, operation] = judged(every)
      nats[name, operation] = np.mean([x[3] for x in every])
  path = _draw(found, policies, shown, run)
  run.say(f'wrote {path}')
  run.say(_table(found, nats, policies, task.operations))
  others = [o for o in task.operations if o != 'shuffle']
  least = min(found['one by one', o][0] for o in others)
  at_once, one = (
    found[name, 'shuffle'][0] for name in ('all at once', 'one by one')
  )
  ok = not above and least >= learned[0] and one - at_once >= learned[1]
  caveat = (
    f'lists of {", ".join(map(str, sizes))} items, {rows} of each for a seed, '
    f'{len(policies)} policies; {", ".join(others)} one by one: at least '
    f'{least:.1%} right; shuffle {one:.1%} one by one, {at_once:.1%} at once '
    f'(ceiling {found["all at once", "shuffle"][1]:.1%}); '
    f'{seconds:,.0f} CPU-seconds a training'
  )
  if above:
    caveat += f'; ABOVE, in standard errors: {"; ".join(above)}'
  for name in shown:
    each = (f'{o} {found[name, o][2]:+.1f}' for o in task.operations)
    caveat += f'; not judged, {name}: {", ".join(each)}'
  return harness.Outcome(
    f'at most {ERRORS} standard errors above', f'{most:+.1f} at most', caveat,
    ok, seeds=len(seeds),
  )  # fmt: skip


def calls(run, *, task, fields, policies, operations, bounds, lists_of, seeds):
  """LEARN: calls a text of one policy over those of another, as many right.

  Args:
    task, fields: as of `ceilings`. policies: [slow, fast], fields of
      decode.unmask. operations: of lists.OPERATIONS. bounds: [least ratio, most
      of the share of right answers that the fast one may lose]. lists_of:
      [items, lists for an operation and a seed].
  """
  (n, rows), (at_least, lost) = lists_of, bounds
  task = tasks.make('lists', **task)
  models, seconds = on_lists.models(run, task, fields, seeds)
  ratios, losses, wrong = [], [], []
  for seed, (made, _) in zip(seeds, models, strict=True):
    sums = []
    for policy in policies:
      each = [
        pair for operation in operations
        for pair in on_lists.answers(
          made, task, operation, n, policy, rows, seed, 0.0
        )
      ]  # fmt: skip
      sums.append(
        (np.mean([x[2] for x in each]), np.mean([ok for ok, *_ in each]))
      )
    ratios.append(sums[0][0] / sums[1][0])
    losses.append(sums[0][1] - sums[1][1])
    wrong.append(1 - sums[0][1])
  found = ablation.outcome(
    run,
    {'fewer calls': ratios, 'right answers lost': losses},
    on_lists.findings((ratios, losses, wrong), (at_least, lost), seconds),
    'calls of one by one over ours',
    f'{", ".join(operations)} of {n} items, {rows} lists of each for a seed, '
    'greedy',
    seconds,
  )
  return found


def _table(found, nats, policies, operations):
  """Share right (ceiling), calls and nats, policy by operation, as text."""
  head = ['policy', *operations]
  rows = [
    [name, *(f'{found[name, o][0]:.1%} ({found[name, o][1]:.1%}), '
             f'{found[name, o][3]:.1f}, {nats[name, o]:.2f}'
             for o in operations)]
    for name in policies
  ]  # fmt: skip
  wide = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
  lines = [
    'share right (ceiling), calls a text, nats: the conditional total '
    'correlations of tokens that are drawn together'
  ]
  for row in (head, *rows):
    lines.append('  '.join(map(str.ljust, row, wide)).rstrip())
  return '\n'.join(lines)


def _draw(found, policies, shown, run):
  """Share of right shuffles and replacements over calls a text -> a PNG.

  A policy has a colour and a form, hollow if it is one of `shown`; its ceiling
  is a dash.
  """
  fig, kinds = figures.make(10, 4.2), len(figures.COLOURS)
  axes = fig.subplots(1, 2, sharey=True)
  for ax, operation in zip(axes, ('shuffle', 'replace'), strict=True):
    for i, name in enumerate(policies):
      share, most, _, count = found[name, operation]
      colour, hollow = figures.COLOURS[i % kinds], name in shown
      ax.plot(
        count, share, MARKERS[i // kinds], color=colour,
        markerfacecolor='none' if hollow else colour,
        label=f'{name} (not judged)' if hollow else name,
      )  # fmt: skip
      ax.plot(count, most, '_', color='#333333', markersize=14)
    ax.plot([], [], '_', color='#333333', label='ceiling of a policy')
    ax.set(xlabel='calls a text', title=operation, ylim=(0, 1.05))
    figures.tidy(ax)
  axes[0].set_ylabel('right answers')
  fig.legend(*axes[0].get_legend_handles_labels(), loc='outside right center')
  path = pathlib.Path(workdir_lib.prepare(run.results)) / 'ceilings.png'
  return figures.save(fig, path)


def drawn_alone():
  """Knock-out: answers are drawn one token a call, so that every token sees
  those before it, and are said to be drawn at once."""

  def together(trace):
    return [{c: t for call in drawn(trace) for c, t in call.items()}]

  drawn = on_lists.drawn
  return knockouts.patched(on_lists, 'drawn', together)
