"""Simulated time of drafting beside judging (PEARL, arXiv:2408.11850).

Two devices: the draft model makes a token in 1, the model judges in c. Every
draft is accepted with the same probability, on its own. Plain speculation
drafts, then judges; PEARL does both at once, and drafts are lost when a token
before them is rejected. Tasks and what they wait for are run by the event
simulator (sharding/planner/events.py); the best length of drafts is taken for
plain speculation, c for PEARL, as the paper says.
"""

import sys

import numpy as np

from paraxis.sharding.planner import events
from paraxis.train.claims import harness as claims
from paraxis.train.claims import knockouts

DEVICES = {'draft': 'one', 'target': 'one'}


def _run(accepted, most):
  """How many of the next `most` drafts are accepted, up to the first that is
  not; accepted: iterator of bool."""
  n = 0
  while n < most and next(accepted):
    n += 1
  return n


def _coins(probability, seed):
  rng = np.random.default_rng(seed)
  while True:
    yield from rng.random(4096) < probability


def plain_calls(tokens, width, probability, seed):
  """Calls of the model that `tokens` tokens take, `width` drafts a call."""
  coins, made, calls = _coins(probability, seed), 0, 0
  while made < tokens:
    made += _run(coins, width) + 1
    calls += 1
  return calls


def pearl_calls(tokens, width, probability, seed):
  """As `plain_calls`, where `width` drafts are made beside each call.

  A call judges the drafts of the call before but the first, which that call
  has judged, and the first of those that are made meanwhile.
  """
  coins, made, calls, there = _coins(probability, seed), 0, 0, False
  while made < tokens:
    judged = width if there else 1
    n = _run(coins, judged)
    there = n == judged
    made += n if there else n + 1
    calls += 1
  return calls


def span(calls, width, judging, side_by_side):
  """Time of so many calls of `width` drafts each, as the simulator says.

  Args:
    judging: time of a call; a draft takes 1.
    side_by_side: whether drafts are made while the model judges.
  """
  tasks = []
  for i in range(calls):
    last = (('target', i - 1),) if i else ()
    drafted = last + ((('draft', i - 1, width - 1),) if i else ())
    for c in range(width):
      first = drafted if side_by_side else last
      after = (('draft', i, c - 1),) if c else first
      tasks.append(events.Task(('draft', i, c), 1, after, 'draft'))
    after = drafted if side_by_side else (('draft', i, width - 1),)
    tasks.append(events.Task(('target', i), judging, after, 'target'))
  return float(max(x.end for x in events.run(tasks, DEVICES).values()))


def _a_token(calls_of, tokens, width, judging, probability, seed, overlaps):
  """Time a token; of one call's span, which all calls take."""
  few = 4
  each = span(2 * few, width, judging, overlaps)
  each = (each - span(few, width, judging, overlaps)) / few
  return each * calls_of(tokens, width, probability, seed) / tokens


def speedups(probabilities, ratios, tokens, seed, longest):
  """{(probability, c): plain speculation's time over PEARL's}."""
  found = {}
  for p in probabilities:
    for c in ratios:
      best = min(
        _a_token(plain_calls, tokens, width, c, p, seed, False)
        for width in range(1, longest + 1)
      )
      ours = _a_token(pearl_calls, tokens, c, c, p, seed, True)
      found[p, c] = best / ours
  return found


def pearl(run, *, probabilities, ratios, at, at_least, tokens, seed, longest):
  """SIM: makespan of plain speculation, at its best length, over PEARL's.

  Args:
    probabilities: of acceptance. ratios: c, time of a call over a draft's.
    at: the probability that is claimed, at every c. at_least: the speedup.
    tokens: that are made. seed: of what is accepted. longest: plain draft.
  """
  found = speedups(probabilities, ratios, tokens, seed, longest)
  lines = ['accepted ' + ''.join(f'   c={c:<3}' for c in ratios)]
  for p in probabilities:
    lines.append(f'{p:8.2f} ' + ''.join(f'{found[p, c]:8.2f}' for c in ratios))
  run.say('\n'.join(lines))
  ours = [found[at, c] for c in ratios]
  slow = sorted({p for (p, _), speedup in found.items() if speedup < 1})
  slower = ', '.join(map(str, slow)) or 'no'
  return claims.Outcome(
    f'>= {at_least:g} x at {at:g}',
    f'{min(ours):.2f} to {max(ours):.2f} x',
    f'c = {ratios[0]} to {ratios[-1]}, {tokens:,} tokens; slower than plain '
    f'speculation for some c at acceptance {slower}',
    min(ours) >= at_least,
  )


def in_turn():
  """Knock-out: drafts wait for the call that they should run beside."""

  def waits(calls, width, judging, side_by_side):
    del side_by_side
    return real(calls, width, judging, False)

  real = span
  return knockouts.patched(sys.modules[__name__], 'span', waits)
