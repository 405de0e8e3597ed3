"""Claims about finding faults, and about what finding them sooner gains (SIM).

Of C4D (arXiv:2406.04594). Delays are drawn, failures are drawn, costs are
given, but for those of `with_a_ledger`, which trains.
"""

import dataclasses
import itertools
import math
import statistics
import tempfile

import numpy as np

from paraxis.configs.base import errors
from paraxis.sharding.planner import failures
from paraxis.sharding.planner import stragglers
from paraxis.train import loop
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts
from paraxis.train.run import goodput

KINDS = ('link', 'sender', 'receiver', 'rank')
HOUR = 3600
BARRIERS = 8  # that a weaker fault is looked for at
_TAKEN = 1e-3, 1.0  # seconds of a transfer, of the work before a barrier
_NOTHING = lambda *given: []


def no_links():
  """Knock-out: cells of the matrix are not looked at."""
  return knockouts.patched(stragglers, 'links', _NOTHING)


def no_senders():
  """Knock-out: rows of the matrix are not looked at."""
  return knockouts.patched(stragglers, 'senders', _NOTHING)


def no_receivers():
  """Knock-out: columns of the matrix are not looked at."""
  return knockouts.patched(stragglers, 'receivers', _NOTHING)


def no_lateness():
  """Knock-out: arrivals at barriers are not looked at."""
  return knockouts.patched(stragglers, 'late_ranks', _NOTHING)


def three_deviations():
  """Knock-out: the bound of one test, however many there are."""
  return knockouts.patched(stragglers, 'threshold', lambda *given: 3.0)


def nothing_lost():
  """Knock-out: what was done before a failure is kept without a checkpoint."""
  kept = lambda training, time: training.work(time) / training.period
  return knockouts.patched(failures.Training, 'commits', kept)


def _drawn(rng, ranks, noise, barriers=1, fault='', slower=1.0):
  """(delays, lateness, [(kind, ranks)] that is to be found)."""
  delay, work = _TAKEN
  delays = delay * np.exp(noise * rng.standard_normal((ranks, ranks)))
  arrival = work * (1 + noise * rng.standard_normal((barriers, ranks)))
  i, j = map(int, rng.choice(ranks, 2, replace=False))
  who = {'link': (i, j), 'sender': (i,), 'receiver': (j,), 'rank': (i,)}
  if fault == 'rank':
    arrival[:, i] *= slower
  elif fault:
    rows = slice(None) if fault == 'receiver' else i
    columns = slice(None) if fault == 'sender' else j
    delays[rows, columns] *= slower
  wanted = [(fault, who[fault])] if fault else []
  return delays, arrival - arrival.min(1, keepdims=True), wanted


def _right(seed, draws, *given):
  """Share of draws in which all that is wrong, and nothing else, is found."""
  rng, right = np.random.default_rng(seed), 0
  for _ in range(draws):
    delays, late, wanted = _drawn(rng, *given)
    found = stragglers.find(delays, late)
    right += [(f.kind, f.ranks) for f in found] == wanted
  return right / draws


def found(run, *, fault, ranks, slower, weaker, noise, draws):
  """SIM: the fault and the ranks it is at are found, and nothing else.

  Args:
    fault: of KINDS. ranks: of the matrix. slower: how many times; weaker: a
      fault whose accuracy is reported, not claimed. noise: deviation, as a
      share of a delay. draws: matrices with one fault each.
  """
  if fault not in KINDS:
    raise errors.UserError(f'{fault=} is not one of {", ".join(KINDS)}.')
  right = _right(0, draws, ranks, noise, 1, fault, slower)
  sizes = sorted({8, 16, ranks})
  weak = [_right(n, draws, n, noise, BARRIERS, fault, weaker) for n in sizes]
  told = '/'.join(f'{x:.1%}' for x in weak)
  return claims.Outcome(
    f'all of {draws}',
    f'{right:.1%}',
    f'drawn, not measured: {ranks} ranks, noise {noise:.0%} of a delay, '
    f'{slower:g} times slower, one barrier; at {weaker:g} times, no claim: '
    f'{told} with {"/".join(map(str, sizes))} ranks, {BARRIERS} barriers',
    right == 1,
  )


def silent(run, *, ranks, noise, draws):
  """SIM: nothing is found where nothing is wrong.

  Args:
    ranks, noise, draws: as for `found`.
  """
  alarms = round((1 - _right(1, draws, ranks, noise)) * draws)
  return claims.Outcome(
    'no alarm',
    f'{alarms} of {draws:,}',
    f'drawn: {ranks} ranks, normal noise of {noise:.0%}; the bound allows '
    f'{draws * stragglers.ALPHA:g}, from the number of tests',
    not alarms,
  )


def _simulated(costs, interval, hours, lost, seeds):
  """[failures.Account] of runs that fail about so many times each."""
  goodput = failures.expected(costs, interval=interval, rate=1 / hours / HOUR)
  steps = math.ceil(lost * hours * HOUR * goodput / costs['step'])
  return [
    failures.run(
      costs, interval=interval, rate=1 / hours / HOUR, steps=steps, seed=seed
    )
    for seed in range(seeds)
  ]


def _goodput(*given):
  return statistics.fmean(account.goodput for account in _simulated(*given))


def _of_errors(*given):
  return statistics.fmean(account.of_errors for account in _simulated(*given))


def goodput_formula(
  run, *, costs, hours, intervals, detect, lost, seeds, within
):
  """SIM: goodput against failure rate, detection and interval: the formula.

  Args:
    costs: of failures.run, without 'detect'. hours: [between failures].
      intervals: [steps]. detect: [seconds]. lost: failures in a run. seeds: of
      runs. within: share of the formula's goodput.
  """
  return _against_the_formula(
    costs, hours, intervals, detect, lost, seeds, within, 'costs are assumed'
  )


def _against_the_formula(
  costs, hours, intervals, detect, lost, seeds, within, whose
):
  worst, rows, falls = 0.0, {}, True
  for h, d in itertools.product(sorted(hours), sorted(detect)):
    given, row = costs | {'detect': d}, []
    for n in intervals:
      wanted = failures.expected(given, interval=n, rate=1 / h / HOUR)
      row.append(_goodput(given, n, h, lost, seeds))
      worst = max(worst, abs(row[-1] / wanted - 1))
    rows[h, d] = row
  for (h, d), row in rows.items():  # fewer failures, sooner known: more goodput
    less = [rows[h, other] for other in detect if other > d]
    less += [rows[other, d] for other in hours if other < h]
    falls &= all(a > b for low in less for a, b in zip(row, low, strict=True))
  table = '; '.join(
    f'every {h:.3g} h, known after {d:g} s: '
    + '/'.join(f'{x:.3f}' for x in row)
    for (h, d), row in rows.items()
  )
  seconds = '/'.join(f'{n * costs["step"]:.4g}' for n in intervals)
  return claims.Outcome(
    f'formula +-{within:.0%}',
    f'{worst:.2%} off',
    f'simulated, {seeds} runs of {lost} failures; goodput with a save every '
    f'{seconds} s, {table}; {whose}',
    bool(worst <= within and falls),
  )


class _FailedError(Exception):
  """What ends a training on purpose."""


def _ledger(run, steps, every, fails):
  """Costs of a run that fails after so many steps and is started again."""

  def fail(step, *_):
    if step == fails:
      raise _FailedError

  config = dataclasses.replace(
    run.config,
    train=dataclasses.replace(run.config.train, steps=steps),
    checkpoint=dataclasses.replace(run.config.checkpoint, every=every),
  )
  quiet = lambda line: None
  with tempfile.TemporaryDirectory() as folder:
    try:
      loop.run(config, folder, callbacks=[fail], say=quiet)
    except _FailedError:
      loop.run(config, folder, say=quiet)
    return goodput.costs(folder)


def with_a_ledger(
  run, *, trained, apart, intervals, detect, lost, seeds, within
):
  """SIM: `goodput_formula` with the costs that a run's own ledger states.

  Args:
    trained: of the run that is trained here, dict(steps, every: between saves,
      fails: after how many an exception ends it once). apart: [times of the
      longest interval, between failures]. Others: as for `goodput_formula`.
  """
  costs = _ledger(run, **trained)
  longest = max(intervals) * costs['step'] / HOUR
  hours = [times * longest for times in apart]
  told = ', '.join(f'{name} {seconds:.2g}' for name, seconds in costs.items())
  ratios = []
  for h in hours:
    n = failures.young(costs | {'detect': 0}, 1 / h / HOUR)
    late, soon = (
      _of_errors(costs | {'detect': d}, n, h, lost, seeds)
      for d in (max(detect), min(detect))
    )
    ratios.append(f'{soon / late:.2f}')
  return _against_the_formula(
    costs, hours, intervals, detect, lost, seeds, within,
    f'costs, s, of the ledger of a run of {trained["steps"]} steps in 2 starts:'
    f' {told}; what failures cost, known soon over late, with saves by Young: '
    + '/'.join(ratios),
  )  # fmt: skip


def best_interval(run, *, costs, hours, times, lost, seeds):
  """SIM: of some intervals Young's has the most goodput.

  Args:
    costs, lost, seeds: as for `goodput_formula`, with 'detect'. hours: between
      failures. times: [of Young's interval], with 1.
  """
  young = failures.young(costs, 1 / hours / HOUR)
  found = {
    x: _goodput(costs, max(round(x * young), 1), hours, lost, seeds)
    for x in times
  }
  best = max(found, key=lambda x: found[x])
  rows = ', '.join(f'{x:g}: {goodput:.4f}' for x, goodput in found.items())
  return claims.Outcome(
    "1 of Young's",
    f'{best:g}',
    f'simulated; a failure every {hours:g} h, so a save every '
    f"{young * costs['step']:g} s; goodput by times Young's: {rows}",
    best == 1,
  )


def less_overhead(run, *, costs, hours, detect, also, lost, seeds, at_most):
  """SIM: what failures cost when they are known soon, over what they cost.

  Args:
    costs, lost, seeds: as for `goodput_formula`. hours: [between failures].
      detect: [seconds before, seconds after]. also: seconds between saves of
      another, reported case; the cases that count save by Young's formula.
    at_most: the ratio of the time that failures cost, for each of `hours`.
  """
  share = lambda d, n, h: _of_errors(costs | {'detect': d}, n, h, lost, seeds)
  ratios, rows = [], []
  for h in hours:
    n = failures.young(costs | {'detect': 0}, 1 / h / HOUR)
    before, after = (share(d, n, h) for d in detect)
    ratios.append(after / before)
    rows.append(f'{h:g} h: {before:.1%} to {after:.1%}')
  n = round(also / costs['step'])
  slow = [share(d, n, hours[-1]) for d in detect]
  return claims.Outcome(
    f'<= {at_most:g}',
    '/'.join(f'{ratio:.2f}' for ratio in ratios),
    f'simulated, costs assumed: {costs}, detection after {detect[0]:g} and '
    f'{detect[1]:g} s, all else the same; of the wall, by hours between '
    f'failures, {"; ".join(rows)}; with a save every {also:g} s only '
    f'{slow[1] / slow[0]:.2f} ({hours[-1]:g} h)',
    max(ratios) <= at_most,
    'direction only' if max(ratios) <= at_most else '',
  )
